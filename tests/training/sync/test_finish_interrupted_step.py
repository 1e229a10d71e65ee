"""A worker dies at any store of a step, and whoever takes its place ends up with the same bits."""

from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.accounting.deal_micro_batches import Cut
from manyhands.data.open_data import open_data
from manyhands.data.reading.micro_batch_feed import MicroBatchFeed
from manyhands.training.build_training import averages
from manyhands.training.collective.collective import Sizes
from manyhands.training.collective.shared_memory import SharedMemory, SharedRoom
from manyhands.training.collective.two_level import TwoLevel
from manyhands.training.compute.seeds import seed_everything
from manyhands.training.memory.memory import Memory
from manyhands.training.state import layout, weight_average
from manyhands.training.state.build_optimizer import build_optimizer, build_schedules
from manyhands.training.state.replica import Replica, build_model
from manyhands.training.sync.allreduce.allreduce import AllReduce, MeetMembers
from manyhands.training.sync.leaf_gradients import PlainGradients
from manyhands.training.sync.sync import Place
from manyhands.values.config import TrainConfig
from manyhands.values.world import World
from tests.support.dying import NEVER, Death
from tests.support.hands import segment
from tests.support.tasks import make

AT, LAST = 1, 3


@pytest.fixture(scope="module", autouse=True)
def blocks_are_small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "BLOCK", 512)
        patch.setattr(layout, "UNIT", 1024)
        yield


class Patient:
    """There is nobody else to wait for."""

    def broken(self) -> bool:
        return False

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


class NoAudit:
    def index(self, cut: Cut) -> int | None:
        return None

    def digest(self, cut: Cut, index: int) -> int:
        raise NotImplementedError


class Hand:
    """The only worker of a run, from the task to the strategy, over memory that outlives it."""

    def __init__(self, kind: str, train: TrainConfig, fd: int) -> None:
        task, memory = make(kind), Memory(fd)
        assert task.loss is not None and task.optimizer is not None
        seed_everything(train.seed, "model")
        model = build_model(task.model).train()
        optimizer = build_optimizer(task, model)
        schedules = build_schedules(task, optimizer, model, seed=train.seed)
        self.loss = task.loss
        self.replica = Replica(
            model,
            optimizer,
            schedules,
            memory,
            torch.device("cpu"),
            averages=averages(train, self.epoch_of),
        )
        records, _ = open_data(task.data, None)
        self.feed = MicroBatchFeed(
            records,
            seed=train.seed,
            batch=train.batch,
            micro_batch=train.micro_batch_size,
            seeder=seed_everything,
        )
        self.sync = AllReduce(
            self.replica,
            memory,
            partial(self._meet, memory),
            train,
            PlainGradients(self.replica, train),
            heard=lambda: 0,
            moment=lambda name: None,
            auditor=NoAudit(),
            after_step=self.after_step,
        )

    after_step: Any = None

    def epoch_of(self, step: int) -> int:
        return self.feed.cut(step).epoch

    def _meet(self, memory: Memory, sizes: Sizes) -> MeetMembers:
        room = SharedRoom(memory, sizes)

        def meet(place: Place) -> TwoLevel:
            patience = Patient()
            local = SharedMemory(place.world, room, place.generation, spin=False, patience=patience)
            return TwoLevel(place.world, local, None, patience=patience)

        return meet

    def join(self, generation: int, *, fresh: bool = False) -> None:
        self.sync.regroup(Place(World(0, 1), generation, (1.0,), fresh=0 if fresh else None))

    def step(self) -> None:
        cut = self.feed.cut(self.replica.step)
        indices = self.sync.indices(cut)
        self.sync.backward(cut, self.feed.micro_batches(cut, indices), self.loss)
        self.sync.step()
        self.replica.advance()

    def words(self) -> list[tuple[object, str]]:
        """Of what else outlives it."""
        kept = self.replica.averages.values()
        found: list[tuple[object, str]] = [
            (a, name) for a in kept for name in ("_words", "_planned", "_heads")
        ]
        after = self.sync.after
        return found + ([] if after is None else [(after, "_words"), (after, "_copied")])

    def outcome(self) -> dict[str, Tensor]:
        while self.replica.step < LAST:
            self.step()
        buffers = self.replica.buffers
        saved = {e.key + e.name + str(e.offset): e.value for e in self.sync.optimizer.entries()}
        lanes = {str(d): lane for d, lane in [*self.replica.weights.items()]}
        lanes |= {f"buffers {d}": lane for d, lane in buffers.committed.items()}
        lanes |= {key: torch.as_tensor(value) for key, value in saved.items()}
        for name, average in self.replica.averages.items():
            lanes |= {f"{name} {d}": lane for d, lane in average.lanes.items()}
            lanes[f"{name} count"] = torch.tensor(average.count)
        rates = [float(g["lr"]) for g in self.replica.optimizer.param_groups]
        return {key: lane.clone() for key, lane in lanes.items()} | {"lr": torch.tensor(rates)}


