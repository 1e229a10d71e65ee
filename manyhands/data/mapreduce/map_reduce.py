# SPDX-License-Identifier: Apache-2.0
"""Map, shuffle, reduce over records of any kind, larger than memory, on any executor.

Invariant: the results, and their order, do not depend on the executor, the number of workers, the
memory, or how often an earlier call was interrupted. Results come in the order of their keys (see
`plain_values`), and a key's records in the order of the source.

How: the source is cut into chunks; a map task per chunk writes its records as runs sorted by key;
ranges of keys are chosen from what the runs say of themselves; a reduce task per range merges its
part of all runs as it goes, so that even one key with all records needs no more memory.
"""

import fcntl
import shutil
import tempfile
from collections.abc import (
    Callable,
    Generator,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Sequence,
    ValuesView,
)
from concurrent.futures import Executor
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from manyhands.data.mapreduce.external_sort import (
    Pair,
    Range,
    SortedRun,
    Sorter,
    block_bytes,
    cut,
    fan_in,
    merged,
    ranges,
    read_run,
    write_run,
)
from manyhands.data.mapreduce.function_digest import function_digest
from manyhands.data.mapreduce.plain_values import (
    NotPlain,
    decode,
    encode,
    encode_json,
    key_bytes,
    key_value,
)
from manyhands.data.mapreduce.results_folder import (
    WORK,
    ResultsFile,
    claim_folder,
    finish,
    write_lines,
)
from manyhands.data.mapreduce.resumable_tasks import DataTask, Submits, TaskRunner, digest_of
from manyhands.values.byte_sizes import parse_bytes
from manyhands.values.errors import DataError, DataTaskFailed, ManyhandsError
from manyhands.values.local_folders import local_folder
from manyhands.values.user_frames import user_traceback

if TYPE_CHECKING:
    from manyhands.data.mapreduce.file_rows import FileRows

Record = Any
"""None, bool, int, float, str, bytes, or a list or dict of these."""
RecordSource = Iterable[Record] | str | Path
Map = Callable[[Record], Any]
Reduce = Callable[[Any, Iterator[Record]], Any]
Key = Callable[[Record], Any]

CHUNK_BYTES = 16 << 20
"""At most, of what a map task reads, as it is held in memory."""
SHARE_BYTES = 64 << 20
"""About what a reduce task reads, as it is held in memory."""
MEMORY_BYTES = 64 << 10
"""Less than this is not kept to."""


def map_reduce(
    source: RecordSource,
    map: Map | None = None,
    reduce: Reduce | None = None,
    key: Key | None = None,
    *,
    workers: int | None = None,
    memory: str | int = "1GiB",
    executor: Executor | Submits | None = None,
    to: str | Path | None = None,
    work: str | Path | None = None,
) -> list[Any] | Path:
    """Map every record, bring records with equal keys together, and reduce each key's records.

    `source`: records, as `plain_values` allows, in a list or from a generator; or files: one path,
    pattern or URL, or a list of `Path`s, whose rows are dicts.
    `map(record)`: a list or generator of records, or a single record, or None for no record. Left
    out, records stay as they are. `key(record)`, of what map gave: left out, all are of one key.
    `reduce(key, records)`: likewise a list or generator of results, or one, or None. `records` can
    be read once and is not held in memory. Left out, the mapped records are the results.

    The functions run in other processes and may be run again, so they should have no effects.
    `memory` is per worker. With `to`, results are written to that folder as JSON lines
    (part-00000.jsonl ...), and the folder is returned; a call that was interrupted goes on from
    where it was when it is made again. Otherwise they are returned as a list, where tuples have
    become lists. `work` is a folder with room for twice the data, for the time of the call.
    """
    memory_bytes = max(MEMORY_BYTES, parse_bytes(memory))
    target = None if to is None else local_folder(to, "results", "map_reduce: to")
    if work is not None:
        work = local_folder(work, "what is needed meanwhile", "map_reduce: work")
    if target is not None:
        claim_folder(target)
    with (
        _work_folder(target, work) as folder,
        TaskRunner(folder, workers=workers, executor=executor) as runner,
    ):
        runs = _map_all(runner, source, map, key, memory_bytes)
        runs = _fewer(runner, runs, memory_bytes)
        parts = _reduce_all(runner, runs, reduce, target, memory_bytes)
        if target is not None:
            return finish(target, parts)
        found = [part.run for part in parts if part.run is not None]
        return [decode(value) for run in found for _, value in read_run(folder / "results", run)]


