# SPDX-License-Identifier: Apache-2.0
"""Text in messages of other processes, made fit to be shown where it is decoded.

Names are bounded and printable, or the message is refused. All other text that people may get to
see (`Words`, and whatever a worker calls its scores and hyper-parameters) is escaped and shortened
here, so nobody who writes it to a terminal or a file need think of it.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

from manyhands.values.bounded_types import Words
from manyhands.values.printable_text import one_line, printable

T = TypeVar("T")


def printable_decoder(
    decode: Callable[[bytes | bytearray], T],
) -> Callable[[bytes | bytearray], T]:
    return lambda data: _shown(decode(data))


@functools.cache
def text_fields(cls: type[msgspec.Struct]) -> tuple[str, ...]:
    """Those that hold text which is neither a name nor a path."""
    hints = get_type_hints(cls, include_extras=True)
    return tuple(field for field in cls.__struct_fields__ if _holds_text(hints[field]))


def _holds_text(hint: Any) -> bool:
    if hint in (str, Any, Words):
        return True
    if isinstance(hint, type) and get_origin(hint) is None:
        return issubclass(hint, msgspec.Struct) and bool(text_fields(hint))
    if hasattr(hint, "__metadata__"):  # other annotated text is bounded by itself
        return get_args(hint)[0] is not str and _holds_text(get_args(hint)[0])
    return any(_holds_text(inner) for inner in get_args(hint))


def _shown(value: T) -> T:
    """The same, with text that can be shown."""
    if isinstance(value, str):
        return cast(T, printable(value))
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in text_fields(type(value))}
        changes = {name: new for name, old in fields.items() if (new := _shown(old)) is not old}
        return msgspec.structs.replace(value, **changes) if changes else value
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return cast(T, {one_line(k) if isinstance(k, str) else k: _shown(v) for k, v in items})
    if isinstance(value, list):
        return cast(T, [_shown(item) for item in cast("list[Any]", value)])
    return value
