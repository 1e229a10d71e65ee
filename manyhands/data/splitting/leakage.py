# SPDX-License-Identifier: Apache-2.0
"""The proof that splits share nothing, and how labels are spread over them.

`shared` can be asked bucket by bucket (hashes spread by their value) and the answers added up.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from manyhands.data.columns.hashing import NULL, Hashes


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
