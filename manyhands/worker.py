# SPDX-License-Identifier: Apache-2.0
"""One hand: join, build, restore, train, save, report. The story of a worker process.

A worker is started with `Orders`, says hello to the supervisor, and gets its place in a view. All
it does from then on is the loop (`train.loop`) with a few hooks. Whatever goes wrong is reported
as `Trouble` before it ends, with the user's own frames on top.
"""

import dataclasses
import math
import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from manyhands import errors
from manyhands.checkpoint import files
from manyhands.checkpoint.saver import Saver
from manyhands.checkpoint.storage import FileRecord, Folder
from manyhands.checkpoint.tensors import decode
from manyhands.config import RunConfig
from manyhands.data.feed import Feed, held_out_batches, on_device
from manyhands.data.records import Records, open_data, sampled_digest
from manyhands.deal import Cut, MicroBatch, steps_per_epoch
from manyhands.evaluate import scores
from manyhands.launch import shipping
from manyhands.launch.messages import (
    Hello,
    Left,
    Notice,
    Part,
    SavedFile,
    Scored,
    Trouble,
    View,
    Written,
)
from manyhands.launch.pulse import Pulse
from manyhands.launch.wire import Keys, Line
from manyhands.rundir import RunDir
from manyhands.task import Task, user_traceback
from manyhands.testing.faults import FaultPlan
from manyhands.train import leaf, loop, strategies, suspects
from manyhands.train.memory import Memory
from manyhands.train.optim import (
    Entry,
    groups_to_json,
    how_to_cut,
    restore,
    schedule_to_json,
    without_dynamo,
)
from manyhands.train.seeds import seed_everything
from manyhands.train.state import Replica, build_model
from manyhands.train.sync.contract import StepFacts
from manyhands.verdict import explain
from manyhands.world import World, machine, peak_memory_bytes


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a worker needs to know before it can ask."""

    worker: int
    keys: Keys | None
    """How to reach the supervisor; filled in last."""
    run: str
    config: RunConfig
    collective: str
    parcel: shipping.Parcel
    task_fd: int
    state_fd: int
    steps: int
    resume: int | None = None
    """The committed step to continue from."""
    start_from: str | None = None
    """A safetensors file to take the first weights from."""
    log_every: int = 10
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
        self.saver = Saver(Folder(self.run), self._tell_written)
        self.because = "all steps are done"
        self.scored_at = self.saved_at = -1
        self.begun = False

    def work(self) -> None:
        torch.set_num_threads(self.config.train.threads)
        without_dynamo()
        self.join()
        self.build()
        self.restore()
        self.sync.setup()
        loop.train(
            self.replica,
            self.feed,
            self.sync,
            self.loss,
            steps=self.orders.steps,
            hooks=self.hooks(),
        )
        self.finish()

    # ---- join

    def join(self) -> None:
        """Say hello and wait for a place."""
        orders, host = self.orders, machine().host
        self.line.send(Hello(worker=orders.worker, pid=os.getpid(), host=host))
        self.task: Task = shipping.unpack(orders.parcel, orders.task_fd)
        self.view: View = self.line.views.get()
        rank = self.view.rank_of(orders.worker)
        self.world = World(rank, len(self.view.members))
        self.pulse.leads = self.world.leads

    # ---- build

    def build(self) -> None:
        """Model, optimizer, data and the strategy, each from the task and nothing else."""
        train, task = self.config.train, self.task
        assert task.loss is not None and task.optimizer is not None
        self.loss: leaf.LossFn = task.loss
        self.device = strategies.choose_device(train, self.world.rank)
        self.memory = Memory(self.orders.state_fd if self.orders.collective == "shared" else None)
        seed_everything(train.seed, "model")
        model = build_model(task.model).to(self.device).train()
        optimizer = task.optimizer(model)
        schedule = task.schedule(optimizer) if task.schedule else None
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise errors.TaskError(
                "Task: ReduceLROnPlateau wants a score at every step; use a schedule that does not."
            )
        self.replica = Replica(model, optimizer, schedule, self.memory, self.device)
        records, self.held_out = open_data(task.data, task.held_out)
        self.feed = WatchedFeed(self._feed(records), self)
        self._compare(model)
        make = strategies.collective(
            self.orders.collective,
            train,
            self.world,
            self.memory,
            device=self.device,
            rendezvous=self.run.root / f".rendezvous-{self.view.generation}",
            broken=self.line.broken.is_set,
        )
        self.sync = strategies.strategy(
            train,
            self.replica,
            self.world,
            self.memory,
            make,
            speeds=tuple(self.view.speeds),
            heard=self.line.heard,
        )

    def _compare(self, model: torch.nn.Module) -> None:
        """Every worker must have built the same model; say what may make results differ."""
        built = Built(
            layout=self.replica.layout.digest,
            marks=suspects.marks(self.replica.parameters),
            data=sampled_digest(self.feed.feed.records),
        )
        everyone = self._all(f"built-{self.view.generation}", msgspec.msgpack.encode(built))
        others = [msgspec.msgpack.decode(b, type=Built) for b in everyone]
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
        if self.world.leads:
            notes = suspects.private_generators(model, self.task.data)
            cut, because = how_to_cut(self.replica.optimizer)
            if cut == "nowhere" and self.world.num_ranks > 1:
                notes.append(f"the optimizer's work is not shared out: {because}")
            if (note := suspects.unlike(others[0].marks, [o.marks for o in others])) is not None:
                notes.append(note)
            for note in notes:
                self.line.send(Notice(text=note))
            self.plain = suspects.PlainState(model)

    def _all(self, round: str, payload: bytes) -> list[bytes]:
        """Everyone's payload, by rank, through the supervisor."""
        self.line.send(Part(worker=self.orders.worker, round=round, payload=payload, to_all=True))
        return self.line.reply(round).parts

    def _feed(self, records: Records) -> Feed:
        train = self.config.train
        return Feed(
            records,
            seed=train.seed,
            batch=train.batch,
            micro_batch=train.micro_batch_size,
            seeder=seed_everything,
        )

    # ---- restore

    def restore(self) -> None:
        """Weights of another run, or everything of a committed step of this one."""
        if self.orders.resume is None:
            if self.orders.start_from is not None:
                try:
                    tensors, _ = decode(Path(self.orders.start_from))
                except errors.CheckpointDamaged as error:
                    raise errors.ConfigError(f"train.start_from: {error}") from error
                self.replica.load(tensors, where=self.orders.start_from)
            return
        folder = self.run.step(self.orders.resume)
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
        self.sync.optimizer.load(Entry(*e) for e in files.read_optimizer(folder))
        self.replica.step = self.saved_at = self.pulse.step = state["step"]

    # ---- train

    def hooks(self) -> list[loop.Hook]:
        chosen: list[loop.Hook] = [self._log]
        evaluate, checkpoint = self.config.evaluate, self.config.checkpoint
        if evaluate is not None and self.held_out is not None:
            every = evaluate.every_steps or self.feed.steps_per_epoch
            chosen.append(loop.Every(every, self._evaluate))
        if checkpoint is not None:
            chosen.append(loop.Every(checkpoint.every_steps, self._save))
        chosen.append(self._stop_when_asked)
        return chosen

    def _log(self, replica: Replica, facts: StepFacts) -> None:
        self.saver.check()
        epoch = self.feed.epochs_done(replica.step)
        lr = float(replica.optimizer.param_groups[0].get("lr", math.nan))
        self.pulse.stepped(replica.step, epoch, facts.loss, lr, facts.records, dict(facts.numbers))
        if not self.begun:  # people wait for the first sign of life
            self.begun = True
            self.line.send(self.pulse.beat())
            if self.world.leads:
                for note in self.plain.changed():
                    self.line.send(Notice(text=note))

    def _evaluate(self, replica: Replica, facts: StepFacts | None = None) -> bool:
        """Score the held-out records together; True when the supervisor says to stop."""
        assert self.held_out is not None
        evaluation = evaluation_of(self.task, self.config)
        size = evaluation_batch(self.config)
        count = math.ceil(len(self.held_out) / size)
        rank, ranks = self.world.rank, self.world.num_ranks
        mine = range(count * rank // ranks, count * (rank + 1) // ranks)
        replica.buffers.show()
        batches = held_out_batches(
            self.held_out,
            batch=size,
            indices=mine,
            seed=self.config.train.seed,
            seeder=seed_everything,
        )
        placed = ((i, n, on_device(b, self.device)) for i, n, b in batches)
        results = scores.measure(evaluation, replica.model, placed)
        round = f"evaluate-{replica.step}"
        payload = scores.encode(results)
        self.line.send(Part(worker=self.orders.worker, round=round, payload=payload))
        if self.world.leads:
            found = scores.combine(evaluation, scores.decode(self.line.reply(round).parts))
            self.line.send(self.pulse.beat())  # the steps before the scores of the last of them
            self.line.send(Scored(step=replica.step, round=f"scores-{replica.step}", scores=found))
        reason = self.line.reply(f"scores-{replica.step}").stop
        self.scored_at = replica.step
        self.because = reason or self.because
        return reason is not None

    def _save(self, replica: Replica, facts: StepFacts | None = None) -> None:
        entries = ((e.key, e.name, e.offset, e.value) for e in self.sync.optimizer.entries())
        contents = [files.optimizer_content(self.world.rank, entries)]
        if self.world.leads:
            state = {
                "step": replica.step,
                "optimizer": type(replica.optimizer).__name__,
                "groups": groups_to_json(replica.optimizer),
                "schedule": schedule_to_json(replica.schedule),
            }
            contents.append(files.model_content(replica.tensors()))
            contents.append(files.state_content(replica.passing_buffers(), state))
        self.saver.save(replica.step, contents)
        self.saved_at = replica.step

    def _tell_written(self, step: int, files: dict[str, FileRecord], blocked_s: float) -> None:
        listed = [SavedFile(name, f.size_bytes, f.sha256) for name, f in files.items()]
        self.line.send(
            Written(worker=self.orders.worker, step=step, files=listed, blocked_s=blocked_s)
        )

    def _stop_when_asked(self, replica: Replica, facts: StepFacts) -> bool:
        asked = any(c.number <= facts.agreed for c in self.line.commands)
        if asked and replica.step < self.orders.steps:
            self.because = "stopped"
            return True
        return False

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
                symptom=isinstance(error, errors.Broken) or self._is_anothers(error),
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
        hand.orders.faults.strike(hand.world.rank, step.step)
        for index in indices:
            pulse.current = (step.step, index)  # before fetching: that can fail too
            (micro_batch,) = self.feed.micro_batches(step, [index])
            if hand.device.type != "cpu":
                moved = on_device(micro_batch.batch, hand.device)
                micro_batch = dataclasses.replace(micro_batch, batch=moved)
            yield micro_batch
            pulse.computed += micro_batch.records
        pulse.current = None

    def epochs_done(self, step: int) -> float:
        return step / self.steps_per_epoch


def _with_records(error: errors.LossNotFinite, feed: Feed) -> errors.LossNotFinite:
    """The records of a micro-batch that any worker may have computed: they follow from the step."""
    rank, step, index, loss, _ = error.args
    ids = feed.ids(feed.cut(step), index)
    return errors.LossNotFinite(rank, step, index, loss, ids)


def evaluation_of(task: Task, config: RunConfig) -> scores.Evaluation:
    assert task.loss is not None
    return scores.Evaluation(
        task.loss, leaf.read_loss, task.predict, task.scores, config.train.precision
    )


def evaluation_batch(config: RunConfig) -> int:
    wanted = config.evaluate.batch if config.evaluate else None
    return wanted or config.train.micro_batch_size
