# SPDX-License-Identifier: Apache-2.0
"""A small number that stands for what a micro-batch of a stream holds.

Nobody can promise that a stream gives the same records when it is read again, so what it gave is
written down and compared (accounting/read_digests.py).

Invariant: equal values in equal nesting and order have the same digest, in whatever process, memory
and layout they lie. Of what is not data (an object without attributes of its own) its class alone
counts. 48 bits: they travel as a double beside the loss.
"""

from collections.abc import Mapping
from datetime import date, time, timedelta, tzinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any, cast
from uuid import UUID

import msgspec
import numpy as np
import torch
import xxhash

from manyhands.accounting.read_digests import DIGEST_BITS

_encode = msgspec.msgpack.Encoder().encode
_PLAIN = (bool, int, float, str, bytes, type(None))
_SAID = (date, time, timedelta, tzinfo, Decimal, Fraction, complex, range, bytearray, UUID)
"""What says all of itself when it is asked for its `repr`."""


def batch_digest(batch: Any) -> int:
    """Of a micro-batch; never 0, which stands for nothing known."""
    return _digest(batch, ()) >> (64 - DIGEST_BITS) or 1


Inside = tuple[int, ...]
"""The objects that a value lies in: one that lies in itself is not gone into again."""


def _digest(value: Any, inside: Inside) -> int:
    found = xxhash.xxh3_64()
    _feed(found, value, inside)
    return found.intdigest()


def _feed(found: "xxhash.xxh3_64", value: Any, inside: Inside) -> None:
    kind: type = type(value)
    if id(value) in inside:
        found.update(b"^%d" % inside.index(id(value)))
        return
    within = (*inside, id(value))
    if isinstance(value, torch.Tensor):
        _feed_tensor(found, value)
    elif isinstance(value, np.ndarray):
        _feed_array(found, cast("np.ndarray[Any, Any]", value), within)
    elif kind in _PLAIN:
        _feed_plain(found, value)
    elif isinstance(value, np.generic):
        found.update(value.dtype.str.encode() + value.tobytes())
    elif isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value)
        found.update(b"{%d" % len(pairs))
        for key, item in pairs.items():  # in their order: a loss may go by it
            _feed(found, key, within)
            _feed(found, item, within)
    elif isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        found.update(b"[%d" % len(items))
        for item in items:
            _feed(found, item, within)
    elif isinstance(value, set | frozenset):
        each = sorted(_digest(item, within) for item in cast("set[Any]", value))
        found.update(b"s" + np.array(each, np.uint64).tobytes())
    elif isinstance(value, _SAID):
        found.update(f"r{kind.__qualname__}{value!r}".encode(errors="backslashreplace"))
    else:
        found.update(b"o" + kind.__qualname__.encode())
        if not callable(value):
            _feed(found, _attributes(value), within)


def _attributes(value: Any) -> dict[str, Any]:
    """Of an object, those in slots too."""
    slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    found.pop("__weakref__", None)
    kept = found.pop("__dict__", getattr(value, "__dict__", None))
    return {**found, **kept} if isinstance(kept, dict) else found


def _feed_plain(found: "xxhash.xxh3_64", value: Any) -> None:
    try:
        found.update(_encode(value))
    except (OverflowError, UnicodeEncodeError):  # an integer of more than 64 bits; half a letter
        found.update(repr(value).encode(errors="backslashreplace"))


def _feed_tensor(found: "xxhash.xxh3_64", tensor: torch.Tensor) -> None:
    found.update(f"t{tensor.dtype}{tuple(tensor.shape)}".encode())
    try:
        array = tensor.numpy()  # what most are: it costs a microsecond
    except (RuntimeError, TypeError):
        array = _raw(tensor)
    found.update(cast("Any", np.ascontiguousarray(array)))


def _raw(tensor: torch.Tensor) -> "np.ndarray[Any, Any]":
    """Of those that numpy cannot look at: their numbers' bytes."""
    plain = tensor.detach()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    if plain.is_quantized:
        plain = plain.dequantize()
    plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy()


def _feed_array(found: "xxhash.xxh3_64", array: "np.ndarray[Any, Any]", inside: Inside) -> None:
    found.update(f"a{array.dtype.str}{array.shape}".encode())
    if isinstance(array, np.ma.MaskedArray):
        _feed_array(found, np.ma.getmaskarray(array), inside)
        array = np.ma.getdata(array)
    if array.dtype.hasobject:
        for item in array.ravel().tolist():
            _feed(found, item, inside)
    elif array.dtype.kind in "biufc":
        found.update(cast("Any", np.ascontiguousarray(array)))
    else:  # text and times, which have no buffer
        found.update(array.tobytes())
