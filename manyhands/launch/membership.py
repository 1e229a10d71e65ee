# SPDX-License-Identifier: Apache-2.0
"""Who is in, and what to do when that changes: pure decisions, no clock, no process.

`decide(situation)` looks at everything known and names one thing to do. The supervisor does it,
notes that it did, and asks again until the answer is Wait. A worker goes through these phases:

    starting ──Hello──▶ waiting ──View──▶ in ──Ready──▶ ready ──View──▶ in ... ──Left──▶ left
        └──────────────────┴── Exit, whenever it comes: gone ──┴──────────┘

| situation                                           | decision                                 |
|-----------------------------------------------------|------------------------------------------|
| an error that would only come again                 | GiveUp, with the first cause             |
| too many losses without a step between them         | GiveUp                                   |
| a worker is silent, stuck, or computes wrongly      | Fence: kill it; its Exit must be seen    |
| fewer workers than wanted                           | Start                                    |
| a member is gone, or cannot go on by itself         | Break: nobody waits for it any more      |
| Break or Halt was sent, members are still working   | Wait                                     |
| ... all are ready, but a fenced one has not ended   | Wait: it could still write               |
| ... all are ready, and there are enough             | IssueView: members, speeds, changes      |
| ... nobody survived                                 | Wait for newcomers, then IssueView       |
| all members have left                               | Finish                                   |
| somebody wants to join or leave, a setting changes, | Halt: all leave the loop at one step,    |
| the deal is uneven, stop or pause is asked for      | and nothing is computed in vain          |

The first cause of a failure is told from its symptoms: a worker's own exception, or a signal that
ended it, is a cause; that others then lost their connection to it is not.
"""

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from manyhands.deal import deal
from manyhands.launch.agent import Exit
from manyhands.launch.messages import Left, Member, Settings, Trouble, View

GRACE_S = 2.0
"""How long to wait for a cause when a worker ended with a code that says nothing."""

MOST_FAILED_STARTS = 3

Phase = Literal["starting", "waiting", "in", "ready", "left", "gone"]


@dataclass(frozen=True, slots=True)
class Limits:
    silent_s: float = 3.0
    """Without a heartbeat."""
    stuck_s: float = 30.0
    """Without progress, though it waits for nobody."""
    stuck_times: float = 10.0
    """... but at least this many times the usual time of a micro-batch."""
    losses: int = 5
    """Views that may be lost one after the other without a step between them."""
    starting_s: float = 600.0
    join_s: float = 0.5
    """How long somebody who is ready to join waits for others who are about to be."""


@dataclass(slots=True)
class Worker:
    """Everything known of one worker."""

    number: int
    phase: Phase = "starting"
    pid: int = 0
    host: str = ""
    built: bytes = b""
    step: int = 0
    exit: Exit | None = None
    trouble: Trouble | None = None
    left: Left | None = None
    fenced: str | None = None
    """Why it was killed by us."""
    wrong: str | None = None
    """An audit found that it computes wrongly."""
    leaving: bool = False
    """It was told to go and asks to hand over."""
    broken: bool = False
    """Ready, but because it could not go on."""
    phase_s: float = 0.0
    silent_s: float = 0.0
    stuck_s: float = 0.0
    ended_s: float = 0.0
    """Since it ended."""
    micro_batch_s: float = 0.0
    seasoned: bool = False
    """It has been through a step."""

    @property
    def alive(self) -> bool:
        return self.phase not in ("gone", "left") and self.fenced is None


