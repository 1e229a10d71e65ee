# SPDX-License-Identifier: Apache-2.0
"""Who is in, and what to do when that changes: pure decisions, no clock, no process.

`decide(situation)` looks at everything known and names one thing to do. The supervisor does it,
notes that it did, and asks again until the answer is Wait. A worker goes through these phases:

    starting ──Hello──▶ waiting ──View──▶ in ──Ready──▶ ready ──View──▶ in ... ──Left──▶ left
        └──────────────────┴── Exit, whenever it comes: gone ──┴──────────┘

| situation                                           | decision                                 |
|-----------------------------------------------------|------------------------------------------|
| an error that would only come again                 | GiveUp, with the first cause             |
| two ends that user code may have brought about, at  | GiveUp, and name its records             |
| the same micro-batch                                |                                          |
| too many losses without a step between them, or     | GiveUp                                   |
| nobody stays and nobody can be started              |                                          |
| a worker is silent, stuck, or computes wrongly      | Fence: kill it; its Exit must be seen    |
| fewer workers than wanted                           | Start                                    |
| two hosts that answer us cannot reach each other    | Drop one of them                         |
| a host computes other bits than the first           | Drop it, unless train.unlike = "warn"    |
| a member is gone, or cannot go on by itself         | Break: nobody waits for it any more      |
| Break or Halt was sent, members are still working   | Wait                                     |
| ... all are ready, but a fenced one has not ended   | Wait: it could still write               |
| ... all are ready, and there are enough             | IssueView: members, speeds, changes      |
| ... nobody survived                                 | Wait for newcomers, then IssueView       |
| all members have left                               | Finish                                   |
| somebody wants to join or leave, a setting changes, | Halt: all leave the loop at one step,    |
| the deal is uneven, stop or pause is asked for      | and nothing is computed in vain          |
"""

from itertools import combinations

from manyhands.driver.supervise.cut_off_hosts import cut_off
from manyhands.driver.supervise.death_causes import (
    GRACE_S,
    cause_of_loss,
    cause_of_trouble,
    may_still_explain,
    twice_in_one_place,
)
from manyhands.driver.supervise.decisions import (
    BreakView,
    Decision,
    Fence,
    Finish,
    GiveUp,
    HaltView,
    IssueView,
    StartWorkers,
    Wait,
)
from manyhands.driver.supervise.servers import (
    all_here_in_words,
    choose_servers,
    computing_among,
    dealt_nothing,
    is_for_one_to_find_out,
    servers_in,
    wanted_in_words,
    with_servers,
)
from manyhands.driver.supervise.uneven_deal import UNEVEN, speeds_of, uneven
from manyhands.driver.supervise.unlike_hosts import to_turn_away
from manyhands.driver.supervise.worker_states import Limits, Situation, WorkerState
from manyhands.values.messages import Left, Trouble
from manyhands.values.verdict import Cause, ranks_in_words
from manyhands.values.view import Keeper, Member, View

MOST_FAILED_STARTS = 3


def decide(now: Situation) -> Decision:
    if now.view is not None and (leader := _all_left(now)) is not None:
        return Finish(leader)  # whatever else has gone wrong
    if (cause := _hopeless(now)) is not None:
        return GiveUp(cause)
    if (fence := _to_fence(now)) is not None:
        return fence
    if (count := _lacking(now)) > 0:
        return StartWorkers(count)
    if (drop := to_turn_away(now) or cut_off(now)) is not None:
        return drop
    if now.broken is None and (lost := _lost(now)) is not None:
        return lost
    if now.view is None or now.broken is not None or now.halted is not None:
        if (fence := _bereft(now)) is not None:
            return fence
        view = _next_view(now)
        return Wait() if view is None else IssueView(view)
    because = _reason_to_halt(now)
    if because is None:
        return Wait()
    return HaltView(because, tuple(speeds_of(now.members())) if because == UNEVEN else ())


# ---- giving up


