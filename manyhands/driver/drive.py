# SPDX-License-Identifier: Apache-2.0
"""The driver: open → plan → reserve → write down → start → supervise. One run, seen to its end.

What the supervisor reports on the way is dealt with in bookkeeping.py.
"""

import shutil
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass

import msgspec
from torch.utils.data import DataLoader

from manyhands.accounting.ledger import Book, new_book, old_book
from manyhands.accounting.ledger_lines import Opened, SampledEpochs, journal_of
from manyhands.accounting.phases import phases_of
from manyhands.data.open_data import make_ready, open_task
from manyhands.data.reading.records import Records
from manyhands.data.reading.sampled_records import SampledRecords
from manyhands.data.reading.stream_records import is_stream
from manyhands.driver.bookkeeping import Bookkeeping
from manyhands.driver.live.command_socket import CommandSocket
from manyhands.driver.live.live_requests import LiveRequests
from manyhands.driver.open_files_needed import refuse_few_open_files
from manyhands.driver.records_in_hand import records_in_hand
from manyhands.driver.resolved_run import ResolvedRun
from manyhands.driver.run_file_server import FileServer
from manyhands.driver.stop_signals import asked_to_stop
from manyhands.driver.stream_passes import with_pass_counted
from manyhands.driver.supervise.run_outcome import Done
from manyhands.driver.supervise.worker_states import Limits, Situation
from manyhands.driver.supervisor import Supervisor
from manyhands.driver.task_files import check_criteria, config_text, describe_run, weights_file
from manyhands.driver.workforce import most_workers, reserve, room_for, speed_control, wanting
from manyhands.launch.engines.launcher import Launcher, WorkerPlace
from manyhands.launch.shipping import ship_task
from manyhands.launch.wire.control_channel import SupervisorChannel
from manyhands.planning.planner import Plan, plan
from manyhands.training.collective.collective import PRIVATE
from manyhands.values import events
from manyhands.values.credentials import new_secret
from manyhands.values.errors import Interrupted, RunDirError, RunFailed
from manyhands.values.report import Report
from manyhands.values.run_folder import RunDir, keep_free, locked, write_whole
from manyhands.values.verdict import Cause, explain
from manyhands.values.work_in_hand import WorkInHand
from manyhands.values.worker_orders import Orders, Parcel

RESERVED_BYTES = 1 << 15
"""On disk, for the last words: a verdict, a status with every worker, an event."""


def drive(job: ResolvedRun, launcher: Launcher, *, resume: int | None = None) -> Report:
    """Train from the beginning, or go on with a run whose lock is then held: from a saved step, or
    (0) from the beginning."""
    job = with_pass_counted(job, resumes=resume is not None)
    records, held_out = open_task(job.loaded.task, job.config)
    check_criteria(job.config, job.loaded.task, held_out)
    made = _planned(job, launcher, records, resumed=resume is not None or job.replays)
    _refuse_if_finished(job, made, resume)
    start_from = None if resume else weights_file(job.config)
    reserve(job, launcher, made)
    refuse_few_open_files(made.processes)
    # On several hosts workers fetch their own data.
    many = launcher.traits.many_hosts
    here, fetch = (1, "nothing") if many else (made.processes, "all")
    make_ready(records, held_out, workers=here, quiet=job.quiet, fetch=fetch)
    with _folder(job.run, new=resume is None):
        written = _write_down(job, launcher, made, (records, held_out), resume)
    with closing(written.books), nullcontext() if resume is not None else locked(job.run):
        return _see_to_its_end(job, launcher, made, written, resume, start_from)


def _planned(job: ResolvedRun, launcher: Launcher, records: Records, *, resumed: bool) -> Plan:
    readers = job.config.data.readers
    return plan(
        job.config.train,
        launcher.hosts.inventory(),
        workers=job.workers,
        records=len(records),
        phases=phases_of(job.loaded.task),
        most_workers=launcher.traits.most_workers,
        many_hosts=launcher.traits.many_hosts,
        paced=job.aim is not None,
        readers=None if readers == "auto" else readers,
        batch_loss=job.loaded.task.batch_loss is not None,
        servers=job.config.servers,
        resumed=resumed,
        notes=job.plan_notes,
    )


