# SPDX-License-Identifier: Apache-2.0
"""Every worker computes some micro-batches; all agree on the canonical sum of their gradients.

Promise: when `step` returns, every worker of the view sees the same weights, bit for bit those
that one worker would have computed alone.

A step, on worker r with its range of micro-batches:

    compute       each leaf's gradient is added into r's slots as far as the tree allows
    gather        losses, touched parameters, buffer statistics; everyone's slots are now complete
    (clip)        r finishes the tree for its stretch; norms of fixed blocks are gathered
    update        unit by unit: finish the tree, then r's part of the optimizer, under an undo log
    share         a meeting: everyone has the new weights

Where every worker has memory of its own, `share` sends the finished gradient instead, and every
worker updates all of the weights: the whole state is then with each of them.

What becomes of a step in which somebody dies is told in regrouping.py.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from manyhands.config import TrainConfig
from manyhands.deal import Cut, MicroBatch, deal, subtrees
from manyhands.train.collective.contract import FACTS, NORMS, OUTCOMES, Bytes, Collective, Sizes
from manyhands.train.keep import Keep
from manyhands.train.kinds import NOTHING_KEPT, how_to_cut, what_it_keeps
from manyhands.train.layout import blocks, bounds, share_out, units
from manyhands.train.leaf import LossFn, compute, digest
from manyhands.train.memory import Memory
from manyhands.train.optim import SharedOut
from manyhands.train.state import Replica
from manyhands.train.sync.canonical import most_parts
from manyhands.train.sync.contract import Auditor, Moment, Place, StepFacts
from manyhands.train.sync.facts import Form, Tally
from manyhands.train.sync.finishing import Parts, parts_of
from manyhands.train.sync.outcomes import Outcomes
from manyhands.train.sync.regrouping import Regrouping
from manyhands.train.sync.summing import Summing
from manyhands.train.sync.updating import Updating
from manyhands.world import World

Meet = Callable[[World, int], Collective]
"""A collective for the members of a view, given this worker's place and the generation."""