@dataclass(slots=True)
class Situation:
    """Everything the supervisor has learnt."""

    wanted: int
    least: int = 1
    """With fewer, training waits for replacements."""
    replaceable: bool = True
    """Workers are processes: they can be killed and started again."""
    outlives: bool = True
    """State is in memory that outlives its workers."""
    restore: int | None = None
    """The newest checkpoint of this run, or that it was resumed from."""
    micro_batches: int = 1
    most: int = 1
    """No more workers than this can be used."""
    limits: Limits = field(default_factory=Limits)
    workers: dict[int, Worker] = field(default_factory=dict[int, Worker])
    view: View | None = None
    begun: bool = False
    """Some view has begun: there is state to go on from."""
    running: bool = False
    """The current view has begun, and was neither halted nor broken."""
    halted: str | None = None
    broken: str | None = None
    """Why, in the current view."""
    halts: int = 0
    losses: int = 0
    """Views lost since the last new step."""
    failed_starts: int = 0
    troubles: list[Trouble] = field(default_factory=list[Trouble])
    """All of them, oldest first."""
    oom_kills: int = 0
    """Processes the kernel killed for want of memory since the run began."""
    rebalance: bool = True
    better: tuple[float, ...] = ()
    """Speeds for which the current view was halted."""
    measured_s: float = 0.0
    """For how long speeds have been measured under the current deal."""
    # What people asked for.
    stop: bool = False
    paused: bool = False
    changes: Settings = field(default_factory=dict[str, Any])
    journal: dict[int, Settings] = field(default_factory=dict[int, dict[str, Any]])
    """Changes that were made, by step."""
    scored: int = -1
    enough: str | None = None
    saved: int = -1
    audit: int | None = None
    """A micro-batch of the next step that everybody is to compute."""
    witnesses: int = 0
    """Workers beyond those wanted, because two do not agree and nobody knows who is right."""
    unsteady: "Cause | None" = None
    """An audit found that nobody gets the same result twice."""

    def members(self) -> list[Worker]:
        """Of the current view, by rank."""
        return [self.workers[m.worker] for m in self.view.members] if self.view else []


@dataclass(frozen=True, slots=True)
class Cause:
    """The first cause of a failure."""

    rank: int | None
    """None: the driver."""
    worker: int
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
class Start:
    count: int


@dataclass(frozen=True, slots=True)
class Fence:
    worker: int
    because: str


@dataclass(frozen=True, slots=True)
class Break:
    because: str
    cause: Cause | None


@dataclass(frozen=True, slots=True)
class Halt:
    because: str
    speeds: tuple[float, ...] = ()
    """A better deal than the present one."""


@dataclass(frozen=True, slots=True)
class IssueView:
    view: View


@dataclass(frozen=True, slots=True)
class Finish:
    leader: Left


@dataclass(frozen=True, slots=True)
class GiveUp:
    cause: Cause


Decision = Wait | Start | Fence | Break | Halt | IssueView | Finish | GiveUp


def decide(now: Situation) -> Decision:
    if (cause := _hopeless(now)) is not None:
        return GiveUp(cause)
    if (fence := _to_fence(now)) is not None:
        return fence
    if (count := _lacking(now)) > 0:
        return Start(count)
    if now.broken is None and (lost := _lost(now)) is not None:
        return lost
    if now.view is not None and (leader := _all_left(now)) is not None:
        return Finish(leader)
    if now.view is None or now.broken is not None or now.halted is not None:
        view = _next_view(now)
        return Wait() if view is None else IssueView(view)
    because = _reason_to_halt(now)
    if because is None:
        return Wait()
    return Halt(because, tuple(speeds_of(now.members())) if because == UNEVEN else ())


# ---- giving up


def _hopeless(now: Situation) -> Cause | None:
    """A failure that trying again would not cure."""
    if now.unsteady is not None:
        return now.unsteady
    tried: dict[tuple[int, int | None], Trouble] = {}
    for trouble in now.troubles:
        if trouble.symptom:
            continue
        if not _worth_another_try(now, trouble):
            return cause_of_trouble(now, trouble)
        place = (trouble.step, trouble.micro_batch)
        if trouble.micro_batch is not None and place in tried:
            return cause_of_trouble(now, trouble, before=tried[place])
        tried[place] = trouble
    ended = [w for w in now.workers.values() if w.phase == "gone" and w.left is None]
    if not now.replaceable and ended and not _may_still_explain(ended[-1]):
        return cause_of_loss(now, ended[-1])
    anybody = any(w.alive for w in now.workers.values())
    never_worked = now.failed_starts >= MOST_FAILED_STARTS and not (now.begun and anybody)
    if ended and (never_worked or now.losses > now.limits.losses):
        return cause_of_loss(now, min(ended, key=lambda w: w.ended_s))
    broken = [w for w in now.members() if w.broken]
    if broken and now.losses > now.limits.losses:  # nobody died, and still it does not work
        return cause_of_loss(now, broken[0])
    return None


def _worth_another_try(now: Situation, trouble: Trouble) -> bool:
    """The user's own code failed at a micro-batch: another worker may have better luck."""
    if trouble.ours or trouble.request or not now.replaceable:
        return False
    return trouble.micro_batch is not None or (now.begun and _newcomer(now, trouble.worker))


