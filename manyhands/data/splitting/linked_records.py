# SPDX-License-Identifier: Apache-2.0
"""Records that belong together although their keys differ: the same id with different contents.

A split puts records by a key (the hash of their content, or of their group), so equal keys are
always together. An id that was seen with several keys links those keys, and links chain. `linked`
finds the chains and names for every key that is not its chain's smallest what to put it by
instead. Data whose ids are unique has no links, and the table is empty.

Only ids with several keys matter, and `linking` finds them: with ids spread over buckets, each
bucket can be searched by itself, and `linked` be given what all of them found.
"""

import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyhands.data.columns.hashing import NULL, Hashes


class KeyLinks(NamedTuple):
    keys: Hashes
    """Rising."""
    leaders: Hashes
    """What each of the keys is put by."""

    @staticmethod
    def load(path: Path) -> "KeyLinks":
        keys, leaders = np.load(path, allow_pickle=False)
        return KeyLinks(keys, leaders)

    def dump(self) -> bytes:
        """What `load` expects in a file."""
        buffer = io.BytesIO()
        np.save(buffer, np.stack(self), allow_pickle=False)
        return buffer.getvalue()

    def follow(self, keys: Hashes) -> Hashes:
        if not len(self.keys):
            return keys
        places = np.searchsorted(self.keys, keys)
        places[places == len(self.keys)] = 0
        return np.where(self.keys[places] == keys, self.leaders[places], keys)


NO_LINKS = KeyLinks(np.empty(0, np.uint64), np.empty(0, np.uint64))


def linking(ids: Hashes, keys: Hashes) -> tuple[Hashes, Hashes]:
    """The distinct (id, key) pairs of the ids that have more than one key, in order."""
    there = ids != NULL
    ids, keys = ids[there], keys[there]
    order = np.argsort(ids, kind="stable")
    order = order[_repeated(ids[order])]  # mostly few: the others need no closer look
    ids, keys = ids[order], keys[order]
    order = np.lexsort((keys, ids))
    ids, keys = ids[order], keys[order]
    fresh = np.ones(len(ids), np.bool_)
    fresh[1:] = (ids[1:] != ids[:-1]) | (keys[1:] != keys[:-1])
    ids, keys = ids[fresh], keys[fresh]
    several = _repeated(ids)
    return ids[several], keys[several]


def _repeated(values: Hashes) -> NDArray[np.bool_]:
    """Which sorted values are there more than once."""
    same = values[1:] == values[:-1]
    repeated = np.zeros(len(values), np.bool_)
    repeated[1:] |= same
    repeated[:-1] |= same
    return repeated


def linked(ids: Hashes, keys: Hashes) -> KeyLinks:
    """The keys that some chain of ids joins to a smaller one, and the smallest of their chain."""
    ids, keys = linking(ids, keys)
    if not len(ids):
        return NO_LINKS
    nodes, places = np.unique(keys, return_inverse=True)
    same = ids[1:] == ids[:-1]
    smallest = _components(len(nodes), places[1:][same], places[:-1][same])
    moved = smallest != np.arange(len(nodes))
    return KeyLinks(nodes[moved], nodes[smallest[moved]])


def _components(size: int, left: NDArray[np.intp], right: NDArray[np.intp]) -> NDArray[np.intp]:
    """For each of `size` nodes the smallest node that the edges connect it with.

    Trees are hooked onto their smallest neighbour and flattened, so a chain takes about log rounds.
    """
    root = np.arange(size)
    while True:
        low = np.minimum(root[left], root[right])
        hooked = root.copy()
        np.minimum.at(hooked, root[left], low)
        np.minimum.at(hooked, root[right], low)
        while not np.array_equal(hooked, flat := hooked[hooked]):
            hooked = flat
        if np.array_equal(hooked, root):
            return root
        root = hooked
