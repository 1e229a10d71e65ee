# SPDX-License-Identifier: Apache-2.0
"""Failures as values that are scheduled: `FaultPlan().kill(rank=1, at_step=3)`.

`rank` is that of a worker when the run begins; workers that are started later count on from there
(with two workers, the first replacement is 2). A fault strikes once in each worker, at a moment:

    begin     as the worker begins the step          share     its update is done, the others' not
    compute   before each micro-batch                save      before it copies its state
    gather    its gradients are in place             written   its files are on disk
    update    before each unit that it updates       regroup   as it takes its place in a view
    after     before it calls a task's after_step    afterwards   it has, and has not said so

and, where there is a batch loss: `batch_loss` (all embeddings are gathered) and `again` (before
each micro-batch, the second time).
"""

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import msgspec


class Fault(msgspec.Struct, frozen=True):
    kind: str
    rank: int
    at_step: int
    seconds: float = 0.0
    at: str = "begin"
    times: float = 1.0


class FaultPlan(msgspec.Struct, frozen=True):
    """Give it to `mh.train(..., faults=plan)`."""

    faults: tuple[Fault, ...] = ()
    history: str = ""
    """A folder into which workers at different steps write what they push, apply and read."""

    def recording(self, folder: str) -> "FaultPlan":
        return FaultPlan(self.faults, folder)

    def kill(self, *, rank: int, at_step: int, at: str = "begin") -> "FaultPlan":
        return self._with(Fault("kill", rank, at_step, at=at))

    def hang(self, *, rank: int, at_step: int, at: str = "begin") -> "FaultPlan":
        """The whole process stops (SIGSTOP): no heartbeat any more."""
        return self._with(Fault("hang", rank, at_step, at=at))

    def loop(self, *, rank: int, at_step: int, at: str = "compute") -> "FaultPlan":
        """An endless loop, as in user code: the heartbeat goes on."""
        return self._with(Fault("loop", rank, at_step, at=at))

    def fail(self, *, rank: int, at_step: int, at: str = "compute") -> "FaultPlan":
        """An exception, as from user code."""
        return self._with(Fault("fail", rank, at_step, at=at))

    def exit(self, *, rank: int, at_step: int, at: str = "begin") -> "FaultPlan":
        """The process ends without a word."""
        return self._with(Fault("exit", rank, at_step, at=at))

    def leave(self, *, rank: int, at_step: int, at: str = "begin") -> "FaultPlan":
        """A preemption notice (SIGTERM)."""
        return self._with(Fault("leave", rank, at_step, at=at))

    def out_of_memory(self, *, rank: int, at_step: int) -> "FaultPlan":
        return self._with(Fault("out_of_memory", rank, at_step, at="compute"))

    def slow(
        self, *, rank: int, at_step: int, seconds: float = 0.0, times: float = 1.0
    ) -> "FaultPlan":
        """Sleep once for `seconds`; or from this step on take `times` as long as usual."""
        return self._with(Fault("slow", rank, at_step, seconds=seconds, times=times))

    def corrupt(self, *, rank: int, at_step: int) -> "FaultPlan":
        """From this step on, one number of each of its gradients is wrong."""
        return self._with(Fault("corrupt", rank, at_step, at="never"))

    def _with(self, fault: Fault) -> "FaultPlan":
        return FaultPlan((*self.faults, fault), self.history)

    def strike(self, worker: int, step: int, moment: str, struck: set["Fault"]) -> None:
        """Called by the worker at every moment; `struck` is its own memory."""
        for fault in self.faults:
            here = (fault.rank, fault.at_step, fault.at) == (worker, step, moment)
            if here and fault not in struck:
                struck.add(fault)
                _strike(fault)

    def corrupt_here(self, worker: int, step: int, parameters: Mapping[str, Any]) -> None:
        """Called with the gradients of each micro-batch in place."""
        for fault in self.faults:
            if fault.kind == "corrupt" and fault.rank == worker and step >= fault.at_step:
                first = next(p for p in parameters.values() if p.grad is not None)
                first.grad.view(-1)[0] += 1e-3

    def drag(self, worker: int, step: int, seconds: float) -> None:
        """Called after each micro-batch, with the time that it took."""
        for fault in self.faults:
            if (
                fault.kind == "slow"
                and fault.times > 1
                and fault.rank == worker
                and step >= fault.at_step
            ):
                time.sleep(seconds * (fault.times - 1))


def _strike(fault: Fault) -> None:
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "leave":
            os.kill(os.getpid(), signal.SIGTERM)
        case "loop":
            while True:
                time.sleep(0.01)
        case "exit":
            os._exit(0)
        case "fail":
            raise RuntimeError("a fault was planned here")
        case "out_of_memory":
            import torch

            torch.empty(1 << 60, dtype=torch.uint8)
        case "slow":
            time.sleep(fault.seconds)
        case _:
            raise ValueError(fault.kind)
