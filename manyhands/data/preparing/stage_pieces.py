# SPDX-License-Identifier: Apache-2.0
"""Staging: all raw records → typed pieces, with the roles that columns are to have.

What each task does is in `sources.staging`; here it is judged what their results come to together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from manyhands.data.columns.schema import Column, Role, Schema, type_of, with_roles
from manyhands.data.mapreduce.external_shuffle import KEY
from manyhands.data.mapreduce.stage_sources import stage_sources
from manyhands.data.preparing.preparation import Preparation
from manyhands.data.preparing.recipe import WEIGHT, Recipe
from manyhands.data.shards.manifest import read_manifest
from manyhands.data.sources.cutting.source import Source
from manyhands.data.sources.formats.tfrecord_files import TFRecords
from manyhands.data.sources.staging import Stage, read_bad, too_many
from manyhands.data.splitting.split_rule import parse_split
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


def stage_all(prep: Preparation, sources: Sequence[Source]) -> Pieces:
    recipe, folder = prep.recipe, prep.work / "pieces"
    staged = stage_sources(
        prep.runner,
        sources,
        _types_of_text(recipe) | recipe.types,
        prep.target_bytes,
        folder,
        key=prep.key,
        skip=recipe.skip,
        # The values of a feature are always a list there; a piece shows it only where it varies.
        one_is_list=all(isinstance(source, TFRecords) for source in sources),
    )
    stages, types = staged.stages, staged.types
    for name in recipe.types:
        if name not in types:
            raise DataError(f"--type: there is no column '{name}'; there are {', '.join(types)}.")
    for note in staged.notes:
        prep.note(note)
    files = [file for source in sources for file in source.files]
    bad = sum(s.bad for s in stages)
    shown = [b for b, _ in zip(read_bad(folder, stages), range(10), strict=False)]
    if bad > recipe.skip:
        raise DataError(too_many(shown, recipe.skip, bad))
    if not any(s.pieces for s in stages):
        raise DataError(f"there are no records in {', '.join(files[:3])}.")
    return Pieces(stages, folder, _schema(recipe, types), files)


def _types_of_text(recipe: Recipe) -> dict[str, str]:
    """With --like: what text was read as there, so that 007 stays text, and dates mean the same."""
    if not recipe.like:
        return {}
    raw = read_manifest(Path(recipe.like)).raw
    texts = (pa.string(), pa.timestamp("us"))
    return {c.name: c.type for c in raw if type_of(c.type) in texts}


def _schema(recipe: Recipe, types: Mapping[str, str]) -> Schema:
    """The columns that are kept, each with its role."""
    columns = tuple(Column(name, types[name], _role(name, types[name])) for name in types)
    chosen = set(recipe.chosen(types))
    schema = with_roles(columns, _roles(recipe, columns))
    schema = tuple(c for c in schema if c.name in chosen and c.role != "ignore")
    _refuse_names(recipe, [c.name for c in schema])
    for column, role in recipe.roles.items():
        if role in ("label", "id", "group", "time", "weight") and column not in chosen:
            raise DataError(f"column '{column}' is the {role} and is also left out.")
    if not schema:
        raise DataError("no column is left; see --keep, --drop and --role.")
    return schema


def _refuse_names(recipe: Recipe, names: Sequence[str]) -> None:
    """Names that are needed for something else."""
    taken = {KEY: "used inside"} | (
        {WEIGHT: "what --balance adds"} if recipe.balance == "weight" else {}
    )
    for name, why in taken.items():
        if name in names:
            raise DataError(f"a column is called '{name}', which is {why}: --drop {name}.")


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