class AllReduce:
    def __init__(
        self,
        replica: Replica,
        memory: Memory,
        collective: Callable[[Sizes], Meet],
        train: TrainConfig,
        *,
        heard: Callable[[], int],
        moment: Moment,
        auditor: Auditor,
    ) -> None:
        """`heard` gives the number of the last command that has reached this worker."""
        self.replica, self.heard, self.moment = replica, heard, moment
        self.auditor = auditor
        self.seed, self.precision = train.seed, train.precision
        self.clip_norm = train.clip_norm
        self.facts: StepFacts | None = None
        layout = replica.layout
        self.cut, _ = how_to_cut(replica.optimizer)
        kept = what_it_keeps(replica.optimizer, layout) if self.cut == "blocks" else NOTHING_KEPT
        self.shared = memory.shared
        self.keep = Keep(
            layout,
            replica.weights,
            kept.slots,
            kept.scalars,
            replica.buffers.layout.sizes,
            memory,
            extras=self.cut != "blocks",
        )
        self.optimizer = SharedOut(
            replica.optimizer,
            replica.parameters,
            layout,
            replica.weights,
            self.keep,
            self.cut,
            kept,
        )
        self.form = Form(len(layout.trainable), replica.buffers.row_width)
        self.outcomes = Outcomes(replica.buffers, self.form)
        self.updating = Updating(
            self.optimizer, memory, micro_batches=train.micro_batches, moment=moment
        )
        self.regrouping = Regrouping(
            replica, self.keep, self.optimizer, self.form, self.outcomes, self.updating
        )
        most_leaves = train.micro_batches + 1  # a last record joins the batch before it
        self._meet = collective(
            Sizes(
                lanes=layout.trainable_sizes,
                slots=most_parts(most_leaves),
                message_bytes=max(
                    self.form.size_bytes(most_leaves),
                    8 * layout.first_blocks[-1],
                    self.outcomes.most_bytes(most_leaves),
                ),
            )
        )
        self._trainable = [replica.parameters[p.name] for p in layout.trainable]
        self._step: Tally | None = None

    # ---- a place in a view

    def regroup(self, place: Place) -> None:
        self.place, self.world, self.speeds = place, place.world, place.speeds
        self.collective = self._meet(place.world, place.generation)
        layout = self.replica.layout
        self.summing = Summing(layout.trainable, self._trainable, self.collective.slots)
        self._step = None
        self.spans = share_out(layout, self.world.num_ranks, cut=self.cut)
        self.bounds = [bounds(spans) for spans in self.spans]
        self.blocks = [blocks(spans) for spans in self.spans]
        # In shared memory a worker updates its stretch, elsewhere everything.
        mine = self.spans[self.world.rank] if self.shared else share_out(layout, 1, cut=self.cut)[0]
        self.regrouping.regroup(place, self.collective, units(layout, mine, cut=self.cut))

    def note(self) -> None:
        self.regrouping.note(self.place)

    # ---- a step

    def indices(self, cut: Cut) -> range:
        return deal(len(cut.sizes), self.speeds)[self.world.rank]

    def backward(self, cut: Cut, micro_batches: Iterable[MicroBatch], loss: LossFn) -> StepFacts:
        mine = self.indices(cut)
        audited = self.auditor.index(cut) if self.world.num_ranks > 1 else None
        most = max(len(r) for r in deal(len(cut.sizes), self.speeds))
        sheet = self.form.sheet(most)
        self.outcomes.begin()
        tree = self.summing.tree(len(cut.sizes))
        for row, micro_batch in zip(sheet.rows[: len(mine)], micro_batches, strict=True):
            self.replica.buffers.begin(alone=len(cut.sizes) == 1)
            leaf = compute(
                self.replica.model, micro_batch, loss, seed=self.seed, precision=self.precision
            )
            self.moment("leaf")
            if micro_batch.index == audited:
                sheet.digest = digest(self._trainable, leaf)
            sheet.fill(row, micro_batch, leaf, self._trainable)
            self.outcomes.note(row)
            self.summing.collect(tree, micro_batch.index)
        if audited is not None and self._is_witness(cut, audited):
            sheet.digest = self.testify(cut, audited)
        self.moment("gather")
        message = sheet.signed(self.heard(), mine, self.clip_norm)
        # The first unit is copied aside while the others are waited for.
        prepare = partial(self.optimizer.prepare, cut.step)
        everyone = self.collective.gather(message, FACTS, cut.step, prepare)
        self._step = self.form.read(cut.step, everyone)
        self.facts = self.form.learn(cut, self._step, everyone, audited)
        return self.facts

    def _is_witness(self, cut: Cut, index: int) -> bool:
        """The worker after the one that this micro-batch is dealt to computes it too."""
        ranges = deal(len(cut.sizes), self.speeds)
        owner = next(rank for rank, r in enumerate(ranges) if index in r)
        return self.world.rank == (owner + 1) % self.world.num_ranks != owner

    def testify(self, cut: Cut, index: int) -> int:
        """A digest of what this worker computes for a micro-batch, whoever it is dealt to."""
        self.replica.buffers.begin(alone=len(cut.sizes) == 1)
        leaf = self.auditor.again(cut, index)
        self.moment("leaf")
        found = digest(self._trainable, leaf)
        for parameter in self._trainable:
            parameter.grad = None
        self.replica.buffers.show()  # what it did to them was not for the step
        return found

    def step(self) -> None:
        assert self._step is not None, "backward comes first"
        step, self._step = self._step, None
        with torch.no_grad():
            outcomes = self._gather_outcomes(step)
            if self.shared:
                self._step_shared(step, outcomes)
            else:
                self._step_private(step, outcomes)

    def _step_shared(self, step: Tally, outcomes: Sequence[Bytes]) -> None:
        self.outcomes.commit(step, outcomes)
        self.moment("update")
        parts, mine = self._exchange(step), self.bounds[self.world.rank]
        factor = self._clip_factor(step, parts) if step.clip_norm is not None else 1.0
        self.updating.update(step, parts, mine, factor)
        if self.world.leads:
            self.keep.put_buffers(step.step + 1, self.replica.buffers.committed)
        self.moment("share")
        self.collective.share(self.replica.weights, self.bounds)

    def _step_private(self, step: Tally, outcomes: Sequence[Bytes]) -> None:
        """All get the finished gradient, and each updates everything: none is ever half-way."""
        parts, mine = self._exchange(step), self.bounds[self.world.rank]
        sums = self.updating.sums
        if step.clip_norm is None:
            self.updating.finish_into_sums(step, parts, mine, self.spans[self.world.rank])
        elif (factor := self._clip_factor(step, parts)) < 1.0:
            for dtype, (a, b) in mine.items():
                sums[dtype][a:b].mul_(factor)
        self.moment("share")
        self.collective.share(sums, self.bounds)
        self.outcomes.commit(step, outcomes)
        self.moment("update")
        self.updating.update_from_sums(step)

    def _gather_outcomes(self, step: Tally) -> list[Bytes]:
        """Everyone's outcomes of the buffers that are merged by value, if any changed."""
        if step.leaves == self.world.num_ranks == 1 and not self.shared:
            return []  # shared: whoever mends must find them
        message = self.outcomes.message(step, self.world.rank)
        return [] if message is None else self.collective.gather(message, OUTCOMES, step.step)

    def _exchange(self, step: Tally) -> Parts:
        """This worker's stretch of everybody's partial sums."""
        counts = [len(subtrees(r, step.leaves)) for r in step.ranges]
        return parts_of(self.collective.exchange(counts, self.bounds), step)

    def _clip_factor(self, step: Tally, parts: Parts) -> float:
        """What the gradient is multiplied with. This worker's stretch of it is left in the sums."""
        rank = self.world.rank
        self.updating.finish_into_sums(step, parts, self.bounds[rank], self.spans[rank])
        return self.updating.clip_factor(step, partial(self._gather_norms, step))

    def _gather_norms(self, step: Tally) -> NDArray[np.float64]:
        """Of all blocks, each from the worker that owns it."""
        counts, mine = [len(b) for b in self.blocks], self.blocks[self.world.rank]
        norms = np.zeros(max(counts))
        norms[: len(mine)] = self.updating.norms(mine)
        everyone = self.collective.gather(norms.view(np.uint8), NORMS, step.step)
        rows = [m.view(np.float64)[:n] for m, n in zip(everyone, counts, strict=True)]
        return np.concatenate(rows)

    def close(self) -> None:
        self.collective.close()
