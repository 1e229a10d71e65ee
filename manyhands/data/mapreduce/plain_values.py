# SPDX-License-Identifier: Apache-2.0
"""Plain values: what may lie on disk between tasks, and the order of keys.

None, bool, int of 64 bits, float, str, bytes, and lists and dicts of these; a tuple is kept as a
list. Anything else is refused rather than silently turned into text.

`key_bytes` writes a key so that comparing bytes compares keys: None, False, True, numbers by size,
texts by code point, bytes, tuples item by item. Numbers that are equal are one key (2 is 2.0, and
comes back as 2); True is not 1.
"""

import math
import struct
from collections.abc import Callable
from typing import Any, cast

import msgspec
import numpy as np

_SCALARS = (type(None), bool, int, float, str, bytes)


class NotPlain(Exception):
    """A value of another kind; the text says which, and where in the record."""


def encode(value: Any) -> bytes:
    return _encoded(value, _is_plain, _msgpack.encode)


def encode_json(value: Any) -> bytes:
    """One line. JSON has neither bytes nor nan, and only text as keys: those are refused too."""
    return _encoded(value, _is_json, _json.encode)


decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder().decode


def _encoded(value: Any, fits: Callable[[Any], bool], encoder: Callable[[Any], bytes]) -> bytes:
    if not fits(value):
        raise NotPlain(_trouble(value, fits, ""))
    try:
        return encoder(value)
    except (OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise NotPlain(str(error)) from error


def _item(value: Any) -> Any:
    """For msgspec, which knows no numpy: the same number as Python's."""
    return value.item()


_msgpack = msgspec.msgpack.Encoder(enc_hook=_item)
_json = msgspec.json.Encoder(enc_hook=_item)


def _is_plain(value: Any) -> bool:
    if type(value) in _SCALARS:
        return True
    if isinstance(value, list | tuple):
        return all(map(_is_plain, cast(list[Any], value)))
    if isinstance(value, dict):
        items = cast(dict[Any, Any], value)
        return all(map(_is_plain, items)) and all(map(_is_plain, items.values()))
    return isinstance(value, np.generic) and type(value.item()) in _SCALARS


def _is_json(value: Any) -> bool:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list | tuple):
        return all(map(_is_json, cast(list[Any], value)))
    if isinstance(value, dict):
        items = cast(dict[Any, Any], value)
        return all(type(key) is str for key in items) and all(map(_is_json, items.values()))
    return type(value) in _SCALARS and type(value) is not bytes


def _trouble(value: Any, fits: Callable[[Any], bool], where: str) -> str:
    """What does not fit, and where in the record it is."""
    inside: list[tuple[Any, Any]] = []
    if isinstance(value, list | tuple):
        inside = list(enumerate(cast(list[Any], value)))
    elif isinstance(value, dict):
        inside = list(cast(dict[Any, Any], value).items())
    for key, item in inside:
        if not fits(item):
            return _trouble(item, fits, f"{where}[{key!r}]")
    at = f" at {where}" if where else ""
    if inside:
        return f"a key of a dict{at} that is not text"
    if isinstance(value, float):
        return f"{value}{at}"
    return f"a value of type {type(value).__qualname__}{at}"


# ---- keys

_NONE, _FALSE, _TRUE, _NUMBER, _STR, _BYTES, _TUPLE = (bytes([i]) for i in range(1, 8))
_END, _ESCAPED = b"\x00", b"\x00\xff"
_DOUBLE, _BITS = struct.Struct(">d"), struct.Struct(">Q")
_SIGN, _ALL = 1 << 63, (1 << 64) - 1


def key_bytes(key: Any) -> bytes:
    """Bytes that sort as keys do."""
    kind = type(key)
    if kind is str:
        try:
            return _STR + key.encode().replace(_END, _ESCAPED) + _END
        except UnicodeEncodeError as error:
            raise NotPlain(str(error)) from error
    if kind is int or kind is float:
        return _NUMBER + _number_bytes(key)
    if key is None:
        return _NONE
    if kind is bool:
        return _TRUE if key else _FALSE
    if kind is bytes:
        return _BYTES + key.replace(_END, _ESCAPED) + _END
    if isinstance(key, tuple):
        return _TUPLE + b"".join(map(key_bytes, cast(tuple[Any, ...], key))) + _END
    if isinstance(key, np.generic) and type(key.item()) in _SCALARS:
        return key_bytes(key.item())
    advice = "; give a tuple" if isinstance(key, list) else ""
    raise NotPlain(f"a value of type {type(key).__qualname__}{advice}")


def _number_bytes(x: int | float) -> bytes:
    """The nearest double, with its bits arranged to sort, and what an int is beyond it."""
    if isinstance(x, int) and not -_SIGN <= x <= _ALL:
        raise NotPlain("an int of more than 64 bits")
    if x != x:
        return b"\xff" * 8 + b"\x80\x00"  # nan, after infinity
    nearest = float(x) + 0.0  # -0.0 becomes 0.0
    rest = x - int(nearest) if isinstance(x, int) else 0
    (bits,) = _BITS.unpack(_DOUBLE.pack(nearest))
    bits = bits ^ _ALL if bits & _SIGN else bits | _SIGN
    return _BITS.pack(bits) + (rest + 0x8000).to_bytes(2, "big")


def key_value(data: bytes) -> Any:
    """The key that `key_bytes` wrote."""
    value, _ = _key_at(data, 0)
    return value


def _key_at(data: bytes, at: int) -> tuple[Any, int]:
    tag, at = data[at : at + 1], at + 1
    if tag == _NUMBER:
        return _number(data[at : at + 10]), at + 10
    if tag in (_STR, _BYTES):
        end = data.index(_END, at)
        while data[end : end + 2] == _ESCAPED:
            end = data.index(_END, end + 2)
        content = data[at:end].replace(_ESCAPED, _END)
        return (content.decode() if tag == _STR else content), end + 1
    if tag == _TUPLE:
        items: list[Any] = []
        while data[at : at + 1] != _END:
            item, at = _key_at(data, at)
            items.append(item)
        return tuple(items), at + 1
    return {_NONE: None, _FALSE: False, _TRUE: True}[tag], at


def _number(data: bytes) -> int | float:
    (bits,) = _BITS.unpack(data[:8])
    rest = int.from_bytes(data[8:], "big") - 0x8000
    if bits == _ALL:
        return math.nan
    (nearest,) = _DOUBLE.unpack(_BITS.pack(bits ^ _SIGN if bits & _SIGN else bits ^ _ALL))
    if nearest.is_integer() and -_SIGN <= int(nearest) + rest <= _ALL:
        return int(nearest) + rest
    return nearest
