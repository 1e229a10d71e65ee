# SPDX-License-Identifier: Apache-2.0
"""Dividing: every staged record gets its split; what leaks is counted.

What each task does is in `assign_splits`; here it is told which tasks there are, and what their
results come to together.
"""

from collections.abc import Sequence

import msgspec

from manyhands.data.mapreduce.resumable_tasks import DataTask, digest_of
from manyhands.data.preparing import assign_splits
from manyhands.data.preparing.assign_splits import KINDS, Counted, Divided, Division, Leaks, Names
from manyhands.data.preparing.preparation import Preparation
from manyhands.data.preparing.stage_pieces import Pieces
from manyhands.data.splitting.leakage import LeakageReport
from manyhands.data.splitting.split_rule import SplitRule, refuse_empty
from manyhands.data.statistics.exact_quantiles import Quantile
from manyhands.values.errors import DataError

_LEARNT_FROM = ("feature", "text")
_ENTRY_BYTES = 160
"""Of memory, for each record and thing by which it is told apart: the search for leaks takes 64,
and a process has to live."""


def divide_all(prep: Preparation, pieces: Pieces, rule: SplitRule) -> Division:
    schema, paths, runner = pieces.schema, pieces.paths, prep.runner
    by_role = {c.role: c.name for c in reversed(schema)}
    group = rule.column if rule.kind == "group" else by_role.get("group", "")
    inputs = [c.name for c in schema if c.role in _LEARNT_FROM and c.name not in _unused(prep)]
    names = Names(by_role.get("id", ""), group, by_role.get("label", ""), tuple(inputs))
    if rule.column and rule.column not in pieces.types:
        there = ", ".join(pieces.types)
        raise DataError(f"split by '{rule.column}': there is no such column; there are {there}.")
    told_apart = 1 + bool(names.id) + bool(names.group)
    parts = max(1, -(-pieces.rows * told_apart * _ENTRY_BYTES // prep.memory))
    folder = prep.work / "splits"
    folder.mkdir(exist_ok=True)
    stems = [str(folder / f"{k:06}") for k in range(len(paths))]
    key = digest_of(prep.key, repr((rule, names, pieces.types)))
    links = ""
    if names.id and rule.links:
        links = _links(prep, pieces, rule, names, parts, key)
    if rule.open:
        rule = msgspec.structs.replace(rule, moments=_moments(prep, pieces, rule, key))
    divided = runner.do(
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
    leaks = runner.do(
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
    notes = _of_the_label(stems, names) if names.label and names.inputs else []
    return Division(rule, stems, divided, report, names, notes)


def _unused(prep: Preparation) -> list[str]:
    return [name for name, how in prep.recipe.encode.items() if how == "drop"]


def _of_the_label(stems: Sequence[str], names: Names) -> list[str]:
    found, records = assign_splits.determined_by(stems, names)
    return [
        f"warning: column '{name}' by itself determines the label '{names.label}': in all "
        f"{records:,} different records that were looked at, {how}. If it is not known when the "
        f"model is used, it gives the label away: --drop {name}"
        for name, how in found.items()
    ]


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
    prep.runner.do("pair", pair, type(None))
    found = [str(folder / f"linking-{part:04}.npy") for part in range(parts)]
    link = [
        DataTask(f"{k:04}", assign_splits.link, (stems, k, to), key=key)
        for k, to in enumerate(found)
    ]
    prep.runner.do("link", link, type(None))
    to = folder / "links.npy"
    assign_splits.join_links(found, to)
    return str(to)


def _moments(prep: Preparation, pieces: Pieces, rule: SplitRule, key: str) -> tuple[int, ...]:
    """Where a split by shares of time is cut, found exactly in a few rounds."""
    quantile = Quantile(rule.cuts)
    for turn in range(64):
        if quantile.done:
            return quantile.found
        tasks = [
            DataTask(
                f"{turn}-{k:06}",
                assign_splits.count_times,
                (path, pieces.types, rule, quantile),
                key=key,
            )
            for k, path in enumerate(pieces.paths)
        ]
        counted = prep.runner.do("moments", tasks, Counted)
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
