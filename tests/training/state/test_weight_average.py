"""Averages that follow the native pass: torch's bits, and whole whoever is killed wherever."""

import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from manyhands.training.memory.memory import Memory
from manyhands.training.state import layout, weight_average
from manyhands.training.state.followers import lerp_fma
from manyhands.training.state.layout import rest_of
from manyhands.training.state.one_pass_update import Kernel, kernel_for
from manyhands.training.state.weight_average import AverageKind, WeightAverage, moving
from tests.support.hands import Hand, Make, segment
from tests.support.single_steps import single_steps

o: Any = torch.optim
F32 = torch.float32
NATIVE = lerp_fma() is not None and kernel_for(o.AdamW) is not None
needs_native = pytest.mark.skipif(not NATIVE, reason="no native code with torch's bits")

SIZES = (40, 9, 32)


class Some(nn.Module):
    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(1)
        self.all = nn.ParameterList(torch.randn(size, generator=made) for size in sizes)


def adamw(model: nn.Module) -> Any:
    return o.AdamW(model.parameters(), lr=0.01, fused=True)


def gradients(sizes: Sequence[int], step: int) -> list[Tensor | None]:
    made = torch.Generator().manual_seed(step)
    found = [torch.randn(size, generator=made) for size in sizes]
    return [None if (step + k) % 5 == 4 else g for k, g in enumerate(found)]


class Averaging:
    """A hand, and an average of its weights in the same memory."""

    def __init__(
        self, fd: int, kind: AverageKind, sizes: Sequence[int] = SIZES, make: Make = adamw
    ) -> None:
        self.hand, self.sizes = Hand(Some(sizes), make, fd), sizes
        # Far from what the hand has asked for.
        memory = Memory(fd)
        memory.taken = 1 << 38
        lanes = self.hand.layout, self.hand.weights
        self.average = WeightAverage(kind, *lanes, memory, protect=False)

    def begin(self) -> "Averaging":
        self.hand.begin()
        self.hand.join(0, 1, 0, fresh=True)
        self.average.reset(0)
        return self

    def step(self, step: int) -> bool:
        """As `Update` and `AllReduce` do it. Whether the average followed."""
        self.average.plan(step, skipped=False)
        followed = True
        for work in self.hand.optimizer.works:
            followers = self.average.follower(work.unit, step, 0)
            if not self._update(work, step, followers) or not followers:
                followed = False
                self.average.take(work.unit, step, 0)
        return followed

    def _update(self, work: Any, step: int, followers: Any) -> bool:
        found = gradients(self.sizes, step)
        lane = torch.zeros(self.hand.layout.trainable_sizes[F32])
        for piece, gradient in zip(self.hand.layout.trainable, found, strict=True):
            if gradient is not None:
                piece.view(lane)[...] = gradient
        unit = work.unit.bounds
        stretch = {F32: lane[slice(*unit[F32])]}
        touched = [gradient is not None for gradient in found]
        with torch.no_grad():
            return self.hand.optimizer.update(
                work, stretch, unit, touched, step, followers=followers
            )

    def mend(self, step: int) -> None:
        """As `Regrouping` does it, in whatever state this memory was left."""
        hand = self.hand
        hand.undo_log.repair()
        self.average.repair()
        low, high = hand.undo_log.steps()
        if low < high:
            (unit,) = hand.units_of(0, 1)
            rest = rest_of(hand.layout, unit, hand.undo_log.done, step)
            assert rest is not None
            hand.optimizer.regroup(0, [rest], step, own=True)
            self.step(step)
        self.average.finish(high, 0)

    @property
    def lane(self) -> Tensor:
        return self.average.lanes[F32]

    def by_name(self) -> list[Tensor]:
        return [piece.view(self.lane).clone() for piece in self.hand.layout.trainable]