def _newcomer(now: Situation, worker: int) -> bool:
    return now.view is not None and now.view.rank_of(worker) is None


def suspicious(now: Situation, step: int) -> list[Trouble]:
    """Failures at micro-batches that others have since computed: now `step` steps are done."""
    return [t for t in now.troubles if t.micro_batch is not None and t.step < step]


# ---- fencing and starting


def _to_fence(now: Situation) -> Fence | None:
    if not now.replaceable:
        return None
    limits = now.limits
    for worker in now.workers.values():
        if not worker.alive:
            continue
        if worker.wrong is not None:
            return Fence(worker.number, worker.wrong)
        if worker.phase == "starting":
            if worker.phase_s > limits.starting_s:
                return Fence(worker.number, f"it has not come up in {limits.starting_s:.0f} s")
            continue
        if worker.silent_s > limits.silent_s:
            return Fence(
                worker.number,
                f"it has not been heard of for {worker.silent_s:.1f} s "
                f"(recovery.silent_s = {limits.silent_s:g})",
            )
        patience = max(limits.stuck_s, limits.stuck_times * worker.micro_batch_s)
        if worker.phase == "in" and worker.seasoned and worker.stuck_s > patience:
            return Fence(
                worker.number,
                f"it has made no progress for {worker.stuck_s:.1f} s, though it lives "
                f"(recovery.stuck_s = {limits.stuck_s:g})",
            )
    return None


def _lacking(now: Situation) -> int:
    """How many workers to start."""
    if now.stop and now.begun and any(w.alive for w in now.workers.values()):
        return 0
    if now.begun and not now.replaceable:
        return 0
    if now.failed_starts >= MOST_FAILED_STARTS:
        return 0
    ending = any(w.left is not None for w in now.workers.values())
    staying = [w for w in now.workers.values() if w.alive and not w.leaving]
    if ending:  # one is enough to finish what somebody did not
        unfinished = any(w.left is None for w in now.members())
        return 1 if unfinished and not staying else 0
    return max(0, now.wanted + now.witnesses - len(staying))


# ---- losses


def _lost(now: Situation) -> Break | None:
    """A member that is gone, or one that had to stop because the others do not answer."""
    for worker in now.members():
        if worker.phase == "gone" and worker.left is None:
            if _may_still_explain(worker):
                continue
            cause = cause_of_loss(now, worker)
            return Break(f"rank {cause.rank} is gone: {cause.what}", cause)
    for worker in now.members():
        # Who made it so may not have been seen to end yet; an audit is nobody's end.
        if worker.broken and (worker.phase_s >= GRACE_S or now.audit is not None):
            return Break(f"worker {worker.number} lost its connection to others", None)
    return None


def _may_still_explain(worker: Worker) -> bool:
    """It ended by itself, and its last words may still be on the way."""
    silent = worker.trouble is None and worker.fenced is None
    by_itself = worker.exit is not None and worker.exit.code >= 0
    return silent and by_itself and worker.ended_s < GRACE_S


def _all_left(now: Situation) -> Left | None:
    lefts = [w.left for w in now.members()]
    finished = [left for left in lefts if left is not None]
    return finished[0] if lefts and len(finished) == len(lefts) else None


# ---- views


def _next_view(now: Situation) -> View | None:
    """The next view, when everybody who is to be in it can be; None: not yet."""
    everyone = now.workers.values()
    if any(w.fenced is not None and w.phase != "gone" for w in everyone):
        return None  # fencing is death, and seeing it
    if any(w.phase == "in" for w in everyone if w.alive):
        return None  # still working
    if now.paused and not now.stop and now.view is not None:
        return None
    candidates = [w for w in everyone if w.alive and w.phase in ("ready", "waiting")]
    staying = [w for w in candidates if now.stop or not w.leaving]
    coming = [w for w in everyone if w.alive and w.phase == "starting"]
    survivors = [w for w in staying if w.phase == "ready"]
    enough = now.least if not now.witnesses else now.wanted + now.witnesses
    if not staying or (coming and len(survivors) < enough):
        return None
    heirs = len(staying)
    if now.begun and not now.outlives and not survivors:
        staying = candidates  # only those who go hold the state: once more, to hand it over
    chosen = sorted(staying, key=lambda w: (w.phase != "ready", _old_rank(now, w), w.number))
    return make_view(now, chosen[: now.wanted + now.witnesses + len(staying) - heirs])


