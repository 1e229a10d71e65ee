# SPDX-License-Identifier: Apache-2.0
"""A batch as bytes and a small header, and back: how it gets from one process to another as data.

Nothing is unpickled. Tensors and arrays are raw bytes; their nesting (dicts, lists, tuples, named
tuples, objects that are what their attributes are), numbers and strings are the header. A class is
named there and looked up among those that the receiver has seen in batches of its own (`types_in`):
nothing is imported, and nothing that is not data can arrive.

Invariant: what arrives has the bits, the shape, the strides and the alignment of what was sent, and
what was one tensor, or a view of the same memory, is so again. So a kernel cannot tell them apart.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

ALIGN = 64
"""Of torch's own memory; stretches lie so in the buffer, too."""

_PLAIN = (bool, int, float, str, bytes, type(None))
_ARRAY_KINDS = "biufcSUMm"


class NotData(Exception):
    """What a batch holds that cannot be sent as data."""


class UnknownClass(Exception):
    """A class that no batch of this process has had."""


class _Node(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class _Plain(_Node, tag="p", frozen=True):
    value: Any
    """Of one of the types in _PLAIN; msgpack keeps them apart."""


class _Seen(_Node, tag="s", frozen=True):
    """The same object as the n-th that was finished."""

    number: int


class _TensorAt(_Node, tag="t", frozen=True):
    stretch: int
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _ArrayAt(_Node, tag="a", frozen=True):
    stretch: int
    dtype: str
    shape: tuple[int, ...]
    order: str


class _NumpyScalar(_Node, tag="n", frozen=True):
    dtype: str
    raw: bytes


class _Row(_Node, tag="l", frozen=True):
    """kind: "list", "tuple", or the class of a named tuple."""

    kind: str
    items: "list[_AnyNode]"


class _Table(_Node, tag="d", frozen=True):
    """kind: "dict" or "OrderedDict"."""

    kind: str
    keys: "list[_AnyNode]"
    values: "list[_AnyNode]"


class _Instance(_Node, tag="o", frozen=True):
    kind: str
    state: "_AnyNode"


_AnyNode = _Plain | _Seen | _TensorAt | _ArrayAt | _NumpyScalar | _Row | _Table | _Instance


class _MemorySpan(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of one memory: where in the buffer, how many, and how far from a multiple of ALIGN."""

    at: int
    size: int
    phase: int


class _Header(msgspec.Struct, frozen=True, array_like=True):
    stretches: list[_MemorySpan]
    batch: _AnyNode


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Header).decode


class PackedBatch:
    """What is to be written: `header`, and `size` bytes by `write`."""

    def __init__(self, batch: Any) -> None:
        """Complains with `NotData` when a part of it is none."""
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []
        """All that an id stands for, so that no id stands for two."""
        self._spans: dict[int, tuple[int, int]] = {}
        """Memory of tensors → the bytes of it that are used, from and to."""
        self._places: dict[int, int] = {}
        """Memory of tensors → its stretch."""
        self._raw: list[Tensor | Any] = []
        for tensor in _tensors(batch, set()):
            self._span(tensor)
        node = self._node(batch)
        self.size, stretches = 0, list[_MemorySpan]()
        for raw in self._raw:
            at = -(-self.size // ALIGN) * ALIGN
            size, phase = (
                (raw.numel(), raw.data_ptr() % ALIGN) if isinstance(raw, Tensor) else (raw.size, 0)
            )
            stretches.append(_MemorySpan(at, size, phase if size else 0))
            self.size = at + size
        self._stretches = stretches
        try:
            self.header = _encode(_Header(stretches, node))
        except (OverflowError, UnicodeEncodeError) as error:
            raise NotData(f"a value that cannot be written down ({error})") from error

    def write(self, buffer: Any) -> None:
        """All bytes to the beginning of a writable buffer."""
        for stretch, raw in zip(self._stretches, self._raw, strict=True):
            if stretch.size:
                there = np.frombuffer(buffer, np.uint8, stretch.size, stretch.at)
                there[:] = raw.numpy() if isinstance(raw, Tensor) else raw

    def _span(self, tensor: Tensor) -> None:
        _refuse_special(tensor)
        memory = tensor.untyped_storage().data_ptr()
        start, stop = _span_of(tensor)
        if start != stop:
            before = self._spans.get(memory, (start, stop))
            self._spans[memory] = min(start, before[0]), max(stop, before[1])

    def _node(self, value: Any) -> _AnyNode:
        if type(value) in _PLAIN:
            return _Plain(value)
        if id(value) in self._seen:
            return _Seen(self._seen[id(value)])
        node = self._new_node(value)
        self._seen[id(value)] = len(self._kept)
        self._kept.append(value)
        return node

    def _new_node(self, value: Any) -> _AnyNode:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if type(value) is np.ndarray:
            return self._array(value)
        if isinstance(value, np.generic):
            if value.dtype.kind not in _ARRAY_KINDS:
                raise NotData(f"a number of dtype {value.dtype}")
            return _NumpyScalar(value.dtype.str, value.tobytes())
        kind = type(value)
        if kind in (dict, OrderedDict):
            keys, values = [self._node(k) for k in value], [self._node(v) for v in value.values()]
            return _Table(kind.__name__, keys, values)
        if kind in (list, tuple) or _is_named_tuple(kind):
            name = kind.__name__ if kind in (list, tuple) else class_name(kind)
            return _Row(name, [self._node(v) for v in value])
        return _Instance(class_name(kind), self._node(_state_of(value)))

    def _tensor(self, tensor: Tensor) -> _AnyNode:
        storage, item = tensor.untyped_storage(), tensor.dtype.itemsize
        memory, (start, stop) = storage.data_ptr(), _span_of(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if start == stop:
            return _TensorAt(-1, dtype, 0, tuple(tensor.shape), tensor.stride())
        first, last = self._spans[memory]
        if memory not in self._places:
            raw = torch.empty(0, dtype=torch.uint8).set_(storage, first, (last - first,), (1,))  # pyright: ignore
            self._places[memory] = len(self._raw)
            self._raw.append(raw)
        phase = (memory + first) % ALIGN
        if (start - first + phase) % item:
            raise NotData("a tensor that lies across its own elements' bounds")
        offset = (start - first + phase) // item
        place = self._places[memory]
        return _TensorAt(place, dtype, offset, tuple(tensor.shape), tensor.stride())

    def _array(self, array: "np.ndarray[Any, Any]") -> _AnyNode:
        flags = array.flags
        if array.dtype.kind not in _ARRAY_KINDS or array.dtype.fields is not None:
            raise NotData(f"a numpy array of dtype {array.dtype}")
        if not (flags.c_contiguous or flags.f_contiguous):
            raise NotData("a numpy array that is a view with gaps")
        order = "C" if flags.c_contiguous else "F"
        raw = np.frombuffer(array.tobytes(order), np.uint8)
        self._raw.append(raw)
        return _ArrayAt(len(self._raw) - 1, array.dtype.str, array.shape, order)


def unpack(header: bytes, buffer: Any, known: Mapping[str, type]) -> Any:
    """The batch that was packed, in memory of its own; `buffer` may be written to afterwards.

    `known`: classes by name. Complains with `UnknownClass` when one is needed that is not there.
    """
    whole = _decode(header)
    return _Unpacking(whole.stretches, buffer, known).value(whole.batch)


class _Unpacking:
    def __init__(
        self, stretches: list[_MemorySpan], buffer: Any, known: Mapping[str, type]
    ) -> None:
        self.stretches, self.buffer, self.known = stretches, buffer, known
        self.memories: dict[int, Tensor] = {}
        self.seen: list[Any] = []

    def value(self, node: _AnyNode) -> Any:
        if isinstance(node, _Plain):
            return node.value
        if isinstance(node, _Seen):
            return self.seen[node.number]
        found = self._new_value(node)
        self.seen.append(found)
        return found

    def _new_value(self, node: _AnyNode) -> Any:
        match node:
            case _TensorAt():
                return self._tensor(node)
            case _ArrayAt(stretch, dtype, shape, order):
                raw = self._bytes(stretch).copy()
                flat = raw.view(dtype) if len(raw) else np.empty(0, dtype)
                return flat.reshape(shape, order=cast("Any", order))
            case _NumpyScalar(dtype, raw):
                return np.frombuffer(raw, dtype)[0]
            case _Row(kind, items):
                values = [self.value(item) for item in items]
                if kind in ("list", "tuple"):
                    return values if kind == "list" else tuple(values)
                return self._class(kind)(*values)
            case _Table(kind, keys, values):
                names = [self.value(key) for key in keys]
                pairs = zip(names, [self.value(v) for v in values], strict=True)
                return OrderedDict(pairs) if kind == "OrderedDict" else dict(pairs)
            case _Instance(kind, state):
                found = self._class(kind)
                return _with_state(found.__new__(found), self.value(state))
            case _:
                raise AssertionError(node)

    def _class(self, name: str) -> Any:
        if name not in self.known:
            raise UnknownClass(name)
        return self.known[name]

    def _bytes(self, stretch: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        place = self.stretches[stretch]
        return np.frombuffer(self.buffer, np.uint8, place.size, place.at)

    def _tensor(self, node: _TensorAt) -> Tensor:
        dtype = getattr(torch, node.dtype)
        if node.stretch < 0:
            return torch.empty_strided(node.shape, node.strides, dtype=dtype)
        if node.stretch not in self.memories:
            place, raw = self.stretches[node.stretch], self._bytes(node.stretch)
            memory = torch.empty(place.phase % ALIGN + place.size, dtype=torch.uint8)
            memory.numpy()[place.phase % ALIGN :] = raw
            self.memories[node.stretch] = memory
        storage = self.memories[node.stretch].untyped_storage()
        empty = torch.empty(0, dtype=dtype)
        return empty.set_(storage, node.offset, node.shape, node.strides)  # pyright: ignore


def types_in(batch: Any) -> dict[str, type]:
    """Classes of a batch by name, for `unpack`; those whose name means two are left out."""
    found: dict[str, type | None] = {}
    for value in _walk(batch, set()):
        kind = type(value)
        if _is_named_tuple(kind) or _has_state(value):
            name = class_name(kind)
            found[name] = kind if found.get(name, kind) is kind else None
    return {name: kind for name, kind in found.items() if kind is not None}


def class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _walk(value: Any, been: set[int]) -> Iterator[Any]:
    """A value and all that is in it, once each."""
    if type(value) in _PLAIN or id(value) in been:
        return
    been.add(id(value))
    yield value
    kind = type(value)
    inside: Iterator[Any] = iter(())
    if kind in (dict, OrderedDict):
        inside = iter((*value.keys(), *value.values()))
    elif kind in (list, tuple) or _is_named_tuple(kind):
        inside = iter(value)
    elif _has_state(value):
        state = _state_of(value)
        inside = iter(state.values())
    for item in inside:
        yield from _walk(item, been)


def _tensors(batch: Any, been: set[int]) -> Iterator[Tensor]:
    return (value for value in _walk(batch, been) if isinstance(value, Tensor))


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and kind.__base__ is tuple


def _has_state(value: Any) -> bool:
    """Whether it is what its attributes are: pickle would store them, and nothing else."""
    kind = type(value)
    return (
        isinstance(getattr(value, "__dict__", None), dict)
        and not isinstance(value, Tensor | np.ndarray | type)
        and kind.__module__ != "builtins"
        and not callable(value)
        and kind.__reduce__ is object.__reduce__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__new__ is object.__new__
        and _own(kind, "__getstate__") == _own(kind, "__setstate__")
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
    )


def _own(kind: type, name: str) -> bool:
    return getattr(kind, name, None) not in (None, getattr(object, name, None))


def _state_of(value: Any) -> dict[str, Any]:
    if not _has_state(value):
        raise NotData(f"an object of class {class_name(type(value))}")
    state = value.__getstate__() if _own(type(value), "__getstate__") else vars(value)
    if type(state) is not dict:
        raise NotData(f"an object of class {class_name(type(value))}")
    return cast("dict[str, Any]", state)


def _with_state(made: Any, state: dict[str, Any]) -> Any:
    if _own(type(made), "__setstate__"):
        made.__setstate__(state)
    else:
        vars(made).update(state)
    return made


def _refuse_special(tensor: Tensor) -> None:
    if (
        type(tensor) is not Tensor
        or tensor.device.type != "cpu"
        or tensor.layout != torch.strided
        or tensor.requires_grad
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.is_inference()
        or tensor.is_nested
    ):
        kind = type(tensor).__name__
        raise NotData(
            f"a {kind} that is more than its numbers (on a device, sparse, quantized, made under "
            "inference_mode or with requires_grad)"
        )


def _span_of(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its memory between its first and its last element."""
    if tensor.numel() == 0:
        return 0, 0
    item, start = tensor.dtype.itemsize, int(tensor.storage_offset())
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * item, (start + last + 1) * item
