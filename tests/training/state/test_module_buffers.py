"""Buffers of every kind: merged by the rules, or refused by name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from manyhands.training.memory.memory import Memory
from manyhands.training.state.layout import lay_out
from manyhands.training.state.module_buffers import ModuleBuffers, pack, packed_size, unpack
from manyhands.training.state.replica import Replica
from manyhands.values.errors import TaskError, UnevenBuffer

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NARROW = [torch.float8_e4m3fn, torch.float8_e5m2]
COMPLEX = [torch.complex64, torch.complex128]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
WIDE = [torch.uint16, torch.uint32, torch.uint64]
DTYPES = [*FLOATS, *NARROW, *COMPLEX, *WHOLE, *WIDE]

SHAPES: dict[str, Callable[[], Tensor]] = {
    "number": lambda: torch.zeros(()),
    "empty": lambda: torch.zeros(0),
    "empty matrix": lambda: torch.zeros(3, 0, 2),
    "vector": lambda: torch.zeros(5),
    "transposed": lambda: torch.zeros(2, 3).t(),
    "strided": lambda: torch.zeros(4, 6)[:, ::2],
    "expanded": lambda: torch.zeros(1, 3).expand(4, 3),
    "channels last": lambda: torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
}


def shaped(shape: str, dtype: torch.dtype, value: int) -> Tensor:
    """All elements alike, in the layout that `shape` names."""
    like = SHAPES[shape]()
    wide = torch.full((max(1, like.untyped_storage().nbytes() // 4),), value).to(dtype)
    return wide.as_strided(like.shape, like.stride(), like.storage_offset())


class Holder(nn.Module):
    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("kept", buffer)


def merged(model: Any, changes: list[Callable[[], None]], shares: list[float]) -> ModuleBuffers:
    """What the buffers are after a step of these micro-batches, through bytes as between hosts."""
    buffers = ModuleBuffers(model)
    rows, outcomes = [], []
    for change in changes:
        buffers.begin(alone=False)
        change()
        row = np.zeros(buffers.row_width)
        buffers.end(row)
        rows.append(row)
        outcomes.append(buffers.outcome())
    changed = buffers.changed(np.stack(rows))
    buffers.commit_norms(np.stack(rows))
    if changed:
        data, size = pack(outcomes, changed), packed_size(changed)
        told = [unpack(data[k * size : (k + 1) * size], changed) for k in range(len(changes))]
        buffers.commit_others(0, told, shares)
    buffers.show()
    return buffers


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_value_on_which_all_agree_is_taken(dtype: torch.dtype, shape: str) -> None:
    model: Any = Holder(shaped(shape, dtype, 0))

    def change() -> None:
        model.kept = shaped(shape, dtype, 1)

    merged(model, [change, change, change], [0.5, 0.25, 0.25])
    assert model.kept.dtype == dtype and model.kept.shape == SHAPES[shape]().shape
    assert torch.equal(
        model.kept.to(torch.complex128), shaped(shape, dtype, 1).to(torch.complex128)
    )


@pytest.mark.parametrize("dtype", [*FLOATS, *NARROW, *COMPLEX], ids=str)
def test_floats_that_differ_become_the_weighted_mean(dtype: torch.dtype) -> None:
    model: Any = Holder(torch.zeros(3).to(dtype))

    def change(value: int) -> Callable[[], None]:
        return lambda: setattr(model, "kept", torch.full((3,), value).to(dtype))

    merged(model, [change(1), change(2), change(4)], [0.5, 0.25, 0.25])
    assert torch.equal(model.kept, torch.full((3,), 2).to(dtype))


@pytest.mark.parametrize("dtype", [*WHOLE, *WIDE], ids=str)
def test_whole_numbers_that_differ_are_named(dtype: torch.dtype) -> None:
    model: Any = Holder(torch.zeros(3).to(dtype))

    def change(value: int) -> Callable[[], None]:
        return lambda: setattr(model, "kept", torch.full((3,), value).to(dtype))

    with pytest.raises(UnevenBuffer, match="'kept'"):
        merged(model, [change(0), change(1)], [0.5, 0.5])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
def test_batch_norm_of_every_precision(dtype: torch.dtype, momentum: float | None) -> None:
    """As one process would have: the micro-batches one after the other."""
    torch.manual_seed(0)
    model, plain = (nn.BatchNorm1d(4, momentum=momentum).to(dtype) for _ in range(2))
    batches = [torch.randn(6, 4).to(dtype) for _ in range(3)]
    for batch in batches:
        plain(batch)
    merged(model, [lambda b=b: model(b) for b in batches], [1 / 3] * 3)
    assert model.num_batches_tracked == plain.num_batches_tracked == 3
    rough = 0.05 if dtype in (torch.float16, torch.bfloat16) else 1e-6
    for name in ("running_mean", "running_var"):
        found, right = getattr(model, name), getattr(plain, name)
        assert found.dtype == dtype
        assert torch.allclose(found.double(), right.double(), atol=rough), name


def test_a_buffer_under_two_names_stays_one() -> None:
    model: Any = nn.ModuleList([Holder(torch.zeros(2)), Holder(torch.zeros(2))])
    model[1].register_buffer("kept", model[0].kept)
    buffers = merged(model, [lambda: model[0].kept.add_(1)] * 2, [0.5, 0.5])
    assert len(buffers.layout.pieces) == 1
    assert model[1].kept is model[0].kept and model[1].kept.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (slice(0, 4), slice(2, 6), True),
        (slice(0, 3), slice(3, 6), False),
        (slice(0, 6, 2), slice(1, 6, 2), False),
        (slice(0, 6, 2), slice(2, 6, 2), True),
        (slice(0, 6), slice(0, 6, 3), True),
    ],
)
def test_views_that_share_memory_are_found(first: slice, second: slice, shared: bool) -> None:
    base = torch.zeros(6)
    named = [("a.one", base[first], False), ("b.two", base[second], False)]
    if not shared:
        lay_out(named)
        return
    with pytest.raises(TaskError, match="share memory but are different objects"):
        lay_out(named)


def test_a_view_that_repeats_another_buffer_is_found() -> None:
    base = torch.zeros(1, 3)
    with pytest.raises(TaskError, match="share memory"):
        lay_out([("base", base, False), ("wide", base.expand(4, 3), False)])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.data())
def test_whether_views_share_memory_is_decided_exactly(
    sizes: list[int], data: st.DataObject
) -> None:
    base, places = torch.zeros(64), torch.arange(64)
    views = []
    for _ in range(2):
        stride = [data.draw(st.integers(0, 6)) for _ in sizes]
        start = data.draw(st.integers(0, 4))
        if start + sum(max(0, n - 1) * s for n, s in zip(sizes, stride, strict=True)) >= 64:
            return
        views.append((sizes, stride, start))
    mine, theirs = (set(places.as_strided(*v).reshape(-1).tolist()) for v in views)
    named = [(name, base.as_strided(*v), False) for name, v in zip("ab", views, strict=True)]
    if mine & theirs:
        with pytest.raises(TaskError, match="share memory"):
            lay_out(named)
    else:
        lay_out(named)


# ---- what has no place


class Late(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, nn.Linear(2, 2)
        self.inner.register_buffer("cache", None if how == "from none" else torch.zeros(2))

    def forward(self) -> None:
        match self.how:
            case "from none":
                self.inner.cache = torch.ones(2)
            case "new":
                self.inner.register_buffer("another", torch.ones(2))
            case "longer":
                self.inner.cache = torch.ones(3)
            case "finer":
                self.inner.cache = torch.ones(2, dtype=torch.float64)
            case "to none":
                self.inner.cache = None
            case _:
                del self.inner.cache


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("from none", r"'inner\.cache' was nothing .* is float32\[2\] now"),
        ("new", r"'inner\.another' was nothing .* is float32\[2\] now"),
        ("longer", r"'inner\.cache' was float32\[2\] .* is float32\[3\] now"),
        ("finer", r"'inner\.cache' was float32\[2\] .* is float64\[2\] now"),
        ("to none", r"'inner\.cache' was float32\[2\] .* is nothing now"),
        ("gone", r"'inner\.cache' was float32\[2\] .* is nothing now"),
    ],
)
def test_buffers_that_come_later_or_become_others_are_named(how: str, says: str) -> None:
    model = Late(how)
    with pytest.raises(TaskError, match=says):
        merged(model, [model], [1.0])


def test_a_lazy_buffer_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TaskError, match=r"buffer '1\.running_mean' has no shape yet"):
        Replica(model, optimizer, None, Memory(None), torch.device("cpu"))