def _old_rank(now: Situation, worker: Worker) -> int:
    rank = now.view.rank_of(worker.number) if now.view else None
    return worker.number if rank is None else rank


def make_view(now: Situation, chosen: list[Worker]) -> View:
    generation = now.view.generation + 1 if now.view else 1
    survivors = [w for w in chosen if w.phase == "ready"]
    fresh = not now.begun or not (survivors or now.outlives)
    members = [Member(w.number, rank, w.pid, w.host) for rank, w in enumerate(chosen)]
    same = now.view is not None and [m.worker for m in now.view.members] == [
        w.number for w in chosen
    ]
    speeds = speeds_of(chosen) if now.rebalance else [1.0] * len(chosen)
    if same and now.view is not None:
        speeds = list(now.better) or now.view.speeds
    because = now.broken or now.halted or _all_here(len(chosen))
    return View(
        generation=generation,
        members=members,
        speeds=speeds,
        because=because,
        fresh=fresh,
        restore=now.restore if fresh else None,
        built=[w.built for w in chosen],
        halts=now.halts,
        journal=now.journal,
        changes=now.changes,
        scored=now.scored,
        enough=now.enough,
        saved=now.saved,
        stop=now.stop,
        audit=None if now.stop else now.audit,
    )


def _all_here(count: int) -> str:
    return f"all {count} workers are here" if count > 1 else "the worker is here"


# ---- reasons to halt

UNEVEN = "the deal is uneven: workers are not equally fast"


def _reason_to_halt(now: Situation) -> str | None:
    if not now.running:
        return None
    members, everyone = now.members(), now.workers.values()
    if any(w.left is not None for w in members) or (now.view is not None and now.view.stop):
        return None  # it is ending anyway
    if now.stop:
        return "a stop was asked for"
    if now.paused:
        return "a pause was asked for"
    if leaving := [w.number for w in members if w.leaving]:
        return f"worker {leaving[0]} was told to go"
    if now.changes:
        return "settings change: " + ", ".join(f"{k} = {v}" for k, v in now.changes.items())
    if now.audit is not None:
        return "an audit was asked for"
    if len(members) > now.wanted + now.witnesses:
        return f"{now.wanted} workers are wanted"
    joining = [w for w in everyone if w.alive and w.phase == "waiting"]
    coming = [w for w in everyone if w.alive and w.phase == "starting"]
    patient = coming and all(w.phase_s < now.limits.join_s for w in joining)
    if joining and len(members) < now.wanted and not patient:
        numbers = ", ".join(str(w.number) for w in joining)
        return f"worker {numbers} joins" if len(joining) == 1 else f"workers {numbers} join"
    if now.rebalance and uneven(now):
        return UNEVEN
    return None


LEAST_GAIN = 1.1
LEAST_MEASURED_S = 2.0


def uneven(now: Situation) -> bool:
    """Whether dealing by measured speeds would make steps at least a tenth quicker."""
    if now.view is None or now.measured_s < LEAST_MEASURED_S:
        return False
    members = now.members()
    times = [w.micro_batch_s for w in members]
    if len(members) < 2 or not all(times):
        return False
    return deal_time(now.micro_batches, now.view.speeds, times) > LEAST_GAIN * deal_time(
        now.micro_batches, speeds_of(members), times
    )


def deal_time(micro_batches: int, speeds: Iterable[float], times: Iterable[float]) -> float:
    """How long the slowest worker takes over its share."""
    ranges = deal(micro_batches, tuple(speeds))
    return max(len(r) * t for r, t in zip(ranges, times, strict=True))


