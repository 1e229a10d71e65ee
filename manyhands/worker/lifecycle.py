# SPDX-License-Identifier: Apache-2.0
"""One hand: build, join, train, save, report. The story of a worker process.

A worker is started with `Orders`, builds everything from the task, says hello, and gets its place
in a view. It trains (`train.loop`, with a few hooks) until the work is done, or until it is asked
to leave the loop, or until others are gone; then it says that it is ready and waits for its place
in the next view. Whatever goes wrong here is reported as `Trouble` before the worker ends, with the
user's own frames on top.
"""

import dataclasses
import math
import os
import pdb
import signal
import threading
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from manyhands.checkpoint.saver import Content
from manyhands.data.open_data import make_ready, open_data, share
from manyhands.data.reading.micro_batch_feed import MicroBatchFeed
from manyhands.launch.shipping import ship_task
from manyhands.launch.wire.channel import Line
from manyhands.launch.wire.heartbeat import Pulse
from manyhands.training import build, loop
from manyhands.training.collective.collective import PRIVATE
from manyhands.training.collective.sockets import Door
from manyhands.training.compute import micro_batch_gradient, nondeterminism
from manyhands.training.compute.seeds import seed_everything
from manyhands.training.state.memory import Memory
from manyhands.training.state.param_groups import groups_to_json, kinds_of
from manyhands.training.state.replica import Replica
from manyhands.training.state.sharded_optimizer import without_dynamo
from manyhands.training.sync.sync import Place, StepFacts
from manyhands.values import errors
from manyhands.values.config import live_settings
from manyhands.values.faults import Fault
from manyhands.values.messages import (
    Begun,
    Hello,
    Leaving,
    Left,
    Measured,
    Notice,
    Part,
    Ready,
    Testimony,
    View,
)
from manyhands.values.orders import Orders
from manyhands.values.rundir import RunDir
from manyhands.values.task import Task
from manyhands.values.world import World, machine, peak_memory_bytes
from manyhands.worker import agreement, checkpoint_part
from manyhands.worker.carried_files import fetch, fetch_step
from manyhands.worker.scoring import evaluation_of, my_batches, score_together
from manyhands.worker.watched_feed import WatchedDoor, WatchedFeed, trouble_of

if TYPE_CHECKING:
    from manyhands.data.fetching.peer_sharing import Sharing


def main(orders: bytes) -> int:
    """The worker's life; returns its exit code."""
    hand = Hand(msgspec.msgpack.decode(orders, type=Orders))
    try:
        hand.work()
        return 0
    except BaseException as error:
        hand.report(error)
        with suppress(OSError):  # the disk may be what is full
            traceback.print_exc()  # the whole of it, in the worker's log
        return 1
    finally:
        hand.line.close()
        hand.door.close()
        if hand.sharing is not None:
            hand.sharing.close()


