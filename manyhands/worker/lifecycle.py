# SPDX-License-Identifier: Apache-2.0
"""A worker's life: build, join, train, save, report. The story of a worker process.

A worker is started with `Orders`, builds everything from the task, says hello, and gets its place
in a view. It trains (`training.loop`, with a few hooks) until the work is done, or until it is
asked to leave the loop, or until others are gone; then it says that it is ready and waits for its
place in the next view. Whatever goes wrong here is reported as `Trouble` before the worker ends,
with the user's own frames on top.
"""

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from manyhands.checkpoint.table_files import tables_in
from manyhands.data.open_data import make_ready
from manyhands.data.reading.micro_batch_feed import held_out_ids
from manyhands.data.reading.not_finite_values import not_finite_values
from manyhands.launch.engines.nursery import Nursery
from manyhands.launch.wire.control_channel import WorkerChannel
from manyhands.launch.wire.heartbeat import Heartbeat, TakesNotes
from manyhands.training import build_training, loop
from manyhands.training.collective.collective import PRIVATE
from manyhands.training.collective.handshake import PeerListener
from manyhands.training.compute.kernel_marks import fix_kernels, kernels_here
from manyhands.training.compute.nondeterminism import PlainState
from manyhands.training.state.bare_step import without_dynamo
from manyhands.training.state.layout import most_shares
from manyhands.training.state.optimizer_kinds import how_to_cut
from manyhands.training.state.param_groups import groups_to_json
from manyhands.training.state.rate_after_epoch import rates_ahead, refuse_short_schedules
from manyhands.training.sync.sync import Place, SavedTables
from manyhands.values import errors
from manyhands.values.bounded_types import SOME, fitting
from manyhands.values.machine import machine, peak_memory_bytes
from manyhands.values.messages import (
    Begun,
    Hello,
    Leaving,
    Left,
    Notice,
    Ready,
    RoundPart,
    Testimony,
)
from manyhands.values.planned_faults import Fault
from manyhands.values.printable_text import printable
from manyhands.values.run_folder import RunDir
from manyhands.values.view import View
from manyhands.values.work_in_hand import WorkInHand
from manyhands.values.worker_orders import Orders
from manyhands.values.world import World
from manyhands.worker import checkpoint_part, compare_workers
from manyhands.worker.build_worker import WorkerParts, build_worker
from manyhands.worker.carried_files import fetch, fetch_step
from manyhands.worker.readers.reader_process import read_ahead
from manyhands.worker.readers.stream_reader import read_stream
from manyhands.worker.readers.stream_ring import has_ring
from manyhands.worker.report_trouble import WatchedListener, trouble_of
from manyhands.worker.step_hooks import StepHooks


def main(orders: bytes, mark: TakesNotes | None = None) -> int:
    """The worker's life; returns its exit code. At `mark` it notes what it is at."""
    given = msgspec.msgpack.decode(orders, type=Orders)
    # Before there is any thread. Who has no mark is a thread itself, and cannot fork.
    nursery = Nursery(partial(read_ahead, given)) if mark is not None and _may_read(given) else None
    worker = TrainingWorker(given, mark, nursery)
    try:
        worker.work()
        return 0
    except BaseException as error:
        worker.report(error)
        with suppress(OSError):  # the disk may be what is full
            traceback.print_exc()  # the whole of it, in the worker's log
        return 1
    finally:
        worker.close()


def companion(orders: bytes, to_follow: int) -> Callable[[], object] | None:
    """What the host agent runs beside the workers of its host: whoever reads a stream for all."""
    given = msgspec.msgpack.decode(orders, type=Orders)
    return partial(read_stream, given, to_follow) if has_ring(given) else None


def _may_read(orders: Orders) -> bool:
    """Whether there may be readers."""
    data = orders.config.data
    return data.readers != 0 and data.transfer != "peer"


