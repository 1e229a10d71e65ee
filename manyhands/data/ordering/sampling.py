# SPDX-License-Identifier: Apache-2.0
"""Which record stands at a position where an epoch does not visit every record once.

A sampling is a pure function of (seed, epoch, position), the same for any number of workers. What
it draws does not depend on which positions are asked for together.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from manyhands.data.columns.array_types import Positions
from manyhands.data.ordering.epoch_order import Order
from manyhands.data.ordering.keyed_permutation import AskedPositions, as_positions, permutation
from manyhands.data.ordering.record_randomness import Draw, logarithm
from manyhands.values.errors import TaskError

RecordWeights = NDArray[np.float64]


class Sampling(Protocol):
    positions: int
    """Of an epoch: how many records are drawn."""
    told: str
    """What stands at a position, for people."""

    def order(self, seed: int, epoch: int) -> Order: ...

    def digest(self, seed: int, epoch: int) -> str | None:
        """Of what user code drew for this epoch; None: it follows from the seed."""
        ...

    def mark(self) -> bytes:
        """Something that another sampling would most likely not have."""
        ...


@dataclass(frozen=True)
class Listed:
    """An order that is written out (8 bytes a position)."""

    records: Positions

    def __getitem__(self, positions: AskedPositions) -> Positions:
        return self.records[as_positions(positions)]


class InOrder:
    """From the first record to the last, in every epoch."""

    told = "the records in their own order"

    def __init__(self, names: Sequence[int]) -> None:
        """The user's numbers of the records: some are numbered anew when others are held out."""
        self.positions = len(names)
        numbers = np.asarray(names)
        sorted_by_name = np.argsort(numbers, kind="stable")
        plain = bool((sorted_by_name == np.arange(len(numbers))).all())
        self._order: Order = _AsTheyAre() if plain else Listed(sorted_by_name)

    def order(self, seed: int, epoch: int) -> Order:
        return self._order

    def digest(self, seed: int, epoch: int) -> str | None:
        return None

    def mark(self) -> bytes:
        return b"in order"


class _AsTheyAre:
    def __getitem__(self, positions: AskedPositions) -> Positions:
        return as_positions(positions)


class Repeated:
    """Shuffles of all records, one after the other, until there are enough positions."""

    def __init__(self, size: int, samples: int) -> None:
        self.size, self.positions = size, samples
        self.told = f"{samples} positions of shuffles of all {size} records, one after the other"
        if samples <= size:
            self.told = f"a shuffle of all {size} records, whose last {size - samples} are left out"

    def order(self, seed: int, epoch: int) -> Order:
        return _Rounds(self.size, seed, epoch)

    def digest(self, seed: int, epoch: int) -> str | None:
        return None

    def mark(self) -> bytes:
        return f"repeated {self.positions}".encode()


@dataclass(frozen=True)
class _Rounds:
    size: int
    seed: int
    epoch: int

    def __getitem__(self, positions: AskedPositions) -> Positions:
        rounds, places = np.divmod(as_positions(positions), self.size)
        found = np.empty_like(places)
        for number in np.unique(rounds).tolist():
            here = rounds == number
            key = (self.seed, self.epoch) if number == 0 else (self.seed, self.epoch, number)
            found[here] = permutation(self.size, "order", *key)[places[here]]
        return found


class Weighted:
    """Records drawn with chances in proportion to their weights.

    With replacement a position's draw depends on nothing else. Without, records come in the order
    in which they would arrive if each waited for an exponential time of that rate: the law of
    drawing one after the other. Weights of 0 are never drawn.
    """

    def __init__(self, weights: RecordWeights, samples: int | None, *, replacement: bool) -> None:
        self.weights, self.replacement = weights, replacement
        self.drawable = int(np.count_nonzero(weights))
        most = len(weights) if replacement else self.drawable
        self.positions = most if samples is None else samples
        if not replacement and self.positions > most:
            raise TaskError(
                f"Task: {self.positions} records are to be drawn without replacement, but only "
                f"{most} have a weight above 0."
            )
        how = "with" if replacement else "without"
        self.told = f"records drawn by their weights, {how} replacement"
        self._sums = np.cumsum(weights) if replacement else None

    def order(self, seed: int, epoch: int) -> Order:
        if self._sums is not None:
            return _ByWeight(self._sums, seed, epoch)
        (able,) = self.weights.nonzero()
        waits = -logarithm(_uniform(seed, epoch, able, "arrival")) / self.weights[able]
        return Listed(able[np.argsort(waits, kind="stable")])

    def digest(self, seed: int, epoch: int) -> str | None:
        return None

    def mark(self) -> bytes:
        content = hashlib.sha256(self.weights.tobytes()).digest()
        return f"weighted {self.positions} {self.replacement}".encode() + content


