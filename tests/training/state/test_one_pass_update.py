"""The native step has torch's bits, and can be broken off at any store."""

import ctypes
import mmap
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from manyhands.training.compute.one_thread import one_thread
from manyhands.training.state import layout, one_pass_update
from manyhands.training.state.layout import block_of, rest_of
from manyhands.training.state.one_pass_update import Kernel, OnePassUpdate, kernel_for, numbers
from manyhands.values import native_library
from manyhands.values.errors import OptimizerRefused
from manyhands.values.native_library import why_not
from tests.support.hands import Hand, Make, plain_state, segment, state_of
from tests.support.single_steps import single_steps

o: Any = torch.optim
LACKS = why_not() or next(
    (f"{k.__name__} of this torch has other bits" for k in (o.AdamW, o.SGD) if not kernel_for(k)),
    None,
)
pytestmark = pytest.mark.skipif(LACKS is not None, reason=f"no native step: {LACKS}")

MAKERS: dict[str, Make] = {
    "adamw": lambda m: o.AdamW(m.parameters(), lr=0.01, fused=True),
    "adam": lambda m: o.Adam(m.parameters(), lr=0.01, weight_decay=0.1, fused=True),
    "sgd": lambda m: o.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: o.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
}
SIZES = (70_000, 9, 16_384, 40_001)
"""Five blocks, parts of blocks, one block."""


class Some(nn.Module):
    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(1)
        self.all = nn.ParameterList(torch.randn(size, generator=made) for size in sizes)


def gradients(sizes: Sequence[int], step: int) -> list[Tensor | None]:
    made = torch.Generator().manual_seed(step)
    found = [torch.randn(size, generator=made) for size in sizes]
    return [None if (step + k) % 5 == 4 else g for k, g in enumerate(found)]


# ---- torch's bits


@st.composite
def optimizers(draw: st.DrawFn) -> tuple[type, dict[str, Any]]:
    rate = draw(st.sampled_from([1e-4, 0.01, 0.3, 1.0]))
    decay = draw(st.sampled_from([0, 0.0, 0.01, 0.5]))
    beta = st.floats(0.51, 0.9999)
    if kind := draw(st.sampled_from([o.Adam, o.AdamW, None])):
        given: dict[str, Any] = {"betas": (draw(beta), draw(st.floats(0, 0.9999)))}
        given |= {"eps": draw(st.sampled_from([1e-8, 1e-3])), "fused": True}
        return kind, {"lr": rate, "weight_decay": decay, **given}
    momentum = draw(st.sampled_from([0, 0.5, 0.9]))
    given = {"momentum": momentum, "nesterov": momentum > 0 and draw(st.booleans())}
    if not given["nesterov"]:
        given["dampening"] = draw(st.sampled_from([0, 0.3]))
    return o.SGD, {"lr": rate, "weight_decay": decay, **given}


