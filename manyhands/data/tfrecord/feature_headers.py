# SPDX-License-Identifier: Apache-2.0
"""What stands before the values of a feature, to be written or to be looked for.

The name, the kind and the size of the values determine it. To be looked for in many records at
once, it is compared 8 bytes at a time, whatever the size of the values in each.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from manyhands.data.columns.array_types import ByteArray, Positions
from manyhands.data.tfrecord.feature_kinds import BYTES
from manyhands.data.tfrecord.parse_one_example import varint


@dataclass(frozen=True, slots=True)
class FeatureHeader:
    """What stands before the values of a feature, whatever their size."""

    name: str
    kind: int
    size: int
    lengths: tuple[tuple[int, int], ...]
    """Numbers in it that count what follows them up to the end of the values: (where, bytes)."""
    words: tuple[tuple[int, int, int], ...]
    """The rest of it, 8 bytes at a time: (where, expected, mask)."""

    def find(
        self, data: ByteArray, at: Positions, ends: Positions
    ) -> tuple[NDArray[np.bool_], Positions]:
        """Does it stand at `at`, with all its values before `ends`? And where do they end?"""
        if self.size > data.size:
            return np.zeros(len(at), dtype=np.bool_), at
        here = np.minimum(at, data.size - self.size)
        words = np.ndarray((data.size - 7,), dtype="<u8", buffer=data, strides=(1,))
        wrong = np.zeros(len(at), dtype=np.uint64)
        for where, expected, mask in self.words:
            wrong |= (words[here + where] & np.uint64(mask)) ^ np.uint64(expected)
        hit, stop = (wrong == 0) & (here == at), here + self.size
        for i, (where, width) in enumerate(self.lengths):
            reach = here + (where + width)
            for k in range(width):
                reach += (data[here + (where + k)] & np.uint8(0x7F)).astype(np.int64) << (7 * k)
            if i:
                hit &= reach == stop
            stop = reach
        return hit & (stop <= ends), stop


def header_parts(name: str, kind: int, size: int) -> list[bytes]:
    """What stands before `size` bytes of values, every second part a length. Values that are bytes
    have headers of their own (0A, length); the others are packed."""
    key = name.encode()
    leads = [b"\x0a", b"\x0a" + varint(len(key)) + key + b"\x12"]
    leads += [bytes([kind << 3 | 2])] if kind else []
    leads += [b"\x0a"] if size and kind != BYTES else []
    parts: list[bytes] = []
    for lead in reversed(leads):
        parts = [lead, varint(size + sum(map(len, parts))), *parts]
    return parts


@functools.lru_cache(maxsize=4096)
def header_of(name: str, kind: int, size: int) -> FeatureHeader | None:
    """The header of such a feature as something to look for; None if it is too short for that."""
    parts = header_parts(name, kind, size)
    raw, mask = b"".join(parts), b""
    lengths: list[tuple[int, int]] = []
    for i, part in enumerate(parts):
        counts = size > 0 and i % 2 == 1
        lengths += [(len(mask), len(part))] if counts else []
        mask += (b"\x80" if counts else b"\xff") * len(part)
    if len(raw) < 8:
        return None
    words: list[tuple[int, int, int]] = []
    for where in [*range(0, len(raw) - 8, 8), len(raw) - 8]:
        bits = int.from_bytes(mask[where : where + 8], "little")
        words.append((where, int.from_bytes(raw[where : where + 8], "little") & bits, bits))
    return FeatureHeader(name, kind, len(raw), tuple(lengths), tuple(words))
