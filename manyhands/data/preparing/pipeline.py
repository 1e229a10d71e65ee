# SPDX-License-Identifier: Apache-2.0
"""The story of a preparation: raw records in, a prepared folder out.

    plan      the files are cut in chunks
    stage     chunks → typed pieces on disk; every bad record is named
    divide    every record gets its split; what splits share is counted, and a column that gives
              the label away is looked for
    fit       encoders learn from the training records only
    apply     pieces are encoded and spilled, grouped by shard
    shuffle   each shard is gathered and sorted by its records' keys

Each phase is a list of independent tasks over an Executor, and every finished task is kept: the
same command goes on where it was interrupted. The manifest is written last.

Invariant: the bytes of the result are a function of the records and the recipe alone; not of the
number of workers, their memory, how often they died, or who they were.
"""

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import msgspec

from manyhands.data.columns.schema import RECORD_BITS
from manyhands.data.mapreduce.resumable_tasks import TaskRunner
from manyhands.data.preparing import write_shards
from manyhands.data.preparing.assign_splits import Division
from manyhands.data.preparing.preparation import Preparation, target_bytes
from manyhands.data.preparing.progress_bars import bars
from manyhands.data.preparing.recipe import recipe_of, refuse_finished
from manyhands.data.preparing.split_pieces import divide_all
from manyhands.data.preparing.stage_pieces import Pieces, group_of, stage_all
from manyhands.data.preparing.work_folder import SPOOL, claim, sweep_drafts, tidy, work_folder
from manyhands.data.shards.manifest import Manifest, write_manifest
from manyhands.data.sources.cutting.source import Bad, Source
from manyhands.data.sources.formats.python_iterable import Spooled
from manyhands.data.sources.open_sources import Options, open_sources
from manyhands.data.sources.staging import read_bad, too_many
from manyhands.data.sources.values.text_values import nulls_of
from manyhands.data.splitting.split_rule import folds, parse_split
from manyhands.values.byte_sizes import parse_bytes
from manyhands.values.errors import DataError
from manyhands.values.local_folders import local_folder
from manyhands.values.prepare_options import PrepareRequest, Reading
from manyhands.values.run_folder import write_whole
from manyhands.values.version import VERSION

SKIPPED = "skipped.jsonl"
LEAST_MEMORY = 100_000


def prepare(request: PrepareRequest, executor: Executor | None = None) -> Manifest:
    """Turn raw records into a data set in a folder; what it holds."""
    recipe, options = recipe_of(request), reading_options(request)
    folder, limit = local_folder(request.to, "prepared data"), parse_bytes(request.memory)
    if limit < LEAST_MEMORY:
        raise DataError(f"--memory {request.memory} is too little; give at least 1MB.")
    try:
        refuse_finished(folder)
    except DataError:
        tidy(folder)
        raise
    quiet = request.quiet
    with work_folder(folder, restart=request.restart) as work, bars(quiet=quiet) as progress:
        spool, target = work / SPOOL, target_bytes(limit)
        opened = open_sources(request.sources, options, spool=spool, target=target)
        target = target_bytes(limit, _size_of(opened))
        key = recipe.digest(options, target, *_facts(opened))
        claim(work, key, folder)
        with TaskRunner(
            work, workers=request.workers, executor=executor, progress=progress
        ) as runner:
            prep = Preparation(folder, recipe, runner, limit, target, key, quiet)
            for note in (note for source in opened for note in source.notes):
                prep.note(note)
            manifest = _make(prep, opened)
        shutil.rmtree(work, ignore_errors=True)
    return manifest


def reading_options(request: Reading) -> Options:
    names = request.names or ()
    return Options(
        format=request.input_format,
        delimiter=request.delimiter,
        header=request.header,
        names=tuple(names.split(",") if isinstance(names, str) else names),
        encoding=request.encoding,
        null=tuple(request.null),
        missing=tuple(nulls_of(request.null).to_pylist()),
        max_field=parse_bytes(request.max_field),
        unit=request.unit,
        window=request.window,
    )


