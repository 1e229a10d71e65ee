# SPDX-License-Identifier: Apache-2.0
"""Which format a file has: by its first bytes, its suffix, or what its beginning looks like."""

import json
from typing import Literal

from manyhands.data.sources.access.decompress import is_tfrecord
from manyhands.data.sources.access.files import name_of_file, read_head, shown, suffix_of
from manyhands.data.sources.formats import sniffing
from manyhands.data.sources.formats.access_log import AccessLog
from manyhands.data.sources.formats.idx_files import is_idx, is_named_idx
from manyhands.data.sources.formats.image_folder import SUFFIXES as IMAGE_SUFFIXES
from manyhands.data.sources.values.csv_fields import Dialect
from manyhands.values.errors import DataError

FileFormat = Literal[
    "csv", "jsonl", "log", "text", "parquet", "arrow", "stream", "tfrecord", "images", "idx"
]

FORMATS: dict[str, FileFormat] = {
    "csv": "csv",
    "tsv": "csv",
    "tab": "csv",
    "psv": "csv",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "jsonlines": "jsonl",
    "json": "jsonl",
    "log": "log",
    "text": "text",
    "txt": "text",
    "parquet": "parquet",
    "pq": "parquet",
    "arrow": "arrow",
    "feather": "arrow",
    "ipc": "arrow",
    "arrows": "stream",
    "stream": "stream",
    "tfrecord": "tfrecord",
    "tfrecords": "tfrecord",
    "tfrec": "tfrecord",
    "images": "images",
    "idx": "idx",
}
"""What people write for a format, and suffixes."""

_ONLY_A_HINT = frozenset({"txt", "text", "log", "json"})
"""Suffixes that files of several formats have."""

_DOCUMENTS = ("readme", "license", "licence", "copying", "changelog", "notice", "authors")
_DOCUMENT_SUFFIXES = frozenset(
    {".md", ".rst", ".html", ".htm", ".pdf", ".md5", ".sha1", ".sha256", ".sha512", ".crc"}
)
_HEAD_BYTES = 64 << 10
_EVEN = 0.8
"""So many of the lines must have as many fields as most, to be taken for delimited."""


def is_document(url: str) -> bool:
    """A file that tells about the data beside it."""
    name = name_of_file(url).lower()
    return name.startswith(_DOCUMENTS) or suffix_of(url) in _DOCUMENT_SUFFIXES


def is_image(url: str) -> bool:
    return suffix_of(url) in IMAGE_SUFFIXES


def detect(url: str, forced: FileFormat | None = None) -> FileFormat:
    """The format of a file; DataError when it cannot be told."""
    if forced is not None:
        return _arrow_or_stream(url) if forced in ("arrow", "stream") else forced
    if is_image(url):
        return "images"
    suffix = suffix_of(url)
    head = read_head(url, _HEAD_BYTES)
    sure = _by_magic(url, head)
    if sure is not None:
        return sure
    if is_named_idx(name_of_file(url)):
        return "idx"
    named = FORMATS.get(suffix.removeprefix("."))
    if named is not None and suffix.removeprefix(".") not in _ONLY_A_HINT:
        return named
    sniffing.skip_bom(url, head)  # refuses what is no UTF-8
    return _by_content(url, head, suffix)


def _by_magic(url: str, head: bytes) -> FileFormat | None:
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"ARROW1"):
        return "arrow"
    if head.startswith(b"\xff\xff\xff\xff"):
        return "stream"
    if head.startswith(b"FEA1"):
        raise DataError(
            f"{shown(url)} is Feather version 1, which has no types for nested data and is no "
            "longer written. Write it again with pyarrow.feather.write_feather."
        )
    if is_tfrecord(head[:12]):  # some lengths begin like IDX
        return "tfrecord"
    return "idx" if is_idx(head) else None


def _arrow_or_stream(url: str) -> FileFormat:
    return "stream" if _by_magic(url, read_head(url, 12)) == "stream" else "arrow"


def _by_content(url: str, head: bytes, suffix: str) -> FileFormat:
    if b"\0" in head:
        raise DataError(
            f"the format of {shown(url)} is unknown: it is no text. Say what it is with --from."
        )
    if _is_json_line(head):
        return "jsonl"
    if suffix == ".json":
        raise DataError(
            f"{shown(url)} is not JSON lines (one object on each line). Convert it first: "
            "jq -c '.[]' FILE > NEW.jsonl"
        )
    if AccessLog.looks_like(head):
        return "log"
    return "csv" if _is_delimited(head) else "text"


def _is_json_line(head: bytes) -> bool:
    lines = head.lstrip(b"\xef\xbb\xbf \t\r\n").splitlines()
    try:
        return isinstance(json.loads(lines[0]), dict) if lines else False
    except (ValueError, RecursionError):
        # A first line that is longer than the head looks like one that goes on.
        return len(lines) == 1 and len(head) == _HEAD_BYTES and lines[0].startswith(b'{"')


def _is_delimited(head: bytes) -> bool:
    delimiter = sniffing.sniff_delimiter(head, '"', "utf-8")
    rows = sniffing.rows_of(head, Dialect(delimiter, '"', "utf-8"))
    columns = sniffing.columns_of(rows)
    return columns > 1 and sum(len(row) == columns for row in rows) >= _EVEN * len(rows)
