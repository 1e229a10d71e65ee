# SPDX-License-Identifier: Apache-2.0
"""How many workers a run may have: room for them, and a wished speed that chooses among them."""

from collections.abc import Callable

from manyhands.accounting.deal_micro_batches import steps_per_epoch
from manyhands.driver.resolved_run import ResolvedRun
from manyhands.driver.supervise.speed_control import SpeedControl
from manyhands.driver.supervise.worker_states import Situation
from manyhands.launch.engines.launcher import Launcher
from manyhands.planning.planner import Plan, usable_workers
from manyhands.values.events import EventSink
from manyhands.values.machine import MOST_RANKS, usable_cores


def reserve(job: ResolvedRun, launcher: Launcher, made: Plan) -> None:
    """Room for the workers that are planned, or for the fewest that were asked for."""
    planned = made.workers.value
    least, most = job.workers if isinstance(job.workers, tuple) else (planned, planned)
    if job.aim is not None:  # more are asked for when they are needed
        most = least
    servers = made.processes - planned
    most = min(most, _usable(job, made)) + servers
    launcher.hosts.reserve(least + servers, most, job.config.train.threads)


def most_workers(job: ResolvedRun, launcher: Launcher, made: Plan) -> int:
    alone = job.config.train.sync == "alone"
    return 1 if alone else min(_usable(job, made), launcher.traits.most_workers or MOST_RANKS)


def _usable(job: ResolvedRun, made: Plan) -> int:
    servers = job.config.servers
    return usable_workers(made.micro_batches.value, merges=servers is not None and servers.merges)


def room_for(job: ResolvedRun, launcher: Launcher, made: Plan) -> Callable[[], int] | None:
    """How many workers there is room for, if that may change while training."""
    wish = (1, MOST_RANKS) if job.workers is None and launcher.hosts.grows else job.workers
    if not isinstance(wish, tuple) or made.workers.value < wish[0]:
        return None
    least, most = wish[0], min(wish[1], most_workers(job, launcher, made))

    def room() -> int:
        hosts = launcher.hosts.look()
        if hosts.capacity is None:
            return max(least, min(usable_cores() // job.config.train.threads, most))
        servers = made.processes - made.workers.value
        if job.config.servers is not None and job.config.servers.merges:
            servers = max(servers, hosts.count)  # one on each
        return max(least, min(hosts.capacity - servers, most))

    return room


def speed_control(
    job: ResolvedRun, launcher: Launcher, made: Plan, situation: Situation, tell: EventSink
) -> SpeedControl | None:
    """Whoever chooses workers for the wished speed."""
    if job.aim is None:
        return None
    most = most_workers(job, launcher, made)
    if isinstance(job.workers, tuple):
        most = max(job.workers[0], min(most, job.workers[1]))
    total = made.steps.value

    def left(step: int) -> int:
        batch = job.config.train.batch
        return records_in(total, made.records, batch) - records_in(step, made.records, batch)

    want = wanting(launcher)
    return SpeedControl(job.aim, situation, tell, left=left, most=most, want=want)


def wanting(launcher: Launcher) -> Callable[[int], None]:
    """Tells whoever can bring room how many workers are wished for from now on."""
    return lambda workers: launcher.hosts.reserve(0, workers)


def records_in(steps: int, records: int, batch: int) -> int:
    """How many records the first steps train on."""
    epochs, rest = divmod(steps, steps_per_epoch(records, batch))
    return epochs * records + rest * batch
