"""A disk that is full: at the start, at a save, in the ledger. Named, and mended by making room."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.accounting.ledger import Ledger, read
from manyhands.accounting.ledger_lines import SettingsChanged
from manyhands.launch.engines.launcher import Launcher
from manyhands.monitor.run_status import status
from manyhands.values import events
from manyhands.values.run_folder import RunDir
from tests.support.tasks import make

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")

SETTINGS = ["train.batch=32", "train.micro_batch=4", "train.steps=8", "checkpoint.every_steps=2",
            "checkpoint.keep_last=9"]  # fmt: skip


def mount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(disk)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    path = tmp_path / "disk"
    path.mkdir()

    def make(size: str) -> Path:
        mount(path, f"size={size}")
        return path

    yield make
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk: Path, leave: int = 0) -> None:
    """Until there is no room for anything, or for this much."""
    with open(disk / "filler", "wb") as file:
        full = False
        while not full:
            left = os.statvfs(disk)
            size = left.f_bavail * left.f_bsize - leave
            with suppress(OSError):  # somebody else has just taken some of it
                if size > 0:
                    os.posix_fallocate(file.fileno(), 0, file.seek(0, os.SEEK_END) + size)
                full = True


def test_at_a_save(launcher: Launcher, disk: Callable[[str], Path], tmp_path: Path) -> None:
    root = disk("128k")
    run = RunDir(root / "run")

    def train(to: Path) -> mh.Report:
        return mh.train(
            make("cnn"), to=to, workers=3, settings=SETTINGS, quiet=True, launcher=launcher
        )

    with pytest.raises(mh.RunFailed, match=r"the disk is full: writing .*/step-0000000[2468]/"):
        train(run.root)
    assert mh.fingerprint(run.root), "a checkpoint from before is whole"
    assert not list(run.checkpoints.glob(".*"))
    found = status(run)
    assert found["state"] == "failed" and "the disk is full" in found["verdict"]
    assert "the disk is full" in run.verdict.read_text()
    mount(root, "remount,size=64m")
    report = mh.resume(run.root, make("cnn"), quiet=True, launcher=launcher)
    assert report.fingerprint == train(tmp_path / "calm").fingerprint
    assert not run.reserve.exists()


def test_while_the_driver_writes(launcher: Launcher, disk: Callable[[str], Path]) -> None:
    """The manifest of a checkpoint: by then workers have written theirs."""
    root = disk("8m")
    run = RunDir(root / "run")

    def fill_up(event: events.Stepped) -> None:
        if event.step == 3:
            fill(root)

    with pytest.raises(mh.RunFailed, match="the disk is full: writing"):
        mh.train(
            make("cnn"),
            to=run.root,
            workers=1,
            settings=[*SETTINGS, "train.steps=200"],
            quiet=True,
            launcher=launcher,
            on_step=fill_up,
        )
    assert status(run)["state"] == "failed"
    (last,) = [e for e in events.read_events(run.events) if isinstance(e, events.Failed)]
    assert "the disk is full" in last.verdict


@pytest.mark.parametrize("leave", [0, 8 << 10, 24 << 10])
def test_at_the_start(
    launcher: Launcher, disk: Callable[[str], Path], leave: int, tmp_path: Path
) -> None:
    root = disk("256k")
    fill(root, leave)
    with pytest.raises(mh.RunFailed, match=f"could not begin: the disk is full: writing {root}/"):
        mh.train(make("cnn"), to=root / "run", settings=SETTINGS, quiet=True, launcher=launcher)
    assert not (root / "run").exists()


def test_in_the_ledger(disk: Callable[[str], Path]) -> None:
    root = disk("64k")
    ledger = Ledger(root / "ledger.jsonl")
    ledger.write(SettingsChanged(1, {"lr": 0.1}), durable=True)
    fill(root)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left") as caught:
            ledger.write(SettingsChanged(2, {"lr": 0.1, "note": "x" * 9000}), durable=True)
        assert caught.value.filename == str(root / "ledger.jsonl")
    (root / "filler").unlink()
    ledger.write(SettingsChanged(3, {"lr": 0.3}), durable=True)
    ledger.close()
    steps = [e.step for e in read(root / "ledger.jsonl") if isinstance(e, SettingsChanged)]
    assert steps == [1, 3]
