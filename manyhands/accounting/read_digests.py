# SPDX-License-Identifier: Apache-2.0
"""What a stream gave, step by step, as one small number each: written down and compared.

Each micro-batch has a digest of its values (data/reading/batch_digest.py). It travels with the
micro-batch's loss, so that every worker knows those of all when the step is taken, whoever died in
it; joined in index order they are the step's. The ledger keeps them, a line for each stretch of
steps between two checkpoints. A step that is read again (after a loss, resumed, replayed), by
anybody, must have the digest that it had.
"""

import re
from collections.abc import Iterable, Mapping

import xxhash

DIGEST_BITS = 48
"""So that doubles hold them."""

_DIGITS = DIGEST_BITS // 4
_WRITTEN = re.compile(f"([0-9a-f]{{{_DIGITS}}})+")

KEPT = 1 << 16
"""Steps whose digests the driver has in memory; what is older is in the ledger alone."""


def joined_digest(micro_batches: Iterable[float]) -> int:
    """Of a step, by those of its micro-batches in index order; 0: nothing is known."""
    parts = [int(part) for part in micro_batches]
    if not parts or 0 in parts:
        return 0
    raw = b"".join(part.to_bytes(8, "little") for part in parts)
    return xxhash.xxh3_64_intdigest(raw) >> (64 - DIGEST_BITS) or 1


def stretches(digests: Mapping[int, int]) -> list[tuple[int, str]]:
    """By step → (first step, digests one after the other), one for each row without a gap."""
    rows: list[tuple[int, list[str]]] = []
    for step, digest in sorted(digests.items()):
        if not rows or rows[-1][0] + len(rows[-1][1]) != step:
            rows.append((step, []))
        rows[-1][1].append(f"{digest:0{_DIGITS}x}")
    return [(first, "".join(words)) for first, words in rows]


def unrolled(first: int, digests: str) -> dict[int, int]:
    """What `stretches` gave, by step. Raises ValueError where nothing gives that."""
    if first < 0 or not _WRITTEN.fullmatch(digests):
        raise ValueError(f"digests from step {first} on are no rows of {_DIGITS} letters")
    words = [digests[at : at + _DIGITS] for at in range(0, len(digests), _DIGITS)]
    return {first + k: int(word, 16) for k, word in enumerate(words)}
