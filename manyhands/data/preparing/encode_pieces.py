# SPDX-License-Identifier: Apache-2.0
"""What the tasks that make shards do, each with one piece or one shard.

    fit       facts of a piece's training records
    apply     a piece's rows encoded and spilled, grouped by the shard they belong to
    shuffle   a shard's rows gathered from all spills, sorted by key, written and described

A record's key is a bijection of its id, so the order of records is the order of keys, whoever
wrote them. Copies of a record (`balance over`) have ids of their own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manyhands.data.columns.hashing import mix64
from manyhands.data.columns.schema import ID, Schema
from manyhands.data.encoding.column_facts import collect
from manyhands.data.encoding.encoders import attempt
from manyhands.data.encoding.fitted_encoders import Fitted
from manyhands.data.encoding.pack_columns import pack
from manyhands.data.encoding.requested_encoding import Encoding
from manyhands.data.encoding.unseen_values import unseen
from manyhands.data.mapreduce.external_shuffle import KEY, gather_parts, spill
from manyhands.data.preparing.assign_splits import load_splits
from manyhands.data.preparing.balance_classes import class_weights, resample, sample
from manyhands.data.preparing.lineage import Account, by_class, sampled_out
from manyhands.data.preparing.recipe import SUFFIX, WEIGHT, Recipe
from manyhands.data.shards.manifest import ShardInfo
from manyhands.data.shards.shard_formats import write_arrow, write_parquet, write_tfrecord
from manyhands.data.sources.staging import read_piece
from manyhands.values.run_folder import write_whole

_COPY_BITS, MOST_COPIES = 55, 127
"""Copies of a record are told apart above its id."""

_WRITERS = {"arrow": write_arrow, "parquet": write_parquet, "tfrecord": write_tfrecord}


class EncodingPlan(msgspec.Struct, frozen=True):
    """What every task of `apply` needs to know; kept in a file."""

    raw: Schema
    """Of the pieces."""
    sides: list[int]
    """Of each split of the division: the split it becomes here."""
    fitted: dict[str, Fitted]
    seed: int
    pack: dict[str, list[str]]
    sample: float
    how: str
    """"", "weight", "under" or "over"."""
    label: str
    counts: list[int]
    """Training records of each class."""
    like: bool
    """The encoders are of another folder: training records may hold what they do not know, too."""


class Fit(msgspec.Struct, frozen=True):
    file: str
    members: str
    """Facts of the columns that are packed."""


class Applied(msgspec.Struct, frozen=True):
    refused: list[tuple[int, str]]
    """Records that cannot be encoded, by id, with the reason."""
    account: Account


class WrittenShard(msgspec.Struct, frozen=True):
    info: ShardInfo
    labels: dict[str, int]


# ---- what tasks do


def read_rows(
    piece: str, raw: Schema, groups: Mapping[str, Sequence[str]], stem: str, share: float
) -> tuple[pa.Table, NDArray[np.int8]]:
    """A piece's rows, packed, and their splits; of a sample, if that is wanted."""
    table, splits = read_unpacked(piece, raw, stem, share)
    return pack(table, groups), splits


def read_unpacked(
    piece: str, raw: Schema, stem: str, share: float
) -> tuple[pa.Table, NDArray[np.int8]]:
    table = read_piece(Path(piece), {c.name: c.type for c in raw})
    splits = load_splits(stem)
    if share < 1:
        chosen = sample(table.column(ID).to_numpy().view(np.uint64), share)
        table, splits = table.filter(pa.array(chosen)), splits[chosen]
    return table, splits


def fit(
    piece: str,
    raw: Schema,
    groups: Mapping[str, Sequence[str]],
    stem: str,
    share: float,
    training: Sequence[int],
    packed: Schema,
    encodings: Mapping[str, Encoding],
    member_encodings: Mapping[str, Encoding],
    to: str,
) -> Fit:
    table, splits = read_unpacked(piece, raw, stem, share)
    table = table.filter(pa.array(np.isin(splits, training)))
    inside = {name for members in groups.values() for name in members}
    members = tuple(c for c in raw if c.name in inside)
    write_whole(Path(f"{to}.members"), collect(table, members, member_encodings))
    write_whole(Path(to), collect(pack(table, groups), packed, encodings))
    return Fit(to, f"{to}.members")


