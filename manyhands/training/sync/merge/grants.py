# SPDX-License-Identifier: Apache-2.0
"""Where all meet next, and who may begin which step: pure decisions of the head.

Members are at different steps, except where they act together (save, evaluate, end, obey): there
they **meet**. Nothing beyond the meeting is dealt before it, so that when it is held all steps
before it have been applied, and none other: the state is one that can be saved under that number.
"""

from manyhands.training.sync.merge.staleness import (
    AppliedSteps,
    StepDeal,
    may_begin,
    next_step,
)


def meeting_at(done: int, claimed: int, due: int, *, commanded: bool) -> int:
    """After how many steps all meet next.

    `done` pushes have been ordered, `claimed` steps dealt; `due`: where they meet anyway;
    `commanded`: there is a command that all have heard, so as soon as what was dealt is done. A
    meeting is always still to come: what was ordered cannot be told of it any more.
    """
    return min(due, max(claimed, done + 1)) if commanded else due


def first_due(applied: AppliedSteps, due: int) -> int:
    """The first meeting of a view: where there are steps missing among those that were applied,
    right after they have been made up for."""
    return due if not applied.beyond else min(due, applied.beyond[-1][1])


def deal_after(applied: AppliedSteps) -> StepDeal:
    """As a view begins: whatever was begun and not pushed is dealt again."""
    claimed = applied.beyond[-1][1] if applied.beyond else applied.prefix
    return StepDeal(claimed, applied, frozenset(applied.missing(claimed)))


def grant(
    deal: StepDeal, applied: AppliedSteps, worker: int, *, bound: int | None, stop: int
) -> tuple[StepDeal, int | None]:
    """The next step for a worker who asks for one; None: it must wait. `applied` is what all
    servers have applied, which is less than what was finished."""
    step = next_step(deal.claimed, deal.finished, deal.lost, stop)
    if step is None or not may_begin(step, applied, bound):
        return deal, None
    return deal.take(worker, stop)


class ReadStates:
    """Which steps were in after each of the last pushes: whether what a push was computed on was
    fresh enough, is looked at again when it is ordered."""

    def __init__(self, bound: int, done: int, applied: AppliedSteps) -> None:
        self.bound, self._after = bound, {done: applied}

    def add(self, done: int, applied: AppliedSteps) -> None:
        self._after[done] = applied
        self._after.pop(done - 4 * self.bound - 4, None)  # between read and push are 2 k at most

    def problem(self, step: int, read: int) -> str | None:
        """Why step `step`, computed on the weights after `read` pushes, must not be applied."""
        applied = self._after.get(read)
        if applied is not None and may_begin(step, applied, self.bound):
            return None
        had = "nobody knows what" if applied is None else f"all steps below {applied.prefix}"
        return (
            f"step {step} was computed on weights after {read} pushes, with {had} in them, and "
            f"the bound is {self.bound}"
        )


def next_pusher(pushed: list[int], taken: list[int], last: int) -> int | None:
    """Whose push is applied next, of those who have made more than were taken: in turns, beginning
    after the one who was served last."""
    count = len(pushed)
    turns = ((last + 1 + k) % count for k in range(count))
    return next((rank for rank in turns if pushed[rank] > taken[rank]), None)