def _hopeless(now: Situation) -> Cause | None:
    """A failure that trying again would not cure."""
    if now.unsteady is not None:
        return now.unsteady
    for trouble in now.troubles:
        if not trouble.symptom and not _worth_another_try(now, trouble):
            return cause_of_trouble(now, trouble)
    if (cause := twice_in_one_place(now)) is not None:
        return cause
    ended = [w for w in now.workers.values() if w.phase == "gone" and w.left is None]
    if not now.replaceable and ended and not may_still_explain(ended[-1]):
        return cause_of_loss(now, ended[-1])
    # Who was told to go is no reason to hope: nobody can be started to take its place.
    anybody = any(w.alive and (now.stop or not w.leaving) for w in now.workers.values())
    alive = [w for w in now.workers.values() if w.alive]
    few = len(alive) < _least_together(now) or (now.merges and not _able_among(now, alive))
    never_worked = now.failed_starts >= MOST_FAILED_STARTS and (few or not (now.begun and anybody))
    if ended and (never_worked or now.losses > now.limits.losses):
        return cause_of_loss(now, min(ended, key=lambda w: w.ended_s))
    broken = [w for w in now.members() if w.broken]
    if broken and now.losses > now.limits.losses:  # nobody died, and still it does not work
        return cause_of_loss(now, broken[0])
    return None


def _worth_another_try(now: Situation, trouble: Trouble) -> bool:
    """The user's own code failed at a micro-batch: another worker may have better luck."""
    if trouble.ours or trouble.request or trouble.held_out or not now.replaceable:
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
                return Fence(
                    worker.number,
                    f"it has not come up in {limits.starting_s:g} s (recovery.starting_s)",
                    stuck=True,
                )
            continue
        if worker.silent_s > limits.silent_s:
            return Fence(
                worker.number,
                f"it has not been heard of for {worker.silent_s:.1f} s "
                f"(recovery.silent_s = {limits.silent_s:g})",
            )
        patience, setting = patience_with(worker, limits)
        if worker.phase == "in" and worker.stuck_s > patience:
            return Fence(
                worker.number,
                f"it has made no progress for {worker.stuck_s:.1f} s, though it lives "
                f"(recovery.{setting} = {getattr(limits, setting):g})",
                stuck=True,
            )
    return None


def patience_with(worker: WorkerState, limits: Limits) -> tuple[float, str]:
    """How long it may be at what it is at, and the setting that says so."""
    kind = worker.work.kind
    usual = max(limits.stuck_s, limits.stuck_times * worker.micro_batch_s), "stuck_s"
    if kind in ("evaluate", "score"):
        usual = limits.evaluate_s, "evaluate_s"
    if worker.first or kind in ("build", "join"):
        return max(usual, (limits.starting_s, "starting_s"))
    return usual


def _lacking(now: Situation) -> int:
    """How many workers to start."""
    if now.stop and now.begun and _able_among(now, [w for w in now.workers.values() if w.alive]):
        return 0
    if now.begun and not now.replaceable:
        return 0
    if now.failed_starts >= MOST_FAILED_STARTS:
        return 0
    ending = any(w.left is not None for w in now.workers.values())
    staying = [w for w in now.workers.values() if w.alive and not w.leaving]
    staying += [w for w in now.workers.values() if _may_have_finished(w)]
    if ending:  # one is enough to finish what somebody did not
        unfinished = any(w.left is None for w in now.members())
        return 1 if unfinished and not staying else 0
    most = 1 if is_for_one_to_find_out(now) else now.hands
    return max(0, (most if now.capacity is None else min(most, now.capacity)) - len(staying))


def _least_together(now: Situation) -> int:
    """With fewer no view can train: where workers are at different steps one serves, and another
    computes. What somebody did not finish at the end, one can."""
    ending = any(w.left is not None for w in now.workers.values())
    return 2 if now.merges and not ending else 1


def _able_among(now: Situation, members: list[WorkerState]) -> int:
    """How many of these can do what is left to be done: compute, or finish what others did not."""
    ending = now.merges and _least_together(now) == 1
    return len(members) if ending else computing_among(now, members)


def _may_have_finished(worker: WorkerState) -> bool:
    """Its end was seen, and that it had finished its work may be read next."""
    ended = worker.phase == "gone" and worker.exit is not None and worker.exit.code == 0
    return ended and may_still_explain(worker)


# ---- losses


