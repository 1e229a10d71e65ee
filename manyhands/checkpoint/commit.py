# SPDX-License-Identifier: Apache-2.0
"""Where checkpoints are kept: a step is invisible until it is committed, and then whole.

Workers `put` their files of a step; the driver `commit`s it with a manifest of sizes and
checksums. Reading verifies them. Nothing that is read is ever executed.
"""

import ctypes
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from manyhands.values.errors import CheckpointDamaged
from manyhands.values.events import Deleted, Saved, Started, read_events
from manyhands.values.run_folder import RunDir, naming, sync_folder

Buffer = bytes | memoryview

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class FileRecord(msgspec.Struct, frozen=True):
    size_bytes: int
    sha256: str


class StepManifest(msgspec.Struct, frozen=True):
    """What is written last, and so what makes a step exist."""

    step: int
    files: dict[str, FileRecord]
    attempt: int = 0
    """Which of several tries to save this step succeeded: the generation that wrote it."""
    format: int = 1

    @property
    def size_bytes(self) -> int:
        return sum(f.size_bytes for f in self.files.values())


class Storage(Protocol):
    """`put` may be called by many workers at once; `commit`, `steps` and `delete` by the driver."""

    def put(self, step: int, attempt: int, name: str, chunks: Iterable[Buffer]) -> FileRecord:
        """Write one file of a step that is not committed yet; durable on return.

        Attempts at the same step do not see each other's files.
        """
        ...

    def commit(self, manifest: StepManifest) -> None: ...

    def steps(self) -> list[int]:
        """Committed steps, ascending."""
        ...

    def get(self, step: int, name: str) -> Path:
        """A committed file, after its bytes were found to be those that were written."""
        ...

    def delete(self, step: int) -> None: ...


class FolderStorage:
    """A folder of the run: checkpoints/step-00000500/."""

    def __init__(self, run: RunDir) -> None:
        self.run = run

    def _draft(self, step: int, attempt: int) -> Path:
        final = self.run.step(step)
        return final.with_name(f".{final.name}.{attempt}.draft")

    def put(self, step: int, attempt: int, name: str, chunks: Iterable[Buffer]) -> FileRecord:
        folder = self._draft(step, attempt)
        folder.mkdir(exist_ok=True)
        digest, size = hashlib.sha256(), 0
        with naming(self.run.step(step) / name), open(folder / name, "wb", buffering=0) as file:
            for chunk in chunks:
                view = memoryview(chunk)
                digest.update(view)
                size += len(view)
                while view:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())
        return FileRecord(size, digest.hexdigest())

    def write_at(self, step: int, attempt: int, name: str, offset: int, data: Buffer) -> None:
        """A piece of what `put` would have written; `settle` makes the file durable."""
        folder = self._draft(step, attempt)
        folder.mkdir(exist_ok=True)
        path, mode = self._inside(folder, name), "r+b" if offset else "wb"
        with naming(self.run.step(step) / name), open(path, mode, buffering=0) as file:
            if offset > (size := file.seek(0, os.SEEK_END)):
                raise CheckpointDamaged(f"'{name}' has {size:,} bytes; none follow at {offset:,}")
            file.seek(offset)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]

    def settle(self, step: int, attempt: int, name: str) -> None:
        with open(self._inside(self._draft(step, attempt), name), "ab") as file:
            os.fsync(file.fileno())

    def _inside(self, folder: Path, name: str) -> Path:
        if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
            raise CheckpointDamaged(f"'{name}' is no name for a file of a step")
        return folder / name

    def commit(self, manifest: StepManifest) -> None:
        draft = self._draft(manifest.step, manifest.attempt)
        final = self.run.step(manifest.step)
        name = final / "manifest.json"
        with naming(name), open(draft / name.name, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest)))
            file.flush()
            os.fsync(file.fileno())
        for path in draft.iterdir():  # what somebody wrote who did not live to tell
            if path.name not in manifest.files and path.name != name.name:
                path.unlink()
        sync_folder(draft)
        if final.exists():  # the same step again, after a resume from an earlier one
            _exchange(draft, final)
            shutil.rmtree(draft, ignore_errors=True)
        else:
            os.replace(draft, final)
        sync_folder(final.parent)

    def steps(self) -> list[int]:
        names = [p.name for p in self.run.checkpoints.iterdir()] if self._exists() else []
        found = [re.fullmatch(r"step-(\d+)", name) for name in names]
        return sorted(int(m[1]) for m in found if m)

    def _exists(self) -> bool:
        return self.run.checkpoints.is_dir()

    def manifest(self, step: int) -> StepManifest:
        path = self.run.step(step) / "manifest.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=StepManifest)
        except (OSError, msgspec.MsgspecError) as error:
            raise CheckpointDamaged(f"{path} cannot be read: {error}") from error

    def get(self, step: int, name: str) -> Path:
        path = self.run.step(step) / name
        record = self.manifest(step).files.get(name)
        if record is None:
            raise CheckpointDamaged(f"{path} is not in the step's manifest")
        found = _sha256(path)
        if found != record.sha256:
            raise CheckpointDamaged(
                f"{path} is damaged: its SHA-256 is {found[:12]}…, "
                f"{record.sha256[:12]}… was written"
            )
        return path

    def delete(self, step: int) -> None:
        final = self.run.step(step)
        trash = final.with_name(f".{final.name}.trash")
        with suppress(FileNotFoundError):
            os.replace(final, trash)
        shutil.rmtree(trash, ignore_errors=True)

    def set_aside(self, step: int) -> None:
        """Out of the way of a resumed run that starts from an earlier step."""
        final = self.run.step(step)
        aside = final.with_name(f"damaged-{final.name}")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(final, aside)

    def sweep(self) -> None:
        """Remove what crashed writers and deleters left behind."""
        if self._exists():
            for path in self.run.checkpoints.glob(".step-*.before"):
                final = path.with_name(path.name[1:].removesuffix(".before"))
                if not final.exists():  # it was about to be replaced
                    os.replace(path, final)
            for path in self.run.checkpoints.iterdir():
                if path.name.startswith(".step-"):
                    shutil.rmtree(path, ignore_errors=True)


