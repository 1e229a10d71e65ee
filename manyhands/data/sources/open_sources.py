# SPDX-License-Identifier: Apache-2.0
"""What people give, as sources: paths, globs, folders, URLs, or an iterable of records.

The format of a file is known by its first bytes where they are unmistakable, else by its suffix,
else by what its beginning looks like; `Options.format` overrules all of that. The files of a folder
or glob are one source and of one format; files given one by one are too, where they stand together.
Order: as given; within a folder or glob, sorted. The same file twice is refused.
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import pyarrow as pa

from manyhands.data.columns.schema import MANIFEST
from manyhands.data.sources.access.files import (
    expand,
    expand_folder,
    is_folder,
    local_path,
    name_of_file,
    shown,
)
from manyhands.data.sources.cutting.source import Source
from manyhands.data.sources.detect_format import FORMATS, FileFormat, detect, is_document, is_image
from manyhands.data.sources.formats.access_log import AccessLog
from manyhands.data.sources.formats.csv_files import Delimited
from manyhands.data.sources.formats.idx_files import Idx
from manyhands.data.sources.formats.image_folder import Images
from manyhands.data.sources.formats.json_lines import JsonLines
from manyhands.data.sources.formats.parquet_and_arrow import Columnar
from manyhands.data.sources.formats.plain_text import PlainText
from manyhands.data.sources.formats.python_iterable import spool as spooled
from manyhands.data.sources.formats.tfrecord_files import TFRecords
from manyhands.values.errors import DataError

Given = str | Path | Iterable[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How raw files are read; each format looks at what concerns it."""

    format: str | None = None
    """One of FORMATS, or a usual suffix; None to find out."""
    delimiter: str | None = None
    header: str = "auto"
    """yes, no or auto."""
    names: tuple[str, ...] = ()
    """Of the columns, where the files do not say."""
    quote: str = '"'
    encoding: str = "utf-8"
    null: tuple[str, ...] = ()
    """Words for a missing value, beside the usual."""
    missing: tuple[str, ...] = ()
    """All words for a missing value, where values have types: JSON, Parquet, Arrow, TFRecord and
    Python. Left out, text is what it is there."""
    max_field: int = 16 << 20
    """Bytes; a longer record is bad."""
    unit: str = "line"
    """Of plain text: line, paragraph or window."""
    window: int = 0
    """Characters; more than 0 makes windows the unit."""
    columns: tuple[str, ...] = ()
    """Of Parquet and Arrow files: only these are read."""


@dataclass(frozen=True, slots=True)
class _FileGroup:
    """Files of one format that make a source."""

    format: FileFormat
    urls: tuple[str, ...]
    root: str
    """The folder under which images have their labels."""
    alone: bool
    """A file that was given by itself."""
    notes: tuple[str, ...] = ()


def open_sources(given: Given, options: Options, *, spool: Path, target: int) -> list[Source]:
    """All sources, in order. Records of iterables are written to `spool`, about `target` bytes
    to a file."""
    found: list[_FileGroup | Source] = []
    for number, source in enumerate(_one_by_one(given)):
        if not isinstance(source, str):
            folder = spool / f"{number:03}"
            names = options.names or None
            found.append(spooled(_records(source), folder, target, names, options.missing))
            continue
        files = _files(source, options)
        last = found[-1] if found else None
        if isinstance(last, _FileGroup) and _stand_together(last, files):
            found[-1] = _joined(last, files)
        else:
            found.append(files)
    _refuse_twice([url for f in found if isinstance(f, _FileGroup) for url in f.urls])
    return [_source(f, options) if isinstance(f, _FileGroup) else f for f in found]


def _one_by_one(given: Given) -> Iterator[str | Iterable[Any]]:
    """A list of paths is many sources; a list of anything else is a list of records."""
    if isinstance(given, str | Path):
        yield str(given)
        return
    if isinstance(given, list | tuple):
        items = cast(Sequence[Any], given)
        if any(isinstance(item, str | Path | Iterator) for item in items):
            for item in items:
                yield str(item) if isinstance(item, str | Path) else item
            return
        if not items:
            raise DataError("there are no sources; give paths, globs, folders, URLs or records.")
    yield given


@runtime_checkable
class _Arrow(Protocol):
    """Tables of pyarrow, pandas, polars and others."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


@runtime_checkable
class _Indexed(Protocol):
    """Such as torch's map-style data sets."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> object: ...