def play(kind: str, train: TrainConfig, *deaths: Death) -> tuple[int, dict[str, Tensor]]:
    """How many died: one in a step, others as they put things in order; and what came of it."""
    dead = 0
    with segment() as fd:
        hand = Hand(kind, train, fd)
        hand.join(1, fresh=True)
        while hand.replica.step < AT:
            hand.step()
        with (deaths[0] if deaths else NEVER).strikes(
            hand.sync.undo_log, beside=hand.words()
        ) as died:
            hand.step()
        generation = 1
        while died:
            dead, generation = dead + 1, generation + 1
            hand = Hand(kind, train, fd)
            death = deaths[dead] if dead < len(deaths) else NEVER
            with death.strikes(hand.sync.undo_log, beside=hand.words()) as died:
                hand.join(generation)
        return dead, hand.outcome()


CASES = [
    ("cnn", 12, None, 1),
    ("cnn", 4, 0.1, 2),
    ("odd", 4, None, 1),
    ("transformer", 6, 0.1, 11),
    ("own", 12, 0.1, 1),
    ("max_norm", 6, None, 2),
    ("max_norm", 12, 0.1, 3),
]


AVERAGED = [("cnn", 12, 1), ("lstm", 4, 5), ("transformer", 12, 7), ("own", 12, 2)]


@pytest.mark.parametrize(("kind", "micro_batch", "every"), AVERAGED)
def test_and_so_do_averages_of_the_weights(
    kind: str, micro_batch: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch is one step long: all averages are taken in each. (By torch: of native ones see
    test_weight_average.py.)"""
    monkeypatch.setattr(Hand, "epoch_of", lambda self, step: step)
    monkeypatch.setattr(weight_average, "lerp_fma", lambda: None)
    end_in_the_same_bits(
        kind, TrainConfig(batch=12, micro_batch=micro_batch, ema=0.9, swa=1), every
    )


def tamper(model: nn.Module) -> None:
    """Never the same twice, nor in another order; weights that are not trained, and buffers too."""
    for parameter in model.parameters():
        parameter.copy_(parameter * 0.9 + torch.rand(()) * 1e-2)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(buffer * 1.01)
        elif buffer.dtype == torch.long:
            buffer.copy_(buffer + 3)


FOLLOWED = [
    ("cnn", 12, None, 1),
    ("odd", 4, 0.9, 1),
    ("transformer", 12, None, 13),
    ("own", 6, 0.9, 2),
]


@pytest.mark.parametrize(("kind", "micro_batch", "ema", "every"), FOLLOWED)
def test_and_so_does_what_a_task_does_after_it(
    kind: str, micro_batch: int, ema: float | None, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hand, "after_step", staticmethod(tamper))
    end_in_the_same_bits(kind, TrainConfig(batch=12, micro_batch=micro_batch, ema=ema), every)


@pytest.mark.parametrize(("kind", "micro_batch", "clip", "every"), CASES)
def test_a_step_that_was_broken_off_anywhere_ends_in_the_same_bits(
    kind: str, micro_batch: int, clip: float | None, every: int
) -> None:
    """At each store, or every so many; who comes after it dies too, half as far."""
    train = TrainConfig(batch=12, micro_batch=micro_batch, clip_norm=clip)
    end_in_the_same_bits(kind, train, every)


def end_in_the_same_bits(kind: str, train: TrainConfig, every: int) -> None:
    _, calm = play(kind, train)
    for n in count(step=every):
        dead, found = play(kind, train, Death(n), Death(n // 2))
        assert found.keys() == calm.keys()
        for key, lane in calm.items():
            assert torch.equal(lane, found[key]), f"{key}, after a death at store {n}"
        if not dead:
            assert n > 10
            return
