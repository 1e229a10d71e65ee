# SPDX-License-Identifier: Apache-2.0
"""Records that an epoch does not visit once each: drawn, repeated, or left out.

Its length is that of an epoch, in positions; the numbers of records, which `order` gives and
`batch` takes, are those of the whole.
"""

from collections.abc import Sequence

from manyhands.accounting.deal_micro_batches import Batch
from manyhands.data.columns.array_types import Positions
from manyhands.data.ordering.epoch_order import FIRST, Order, RecordVisit
from manyhands.data.ordering.sampling import Sampling
from manyhands.data.reading.records import Records


def each_once(records: Records) -> Records:
    """All of them, however training draws them."""
    return records.whole if isinstance(records, SampledRecords) else records


class SampledRecords:
    def __init__(self, whole: Records, sampling: Sampling) -> None:
        self.whole, self.sampling = whole, sampling
        self.draws_randomness = whole.draws_randomness

    def __len__(self) -> int:
        return self.sampling.positions

    def order(self, seed: int, epoch: int) -> Order:
        return self.sampling.order(seed, epoch)

    def batch(self, ids: Positions, visit: RecordVisit = FIRST) -> Batch:
        return self.whole.batch(ids, visit)

    def part(self, numbers: Positions) -> Records:
        raise AssertionError("records are parted before they are sampled")

    def names(self, ids: Positions) -> Sequence[int]:
        return self.whole.names(ids)

    def mark(self) -> bytes:
        return self.whole.mark() + self.sampling.mark()