class Hand:
    def __init__(self, orders: Orders) -> None:
        self.orders, self.config = orders, orders.config
        self.run = RunDir(Path(orders.run))
        self.pulse = Pulse(orders.worker, log_every=orders.log_every)
        assert orders.keys is not None
        self.line = Line(orders.keys, self.pulse)
        self.door = Door(orders.address)
        self.strangers = WatchedDoor(self.door, self.tell)
        self.saver = checkpoint_part.saver(self.run, self.line, self.moment, shares=orders.shares)
        self.sharing: Sharing | None = None
        self.world = World(0, 1)
        self.because = "all steps are done"
        self.scored_at = self.saved_at = self.logged = -1
        self.halting = self.begun = False
        self.struck: set[Fault] = set()

    def work(self) -> None:
        torch.set_num_threads(self.config.train.threads)
        without_dynamo()
        self._go_when_told()
        self.build()
        self.hello()
        while (view := self.next_view()) is not None:
            broken, differs, lost = False, None, ()
            try:
                self.join(view)
                if self.train():
                    self.finish()
                    return
            except errors.AuditMismatch as error:
                broken, differs = True, error.args
            except errors.Broken as error:
                broken, lost = True, error.lost
                self._log_line(f"view {view.generation} is over: {error}")
            self.line.send(self.pulse.beat())  # what was done, before what is to come
            self.line.send(
                Ready(
                    worker=self.orders.worker,
                    step=self.replica.step,
                    broken=broken,
                    held=self.sync.holds,
                    differs=differs,
                    lost=list(lost),
                )
            )

    def _log_line(self, text: str) -> None:
        with suppress(OSError):  # the disk may be what is full
            print(time.strftime("%H:%M:%S"), text, flush=True)

    # ---- build

    def build(self) -> None:
        """Model, optimizer, data and the strategy, each from the task and nothing else."""
        train = self.config.train
        self.task: Task = ship_task.unpack(self.orders.parcel, self.orders.task_fd)
        task = self.task
        assert task.loss is not None
        self.loss: micro_batch_gradient.LossFn = (
            task.loss if self.orders.debug is None else self._debugged
        )
        self.device = build.choose_device(train, self.orders.worker)
        memory = Memory(None if self.orders.collective in PRIVATE else self.orders.state_fd)
        self.replica = build.replica(task, train, memory, self.device)
        records, self.held_out = open_data(task.data, task.held_out, self.config.data)
        make_ready(records, self.held_out, workers=1, fetch="missing", progress=self._fetched_some)
        at = self.door.address.rpartition(":")[0]
        self.sharing = share(records, self.held_out, self.config.data, self.orders.secret, at)
        self.built = agreement.describe(self.replica, records)
        feed = MicroBatchFeed(
            records,
            seed=train.seed,
            batch=train.batch,
            micro_batch=train.micro_batch_size,
            seeder=seed_everything,
        )
        drag = partial(self.orders.faults.drag, self.orders.order)
        self.feed = WatchedFeed(feed, self.line, self.device, self.moment, drag)
        self.sync = build.strategy(
            train,
            self.replica,
            memory,
            build.collective(
                self.orders.collective,
                train,
                memory,
                device=self.device,
                reach=build.Reach(
                    self.door,
                    self.orders.secret,
                    self.run.root / ".rendezvous",
                    self._measured,
                ),
                patience=self.line.waiting,
            ),
            heard=self.line.heard,
            moment=self.moment,
            auditor=agreement.Recheck(self.replica, self.feed, self.loss, train),
        )

    def _debugged(self, model: torch.nn.Module, batch: Any) -> Any:
        """The task's loss, in a debugger when its micro-batch has come."""
        assert self.task.loss is not None
        if self.pulse.current != self.orders.debug:
            return self.task.loss(model, batch)
        return pdb.Pdb(nosigint=True).runcall(self.task.loss, model, batch)

    def tell(self, text: str) -> None:
        """A person, without stopping the run."""
        self.line.send(Notice(worker=self.orders.worker, text=text))

    # ---- join

    def hello(self) -> None:
        host, shared = machine().host, self.sharing
        self.line.send(
            Hello(
                worker=self.orders.worker,
                pid=os.getpid(),
                host=host,
                built=self.built,
                door=self.door.address,
                cache=shared.identity if shared is not None else "",
                shards=shared.address if shared is not None else "",
            )
        )

    def next_view(self) -> View | None:
        """Wait for a place; None: there is none for this worker any more."""
        view = self.line.next_view()
        return view if view.rank_of(self.orders.worker) is not None else None

    def join(self, view: View) -> None:
        """Take the place in a view, and come to where the others are."""
        rank = view.rank_of(self.orders.worker)
        assert rank is not None
        self.view, self.world = view, view.world_of(rank)
        self.pulse.leads, self.halting = self.world.leads, False
        self.replica.changes = view.journal
        self.pulse.forget_times()
        self._compare(view)
        self._look_after_data(view)
        self.moment("regroup")
        speeds, doors = tuple(view.speeds), tuple(view.doors)
        place = Place(self.world, view.generation, speeds, doors, view.measure)
        if view.fresh:
            place = self._restored(place, view.restore)
        if self.orders.collective in PRIVATE:
            self._meet()
        try:
            self.sync.regroup(place)
        finally:
            self.strangers.tell()
        self.pulse.step = self.replica.step
        self.scored_at, self.saved_at = view.scored, view.saved
        self.replica.change(view.changes)
        self.configure()
        if view.changes:
            self.sync.note()
        if self.world.leads:
            groups = groups_to_json(self.replica.optimizer)
            kinds = kinds_of(self.replica.schedule)
            self.line.send(
                Begun(
                    worker=self.orders.worker,
                    step=self.replica.step,
                    groups=groups,
                    schedule=kinds,
                )
            )
        if view.changes:  # journalled before any of us may use them
            self.line.reply(f"go-{view.generation}")
        if view.audit is not None:
            self._testify(view.audit)

    def _look_after_data(self, view: View) -> None:
        """Who has which shards; and, at first, whether those of this host fit in its cache."""
        if self.sharing is not None:
            self.sharing.meet(view.keepers, late=view.generation > 1)
        if view.generation == 1:
            host = machine().host
            here = sum(member.host == host for member in view.members)
            records = self.feed.feed.records
            make_ready(records, self.held_out, workers=here, fetch="nothing")

    def _fetched_some(self, done: int, total: int) -> None:
        """Before it has joined; so that nobody thinks it will not come."""
        self.pulse.progress += 1

    def _measured(self, links: list[tuple[int, float, float]]) -> None:
        lanes = self.replica.layout.trainable_sizes
        size = sum(dtype.itemsize * count for dtype, count in lanes.items())
        self.line.send(Measured(worker=self.orders.worker, links=links, gradient_bytes=size))

    def _restored(self, place: Place, step: int | None) -> Place:
        """Begin with a committed step of this run, another run's weights, or the task's own."""
        if self.world.host > 0:  # the first host's state becomes everybody's
            return dataclasses.replace(place, fresh=step or 0)
        if step is None:
            if self.orders.start_from is not None:
                checkpoint_part.load_weights(self.replica, self._fetched(self.orders.start_from))
            return dataclasses.replace(place, fresh=0)
        shares = self.orders.shares
        folder = self.run.step(step) if shares else fetch_step(self.line, self.run, step)
        checkpoint_part.load_all(self.replica, folder)
        return dataclasses.replace(
            place, fresh=step, entries=partial(checkpoint_part.entries_of, folder)
        )

    def _fetched(self, file: str) -> str:
        """A file of the driver's host, as this one sees it."""
        if self.orders.shares:
            return file
        here = self.run.root / f"start_from-{self.orders.worker}.safetensors"
        fetch(self.line, file, here)
        return str(here)

    def _meet(self) -> None:
        """Torch's groups wait long for a member who does not come; so first see that all do."""
        round = f"meet-{self.view.generation}"
        self.line.send(Part(worker=self.orders.worker, round=round, payload=b"", to_all=True))
        self.line.reply(round)

    def _testify(self, index: int) -> None:
        """Compute a micro-batch of the next step twice, for the supervisor to compare."""
        cut = self.feed.cut(self.replica.step)
        index %= len(cut.sizes)
        digests = [self.sync.testify(cut, index) for _ in range(2)]
        self.line.send(
            Testimony(worker=self.orders.worker, step=cut.step, micro_batch=index, digests=digests)
        )
        self.line.reply(f"judged-{self.view.generation}")

    def configure(self) -> None:
        """Settings that have changed since the run began, and are not the optimizer's."""
        due = [s for at, s in sorted(self.view.journal.items()) if at <= self.replica.step]
        settings = [live_settings(s) for s in (*due, self.view.changes)]
        self.config = self.orders.config.with_settings([s for some in settings for s in some])
        self.sync.clip_norm = self.config.train.clip_norm
        if self.orders.log_every != 1:  # somebody watches every step
            self.pulse.log_every = self.config.log.every_steps

    def _compare(self, view: View) -> None:
        """Workers must be alike; before the first step people are told what may make them not."""
        built = agreement.compare(view.built)
        if self.world.leads and view.generation == 1:
            for note in agreement.notes(self.replica, self.task.data, built):
                self.tell(note)
            self.plain = nondeterminism.PlainState(self.replica.model)

    # ---- train

    def train(self) -> bool:
        """Until all is done (True), or a new view is wanted (False)."""
        if not self.catch_up():
            loop.train(
                self.replica,
                self.feed,
                self.sync,
                self.loss,
                steps=self.orders.steps,
                hooks=self.hooks(),
            )
        return not self.halting

    def catch_up(self) -> bool:
        """What is due after the step at which this view begins, and was not done before it.

        True: it was the last one.
        """
        replica, facts = self.replica, self.sync.facts
        if facts is not None and facts.step == replica.step - 1 and self.logged < replica.step:
            self._log(replica, facts)
        if self.view.stop and replica.step < self.orders.steps:
            self.because = "stopped"
            return True
        if self.view.scored == replica.step and self.view.enough is not None:
            self.because = self.view.enough
            return True
        if replica.step == 0:
            return False
        enough = self.scored_at != replica.step and self._evaluate_when_due(replica)
        if self.saved_at != replica.step:
            self._save_when_due(replica)
        return bool(enough)

    def hooks(self) -> list[loop.Hook]:
        return [
            self._reconfigure,
            self._log,
            self._evaluate_when_due,
            self._save_when_due,
            self._leave_when_asked,
        ]

    def _reconfigure(self, replica: Replica, facts: StepFacts) -> None:
        if replica.step in self.view.journal:
            self.configure()

    def _log(self, replica: Replica, facts: StepFacts) -> None:
        self.saver.check()
        epoch = self.feed.epochs_done(replica.step)
        lr = float(replica.optimizer.param_groups[0].get("lr", math.nan))
        self.pulse.stepped(replica.step, epoch, facts.loss, lr, facts.records, dict(facts.numbers))
        self.logged = replica.step
        if not self.begun:  # people wait for the first sign of life
            self.begun = True
            self.line.send(self.pulse.beat())
            if self.world.leads and self.view.generation == 1:
                for note in self.plain.changed():
                    self.tell(note)

    def _evaluate_when_due(self, replica: Replica, facts: StepFacts | None = None) -> bool:
        evaluate = self.config.evaluate
        if evaluate is None or self.held_out is None:
            return False
        every = evaluate.every_steps or self.feed.steps_per_epoch
        return replica.step % every == 0 and self._evaluate(replica)

    def _evaluate(self, replica: Replica) -> bool:
        """Score the held-out records together; True when the supervisor says to stop."""
        assert self.held_out is not None
        evaluation = evaluation_of(self.task, self.config)
        batches = my_batches(self.held_out, self.config, self.world, self.device)
        reason = score_together(evaluation, replica, batches, self.line, leads=self.world.leads)
        self.scored_at = replica.step
        self.because = reason or self.because
        return reason is not None

    def _save_when_due(self, replica: Replica, facts: StepFacts | None = None) -> None:
        checkpoint = self.config.checkpoint
        if checkpoint is not None and replica.step % checkpoint.every_steps == 0:
            self._save(replica)

    def _save(self, replica: Replica) -> None:
        self.moment("save")
        contents: list[Content] = []
        if self.world.host == 0:
            contents.append(checkpoint_part.optimizer_part(self.orders.worker, self.sync.optimizer))
        if self.world.leads:
            contents += checkpoint_part.common_part(replica)
        self.saver.save(replica.step, self.view.generation, contents)
        self.saved_at = replica.step

    def _leave_when_asked(self, replica: Replica, facts: StepFacts) -> bool:
        """All have heard the same Halt, so all leave after the same step."""
        done = replica.step >= self.orders.steps or self.because != "all steps are done"
        self.halting = facts.agreed > self.view.halts and not done
        return self.halting

    def _go_when_told(self) -> None:
        """SIGTERM: hand over after this step, then leave."""

        def leave(number: int, frame: object) -> None:
            self.line.send(Leaving(worker=self.orders.worker))

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, leave)

    def moment(self, name: str) -> None:
        """Where planned faults strike."""
        if self.orders.faults.faults:
            step = self.replica.step
            if name == "leaf":
                self.orders.faults.corrupt_here(self.orders.order, step, self.replica.parameters)
            self.orders.faults.strike(self.orders.order, step, name, self.struck)

    # ---- report

    def finish(self) -> None:
        """The last step is always scored (unless a person stopped it) and always saved."""
        if self.saved_at != self.replica.step:
            self._save(self.replica)
        self.saver.drain()  # before scoring: whatever a score does, the weights are safe
        wanted = self.held_out is not None and self.because != "stopped"
        if wanted and self.scored_at != self.replica.step:
            self._evaluate(self.replica)
        self.line.send(self.pulse.beat())
        build.leave(self.orders.collective)  # first: who has left may be killed
        self.line.send(
            Left(
                worker=self.orders.worker,
                step=self.replica.step,
                because=self.because,
                peak_memory_bytes=peak_memory_bytes(),
                loss=self.pulse.loss,
            )
        )
        self.sync.close()  # last: gloo has been seen to hang in it, and by now nobody minds

    def report(self, error: BaseException) -> None:
        """Tell the supervisor what went wrong here."""

        def ids(step: int, index: int) -> list[int]:
            return self.feed.ids(step, index)  # asked only when there is a feed

        self.line.send(trouble_of(error, self.pulse, self.world.rank, ids))
