# SPDX-License-Identifier: Apache-2.0
"""A server's part: it applies pushes to its units, one after the other, in the order of the head.

The head is the first server. It grants steps to workers who ask, orders what they have pushed, and
calls all together where they must act together (grants.py). It does so while it waits for the next
push, so there is no thread beside it; who waits for the head waits until it has applied a push. On
several hosts the servers of each apply all pushes to the state that it keeps (relay.py).
"""

import time
from dataclasses import replace

import torch

from manyhands.training.state.replica import StepFacts
from manyhands.training.sync.allreduce.step_facts import StepTally
from manyhands.training.sync.merge.board import (
    AGREED,
    ANSWERED,
    APPLIED,
    ASKED,
    AT,
    FREED,
    GRANTED,
    HEARD,
    MEETING,
    TAKEN,
    PushOrder,
    StepPush,
    Tally,
)
from manyhands.training.sync.merge.grants import (
    ReadStates,
    deal_after,
    first_due,
    grant,
    meeting_at,
    next_pusher,
)
from manyhands.training.sync.merge.seat import MergeParts, Seat


class ServerTurns:
    def __init__(self, parts: MergeParts, seat: Seat) -> None:
        self.parts, self.seat = parts, seat
        self.head = Head(parts, seat) if seat.rank == seat.head else None
        self.whole = not seat.board.tally().applied.beyond
        self._current: tuple[PushOrder, StepPush, StepTally] | None = None

    def learn(self, n: int) -> StepFacts:
        """Wait for push n, and learn what is to be known of it."""
        parts, seat, head = self.parts, self.seat, self.head
        seat.say(AT, n)
        if head is not None:
            seat.wait(lambda: head.order_next(n))
        else:
            seat.bells.ring([seat.head])
            seat.wait(lambda: self._ordered(n))
        order = seat.board.order(n)
        push = seat.board.push(order)
        tally = parts.read(push, n)
        self._current = order, push, tally
        parts.moment("gather")
        facts = parts.form.facts(tally, [push.facts])
        return replace(facts, agreed=order.agreed if order.meets else 0)

    def _ordered(self, n: int) -> bool | None:
        self.seat.hear(self.parts.heard())
        return True if self.seat.board.ordered > n else None

    def apply(self, n: int) -> None:
        """When it returns, this server has applied it; if all meet after it, all have."""
        assert self._current is not None, "it is learnt of first"
        parts, seat, (order, push, tally) = self.parts, self.seat, self._current
        self._current = None
        began, waiting = time.monotonic(), seat.board.waiting(n + 1, seat.workers)
        with torch.no_grad():
            parts.moment("update")
            if seat.speaks:
                parts.record.applies(n, push.step)
            parts.apply(push, tally)
            if seat.speaks:
                parts.commit_buffers(tally)
        took_s = parts.boards.age_s(order.rank, order.sequence % 2)
        parts.load.applied(time.monotonic() - began, took_s, waiting)
        parts.moment("share")
        seat.say(APPLIED, n + 1)
        if self.head is None:
            seat.bells.ring([seat.head])
        if not order.meets:
            return
        if self.head is not None:
            self.head.hold_meeting(n + 1, order)
        else:
            seat.wait(lambda: True if seat.board.words[MEETING] > n else None)
            parts.undo_log.get_buffers(n + 1, parts.replica.buffers.committed)
        self.whole = True


class Head:
    def __init__(self, parts: MergeParts, seat: Seat) -> None:
        self.parts, self.seat, self.board = parts, seat, seat.board
        self.tally: Tally = seat.board.tally()
        self.applied = self.tally.applied
        """By all servers; what was ordered since is in `deal.finished` alone."""
        self.deal = deal_after(self.applied)
        self.met, self.agreed = seat.began, seat.told
        self.due: int | None = None
        """Of the next meeting, when it has been looked up."""
        bound = parts.bound
        self._reads = None if bound is None else ReadStates(bound, seat.began, self.applied)
        self._applying: tuple[PushOrder, int] | None = None
        """What was ordered last, and its step."""
        self._served = -1

    def order_next(self, n: int) -> bool | None:
        """Answer who asks; True: push n has been ordered."""
        board, seat = self.board, self.seat
        seat.hear(self.parts.heard())
        settled = self._settle(n)
        if min(board.column(AT, seat.workers)) < self.met:
            return None  # somebody has not come to the last meeting yet
        heard = min(board.column(HEARD, seat.everyone))
        stop = self._stop(n, commanded=heard > self.agreed)
        self._grant(stop)
        if not settled or min(board.column(AT, seat.servers)) < n:
            return None
        ranks = seat.workers
        pushed, taken = board.column(seat.acknowledged, ranks), board.column(TAKEN, ranks)
        if (k := next_pusher(pushed, taken, self._served)) is None:
            return None
        self._served = k
        meets = n + 1 == stop
        order = PushOrder(ranks[k], taken[k] + 1, meets, heard if meets else 0)
        push = board.push(order)
        if self._reads is not None:
            problem = self._reads.problem(push.step, push.read)
            assert problem is None, problem
        self.deal = self.deal.finish(push.step)
        if self._reads is not None:
            self._reads.add(n + 1, self.deal.finished)
        self.tally = self.tally.add(order.rank, push, n)
        board.put_order(n, order, self.tally)
        self._applying = order, push.step
        seat.bells.ring(seat.servers[1:])
        return True

    def _settle(self, n: int) -> bool:
        """Whether all servers have applied all pushes before n. The mailbox of the last is free."""
        if self._applying is None:
            return True
        if min(self.board.column(APPLIED, self.seat.servers)) < n:
            return False
        (order, step), self._applying = self._applying, None
        self.applied = self.deal.finished
        self.parts.record.settled(n - 1, step)
        self.board.rows[order.rank, FREED] = order.sequence
        self.seat.bells.ring([order.rank])
        return True

    def _stop(self, n: int, *, commanded: bool) -> int:
        if self.due is None:
            self.due = first_due(self.applied, self.seat.due(n))
        return meeting_at(n, self.deal.claimed, self.due, commanded=commanded)

    def _grant(self, stop: int) -> None:
        board = self.board
        for rank in self.seat.workers:
            asked = int(board.rows[rank, ASKED])
            if asked == board.rows[rank, ANSWERED]:
                continue
            self.deal, step = grant(
                self.deal, self.applied, rank, bound=self.parts.bound, stop=stop
            )
            if step is None:
                return
            board.rows[rank, GRANTED] = step
            board.rows[rank, ANSWERED] = asked
            self.seat.bells.ring([rank])

    def hold_meeting(self, step: int, order: PushOrder) -> None:
        """All servers have applied all that was dealt; from now on members act together."""
        board, seat = self.board, self.seat
        all_applied = lambda: min(board.column(APPLIED, seat.servers)) >= step or None  # noqa: E731
        seat.wait(all_applied)
        self.parts.met(board.generation, step, self.tally)
        self.met, self.agreed, self.due = step, order.agreed, None
        board.words[AGREED] = order.agreed
        board.words[MEETING] = step
        seat.bells.ring([rank for rank in seat.everyone if rank != seat.rank])
        if seat.relay is not None:
            seat.relay.announce(step)
