# SPDX-License-Identifier: Apache-2.0
"""The folder that `map_reduce` fills: lines of JSON in parts, and a list of the parts.

The list is written last: a folder with a `results.json` is whole.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import xxhash

from manyhands.data.mapreduce.external_sort import SortedRun
from manyhands.values.errors import DataDamaged, DataError
from manyhands.values.run_folder import write_whole

NAME = "results.json"
WORK = ".work"


class ResultsFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """The results of one range of keys: a file of lines, or a run when a list is wanted."""

    file: str = ""
    results: int = 0
    nbytes: int = 0
    checksum: str = ""
    """xxh3_64 of the file, in hexadecimal."""
    run: SortedRun | None = None


def claim_folder(folder: Path) -> None:
    """Refuse a folder that holds anything but the unfinished work of an earlier call."""
    if (folder / NAME).exists():
        raise DataError(f"{folder} holds finished results; delete it, or give another folder.")
    try:
        if folder.exists() and any(folder.iterdir()) and not (folder / WORK).exists():
            raise DataError(f"{folder} is not empty; give another folder.")
        (folder / WORK).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot write to {folder}: {error.strerror}") from error


def write_lines(path: Path, lines: Iterable[bytes]) -> ResultsFile:
    """Lines of JSON in a file that appears whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    digest, count, nbytes = xxhash.xxh3_64(), 0, 0
    try:
        with draft.open("wb") as file:
            for line in lines:
                data = line + b"\n"
                file.write(data)
                digest.update(data)
                count, nbytes = count + 1, nbytes + len(data)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return ResultsFile(path.name, count, nbytes, digest.hexdigest())


def finish(folder: Path, parts: Sequence[ResultsFile]) -> Path:
    """Say what is in the folder, and clear away what an interrupted call left beside it."""
    ours = {part.file for part in parts}
    for path in folder.glob("*part-*.jsonl*"):
        if path.name not in ours:
            path.unlink()
    for part in parts:
        path = folder / part.file
        if not path.exists() or path.stat().st_size != part.nbytes:
            raise DataDamaged(f"{path} is not what was written. Delete {folder} and start again.")
    text = msgspec.json.encode(
        {"version": 1, "results": sum(p.results for p in parts), "parts": parts}
    )
    write_whole(folder / NAME, msgspec.json.format(text, indent=1) + b"\n")
    return folder
