# SPDX-License-Identifier: Apache-2.0
"""All chunks of all sources → typed pieces on disk, as tasks that can be gone on with.

Everything is parsed once; a chunk whose types turn out too narrow for what others hold, again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from manyhands.data.columns.schema import RECORD_BITS
from manyhands.data.mapreduce.resumable_tasks import DataTask, TaskRunner, digest_of
from manyhands.data.sources.cutting.source import Chunk, Source
from manyhands.data.sources.staging import Stage, date_orders, joined_types, stage, too_narrow
from manyhands.values.errors import DataError


@dataclass(frozen=True, slots=True)
class StagedSources:
    stages: list[Stage]
    """Of each chunk."""
    files: list[str]
    """Of each chunk: what it was read from."""
    types: dict[str, str]
    """Of each column, in the order in which they were first seen."""
    notes: list[str]
    """What was found out, for people."""


def stage_sources(
    runner: TaskRunner,
    sources: Sequence[Source],
    given: Mapping[str, str],
    target_bytes: int,
    folder: Path,
    *,
    key: str,
    skip: int = 0,
    one_is_list: bool = False,
) -> StagedSources:
    """Pieces of about `target_bytes` in `folder`. `given`: types that are known. `key`: of the
    files as they are. `one_is_list`: see `schema.unify`."""
    chunks: list[tuple[Source, int, Chunk]] = []
    files: list[str] = []
    for source in sources:
        chunks += [(source, len(files), chunk) for chunk in source.chunks(target_bytes)]
        files += source.files
    if len(files) >= 1 << (62 - RECORD_BITS):
        raise DataError(f"{len(files):,} files are too many; join them first.")
    folder.mkdir(exist_ok=True)

    def staged(numbers: Iterable[int], types: Mapping[str, str], phase: str) -> list[Stage]:
        what = digest_of(key, msgspec.json.encode(sorted(types.items())))
        tasks: list[DataTask] = []
        for n in numbers:
            args = (*chunks[n], n, types, target_bytes, str(folder), skip)
            tasks.append(DataTask(f"{n:06}", stage, args, chunks[n][2].nbytes, what))
        return runner.do(phase, tasks, Stage)

    stages = staged(range(len(chunks)), given, "stage")
    orders = date_orders(stages)
    given = dict(given) | {name: f"time:{order.form}" for name, order in orders.items()}
    types = joined_types(stages, given, one_is_list=one_is_list)
    if narrow := [s.chunk for s in stages if too_narrow(s, types)]:
        again = {s.chunk: s for s in staged(narrow, types, "restage")}
        stages = [again.get(s.chunk, s) for s in stages]
    read = [files[first + chunk.file] for _, first, chunk in chunks]
    notes = [order.note(name) for name, order in orders.items()]
    return StagedSources(stages, read, types, notes)
