# SPDX-License-Identifier: Apache-2.0
"""Every path of one run, and files that appear whole or not at all."""

import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from manyhands.values.errors import RunDirError
from manyhands.values.shell_commands import command_line


@dataclass(frozen=True, slots=True)
class RunDir:
    """Every path of one run. Trainer, scheduler and dashboard meet only here."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def task(self) -> Path:
        return self.root / "task"

    @property
    def encoders(self) -> Path:
        """What the prepared folder that it learns from says of itself, without the shards."""
        return self.task / "prepared"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.jsonl"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def report(self) -> Path:
        return self.root / "report.json"

    @property
    def verdict(self) -> Path:
        return self.root / "verdict.json"

    @property
    def reserve(self) -> Path:
        """Room for the last words, kept while a run goes on: the disk may be full by then."""
        return self.root / ".reserve"

    @property
    def losses(self) -> Path:
        return self.root / "losses.bin"

    @property
    def control(self) -> Path:
        return self.root / ".control"

    @property
    def withdrawn(self) -> Path:
        return self.root / "withdrawn-hosts.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.csv"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def step(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def log(self, rank: int) -> Path:
        return self.root / "logs" / f"worker-{rank:02d}.log"

    @property
    def task_note(self) -> Path:
        """How its task is found again."""
        return self.task / "task.json"

    def how_to_resume(self, *settings: str) -> str:
        """What goes on with this run: a command; or, where its task was made in Python, which no
        command can make again, a call."""
        if not self._made_in_python():
            given = [word for setting in settings for word in ("--set", setting)]
            return command_line("resume", self.root, *given)
        more = f", settings={list(settings)}" if settings else ""
        return f"mh.resume({str(self.root)!r}, task{more})"

    def _made_in_python(self) -> bool:
        with suppress(OSError, ValueError):
            note = json.loads(self.task_note.read_bytes())
            return isinstance(note, dict) and note.get("source", "") is None
        return False

    def create(self) -> "RunDir":
        """Make the folder; refuse one that is there already, so that no run overwrites another."""
        try:
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self.root.mkdir()
        except FileExistsError:
            if not self.root.is_dir():
                raise RunDirError(
                    f"{self.root}: a file is in the way; give another --to."
                ) from None
            hint = "give another --to"
            if self.config.exists():
                hint = f"continue it with: {self.how_to_resume()} - or {hint}"
            raise RunDirError(f"the run folder {self.root} already exists; {hint}.") from None
        except OSError as error:
            raise RunDirError(f"cannot create the run folder {self.root}: {error}") from error
        try:
            for folder in (self.task, self.checkpoints, self.root / "logs"):
                folder.mkdir()
        except OSError as error:
            shutil.rmtree(self.root, ignore_errors=True)
            raise RunDirError(f"cannot create {error.filename}: {error.strerror}") from error
        return self


@contextmanager
def locked(run: RunDir) -> Generator[None]:
    """One driver at a time. The kernel lets go when the process ends, however it ends."""
    path = run.root / ".lock"
    with naming(path):
        file = open(path, "w")  # noqa: SIM115 (closed below)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirError(f"{run.root} is in use: another process is training in it.") from None
        yield


def open_run(root: Path) -> RunDir:
    """An existing run, or an error that helps to find it."""
    run = RunDir(root)
    if not run.config.exists():
        what = "does not exist" if not root.exists() else "is not a run folder (no config.toml)"
        raise RunDirError(f"{root} {what}. See what there is with: manyhands runs")
    return run


def runs_under(root: Path) -> Iterator[RunDir]:
    """Every run folder directly under `root`, oldest first."""
    with suppress(OSError):
        found = [RunDir(p) for p in root.iterdir() if (p / "config.toml").exists()]
        yield from sorted(found, key=lambda run: run.config.stat().st_mtime)


def new_run_path(root: Path, name: str) -> Path:
    """A free folder name under `root`: what is trained, and when."""
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "run"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path, n = root / f"{stem}-{stamp}", 2
    while path.exists():
        path, n = root / f"{stem}-{stamp}-{n}", n + 1
    return path


def write_whole(path: Path, content: bytes | str, *, durable: bool = True) -> None:
    """Readers see the old file or the new one, never half; if `durable`, also after a crash."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    data = content.encode() if isinstance(content, str) else content
    try:
        with naming(path), open(draft, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise
    if durable:
        sync_folder(path.parent)


@contextmanager
def naming(path: Path) -> Generator[None]:
    """What goes wrong with the machine in here goes wrong with this file, and says so."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)  # writing to an open file names none; a draft says nothing
        raise


def keep_free(path: Path, size_bytes: int) -> None:
    """Take up room on the disk, to be given back when room is needed most."""
    with naming(path), open(path, "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # it cannot be done here
                raise


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