def _refuse_if_finished(job: ResolvedRun, made: Plan, resume: int | None) -> None:
    """At its last step, a run whose last score failed, or whose driver died there, has no report
    yet: it is scored, and then finished."""
    if resume is not None and resume == made.steps.value and _reported(job.run) != resume:
        return
    if resume is not None and resume >= made.steps.value:
        longer = job.run.how_to_resume("train.epochs=...")
        raise RunDirError(
            f"{job.run.root} is finished (step {resume} of {made.steps.value}). To train longer: "
            f"{longer} (or train.steps=...)"
        )


def _reported(run: RunDir) -> int | None:
    """The step of its report, if it has one."""
    if not run.report.exists():
        return None
    with suppress(OSError, ValueError, msgspec.MsgspecError):
        return msgspec.json.decode(run.report.read_bytes())["step"]
    return None


@dataclass(frozen=True, slots=True)
class _Written:
    """What is on paper before the first worker starts."""

    parcel: Parcel
    books: Bookkeeping
    first_worker: int
    records_of: Callable[[WorkInHand], list[int]]
    """... whoever has it in hand."""


def _write_down(
    job: ResolvedRun,
    launcher: Launcher,
    made: Plan,
    data: tuple[Records, Records | None],
    resume: int | None,
) -> _Written:
    """Plan, task, ledger and config, in the run's folder; and the task in the hosts' memory."""
    records, _ = data
    keep_free(job.run.reserve, RESERVED_BYTES)
    if resume is None:
        describe_run(job.run, job.loaded, job.config, records)
    write_whole(job.run.plan, msgspec.json.format(msgspec.json.encode(made)))
    for left_over in job.run.root.glob(".rendezvous-*"):  # of a driver that was killed
        left_over.unlink()
    parcel = ship_task.pack(job.loaded, launcher.fds[0], many=launcher.traits.many_hosts)
    launcher.hosts.load(parcel.end, job.run.root, job.config.recovery.host_s)
    book, first_worker = _book(job, records, resume)
    books = Bookkeeping(job, made, resume, book)
    write_whole(job.run.config, config_text(job.loaded, job.config))
    records_of = records_in_hand(*data, job.config, phases_of(job.loaded.task))
    return _Written(parcel, books, first_worker, records_of)


def _book(job: ResolvedRun, records: Records, resume: int | None) -> tuple[Book, int]:
    """The ledger, opened or gone on with; and the number of the next worker."""
    train, path = job.config.train, job.run.ledger
    phases = phases_of(job.loaded.task)
    opened = Opened(len(records), train.batch, train.micro_batch_size, train.seed, phases)
    sampled = None
    if isinstance(records, SampledRecords):
        journalled = records.sampling.digest(train.seed, 0) is not None
        sampled = SampledEpochs(len(records.whole), records.sampling.told, journalled)
    if resume is None:
        return new_book(path, opened, job.changes, sampled), 0
    return old_book(path, opened, resume, job.given, sampled)


def _see_to_its_end(
    job: ResolvedRun,
    launcher: Launcher,
    made: Plan,
    written: _Written,
    resume: int | None,
    start_from: str | None,
) -> Report:
    """Whatever ends it is told in a verdict, and nothing of it is alive any more by then."""
    books = written.books
    try:
        outcome = _supervise(job, launcher, made, written, resume, start_from)
        if isinstance(outcome, Done):
            return books.finish(outcome)
    except KeyboardInterrupt:
        raise books.interrupted() from None
    except Interrupted:
        raise
    except Exception as error:
        raise books.fail_with(error) from error
    raise books.fail(outcome)


