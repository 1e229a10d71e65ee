"""Somebody dies at any store of a step that hosts take together: whoever goes on, in whichever
memory, ends up with the same bits. Hosts are threads here, each with memory of its own."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from manyhands.data.open_data import open_data
from manyhands.data.reading.micro_batch_feed import MicroBatchFeed
from manyhands.training.build_training import averages
from manyhands.training.collective import two_level as tiers_module
from manyhands.training.collective.collective import (
    FACTS,
    Bytes,
    Meanwhile,
    Patience,
    Sizes,
    nothing,
    stretch,
)
from manyhands.training.collective.shared_memory import SharedMemory, SharedRoom
from manyhands.training.collective.two_level import TwoLevel
from manyhands.training.compute.micro_batch_gradient import Leaf, compute
from manyhands.training.compute.seeds import seed_everything
from manyhands.training.memory.memory import Memory
from manyhands.training.state import layout
from manyhands.training.state.build_optimizer import build_optimizer, build_schedules
from manyhands.training.state.layout import Bounds, Lanes
from manyhands.training.state.replica import Replica, build_model
from manyhands.training.sync import leaf_gradients
from manyhands.training.sync.allreduce import overlapped_host_sum
from manyhands.training.sync.allreduce.allreduce import AllReduce, MeetMembers
from manyhands.training.sync.leaf_gradients import PlainGradients
from manyhands.training.sync.sync import Place
from manyhands.values.config import TrainConfig
from manyhands.values.errors import Broken
from manyhands.values.world import World
from tests.support.dying import NEVER, Death, Died, Store
from tests.support.hands import segment
from tests.support.tasks import make
from tests.training.sync.test_finish_interrupted_step import NoAudit

AT, LAST = 1, 3


class NamedCouriers(ThreadPoolExecutor):
    """It is seen whose courier a thread is."""

    def __init__(self, threads: int, name: str) -> None:
        super().__init__(threads, f"{threading.current_thread().name}-{name}")


one_at_a_time = threading.Lock()
"""Random numbers are the process's; real workers have one each."""


def compute_alone(*arguments: Any, **options: Any) -> Leaf:
    with one_at_a_time:
        return compute(*arguments, **options)


@pytest.fixture(scope="module", autouse=True)
def everything_is_small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "BLOCK", 512)
        patch.setattr(layout, "UNIT", 1024)
        patch.setattr(overlapped_host_sum, "bucket_bytes", lambda *_: 2000)
        patch.setattr(leaf_gradients, "compute", compute_alone)
        patch.setattr(tiers_module, "ThreadPoolExecutor", NamedCouriers)
        yield