@contextmanager
def _work_folder(to: Path | None, work: str | Path | None) -> Generator[Path]:
    """Where everything lies meanwhile. It stays after a failure when it can be gone on with."""
    if to is None and work is None:
        with tempfile.TemporaryDirectory(prefix="manyhands-") as name:
            yield Path(name)
        return
    folder = Path(work) / ".map_reduce" if work is not None else (to or Path()) / WORK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise DataError(f"cannot work in {folder}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{folder} is in use by another process.") from None
        yield folder
        shutil.rmtree(folder)
        if to is not None:
            shutil.rmtree(to / WORK, ignore_errors=True)


# ---- map


class RecordChunk(msgspec.Struct, frozen=True):
    """Some neighbouring records of the source, on disk."""

    folder: str
    run: SortedRun
    first: int
    """The number of its first record."""

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.run.blocks)

    def records(self) -> Iterator[tuple[str, Record]]:
        """Each record, and what to call it."""
        for i, (_, value) in enumerate(read_run(Path(self.folder), self.run)):
            yield f"record {self.first + i + 1:,}", decode(value)


class Mapped(msgspec.Struct, frozen=True):
    runs: list[SortedRun]


def _map_all(
    runner: TaskRunner, source: RecordSource, map: Map | None, key: Key | None, memory_bytes: int
) -> list[SortedRun]:
    for name in ("source", "runs", "results"):
        (runner.folder / name).mkdir(exist_ok=True)
    functions = function_digest(map, key)
    tasks: list[DataTask] = []
    for chunk in _chunks(runner, source, memory_bytes):
        name = f"{len(tasks):06}"
        what = digest_of(functions, memory_bytes, msgspec.msgpack.encode(chunk))
        args = (runner.folder, name, chunk, map, key, memory_bytes)
        tasks.append(DataTask(name, _map_chunk, args, chunk.nbytes, what))
    return [run for mapped in runner.do("map", tasks, Mapped) for run in mapped.runs]


