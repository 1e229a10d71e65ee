# SPDX-License-Identifier: Apache-2.0
"""A sampler that somebody wrote: an iterable of record numbers, run once an epoch under a seed of
its own.

torch, numpy.random and random are seeded from (seed, epoch, "sampler"), and as they were
afterwards. It is asked twice: one that then gives another list (a generator of its own, a count of
its epochs) would give other records to other workers, and is refused.
"""

import hashlib
import operator
import random
from collections.abc import Generator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch

from manyhands.data.columns.array_types import Positions
from manyhands.data.ordering.epoch_order import Order
from manyhands.data.ordering.sampling import Listed
from manyhands.values.errors import TaskError
from manyhands.values.forked_children import one_process
from manyhands.values.user_frames import user_traceback

MOST_TIMES = 1000
"""A sampler that gives so many times the records there are is taken for endless."""


class OwnSampler:
    """Positions of an epoch are what the sampler gives, in its order."""

    def __init__(self, sampler: Any, size: int, seed: int) -> None:
        self.sampler, self.size, self.seed = sampler, size, seed
        self.name = type(sampler).__name__
        self.told = f"records as {self.name} gives them"
        self._epoch: tuple[int, int, Positions] | None = None
        self.positions = 0
        self.positions = len(self._drawn(seed, 0))

    def order(self, seed: int, epoch: int) -> Order:
        return Listed(self._drawn(seed, epoch))

    def digest(self, seed: int, epoch: int) -> str | None:
        return hashlib.sha256(self._drawn(seed, epoch).tobytes()).hexdigest()

    def mark(self) -> bytes:
        return f"sampler {self.name} {self.digest(self.seed, 0)}".encode()

    def _drawn(self, seed: int, epoch: int) -> Positions:
        if self._epoch is None or self._epoch[:2] != (seed, epoch):
            self._epoch = (seed, epoch, self._draw(seed, epoch))
        return self._epoch[2]

    def _draw(self, seed: int, epoch: int) -> Positions:
        found, again = self._asked(seed, epoch), self._asked(seed, epoch)
        if not np.array_equal(found, again):
            raise TaskError(
                f"Task: {self.name} gave another list of records when it was asked again for epoch "
                f"{epoch} under the same seed, so workers would not agree. Draw from torch, "
                "numpy.random or random themselves, which are seeded for every epoch; a generator "
                "of its own, or a count of its epochs, cannot be followed (set_epoch(epoch) is "
                "called where there is one)."
            )
        if self.positions and len(found) != self.positions:
            raise TaskError(
                f"Task: {self.name} gave {len(found)} records for epoch {epoch}, and "
                f"{self.positions} for epoch 0; every epoch must have as many."
            )
        return found

    def _asked(self, seed: int, epoch: int) -> Positions:
        with one_process(), seeded(seed, epoch, "sampler"):
            try:
                if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
                    set_epoch(epoch)
                most = MOST_TIMES * max(self.size, 1000)
                given: list[Any] = list(islice(iter(self.sampler), most + 1))
            except Exception as error:
                raise TaskError(
                    f"Task: {self.name} failed in epoch {epoch}.\n{user_traceback(error)}"
                ) from error
        if not given:
            raise TaskError(f"Task: {self.name} gave no records for epoch {epoch}.")
        if len(given) > most:
            raise TaskError(f"Task: {self.name} gave more than {most} records, and may never end.")
        return self._numbers(given, epoch)

    def _numbers(self, given: list[Any], epoch: int) -> Positions:
        numbers = np.empty(len(given), np.int64)
        for k, value in enumerate(given):
            try:
                number = operator.index(value)
            except TypeError:
                what = "lists" if isinstance(value, list | tuple) else type(value).__name__
                batches = " (batches are cut by train.batch)" if what == "lists" else ""
                raise TaskError(
                    f"Task: {self.name} must give numbers of records, one at a time; it gives "
                    f"{what}{batches}."
                ) from None
            if not 0 <= number < self.size:
                raise TaskError(
                    f"Task: {self.name} gave {number} at position {k} of epoch {epoch}, but "
                    f"records are numbered from 0 to {self.size - 1}."
                )
            numbers[k] = number
        return numbers


@contextmanager
def seeded(*key: int | str) -> Generator[None]:
    """Everybody's generators, seeded from a key; and as they were, afterwards."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little") >> 1
    torch.default_generator.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