def _exchange(new: Path, old: Path) -> None:
    """Each has the other's name; at no moment is there none of the old one's name, where the file
    system can do that (nearly all of Linux's can). Elsewhere, for a moment, there is none."""
    first, second = (os.fsencode(path) for path in (new, old))
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None or renameat2(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE) != 0:
        before = old.with_name(f".{old.name}.before")  # until then, `sweep` puts it back
        shutil.rmtree(before, ignore_errors=True)
        os.replace(old, before)
        os.replace(new, old)
        shutil.rmtree(before, ignore_errors=True)


def _sha256(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointDamaged(f"{path} cannot be read: {error}") from error


def newest_good(
    storage: FolderStorage, *, at_most: int | None = None
) -> tuple[int | None, list[str]]:
    """The newest step whose every byte is right, and what was wrong with newer ones. `at_most`:
    of those up to this one."""
    there = set(storage.steps())
    problems: list[str] = []
    for step in sorted(there | saved_steps(storage.run), reverse=True):
        if at_most is not None and step > at_most:
            continue
        if (problem := problem_of(storage, step)) is None:
            return step, problems
        problems.append(problem)
    return None, problems


def newest_sound(storage: FolderStorage) -> int | None:
    """The newest step; an error when it is damaged. Nobody who asks for the newest is given another
    one unasked."""
    step, problems = newest_good(storage)
    if problems:
        hint = "No earlier one is there." if step is None else f"The newest good one is step {step}"
        where = f", in {storage.run.step(step)}." if step is not None else ""
        raise CheckpointDamaged(f"{'; '.join(problems)}. {hint}{where}")
    return step


def problem_of(storage: FolderStorage, step: int) -> str | None:
    """What is wrong with a step that was saved, after reading every byte of it."""
    try:
        if not storage.run.step(step).exists():
            return f"step {step} was saved, and {storage.run.step(step)} is gone"
        for name in storage.manifest(step).files:
            storage.get(step, name)
    except CheckpointDamaged as error:
        return str(error)
    return None


def glance(storage: FolderStorage, step: int) -> str | None:
    """The same at once: what can be told from names and sizes."""
    folder = storage.run.step(step)
    try:
        for name, record in storage.manifest(step).files.items():
            if (found := (folder / name).stat().st_size) != record.size_bytes:
                return f"{folder / name} has {found} bytes, {record.size_bytes} were written"
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    except CheckpointDamaged as error:
        return str(error)
    return None


def saved_steps(run: RunDir) -> set[int]:
    """Those that ought to be there, by what the run wrote down."""
    steps: set[int] = set()
    for event in read_events(run.events):
        match event:
            case Saved():
                steps.add(event.step)
            case Deleted():
                steps.discard(event.step)
            case Started():  # what was newer has been set aside
                steps = {step for step in steps if step <= event.step}
            case _:
                pass
    return steps


def to_delete(steps: Iterable[int], *, keep_last: int, best: int | None) -> Mapping[int, str]:
    """Which committed steps go, and why. Pure."""
    ordered = sorted(steps)
    keep = set(ordered[-keep_last:]) | {best}
    return {step: f"checkpoint.keep_last = {keep_last}" for step in ordered if step not in keep}
