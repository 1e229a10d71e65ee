# SPDX-License-Identifier: Apache-2.0
"""How records are to be prepared: everything that decides the result, apart from the records.

A recipe goes into the manifest, and its digest into every checkpoint of an unfinished preparation:
what was done under another recipe is not used.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, get_args

import msgspec

from manyhands.data.columns.schema import MANIFEST, ROLES, Role, type_of
from manyhands.data.encoding.pack_columns import matching
from manyhands.values.byte_sizes import parse_bytes
from manyhands.values.errors import DataError
from manyhands.values.prepare_options import Pairs, PrepareRequest
from manyhands.values.shell_commands import command_line

ShardFormat = Literal["arrow", "parquet", "tfrecord"]
Balance = Literal["", "weight", "under", "over"]

WEIGHT = "weight"
"""The column that `balance = "weight"` adds."""

SUFFIX: dict[ShardFormat, str] = {"arrow": "arrow", "parquet": "parquet", "tfrecord": "tfrecord"}


class Recipe(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    split: str
    """`ratio=0.8`, `time=when:0.8`, `group=user:0.8`, `segment=region:north`, or `none`."""
    folds: int = 0
    """Instead of a split: this many folds, each held out once."""
    seed: int = 0
    """Of the order of records."""
    roles: dict[str, Role] = {}
    types: dict[str, str] = {}
    encode: dict[str, str] = {}
    missing: dict[str, str] = {}
    pack: dict[str, list[str]] = {}
    """New column → patterns of the columns that are stacked into it."""
    keep: list[str] = []
    drop: list[str] = []
    """Patterns of columns; left out, all are kept."""
    balance: Balance = ""
    sample: float = 1.0
    format: ShardFormat = "arrow"
    compression: Literal["", "lz4", "zstd"] = ""
    shard_bytes: int = 64 << 20
    skip: int = 0
    """How many bad records may be left out; 0: the first one ends it."""
    like: str = ""
    """A prepared folder whose columns and encoders are used instead of fitting new ones."""

    def __post_init__(self) -> None:
        if self.folds == 1 or self.folds < 0:
            raise DataError(f"folds = {self.folds}: give at least 2.")
        if not 0 < self.sample <= 1:
            raise DataError(f"sample = {self.sample} is not a fraction between 0 and 1.")
        if self.shard_bytes < 1 << 10:
            raise DataError(f"shards of {self.shard_bytes} bytes are too small.")
        for name in self.types.values():
            type_of(name)
        asked = (self.folds, self.encode, self.balance, self.missing, self.pack, self.roles)
        if self.like and any(asked):
            raise DataError("--like takes everything from the other folder; leave out the rest.")

    def digest(self, *facts: object) -> str:
        """Marks checkpoints: the same digest, the same work."""
        import xxhash

        return xxhash.xxh3_128_hexdigest(msgspec.json.encode([self, *map(str, facts)]))

    def chosen(self, names: Iterable[str]) -> list[str]:
        """Which columns are kept, in their order."""
        names = list(names)
        for pattern in (*self.keep, *self.drop):
            if not matching(pattern, names):
                raise DataError(f"no column matches '{pattern}'; there are {', '.join(names)}.")
        kept = {n for pattern in self.keep for n in matching(pattern, names)} or {*names}
        gone = {n for pattern in self.drop for n in matching(pattern, names)}
        return [n for n in names if n in kept - gone]


def _split(given: str | float | None) -> str:
    """As it is written down: 0.8 is ratio=0.8, and prepares the same folder."""
    text = "" if given is None else str(given).strip()
    return f"ratio={text}" if text[:1].isdigit() or text[:1] == "." else text


def recipe_of(request: PrepareRequest) -> Recipe:
    """What was asked for, made sense of; what cannot be is refused by name."""
    if request.folds and request.split is not None:
        raise DataError("give a split or folds, not both.")
    pack = _pairs(request.pack, "pack")
    return msgspec.convert(
        {
            "split": _split(request.split) or ("none" if request.like else "ratio=0.8"),
            "folds": request.folds,
            "seed": request.seed,
            "roles": settle_roles(
                _pairs(request.roles, "role"), request.label, request.id, request.group
            ),
            "types": _pairs(request.types, "type"),
            "encode": _pairs(request.encode, "encode"),
            "missing": _pairs(request.missing, "missing"),
            "pack": {name: patterns.split(",") for name, patterns in pack.items()},
            "keep": list(request.keep),
            "drop": list(request.drop),
            "balance": choice("balance", request.balance, get_args(Balance)),
            "sample": request.sample,
            "format": choice("format", request.format, get_args(ShardFormat)),
            "compression": choice("compression", request.compression, ("", "lz4", "zstd")),
            "shard_bytes": parse_bytes(request.shard_size),
            "skip": read_on_error(request.on_error),
            "like": "" if request.like is None else str(request.like),
        },
        Recipe,
        strict=False,
    )


def choice(what: str, given: str, allowed: Iterable[str]) -> str:
    """What was given, if it is one of these."""
    if given not in allowed:
        raise DataError(f"there is no {what} '{given}'; use {', '.join(a for a in allowed if a)}.")
    return given


def read_on_error(text: str) -> int:
    """`fail` or `skip:LIMIT`, as the number of records that may be skipped."""
    if text == "fail":
        return 0
    if (found := re.fullmatch(r"skip(?::(\d[\d_,]*))?", text)) is None:
        raise DataError(f"--on-error {text}: use fail, or skip:LIMIT (skip:100).")
    if found[1] is None:
        raise DataError("--on-error skip needs a limit: skip:100.")
    return int(found[1].replace(",", "").replace("_", ""))


def read_pairs(texts: Iterable[str], what: str) -> dict[str, str]:
    """COLUMN=VALUE, as given on a command line."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise DataError(f"--{what} {text}: write COLUMN=VALUE.")
        if name in pairs:
            raise DataError(f"--{what} names {name} twice.")
        pairs[name] = value
    return pairs


def settle_roles(
    given: Mapping[str, str], label: str | None, id: str | None, group: str | None
) -> dict[str, Role]:
    """Roles from `--role` and from the short forms `--label`, `--id`, `--group`."""
    roles: dict[str, str] = dict(given)
    for column, role in ((label, "label"), (id, "id"), (group, "group")):
        if column is None:
            continue
        if roles.get(column, role) != role:
            raise DataError(f"column '{column}' is said to be {roles[column]} and {role}.")
        roles[column] = role
    for column, role in roles.items():
        if role not in ROLES:
            raise DataError(f"{column}: there is no role '{role}'; use {', '.join(ROLES)}.")
    for role, meant in (("id", True), ("label", label is not None)):
        named = [c for c, r in roles.items() if r == role]
        if meant and len(named) > 1:
            raise DataError(f"more than one column is said to be the {role}: {', '.join(named)}.")
    return msgspec.convert(roles, dict[str, Role])


def refuse_finished(folder: Path) -> None:
    """Data that somebody may be training on is never written over."""
    if (folder / MANIFEST).exists():
        raise DataError(
            f"{folder} already holds a prepared data set. Look at it with "
            f"`{command_line('data', folder)}`, choose another folder, or remove it first."
        )
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file.")
    if folder.is_dir() and any(p.name != ".work" for p in folder.iterdir()):
        left = sorted(p.name for p in folder.iterdir())[:3]
        if not (folder / ".work").exists():
            raise DataError(
                f"{folder} is not empty ({', '.join(left)}, ...); choose another folder."
            )


def _pairs(given: Pairs, what: str) -> dict[str, str]:
    return dict(given) if isinstance(given, Mapping) else read_pairs(given, what)
