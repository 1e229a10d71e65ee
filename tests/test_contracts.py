"""Every implementation keeps its contract."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from manyhands.checkpoint.storage import Folder
from manyhands.errors import Broken
from manyhands.launch.agent import Exit, Started
from manyhands.launch.launchers import Inline, Launcher, Local, create_segments
from manyhands.rundir import RunDir
from manyhands.testing.contracts import (
    F32,
    CollectiveContract,
    LauncherContract,
    StorageContract,
)
from manyhands.train.collective.contract import Collective, Sizes
from manyhands.train.collective.shared import Shared
from manyhands.train.memory import Memory
from manyhands.world import World

SIZES = Sizes(lanes={F32: 8}, slots=3, message_bytes=64)


class TestFolder(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Folder:
        run = RunDir(tmp_path)
        run.checkpoints.mkdir()
        return Folder(run)

    def test_leftovers_are_swept(self, storage: Folder) -> None:
        storage.put(3, "model", [b"half"])
        storage.sweep()
        assert list(storage.run.checkpoints.iterdir()) == []


class TestShared(CollectiveContract):
    """Threads stand for processes here; test_same_bits uses the real thing."""

    @pytest.fixture
    def on_ranks(self) -> Iterator[Callable[..., list[object]]]:
        fd = os.memfd_create("test")
        os.ftruncate(fd, 1 << 24)

        def run(ranks: int, body: Callable[[int, Collective], object]) -> list[object]:
            results: list[object] = [None] * ranks

            def work(rank: int) -> None:
                world = World(rank, ranks)
                shared = Shared(world, Memory(fd), SIZES, spin=False, broken=lambda: False)
                results[rank] = body(rank, shared)
                shared.close()

            threads = [threading.Thread(target=work, args=(r,)) for r in range(ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            return results

        yield run
        os.close(fd)

    def test_a_waiter_is_woken_when_it_is_told_that_nobody_comes(self) -> None:
        fd = os.memfd_create("test")
        os.ftruncate(fd, 1 << 24)
        alone = Shared(World(0, 2), Memory(fd), SIZES, spin=True, broken=lambda: False)
        threading.Timer(0.1, alone.abort).start()
        with pytest.raises(Broken, match="waiting for rank 1"):
            alone.share({}, [])
        os.close(fd)


class TestInline(LauncherContract):
    @pytest.fixture
    def launcher(self) -> Iterator[Launcher]:
        inline = Inline("manyhands.testing.contracts:contract_worker", create_segments())
        yield inline
        inline.close()


@pytest.fixture(scope="module")
def contract_local() -> Iterator[Local]:
    local = Local("manyhands.testing.contracts:contract_worker", create_segments())
    yield local
    local.close()


class TestLocal(LauncherContract):
    @pytest.fixture
    def launcher(self, contract_local: Local) -> Launcher:
        return contract_local

    def test_a_signal_is_reported_as_such(self, launcher: Launcher, tmp_path: Path) -> None:
        launcher.start(4, b"kill 9", tmp_path / "log")
        (exit,) = self.exits(launcher, 1)
        assert exit.code == -signal.SIGKILL

    def test_stopping_ends_everyone(self, launcher: Launcher, tmp_path: Path) -> None:
        for worker in range(3):
            launcher.start(worker, b"sleep 0", tmp_path / "log")
        pids: list[int] = []
        while len(pids) < 3:
            pids += [s.pid for s in launcher.poll() if isinstance(s, Started)]
        launcher.stop()
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)

    def test_an_agent_that_is_killed_takes_its_workers_along(self, tmp_path: Path) -> None:
        local = Local("manyhands.testing.contracts:contract_worker", create_segments())
        local.start(0, b"sleep 0", tmp_path / "log")
        signs: list[object] = []
        while not signs:
            signs += local.poll()
        local.agent.kill()
        while not any(isinstance(s, Exit) for s in signs):
            signs += local.poll()
        pid = next(s.pid for s in signs if isinstance(s, Started))
        local.close()
        for _ in range(500):
            if not os.path.exists(f"/proc/{pid}"):
                return
            threading.Event().wait(0.01)
        raise AssertionError("the worker outlived its agent")
