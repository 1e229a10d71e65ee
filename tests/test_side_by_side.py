"""Tests that run side by side do not blame each other for what they find in shared memory."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import shared_memory
from tests.support.shared_memory import MARK, SHARED, left_since


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