def apply(piece: str, stem: str, plan_file: str, buckets: Sequence[int], to: str) -> Applied:
    plan = msgspec.json.decode(Path(plan_file).read_bytes(), type=EncodingPlan)
    table, splits = read_rows(piece, plan.raw, plan.pack, stem, plan.sample)
    encoded, sides, refused, account = encode_rows(table, splits, plan)
    keys = mix64(plan.seed, encoded.column(ID).to_numpy())
    fit = plan.fitted.get(plan.label)
    gone = sampled_out(piece, stem, plan.raw, plan.sample, plan.label, fit)
    account = msgspec.structs.replace(account, sampled_out=gone)
    spill(Path(to), encoded, sides, keys, buckets)
    return Applied(refused, account)


def encode_rows(
    table: pa.Table, splits: NDArray[np.int8], plan: EncodingPlan
) -> tuple[pa.Table, NDArray[np.int8], list[tuple[int, str]], Account]:
    """Rows as they will stand in shards, the split of each, the rows that cannot, and what is to
    be told of them."""
    sides = np.array([*plan.sides, -1], dtype=np.int8)[splits]
    if (placed := sides >= 0).all() is not np.True_:
        table, sides = table.filter(pa.array(placed)), sides[placed]
    ids = table.column(ID).to_numpy()
    encoded, wrong = attempt(plan.fitted, table)
    if wrong:
        sides = np.delete(sides, list(wrong))
        table = table.take(pa.array(np.delete(np.arange(len(ids)), list(wrong))))
    refused = [(int(ids[row]), what) for row, what in wrong.items()]
    fresh = pa.array((sides > 0) | plan.like)
    strange = unseen(plan.fitted, table.filter(fresh), encoded.filter(fresh))
    more: dict[str, int] = {}
    if plan.how == "weight":
        encoded = weighed(encoded, sides, plan)
    elif plan.how:
        encoded, sides, more = balanced(encoded, sides, plan)
    return encoded, sides, refused, Account(resampled=more, unseen=strange)


def weighed(encoded: pa.Table, sides: NDArray[np.int8], plan: EncodingPlan) -> pa.Table:
    """Training records with the weight of their label; the others with 1."""
    labels = encoded.column(plan.label).to_numpy()
    weights = np.append(class_weights(plan.counts), np.float32(1.0))
    found = weights[np.where((labels >= 0) & (labels < len(plan.counts)), labels, -1)]
    found = np.where(sides == 0, found, np.float32(1.0)).astype(np.float32)
    return encoded.append_column(WEIGHT, pa.array(found))


def balanced(
    encoded: pa.Table, sides: NDArray[np.int8], plan: EncodingPlan
) -> tuple[pa.Table, NDArray[np.int8], dict[str, int]]:
    """Training records left out or repeated by their label, the others once; and by label, how
    many more there are now."""
    labels = encoded.column(plan.label).to_numpy()
    ids = encoded.column(ID).to_numpy()
    how = "under" if plan.how == "under" else "over"
    often = resample(ids.view(np.uint64), labels, plan.counts, how)
    often = np.where(sides == 0, often, 1)
    rows = np.repeat(np.arange(len(ids)), often)
    copies = np.arange(len(rows)) - np.repeat(np.cumsum(often) - often, often)
    copied = encoded.take(pa.array(rows))
    marked = copied.column(ID).to_numpy() | (copies.astype(np.int64) << _COPY_BITS)
    place = copied.column_names.index(ID)
    more = by_class(plan.fitted[plan.label], labels, often - 1)
    return copied.set_column(place, ID, pa.array(marked)), sides[rows], more


def shuffle(
    index_file: str,
    split: int,
    bucket: int,
    parts: int,
    to: str,
    recipe: Recipe,
    schema: Schema,
    label: str,
) -> WrittenShard:
    spills = [Path(p) for p in Path(index_file).read_text().splitlines()]
    table = gather_parts(spills, split, bucket, parts).drop_columns([KEY])
    table = table.select([c.name for c in schema])
    info = write_records(Path(f"{to}.{SUFFIX[recipe.format]}"), table, recipe)
    counted: dict[str, int] = {}
    if label:
        values, counts = np.unique(table.column(label).to_numpy(), return_counts=True)
        counted = {str(v): int(n) for v, n in zip(values.tolist(), counts.tolist(), strict=True)}
    return WrittenShard(info, counted)


def write_records(path: Path, table: pa.Table, recipe: Recipe) -> ShardInfo:
    """A shard in the format that was asked for."""
    write = _WRITERS[recipe.format]
    return write(path, table, compression=recipe.compression or None)
