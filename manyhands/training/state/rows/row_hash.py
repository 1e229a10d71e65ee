# SPDX-License-Identifier: Apache-2.0
"""An id's 64 scrambled bits, and the bucket of the table that it belongs to.

The scrambling is one-to-one (the finalizer of splitmix64), so the index keeps it instead of the id
and nothing is hashed again when a bucket is rebuilt. The highest ten bits place an id in one of
1,024 buckets, which are what servers and workers share out; the index looks at the lowest. They
must be different bits: within a bucket the highest are all the same.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int64]
IdHashes: TypeAlias = NDArray[np.uint64]
Int64s: TypeAlias = NDArray[np.int64]

BUCKETS = 1024
_BUCKET_SHIFT = np.uint64(64 - 10)

_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_FIRST_BACK, _SECOND_BACK = np.uint64(0x96DE1B173F119089), np.uint64(0x319642B2D24D8EC3)


def scramble(words: IdHashes) -> IdHashes:
    mixed = words ^ (words >> np.uint64(30))
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(31)
    return mixed


def unscramble(words: IdHashes) -> IdHashes:
    mixed = words ^ (words >> np.uint64(31)) ^ (words >> np.uint64(62))
    mixed *= _SECOND_BACK
    mixed ^= (mixed >> np.uint64(27)) ^ (mixed >> np.uint64(54))
    mixed *= _FIRST_BACK
    mixed ^= (mixed >> np.uint64(30)) ^ (mixed >> np.uint64(60))
    return mixed


def hashes_of(ids: Ids) -> IdHashes:
    return scramble(ids.view(np.uint64))


def ids_of(hashes: IdHashes) -> Ids:
    return unscramble(hashes).view(np.int64)


def buckets_of(hashes: IdHashes) -> NDArray[np.int64]:
    return (hashes >> _BUCKET_SHIFT).view(np.int64)