def by_torch(steps: int, decay: float, sizes: Sequence[int]) -> list[Tensor]:
    model = Some(sizes)
    optimizer, average = adamw(model), list[Tensor]()
    for step in range(steps):
        for parameter, gradient in zip(model.parameters(), gradients(sizes, step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        now = [p.detach() for p in model.parameters()]
        if average:
            get_ema_multi_avg_fn(decay)(average, now, None)
        else:
            average = [p.clone() for p in now]
    return average


@pytest.mark.parametrize("decay", [0.999, 0.9, 0.5, 0.3])
@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_native), False])
def test_they_are_those_of_torch(
    decay: float, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(weight_average, "lerp_fma", lambda: None)
    sizes = (40_000, 9, 16_384, 70_013)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with segment() as fd:
            one = Averaging(fd, moving(decay), sizes).begin()
            followed = [one.step(step) for step in range(6)]
            found, expected = one.by_name(), by_torch(6, decay, sizes)
    finally:
        torch.set_num_threads(threads)
    assert followed == [False, *[native] * 5]  # torch takes the first step
    assert all(map(torch.equal, found, expected))
    assert one.average.count == 6


def left_after(steps: int) -> list[Tensor]:
    """Weights and average as they are when nobody dies."""
    with segment() as calm:
        known = Averaging(calm, moving(0.9)).begin()
        for k in range(steps):
            known.step(k)
        return [known.hand.weights[F32].clone(), known.lane.clone()]


@needs_native
@pytest.mark.timeout(120)
def test_between_any_two_instructions_it_can_be_brought_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child takes the step, one instruction after the other; wherever it has changed anything,
    another mends what it would have left behind."""
    monkeypatch.setattr(layout, "BLOCK", 32)
    step = 2
    after = left_after(step + 1)
    with segment() as fd:
        one = Averaging(fd, moving(0.9)).begin()
        for k in range(step):
            one.step(k)
        mender, log, average = Averaging(fd, moving(0.9)), one.hand.undo_log, one.average
        heads = getattr(average, "_heads")  # noqa: B009
        arrays = [log.done, getattr(log, "_heads"), heads]  # noqa: B009
        arrays += [getattr(average, name) for name in ("_words", "_planned")]
        tensors = [one.hand.weights[F32], *log.slots.values(), *log.scalars.values(), one.lane]
        tensors += log.aside(0, ("exp_avg", "exp_avg_sq"))[1]
        tensors += [getattr(average, "_aside")(0)[F32]]  # noqa: B009

        def act() -> None:
            call = Kernel.__call__

            def stopped(self: Kernel, *given: Any) -> None:
                os.kill(os.getpid(), signal.SIGSTOP)
                call(self, *given)

            Kernel.__call__ = stopped
            one.step(step)

        torn, mended, was = 0, 0, b""
        for _ in single_steps(act):
            watched = [t.numpy().tobytes() for t in tensors] + [a.tobytes() for a in arrays]
            if (now := b"".join(watched)) == was:
                continue
            was = now
            kept = [t.clone() for t in tensors], [a.copy() for a in arrays]
            torn += int(heads[0, 0] != 0)
            log.repair()  # then some blocks are through the step, or it is not begun
            if log.steps()[1] > step:
                mender.mend(step)
                mended += 1
                assert torch.equal(one.hand.weights[F32], after[0])
                assert torch.equal(one.lane, after[1])
                assert average.count == step + 1 and not heads[:, 0].any()
            for target, value in zip(tensors, kept[0], strict=True):
                target.copy_(value)
            for target, value in zip(arrays, kept[1], strict=True):
                target[...] = value
        assert torn > 20 and mended > torn
        assert torch.equal(one.lane, after[1])


@pytest.mark.parametrize("moment", range(2 * len(SIZES)))
def test_where_torch_takes_it_too(moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child dies before or after one of its calls of lerp."""
    monkeypatch.setattr(weight_average, "lerp_fma", lambda: None)
    step = 2
    after = left_after(step + 1)
    with segment() as fd:
        one = Averaging(fd, moving(0.9)).begin()
        for k in range(step):
            one.step(k)
        if (child := os.fork()) == 0:
            lerp, calls = Tensor.lerp_, iter(range(len(SIZES)))

            def dying(self: Tensor, *given: Any) -> Tensor:
                call = next(calls)
                if 2 * call == moment:
                    os._exit(7)
                lerp(self, *given)
                if 2 * call + 1 == moment:
                    os._exit(7)
                return self

            Tensor.lerp_ = dying
            one.step(step)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        mender = Averaging(fd, moving(0.9))
        assert mender.average.repair() == 1
        mender.mend(step)
        assert torch.equal(one.hand.weights[F32], after[0])
        assert torch.equal(one.lane, after[1]) and mender.average.count == step + 1
