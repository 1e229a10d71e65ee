# SPDX-License-Identifier: Apache-2.0
"""Who is in, and what to do when that changes: pure decisions, no clock, no process.

`decide(situation)` looks at everything known and says what the supervisor must do. The first cause
of a failure is told from its symptoms: a worker's own exception, or a signal that ended it, is a
cause; that others then lost their connection to it is not.
"""

import signal
from dataclasses import dataclass, field

from manyhands.launch.agent import Exit
from manyhands.launch.messages import Left, Member, Trouble, View

GRACE_S = 2.0
"""How long to wait for a cause when only symptoms have been seen."""


@dataclass(slots=True)
class Situation:
    """Everything the supervisor has learnt, oldest first."""

    wanted: int
    members: dict[int, Member] = field(default_factory=dict[int, Member])
    """By worker: those that said hello."""
    view: View | None = None
    troubles: list[Trouble] = field(default_factory=list[Trouble])
    exits: list[Exit] = field(default_factory=list[Exit])
    left: dict[int, Left] = field(default_factory=dict[int, Left])
    steps: dict[int, int] = field(default_factory=dict[int, int])
    """The step each worker was last heard to be at."""
    symptoms_for_s: float = 0.0
    """Since the first sign of something wrong."""
    oom_kills: int = 0
    """Processes the kernel killed for want of memory since the run began."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The first cause of a failure."""

    rank: int | None
    """None: the driver."""
    pid: int
    host: str
    step: int
    what: str
    detail: str = ""
    advice: str = ""
    request: bool = False
    noticed_by: str = ""
    micro_batch: int | None = None
    records: tuple[int, ...] = ()
    """Those of the micro-batch that was in work."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do, or not enough known yet."""


@dataclass(frozen=True, slots=True)
class IssueView:
    view: View


@dataclass(frozen=True, slots=True)
class Finish:
    leader: Left


@dataclass(frozen=True, slots=True)
class GiveUp:
    cause: Cause


Decision = Wait | IssueView | Finish | GiveUp


def decide(now: Situation) -> Decision:
    """What to do. Never a new view after a failure yet: a worker that fails ends the run."""
    for trouble in now.troubles:
        if not trouble.symptom:
            return GiveUp(_of_trouble(now, trouble))
    told = {t.worker for t in now.troubles}
    for exit in now.exits:
        if exit.worker in now.left or exit.worker in told:
            continue
        if exit.code < 0 or now.symptoms_for_s >= GRACE_S:
            return GiveUp(_of_exit(now, exit))
    if now.troubles and now.symptoms_for_s >= GRACE_S:
        return GiveUp(_of_trouble(now, now.troubles[0]))
    if now.view is None and len(now.members) == now.wanted:
        return IssueView(first_view(now.members))
    if now.view is not None and len(now.left) == len(now.view.members):
        return Finish(now.left[now.view.members[0].worker])
    return Wait()


def has_symptoms(now: Situation) -> bool:
    return bool(now.troubles) or any(e.worker not in now.left for e in now.exits)


def first_view(members: dict[int, Member]) -> View:
    """Generation 1: ranks in the order of worker numbers."""
    ranked = [
        Member(m.worker, rank, m.pid, m.host)
        for rank, m in enumerate(sorted(members.values(), key=lambda m: m.worker))
    ]
    because = f"all {len(ranked)} workers are here" if len(ranked) > 1 else "the worker is here"
    return View(
        generation=1, members=ranked, speeds=[1.0] * len(ranked), first_step=0, because=because
    )


def _who(now: Situation, worker: int) -> tuple[int, int, str]:
    """Rank, process and host of a worker (its number stands for a rank it never got)."""
    member = now.members.get(worker)
    if member is None:
        pid = next((e.pid for e in now.exits if e.worker == worker), 0)
        return worker, pid, "this host"
    rank = now.view.rank_of(worker) if now.view else worker
    return rank, member.pid, member.host


def _of_trouble(now: Situation, trouble: Trouble) -> Cause:
    rank, pid, host = _who(now, trouble.worker)
    return Cause(
        rank,
        pid,
        host,
        trouble.step,
        what=trouble.text,
        detail=trouble.trace,
        request=trouble.request,
        noticed_by="the worker itself reported it",
        micro_batch=trouble.micro_batch,
        records=tuple(trouble.records),
    )


def _of_exit(now: Situation, exit: Exit) -> Cause:
    rank, pid, host = _who(now, exit.worker)
    step = max(now.steps.values(), default=0)  # all are at the same one; who spoke last knows best
    advice = ""
    if exit.code < 0:
        name = signal.Signals(-exit.code).name
        what = f"it was killed by signal {-exit.code} ({name})"
        if exit.code == -signal.SIGKILL and now.oom_kills:
            what += ": the kernel ended it because the machine ran out of memory"
            advice = "Lower train.micro_batch (activations) or use fewer workers."
        elif exit.code == -signal.SIGKILL:
            advice = (
                "Nobody in this run sent it, and the kernel reports no memory shortage: "
                "look for a person, a container limit or another program."
            )
        elif exit.code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL):
            advice = "A native library crashed; the worker's log may say which."
    else:
        what = f"it ended with exit code {exit.code} without finishing its work"
        advice = "Something called exit() in the worker; its log may say more."
    return Cause(
        rank,
        pid or exit.pid,
        host,
        step,
        what,
        advice=advice,
        noticed_by="the host agent saw it end",
    )
