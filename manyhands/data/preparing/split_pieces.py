# SPDX-License-Identifier: Apache-2.0
"""The first phases of a preparation, over all pieces: staging and dividing.

What each task does is in `stage` and `dividing`; here it is told which tasks there are, and what
their results come to together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from manyhands.data.columns.schema import RECORD_BITS, Column, Role, Schema, with_roles
from manyhands.data.mapreduce.external_shuffle import KEY
from manyhands.data.mapreduce.resumable_tasks import DataTask, digest_of
from manyhands.data.preparing import assign_splits
from manyhands.data.preparing.assign_splits import KINDS, Counted, Divided, Division, Leaks, Names
from manyhands.data.preparing.recipe import WEIGHT, Recipe
from manyhands.data.preparing.work_folder import Preparation
from manyhands.data.sources.cutting.source import Chunk, Source
from manyhands.data.sources.formats.tfrecord_files import TFRecords
from manyhands.data.sources.staging import (
    Stage,
    joined_types,
    read_bad,
    stage,
    too_many,
    too_narrow,
)
from manyhands.data.splitting.leakage import LeakageReport
from manyhands.data.splitting.split_rule import SplitRule, parse_split, refuse_empty
from manyhands.data.statistics.exact_quantiles import Quantile
from manyhands.values.errors import DataError


@dataclass(frozen=True, slots=True)
class Pieces:
    """Everything that was staged."""

    stages: list[Stage]
    folder: Path
    schema: Schema
    files: list[str]

    @property
    def types(self) -> dict[str, str]:
        return {column.name: column.type for column in self.schema}

    @property
    def paths(self) -> list[str]:
        return [str(self.folder / piece.file) for s in self.stages for piece in s.pieces]

    @property
    def records(self) -> int:
        return sum(s.records for s in self.stages)

    @property
    def rows(self) -> int:
        return sum(piece.rows for s in self.stages for piece in s.pieces)


# ---- staging


def stage_all(prep: Preparation, sources: Sequence[Source]) -> Pieces:
    """Parse everything once; again where a chunk's types turn out too narrow."""
    jobs: list[tuple[Source, int, Chunk]] = []
    first_file = 0
    for source in sources:
        jobs += [(source, first_file, chunk) for chunk in source.chunks(prep.target_bytes)]
        first_file += len(source.files)
    if first_file >= 1 << (62 - RECORD_BITS):
        raise DataError(f"{first_file:,} files are too many; join them first.")
    folder = prep.work / "pieces"
    folder.mkdir(exist_ok=True)

    def staged(numbers: Iterable[int], types: Mapping[str, str], phase: str) -> list[Stage]:
        key = digest_of(prep.key, msgspec.json.encode(sorted(types.items())))
        return prep.crew.do(
            phase,
            [
                DataTask(
                    f"{n:06}",
                    stage,
                    (*jobs[n], n, types, prep.target_bytes, str(folder), prep.recipe.skip),
                    jobs[n][2].nbytes,
                    key,
                )
                for n in numbers
            ],
            Stage,
        )

    recipe = prep.recipe
    stages = staged(range(len(jobs)), recipe.types, "stage")
    # The values of a feature are always a list there; a piece shows it only where it varies.
    one_is_list = all(isinstance(source, TFRecords) for source in sources)
    types = joined_types(stages, recipe.types, one_is_list=one_is_list)
    narrow = [s.chunk for s in stages if too_narrow(s, types)]
    if narrow:
        again = {s.chunk: s for s in staged(narrow, types, "restage")}
        stages = [again.get(s.chunk, s) for s in stages]
    bad = sum(s.bad for s in stages)
    shown = [b for b, _ in zip(read_bad(folder, stages), range(10), strict=False)]
    if bad > recipe.skip:
        raise DataError(too_many(shown, recipe.skip, bad))
    if not any(s.pieces for s in stages):
        raise DataError(f"there are no records in {', '.join(_files(sources)[:3])}.")
    columns = tuple(Column(name, types[name], _role(name, types[name])) for name in types)
    chosen = set(recipe.chosen(types))
    schema = with_roles(columns, _roles(recipe, columns))
    schema = tuple(c for c in schema if c.name in chosen and c.role != "ignore")
    _refuse_names(recipe, [c.name for c in schema])
    for column, role in recipe.roles.items():
        if role in ("label", "id") and column not in chosen:
            raise DataError(f"column '{column}' is the {role} and is also left out.")
    if not schema:
        raise DataError("no column is left; see --keep, --drop and --role.")
    return Pieces(stages, folder, schema, _files(sources))


def _refuse_names(recipe: Recipe, names: Sequence[str]) -> None:
    """Names that are needed for something else."""
    taken = {KEY: "used inside"} | (
        {WEIGHT: "what --balance adds"} if recipe.balance == "weight" else {}
    )
    for name, why in taken.items():
        if name in names:
            raise DataError(f"a column is called '{name}', which is {why}: --drop {name}.")


def _files(sources: Sequence[Source]) -> list[str]:
    return [file for source in sources for file in source.files]


