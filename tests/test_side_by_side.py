"""Tests that run side by side: who runs what, and that they do not blame each other."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import shared_memory
from tests.support.shared_memory import MARK, SHARED, left_since
from tests.support.side_by_side import GROUPS, HERE, scheduler


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(shared_memory, "GRACE_S", 0.2)
    path = SHARED / f"manyhands-test-{os.getpid()}"
    path.write_bytes(bytes(16))
    yield path
    path.unlink(missing_ok=True)


def holder(file: Path, **environment: str) -> int:
    """A process that has it open, and that nobody has started any more."""
    command = ["sh", "-c", f"sleep 60 < {file} > /dev/null 2>&1 & echo $!"]
    told = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True)
    return int(told.stdout)


def before(file: Path) -> set[Path]:
    return shared_memory.there() - {file}


def test_what_nobody_holds_is_left_behind(file: Path) -> None:
    assert left_since(before(file)) == [file.name]
    assert left_since(shared_memory.there()) == [], "it was there before"


def test_what_we_hold_is_left_behind(file: Path) -> None:
    with file.open():
        assert left_since(before(file)) == [file.name]


@pytest.mark.parametrize("whose", ["ours", "others"])
def test_an_orphan_is_known_by_its_mark(file: Path, whose: str) -> None:
    mark = os.getpid() if whose == "ours" else os.getpid() + 1
    pid = holder(file, PATH=os.environ["PATH"], **{MARK: str(mark)})
    try:
        assert left_since(before(file)) == [file.name] * (whose == "ours")
    finally:
        os.kill(pid, signal.SIGKILL)


# ---- groups


class Process:
    """One of pytest's, as the scheduler knows it."""

    gateway, shutting_down = SimpleNamespace(id="gw"), False

    def __init__(self, tests: list[str]) -> None:
        self.tests = tests
        self.given: list[str] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += [self.tests[i] for i in indices]

    def shutdown(self) -> None:
        self.shutting_down = True


def test_one_process_runs_all_tests_of_a_group() -> None:
    pytest.importorskip("xdist")
    hosts = [
        f"tests/launch/{name}::test_{n}" for n in range(4) for name in ("hosts/a.py", "ray.py")
    ]
    others = [f"tests/data/test_{n}.py::test" for n in range(8)]
    tests = [test for pair in zip(hosts, others, strict=True) for test in pair]
    option = SimpleNamespace(loadscopereorder=True, tx=["popen"] * 2, numprocesses=2)
    config = SimpleNamespace(option=option, getvalue=lambda name: getattr(option, name))
    made = scheduler(config, None)
    processes = [Process(tests), Process(tests)]
    made.numnodes = len(processes)
    for process in processes:
        made.add_node(process)
        made.add_node_collection(process, tests)
    made.schedule()
    for process in processes:
        for test in process.given:  # which grows
            made.mark_test_complete(process, tests.index(test))
    assert sorted(test for process in processes for test in process.given) == sorted(tests)
    assert [set(hosts) <= set(process.given) for process in processes] == [True, False]


def test_what_is_in_a_group_is_there() -> None:
    assert not [place for place in GROUPS if not (HERE / place).exists()]
