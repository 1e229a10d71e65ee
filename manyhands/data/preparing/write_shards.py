# SPDX-License-Identifier: Apache-2.0
"""Divided records → encoded, shuffled shards and their manifest.

What each task does is in `encode_pieces`; here it is told which tasks there are, and what their
results come to together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from manyhands.data.columns.schema import ID, Column, Schema, column_of
from manyhands.data.encoding.choose_encoding import choose
from manyhands.data.encoding.column_facts import ColumnFacts, merge, statistics
from manyhands.data.encoding.encoders import Encoders, attempt, encoded_schema, refuse_clashes
from manyhands.data.encoding.fitted_encoders import Classes, Fitted, finish, finish_stacked
from manyhands.data.encoding.pack_columns import groups_of, pack, packed_schema
from manyhands.data.encoding.requested_encoding import Encoding
from manyhands.data.mapreduce.external_shuffle import buckets_for, parts_for
from manyhands.data.mapreduce.resumable_tasks import DataTask, digest_of
from manyhands.data.preparing import encode_pieces
from manyhands.data.preparing.asked_encodings import AskedEncodings, asked_encodings
from manyhands.data.preparing.assign_splits import Division
from manyhands.data.preparing.encode_pieces import (
    MOST_COPIES,
    Applied,
    EncodingPlan,
    Fit,
    WrittenShard,
)
from manyhands.data.preparing.lineage import lineage_of, merged
from manyhands.data.preparing.preparation import Preparation
from manyhands.data.preparing.recipe import WEIGHT
from manyhands.data.shards.manifest import VERSION, Manifest, SplitInfo, read_manifest
from manyhands.data.sources.formats.sniffing import listed
from manyhands.data.sources.staging import read_piece
from manyhands.values.errors import DataError
from manyhands.values.run_folder import write_whole

_SAMPLE_ROWS = 1000
_OWN_BYTES = 128 << 20
"""What a process takes before it has read anything."""
_SHARD_TIMES = 1.5
"""What gathering a shard takes, of its size."""


@dataclass(frozen=True, slots=True)
class Made:
    manifest: Manifest
    """Its lineage has what is told of this data set alone."""
    refused: list[tuple[int, str]]
    """Records that cannot be encoded, by id, with the reason."""


def make(
    prep: Preparation,
    pieces: Sequence[str],
    raw: Schema,
    division: Division,
    *,
    held_out: int | None = None,
) -> Made:
    """One data set: with the division's splits, or with one fold held out."""
    recipe = prep.recipe
    place = _place(prep, division, held_out)
    fitter = _Fitter(prep, pieces, raw, division, place.prefix)
    fitted, told = fitter.like(place.sides) if recipe.like else fitter.fit(place.sides)
    plan = fitter.plan(fitted, place.sides)
    schema = _schema(fitter.packed, fitted, weighted=recipe.balance == "weight")
    label = plan.label if isinstance(fitted.get(plan.label), Classes) else ""
    buckets = fitter.buckets(plan, len(place.names))
    parts = [parts_for(n, recipe.shard_bytes) for n in buckets]
    applied, spills = _apply(place, pieces, division, plan, buckets, parts)
    shards = _shuffle(place, spills, buckets, parts, schema, label)
    manifest = Manifest(
        version=VERSION,
        format=recipe.format,
        seed=recipe.seed,
        schema=schema,
        splits={name: _split_info(found, fitted.get(label)) for name, found in shards.items()},
        raw=raw,
        encoders=Encoders(fitted).dump(),
        split=recipe.split if held_out is None else f"fold {held_out} of {recipe.folds}",
        statistics=told,
        leakage=division.report.counts,
        lineage=lineage_of(merged([a.account for a in applied]), recipe, fitted)
        | ({"packed": fitter.groups} if fitter.groups else {}),
    )
    return Made(manifest, [found for a in applied for found in a.refused])


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a data set is made, and its splits."""

    prep: Preparation
    folder: Path
    prefix: str
    """Of its tasks and of its own files in `prep.work`."""
    names: Sequence[str]
    sides: list[int]
    """By split of the division: which of `names` its records go to."""

    def key(self, plan: EncodingPlan) -> str:
        """Tasks with another one are done again."""
        return digest_of(self.prep.key, msgspec.json.encode(plan))


def _place(prep: Preparation, division: Division, held_out: int | None) -> _Place:
    names, sides = division.rule.names, list(range(len(division.rule.names)))
    prefix, folder = "", prep.folder
    if held_out is not None:
        prefix, folder = f"fold-{held_out}-", prep.folder / f"fold-{held_out}"
        names, sides = ("train", "test"), [int(k == held_out) for k in sides]
    elif prep.recipe.like and names == ("train",):
        names = ("test",)
    folder.mkdir(exist_ok=True)
    return _Place(prep, folder, prefix, names, sides)


def _schema(packed: Schema, fitted: Mapping[str, Fitted], *, weighted: bool) -> Schema:
    schema = encoded_schema((Column(ID, "int64", "id"), *packed), fitted)
    if weighted:
        schema = (*schema, Column(WEIGHT, "float32", "weight"))
        refuse_clashes(schema)
    return schema


@dataclass(frozen=True, slots=True)
class _Spills:
    """Encoded records on their way to their shards."""

    index: Path
    key: str


def _apply(
    place: _Place,
    pieces: Sequence[str],
    division: Division,
    plan: EncodingPlan,
    buckets: Sequence[int],
    parts: Sequence[int],
) -> tuple[list[Applied], _Spills]:
    """Every piece encoded, and its records dealt to buckets."""
    prep, key = place.prep, place.key(plan)
    plan_file = prep.work / f"{place.prefix}plan.json"
    write_whole(plan_file, msgspec.json.encode(plan))
    folder = prep.work / f"{place.prefix}spills"
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{k:06}.spill" for k in range(len(pieces))]
    spilled = [n * k for n, k in zip(buckets, parts, strict=True)]
    tasks = [
        DataTask(
            f"{k:06}",
            encode_pieces.apply,
            (piece, stem, str(plan_file), spilled, str(path)),
            key=key,
        )
        for k, (piece, stem, path) in enumerate(zip(pieces, division.stems, paths, strict=True))
    ]
    applied = prep.runner.do(f"{place.prefix}apply", tasks, Applied)
    index = folder / "index"
    write_whole(index, "\n".join(map(str, paths)))
    return applied, _Spills(index, key)


def _shuffle(
    place: _Place,
    spills: _Spills,
    buckets: Sequence[int],
    parts: Sequence[int],
    schema: Schema,
    label: str,
) -> dict[str, list[WrittenShard]]:
    """Every bucket, shuffled and written as a shard; by split."""
    prep, names, recipe = place.prep, place.names, place.prep.recipe
    wanted = [(split, bucket) for split in range(len(names)) for bucket in range(buckets[split])]
    stems = [f"{names[split]}-{bucket:05}" for split, bucket in wanted]
    tasks = [
        DataTask(
            stem,
            encode_pieces.shuffle,
            (
                str(spills.index),
                split,
                bucket,
                parts[split],
                str(place.folder / stem),
                recipe,
                schema,
                label,
            ),
            key=spills.key,
        )
        for stem, (split, bucket) in zip(stems, wanted, strict=True)
    ]
    shards = prep.runner.do(f"{place.prefix}shuffle", tasks, WrittenShard)
    by_split: dict[str, list[WrittenShard]] = {name: [] for name in names}
    for (split, _), shard in zip(wanted, shards, strict=True):
        by_split[names[split]].append(shard)
    for name, found in by_split.items():
        if not any(shard.info.rows for shard in found):
            raise DataError(
                f"no record is left for the split '{name}' (--sample {recipe.sample:g})."
            )
    return by_split


def _split_info(shards: Sequence[WrittenShard], classes: Fitted | None) -> SplitInfo:
    counts: dict[str, int] = {}
    for shard in shards:
        for place, count in shard.labels.items():
            counts[place] = counts.get(place, 0) + count
    known = classes.values if isinstance(classes, Classes) else []
    labels = {
        str(known[int(place)]) if 0 <= int(place) < len(known) else "unknown": count
        for place, count in sorted(counts.items(), key=lambda item: int(item[0]))
    }
    infos = [shard.info for shard in shards]
    return SplitInfo(sum(i.rows for i in infos), sum(i.nbytes for i in infos), infos, labels)


def _class_label(fitted: Mapping[str, Fitted]) -> str:
    """The label, as another folder's encoders know it; "" where it is none of classes."""
    labels = (n for n, f in fitted.items() if isinstance(f, Classes) and f.role == "label")
    return next(labels, "")


