# SPDX-License-Identifier: Apache-2.0
"""The story of a preparation: raw records in, a prepared folder out.

    plan      the files are cut in chunks
    stage     chunks → typed pieces on disk; every bad record is named
    divide    every record gets its split; nothing leaks, and that is counted
    fit       encoders learn from the training records only
    apply     pieces are encoded and spilled, grouped by shard
    shuffle   each shard is gathered and sorted by its records' keys

Each phase is a list of independent tasks over an Executor, and every finished task is kept: the
same command goes on where it was interrupted. The manifest is written last.

Invariant: the bytes of the result are a function of the records and the recipe alone; not of the
number of workers, their memory, how often they died, or who they were.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from manyhands.data.manifest import Manifest, write_manifest
from manyhands.data.mapreduce.tasks import Crew, Job, digest_of, parse_bytes
from manyhands.data.prepare import dividing, making
from manyhands.data.prepare.dividing import KINDS, Counted, Divided, Division, Leaks, Names
from manyhands.data.prepare.recipe import (
    Recipe,
    read_on_error,
    read_pairs,
    refuse_finished,
    settle_roles,
)
from manyhands.data.prepare.site import Site, bars, claim, target_bytes, work_folder
from manyhands.data.prepare.stage import (
    Stage,
    joined_types,
    read_bad,
    stage,
    too_many,
    too_narrow,
)
from manyhands.data.schema import RECORD_BITS, Column, Role, Schema, with_roles
from manyhands.data.sources.contract import Bad, Chunk, Source
from manyhands.data.sources.generated import Spooled
from manyhands.data.sources.opening import Options, open_sources
from manyhands.data.sources.tfrecords import TFRecords
from manyhands.data.splitting.leakage import Report
from manyhands.data.splitting.quantile import Quantile
from manyhands.data.splitting.split import Rule, folds, parse_split, refuse_empty
from manyhands.errors import DataError
from manyhands.rundir import write_whole
from manyhands.version import VERSION

Pairs = Mapping[str, str] | Sequence[str]
"""COLUMN → VALUE, or texts COLUMN=VALUE."""

SKIPPED = "skipped.jsonl"


def prepare(
    sources: str | Path | Iterable[Any],
    to: str | Path,
    *,
    label: str | None = None,
    split: str | None = None,
    folds: int = 0,
    id: str | None = None,
    group: str | None = None,
    roles: Pairs = (),
    types: Pairs = (),
    encode: Pairs = (),
    missing: Pairs = (),
    pack: Pairs = (),
    keep: Sequence[str] = (),
    drop: Sequence[str] = (),
    balance: str = "",
    sample: float = 1.0,
    like: str | Path | None = None,
    on_error: str = "fail",
    seed: int = 0,
    input_format: str | None = None,
    delimiter: str | None = None,
    header: str = "auto",
    names: Sequence[str] | None = None,
    encoding: str = "utf-8",
    null: Sequence[str] = (),
    max_field: str | int = "16MiB",
    unit: str = "line",
    window: int = 0,
    format: str = "arrow",
    compression: str = "",
    shard_size: str | int = "64MiB",
    workers: int | None = None,
    memory: str | int = "1GiB",
    executor: Executor | None = None,
    restart: bool = False,
    quiet: bool = True,
) -> Manifest:
    """Turn raw records into a data set in the folder `to`; what it holds.

    `sources`: paths, globs, folders, URLs, or an iterable of records (dicts). docs/data.md says
    what each setting does.
    """
    if folds and split is not None:
        raise DataError("give a split or folds, not both.")
    recipe = msgspec.convert(
        {
            "split": split or ("none" if like else "ratio=0.8"),
            "folds": folds,
            "seed": seed,
            "roles": settle_roles(_pairs(roles, "role"), label, id, group),
            "types": _pairs(types, "type"),
            "encode": _pairs(encode, "encode"),
            "missing": _pairs(missing, "missing"),
            "pack": {name: p.split(",") for name, p in _pairs(pack, "pack").items()},
            "keep": list(keep),
            "drop": list(drop),
            "balance": balance,
            "sample": sample,
            "format": format,
            "compression": compression,
            "shard_bytes": parse_bytes(shard_size),
            "skip": read_on_error(on_error),
            "like": "" if like is None else str(like),
        },
        Recipe,
        strict=False,
    )
    options = Options(
        format=input_format,
        delimiter=delimiter,
        header=header,
        names=tuple(names or ()),
        encoding=encoding,
        null=tuple(null),
        max_field=parse_bytes(max_field),
        unit=unit,
        window=window,
    )
    folder, limit = Path(to), parse_bytes(memory)
    refuse_finished(folder)
    with work_folder(folder, restart=restart) as work, bars(quiet=quiet) as progress:
        opened = open_sources(sources, options, spool=work / "spool", target=target_bytes(limit))
        target = target_bytes(limit, _size_of(opened))
        key = recipe.digest(options, target, *_facts(opened))
        claim(work, key, folder)
        with Crew(work, workers=workers, executor=executor, progress=progress) as crew:
            site = Site(folder, recipe, crew, limit, target, key, quiet)
            for note in (note for source in opened for note in source.notes):
                site.note(note)
            manifest = _make(site, opened)
        shutil.rmtree(work)
    return manifest


def _pairs(given: Pairs, what: str) -> dict[str, str]:
    return dict(given) if isinstance(given, Mapping) else read_pairs(given, what)


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


# ---- the phases


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


def _make(site: Site, sources: Sequence[Source]) -> Manifest:
    recipe = site.recipe
    pieces = _stage(site, sources)
    rule = folds(recipe.folds, _group_of(recipe)) if recipe.folds else parse_split(recipe.split)
    division = _divide(site, pieces, rule)
    made = [
        making.make(site, pieces.paths, pieces.schema, division, held_out=held_out)
        for held_out in (range(recipe.folds) if recipe.folds else (None,))
    ]
    bad = _left_out(site, pieces, division, made[0].refused)
    lineage = _lineage(site, pieces, division, len(bad))
    finished = [msgspec.structs.replace(m.manifest, lineage=lineage) for m in made]
    if bad:
        lines = b"".join(msgspec.json.encode(b) + b"\n" for b in bad)
        write_whole(site.folder / SKIPPED, lines)
        plural = "records were" if len(bad) > 1 else "record was"
        site.note(f"{len(bad):,} {plural} left out: see {site.folder / SKIPPED}")
    if not recipe.folds:
        write_manifest(site.folder, finished[0])
        return finished[0]
    for held_out, manifest in enumerate(finished):
        write_manifest(site.folder / f"fold-{held_out}", manifest)
    whole = msgspec.structs.replace(
        finished[0], schema=(), splits={}, encoders={}, statistics={}, folds=recipe.folds
    )
    write_manifest(site.folder, msgspec.structs.replace(whole, split=f"folds={recipe.folds}"))
    return whole


def _stage(site: Site, sources: Sequence[Source]) -> Pieces:
    """Parse everything once; again where a chunk's types turn out too narrow."""
    jobs: list[tuple[Source, int, Chunk]] = []
    first_file = 0
    for source in sources:
        jobs += [(source, first_file, chunk) for chunk in source.chunks(site.target_bytes)]
        first_file += len(source.files)
    if first_file >= 1 << (62 - RECORD_BITS):
        raise DataError(f"{first_file:,} files are too many; join them first.")
    folder = site.work / "pieces"
    folder.mkdir(exist_ok=True)

    def staged(numbers: Iterable[int], types: Mapping[str, str], phase: str) -> list[Stage]:
        key = digest_of(site.key, msgspec.json.encode(sorted(types.items())))
        return site.crew.do(
            phase,
            [
                Job(
                    f"{n:06}",
                    stage,
                    (*jobs[n], n, types, site.target_bytes, str(folder), site.recipe.skip),
                    jobs[n][2].nbytes,
                    key,
                )
                for n in numbers
            ],
            Stage,
        )

    recipe = site.recipe
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
    if not schema:
        raise DataError("no column is left; see --keep, --drop and --role.")
    return Pieces(stages, folder, schema, _files(sources))


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