def _role(name: str, kind: str) -> Role:
    """What a column's name and type say about it, when nobody says anything."""
    if name == "text" and kind == "string":
        return "text"
    return "image" if name == "image" and kind == "binary" else "feature"


def _roles(recipe: Recipe, columns: Schema) -> dict[str, Role]:
    """Roles as given; and columns that the split itself looks at are not learnt from."""
    roles: dict[str, Role] = {}
    rule = parse_split(recipe.split)
    if rule.kind in ("group", "time") and any(c.name == rule.column for c in columns):
        roles[rule.column] = "group" if rule.kind == "group" else "time"
    if any(c.role == "image" for c in columns):
        roles |= {c.name: "label" for c in columns if c.name == "label"}
        roles |= {c.name: "id" for c in columns if c.name == "file"}
    return roles | recipe.roles


def group_of(recipe: Recipe) -> str:
    return next((name for name, role in recipe.roles.items() if role == "group"), "")


# ---- dividing


def divide_all(prep: Preparation, pieces: Pieces, rule: SplitRule) -> Division:
    schema, paths, crew = pieces.schema, pieces.paths, prep.crew
    by_role = {c.role: c.name for c in reversed(schema)}
    group = rule.column if rule.kind == "group" else by_role.get("group", "")
    names = Names(by_role.get("id", ""), group, by_role.get("label", ""))
    if rule.column and rule.column not in pieces.types:
        there = ", ".join(pieces.types)
        raise DataError(f"split by '{rule.column}': there is no such column; there are {there}.")
    parts = max(1, -(-pieces.rows * 64 // prep.memory))
    folder = prep.work / "splits"
    folder.mkdir(exist_ok=True)
    stems = [str(folder / f"{k:06}") for k in range(len(paths))]
    key = digest_of(prep.key, repr((rule, names, pieces.types)))
    links = ""
    if names.id and rule.links:
        links = _links(prep, pieces, rule, names, parts, key)
    if rule.open:
        rule = msgspec.structs.replace(rule, moments=_moments(prep, pieces, rule, key))
    divided = crew.do(
        "divide",
        [
            DataTask(
                f"{k:06}",
                assign_splits.divide,
                (path, pieces.types, names, rule, links, parts, stem),
                key=key,
            )
            for k, (path, stem) in enumerate(zip(paths, stems, strict=True))
        ],
        Divided,
    )
    leaks = crew.do(
        "leaks",
        [
            DataTask(f"{part:04}", assign_splits.leaks, (stems, part), key=key)
            for part in range(parts)
        ],
        Leaks,
    )
    shared = [sum(found.counts[k] for found in leaks) for k in range(len(KINDS))]
    counts = [sum(d.rows[k] for d in divided) for k in range(len(rule.names))]
    report = LeakageReport(rule.names, *shared, balance=_balance(divided, len(rule.names)))
    refuse_empty(rule, dict(zip(rule.names, counts, strict=True)))
    if report.advice:
        prep.note(f"warning: {report.advice}")
    return Division(rule, stems, divided, report, names)


def _links(
    prep: Preparation, pieces: Pieces, rule: SplitRule, names: Names, parts: int, key: str
) -> str:
    """The table of keys that ids link; nothing where every id has one key."""
    folder = prep.work / "links"
    folder.mkdir(exist_ok=True)
    stems = [str(folder / f"{k:06}") for k in range(len(pieces.paths))]
    pair = [
        DataTask(
            f"{k:06}", assign_splits.pair, (path, pieces.types, names, rule, parts, stem), key=key
        )
        for k, (path, stem) in enumerate(zip(pieces.paths, stems, strict=True))
    ]
    prep.crew.do("pair", pair, type(None))
    found = [str(folder / f"linking-{part:04}.npy") for part in range(parts)]
    link = [
        DataTask(f"{k:04}", assign_splits.link, (stems, k, to), key=key)
        for k, to in enumerate(found)
    ]
    prep.crew.do("link", link, type(None))
    to = folder / "links.npy"
    assign_splits.join_links(found, to)
    return str(to)


def _moments(prep: Preparation, pieces: Pieces, rule: SplitRule, key: str) -> tuple[int, ...]:
    """Where a split by shares of time is cut, found exactly in a few rounds."""
    quantile = Quantile(rule.cuts)
    for turn in range(64):
        if quantile.done:
            return quantile.found
        jobs = [
            DataTask(
                f"{turn}-{k:06}",
                assign_splits.count_times,
                (path, pieces.types, rule, quantile),
                key=key,
            )
            for k, path in enumerate(pieces.paths)
        ]
        counted = prep.crew.do("moments", jobs, Counted)
        quantile = quantile.narrow(quantile.merge(c.counts for c in counted))
    raise AssertionError("the moments were not found")


def _balance(divided: Sequence[Divided], splits: int) -> dict[str, tuple[int, ...]]:
    labels = sorted({label for d in divided for of_split in d.labels for label in of_split})
    if any(not any(d.labels) for d in divided):
        return {}
    return {
        label: tuple(sum(d.labels[k].get(label, 0) for d in divided) for k in range(splits))
        for label in labels
    }