def _supervise(
    job: ResolvedRun,
    launcher: Launcher,
    made: Plan,
    written: _Written,
    resume: int | None,
    start_from: str | None,
) -> Done | Cause:
    """Until the run is over, or cannot go on; then all workers are gone."""
    books = written.books
    for note in job.notes:
        books.event(events.Warned(text=note))
    with (
        closing(SupervisorChannel(launcher.traits.listens)) as channel,
        closing(CommandSocket(job.run.control)) as commands,
        _stopping(launcher),
    ):
        orders = _orders(job, made, written.parcel, launcher, start_from)

        def start(worker: int) -> WorkerPlace:
            def at(place: WorkerPlace) -> bytes:
                order = worker - written.first_worker
                return _orders_at(place, orders, worker, order, channel)

            return launcher.start(worker, at, job.run.log(worker))

        situation = _situation(job, launcher, books, made, resume)
        speed = speed_control(job, launcher, made, situation, books.event)
        books.outlook = speed.outlook if speed is not None else books.outlook
        requests = LiveRequests(
            situation,
            books.event,
            commands,
            objection=books.live.objection,
            room=room_for(job, launcher, made),
            want=wanting(launcher),
            withdraw=launcher.hosts.withdraw,
            revoke=channel.workers.revoke,
            speed=speed,
        )
        supervisor = Supervisor(
            launcher,
            channel,
            books,
            FileServer(job.run, start_from),
            situation,
            requests=requests,
            start=start,
            records_of=written.records_of,
            first_worker=written.first_worker,
        )
        with asked_to_stop() as supervisor.requests.stop_asked:
            return supervisor.run()


@contextmanager
def _stopping(launcher: Launcher) -> Generator[None]:
    try:
        yield
    finally:
        launcher.stop()


def _orders(
    job: ResolvedRun, made: Plan, parcel: Parcel, launcher: Launcher, start_from: str | None
) -> Orders:
    """What all workers are told alike."""
    return Orders(
        worker=0,
        keys=None,
        run=str(job.run.root.absolute()),
        config=job.config,
        collective=made.collective.value,
        parcel=parcel,
        task_fd=launcher.fds[0],
        state_fd=launcher.fds[1],
        secret=new_secret(),
        encrypt=made.encryption.value == "sealed",
        steps=made.steps.value,
        stream=is_stream(job.loaded.task.data) and job.config.data.readers != 0,
        start_from=start_from,
        debug=job.debug,
        replays=job.replays,
        log_every=1 if job.on_step else job.config.log.every_steps,
        faults=job.faults,
    )


def _orders_at(
    place: WorkerPlace, orders: Orders, worker: int, order: int, channel: SupervisorChannel
) -> bytes:
    """For one worker, where it is going to be."""
    mine = msgspec.structs.replace(
        orders,
        worker=worker,
        order=order,
        keys=channel.keys_for(worker, place.driver),
        run=place.run or orders.run,
        task_fd=place.fds[0],
        state_fd=place.fds[1],
        address=place.address,
        shares=place.shares,
    )
    return msgspec.msgpack.encode(mine)


def _situation(
    job: ResolvedRun, launcher: Launcher, books: Bookkeeping, made: Plan, resume: int | None
) -> Situation:
    """What the supervisor knows before anything has happened."""
    recovery, task = job.config.recovery, job.loaded.task
    given_loader = isinstance(task.data, DataLoader)
    scored, enough = books.last_score()
    return Situation(
        wanted=made.workers.value,
        servers=made.servers.value if made.servers else 0,
        merges=job.config.servers is not None and job.config.servers.merges,
        samples=task.sampler is not None or given_loader,
        streams=is_stream(task.data) or given_loader,
        least=job.workers[0] if isinstance(job.workers, tuple) else 1,
        replaceable=launcher.traits.replaceable,
        private=made.collective.value in PRIVATE,
        restore=resume or None,
        micro_batches=made.micro_batches.value,
        most=most_workers(job, launcher, made),
        journal=journal_of(books.book.changes),
        limits=Limits(
            silent_s=recovery.silent_s,
            stuck_s=recovery.stuck_s,
            evaluate_s=recovery.evaluate_s,
            starting_s=recovery.starting_s,
            losses=recovery.losses,
        ),
        rebalance=recovery.rebalance and not (job.config.servers and job.config.servers.merges),
        unlike=job.config.train.unlike,
        scored=scored,
        enough=enough,
        saved=resume or -1,
    )


@contextmanager
def _folder(run: RunDir, *, new: bool) -> Generator[None]:
    """A new run's folder; a request that turns out to be wrong leaves none behind."""
    if new:
        run.create()
    try:
        yield
    except BaseException as error:
        if new:
            shutil.rmtree(run.root, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunFailed(f"The run could not begin: {explain(error)}") from error
        raise
