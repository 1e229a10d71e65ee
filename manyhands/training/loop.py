# SPDX-License-Identifier: Apache-2.0
"""The loop. Every worker runs this same function; read it first.

No feature adds an `if` here: how workers agree is the strategy's (`sync`), and saving, evaluating,
logging and stopping are hooks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from manyhands.accounting.deal_micro_batches import Cut, MicroBatch
from manyhands.training.compute.micro_batch_gradient import LossFn
from manyhands.training.state.replica import Replica, StepFacts
from manyhands.training.sync.sync import Sync


class Feed(Protocol):
    """Where micro-batches come from: any of any step, the same ones every time."""

    def cut(self, step: int) -> Cut: ...
    def micro_batches(self, step: Cut, indices: Iterable[int]) -> Iterator[MicroBatch]: ...


Hook = Callable[[Replica, StepFacts], bool | None]
"""Called after every step, on every worker; returns True to end training."""


def train(
    replica: Replica,
    feed: Feed,
    sync: Sync,
    loss: LossFn,
    *,
    steps: int,
    hooks: Sequence[Hook],
) -> None:
    """Train until `steps`, or until a hook says that this is enough."""
    while replica.step < steps:
        cut = feed.cut(replica.step)
        micro_batches = feed.micro_batches(cut, sync.indices(cut))
        facts = replica.facts = sync.backward(cut, micro_batches, loss)
        sync.step()
        replica.advance()
        if any([hook(replica, facts) for hook in hooks]):  # a list: every hook is called
            return