def _records(given: object) -> Iterable[object]:
    """The records that an object stands for; of a dict of columns, the rows."""
    if isinstance(given, _Arrow):
        batches = pa.RecordBatchReader.from_stream(given)
        return (row for batch in batches for row in batch.to_pylist())
    if not isinstance(given, Mapping):
        if isinstance(given, Iterable):
            return cast(Iterable[object], given)
        if isinstance(given, _Indexed):
            return (given[i] for i in range(len(given)))
        raise DataError(f"a {type(given).__name__} is no source; give paths or records.")
    columns = cast(Mapping[str, Sequence[Any]], given)
    sizes = {name: len(values) for name, values in columns.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {size:,}" for name, size in sizes.items())
        raise DataError(f"the columns differ in length ({listed}).")
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def _files(source: str, options: Options) -> _FileGroup:
    """What a path, glob, folder or URL stands for."""
    forced = _forced(options.format)
    if not is_folder(source):
        urls = expand(source)
        one = _one_format(source, urls, forced)
        return _FileGroup(one, tuple(urls), _common_folder(urls), len(urls) == 1)
    urls, beside = expand_folder(source)
    if MANIFEST in map(name_of_file, urls):
        raise DataError(f"{shown(source)} is a prepared data set already, not raw data.")
    documents = [url for url in urls if is_document(url)]
    data = [url for url in urls if not is_document(url)]
    if forced == "images":
        documents += [url for url in data if not is_image(url)]
        data = [url for url in data if is_image(url)]
    if not data:
        what = "are no images" if forced == "images" else "is no data"
        raise DataError(f"there {what} in {shown(source)}.")
    one = _one_format(source, data, forced)
    return _FileGroup(one, tuple(data), source, False, _left_out(documents, len(beside)))


def _forced(word: str | None) -> FileFormat | None:
    if word is None:
        return None
    key = word.lower().lstrip(".")
    if key not in FORMATS:
        names = ", ".join(dict.fromkeys(FORMATS.values()))
        raise DataError(f"there is no format '{word}'; use {names}.")
    return FORMATS[key]


def _one_format(source: str, urls: Sequence[str], forced: FileFormat | None) -> FileFormat:
    """The format of all these files."""
    examples: dict[FileFormat, list[str]] = {}
    for url in urls:
        examples.setdefault(detect(url, forced), []).append(name_of_file(url))
    if len(examples) > 1:
        listed = "; ".join(
            f"{kind}: {len(names)} ({', '.join(names[:2])}{', ...' if len(names) > 2 else ''})"
            for kind, names in sorted(examples.items())
        )
        raise DataError(
            f"{shown(source)} holds files of several formats ({listed}). Give those that you mean, "
            "for example with a glob."
        )
    return next(iter(examples))


def _left_out(documents: Sequence[str], beside: int) -> tuple[str, ...]:
    if not documents and not beside:
        return ()
    names = [name_of_file(url) for url in documents]
    more = f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else ""
    count = len(names) + beside
    return (f"{count} other file{'s were' if count > 1 else ' was'} left out{more}",)


def _stand_together(last: _FileGroup, next_: _FileGroup) -> bool:
    """Whether a shell made these from a glob: files of one format, in one folder. IDX files always
    do: images and labels must find each other, or be told apart."""
    if last.format == next_.format == "idx":
        return True
    if not (last.alone and next_.alone and last.format == next_.format):
        return False
    return last.format == "images" or last.root == next_.root


def _joined(last: _FileGroup, next_: _FileGroup) -> _FileGroup:
    urls = (*last.urls, *next_.urls)
    notes = (*last.notes, *next_.notes)
    return replace(last, urls=urls, root=_common_folder(urls), notes=notes)


def _common_folder(urls: Sequence[str]) -> str:
    folders = [url.rpartition("/")[0] for url in urls]
    if len(set(folders)) == 1:
        return folders[0] or "."
    if all(local_path(url) is not None for url in urls):
        return os.path.commonpath([os.path.abspath(folder) for folder in folders])
    parts = zip(*(folder.split("/") for folder in folders), strict=False)
    return "/".join(part[0] for part in itertools.takewhile(lambda p: len(set(p)) == 1, parts))


def _refuse_twice(urls: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for url in urls:
        path = local_path(url)
        place = url if path is None else os.path.realpath(path)
        if place in seen:
            other = "" if seen[place] == url else f" (once as {shown(seen[place])})"
            raise DataError(f"{shown(url)} is given twice{other}: its records would be doubled.")
        seen[place] = url


def _source(files: _FileGroup, options: Options) -> Source:
    made = _made(files, options)
    return replace(made, notes=(*made.notes, *files.notes))


def _made(
    files: _FileGroup, options: Options
) -> Delimited | JsonLines | AccessLog | PlainText | Columnar | TFRecords | Images | Idx:
    urls, encoding, max_field = files.urls, options.encoding, options.max_field
    match files.format:
        case "csv":
            return Delimited.sniff(
                urls,
                delimiter=options.delimiter,
                header=options.header,
                names=options.names,
                quote=options.quote,
                encoding=encoding,
                null=options.null,
                max_field=max_field,
            )
        case "jsonl":
            return JsonLines.sniff(urls, max_field=max_field, missing=options.missing)
        case "log":
            return AccessLog.sniff(urls, encoding=encoding, max_field=max_field)
        case "text":
            return PlainText.sniff(
                urls,
                unit=options.unit,
                window=options.window or None,
                encoding=encoding,
                max_field=max_field,
            )
        case "parquet":
            return Columnar(urls, "parquet", options.columns, missing=options.missing)
        case "arrow" | "stream":
            return Columnar(urls, files.format, options.columns, missing=options.missing)
        case "tfrecord":
            return TFRecords(urls, missing=options.missing)
        case "images":
            return Images.of(files.root, urls)
        case "idx":
            return Idx.sniff(urls)
