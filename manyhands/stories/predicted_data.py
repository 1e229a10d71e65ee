# SPDX-License-Identifier: Apache-2.0
"""What people give to be predicted or scored: raw files, a prepared folder, or data from Python.

Raw records go through the encoders that the run keeps; a prepared folder must have been encoded by
the same ones; what the task itself could have had as its data is read as its data would be.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec

from manyhands.data.columns.schema import MANIFEST
from manyhands.data.encoding.unseen_values import UnseenValues
from manyhands.data.open_data import prepared_of
from manyhands.data.preparing.lineage import notes_on_unseen
from manyhands.data.preparing.pipeline import prepare, reading_options
from manyhands.data.preparing.preparation import target_bytes
from manyhands.data.reading.prepared_data import PreparedData
from manyhands.data.serving.encode_records import RawWork
from manyhands.data.serving.stored_encoders import (
    Serving,
    lend_encoders,
    read_stored,
    same_encoders,
)
from manyhands.data.shards.manifest import Manifest, read_manifest
from manyhands.data.shards.prepared_url import folder_of
from manyhands.data.sources.access.url_secrets import is_url
from manyhands.data.sources.cutting.source import Source
from manyhands.data.sources.formats.csv_files import Delimited
from manyhands.data.sources.open_sources import open_sources
from manyhands.values.config import RunConfig
from manyhands.values.errors import DataError
from manyhands.values.prepare_options import PrepareRequest, Reading
from manyhands.values.run_folder import RunDir
from manyhands.values.task import Task


@dataclass(frozen=True, slots=True)
class RawFiles:
    """Records that are to be encoded."""

    work: list[RawWork]
    files: list[str]
    target_bytes: int


@dataclass(frozen=True, slots=True)
class OwnRecords:
    """Records such as the task has itself."""

    task: Task
    """With these for its data."""
    held_out: bool
    """Those that it holds out, not those in `data`."""
    files: tuple[str, ...] | None
    """What the records of a prepared folder came from."""


def serving_of(run: RunDir, task: Task, config: RunConfig) -> Serving | None:
    """A run's encoders, where its data was prepared."""
    data = prepared_of(task.data)
    if data is None:
        return None
    if not (run.encoders / MANIFEST).exists():  # a run from before they were kept
        data = prepared_of(task.data, config.data)
        assert data is not None
    return read_stored(run.encoders, data)


def is_raw(given: Any, serving: Serving | None) -> bool:
    """Whether this is to go through encoders."""
    if isinstance(given, PreparedData) or prepared_path(given) is not None:
        return False
    if serving is None and _paths(given):
        raise DataError(
            "the run's data was not prepared, so there are no encoders that could read files. Give "
            "data like the task's own from Python: mh.predict(run, {...}, task=task)."
        )
    return serving is not None


def own_records(
    given: Any, split: str | None, task: Task, config: RunConfig, serving: Serving | None
) -> OwnRecords:
    """A task that has these records for its data: they are its `data`, and held out."""
    if given is None:
        if split is not None:
            return _of_split(prepared_of(task.data, config.data), split, task, serving)
        return OwnRecords(task, True, _files_of(prepared_of(task.data, config.data)))
    if isinstance(given, PreparedData):
        _refuse_others(given, serving)
        return _replaced(task, given)
    if (path := prepared_path(given)) is not None:
        mine = prepared_of(task.data)
        like = PreparedData(folder=folder_of(path)) if mine is None else mine
        there = replace(like, folder=folder_of(path), transfer=None)
        return _of_split(there, split, task, serving)
    if split is not None:
        raise DataError(f"--split {split}: only a prepared folder has splits.")
    return _replaced(task, given)


def _of_split(
    data: PreparedData | None, split: str | None, task: Task, serving: Serving | None
) -> OwnRecords:
    if data is None:
        raise DataError(f"--split {split}: the task's data is not a prepared folder.")
    splits = read_manifest(data.folder).splits
    held = [name for name in ("valid", "test") if name in splits and splits[name].rows]
    chosen = split or next(iter([*held, *splits]), "train")
    given = replace(data, split=chosen)
    _refuse_others(given, serving)
    return _replaced(task, given)