class TrainingWorker:
    def __init__(self, orders: Orders, mark: TakesNotes | None, nursery: Nursery | None) -> None:
        self.nursery = nursery
        self.orders, self.number = orders, orders.worker
        self.run = RunDir(Path(orders.run))
        self.heartbeat = Heartbeat(orders.worker, log_every=orders.log_every, mark=mark)
        assert orders.keys is not None
        self.channel = WorkerChannel(orders.keys, self.heartbeat)
        self.held = ExitStack()
        self.world = World(0, 1)
        self.parts: WorkerParts | None = None
        self.struck: set[Fault] = set()

    def work(self) -> None:
        """Whatever can fail is done here, where the supervisor hears of it."""
        train = self.orders.config.train
        self.listener = self.held.enter_context(closing(PeerListener(self.orders.address)))
        self.refusals = WatchedListener(self.listener, self.tell)
        if train.portable:
            fix_kernels()
        torch.set_num_threads(train.threads)
        self.kernels = kernels_here(
            portable=train.portable, precision=train.precision, compiles=train.compile
        )
        without_dynamo()
        self._go_when_told()
        self.parts = parts = build_worker(
            self.orders, self.channel, self.listener, self.moment, self.kernels, self.nursery
        )
        self.replica, self.sync = parts.replica, parts.sync
        saver = checkpoint_part.saver(
            self.run, self.channel, self.moment, shares=self.orders.shares
        )
        self.hooks = StepHooks(self.orders, parts, self.channel, saver, self.moment, self.tell)
        self.hello(parts)
        while (view := self.next_view()) is not None:
            broken, differs, lost = False, None, ()
            try:
                self.join(view, parts)
                if self.train(parts):
                    self.finish()
                    return
            except errors.AuditMismatch as error:
                broken, differs = True, error.args
            except errors.Broken as error:
                broken, lost = True, error.lost
                self._log_line(f"view {view.generation} is over: {error}")
            self.replica.tables.detach()  # before anybody may have what we owned
            self.channel.send(self.heartbeat.beat())  # what was done, before what is to come
            self.channel.send(
                Ready(
                    worker=self.number,
                    step=self.replica.step,
                    broken=broken,
                    held=self.sync.held().goes_on,
                    differs=differs,
                    lost=list(lost),
                )
            )

    # ---- join

    def hello(self, parts: WorkerParts) -> None:
        shared = parts.sharing
        self.channel.send(
            Hello(
                worker=self.number,
                pid=os.getpid(),
                host=machine().host,
                built=parts.built,
                peer_address=self.listener.address,
                cache=shared.identity if shared is not None else "",
                shards=shared.address if shared is not None else "",
                kernels=self.kernels,
                most_servers=self._most_servers(),
            )
        )

    def next_view(self) -> View | None:
        """Wait for a place; None: there is none for this worker any more."""
        view = self.channel.next_view()
        return view if view.rank_of(self.number) is not None else None

    def join(self, view: View, parts: WorkerParts) -> None:
        """Take the place in a view, and come to where the others are."""
        rank = view.rank_of(self.number)
        assert rank is not None
        self.world = view.world_of(rank)
        parts.feed.ahead.enter(self.world, view.generation)
        self.heartbeat.begin("join", self.replica.step)
        self.heartbeat.leads = self.world.leads
        self.heartbeat.forget_times()
        self.replica.changes = view.journal
        self._compare(view, parts)
        self._look_after_data(view, parts)
        self.moment("regroup")
        place = Place(
            self.world,
            view.generation,
            tuple(view.speeds),
            tuple(view.peer_addresses),
            view.secret,
            view.measure,
            changes=view.changes,
            heard=view.halts,
            due=self.hooks.due,
        )
        if view.fresh:
            place = self._restored(place, view.restore)
        if self.orders.collective in PRIVATE:
            self._meet(view)
        try:
            self.sync.regroup(place)
        finally:
            self.refusals.tell()
        self.heartbeat.step = self.replica.step
        self.hooks.enter(view, self.world)
        if self.world.leads:
            self.channel.send(
                Begun(
                    worker=self.number,
                    step=self.replica.step,
                    groups=fitting(groups_to_json(self.replica.optimizer)),
                    schedule=self.replica.schedules.kinds()[:SOME],
                )
            )
        if view.changes:  # journalled before any of us may use them
            self.channel.reply(f"go-{view.generation}")
        if view.audit is not None:
            self._testify(view, view.audit, parts)

    def _most_servers(self) -> int:
        cut, _ = how_to_cut(self.replica.optimizer)
        return 0 if self.replica.tables else most_shares(self.replica.layout, cut=cut) or 0

    def _compare(self, view: View, parts: WorkerParts) -> None:
        """Workers must be alike; before the first step people are told what may make them not."""
        built = compare_workers.compare(view.built)
        if self.world.leads and view.generation == 1:
            train = self.orders.config.train
            refuse_short_schedules(self.replica.schedules, self.orders.steps)
            servers = self.orders.config.servers
            for note in compare_workers.notes(self.replica, parts.task, train, built, servers):
                self.tell(note)
            if not view.restore:
                for line in rates_ahead(self.replica.schedules, parts.feed.feed.batches_per_epoch):
                    self.tell(line)
            self.hooks.plain = PlainState(self.replica.model)

    def _look_after_data(self, view: View, parts: WorkerParts) -> None:
        """Who has which shards; and, at first, whether those of this host fit in its cache."""
        if parts.sharing is not None:
            parts.sharing.meet(view.keepers, late=view.generation > 1)
        if view.generation == 1:
            host = machine().host
            here = sum(member.host == host for member in view.members)
            records = parts.feed.feed.records
            make_ready(records, parts.held_out, workers=here, fetch="nothing")

    def _restored(self, place: Place, step: int | None) -> Place:
        """Begin with a committed step of this run, another run's weights, or the task's own."""
        if self.world.host > 0:  # the first host's state becomes everybody's
            return replace(place, fresh=step or 0)
        if step is None:
            if self.orders.start_from is None:
                return replace(place, fresh=0)
            checkpoint_part.load_weights(self.replica, self._fetched(self.orders.start_from))
            return replace(place, fresh=0, tables=self._tables_beside(self.orders.start_from))
        shares = self.orders.shares
        folder = self.run.step(step) if shares else fetch_step(self.channel, self.run, step)
        stream = checkpoint_part.load_all(self.replica, folder)
        assert self.parts is not None, "who has a place has built everything"
        self.parts.feed.resume_stream(stream)
        entries = partial(checkpoint_part.entries_of, folder)
        averages = partial(checkpoint_part.averages_of, folder, self.replica.averages)
        tables = partial(checkpoint_part.tables_of, folder, self.replica.tables)
        return replace(place, fresh=step, entries=entries, averages=averages, tables=tables)

    def _tables_beside(self, file: str) -> SavedTables | None:
        """Rows that were saved with these weights: without them a model of tables is another."""
        tables = self.replica.tables
        if not tables:
            return None
        folder = Path(file).parent
        if not self.orders.shares or not tables_in(folder):
            raise errors.ConfigError(
                f"train.start_from: {file} has no tables beside it"
                + ("" if self.orders.shares else " that this host could read")
                + f", and the model has {', '.join(table.name for table in tables)} (mh.Embedding)."
            )
        return partial(checkpoint_part.tables_of, folder, tables, state=False)

    def _fetched(self, file: str) -> str:
        """A file of the driver's host, as this one sees it."""
        if self.orders.shares:
            return file
        here = self.run.root / f"start_from-{self.number}.safetensors"
        fetch(self.channel, file, here)
        return str(here)

    def _meet(self, view: View) -> None:
        """Torch's groups wait long for a member who does not come; so first see that all do."""
        round = f"meet-{view.generation}"
        self.channel.send(RoundPart(worker=self.number, round=round, payload=b"", to_all=True))
        self.channel.reply(round)

    def _testify(self, view: View, index: int, parts: WorkerParts) -> None:
        """Compute a micro-batch of the next step twice, for the supervisor to compare."""
        cut = parts.feed.cut(self.replica.step)
        index %= len(cut.sizes)
        digests = [parts.auditor.testify(cut, index) for _ in range(2)]
        self.channel.send(
            Testimony(worker=self.number, step=cut.step, micro_batch=index, digests=digests)
        )
        self.channel.reply(f"judged-{view.generation}")

    # ---- train

    def train(self, parts: WorkerParts) -> bool:
        """Until all is done (True), or a new view is wanted (False)."""
        if not self.hooks.catch_up():
            loop.train(
                self.replica,
                parts.feed,
                self.sync,
                parts.loss,
                steps=self.orders.steps,
                hooks=self.hooks.all(),
            )
        return not self.hooks.halting

    def moment(self, name: str) -> None:
        """Where planned faults strike."""
        if self.orders.faults.faults:
            step = self.replica.step
            if name == "leaf":
                self.orders.faults.corrupt_here(self.orders.order, step, self.replica.parameters)
            self.orders.faults.strike(self.orders.order, step, name, self.struck)

    def _go_when_told(self) -> None:
        """SIGTERM: hand over after this step, then leave."""

        def leave(number: int, frame: object) -> None:
            self.channel.send(Leaving(worker=self.number))

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, leave)

    # ---- report

    def finish(self) -> None:
        self.hooks.finish()
        self.channel.send(self.heartbeat.beat())
        build_training.leave(self.orders.collective)  # first: who has left may be killed
        self.channel.send(
            Left(
                worker=self.number,
                step=self.replica.step,
                because=self.hooks.because,
                peak_memory_bytes=peak_memory_bytes(),
                loss=self.heartbeat.loss,
            )
        )
        self.sync.close()  # last: gloo has been seen to hang in it, and by now nobody minds

    def tell(self, text: str) -> None:
        """A person, without stopping the run."""
        self.channel.send(Notice(worker=self.number, text=printable(text)))

    def report(self, error: BaseException) -> None:
        """Tell the supervisor what went wrong here."""

        def ids(work: WorkInHand) -> list[int]:
            parts = self.parts
            assert parts is not None, "asked only when there is a feed"
            if work.kind == "compute":
                return parts.feed.ids(work.step, work.index)
            assert parts.held_out is not None, "who evaluates has something to evaluate"
            return held_out_ids(parts.held_out, self.orders.config.evaluation_batch, work.index)

        def not_finite(work: WorkInHand, records: list[int]) -> str:
            """Nothing that goes wrong in looking hides what is looked for."""
            assert self.parts is not None, "asked only when there is a feed"
            with suppress(Exception):
                batch = self.parts.feed.batch_again(work.step, work.index)
                return not_finite_values(batch, records)
            return ""

        if isinstance(error, errors.GradientNotFinite):
            error = self._located(error)
        self.channel.send(trouble_of(error, self.heartbeat, self.world.rank, ids, not_finite))

    def _located(self, error: errors.GradientNotFinite) -> errors.GradientNotFinite:
        """With the micro-batch and the parameter: those of this worker are computed again."""
        owner, step, *_ = error.args
        found: tuple[int | None, str | None] | None = None
        if self.parts is not None and owner == self.world.rank:
            mine = self.sync.indices(self.parts.feed.cut(step))
            found = self.parts.auditor.first_not_finite(step, mine)
        servers = self.orders.config.servers
        apart = servers is not None and servers.merges
        return errors.GradientNotFinite(owner, step, *(found or (None, None)), apart=apart)

    def _log_line(self, text: str) -> None:
        with suppress(OSError):  # the disk may be what is full
            print(time.strftime("%H:%M:%S"), text, flush=True)

    def close(self) -> None:
        self.channel.close()
        self.held.close()
        if self.nursery is not None:
            self.nursery.close()
        if self.parts is not None and self.parts.sharing is not None:
            self.parts.sharing.close()