def _chunks(
    runner: TaskRunner, source: RecordSource, memory_bytes: int
) -> Iterable["RecordChunk | FileRows"]:
    most = min(CHUNK_BYTES, memory_bytes // 4)
    if isinstance(source, str | Path):
        return _rows(runner, [source], most)
    if isinstance(source, list) and source and all(isinstance(s, Path) for s in source):
        return _rows(runner, source, most)
    return _written(runner.folder / "source", source, most, block_bytes(memory_bytes))


def _rows(runner: TaskRunner, files: Iterable[str | Path], most: int) -> "list[FileRows]":
    # Parsers of every format are imported by those who read files.
    from manyhands.data.mapreduce.file_rows import stage_rows

    return stage_rows(runner, [str(file) for file in files], most)


def _written(
    folder: Path, source: Iterable[Record], most: int, limit: int
) -> Iterator[RecordChunk]:
    """Records go to disk as they come."""
    first = 0
    for some, _ in cut(((b"", value) for value in _encoded(source)), most):
        yield RecordChunk(str(folder), write_run(folder, f"{first:012}.run", some, limit), first)
        first += len(some)


def _encoded(source: Iterable[Record]) -> Iterator[bytes]:
    number = 1
    try:
        for record in source:
            yield encode(record)
            number += 1
    except NotPlain as trouble:
        raise DataError(_not_plain(f"record {number:,} of the source is", trouble)) from None
    except ManyhandsError:
        raise
    except Exception as error:
        raise DataTaskFailed(
            f"the source failed at record {number:,}:\n{user_traceback(error)}"
        ) from error


def _map_chunk(
    folder: Path,
    name: str,
    chunk: "RecordChunk | FileRows",
    map: Map | None,
    key: Key | None,
    memory_bytes: int,
) -> Mapped:
    sorter = Sorter(folder / "runs", name, memory_bytes)
    for which, record in chunk.records():
        made = [record] if map is None else _made(map, (record,), f"map failed at {which}:")
        for value in made:
            try:
                found = None if key is None else key(value)
            except Exception as error:
                raise DataTaskFailed(_failed(f"key failed at {which}:", value, error)) from error
            try:
                sort_by = key_bytes(found)
            except NotPlain as trouble:
                raise DataError(_not_plain(f"the key of {which} is", trouble)) from None
            try:
                sorter.add(sort_by, encode(value))
            except NotPlain as trouble:
                raise DataError(_not_plain(f"map gave for {which}", trouble)) from None
    return Mapped(sorter.finish())


def _made(function: Callable[..., Any], args: tuple[Any, ...], what: str) -> Iterator[Any]:
    """What a user's function makes: many, one, or none."""
    try:
        made = function(*args)
        if isinstance(made, set | frozenset):
            raise DataError(f"{what} it gave a set, which has no order; give sorted(...) of it.")
        if isinstance(made, list | range | Iterator | KeysView | ValuesView | ItemsView):
            yield from made
        elif made is not None:
            yield made
    except ManyhandsError:
        raise
    except Exception as error:
        raise DataTaskFailed(_failed(what, args[0], error)) from error


def _failed(what: str, shown: Any, error: Exception) -> str:
    text = repr(shown)
    text = text if len(text) <= 200 else f"{text[:200]}..."
    return f"{what} {text}\n{user_traceback(error)}"


def _not_plain(what: str, trouble: NotPlain) -> str:
    return (
        f"{what} {trouble}, which cannot be kept on disk between tasks. Use None, bool, int, "
        "float, str, bytes, and lists and dicts of these."
    )


# ---- merge, when there are more runs than can be merged at once


def _fewer(runner: TaskRunner, runs: list[SortedRun], memory_bytes: int) -> list[SortedRun]:
    most, level = fan_in(memory_bytes), 1
    while len(runs) > most:
        tasks: list[DataTask] = []
        for start in range(0, len(runs), most):
            some = runs[start : start + most]
            name = f"{len(tasks):06}"
            args = (runner.folder / "runs", f"merged-{level}-{name}.run", some, memory_bytes)
            what = digest_of(memory_bytes, msgspec.msgpack.encode(some))
            nbytes = sum(block.nbytes for run in some for block in run.blocks)
            tasks.append(DataTask(name, _merge, args, nbytes, what))
        runs, level = runner.do(f"merge-{level}", tasks, SortedRun), level + 1
    return runs


def _merge(folder: Path, name: str, runs: Sequence[SortedRun], memory_bytes: int) -> SortedRun:
    return write_run(folder, name, merged(folder, runs), block_bytes(memory_bytes))


# ---- reduce


def _reduce_all(
    runner: TaskRunner,
    runs: list[SortedRun],
    reduce: Reduce | None,
    to: Path | None,
    memory_bytes: int,
) -> list[ResultsFile]:
    function = function_digest(reduce)
    tasks: list[DataTask] = []
    for part in ranges(runs, min(SHARE_BYTES, memory_bytes)):
        name = f"{len(tasks):05}"
        what = digest_of(function, memory_bytes, str(to), msgspec.msgpack.encode(part))
        args = (runner.folder, name, part, reduce, to, memory_bytes)
        nbytes = sum(block.nbytes for run in part.runs for block in run.blocks)
        tasks.append(DataTask(name, _reduce_range, args, nbytes, what))
    return runner.do("reduce", tasks, ResultsFile)


def _reduce_range(
    folder: Path,
    name: str,
    part: Range,
    reduce: Reduce | None,
    to: Path | None,
    memory_bytes: int,
) -> ResultsFile:
    groups = groupby(part.pairs(folder / "runs"), key=itemgetter(0))
    if to is not None:
        lines = (
            line for key, pairs in groups for line in _reduced(key, pairs, reduce, encode_json)
        )
        return write_lines(to / f"part-{name}.jsonl", lines)
    results = (value for key, pairs in groups for value in _reduced(key, pairs, reduce, encode))
    limit = block_bytes(memory_bytes)
    run = write_run(folder / "results", f"{name}.run", ((b"", v) for v in results), limit)
    return ResultsFile(run=run)


def _reduced(
    key: bytes, pairs: Iterator[Pair], reduce: Reduce | None, encoder: Callable[[Any], bytes]
) -> Iterator[bytes]:
    """What becomes of one key's records."""
    if reduce is None and encoder is encode:
        yield from (value for _, value in pairs)
        return
    records = (decode(value) for _, value in pairs)
    value = key_value(key)
    made = records if reduce is None else _made(reduce, (value, records), "reduce failed at key")
    for result in made:
        try:
            yield encoder(result)
        except NotPlain as trouble:
            raise DataError(_not_plain(f"the result for the key {value!r} is", trouble)) from None