def _lost(now: Situation) -> BreakView | None:
    """A member that is gone, or one that had to stop because the others do not answer."""
    for worker in now.members():
        if worker.phase == "gone" and worker.left is None:
            if may_still_explain(worker):
                continue
            cause = cause_of_loss(now, worker)
            who = f"rank {cause.rank} is gone"
            if cause.ranks:
                who = f"host {cause.host} is gone with {ranks_in_words(cause.ranks)}"
            return BreakView(f"{who}: {cause.what}", cause)
    for worker in now.members():
        # Who made it so may not have been seen to end yet; an audit is nobody's end.
        if worker.broken and now.audit is not None:
            return BreakView("workers computed a micro-batch differently", None)
        if worker.broken and worker.phase_s >= GRACE_S:
            return BreakView(f"worker {worker.number} lost its connection to others", None)
    return None


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
    enough = now.least if not now.witnesses else now.hands
    able = len(survivors) if now.witnesses else _able_among(now, survivors)
    if not staying or (coming and able < enough):
        return None
    able = _able_among(now, staying)
    if now.capacity is not None and able < now.least and not now.stop:
        return None  # hosts that would bring them may still come
    if able < 1:
        return None
    heirs = len(staying)
    if now.begun and not any(now.holds(w) for w in staying):
        if any(w.at in now.held for w in coming):
            return None
        staying = candidates  # only those who go hold the state: once more, to hand it over

    def seniority(worker: WorkerState) -> tuple[bool, bool, int, int]:
        ready = worker.phase == "ready"
        return not now.holds(worker), not ready, now.rank_of(worker.number), worker.number

    chosen = sorted(staying, key=seniority)
    chosen = chosen[: now.hands + len(staying) - heirs]
    return make_view(now, by_host(chosen))


def _bereft(now: Situation) -> Fence | None:
    """One who was in, when nobody holds the state any more: whoever begins anew must be new."""
    if not now.begun or any(w.phase == "in" for w in now.workers.values() if w.alive):
        return None
    living = [w for w in now.workers.values() if w.alive]
    if any(now.holds(w) for w in living):
        return None
    ready = [w for w in living if w.phase == "ready"]
    return Fence(ready[0].number, "nobody holds the state any more") if ready else None


def by_host(workers: list[WorkerState]) -> list[WorkerState]:
    """Those of one host next to each other; hosts in the order of their first."""
    hosts = list(dict.fromkeys(w.at for w in workers))
    return sorted(workers, key=lambda w: hosts.index(w.at))


def make_view(now: Situation, chosen: list[WorkerState]) -> View:
    """Of these, who are in the order of hosts."""
    generation = now.view.generation + 1 if now.view else 1
    fresh = not now.begun or not any(now.holds(w) for w in chosen)
    homes = (
        [[w] for w in chosen]
        if now.private
        else [[w for w in chosen if w.at == at] for at in dict.fromkeys(w.at for w in chosen)]
    )
    members = [Member(w.number, rank, w.pid, w.host) for rank, w in enumerate(chosen)]
    same = now.view is not None and [m.worker for m in now.view.members] == [
        w.number for w in chosen
    ]
    speeds = speeds_of(chosen) if now.rebalance else [1.0] * len(chosen)
    if same and now.view is not None:
        speeds = list(now.better) or now.view.speeds
    speeds = with_servers(speeds, choose_servers(now, chosen))
    serving = sum(speed == 0 for speed in speeds)
    because = now.broken or now.halted or all_here_in_words(len(chosen) - serving, serving)
    return View(
        generation=generation,
        members=members,
        speeds=speeds,
        because=because,
        hosts=[len(home) for home in homes],
        peer_addresses=[home[0].peer_address for home in homes],
        keepers=_keepers(chosen),
        measure=not now.private and not_measured(now, [home[0].at for home in homes]),
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


def _keepers(chosen: list[WorkerState]) -> list[Keeper]:
    """Each cache once, served by the first who can."""
    serving = [w for w in reversed(chosen) if w.shards]
    return list({w.cache: Keeper(w.cache, w.host_name, w.shards) for w in serving}.values())


def not_measured(now: Situation, hosts: list[str]) -> bool:
    """Whether nobody knows yet how far two of these are from each other."""
    return any(frozenset(pair) not in now.measured for pair in combinations(hosts, 2))


# ---- reasons to halt


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
    if len(members) > now.hands:
        return wanted_in_words(now.wanted, now.serving)
    if now.view is not None and servers_in(now.view) != dealt_nothing(now, members):
        return wanted_in_words(now.wanted, now.serving)
    joining = [w for w in everyone if w.alive and w.phase == "waiting"]
    coming = [w for w in everyone if w.alive and w.phase == "starting"]
    patient = coming and all(w.phase_s < now.limits.join_s for w in joining)
    if joining and len(members) < now.hands - now.witnesses and not patient:
        numbers = ", ".join(str(w.number) for w in joining)
        return f"worker {numbers} joins" if len(joining) == 1 else f"workers {numbers} join"
    if now.rebalance and uneven(now):
        return UNEVEN
    return None
