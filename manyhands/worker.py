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
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from manyhands import errors
from manyhands.checkpoint import files
from manyhands.checkpoint.saver import Saver
from manyhands.checkpoint.storage import FileRecord, Folder
from manyhands.checkpoint.tensors import decode
from manyhands.config import RunConfig, live_settings
from manyhands.data.feed import Feed, on_device
from manyhands.data.records import Records, open_data, sampled_digest
from manyhands.deal import Cut, MicroBatch, steps_per_epoch
from manyhands.evaluate import scores
from manyhands.launch import shipping
from manyhands.launch.messages import (
    Begun,
    Hello,
    Leaving,
    Left,
    Notice,
    Part,
    Ready,
    Reply,
    SavedFile,
    Scored,
    Testimony,
    Trouble,
    View,
    Written,
)
from manyhands.launch.pulse import Pulse, Waiting
from manyhands.launch.wire import Keys, Line
from manyhands.rundir import RunDir
from manyhands.scoring import evaluation_of, my_batches
from manyhands.task import Task, user_traceback
from manyhands.testing.faults import Fault, FaultPlan
from manyhands.train import leaf, loop, strategies, suspects
from manyhands.train.memory import Memory
from manyhands.train.optim import (
    Entry,
    groups_to_json,
    how_to_cut,
    kinds_of,
    restore,
    schedule_to_json,
    without_dynamo,
)
from manyhands.train.seeds import seed_everything
from manyhands.train.state import Replica, build_model
from manyhands.train.sync.contract import Place, StepFacts
from manyhands.verdict import explain
from manyhands.world import World, machine, peak_memory_bytes


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a worker needs to know before it can ask."""

    worker: int
    """Its number, for the life of the run."""
    order: int = 0
    """It is the n-th that this driver has started."""
    keys: Keys | None
    """How to reach the supervisor; filled in last."""
    run: str
    config: RunConfig
    collective: str
    parcel: shipping.Parcel
    task_fd: int
    state_fd: int
    steps: int
    start_from: str | None = None
    """A safetensors file to take the first weights from."""
    log_every: int = 10
    debug: tuple[int, int] | None = None
    """Stop in a debugger at this micro-batch: (step, index)."""
    faults: FaultPlan = FaultPlan()


class Built(msgspec.Struct, frozen=True):
    """What a worker's model looks like, for comparing."""

    layout: str
    marks: dict[str, int]
    data: str


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


