"""A batch is the same after it was bytes: its bits, strides, alignment, shared memory, classes."""

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manyhands.data.reading.batch_bytes import (
    ALIGN,
    NotData,
    PackedBatch,
    UnknownClass,
    types_in,
    unpack,
)


def sent(batch: Any, known: dict[str, type] | None = None) -> Any:
    packed = PackedBatch(batch)
    buffer = bytearray(packed.size + 7)
    packed.write(buffer)
    found = unpack(packed.header, buffer, types_in(batch) if known is None else known)
    buffer[:] = b"\xff" * len(buffer)  # what arrived does not lie there
    return found


def alike(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert a.data_ptr() % ALIGN == b.data_ptr() % ALIGN or a.numel() == 0
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        assert torch.equal(*raw)
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
        assert a.flags.f_contiguous == b.flags.f_contiguous
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            alike(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            alike(x, y)
    elif isinstance(a, float):
        assert np.float64(a).tobytes() == np.float64(b).tobytes()
    else:
        assert a == b


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Also views: transposed, with gaps, expanded, beginning anywhere."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    whole = torch.randint(0, 2, [n + 2 for n in shape]).to(draw(st.sampled_from(DTYPES)))
    found = whole[tuple(slice(draw(st.integers(0, 2)), None) for _ in shape)]
    if found.dim() and draw(st.booleans()):
        found = found[::2]
    if found.dim() > 1 and draw(st.booleans()):
        found = found.transpose(0, 1)
    if draw(st.booleans()):
        found = found.unsqueeze(0).expand(3, *found.shape)
    return found


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.binary(),
)
leaves = st.one_of(plain, tensors())
batches = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text("abc"), st.integers(0, 9)), inner, max_size=4),
    ),
    max_leaves=8,
)


@given(batches)
def test_a_batch_is_the_same_afterwards(batch: Any) -> None:
    alike(batch, sent(batch))


def test_arrays_and_their_scalars() -> None:
    batch = {
        "c": np.arange(6.0).reshape(2, 3),
        "f": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        "words": np.array(["a", "bcd"]),
        "none": np.empty((0, 4), np.float32),
        "one": np.float32(0.1),
        "day": np.datetime64("2026-11-17"),
    }
    found = sent(batch)
    alike(batch, found)
    found["c"] += 1  # it is nobody else's


def test_what_shares_memory_shares_it_again() -> None:
    whole = torch.arange(12.0)
    rows = [whole[:5], whole[3:8], whole]
    found = sent({"rows": rows, "same": rows[0], "list": rows})
    assert found["same"] is found["rows"][0] and found["list"] is found["rows"]
    found["rows"][0][4] = -1.0
    assert found["rows"][1][1] == -1.0 and found["rows"][2][4] == -1.0


def test_of_a_large_memory_only_what_is_used_is_sent() -> None:
    packed = PackedBatch({"x": torch.zeros(1 << 20)[100:110]})
    assert packed.size == 40


class Pair(NamedTuple):
    x: Tensor
    y: int


@dataclasses.dataclass
class Graph:
    nodes: Tensor
    name: str = "g"


class Encoding(collections.UserDict[str, Tensor]):
    """As that of Hugging Face: a dict with something beside it, and a state of its own."""

    def __init__(self, data: dict[str, Tensor], kept: int) -> None:
        super().__init__(data)
        self.kept = kept

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.data, "kept": self.kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.data, self.kept = state["data"], state["kept"]


def test_classes_are_those_that_the_receiver_has_seen() -> None:
    batch = [Pair(torch.ones(2), 3), Graph(torch.zeros(1)), Encoding({"t": torch.ones(1)}, 7)]
    found = sent(batch)
    assert type(found[0]) is Pair and found[0].y == 3
    assert type(found[1]) is Graph and found[1].name == "g"
    assert type(found[2]) is Encoding and found[2].kept == 7 and found[2]["t"] == 1
    with pytest.raises(UnknownClass, match="Pair"):
        sent(batch, known={})


class Odd:
    __slots__ = ("x",)


@pytest.mark.parametrize(
    "what",
    [
        lambda: None,
        Odd(),
        {1, 2},
        torch.ones(2, requires_grad=True),
        torch.eye(2).to_sparse(),
        torch.nn.Parameter(torch.ones(1)),
        np.array([object()]),
        2**70,
        "\ud800",
        torch.complex(torch.ones(1), torch.ones(1)).conj(),
        type,
    ],
)
def test_what_is_not_data_is_named(what: Any) -> None:
    with pytest.raises(NotData):
        PackedBatch({"x": torch.ones(1), "it": what})