@given(optimizers(), st.lists(st.integers(1, 40_000), min_size=1, max_size=4))
@settings(max_examples=60)
def test_as_plain_torch_takes_them(made: tuple[type, dict[str, Any]], sizes: list[int]) -> None:
    kind, given = made

    def make(model: nn.Module) -> Any:
        return kind(model.parameters(), **given)

    plain = Some(sizes)
    theirs = make(plain)
    with segment() as fd, one_thread():
        hand = Hand(Some(sizes), make, fd)
        hand.begin()
        hand.join(0, 1, 0, fresh=True)
        for step in range(4):
            for parameter, gradient in zip(plain.parameters(), gradients(sizes, step), strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
            theirs.step()
            hand.step(gradients(sizes, step), step)
        assert all(w.one_pass is not None for w in hand.optimizer.works)
        for (name, parameter), piece in zip(
            plain.named_parameters(), hand.layout.trainable, strict=True
        ):
            found = piece.view(hand.weights[torch.float32])
            assert torch.equal(found.view(torch.int32), parameter.detach().view(torch.int32)), name
        assert state_of([hand]) == plain_state(theirs, dict(plain.named_parameters()))


@pytest.mark.parametrize("again", range(6))
def test_momentum_that_passes_through_nothing_is_not_forgotten(again: int) -> None:
    """Torch keeps what it has gathered while momentum is 0; so must whoever joins then."""
    momentum = [0.9, 0.9, 0.0, 0.0, 0.9, 0.9]

    def make(model: nn.Module) -> Any:
        return o.SGD(model.parameters(), lr=0.1, momentum=0.9)

    plain = Some([40_000, 9])
    theirs = make(plain)
    with segment() as fd, one_thread():
        hand = Hand(Some([40_000, 9]), make, fd)
        hand.begin()
        hand.join(0, 1, 0, fresh=True)
        for step, value in enumerate(momentum):
            for group in (*theirs.param_groups, *hand.users.param_groups):
                group["momentum"] = value
            made = torch.Generator().manual_seed(step)
            found = [torch.randn(size, generator=made) for size in (40_000, 9)]
            if step == again > 0:
                hand.join(0, 1, step)
            for parameter, gradient in zip(plain.parameters(), found, strict=True):
                parameter.grad = gradient.clone()
            theirs.step()
            hand.step(found, step)
        for parameter, piece in zip(plain.parameters(), hand.layout.trainable, strict=True):
            assert torch.equal(piece.view(hand.weights[torch.float32]), parameter.detach())


def test_momentum_that_begins_later_is_refused() -> None:
    with segment() as fd, one_thread():
        hand = Hand(Some([100]), MAKERS["sgd"], fd)
        hand.begin()
        hand.join(0, 1, 0, fresh=True)
        hand.step([torch.ones(100)], 0)
        hand.users.param_groups[0]["momentum"] = 0.9
        with pytest.raises(OptimizerRefused, match=r"begun to keep 'momentum_buffer'.*above 0"):
            hand.step([torch.ones(100)], 1)


def test_it_is_used_from_the_second_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one makes what the optimizer keeps: torch does that."""
    taken: list[bool] = []
    take = OnePassUpdate.take

    def watched(self: OnePassUpdate, *given: Any) -> bool:
        taken.append(take(self, *given))
        return taken[-1]

    monkeypatch.setattr(OnePassUpdate, "take", watched)
    with segment() as fd:
        hand = Hand(Some([100]), MAKERS["adamw"], fd)
        hand.begin()
        hand.join(0, 1, 0, fresh=True)
        for step in range(3):
            hand.step([torch.ones(100)], step)
    assert taken == [False, True, True]


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (o.AdamW, {}),
        (o.AdamW, {"fused": True, "amsgrad": True}),
        (o.AdamW, {"fused": True, "maximize": True}),
        (o.AdamW, {"fused": True, "lr": torch.tensor(0.1)}),
        (o.AdamW, {"fused": True, "betas": (0.3, 0.9)}),
        (o.SGD, {"fused": True}),
        (o.SGD, {"foreach": True}),
    ],
)
def test_other_ways_are_left_to_torch(kind: Any, given: dict[str, Any]) -> None:
    optimizer = kind([torch.zeros(3, requires_grad=True)], **given)
    assert numbers(kind, optimizer.param_groups[0]) is None


# ---- broken off

LIBC = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE


def dies_at(hand: Hand, address: int, step: int) -> bool:
    """Whether a process that takes a step dies when it writes to the page of this address."""
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        LIBC.mprotect(ctypes.c_void_p(address - address % PAGE), PAGE, mmap.PROT_READ)
        hand.update(0, gradients(SIZES, step), step)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGSEGV, signal.SIGSEGV | 0x80), status
    return status != 0


def places(hand: Hand) -> list[int]:
    """Pages of everything that a step writes to."""
    undo_log = hand.undo_log
    _, copies, _ = undo_log.aside(0, ("exp_avg", "exp_avg_sq", "momentum_buffer"))
    lanes = [hand.weights[torch.float32], *undo_log.slots.values()]
    found = [lane.data_ptr() + 4 * k for lane in lanes for k in range(0, len(lane), 11_000)]
    found += [copy.data_ptr() + 4 * k for copy in copies for k in (0, 5000, 16_000)]
    found += [lane.data_ptr() for lane in undo_log.scalars.values()]
    return [*found, undo_log.done.ctypes.data, getattr(undo_log, "_heads").ctypes.data]  # noqa: B009


def snapshot(hand: Hand) -> list[Tensor]:
    undo_log = hand.undo_log
    return [t.clone() for t in (hand.weights[torch.float32], *undo_log.slots.values())]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", MAKERS)
def test_whoever_dies_wherever_each_block_is_whole_and_the_rest_can_be_done(name: str) -> None:
    step = 3
    with segment() as fd:
        hand = Hand(Some(), MAKERS[name], fd)
        hand.begin()
        hand.join(0, 1, 0, fresh=True)
        for k in range(step):
            hand.step(gradients(SIZES, k), k)
        before, kept = snapshot(hand), state_of([hand])
        firsts = [block_of(hand.layout, span) for span in hand.optimizer.works[0].unit.spans]
        counted = [numbers.clone() for numbers in hand.undo_log.scalars.values()]
        for numbers in counted:  # those of other blocks mean nothing between steps
            numbers[[b for b in range(len(numbers)) if b not in firsts]] = -1.0
        hand.step(gradients(SIZES, step), step)
        after, then = snapshot(hand), state_of([hand])
        deaths = halves = 0

        def back() -> None:
            lanes = (hand.weights[torch.float32], *hand.undo_log.slots.values())
            for lane, value in zip(lanes, before, strict=True):
                lane.copy_(value)
            for numbers, value in zip(hand.undo_log.scalars.values(), counted, strict=True):
                numbers.copy_(value)
            hand.undo_log.done[:] = step

        for address in places(hand):
            back()
            assert state_of([hand]) == kept
            if not dies_at(hand, address, step):
                continue
            deaths += 1
            mender = Hand(Some(), MAKERS[name], fd)
            mender.undo_log.repair()
            low, high = mender.undo_log.steps()
            halves += low < high
            if low < high or low == step:
                (unit,) = mender.units_of(0, 1)
                rest = rest_of(mender.layout, unit, mender.undo_log.done, step)
                assert rest is not None
                mender.optimizer.regroup(0, [rest], step, own=True)
                mender.update(0, gradients(SIZES, step), step)
            assert mender.undo_log.steps() == (step + 1, step + 1)
            for found, wanted in zip(snapshot(mender), after, strict=True):
                assert torch.equal(found, wanted), address
            mender.join(0, 1, step + 1)
            assert state_of([mender]) == then
        assert deaths > 10 and halves > 3


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_between_any_two_instructions_each_block_is_before_or_after(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child takes the step, one instruction after the other; after each it is as if it were
    killed there."""
    monkeypatch.setattr(layout, "BLOCK", 32)
    sizes, step = (70, 9, 32), 2

    def taken(steps: int, fd: int) -> Hand:
        hand = Hand(Some(sizes), MAKERS[name], fd)
        hand.begin()
        hand.join(0, 1, 0, fresh=True)
        for k in range(steps):
            hand.step(gradients(sizes, k), k)
        return hand

    with segment() as calm, segment() as other, segment() as fd:
        before, after = snapshot(taken(step, calm)), snapshot(taken(step + 1, other))
        hand = taken(step, fd)
        undo_log = hand.undo_log
        spans = [
            (span, block_of(hand.layout, span), block_of(hand.layout, span, last=True))
            for span in hand.optimizer.works[0].unit.spans
        ]
        counted = [[float(lane[b]) for _, b, _ in spans] for lane in undo_log.scalars.values()]
        for lane in undo_log.scalars.values():
            lane[[b for b in range(len(lane)) if b not in [first for _, first, _ in spans]]] = -1.0
        heads, head = getattr(undo_log, "_heads"), getattr(undo_log, "_heads")[0]  # noqa: B009
        lanes = [hand.weights[torch.float32], *undo_log.slots.values()]

        def act() -> None:
            call = Kernel.__call__

            def stopped(self: Kernel, *given: Any) -> None:
                os.kill(os.getpid(), signal.SIGSTOP)
                call(self, *given)

            Kernel.__call__ = stopped
            hand.update(0, gradients(sizes, step), step)

        def looks_right() -> None:
            for span, first, last in spans:
                for block in range(first, last + 1):
                    done = int(undo_log.done[block])
                    a = span.start + (block - first) * 32
                    for lane, then, now in zip(lanes, before, after, strict=True):
                        expected = {step: then, step + 1: now}[done]
                        assert torch.equal(
                            lane[a : min(a + 32, span.stop)],
                            expected[a : min(a + 32, span.stop)],
                        )
                through = int(undo_log.done[first]) == step + 1
                for lane, numbers in zip(undo_log.scalars.values(), counted, strict=True):
                    count = numbers[[f for _, f, _ in spans].index(first)]
                    touched = gradients(sizes, step)[span.index] is not None
                    for block in range(first, last + 1) if through and touched else [first]:
                        ahead = int(undo_log.done[block]) > step and touched
                        assert float(lane[block]) == count + ahead

        seen, torn, was = 0, 0, b""
        numbers = list(undo_log.scalars.values())
        for _ in single_steps(act):
            now = b"".join(t.numpy().tobytes() for t in (*lanes, *numbers))
            now += head.tobytes() + undo_log.done.tobytes()
            if now == was:
                continue
            was, seen = now, seen + 1
            kept = [t.clone() for t in (*lanes, *numbers)], heads.copy(), undo_log.done.copy()
            torn += undo_log.repair()
            looks_right()
            for target, value in zip((*lanes, *numbers), kept[0], strict=True):
                target.copy_(value)
            heads[:], undo_log.done[:] = kept[1:]
        assert seen > 50 and torn > 20
        assert undo_log.steps() == (step + 1, step + 1)
        looks_right()


@pytest.mark.parametrize("name", MAKERS)
def test_without_it_the_bits_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Tensor] = []
    for leave_out in (False, True):
        if leave_out:
            monkeypatch.setattr(one_pass_update, "kernel_for", lambda kind: None)
        with segment() as fd:
            hand = Hand(Some(), MAKERS[name], fd)
            hand.begin()
            hand.join(0, 1, 0, fresh=True)
            for step in range(3):
                hand.step(gradients(SIZES, step), step)
            assert (hand.optimizer.works[0].one_pass is None) is leave_out
            found.append(hand.weights[torch.float32].clone())
    assert torch.equal(*found)


# ---- what was compiled


def test_why_it_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> str | None:
        why_not.cache_clear()
        return why_not()

    try:
        monkeypatch.setenv("MANYHANDS_NATIVE", "0")
        assert "MANYHANDS_NATIVE" in (told() or "")
        monkeypatch.delenv("MANYHANDS_NATIVE")
        monkeypatch.setattr(native_library, "VERSION", 0)
        assert "install manyhands again" in (told() or "")
        library = tmp_path / "native.so"
        monkeypatch.setattr(native_library, "_compiled", lambda: library)
        assert "no C compiler" in (told() or "")
        library.write_text("not a library")
        assert "cannot be loaded" in (told() or "")
    finally:
        why_not.cache_clear()
