# SPDX-License-Identifier: Apache-2.0
"""The proof that splits share nothing, and how labels are spread over them.

`shared` can be asked bucket by bucket (hashes spread by their value) and the answers added up.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from manyhands.data.columns.hashing import NULL, Hashes

SHOWN = 12
"""Labels in the table; of more, the most frequent ones."""
WIDE = 5
"""More splits than this (folds) are summed up as fewest and most."""


def shared(hashes: Hashes, splits: NDArray[np.int8]) -> int:
    """How many distinct hashes are in more than one split. Missing values are shared by nobody."""
    there = (hashes != NULL) & (splits >= 0)
    hashes, splits = hashes[there], splits[there]
    if not len(hashes):
        return 0
    order = np.argsort(hashes, kind="stable")
    hashes, splits = hashes[order], splits[order]
    first = np.flatnonzero(np.insert(hashes[1:] != hashes[:-1], 0, True))
    least, most = np.minimum.reduceat(splits, first), np.maximum.reduceat(splits, first)
    return int((least != most).sum())


class LeakageReport(msgspec.Struct, frozen=True):
    """What the splits share, and what they hold."""

    splits: tuple[str, ...]
    ids: int = 0
    contents: int = 0
    groups: int = 0
    """Distinct ones that are in more than one split."""
    balance: dict[str, tuple[int, ...]] = {}
    """By label: how many records in each split."""

    @property
    def counts(self) -> dict[str, int]:
        return {"ids": self.ids, "contents": self.contents, "groups": self.groups}

    @property
    def clean(self) -> bool:
        return not (self.ids or self.contents or self.groups)

    @property
    def advice(self) -> str:
        """What to do about what is shared; nothing when nothing is."""
        hints = {
            "ids": "records of one id are in several splits; a ratio or group split with the id's "
            "column given as --id keeps them together",
            "contents": "records with the same content are in several splits; remove the "
            "repetitions, or split by ratio, which keeps them together",
            "groups": "a group is in several splits; split by it: --split group=COLUMN:0.8",
        }
        found = [f"{hint}." for name, hint in hints.items() if getattr(self, name)]
        return " ".join(["What is tested was seen in training:", *found]) if found else ""

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [self._shared()]
        if self.balance and self.splits:
            parts.append(self._labels())
        if self.advice:
            parts.append(Text(self.advice, style="bold red"))
        return Group(*parts)

    def _shared(self) -> Text:
        counted = f"{self.ids:,} ids, {self.contents:,} contents, {self.groups:,} groups"
        verdict = "nothing leaks" if self.clean else "LEAKAGE"
        style = "green" if self.clean else "bold red"
        return Text.assemble(("Shared between splits: ", ""), counted, "  ", (verdict, style))

    def _labels(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("label", overflow="ellipsis", no_wrap=True, max_width=24)
        names = self.splits if len(self.splits) <= WIDE else ("fewest", "most")
        for name in names:
            table.add_column(name, justify="right", overflow="ellipsis", no_wrap=True, max_width=21)
        sums = np.array(list(self.balance.values())).sum(axis=0)
        ranked = sorted(self.balance.items(), key=lambda item: (-sum(item[1]), item[0]))
        for label, counts in ranked[:SHOWN]:
            table.add_row(Text(label), *_cells(counts, sums))
        if rest := ranked[SHOWN:]:
            left = np.array([counts for _, counts in rest]).sum(axis=0)
            table.add_row(f"{len(rest):,} more", *_cells(left, sums), style="dim")
        return table


def _cells(counts: Sequence[int] | NDArray[np.int64], sums: NDArray[np.int64]) -> list[str]:
    cells = [
        f"{n:,} ({n / total:.1%})" if total else "0" for n, total in zip(counts, sums, strict=True)
    ]
    if len(cells) <= WIDE:
        return cells
    ranked = np.argsort(np.asarray(counts), kind="stable")
    return [cells[ranked[0]], cells[ranked[-1]]]
