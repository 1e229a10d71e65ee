# SPDX-License-Identifier: Apache-2.0
"""What every Storage, Collective and Launcher promises, as classes of tests.

Subclass one and return yours from the fixture; pytest does the rest.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch

from manyhands.checkpoint.commit import StepManifest, Storage
from manyhands.launch.engines.fork_agent import WorkerExit, WorkerStarted
from manyhands.launch.engines.launcher import Launcher, WorkerPlace
from manyhands.training.collective.collective import FACTS, NORMS, OUTCOMES, Bytes, Collective
from manyhands.training.state.layout import Bounds
from manyhands.values.errors import CheckpointDamaged

F32 = torch.float32


class StorageContract:
    @pytest.fixture
    def storage(self) -> Storage:
        raise NotImplementedError("return the storage under test")

    @staticmethod
    def save(storage: Storage, step: int, content: bytes = b"weights") -> None:
        record = storage.put(step, 1, "model", [content[:3], content[3:]])
        storage.commit(StepManifest(step, {"model": record}, 1))

    def test_a_step_is_invisible_until_it_is_committed(self, storage: Storage) -> None:
        record = storage.put(10, 1, "model", [b"weights"])
        assert storage.steps() == []
        storage.commit(StepManifest(10, {"model": record}, 1))
        assert storage.steps() == [10]

    def test_what_is_read_is_what_was_written(self, storage: Storage) -> None:
        self.save(storage, 7, b"0123456789")
        assert storage.get(7, "model").read_bytes() == b"0123456789"

    def test_steps_are_ascending_and_can_be_deleted(self, storage: Storage) -> None:
        for step in (30, 4, 200):
            self.save(storage, step)
        assert storage.steps() == [4, 30, 200]
        storage.delete(30)
        assert storage.steps() == [4, 200]

    def test_a_step_can_be_saved_again(self, storage: Storage) -> None:
        self.save(storage, 5, b"old one")
        self.save(storage, 5, b"new one")
        assert storage.get(5, "model").read_bytes() == b"new one"

    def test_attempts_at_a_step_do_not_see_each_other(self, storage: Storage) -> None:
        """Those who were saving died; those who came after them save the same step again."""
        storage.put(5, 1, "model", [b"half of it"])
        storage.put(5, 1, "optimizer-01", [b"of one who is gone"])
        record = storage.put(5, 2, "model", [b"whole"])
        storage.put(5, 2, "optimizer-07", [b"its writer did not live to tell"])
        storage.commit(StepManifest(5, {"model": record}, 2))
        model = storage.get(5, "model")
        assert model.read_bytes() == b"whole"
        for stray in ("optimizer-01", "optimizer-07"):
            assert not model.with_name(stray).exists(), "only what the manifest names is committed"
            with pytest.raises(CheckpointDamaged, match="not in the step's manifest"):
                storage.get(5, stray)

    def test_a_late_attempt_does_not_touch_what_is_committed(self, storage: Storage) -> None:
        self.save(storage, 5, b"committed")
        storage.put(5, 9, "model", [b"too late"])
        assert storage.get(5, "model").read_bytes() == b"committed"

    def test_a_flipped_bit_is_noticed(self, storage: Storage) -> None:
        self.save(storage, 5)
        path = storage.get(5, "model")
        damaged = bytearray(path.read_bytes())
        damaged[2] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(CheckpointDamaged, match="damaged"):
            storage.get(5, "model")
        with pytest.raises(CheckpointDamaged, match="not in the step's manifest"):
            storage.get(5, "other")


class CollectiveContract:
    """The fixture gives a function that runs `body(rank, collective)` on `ranks` workers."""

    @pytest.fixture
    def on_ranks(self) -> Callable[..., list[object]]:
        raise NotImplementedError("return a function (ranks, body) -> results by rank")

    def test_everyone_gathers_everyones_message(
        self, on_ranks: Callable[..., list[object]]
    ) -> None:
        def body(rank: int, collective: Collective) -> list[list[int]]:
            found: list[list[int]] = []
            for turn in range(5):
                mine = np.full(6, 10 * turn + rank, dtype=np.uint8)
                found.append([int(m[0]) for m in collective.gather(mine)])
            return found

        for result in on_ranks(3, body):
            assert result == [[10 * t, 10 * t + 1, 10 * t + 2] for t in range(5)]

    def test_kinds_of_messages_do_not_overwrite_each_other(
        self, on_ranks: Callable[..., list[object]]
    ) -> None:
        def body(rank: int, collective: Collective) -> list[list[int]]:
            def gather(value: int, kind: int) -> list[Bytes]:
                return collective.gather(np.full(6, value + rank, dtype=np.uint8), kind, value)

            facts, norms = gather(10, FACTS), gather(20, NORMS)
            outcomes = [gather(100 + 10 * turn, OUTCOMES) for turn in range(3)][-1]
            norms_again = gather(30, NORMS)  # what was gathered before it is still to be read
            return [[int(m[0]) for m in g] for g in (facts, norms, outcomes, norms_again)]

        for result in on_ranks(3, body):
            assert result == [[10, 11, 12], [20, 21, 22], [120, 121, 122], [30, 31, 32]]

    def test_what_is_recalled_is_what_was_gathered(
        self, on_ranks: Callable[..., list[object]]
    ) -> None:
        """By whoever remembers at all."""

        def body(rank: int, collective: Collective) -> bool:
            for stamp in (4, 5):
                collective.gather(np.full(6, 10 * stamp + rank, dtype=np.uint8), NORMS, stamp)
            nobody: Sequence[Bounds] = [{F32: (0, 0)}] * 3
            collective.share({F32: torch.zeros(8)}, nobody)
            for stamp in (4, 5):
                found = [m.tolist() for m in collective.recall(NORMS, stamp)]
                assert found in ([], [[10 * stamp + r] * 6 for r in range(3)])
            assert not collective.recall(NORMS, 6) and not collective.recall(FACTS, 5)
            return True

        assert on_ranks(3, body) == [True] * 3

    def test_each_owner_gets_its_stretch_of_every_slot(
        self, on_ranks: Callable[..., list[object]]
    ) -> None:
        owned: Sequence[Bounds] = [{F32: (0, 3)}, {F32: (3, 4)}, {F32: (4, 8)}]
        counts = [2, 0, 1]

        def body(rank: int, collective: Collective) -> list[list[float]]:
            for k in range(counts[rank]):
                collective.slots[k][F32].copy_(torch.arange(8) + 100.0 * rank + 10 * k)
            collective.gather(np.zeros(1, dtype=np.uint8))
            parts = collective.exchange(counts, owned)
            return [slot[F32].tolist() for slots in parts for slot in slots]

        for rank, result in enumerate(on_ranks(3, body)):
            (start, stop) = owned[rank][F32]
            offsets = (0.0, 10.0, 200.0)
            assert result == [[float(i) + o for i in range(start, stop)] for o in offsets]


class LauncherContract:
    """The fixture's workers run `contract_worker`: it does what its orders say."""

    @pytest.fixture
    def launcher(self) -> Launcher:
        raise NotImplementedError("return a launcher whose entry is contract_worker")

    @staticmethod
    def exits(launcher: Launcher, count: int) -> list[WorkerExit]:
        found: list[WorkerExit] = []
        deadline = time.monotonic() + 30
        while len(found) < count:
            assert time.monotonic() < deadline, "workers did not end"
            found += [s for s in launcher.poll() if isinstance(s, WorkerExit)]
            time.sleep(0.005)
        return found

    @staticmethod
    def pids(launcher: Launcher, count: int) -> list[int]:
        found: list[int] = []
        deadline = time.monotonic() + 30
        while len(found) < count:
            assert time.monotonic() < deadline, "workers did not start"
            found += [s.pid for s in launcher.poll() if isinstance(s, WorkerStarted)]
            time.sleep(0.005)
        return found

    def test_exit_codes_are_reported(self, launcher: Launcher, tmp_path: Path) -> None:
        launcher.start(0, orders(b"exit 0"), tmp_path / "log")
        (exit,) = self.exits(launcher, 1)
        assert (exit.worker, exit.code) == (0, 0)
        launcher.stop()
        launcher.start(1, orders(b"exit 3"), tmp_path / "log")
        (exit,) = self.exits(launcher, 1)
        assert (exit.worker, exit.code) == (1, 3)
        launcher.stop()

    def test_one_can_be_killed_however_stuck_it_is(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        if not launcher.traits.replaceable:
            pytest.skip("its workers cannot be killed, and it says so")
        launcher.start(0, orders(b"stop 0"), tmp_path / "log")
        launcher.start(1, orders(b"sleep 0"), tmp_path / "log")
        stuck, other = self.pids(launcher, 2)
        wait_for_state(stuck, "T")
        launcher.kill(0)
        (exit,) = self.exits(launcher, 1)
        assert (exit.worker, exit.pid, exit.code) == (0, stuck, -signal.SIGKILL)
        assert not os.path.exists(f"/proc/{stuck}"), "an Exit means that it is dead and was reaped"
        assert os.path.exists(f"/proc/{other}")
        launcher.kill(0)  # who is gone already is not missed
        launcher.stop()
        assert not os.path.exists(f"/proc/{other}")

    def test_the_memory_is_blank_for_the_next_run(self, launcher: Launcher, tmp_path: Path) -> None:
        launcher.start(0, orders(f"write {launcher.fds[1]}".encode()), tmp_path / "log")
        self.exits(launcher, 1)
        assert os.pread(launcher.fds[1], 5, 0) == b"hello"
        launcher.stop()
        assert os.pread(launcher.fds[1], 5, 0) == bytes(5)


def orders(text: bytes) -> Callable[[WorkerPlace], bytes]:
    """For a `contract_worker`, wherever it is going to be."""
    return lambda place: text


def wait_for_state(pid: int, state: str) -> None:
    """Until the kernel says so: "T" is stopped, "Z" dead and not reaped."""
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < deadline, f"process {pid} did not come to state {state}"
        time.sleep(0.005)


def contract_worker(orders: bytes, mark: object = None) -> int:
    verb, argument = orders.decode().split()
    match verb:
        case "exit":
            return int(argument)
        case "call":  # a function that cloudpickle has put in this file
            cloudpickle.loads(Path(argument).read_bytes())()
            return 0
        case "write":
            os.pwrite(int(argument), b"hello", 0)
            return 0
        case "kill":
            os.kill(os.getpid(), int(argument))
            return 0
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            return 0
        case "parent":
            print(subprocess.Popen(["sleep", argument]).pid, flush=True)
            signal.pause()
            return 0
        case "sleep":
            signal.pause() if threading.current_thread() is threading.main_thread() else None
            return 0
        case _:
            raise ValueError(verb)
