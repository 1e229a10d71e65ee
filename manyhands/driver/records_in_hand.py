# SPDX-License-Identifier: Apache-2.0
"""Which records a worker had in hand, found by the driver: whoever crashed cannot say."""

import math
from collections.abc import Callable

from manyhands.accounting.phases import Phases
from manyhands.data.reading.micro_batch_feed import MicroBatchFeed, held_out_ids
from manyhands.data.reading.records import Records
from manyhands.values.config import RunConfig
from manyhands.values.errors import ManyhandsError
from manyhands.values.work_in_hand import WorkInHand


def records_in_hand(
    records: Records, held_out: Records | None, config: RunConfig, phases: Phases | None = None
) -> Callable[[WorkInHand], list[int]]:
    """In the user's numbering. Empty when it cannot be told: data may be out of reach from here."""
    train = config.train

    def fetches_nothing(*key: object) -> None:
        raise AssertionError("only numbers are asked for")

    feed = MicroBatchFeed(
        records,
        seed=train.seed,
        batch=train.batch,
        micro_batch=train.micro_batch_size,
        seeder=fetches_nothing,
        phases=phases,
    )

    def find(work: WorkInHand) -> list[int]:
        if work.kind == "compute" and work.step >= 0:
            cut = feed.cut(work.step)
            return list(feed.ids(cut, work.index)) if 0 <= work.index < len(cut.sizes) else []
        if work.kind == "evaluate" and held_out is not None:
            batch = config.evaluation_batch
            here = 0 <= work.index < math.ceil(len(held_out) / batch)
            return held_out_ids(held_out, batch, work.index) if here else []
        return []

    def found(work: WorkInHand) -> list[int]:
        try:
            return find(work)
        except (OSError, ManyhandsError):
            return []

    return found
