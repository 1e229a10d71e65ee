# SPDX-License-Identifier: Apache-2.0
"""What a prepared folder says of itself. It is written last: a folder with a manifest is whole."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from manyhands.data.columns.schema import MANIFEST, Schema
from manyhands.data.shards.prepared_url import FolderOrUrl
from manyhands.data.sources.access.url_secrets import is_url, shown
from manyhands.values.errors import DataError
from manyhands.values.run_folder import write_whole
from manyhands.values.shell_commands import command_line

VERSION = 1

BLOCK_BYTES = 1 << 20
"""Checksums are kept for blocks of this size, so that damage can be placed."""


class ShardInfo(msgspec.Struct, frozen=True):
    file: str
    """Relative to the folder."""
    rows: int
    nbytes: int
    checksums: list[str]
    """xxh3_64 of each block of BLOCK_BYTES, in hexadecimal."""


class SplitInfo(msgspec.Struct, frozen=True):
    rows: int
    nbytes: int
    shards: list[ShardInfo]
    labels: dict[str, int] = {}
    """How many records of each label, where labels are classes."""


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    version: int
    format: str
    """"arrow", "tfrecord" or "parquet"."""
    seed: int
    schema: Schema
    """Of the encoded records, as they are in the shards."""
    splits: dict[str, SplitInfo]
    folds: int = 0
    """Instead of splits: this many folders fold-0, fold-1, ..., each a data set of its own."""
    raw: Schema = ()
    """Of the raw records."""
    encoders: dict[str, Any] = {}
    """By raw column: how it is encoded, with what was fitted. `encoders.Encoders` reads it."""
    split: str = ""
    """The rule, as it was given."""
    lineage: dict[str, Any] = {}
    """Sources (without secrets), their sizes, rows in, rows skipped, settings."""
    statistics: dict[str, Any] = {}
    """By raw column: count, missing, least, most, mean, common values."""
    leakage: dict[str, int] = {}
    """Ids, contents and groups that are in more than one split: all 0."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    write_whole(folder / MANIFEST, text + b"\n")


class Listing(NamedTuple):
    """A manifest, and its bytes, which are the same wherever it is read."""

    manifest: Manifest
    raw: bytes


def read_manifest(folder: FolderOrUrl) -> Manifest:
    return read_listing(folder).manifest


def read_listing(folder: FolderOrUrl) -> Listing:
    try:
        raw = _read(folder)
        manifest = msgspec.json.decode(raw, type=Manifest)
    except FileNotFoundError:
        raise DataError(_missing(str(folder))) from None
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DataError(f"{folder / MANIFEST} cannot be read: {error}") from error
    if manifest.version > VERSION:
        raise DataError(
            f"{folder / MANIFEST} is of version {manifest.version}; this manyhands reads up to "
            f"{VERSION}."
        )
    return Listing(manifest, raw)


def _read(folder: FolderOrUrl) -> bytes:
    if isinstance(folder, Path):
        return (folder / MANIFEST).read_bytes()
    try:
        return folder.read(MANIFEST)
    except DataError as error:
        raise DataError(f"{folder} is not a prepared data set that can be read: {error}") from None


def _missing(folder: str) -> str:
    url = re.sub("^([^/]+):/(?!/)", r"\1://", folder)  # what a Path makes of it
    if is_url(url):
        return (
            f"{shown(url)} was given as a Path, which loses a slash of a URL. Give it as text: "
            'mh.prepared("..."), or data="...".'
        )
    return (
        f"{folder} is not a prepared data set (it has no {MANIFEST}). Make one with: "
        f"{command_line('prepare', 'SOURCE', '--to', Path(folder))}"
    )