def speeds_of(workers: list[Worker]) -> list[float]:
    """Relative to the fastest, in twentieths; one that was not measured counts as average."""
    known = sorted(w.micro_batch_s for w in workers if w.micro_batch_s > 0)
    if not known:
        return [1.0] * len(workers)
    usual = known[len(known) // 2]
    times = [w.micro_batch_s or usual for w in workers]
    return [max(0.05, round(20 * min(times) / t) / 20) for t in times]


# ---- audits


@dataclass(frozen=True, slots=True)
class Judgement:
    """What an audit came to. Nobody guilty and no witness wanted: all is well, or it was once."""

    guilty: dict[int, str]
    """Worker → why."""
    text: str
    more: bool = False
    """Opinion stands against opinion: another worker must be asked."""
    hopeless: bool = False
    """Nobody gets the same result twice: it is the task, not a worker."""


def judge(testimonies: dict[int, tuple[int, ...]]) -> Judgement:
    """From what each worker computed, twice, for the same micro-batch."""
    unsteady = sorted(w for w, digests in testimonies.items() if len(set(digests)) > 1)
    steady = {w: digests[0] for w, digests in testimonies.items() if w not in unsteady}
    count = len(testimonies)
    if not steady or (len(unsteady) > 1 and len(unsteady) * 2 >= count):
        text = (
            "the same micro-batch gives other gradients each time, on every worker: the task is "
            "not a pure function of its records and seeds. Look for a random generator of its "
            "own, the time, or an operation that is not deterministic."
        )
        return Judgement({}, text, hopeless=True)
    guilty = {w: "it does not get the same gradients twice" for w in unsteady}
    votes: dict[int, list[int]] = {}
    for worker, digest in steady.items():
        votes.setdefault(digest, []).append(worker)
    ranked = sorted(votes.values(), key=len, reverse=True)
    if len(ranked) == 1:
        alike = f"{len(steady)} workers computed the same bits"
        return Judgement(guilty, alike)
    if len(ranked[0]) == len(ranked[1]):
        return Judgement(guilty, "workers do not agree, and there is no majority", more=True)
    right = len(ranked[0])
    for group in ranked[1:]:
        for worker in group:
            guilty[worker] = f"it computes other gradients than {right} other workers"
    return Judgement(guilty, f"{len(guilty)} of {count} workers compute wrongly")


# ---- causes


def rank_of(now: Situation, worker: int) -> int:
    """Its rank in the current view (its number stands for a rank it never got)."""
    rank = now.view.rank_of(worker) if now.view else None
    return worker if rank is None else rank


def cause_of_trouble(now: Situation, trouble: Trouble, before: Trouble | None = None) -> Cause:
    worker = now.workers.get(trouble.worker, Worker(trouble.worker))
    noticed = "the worker itself reported it"
    if before is not None:
        noticed += f"; worker {before.worker} had failed at the same micro-batch before"
    return Cause(
        rank_of(now, trouble.worker),
        trouble.worker,
        worker.pid,
        worker.host or "this host",
        trouble.step,
        what=trouble.text,
        detail=trouble.trace,
        request=trouble.request,
        noticed_by=noticed,
        micro_batch=trouble.micro_batch,
        records=tuple(trouble.records),
    )


def cause_of_loss(now: Situation, worker: Worker) -> Cause:
    if worker.trouble is not None:
        return cause_of_trouble(now, worker.trouble)
    if worker.exit is None:
        what, advice = "it keeps losing its connection to the others", "Look at the workers' logs."
        noticed = "the worker itself reported it"
    else:
        what, advice = _of_code(now, worker.exit.code)
        noticed = "the host agent saw it end"
    if worker.fenced is not None:
        what, advice = worker.fenced, "It was killed; its log may say what it did."
        noticed = "the supervisor's clock"
    # All are at the same step; who spoke last knows best.
    step = max((w.step for w in now.workers.values()), default=0)
    return Cause(
        rank_of(now, worker.number),
        worker.number,
        worker.pid or (worker.exit.pid if worker.exit is not None else 0),
        worker.host or "this host",
        step,
        what,
        advice=advice,
        noticed_by=noticed,
    )


def _of_code(now: Situation, code: int) -> tuple[str, str]:
    """What an exit code means, and what to do about it."""
    if code >= 0:
        return (
            f"it ended with exit code {code} without finishing its work",
            "Something called exit() in the worker; its log may say more.",
        )
    what = f"it was killed by signal {-code} ({signal.Signals(-code).name})"
    if code == -signal.SIGKILL and now.oom_kills:
        what += ": the kernel ended it because the machine ran out of memory"
        return what, "Lower train.micro_batch (activations) or use fewer workers."
    if code == -signal.SIGKILL:
        return what, (
            "Nobody in this run sent it, and the kernel reports no memory shortage: "
            "look for a person, a container limit or another program."
        )
    if code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL):
        return what, "A native library crashed; the worker's log may say which."
    return what, ""