@dataclass(frozen=True)
class _ByWeight:
    sums: RecordWeights
    """Of the weights up to each record, added one after the other."""
    seed: int
    epoch: int

    def __getitem__(self, positions: AskedPositions) -> Positions:
        drawn = _uniform(self.seed, self.epoch, as_positions(positions), "weighted")
        found = np.searchsorted(self.sums, drawn * self.sums[-1], side="right")
        last = np.searchsorted(self.sums, self.sums[-1])  # the last that has a weight
        return np.minimum(found, last).astype(np.int64)


class Balanced:
    """Every class as often as the others, and within a class every record as often as the others:
    each up to one time more. Which come more often varies with the epoch."""

    told = "records drawn so that every class comes equally often"

    def __init__(self, classes: Positions, samples: int | None = None) -> None:
        """`classes`: of each record, which of 0, 1, ... it is in."""
        self.classes = classes
        self.sizes: Positions = np.bincount(classes)
        self.starts: Positions = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        self.positions = len(classes) if samples is None else samples

    def order(self, seed: int, epoch: int) -> Order:
        # Within its class, every record has a place that it draws.
        places = Draw(seed, epoch, np.arange(len(self.classes))).bits("place in class")
        members = np.lexsort((places, self.classes))
        mixed = permutation(self.positions, "balanced", seed, epoch)
        return _ByClass(mixed, epoch, members, self.starts, self.sizes)

    def digest(self, seed: int, epoch: int) -> str | None:
        return None

    def mark(self) -> bytes:
        content = hashlib.sha256(self.classes.tobytes()).digest()
        return f"balanced {self.positions}".encode() + content


@dataclass(frozen=True)
class _ByClass:
    mixed: Order
    epoch: int
    members: Positions
    """Records, class after class."""
    starts: Positions
    sizes: Positions

    def __getitem__(self, positions: AskedPositions) -> Positions:
        turn, which = np.divmod(self.mixed[positions], len(self.sizes))
        which = (which + self.epoch) % len(self.sizes)
        return self.members[self.starts[which] + turn % self.sizes[which]]


class FirstPositions:
    """The same, without the end."""

    def __init__(self, whole: Sampling, positions: int) -> None:
        self.whole, self.positions = whole, positions
        self.told = f"{whole.told}; the last {whole.positions - positions} are left out"

    def order(self, seed: int, epoch: int) -> Order:
        return self.whole.order(seed, epoch)

    def digest(self, seed: int, epoch: int) -> str | None:
        return self.whole.digest(seed, epoch)

    def mark(self) -> bytes:
        return self.whole.mark() + f"first {self.positions}".encode()


def _uniform(seed: int, epoch: int, ids: Positions, name: str) -> RecordWeights:
    """Inside (0, 1), of 53 bits: by a record's number, or a position's."""
    bits = Draw(seed, epoch, ids).bits(name) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) * 2.0**-53


def read_weights(given: Any, where: str, size: int) -> RecordWeights:
    """One number for each record, none of them negative; or it is said what is wrong."""
    try:
        flat = given.detach().cpu() if isinstance(given, torch.Tensor) else given
        weights = np.ascontiguousarray(flat, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TaskError(f"Task: {where} are not numbers: {error}.") from error
    if weights.shape != (size,):
        has = f"{len(weights)}" if weights.ndim == 1 else f"the shape {weights.shape}"
        raise TaskError(f"Task: {where} has {has}, but data has {size} records: give one for each.")
    wrong = ~(np.isfinite(weights) & (weights >= 0))
    if wrong.any():
        first = int(wrong.argmax())
        raise TaskError(
            f"Task: {where} of record {first} is {weights[first]}; a weight is 0 or more."
        )
    if not weights.any():
        raise TaskError(f"Task: {where} are all 0, so nothing can be drawn.")
    return weights


def read_classes(labels: Any, where: str, size: int) -> Positions:
    """Of each record, which class it is in, from labels of any kind that can be sorted."""
    given: Any = labels.detach().cpu().numpy() if isinstance(labels, torch.Tensor) else labels
    values = np.asarray(given)
    if values.shape != (size,):
        has = f"{len(values)}" if values.ndim == 1 else f"the shape {values.shape}"
        raise TaskError(f"Task: {where} has {has}, but data has {size} records: give one for each.")
    if values.dtype == object:
        raise TaskError(f"Task: {where} are of several kinds; give numbers, or text.")
    _, classes = np.unique(values, return_inverse=True)
    return classes.astype(np.int64).reshape(-1)