def _group_of(recipe: Recipe) -> str:
    return next((name for name, role in recipe.roles.items() if role == "group"), "")


def _divide(site: Site, pieces: Pieces, rule: Rule) -> Division:
    schema, paths, crew = pieces.schema, pieces.paths, site.crew
    by_role = {c.role: c.name for c in reversed(schema)}
    group = rule.column if rule.kind == "group" else by_role.get("group", "")
    names = Names(by_role.get("id", ""), group, by_role.get("label", ""))
    if rule.column and rule.column not in pieces.types:
        there = ", ".join(pieces.types)
        raise DataError(f"split by '{rule.column}': there is no such column; there are {there}.")
    parts = max(1, -(-pieces.rows * 64 // site.memory))
    folder = site.work / "splits"
    folder.mkdir(exist_ok=True)
    stems = [str(folder / f"{k:06}") for k in range(len(paths))]
    key = digest_of(site.key, repr((rule, names, pieces.types)))
    links = ""
    if names.id and rule.links:
        links = _links(site, pieces, rule, names, parts, key)
    if rule.open:
        rule = msgspec.structs.replace(rule, moments=_moments(site, pieces, rule, key))
    divided = crew.do(
        "divide",
        [
            Job(
                f"{k:06}",
                dividing.divide,
                (path, pieces.types, names, rule, links, parts, stem),
                key=key,
            )
            for k, (path, stem) in enumerate(zip(paths, stems, strict=True))
        ],
        Divided,
    )
    leaks = crew.do(
        "leaks",
        [Job(f"{part:04}", dividing.leaks, (stems, part), key=key) for part in range(parts)],
        Leaks,
    )
    shared = [sum(found.counts[k] for found in leaks) for k in range(len(KINDS))]
    counts = [sum(d.rows[k] for d in divided) for k in range(len(rule.names))]
    report = Report(rule.names, *shared, balance=_balance(divided, len(rule.names)))
    refuse_empty(rule, dict(zip(rule.names, counts, strict=True)))
    if report.advice:
        site.note(f"warning: {report.advice}")
    return Division(rule, stems, divided, report, names)


def _links(site: Site, pieces: Pieces, rule: Rule, names: Names, parts: int, key: str) -> str:
    """The table of keys that ids link; nothing where every id has one key."""
    folder = site.work / "links"
    folder.mkdir(exist_ok=True)
    stems = [str(folder / f"{k:06}") for k in range(len(pieces.paths))]
    pair = [
        Job(f"{k:06}", dividing.pair, (path, pieces.types, names, rule, parts, stem), key=key)
        for k, (path, stem) in enumerate(zip(pieces.paths, stems, strict=True))
    ]
    site.crew.do("pair", pair, type(None))
    found = [str(folder / f"linking-{part:04}.npy") for part in range(parts)]
    link = [Job(f"{k:04}", dividing.link, (stems, k, to), key=key) for k, to in enumerate(found)]
    site.crew.do("link", link, type(None))
    to = folder / "links.npy"
    dividing.join_links(found, to)
    return str(to)


def _moments(site: Site, pieces: Pieces, rule: Rule, key: str) -> tuple[int, ...]:
    """Where a split by shares of time is cut, found exactly in a few rounds."""
    quantile = Quantile(rule.cuts)
    for turn in range(64):
        if quantile.done:
            return quantile.found
        jobs = [
            Job(
                f"{turn}-{k:06}",
                dividing.count_times,
                (path, pieces.types, rule, quantile),
                key=key,
            )
            for k, path in enumerate(pieces.paths)
        ]
        counted = site.crew.do("moments", jobs, Counted)
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


# ---- what is told of it


def _left_out(
    site: Site, pieces: Pieces, division: Division, refused: Sequence[tuple[int, str]]
) -> list[Bad]:
    """Every record that is in no shard, with the reason; more than may be skipped is an error."""
    what = f"its '{division.rule.column}' is missing, so it belongs to no split"
    nowhere = [(record, what) for d in division.pieces for record in d.nowhere]
    late = [
        Bad(pieces.files[record >> RECORD_BITS], record & ((1 << RECORD_BITS) - 1), -1, why)
        for record, why in sorted([*nowhere, *refused])
    ]
    bad = [*read_bad(pieces.folder, pieces.stages), *late]
    if len(bad) > site.recipe.skip:
        raise DataError(too_many(bad, site.recipe.skip))
    return bad


def _lineage(site: Site, pieces: Pieces, division: Division, skipped: int) -> dict[str, Any]:
    return {
        "files": pieces.files,
        "records": pieces.records,
        "skipped": skipped,
        "recipe": msgspec.to_builtins(site.recipe),
        "rule": msgspec.to_builtins(division.rule),
        "made_by": f"manyhands {VERSION}",
    }
