# SPDX-License-Identifier: Apache-2.0
"""What a prepared folder says of itself. It is written last: a folder with a manifest is whole."""

from pathlib import Path
from typing import Any

import msgspec

from manyhands.data.schema import Schema
from manyhands.errors import DataError
from manyhands.rundir import write_whole

NAME = "manifest.json"
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
    """By raw column: how it is encoded, with what was fitted. `data.prepare.encode` reads it."""
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
    write_whole(folder / NAME, text + b"\n")


def read_manifest(folder: Path) -> Manifest:
    path = folder / NAME
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise DataError(
            f"{folder} is not a prepared data set (it has no {NAME}). Make one with: "
            f"manyhands prepare SOURCE --to {folder}"
        ) from None
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if manifest.version > VERSION:
        raise DataError(
            f"{path} is of version {manifest.version}; this manyhands reads up to {VERSION}."
        )
    return manifest