class Hand:
    def __init__(self, orders: Orders) -> None:
        self.orders, self.config = orders, orders.config
        self.run = RunDir(Path(orders.run))
        self.pulse = Pulse(orders.worker, log_every=orders.log_every)
        assert orders.keys is not None
        self.line = Line(orders.keys, orders.worker, self.pulse.beat)
        self.waiting = Waiting(self.pulse, self.line.broken)
        self.saver = Saver(Folder(self.run), self._tell_written, self._progress)
        self.world = World(0, 1)
        self.because = "all steps are done"
        self.scored_at = self.saved_at = self.logged = -1
        self.halting = self.begun = self.held = False
        self.struck: set[Fault] = set()

    def work(self) -> None:
        torch.set_num_threads(self.config.train.threads)
        without_dynamo()
        self._go_when_told()
        self.build()
        self.hello()
        while (view := self.next_view()) is not None:
            broken, differs = False, None
            try:
                self.join(view)
                if self.train():
                    self.finish()
                    return
            except errors.AuditMismatch as error:
                broken, differs = True, error.args
            except errors.Broken:
                broken = True
            self.line.send(self.pulse.beat())  # what was done, before what is to come
            self.line.send(
                Ready(
                    worker=self.orders.worker,
                    step=self.replica.step,
                    broken=broken,
                    held=self.held,
                    differs=differs,
                )
            )

    # ---- build

    def build(self) -> None:
        """Model, optimizer, data and the strategy, each from the task and nothing else."""
        train = self.config.train
        self.task: Task = shipping.unpack(self.orders.parcel, self.orders.task_fd)
        task = self.task
        assert task.loss is not None and task.optimizer is not None
        self.loss: leaf.LossFn = task.loss if self.orders.debug is None else self._debugged
        self.device = strategies.choose_device(train, self.orders.worker)
        memory = Memory(self.orders.state_fd if self.orders.collective == "shared" else None)
        seed_everything(train.seed, "model")
        model = build_model(task.model).to(self.device).train()
        optimizer = task.optimizer(model)
        schedule = task.schedule(optimizer) if task.schedule else None
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise errors.TaskError(
                "Task: ReduceLROnPlateau wants a score at every step; use a schedule that does not."
            )
        self.replica = Replica(model, optimizer, schedule, memory, self.device)
        self.marks = suspects.marks(self.replica.parameters)
        records, self.held_out = open_data(task.data, task.held_out)
        self.feed = WatchedFeed(self._feed(records), self)
        self.sync = strategies.strategy(
            train,
            self.replica,
            memory,
            strategies.collective(
                self.orders.collective,
                train,
                memory,
                device=self.device,
                rendezvous=self.run.root / ".rendezvous",
                patience=self.waiting,
            ),
            heard=self.line.heard,
            moment=self.moment,
            auditor=self,
        )

    def _debugged(self, model: torch.nn.Module, batch: Any) -> Any:
        """The task's loss, in a debugger when its micro-batch has come."""
        assert self.task.loss is not None
        if self.pulse.current != self.orders.debug:
            return self.task.loss(model, batch)
        return pdb.Pdb(nosigint=True).runcall(self.task.loss, model, batch)

    def _feed(self, records: Records) -> Feed:
        train = self.config.train
        return Feed(
            records,
            seed=train.seed,
            batch=train.batch,
            micro_batch=train.micro_batch_size,
            seeder=seed_everything,
        )

    # ---- join

    def hello(self) -> None:
        built = Built(
            layout=self.replica.layout.digest,
            marks=self.marks,
            data=sampled_digest(self.feed.feed.records),
        )
        self.line.send(
            Hello(
                worker=self.orders.worker,
                pid=os.getpid(),
                host=machine().host,
                built=msgspec.msgpack.encode(built),
            )
        )

    def next_view(self) -> View | None:
        """Wait for a place; None: there is none for this worker any more."""
        with self.waiting:
            view = self.line.next_view()
        return view if view.rank_of(self.orders.worker) is not None else None

    def join(self, view: View) -> None:
        """Take the place in a view, and come to where the others are."""
        rank = view.rank_of(self.orders.worker)
        assert rank is not None
        self.view, self.world = view, World(rank, len(view.members))
        self.pulse.leads, self.halting = self.world.leads, False
        self.replica.changes = view.journal
        self.pulse.forget_times()
        self._compare(view)
        self.moment("regroup")
        place = Place(self.world, view.generation, tuple(view.speeds))
        if view.fresh:
            self.restore(view.restore)
            entries = self._saved_entries if view.restore is not None else None
            place = dataclasses.replace(place, fresh=view.restore or 0, entries=entries)
        if self.orders.collective not in ("shared", "none"):
            self._meet()
        self.sync.regroup(place)
        self.held = True
        self.pulse.step = self.replica.step
        self.scored_at, self.saved_at = view.scored, view.saved
        self.replica.change(view.changes)
        self.configure()
        if view.changes:
            self.sync.note()
        if self.world.leads:
            groups = groups_to_json(self.replica.optimizer)
            kinds = kinds_of(self.replica.schedule)
            self.line.send(Begun(step=self.replica.step, groups=groups, schedule=kinds))
        if view.changes:  # journalled before any of us may use them
            self.reply(f"go-{view.generation}")
        if view.audit is not None:
            self._testify(view.audit)

    def _meet(self) -> None:
        """Torch's groups wait long for a member who does not come; so first see that all do."""
        round = f"meet-{self.view.generation}"
        self.line.send(Part(worker=self.orders.worker, round=round, payload=b"", to_all=True))
        self.reply(round)

    def _testify(self, index: int) -> None:
        """Compute a micro-batch of the next step twice, for the supervisor to compare."""
        cut = self.feed.cut(self.replica.step)
        index %= len(cut.sizes)
        digests = [self.sync.testify(cut, index) for _ in range(2)]
        self.line.send(
            Testimony(worker=self.orders.worker, step=cut.step, micro_batch=index, digests=digests)
        )
        self.reply(f"judged-{self.view.generation}")

    def index(self, cut: Cut) -> int | None:
        """Which micro-batch of a step is computed by two workers, if any."""
        every = self.config.train.audit_every
        if every is None or self.world.num_ranks < 2 or (cut.step + 1) % every:
            return None
        return (cut.step + 1) // every % len(cut.sizes)

    def again(self, cut: Cut, index: int) -> leaf.Leaf:
        (micro_batch,) = self.feed.feed.micro_batches(cut, [index])
        train = self.config.train
        return leaf.compute(
            self.replica.model,
            self.feed.placed(micro_batch),
            self.loss,
            seed=train.seed,
            precision=train.precision,
        )

    def configure(self) -> None:
        """Settings that have changed since the run began, and are not the optimizer's."""
        due = [s for at, s in sorted(self.view.journal.items()) if at <= self.replica.step]
        settings = [live_settings(s) for s in (*due, self.view.changes)]
        self.config = self.orders.config.with_settings([s for some in settings for s in some])
        self.sync.clip_norm = self.config.train.clip_norm
        if self.orders.log_every != 1:  # somebody watches every step
            self.pulse.log_every = self.config.log.every_steps

    def reply(self, round: str) -> Reply:
        with self.waiting:
            return self.line.reply(round)

    def _compare(self, view: View) -> None:
        """Every worker must have built the same model; say what may make results differ."""
        others = [msgspec.msgpack.decode(b, type=Built) for b in view.built]
        for rank, other in enumerate(others):
            if other.layout != others[0].layout:
                raise errors.TaskError(
                    f"the model that rank {rank} built has other tensors than rank 0's. A model "
                    "must not depend on the process that builds it, or on randomness of its own."
                )
            if other.data != others[0].data:
                raise errors.TaskError(
                    f"rank {rank} has other data than rank 0. The task file was run in each worker "
                    "(it holds something that cannot be pickled), so it must make the same data "
                    "each time: seed what it draws."
                )
        if self.world.leads and view.generation == 1:
            notes = suspects.private_generators(self.replica.model, self.task.data)
            cut, because = how_to_cut(self.replica.optimizer)
            if cut == "nowhere" and self.world.num_ranks > 1:
                notes.append(f"the optimizer's work is not shared out: {because}")
            if (note := suspects.unlike(others[0].marks, [o.marks for o in others])) is not None:
                notes.append(note)
            for note in notes:
                self.line.send(Notice(text=note))
            self.plain = suspects.PlainState(self.replica.model)

    def restore(self, step: int | None) -> None:
        """Weights of another run, or everything of a committed step of this one."""
        if step is None:
            if self.orders.start_from is not None:
                try:
                    tensors, _ = decode(Path(self.orders.start_from))
                except errors.CheckpointDamaged as error:
                    raise errors.ConfigError(f"train.start_from: {error}") from error
                self.replica.load(tensors, where=self.orders.start_from)
            return
        folder = self.run.step(step)
        self.replica.load(files.read_model(folder), where=str(folder))
        passing, state = files.read_state(folder)
        self.replica.buffers.load(passing)
        kind = type(self.replica.optimizer).__name__
        if state["optimizer"] != kind:
            raise errors.CheckpointMismatch(
                f"{folder} was saved with {state['optimizer']}, the task now uses {kind}. "
                "To keep the weights only, start a new run with train.start_from."
            )
        restore(
            self.replica.optimizer,
            self.replica.schedule,
            groups=state["groups"],
            saved=state["schedule"],
            step=state["step"],
        )
        self.replica.step = state["step"]
        self.replica.change(self.view.journal.get(state["step"], {}))

    def _saved_entries(self) -> Iterator[Entry]:
        assert self.view.restore is not None
        folder = self.run.step(self.view.restore)
        return (Entry(*e) for e in files.read_optimizer(folder))

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
                    self.line.send(Notice(text=note))

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
        rank, ranks = self.world.rank, self.world.num_ranks
        replica.buffers.show()
        batches = my_batches(self.held_out, self.config, rank, ranks, self.device)
        results = scores.measure(evaluation, replica.model, self._watched(batches))
        round = f"evaluate-{replica.step}"
        payload = scores.encode(results)
        self.line.send(Part(worker=self.orders.worker, round=round, payload=payload))
        if self.world.leads:
            found = scores.combine(evaluation, scores.decode(self.reply(round).parts))
            self.line.send(self.pulse.beat())  # the steps before the scores of the last of them
            self.line.send(Scored(step=replica.step, round=f"scores-{replica.step}", scores=found))
        reason = self.reply(f"scores-{replica.step}").stop
        self.scored_at = replica.step
        self.because = reason or self.because
        return reason is not None

    def _watched(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            self.stop_if_broken()
            yield batch
            self.pulse.progress += 1

    def stop_if_broken(self) -> None:
        if self.line.broken():
            raise errors.Broken("other members of this view are gone")

    def _save_when_due(self, replica: Replica, facts: StepFacts | None = None) -> None:
        checkpoint = self.config.checkpoint
        if checkpoint is not None and replica.step % checkpoint.every_steps == 0:
            self._save(replica)

    def _save(self, replica: Replica) -> None:
        self.moment("save")
        entries = ((e.key, e.name, e.offset, e.value) for e in self.sync.optimizer.entries())
        contents = []
        if self.world.leads or self.orders.collective == "shared":
            contents.append(files.optimizer_content(self.orders.worker, entries))
        if self.world.leads:
            state = {
                "step": replica.step,
                "optimizer": type(replica.optimizer).__name__,
                "groups": groups_to_json(replica.optimizer),
                "schedule": schedule_to_json(replica.schedule),
            }
            contents.append(files.model_content(replica.tensors()))
            contents.append(files.state_content(replica.passing_buffers(), state))
        self.saver.save(replica.step, self.view.generation, contents)
        self.saved_at = replica.step

    def _tell_written(
        self, step: int, attempt: int, files: dict[str, FileRecord], blocked_s: float
    ) -> None:
        self.moment("written")
        listed = [SavedFile(name, f.size_bytes, f.sha256) for name, f in files.items()]
        self.line.send(
            Written(
                worker=self.orders.worker,
                step=step,
                attempt=attempt,
                files=listed,
                blocked_s=blocked_s,
            )
        )

    def _progress(self) -> None:
        self.pulse.progress += 1

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

    def _is_anothers(self, error: BaseException) -> bool:
        """Every worker sees a loss that is not finite; the one that computed it reports it."""
        return isinstance(error, errors.LossNotFinite) and error.args[0] != self.world.rank

    def report(self, error: BaseException) -> None:
        """Tell the supervisor what went wrong here."""
        index, records = None, list[int]()
        if isinstance(error, errors.LossNotFinite):
            error = _with_records(error, self.feed.feed)
            index, records = error.args[2], error.args[4]
        elif self.pulse.current is not None:
            step, index = self.pulse.current
            records = list(self.feed.feed.ids(self.feed.cut(step), index))
        ours = isinstance(error, errors.ManyhandsError)
        self.line.send(
            Trouble(
                worker=self.orders.worker,
                step=self.pulse.step,
                kind=type(error).__name__,
                text=_clean(str(error) if ours else explain(error)),
                trace="" if ours else _clean(user_traceback(error)),
                request=isinstance(error, errors.RequestError),
                ours=ours,
                symptom=self._is_anothers(error),
                micro_batch=index,
                records=records,
            )
        )


def _clean(text: str) -> str:
    """Text that can be sent: undecodable file names leave lone surrogates in messages."""
    return text.encode("utf-8", "backslashreplace").decode()


class WatchedFeed:
    """A feed that notes which micro-batch is in work, and lets planned faults strike."""

    def __init__(self, feed: Feed, hand: Hand) -> None:
        self.feed, self.hand = feed, hand
        self.steps_per_epoch = steps_per_epoch(len(feed.records), feed.batch)

    def cut(self, step: int) -> Cut:
        return self.feed.cut(step)

    def micro_batches(self, step: Cut, indices: Iterable[int]) -> Iterator[MicroBatch]:
        hand, pulse = self.hand, self.hand.pulse
        pulse.step = step.step
        hand.moment("begin")
        for index in indices:
            hand.stop_if_broken()
            started = time.perf_counter()
            pulse.current = (step.step, index)  # before fetching: that can fail too
            hand.moment("compute")
            (micro_batch,) = self.feed.micro_batches(step, [index])
            micro_batch = self.placed(micro_batch)
            yield micro_batch
            hand.orders.faults.drag(hand.orders.order, step.step, time.perf_counter() - started)
            pulse.did(time.perf_counter() - started, micro_batch.records)
        pulse.current = None

    def placed(self, micro_batch: MicroBatch) -> MicroBatch:
        """Where the model is."""
        if self.hand.device.type == "cpu":
            return micro_batch
        moved = on_device(micro_batch.batch, self.hand.device)
        return dataclasses.replace(micro_batch, batch=moved)

    def epochs_done(self, step: int) -> float:
        return step / self.steps_per_epoch


def _with_records(error: errors.LossNotFinite, feed: Feed) -> errors.LossNotFinite:
    """The records of a micro-batch that any worker may have computed: they follow from the step."""
    rank, step, index, loss, _ = error.args
    ids = feed.ids(feed.cut(step), index)
    return errors.LossNotFinite(rank, step, index, loss, ids)
