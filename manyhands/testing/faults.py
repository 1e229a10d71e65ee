# SPDX-License-Identifier: Apache-2.0
"""Failures as values that are scheduled: `FaultPlan().kill(rank=1, at_step=3)`."""

import os
import signal
import time

import msgspec


class Fault(msgspec.Struct, frozen=True):
    kind: str
    rank: int
    at_step: int
    seconds: float = 0.0


class FaultPlan(msgspec.Struct, frozen=True):
    """Give it to `mh.train(..., faults=plan)`. A fault strikes as its worker begins the step."""

    faults: tuple[Fault, ...] = ()

    def kill(self, *, rank: int, at_step: int) -> "FaultPlan":
        return self._with(Fault("kill", rank, at_step))

    def fail(self, *, rank: int, at_step: int) -> "FaultPlan":
        """An exception, as from user code."""
        return self._with(Fault("fail", rank, at_step))

    def exit(self, *, rank: int, at_step: int) -> "FaultPlan":
        """The process ends without a word."""
        return self._with(Fault("exit", rank, at_step))

    def out_of_memory(self, *, rank: int, at_step: int) -> "FaultPlan":
        return self._with(Fault("out_of_memory", rank, at_step))

    def slow(self, *, rank: int, at_step: int, seconds: float) -> "FaultPlan":
        return self._with(Fault("slow", rank, at_step, seconds))

    def _with(self, fault: Fault) -> "FaultPlan":
        return FaultPlan((*self.faults, fault))

    def strike(self, rank: int, step: int) -> None:
        """Called by the worker before each of its steps."""
        for fault in self.faults:
            if (fault.rank, fault.at_step) == (rank, step):
                _strike(fault)


def _strike(fault: Fault) -> None:
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
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
