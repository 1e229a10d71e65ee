# SPDX-License-Identifier: Apache-2.0
"""Why somebody was lost: the first cause of a failure, told from its symptoms.

A worker's own exception, or a signal that ended it, is a cause; that others then lost their
connection to it is not.
"""

import signal

from manyhands.driver.supervise.worker_states import Situation, WorkerState
from manyhands.values.messages import Trouble
from manyhands.values.verdict import Cause

MEMORY = "Lower train.micro_batch (activations) or use fewer workers: memory ran out."

GRACE_S = 2.0
"""How long to wait for a cause when a worker ended with a code that says nothing."""


def may_still_explain(worker: WorkerState) -> bool:
    """It ended by itself, and its last words may still be on the way."""
    silent = worker.trouble is None and worker.fenced is None
    by_itself = worker.exit is not None and worker.exit.code >= 0
    return silent and by_itself and worker.ended_s < GRACE_S


def cause_of_trouble(now: Situation, trouble: Trouble, before: Trouble | None = None) -> Cause:
    worker = now.workers.get(trouble.worker, WorkerState(trouble.worker))
    noticed = "the worker itself reported it"
    if before is not None:
        noticed += f"; worker {before.worker} had failed at the same micro-batch before"
    return Cause(
        rank=now.rank_of(trouble.worker),
        worker=trouble.worker,
        pid=worker.pid,
        host=worker.host or "this host",
        step=trouble.step,
        what=trouble.text,
        detail=trouble.trace,
        request=trouble.request,
        noticed_by=noticed,
        micro_batch=trouble.micro_batch,
        records=tuple(trouble.records),
    )


def cause_of_loss(now: Situation, worker: WorkerState) -> Cause:
    if worker.trouble is not None:
        return cause_of_trouble(now, worker.trouble)
    if worker.exit is None:
        what, advice = "it keeps losing its connection to the others", "Look at the workers' logs."
        noticed = "the worker itself reported it"
    else:
        what, advice = _of_code(now, worker.exit.code)
        noticed = "the host agent saw it end"
    if worker.exit is not None and worker.exit.why:
        what, advice = worker.exit.why, MEMORY if now.oom_kills else ""
        noticed = "its launcher saw it"
    if worker.exit is not None and worker.exit.lost:
        what, advice = worker.exit.lost, "Look at that host, and at the network between."
        noticed = "the driver's pings of that host"
    if worker.fenced is not None:
        what, advice = worker.fenced, "It was killed; its log may say what it did."
        noticed = "the supervisor's clock"
    # All are at the same step; who spoke last knows best.
    step = max((w.step for w in now.workers.values()), default=0)
    return Cause(
        rank=now.rank_of(worker.number),
        worker=worker.number,
        pid=worker.pid or (worker.exit.pid if worker.exit is not None else 0),
        host=worker.host or "this host",
        step=step,
        what=what,
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
        return what, MEMORY
    if code == -signal.SIGKILL:
        return what, (
            "Nobody in this run sent it, and the kernel reports no memory shortage: "
            "look for a person, a container limit or another program."
        )
    if code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL):
        return what, "A native library crashed; the worker's log may say which."
    return what, ""
