# SPDX-License-Identifier: Apache-2.0
"""A worker's part: it is granted a step, reads the weights, computes all of it, and pushes.

Its place in the loop counts pushes, not steps: between two meetings each push that it makes takes
one, and the rest, which others made, are passed over when all meet. There it reads the weights once
more, so that what members do together they do on the same.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from manyhands.accounting.deal_micro_batches import Cut, MicroBatch
from manyhands.training.compute.micro_batch_gradient import LossFn
from manyhands.training.memory.memory import Memory
from manyhands.training.state.layout import Lanes, blocks, share_out
from manyhands.training.state.replica import StepFacts
from manyhands.training.sync.allreduce.local_sum import LocalSum
from manyhands.training.sync.allreduce.step_facts import StepTally
from manyhands.training.sync.canonical_sum import TreeSum
from manyhands.training.sync.leaf_gradients import LeafGradients
from manyhands.training.sync.merge.board import (
    AGREED,
    ANSWERED,
    ASKED,
    AT,
    FREED,
    GRANTED,
    MEETING,
    PUSHED,
    StepPush,
)
from manyhands.training.sync.merge.seat import MergeParts, Seat, gradient_of
from manyhands.values.errors import Broken, TaskError

GLANCE_S = 50e-6
"""Between two looks at a unit that is being written."""


class StepFeed(Protocol):
    """Where the micro-batches of any step come from."""

    def cut(self, step: int) -> Cut: ...
    def micro_batches(self, step: Cut, indices: Iterable[int]) -> Iterator[MicroBatch]: ...


@dataclass(frozen=True, slots=True)
class Meeting:
    step: int
    agreed: int


class ScratchSums:
    """Where partial sums are put together that are not the whole one yet: of one process."""

    def __init__(self, sizes: dict[torch.dtype, int], slots: int) -> None:
        memory = Memory(None)
        self.slots: list[Lanes] = [
            {dtype: memory.tensor(size, dtype=dtype) for dtype, size in sizes.items()}
            for _ in range(slots)
        ]


class WorkerTurns:
    def __init__(
        self,
        parts: MergeParts,
        seat: Seat,
        leaves: LeafGradients,
        feed: StepFeed,
        scratch: ScratchSums,
    ) -> None:
        self.parts, self.seat, self.leaves, self.feed = parts, seat, leaves, feed
        layout = parts.layout
        self._trainable = [parts.replica.parameters[p.name] for p in layout.trainable]
        self._sums = [
            LocalSum(
                layout.trainable,
                self._trainable,
                [parts.boards.lanes(seat.rank, half), *scratch.slots],
            )
            for half in range(2)
        ]
        (self._spans,) = share_out(layout, 1, cut=parts.optimizer.cut)
        self.whole = not seat.board.tally().applied.beyond
        self.granted: int | None = None
        """The step that is computed, or was last."""
        self._pushed = self._asked = 0
        self._waits = False
        """Its last question has not been answered."""
        self._met, self._loss = seat.began, 0.0
        self._answer: int | Meeting | None = None
        self._copy_all()

    def slot(self, place: int, loss: LossFn) -> StepFacts:
        """One turn of the loop: a step of its own, or one of somebody else's."""
        answer = self._answer if self._answer is not None else self._ask()
        facts = StepFacts(place, self._loss, 0, 0)
        if isinstance(answer, int):
            facts = replace(self._compute(self.feed.cut(answer), loss), step=place, agreed=0)
            self._loss = facts.loss
            answer = self._ask()
        self._answer = answer
        if isinstance(answer, Meeting) and answer.step == place + 1:
            self._meet(answer)
            return replace(facts, agreed=answer.agreed)
        return facts

    # ---- with the head

    def _ask(self) -> int | Meeting:
        """For a step: it is granted, or all meet first."""
        seat = self.seat
        if not self._waits:
            self._waits = True
            self._asked += 1
            seat.hear(self.parts.heard())
            seat.say(ASKED, self._asked)
            seat.bells.ring([seat.head])
        return seat.bells.wait(self._answered)

    def _answered(self) -> int | Meeting | None:
        seat, words = self.seat, self.seat.board.words
        seat.hear(self.parts.heard())
        if (step := int(words[MEETING])) > self._met:  # it comes before what is granted after it
            return Meeting(step, int(words[AGREED]))
        row = seat.board.rows[seat.rank]
        if row[ANSWERED] < self._asked:
            return None
        self._waits = False
        return int(row[GRANTED])

    def _meet(self, meeting: Meeting) -> None:
        self._pull()
        self._met, self._answer, self.whole = meeting.step, None, True
        self.seat.say(AT, meeting.step)
        self.seat.bells.ring([self.seat.head])

    # ---- the weights

    def _copy_all(self) -> None:
        """As a view begins, and nobody writes: also what is not trained."""
        replica = self.parts.replica
        for dtype, lane in replica.weights.items():
            replica.own[dtype].copy_(lane)
        self._pull()

    def _pull(self) -> int:
        """Unit by unit, each of one version; the oldest of them."""
        replica, versions = self.parts.replica, self.parts.boards.versions
        oldest: int | None = None
        for unit in self.seat.units:
            first = unit.blocks[0]
            while True:
                seen = int(versions[first])
                if seen % 2 == 0:
                    for dtype, (a, b) in unit.bounds.items():
                        replica.own[dtype][a:b].copy_(replica.weights[dtype][a:b])
                    if versions[first] == seen:
                        break
                if self.seat.bells.patience.broken():
                    raise Broken("others of this view are gone")
                time.sleep(GLANCE_S)
            oldest = seen // 2 if oldest is None else min(oldest, seen // 2)
        buffers = self.parts.undo_log.newest_buffers(replica.buffers.committed)
        return buffers if oldest is None else oldest

    # ---- a step

    def _compute(self, cut: Cut, loss: LossFn) -> StepFacts:
        parts, seat, sequence = self.parts, self.seat, self._pushed + 1
        self.granted = cut.step
        row = seat.board.rows[seat.rank]
        seat.bells.wait(lambda: True if row[FREED] >= sequence - 2 else None)
        read = self._pull()
        summing, form = self._sums[sequence % 2], parts.form
        leaves = len(cut.sizes)
        sheet, tree = form.sheet(leaves), summing.tree(leaves)
        due = self.feed.micro_batches(cut, range(leaves))
        due = self.leaves.begin(cut, due, loss, None)
        for row_, micro_batch in zip(sheet.rows, due, strict=True):
            leaf = self.leaves.compute(cut, micro_batch, loss)
            parts.moment("leaf")
            sheet.fill(row_, micro_batch, leaf, self._trainable)
            parts.replica.buffers.end(form.of_buffers(row_))
            summing.collect(tree, micro_batch.index)
        clip, reach = parts.replica.clip_norm, summing.reach(tree)
        message = sheet.signed(parts.heard(), range(leaves), clip, reach, 1.0)
        tally = form.read(cut.step, [message])
        self._refuse(tally)
        facts = form.learn(cut, tally, [message], None, skips=False)
        lanes = parts.boards.lanes(seat.rank, sequence % 2)
        push = StepPush(cut.step, read, leaves, facts.records, 1.0, message, lanes)
        push = replace(push, factor=self._factor(push, tally, tree))
        parts.boards.put(seat.rank, sequence % 2, push)
        parts.moment("gather")
        parts.record.made(push.step, read)
        self._pushed = sequence
        seat.say(PUSHED, sequence)
        seat.bells.ring([seat.head])
        parts.moment("share")
        return facts

    def _refuse(self, tally: StepTally) -> None:
        """What must not be pushed: the table is as if it had never been computed."""
        # It is the only one who tells of this step, as if all before it had told of nothing.
        ranges = [*[range(0)] * self.seat.rank, *tally.ranges]
        reaches = [*[0.0] * self.seat.rank, *tally.reaches]
        if (error := replace(tally, ranges=ranges, reaches=reaches).not_finite()) is not None:
            raise error
        buffers = self.parts.replica.buffers
        if changed := buffers.changed(self.parts.form.of_buffers(tally.rows)):
            raise TaskError(
                f"buffer '{changed[0].name}' changes while training, and is merged by its value: "
                "that is only possible when all begin from the same one. Use server.mode = "
                '"sync" (or --sync allreduce).'
            )

    def _factor(self, push: StepPush, tally: StepTally, tree: TreeSum[int]) -> float:
        """What the gradient is multiplied with: this worker has all of it."""
        assert [slot for _, slot in tree.parts] == [0], "the sum is where it is to lie"
        if tally.clip_norm is None and not tally.may_overflow:
            return 1.0
        updating = self.parts.updating
        with torch.no_grad():
            updating.finish_into_sums(tally, gradient_of(push, tally), updating.whole, self._spans)
            return updating.clip_factor(tally, lambda: updating.norms(tally, blocks(self._spans)))
