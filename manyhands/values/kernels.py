# SPDX-License-Identifier: Apache-2.0
"""What a process computes with, and whether another one computes the same.

Processors of different makes have different kernels in torch and the libraries under it, which
round otherwise. No name of a processor says so reliably; what a few small computations give does.
"""

import msgspec

from manyhands.values.bounded_types import Name, Table

COMPILED = "compiled code"
"""The kind of computation that is what the compiler of `train.compile` makes of it."""


class Kernels(msgspec.Struct, frozen=True):
    processor: Name
    capability: Name
    """What torch calls its own kernels: AVX2, AVX512, DEFAULT, ..."""
    torch: Name
    marks: Table[Name] = {}
    """Kind of computation → the start of a SHA-256 over the bits of fixed ones."""
    portable: bool = False
    """They were fixed to those of every x86-64-v3 processor."""
    compiler: Name = ""
    """What makes the code of `train.compile`: version, instructions, C library, settings."""

    @property
    def words(self) -> str:
        portable = "portable, " if self.portable else ""
        compiled = f", compiled by {self.compiler}" if self.compiler else ""
        return (
            f"{self.processor}, {portable}{self.capability} kernels, torch {self.torch}{compiled}"
        )


def unlike(one: Kernels, other: Kernels) -> list[str]:
    """The kinds of computation of which both tell, with other bits."""
    both = one.marks.keys() & other.marks.keys()
    return sorted(kind for kind in both if one.marks[kind] != other.marks[kind])


def in_words(kinds: list[str]) -> str:
    """How somebody computes otherwise. Of compilers it is known only that they are others."""
    bits = ", ".join(kind for kind in kinds if kind != COMPILED)
    said = [f"other bits in {bits}"] if bits else []
    return " and ".join(said + ["another compiler"] * (COMPILED in kinds))


def distinct(kernels: list[Kernels]) -> list[Kernels]:
    """Each once, in order."""
    found: list[Kernels] = []
    for mine in kernels:
        if mine not in found:
            found.append(mine)
    return found


def otherwise(then: list[Kernels], now: list[Kernels]) -> str | None:
    """How those that compute now differ in bits from those that computed then."""
    kinds = sorted({kind for a in then for b in now for kind in unlike(a, b)})
    if not kinds:
        return None
    were, are = (" and ".join(dict.fromkeys(k.words for k in some)) for some in (then, now))
    return (
        f"this computes otherwise than what trained the run, with {in_words(kinds)} "
        f"(then: {were}; now: {are})"
    )
