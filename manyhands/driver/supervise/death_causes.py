# SPDX-License-Identifier: Apache-2.0
"""Why somebody was lost: the first cause of a failure, told from its symptoms.

A worker's own exception, or a signal that ended it, is a cause; that others then lost their
connection to it is not. Ends that user code may have brought about (a crash, an exit, an endless
loop, too much memory) count with the place where they happened: two at the same one are no chance.
Who was killed from outside, or with its host, says nothing about the place where it was.
"""

import signal
from collections import Counter

from manyhands.driver.supervise.crash_words import explain_crash
from manyhands.driver.supervise.worker_states import Situation, WorkerState
from manyhands.launch.engines.fork_agent import CRASHES, WorkerExit
from manyhands.values.messages import Trouble
from manyhands.values.verdict import Cause
from manyhands.values.work_in_hand import WorkInHand

MEMORY = "Lower train.micro_batch (activations) or use fewer workers: memory ran out."

GRACE_S = 2.0
"""How long to wait for a cause when a worker ended with a code that says nothing."""
TELLING = 3
"""So many ends at one place tell of it, whatever they looked like."""


def may_still_explain(worker: WorkerState) -> bool:
    """It ended by itself, and its last words may still be on the way."""
    silent = worker.trouble is None and worker.fenced is None
    by_itself = worker.exit is not None and worker.exit.code >= 0
    return silent and by_itself and worker.ended_s < GRACE_S


def own_doing(worker: WorkerState) -> bool:
    """Whether its end may have been brought about by the code that it ran."""
    if worker.fenced is not None:
        return worker.stuck
    ended = worker.exit
    if ended is None or ended.lost or ended.why or may_still_explain(worker):
        return False
    return ended.code >= 0 or -ended.code in CRASHES or ended.out_of_memory


def twice_in_one_place(now: Situation) -> Cause | None:
    """Two workers came to grief at the same work."""
    tried: dict[WorkInHand, Trouble | WorkerState] = {}
    for trouble in now.troubles:
        if trouble.micro_batch is None or trouble.symptom:
            continue
        place = place_of(trouble)
        if place in tried:
            return cause_of_trouble(now, trouble, before=number_of(tried[place]))
        tried[place] = trouble
    dead = [w for w in now.workers.values() if w.phase == "gone" and w.left is None]
    for worker in sorted(dead, key=lambda w: -w.ended_s):
        if worker.trouble is not None or not own_doing(worker) or not worker.work.of_user:
            continue
        before = tried.setdefault(worker.work, worker)
        if isinstance(before, Trouble) and before.worker != worker.number:
            return cause_of_trouble(now, before, before=worker.number)
        if before is not worker:
            return cause_of_loss(now, worker, before=number_of(before))
    return None


def place_of(trouble: Trouble) -> WorkInHand:
    assert trouble.micro_batch is not None
    kind = "evaluate" if trouble.held_out else "compute"
    return WorkInHand(kind, trouble.step, trouble.micro_batch)


def number_of(who: Trouble | WorkerState) -> int:
    return who.worker if isinstance(who, Trouble) else who.number


def cause_of_trouble(now: Situation, trouble: Trouble, before: int | None = None) -> Cause:
    worker = now.workers.get(trouble.worker, WorkerState(trouble.worker))
    noticed = "the worker itself reported it"
    if before is not None:
        noticed += f"; worker {before} had failed at the same {_batch(trouble.held_out)} before"
    what, advice = trouble.text, _missing_there(worker, trouble)
    if trouble.request and advice:
        what, advice = f"host {worker.host_name}: {what} {advice}", ""
    return Cause(
        rank=now.rank_of(trouble.worker),
        worker=trouble.worker,
        pid=worker.pid,
        host=worker.host_name,
        step=trouble.step,
        what=what,
        detail=trouble.trace,
        advice=advice,
        request=trouble.request,
        noticed_by=noticed,
        micro_batch=trouble.micro_batch,
        held_out=trouble.held_out,
        records=tuple(trouble.records),
    )