def _facts(sources: Sequence[Source]) -> Iterator[str]:
    """What a checkpoint depends on beside the recipe: the files as they are now."""
    for source in sources:
        if isinstance(source, Spooled):
            yield source.digest
        for file in source.files:
            path = Path(file)
            inside = sorted(path.rglob("*")) if path.is_dir() else [path]
            yield file
            for one in inside:
                if one.is_file():
                    yield f"{one.name} {one.stat().st_size} {one.stat().st_mtime_ns}"


def _size_of(sources: Sequence[Source]) -> int | None:
    """Bytes of all files; None where some are not here."""
    paths = [Path(file) for source in sources for file in source.files]
    return sum(p.stat().st_size for p in paths) if all(p.is_file() for p in paths) else None


def _make(prep: Preparation, sources: Sequence[Source]) -> Manifest:
    recipe = prep.recipe
    pieces = stage_all(prep, sources)
    rule = folds(recipe.folds, group_of(recipe)) if recipe.folds else parse_split(recipe.split)
    division = divide_all(prep, pieces, rule)
    made = [
        write_shards.make(prep, pieces.paths, pieces.schema, division, held_out=held_out)
        for held_out in (range(recipe.folds) if recipe.folds else (None,))
    ]
    bad = _left_out(prep, pieces, division, made[0].refused)
    lineage = _lineage(prep, pieces, division, len(bad))
    finished = [
        msgspec.structs.replace(m.manifest, lineage=lineage | _with(division.notes, m.manifest))
        for m in made
    ]
    for note in division.notes:
        prep.note(note)
    for k, m in enumerate(made):
        for note in m.manifest.lineage["notes"]:
            prep.note(f"fold {k}: {note}" if recipe.folds else note)
    if bad:
        lines = b"".join(msgspec.json.encode(b) + b"\n" for b in bad)
        write_whole(prep.folder / SKIPPED, lines)
        plural = "records were" if len(bad) > 1 else "record was"
        prep.note(f"{len(bad):,} {plural} left out: see {prep.folder / SKIPPED}")
    sweep_drafts(prep.folder)
    if not recipe.folds:
        write_manifest(prep.folder, finished[0])
        return finished[0]
    for held_out, manifest in enumerate(finished):
        write_manifest(prep.folder / f"fold-{held_out}", manifest)
    whole = msgspec.structs.replace(
        finished[0],
        schema=(),
        splits={},
        encoders={},
        statistics={},
        lineage=lineage,
        folds=recipe.folds,
    )
    write_manifest(prep.folder, msgspec.structs.replace(whole, split=f"folds={recipe.folds}"))
    return whole


# ---- what is told of it


def _with(notes: Sequence[str], manifest: Manifest) -> dict[str, Any]:
    return manifest.lineage | {"notes": [*notes, *manifest.lineage["notes"]]}


def _left_out(
    prep: Preparation, pieces: Pieces, division: Division, refused: Sequence[tuple[int, str]]
) -> list[Bad]:
    """Every record that is in no shard, with the reason; more than may be skipped is an error."""
    what = f"its '{division.rule.column}' is missing, so it belongs to no split"
    nowhere = [(record, what) for d in division.pieces for record in d.nowhere]
    late = [
        Bad(pieces.files[record >> RECORD_BITS], record & ((1 << RECORD_BITS) - 1), -1, why)
        for record, why in sorted([*nowhere, *refused])
    ]
    bad = [*read_bad(pieces.folder, pieces.stages), *late]
    if len(bad) > prep.recipe.skip:
        raise DataError(too_many(bad, prep.recipe.skip))
    return bad


def _lineage(prep: Preparation, pieces: Pieces, division: Division, skipped: int) -> dict[str, Any]:
    return {
        "files": pieces.files,
        "records": pieces.records,
        "skipped": skipped,
        "recipe": msgspec.to_builtins(prep.recipe),
        "rule": msgspec.to_builtins(division.rule),
        "made_by": f"manyhands {VERSION}",
    }
