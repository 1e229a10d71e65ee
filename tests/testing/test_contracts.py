"""Every implementation keeps its contract."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from manyhands.checkpoint.commit import FolderStorage
from manyhands.launch.engines.fork_agent import WorkerExit
from manyhands.launch.engines.inline_thread import Inline
from manyhands.launch.engines.launcher import Launcher
from manyhands.launch.engines.local_processes import Local
from manyhands.launch.engines.memory_segments import create_segments
from manyhands.testing.contracts import (
    F32,
    CollectiveContract,
    LauncherContract,
    StorageContract,
    orders,
)
from manyhands.training.collective.collective import FACTS, Collective, Sizes
from manyhands.training.collective.shared_memory import SharedMemory, SharedRoom
from manyhands.training.collective.torch_group import DeviceSlots, TorchGroup
from manyhands.training.memory.memory import Memory
from manyhands.values.errors import Broken
from manyhands.values.run_folder import RunDir, write_whole
from manyhands.values.world import World

SIZES = Sizes(lanes={F32: 8}, slots=3, message_bytes=64)


class TestFolder(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> FolderStorage:
        run = RunDir(tmp_path)
        run.checkpoints.mkdir()
        return FolderStorage(run)

    def test_leftovers_are_swept(self, storage: FolderStorage) -> None:
        storage.put(3, 1, "model", [b"half"])
        storage.put(3, 2, "model", [b"again"])
        storage.sweep()
        assert list(storage.run.checkpoints.iterdir()) == []


class Patient:
    """Gives up when it is told that nobody comes."""

    def __init__(self, told: threading.Event | None = None) -> None:
        self.told, self.entered = told or threading.Event(), threading.Event()

    def broken(self) -> bool:
        return self.told.is_set()

    def __enter__(self) -> None:
        self.entered.set()

    def __exit__(self, *error: object) -> None: ...


class TestShared(CollectiveContract):
    """Threads stand for processes here; test_same_bits uses the real thing."""

    @pytest.fixture
    def segment(self) -> Iterator[int]:
        fd = os.memfd_create("test")
        os.ftruncate(fd, 1 << 40)
        yield fd
        os.close(fd)

    @pytest.fixture
    def on_ranks(self, segment: int) -> Callable[..., list[object]]:
        def run(
            ranks: int, body: Callable[[int, Collective], object], generation: int = 1
        ) -> list[object]:
            def work(rank: int) -> object:
                world, room = World(rank, ranks), SharedRoom(Memory(segment), SIZES)
                shared = SharedMemory(world, room, generation, spin=False, patience=Patient())
                result = body(rank, shared)
                shared.close()
                return result

            with ThreadPoolExecutor(ranks) as pool:
                return list(pool.map(work, range(ranks), timeout=20))

        return run

    def test_a_waiter_is_woken_when_it_is_told_that_nobody_comes(self, segment: int) -> None:
        told = threading.Event()
        patience = Patient(told)
        room = SharedRoom(Memory(segment), SIZES)
        alone = SharedMemory(World(0, 2), room, 1, spin=True, patience=patience)
        threading.Timer(0.1, told.set).start()
        with pytest.raises(Broken, match="waiting for rank 1"):
            alone.share({}, [])
        assert patience.entered.is_set(), "others can tell that it waits"

    def test_what_a_view_leaves_behind_is_there_for_the_next(
        self, on_ranks: Callable[..., list[Any]]
    ) -> None:
        """Three computed step 7 and are gone before it was taken; two others go on."""

        def compute(rank: int, shared: Collective) -> None:
            shared.slots[0][F32].fill_(rank + 1)
            shared.gather(np.full(6, rank, dtype=np.uint8), FACTS, 6)
            shared.gather(np.full(6, 70 + rank, dtype=np.uint8), FACTS, 7)

        def come_after(rank: int, shared: Collective) -> list[object]:
            left = [shared.left_by(r)[0][F32].tolist() for r in range(3)]
            recalled = [m.tolist() for m in shared.recall(FACTS, 7)]
            shared.share({}, [])  # all have read before anybody writes
            shared.gather(np.full(4, 90 + rank, dtype=np.uint8), FACTS, 7)
            return [left, recalled, [m.tolist() for m in shared.recall(FACTS, 7)]]

        on_ranks(3, compute, 1)
        for left, recalled, again in on_ranks(2, come_after, 2):
            assert left == [[r + 1.0] * 8 for r in range(3)]
            assert recalled == [[70 + r] * 6 for r in range(3)]
            assert again == [[90] * 4, [91] * 4], "the newest view has computed it again"

    def test_a_message_that_was_not_gathered_by_all_hides_no_older_step(self, segment: int) -> None:
        """One of two has written its facts of step 8 when the other dies."""
        room = SharedRoom(Memory(segment), SIZES)
        told = threading.Event()

        def work(rank: int) -> list[list[int]]:
            shared = SharedMemory(World(rank, 2), room, 1, spin=False, patience=Patient(told))
            shared.gather(np.full(6, 70 + rank, dtype=np.uint8), FACTS, 7)
            if rank == 1:
                return []
            told.set()
            with pytest.raises(Broken):
                shared.gather(np.full(6, 80, dtype=np.uint8), FACTS, 8)
            return [m.tolist() for m in shared.recall(FACTS, 7)]

        with ThreadPoolExecutor(2) as pool:
            recalled, _ = pool.map(work, range(2), timeout=20)
        assert recalled == [[70] * 6, [71] * 6]


@pytest.fixture(scope="module")
def contract_local() -> Iterator[Local]:
    local = Local("manyhands.testing.contracts:contract_worker", create_segments())
    yield local
    local.close()


class TestGroup(CollectiveContract):
    """Over gloo; every rank is a process."""

    @pytest.fixture
    def on_ranks(self, contract_local: Local, tmp_path: Path) -> Callable[..., list[object]]:
        def run(ranks: int, body: Callable[[int, Collective], object]) -> list[object]:
            results = [tmp_path / f"result-{rank}" for rank in range(ranks)]

            def work(rank: int) -> None:
                group = TorchGroup(
                    World(rank, ranks),
                    DeviceSlots(SIZES, torch.device("cpu")),
                    backend="gloo",
                    rendezvous=tmp_path / "rendezvous",
                    device=torch.device("cpu"),
                    patience=Patient(),
                )
                write_whole(results[rank], cloudpickle.dumps(body(rank, group)), durable=False)
                signal.pause()  # not to go before the others have read all that was sent

            for rank in range(ranks):
                call = tmp_path / f"call-{rank}"
                call.write_bytes(cloudpickle.dumps(partial(work, rank)))
                contract_local.start(
                    rank, orders(f"call {call}".encode()), tmp_path / f"log-{rank}"
                )
            exits: dict[int, int] = {}
            while not all(r in exits or result.exists() for r, result in enumerate(results)):
                exits |= {
                    s.worker: s.code for s in contract_local.poll() if isinstance(s, WorkerExit)
                }
                time.sleep(0.005)
            contract_local.stop()
            for rank, code in exits.items():  # a body may kill its worker
                assert code == -signal.SIGKILL, (tmp_path / f"log-{rank}").read_text()
            return [cloudpickle.loads(r.read_bytes()) if r.exists() else None for r in results]

        return run

    def test_everyone_gets_what_each_owner_shares(self, on_ranks: Callable[..., list[Any]]) -> None:
        def body(rank: int, group: Collective) -> list[float]:
            lane = torch.full((8,), float(rank))
            group.share({F32: lane}, [{F32: (0, 3)}, {F32: (3, 3)}, {F32: (3, 8)}])
            return lane.tolist()

        assert on_ranks(3, body) == [[0.0] * 3 + [2.0] * 5] * 3

    def test_whoever_waits_for_one_who_is_killed_is_told(
        self, on_ranks: Callable[..., list[Any]]
    ) -> None:
        def body(rank: int, group: Collective) -> str:
            group.gather(np.zeros(6, dtype=np.uint8))
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(Broken) as caught:
                group.gather(np.zeros(6, dtype=np.uint8))
            return str(caught.value)

        told, nothing = on_ranks(2, body)
        assert "the exchange with other workers failed" in told and nothing is None


class TestInline(LauncherContract):
    @pytest.fixture
    def launcher(self) -> Iterator[Launcher]:
        inline = Inline("manyhands.testing.contracts:contract_worker", create_segments())
        yield inline
        inline.close()


class TestLocal(LauncherContract):
    @pytest.fixture
    def launcher(self, contract_local: Local) -> Launcher:
        return contract_local

    def test_a_signal_is_reported_as_such(self, launcher: Launcher, tmp_path: Path) -> None:
        launcher.start(4, orders(b"kill 9"), tmp_path / "log")
        (exit,) = self.exits(launcher, 1)
        assert exit.code == -signal.SIGKILL

    def test_stopping_ends_everyone(self, launcher: Launcher, tmp_path: Path) -> None:
        for worker in range(3):
            launcher.start(worker, orders(b"sleep 0"), tmp_path / "log")
        pids = self.pids(launcher, 3)
        launcher.stop()
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)

    def test_what_a_worker_started_is_killed_with_it(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        launcher.start(0, orders(b"parent 60"), tmp_path / "log")
        self.pids(launcher, 1)
        log = tmp_path / "log"
        while not (said := log.read_text() if log.exists() else ""):
            time.sleep(0.005)
        launcher.kill(0)
        self.exits(launcher, 1)
        wait_for_end(int(said))

    def test_an_agent_that_is_killed_takes_its_workers_along(self, tmp_path: Path) -> None:
        entry = "manyhands.testing.contracts:contract_worker"
        with closing(Local(entry, create_segments())) as local:
            local.start(0, orders(f"write {local.fds[1]}".encode()), tmp_path / "log")
            self.exits(local, 1)
            local.start(1, orders(b"sleep 0"), tmp_path / "log")
            (pid,) = self.pids(local, 1)
            agent = local.agent.pid
            local.agent.kill()
            (exit,) = self.exits(local, 1)
            assert f"({agent}) was killed by signal 9 (SIGKILL)" in exit.why
            assert (exit.worker, exit.pid, exit.code) == (1, pid, -signal.SIGKILL)
            wait_for_end(pid)
            assert os.pread(local.fds[1], 5, 0) == b"hello", "the memory does not go with it"
            local.start(2, orders(b"exit 5"), tmp_path / "log")
            (exit,) = self.exits(local, 1)
            assert (exit.worker, exit.code) == (2, 5), "another agent has taken its place"


def wait_for_end(pid: int) -> None:
    """Until a process whose parent is gone too, so that somebody else reaps it, runs no more."""
    for _ in range(500):
        with suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                time.sleep(0.01)
                continue
        return
    raise AssertionError(f"process {pid} outlived whom it should not")