def _replaced(task: Task, given: Any) -> OwnRecords:
    data = prepared_of(given)
    bare = replace(task, data=given, held_out=given, sampler=None, weights=None)
    return OwnRecords(bare, True, _files_of(data))


def _files_of(data: PreparedData | None) -> tuple[str, ...] | None:
    if data is None:
        return None
    files = read_manifest(data.folder).lineage.get("files")
    return None if files is None else tuple(files)


def _refuse_others(data: PreparedData, serving: Serving | None) -> None:
    """The same numbers must mean the same things."""
    if serving is None:
        return
    manifest: Manifest = read_manifest(data.folder)
    if not same_encoders(manifest, serving.manifest):
        raise DataError(
            f"{data.folder} was encoded otherwise than what the run has learnt from, so its "
            "numbers mean other things. Give the raw files, or prepare them with --like and the "
            "folder that the run was trained on."
        )


def raw_files(
    given: Any, reading: Reading, serving: Serving, *, spool: Path, memory: int
) -> RawFiles:
    """Files, or records from Python, cut in parts. How does not depend on who reads them."""
    options = reading_options(reading)
    target = target_bytes(memory)
    sources = open_sources(given, options, spool=spool, target=target)
    if any(_lost_its_header(source, serving) for source in sources):
        sources = open_sources(given, replace(options, header="yes"), spool=spool, target=target)
    files = [file for source in sources for file in source.files]
    sizes = [Path(f).stat().st_size if Path(f).is_file() else 0 for f in files]
    target = target_bytes(memory, sum(sizes) if all(sizes) else None)
    work: list[RawWork] = []
    first = 0
    for source in sources:
        work += [RawWork(source, first, chunk) for chunk in source.chunks(target)]
        first += len(source.files)
    return RawFiles(work, files, target)


def _lost_its_header(source: Source, serving: Serving) -> bool:
    """Whether a first line that names what the run knows was taken for a record."""
    if not isinstance(source, Delimited) or source.header:
        return False
    named = Delimited.sniff(source.urls[:1], delimiter=source.dialect.delimiter, header="yes")
    known = {name for used in serving.used for name in serving.raw_types(used)}
    return bool(known & {*named.names})


def _numbers_read(serving: Serving) -> dict[str, str]:
    """Features that were read as numbers, of which not one may be a word."""
    features = [name for name, fit in serving.used.items() if fit.role == "feature"]
    read = [item for name in features for item in serving.raw_types(name).items()]
    return {name: kind for name, kind in read if kind in ("float64", "float32")}


def encoded_copy(
    given: Any, serving: Serving, scratch: Path, *, on_error: str, workers: int | None = None
) -> tuple[PreparedData, list[str]]:
    """Raw records, encoded as the run's were, in a folder of their own, to be scored; and what is
    to be said of them."""
    lend_encoders(serving, scratch / "encoders")
    request = PrepareRequest(
        given,
        scratch / "data",
        like=scratch / "encoders",
        on_error=on_error,
        # As what the run learnt from was read: a word among numbers makes its record bad, not all.
        types=_numbers_read(serving),
        workers=workers,
    )
    made = prepare(request)
    if serving.label is not None and serving.label not in {c.name for c in made.schema}:
        raise DataError(
            f"the records have no column '{serving.label}', which is the label: there is nothing "
            "to compare predictions with."
        )
    copy = replace(serving.data, folder=scratch / "data", split="test", transfer=None)
    unseen = msgspec.convert(made.lineage.get("unseen", {}), dict[str, UnseenValues])
    return copy, notes_on_unseen(unseen, serving.used)


def prepared_path(given: Any) -> str | None:
    """A prepared folder, or the URL of one."""
    paths = _paths(given)
    if len(paths) != 1:
        return None
    path = paths[0]
    if not is_url(path):
        return path if (Path(path) / MANIFEST).exists() else None
    if re.search(r"\.\w+$", path) or any(c in path for c in "*?["):  # a file, or many
        return None
    try:
        read_manifest(folder_of(path))
    except DataError:
        return None
    return path


def _paths(given: Any) -> list[str]:
    if isinstance(given, str | Path):
        return [str(given)]
    if isinstance(given, list | tuple):
        items = cast(Sequence[Any], given)
        if items and all(isinstance(item, str | Path) for item in items):
            return [str(item) for item in items]
    return []
