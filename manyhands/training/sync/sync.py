# SPDX-License-Identifier: Apache-2.0
"""How workers come to agree on one set of weights."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from manyhands.accounting.deal_micro_batches import Cut, MicroBatch
from manyhands.training.compute.micro_batch_gradient import LossFn
from manyhands.training.state.replica import StepFacts
from manyhands.training.state.rows.table_part import TablePart
from manyhands.training.state.sharded_optimizer import OptimizerEntry
from manyhands.training.state.weight_average import SavedAverage
from manyhands.values.world import World

CHANGING_NAMES = (
    "the loss returned differently named numbers for different micro-batches of a step. Return the "
    "same names every time."
)
MIXED_WEIGHTS = "the loss returned a weight for some micro-batches and none for others."


SavedTables = Callable[[], Iterable[tuple[str, TablePart]]]


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place in a view, as its strategy needs to know it."""

    world: World
    generation: int
    speeds: tuple[float, ...]
    """By rank. 0: it computes nothing, and updates the weights for those who do (a server)."""
    addresses: tuple[str, ...] = ()
    """Where each host is reached by the others."""
    secret: bytes = field(default=b"", repr=False)
    """By which hosts know each other; empty: as always."""
    measure: bool = False
    """Measure the network between hosts first."""
    fresh: int | None = None
    """Begin after this many steps, with what the replica holds; None: go on where others were."""
    entries: Callable[[], Iterable[OptimizerEntry]] | None = None
    """With `fresh`: the optimizer's state, from a checkpoint."""
    averages: Callable[[], Mapping[str, SavedAverage]] | None = None
    """Likewise, averages of the weights by name."""
    tables: SavedTables | None = None
    """Likewise, rows of tables (`mh.Embedding`) by their names."""
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Hyper-parameters that are others from here on, on every worker."""

    heard: int = 0
    """Commands that were given before this view."""
    due: Callable[[int], int] | None = None
    """After how many steps all members next act together (save, evaluate, end), for members who are
    at different steps otherwise; given how many are done."""

    @property
    def updaters(self) -> list[int]:
        """Who of this worker's host updates the weights: its servers; where it has none, all. By
        their number on the host."""
        ranks = self.world.ranks_of(self.world.host)
        servers = [rank - ranks.start for rank in ranks if self.speeds[rank] == 0]
        return servers or list(range(len(ranks)))


@dataclass(frozen=True, slots=True)
class Held:
    """What of the state is in this worker's hands. A strategy that leaves it elsewhere holds
    nothing."""

    goes_on: bool = False
    """There is state in memory to go on from, whoever put it there."""
    entries: Iterable[OptimizerEntry] = ()
    """What this worker must save of the optimizer's state."""
    whole: bool = True
    """It is the state after the first so many steps. Else it is that after as many others, and
    must not be saved or scored: what a lost worker had begun is still to come."""


class Auditor(Protocol):
    """Who has a micro-batch of a step computed twice, by two workers, before the step is taken."""

    def index(self, cut: Cut) -> int | None:
        """Which one; None: none of this step."""
        ...

    def digest(self, cut: Cut, index: int) -> int:
        """Of what this worker computes for a micro-batch, whoever it is dealt to; nothing else
        changes."""
        ...


Moment = Callable[[str], None]
"""Told when a step comes to a "leaf", the "gather", the "update", the "share", and to what comes
"after" it and "afterwards": where faults strike."""


class Sync(Protocol):
    """How workers come to agree. The loop calls `backward` and `step` once per optimizer step, in
    that order, on every worker.

    `regroup` comes first, and again whenever the members change: between steps, or after `Broken`
    was raised out of any other call. When `step` returns, this worker may read the new weights;
    whether the others are at the same step is the strategy's promise, and its docstring says which.
    """

    def regroup(self, place: Place) -> None:
        """Take a new place. On return all have the same weights, and `replica.step` says after how
        many steps; a step that was being taken when somebody died has been finished."""
        ...

    def indices(self, cut: Cut) -> range:
        """Which micro-batches of a step are this worker's."""
        ...

    def backward(self, cut: Cut, micro_batches: Iterable[MicroBatch], loss: LossFn) -> StepFacts:
        """Compute this worker's micro-batches (in index order) and learn the step's facts."""
        ...

    def step(self) -> None:
        """Finish the gradient and update the weights and buffers."""
        ...

    def held(self) -> Held: ...

    def close(self) -> None: ...