def cause_of_loss(now: Situation, worker: WorkerState, before: int | None = None) -> Cause:
    if worker.trouble is not None:
        return cause_of_trouble(now, worker.trouble)
    ended, detail = worker.exit, ""
    if ended is None:
        what, advice = "it keeps losing its connection to the others", "Look at the workers' logs."
        noticed = "the worker itself reported it"
        if now.audit is not None:
            what, advice, noticed = now.audited, "", "audits, one after the other"
    else:
        what, advice, detail = _of_exit(ended)
        noticed = "the host agent saw it end"
    if ended is not None and ended.why:
        what, advice = ended.why, MEMORY if ended.out_of_memory else ""
        noticed, detail = "its launcher saw it", ""
    if worker.fenced is not None:
        what, advice = worker.fenced, "It was killed; its log may say what it did."
        noticed, detail = "the supervisor's clock", worker.where
    if ended is not None and ended.lost:
        what, advice = worker.fenced or ended.lost, "Look at that host, and at the network between."
        noticed, detail = "the driver's pings of that host", ""
    work = worker.work
    telling = own_doing(worker) or worker.fenced is not None or ends_at(now, work) >= TELLING
    telling = telling and work.of_user and not (ended is not None and ended.lost)
    if before is not None:
        noticed += f"; worker {before} had ended at the same place before"
    if telling and not work.has_records:
        noticed += f", in {work}"
    # All are at the same step; who spoke last knows best.
    step = max((w.step for w in now.workers.values()), default=0)
    return Cause(
        rank=now.rank_of(worker.number),
        worker=worker.number,
        pid=worker.pid or (ended.pid if ended is not None else 0),
        host=worker.host_name,
        step=work.step if telling else step,
        what=what,
        advice=advice,
        detail=detail,
        noticed_by=noticed,
        micro_batch=work.index if telling and work.has_records else None,
        held_out=telling and work.kind == "evaluate",
        ranks=_gone_with_host(now, worker),
    )


def ends_at(now: Situation, place: WorkInHand) -> int:
    """How many have ended there, for whatever reason (but with their hosts)."""
    ended = [w for w in now.workers.values() if w.phase == "gone" and w.left is None]
    return Counter(w.work for w in ended if w.exit is not None and not w.exit.lost)[place]


def _gone_with_host(now: Situation, worker: WorkerState) -> tuple[int, ...]:
    """The ranks of all who went when its host did."""

    def lost(one: WorkerState) -> bool:
        return one.phase == "gone" and one.exit is not None and bool(one.exit.lost)

    if not lost(worker) or not worker.at:
        return ()
    return tuple(r for r, w in enumerate(now.members()) if w.at == worker.at and lost(w))


def _missing_there(worker: WorkerState, trouble: Trouble) -> str:
    """Advice about what the driver's host may have and another has not."""
    kinds = ("ImportError", "ModuleNotFoundError", "FileNotFoundError", "NotADirectoryError")
    absent = ("No module named", "No such file or directory")
    missing = trouble.kind in kinds or any(text in trouble.text for text in absent)
    if not worker.at or not missing or "--ship" in trouble.text:
        return ""
    return (
        f"That is how it is on host {worker.host_name}: install what is missing there, or send "
        "files along with --ship."
    )


def _batch(held_out: bool) -> str:
    return "held-out batch" if held_out else "micro-batch"


def _of_exit(ended: WorkerExit) -> tuple[str, str, str]:
    """What an exit code means, what to do about it, and where it came from."""
    code = ended.code
    if code >= 0:
        return (
            f"it ended with exit code {code} without finishing its work",
            "Something called exit() in the worker; its log may say more.",
            "",
        )
    name = f" ({signal.Signals(-code).name})" if -code in set(signal.Signals) else ""
    what = f"it was killed by signal {-code}{name}"
    if ended.out_of_memory:
        what += ": the kernel ended it because the machine ran out of memory"
        return what, MEMORY, ""
    if code == -signal.SIGKILL:
        advice = (
            "Nobody in this run sent it, and the kernel reports no memory shortage: "
            "look for a person, a container limit or another program."
        )
        return what, advice, ""
    if -code not in CRASHES:
        return what, "", ""
    said, where = explain_crash(ended.log_tail)
    if said and said not in ("Segmentation fault", "Aborted", "Bus error"):
        what += f": {said}"
    if not where:
        return what, "A native library crashed; the worker's log may say which.", ""
    first = where.partition("\n")[0].strip()
    advice = (
        "What that line calls crashed, or it wrote to memory that may only be read (weights, "
        "outside the optimizer). The worker's log has the whole stack."
    )
    return f"{what} at {first}", advice, where
