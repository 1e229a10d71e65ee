"""Folders of processes that were killed do not stay for ever; those of the living do."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.values.scratch_folder import Scratch, sweep

CODE = """
import sys
from manyhands.values.scratch_folder import Scratch
print(Scratch("test").path, flush=True)
sys.stdin.read()
"""


def another(folder: Path) -> tuple["subprocess.Popen[str]", Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", CODE],
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_the_killed_left_is_swept_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed, its = another(tmp_path)
    living, theirs = another(tmp_path)
    (its / "files").mkdir()
    (its / "files" / "large").write_bytes(bytes(1000))
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=10)
    other = tmp_path / "manyhands-test-by-hand"
    other.mkdir()
    mine = Scratch("test")
    sweep()
    assert mine.path.is_dir(), "nor is one's own"
    assert not its.exists()
    assert theirs.is_dir() and other.is_dir(), "nobody knows whose it is"
    living.communicate(timeout=10)
    mine.close()
    mine.close()
    assert not mine.path.exists()
    sweep()
    assert [path.name for path in tmp_path.iterdir()] == [other.name]