class View:
    """What the hosts of a view send each other, and when it is over."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.said: dict[tuple[int, int], Any] = {}
        """(turn, host) → what it sent"""
        self.over = threading.Event()
        self.changed = threading.Condition()

    def broken(self) -> bool:
        return self.over.is_set()

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

    def end(self) -> None:
        self.over.set()
        with self.changed:
            self.changed.notify_all()


class Between:
    """The Collective of hosts. What was sent before its sender died arrives all the same."""

    def __init__(self, world: World, view: View, patience: Patience, deadly: list[Store]) -> None:
        self.world, self.view, self.patience, self.deadly = world, view, patience, deadly
        self.slots: Sequence[Lanes] = ()
        self.turn = 0

    def swap(self, mine: Any) -> list[Any]:
        for store in self.deadly:
            store(nothing, nothing)
        self.turn += 1
        with self.view.changed:
            self.view.said[self.turn, self.world.rank] = mine
            self.view.changed.notify_all()
        for store in self.deadly:
            store(nothing, nothing)
        keys = [(self.turn, host) for host in range(self.world.num_ranks)]
        with self.view.changed:
            while not all(key in self.view.said for key in keys):
                if self.patience.broken():
                    raise Broken("the view is over")
                self.view.changed.wait(0.02)
            return [self.view.said[key] for key in keys]

    def gather(
        self, mine: Bytes, kind: int = FACTS, stamp: int = 0, meanwhile: Meanwhile = nothing
    ) -> list[Bytes]:
        return self.swap(mine.copy())

    def exchange(self, counts: Sequence[int], owned: Sequence[Bounds]) -> list[list[Lanes]]:
        me = self.world.rank
        mine = [[_copy(stretch(s, b)) for s in self.slots[: counts[me]]] for b in owned]
        return [sent[me] for sent in self.swap(mine)]

    def share(self, lanes: Lanes, owned: Sequence[Bounds]) -> None:
        me = self.world.rank
        for host, sent in enumerate(self.swap(_copy(stretch(lanes, owned[me])))):
            if host != me:
                for dtype, lane in stretch(lanes, owned[host]).items():
                    lane[...] = sent[dtype]

    def recall(self, kind: int, stamp: int) -> list[Bytes]:
        return []

    def left_by(self, rank: int) -> Sequence[Lanes]:
        raise NotImplementedError

    def close(self) -> None: ...


def _copy(lanes: Lanes) -> Lanes:
    return {dtype: lane.clone() for dtype, lane in lanes.items()}


@dataclass(eq=False)
class Home:
    """The memory of a host, and who works there."""

    fd: int
    hands: "list[Hand]" = field(default_factory=list["Hand"])


class Hand:
    """One worker of a host, from the task to the strategy."""

    def __init__(self, kind: str, train: TrainConfig, home: Home) -> None:
        task, memory = make(kind), Memory(home.fd)
        assert task.loss is not None and task.optimizer is not None
        seed_everything(train.seed, "model")
        model = build_model(task.model).train()
        optimizer = build_optimizer(task, model)
        schedules = build_schedules(task, optimizer, model, seed=train.seed)
        self.loss, self.view, self.deadly = task.loss, View(0), list[Store]()
        self.replica = Replica(
            model,
            optimizer,
            schedules,
            memory,
            torch.device("cpu"),
            averages=averages(train, lambda step: step),
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
            moment=self._moment,
            auditor=NoAudit(),
        )

    def _moment(self, name: str) -> None:
        for store in self.deadly:
            store(nothing, nothing)

    def _meet(self, memory: Memory, sizes: Sizes) -> MeetMembers:
        room = SharedRoom(memory, sizes)

        def meet(place: Place) -> TwoLevel:
            world, view = place.world, self.view
            local = SharedMemory(world, room, place.generation, spin=False, patience=view)

            def between(patience: Patience) -> Between:
                return Between(world.among_hosts(), view, patience, self.deadly)

            return TwoLevel(world, local, between, patience=view)

        return meet

    def join(self, view: View, world: World, *, fresh: bool) -> None:
        self.view = view
        speeds = (1.0,) * world.num_ranks
        self.sync.regroup(Place(world, view.generation, speeds, fresh=0 if fresh else None))

    def step(self) -> None:
        cut = self.feed.cut(self.replica.step)
        indices = self.sync.indices(cut)
        self.sync.backward(cut, self.feed.micro_batches(cut, indices), self.loss)
        self.sync.step()
        self.replica.advance()

    def outcome(self) -> list[Tensor]:
        rates = [float(g["lr"]) for g in self.replica.optimizer.param_groups]
        committed = self.replica.buffers.committed
        lanes = [*self.replica.weights.values(), *committed.values(), torch.tensor(rates)]
        for average in self.replica.averages.values():
            lanes += [*average.lanes.values(), torch.tensor(average.count)]
        return [lane.clone() for lane in lanes]


class Run:
    """Hosts with so many workers each, from one view to the next."""

    def __init__(self, kind: str, train: TrainConfig, sizes: Sequence[int]) -> None:
        self.kind, self.train, self.stack = kind, train, ExitStack()
        self.generation = 0
        self.homes = [self.home(size) for size in sizes]

    def home(self, size: int) -> Home:
        made = Home(self.stack.enter_context(segment()))
        made.hands = [Hand(self.kind, self.train, made) for _ in range(size)]
        return made

    def replace(self, home: Home, local: int) -> None:
        home.hands[local] = Hand(self.kind, self.train, home)

    def together(
        self,
        what: Callable[[Hand], None],
        death: Death = NEVER,
        victim: Hand | None = None,
    ) -> bool:
        """All do this at once; whether somebody died of it. Those who cannot go on then stop."""
        hands = [hand for home in self.homes for hand in home.hands]
        failed: list[BaseException] = []
        victim = victim or hands[0]
        dying = f"hand-{hands.index(victim)}"

        def run(hand: Hand) -> None:
            try:
                what(hand)
            except (Died, Broken) as error:
                if isinstance(error, Died):
                    hand.view.end()
                failed.append(error)
            except BaseException as error:
                hand.view.end()
                failed.append(error)

        threads = [
            threading.Thread(target=run, args=(hand,), name=f"hand-{k}", daemon=True)
            for k, hand in enumerate(hands)
        ]

        def among() -> bool:
            return threading.current_thread().name.startswith(dying)

        with death.strikes(victim.sync.undo_log, among=among, told=victim.deadly):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive(), "it waits for ever"
        victim.deadly.clear()
        for error in failed:
            if not isinstance(error, Died | Broken):
                raise error
        died = any(isinstance(error, Died) for error in failed)
        assert died or not failed
        return died

    def view(
        self, death: Death = NEVER, victim: Hand | None = None, *, fresh: bool = False
    ) -> bool:
        self.generation += 1
        view, sizes = View(self.generation), tuple(len(home.hands) for home in self.homes)
        hands = [hand for home in self.homes for hand in home.hands]

        def join(hand: Hand) -> None:
            rank = hands.index(hand)
            hand.join(view, World(rank, len(hands), sizes), fresh=fresh)

        return self.together(join, death, victim)

    def outcomes(self) -> list[list[Tensor]]:
        hands = [hand for home in self.homes for hand in home.hands]
        steps = {hand.replica.step for hand in hands}
        assert len(steps) == 1, f"they are at different steps: {steps}"
        for _ in range(steps.pop(), LAST):
            self.together(Hand.step)
        return [hand.outcome() for hand in hands]

    def close(self) -> None:
        for home in self.homes:
            for hand in home.hands:
                hand.sync.close()
        self.stack.close()


def test_whoever_has_not_got_all_of_the_state_says_so() -> None:
    """The only holder dies while a newcomer takes it over: it has all of it, or says that it has
    nothing; and it never goes on with a part."""
    train = TrainConfig(batch=12, micro_batch=2, ema=0.9)
    outcomes: list[list[list[Tensor]]] = []
    refused = 0
    for nth in range(0, 200, 2):
        run = Run("odd", train, [1])
        run.view(fresh=True)
        run.together(Hand.step)
        run.homes.append(run.home(1))
        holder, newcomer = run.homes
        died = run.view(Death(nth), holder.hands[0])
        run.homes = [newcomer]
        (hand,) = newcomer.hands
        if hand.sync.held().goes_on:
            assert not run.view()
            outcomes.append(run.outcomes())
        else:
            refused += 1
            with pytest.raises(Broken, match="nobody holds"):
                hand.join(View(run.generation + 1), World(0, 1), fresh=False)
        run.close()
        if not died:
            break
    assert outcomes and refused
    for found in outcomes:
        assert all(map(torch.equal, found[0], outcomes[0][0]))


def test_a_view_is_left_when_its_courier_is_done() -> None:
    """It could write to what the next view uses; and nobody breaks a view that is left twice."""
    with segment() as fd:
        memory, world, view = Memory(fd), World(0, 3, (2, 1)), View(1)
        room = SharedRoom(memory, Sizes({torch.float32: 16}, 2, 64))
        local = SharedMemory(world, room, 1, spin=False, patience=view)
        levels = TwoLevel(
            world, local, lambda patience: Between(world, view, patience, []), patience=view
        )
        never = levels.send(lambda: levels.readiness().wait_until(5))
        more = levels.send(lambda: None)
        levels.close()
        assert never.done() and more.done()
        assert isinstance(never.exception(), Broken)


NEXT = ("the same hosts", "the other host", "its own host", "the other host and a new one")


def play(
    kind: str, train: TrainConfig, sizes: Sequence[int], local: int, nth: int, after: str
) -> list[list[Tensor]] | None:
    """Worker `local` of the second host dies at its n-th store; who puts things in order dies too,
    half as far. None: nobody died."""
    run = Run(kind, train, sizes)
    try:
        assert not run.view(fresh=True)
        for _ in range(AT):
            run.together(Hand.step)
        other, mine = run.homes
        if not run.together(Hand.step, Death(nth), mine.hands[local]):
            return None
        run.replace(mine, local)
        match after:
            case "the same hosts":
                run.homes = [mine, other] if nth % 2 else [other, mine]
            case "the other host":
                run.homes = [other]
            case "its own host":
                run.homes = [mine]
            case _:
                run.homes = [other, run.home(2)]
        last = run.homes[-1]
        if run.view(Death(nth // 2), last.hands[0]):
            run.replace(last, 0)
            assert not run.view()
        return run.outcomes()
    finally:
        run.close()


CASES = [
    ("cnn", (1, 1), 0, None),
    ("odd", (2, 2), 0, 0.1),
    ("odd", (1, 2), 1, None),
    ("own", (2, 1), 0, None),
    ("lstm", (1, 1), 0, 0.1),
]


@pytest.mark.parametrize(
    "every", [pytest.param(1, marks=pytest.mark.slow), pytest.param(11, id="some")]
)
@pytest.mark.parametrize(("kind", "sizes", "local", "clip"), CASES)
def test_a_step_that_was_broken_off_anywhere_ends_in_the_same_bits(
    kind: str, sizes: tuple[int, int], local: int, clip: float | None, every: int
) -> None:
    train = TrainConfig(batch=12, micro_batch=2, clip_norm=clip, ema=0.9)
    alone = Run(kind, train, [1])
    alone.view(fresh=True)
    (calm,) = alone.outcomes()
    alone.close()
    nth = 0
    for after in NEXT * 100:
        found = play(kind, train, sizes, local, nth, after)
        if found is None:
            assert nth >= 20
            return
        for outcome in found:
            for lane, expected in zip(outcome, calm, strict=True):
                assert torch.equal(lane, expected), f"after a death at store {nth}: {after}"
        nth += every
    raise AssertionError("it never gets through a step")