class _Fitter:
    """Fitting, and what is known before it."""

    def __init__(
        self, prep: Preparation, pieces: Sequence[str], raw: Schema, division: Division, prefix: str
    ) -> None:
        self.prep, self.pieces, self.raw, self.division = prep, pieces, raw, division
        self.prefix, self.recipe = prefix, prep.recipe
        self.groups = self._groups()
        self.packed = packed_schema(raw, self.groups)

    def _groups(self) -> dict[str, list[str]]:
        if not self.recipe.like:
            return groups_of(self.recipe.pack, self.raw, [self.division.rule.column])
        return dict(read_manifest(Path(self.recipe.like)).lineage.get("packed", {}))

    def fit(self, sides: Sequence[int]) -> tuple[dict[str, Fitted], dict[str, Any]]:
        """Encoders, and statistics for people, from the training records."""
        recipe = self.recipe
        asked = asked_encodings(recipe.encode, recipe.missing, self.raw, self.packed, self.groups)
        training = [k for k, side in enumerate(sides) if side == 0]
        facts, inside = self._facts(self.packed, asked, training)
        for name, found in (facts | inside).items():
            if found.infinite:
                self.prep.note(
                    f"column '{name}': {found.infinite:,} numbers of training records are "
                    f"infinite; they are taken for missing (--missing {name}=error names them)"
                )
        fitted: dict[str, Fitted] = {}
        for c in self.packed:
            if c.name in self.groups and c.name not in asked.columns:
                fitted[c.name] = self._stack(c, inside, asked)
            else:
                fitted[c.name] = self._finish(c, facts[c.name], asked)
        return fitted, {name: statistics(f) for name, f in facts.items()}

    def _facts(
        self, columns: Schema, asked: AskedEncodings, splits: Sequence[int]
    ) -> tuple[dict[str, ColumnFacts], dict[str, ColumnFacts]]:
        """Of these columns, and of those that are packed, from the records of these splits."""
        folder = self.prep.work / f"{self.prefix}facts"
        folder.mkdir(exist_ok=True)
        key = digest_of(self.prep.key, repr((columns, asked, splits)))
        tasks = [
            DataTask(
                f"{k:06}",
                encode_pieces.fit,
                (
                    piece,
                    self.raw,
                    self.groups,
                    stem,
                    self.recipe.sample,
                    splits,
                    columns,
                    asked.columns,
                    asked.members,
                    str(folder / f"{k:06}.facts"),
                ),
                key=key,
            )
            for k, (piece, stem) in enumerate(zip(self.pieces, self.division.stems, strict=True))
        ]
        done = self.prep.runner.do(f"{self.prefix}fit", tasks, Fit)
        facts = merge(Path(d.file).read_bytes() for d in done)
        return facts, merge(Path(d.members).read_bytes() for d in done)

    def _finish(self, column: Column, facts: ColumnFacts, asked: AskedEncodings) -> Fitted:
        encoding = asked.columns.get(column.name)
        if encoding is None:
            encoding, reason = choose(column, facts)
            encoding = asked.of(column.name, encoding)
            if encoding.kind == "drop":
                self.prep.note(f"column '{column.name}' is left out: {reason}")
        return finish(encoding, facts)

    def _stack(
        self, column: Column, facts: Mapping[str, ColumnFacts], asked: AskedEncodings
    ) -> Fitted:
        """Packed columns, each scaled as it would be by itself. One that says nothing keeps its
        place: who packs columns counts on their number."""
        encodings: dict[str, tuple[Encoding, ColumnFacts]] = {}
        idle: list[str] = []
        for name in self.groups[column.name]:
            encoding, _ = choose(facts[name].column, facts[name])
            if encoding.kind == "drop" or encoding.missing == "flag":
                encoding = Encoding("standard")
                idle += [name] if name not in asked.members else []
            encodings[name] = asked.of(name, encoding), facts[name]
        if idle:
            self.prep.note(
                f"--pack {column.name}: all training records have the same value, or none, in "
                f"{listed(idle)}; packed columns keep their places, so these are 0"
            )
        return finish_stacked(column, encodings, asked.missing_of(column.name))

    def like(self, sides: Sequence[int]) -> tuple[dict[str, Fitted], dict[str, Any]]:
        """The encoders of another prepared folder; statistics of all records that are here."""
        other = read_manifest(Path(self.recipe.like))
        fitted = Encoders.load(other.encoders).fitted
        there = {c.name for c in self.packed}
        for name, fit in fitted.items():
            if fit.role not in ("label", "id", "group", "time", "weight"):
                column_of(self.packed, name)
        roles = {name: fit.role for name, fit in fitted.items()}
        replace = msgspec.structs.replace
        columns = tuple(replace(c, role=roles.get(c.name, c.role)) for c in self.packed)
        facts, _ = self._facts(columns, AskedEncodings({}, {}, {}), range(len(sides)))
        told = {name: statistics(found) for name, found in facts.items()}
        return {name: fit for name, fit in fitted.items() if name in there}, told

    def plan(self, fitted: Mapping[str, Fitted], sides: Sequence[int]) -> EncodingPlan:
        label = self.division.names.label or _class_label(fitted)
        counts: list[int] = []
        if self.recipe.balance:
            classes = fitted.get(label)
            if not isinstance(classes, Classes):
                raise DataError("--balance needs a label with classes: --label COLUMN.")
            told = self.division.report.balance
            training = [k for k, side in enumerate(sides) if side == 0]
            named = {str(v): k for k, v in enumerate(classes.values)}
            counts = [0] * len(classes.values)
            for value, found in told.items():
                if value in named:
                    counts[named[value]] = sum(found[k] for k in training)
            most = max(counts, default=0) / max(1, min((n for n in counts if n), default=1))
            if self.recipe.balance == "over" and most > MOST_COPIES:
                raise DataError(
                    f"--balance over would repeat records {most:,.0f} times; use weight or under."
                )
        return EncodingPlan(
            raw=self.raw,
            sides=list(sides),
            fitted=dict(fitted),
            seed=self.recipe.seed,
            pack={name: list(members) for name, members in self.groups.items()},
            sample=self.recipe.sample,
            how=self.recipe.balance,
            label=label,
            counts=counts,
            like=bool(self.recipe.like),
        )

    def buckets(self, plan: EncodingPlan, splits: int) -> list[int]:
        """How many shards each split gets, from the size of the first records when encoded."""
        types = {c.name: c.type for c in self.raw}
        table = read_piece(Path(self.pieces[0]), types).slice(0, _SAMPLE_ROWS)
        size = pack(table, plan.pack).nbytes / max(1, table.num_rows)
        encoded, _ = attempt(plan.fitted, pack(table, plan.pack))
        grows = encoded.nbytes / max(1, encoded.num_rows) / max(1.0, size)
        nbytes = [0.0] * splits
        for divided in self.division.pieces:
            for k, side in enumerate(plan.sides):
                nbytes[side] += divided.nbytes[k] * grows * plan.sample
        if _OWN_BYTES + _SHARD_TIMES * self.recipe.shard_bytes > self.prep.memory:
            self.prep.note(
                f"--memory is less than gathering a shard of {self.recipe.shard_bytes >> 20} MiB "
                "takes; a smaller --shard-size takes less"
            )
        return buckets_for(map(round, nbytes), self.recipe.shard_bytes)
