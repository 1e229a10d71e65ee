# SPDX-License-Identifier: Apache-2.0
"""What became of records on the way to shards: left out by a sample, left out or repeated to
balance labels, and values that no encoder knows. Counted piece by piece, told once.

Invariant: records = rows + skipped + left out by the sample + left out to balance - repeated. All
of these are in a manifest's lineage, so that anybody can add them up.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manyhands.data.columns.arrays import nulls, whole
from manyhands.data.columns.schema import ID, Schema, column_of
from manyhands.data.encoding import unseen_values
from manyhands.data.encoding.encoders import classes_of
from manyhands.data.encoding.fitted_encoders import Classes, Fitted
from manyhands.data.encoding.unseen_values import UnseenValues
from manyhands.data.preparing.assign_splits import load_splits
from manyhands.data.preparing.balance_classes import sample
from manyhands.data.preparing.recipe import Recipe
from manyhands.data.sources.formats.sniffing import listed
from manyhands.data.sources.staging import read_piece
from manyhands.data.splitting.split_rule import NOWHERE

UNKNOWN, MISSING = "unknown", "missing"
"""What stands for a label where records have none that is known."""
MOST_UNKNOWN = 0.5
"""A larger share of unknown values in a feature is worth a word."""
_LABELS_SHOWN = 12

ByLabel = dict[str, int]
"""Records by their label; all under "" where there are no classes."""


class Account(msgspec.Struct, frozen=True):
    sampled_out: ByLabel = {}
    resampled: ByLabel = {}
    """How many times more often records stand in the training split; less than 0: they do not."""
    unseen: dict[str, UnseenValues] = {}
    """By column; of records that encoders were not fitted on."""


def merged(parts: Sequence[Account]) -> Account:
    """Of all pieces together."""
    return Account(
        _sum(part.sampled_out for part in parts),
        _sum(part.resampled for part in parts),
        unseen_values.merged(part.unseen for part in parts),
    )


def _sum(parts: Iterable[ByLabel]) -> ByLabel:
    total: ByLabel = {}
    for part in parts:
        for label, count in part.items():
            total[label] = total.get(label, 0) + count
    return dict(sorted(total.items()))


# ---- counting


def by_class(
    fit: Fitted | None, classes: NDArray[np.int64], times: NDArray[np.int64] | None = None
) -> ByLabel:
    """How many records of each class (numbered as in encoded labels); each counted `times`."""
    names = [*map(str, fit.values), UNKNOWN] if isinstance(fit, Classes) else [""]
    places = np.where((classes >= 0) & (classes < len(names) - 1), classes, len(names) - 1)
    counts = np.zeros(len(names), np.int64)
    np.add.at(counts, places, 1 if times is None else times)
    return {name: n for name, n in zip(names, counts.tolist(), strict=True) if n}


def sampled_out(
    piece: str, stem: str, raw: Schema, share: float, label: str, fit: Fitted | None
) -> ByLabel:
    """The records of a piece that a sample leaves out. Those that are in no split anyway are not
    among them: they are reported as such."""
    if share >= 1:
        return {}
    types = {label: column_of(raw, label).type} if isinstance(fit, Classes) else {}
    table = read_piece(Path(piece), types)
    gone = ~sample(table.column(ID).to_numpy().view(np.uint64), share)
    gone &= load_splits(stem) != NOWHERE
    if not isinstance(fit, Classes):
        return {"": int(gone.sum())}
    labels = whole(table.column(label).filter(pa.array(gone)))
    missing = nulls(labels)
    found = by_class(fit, classes_of(fit, labels)[~missing])
    return found | ({MISSING: int(missing.sum())} if missing.any() else {})


# ---- telling


def lineage_of(account: Account, recipe: Recipe, fitted: Mapping[str, Fitted]) -> dict[str, Any]:
    """What a manifest says of it: only what there is to say."""
    told: dict[str, Any] = {}
    if recipe.sample < 1:
        told["sample"] = _counted("left_out", account.sampled_out)
    if recipe.balance == "under":
        left_out = {label: -n for label, n in account.resampled.items()}
        told["balance"] = _counted("left_out", left_out)
    elif recipe.balance == "over":
        told["balance"] = _counted("repeated", account.resampled)
    noted = {name: u for name, u in account.unseen.items() if _noteworthy(u, fitted[name])}
    if noted:
        told["unseen"] = msgspec.to_builtins(noted)
    notes = [_of_sample(told, recipe), _of_balance(told)]
    who = "" if recipe.like else "held-out "
    notes += [_of_unseen(name, found, fitted[name], who) for name, found in noted.items()]
    return told | {"notes": [note for note in notes if note]}


def notes_on_unseen(unseen: Mapping[str, UnseenValues], fitted: Mapping[str, Fitted]) -> list[str]:
    """A line for each column with many values that its encoder does not know."""
    noted = {name: found for name, found in unseen.items() if _noteworthy(found, fitted[name])}
    return [_of_unseen(name, found, fitted[name], "") for name, found in noted.items()]


def _counted(what: str, counts: ByLabel) -> dict[str, Any]:
    labels = {label: n for label, n in counts.items() if label}
    return {what: sum(counts.values())} | ({"labels": labels} if labels else {})


def _noteworthy(found: UnseenValues, fit: Fitted) -> bool:
    if isinstance(fit, Classes):
        return found.unknown > 0
    return found.unknown > MOST_UNKNOWN * found.values


def _of_sample(told: Mapping[str, Any], recipe: Recipe) -> str:
    if "sample" not in told:
        return ""
    count, which = told["sample"]["left_out"], _labels(told["sample"])
    return f"--sample {recipe.sample:g}: {_records(count)} left out{which}"


def _of_balance(told: Mapping[str, Any]) -> str:
    if "balance" not in told:
        return ""
    found = told["balance"]
    which = _labels(found)
    if "left_out" in found:
        return f"--balance under: {_records(found['left_out'])} left out of training{which}"
    copies = "copy" if found["repeated"] == 1 else "copies"
    return f"--balance over: {found['repeated']:,} {copies} of training records were added{which}"


def _records(count: int) -> str:
    return f"{count:,} record{' was' if count == 1 else 's were'}"


def _labels(found: Mapping[str, Any]) -> str:
    labels: ByLabel = found.get("labels", {})
    ranked = sorted(labels.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{_short(label)}: {n:,}" for label, n in ranked[:_LABELS_SHOWN]]
    more = [f"{len(ranked) - _LABELS_SHOWN:,} more labels"] if len(ranked) > _LABELS_SHOWN else []
    return f" ({', '.join([*shown, *more])})" if shown else ""


def _short(label: str) -> str:
    return listed([label])


def _of_unseen(name: str, found: UnseenValues, fit: Fitted, who: str) -> str:
    shown = ", ".join(f"'{example}'" for example in map(_short, found.examples))
    such = f" (for example {shown})" if shown else ""
    counted = f"{found.unknown:,} of {found.values:,}"
    if isinstance(fit, Classes):
        return (
            f"{fit.role} '{name}': {counted} {who}records have one that was not there when the "
            f"encoders were fitted{such}. They are encoded as -100, which torch's losses leave out "
            "of account."
        )
    return (
        f"{fit.role} '{name}': {counted} {who}values were not there when the encoders were fitted"
        f"{such}. All of them are encoded as 0, unknown."
    )


def alike(labels: Iterable[str]) -> list[list[str]]:
    """Labels that are the same but for case, white space, and full stops at their end."""
    groups: dict[str, list[str]] = {}
    for label in labels:
        stem = label.strip().rstrip(".").rstrip().casefold()
        groups.setdefault(" ".join(stem.split()), []).append(label)
    return [sorted(group) for group in groups.values() if len(group) > 1]


def hints(fitted: Mapping[str, Fitted], lineage: Mapping[str, Any]) -> list[str]:
    """What people may want to mend in their labels. Nothing is changed for them."""
    found: list[str] = []
    for name, fit in fitted.items():
        if not isinstance(fit, Classes) or fit.role != "label":
            continue
        strange = lineage.get("unseen", {}).get(name, {}).get("examples", [])
        labels = dict.fromkeys(v for v in [*fit.values, *strange] if isinstance(v, str))
        groups = alike(labels)
        shown = [" and ".join(f"'{label}'" for label in map(_short, group)) for group in groups]
        if shown:
            found.append(
                f"hint: labels of '{name}' differ only in case, white space or a full stop at the "
                f"end: {'; '.join(shown[: unseen_values.EXAMPLES])}. They count as different; if "
                "they should not, mend the raw files."
            )
    return found
