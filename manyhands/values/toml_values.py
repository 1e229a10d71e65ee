# SPDX-License-Identifier: Apache-2.0
"""Single values as TOML writes them, on command lines and in files; and words that were meant."""

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

import msgspec


def read_value(text: str) -> Any:
    """A --set value: TOML where it parses (3, 0.5, true, "x"), otherwise the string itself."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def written_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | PurePath):
        return msgspec.json.encode(str(value)).decode()  # a JSON string is a TOML basic string
    if isinstance(value, list | tuple):
        items: Iterable[Any] = value
        return f"[{', '.join(written_value(item) for item in items)}]"
    return repr(value)


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about a word that is not known: the one that was meant, or all."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f". There are: {', '.join(known)}."


_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "a table",
}


def in_plain_words(expected: str) -> str:
    """msgspec's "Expected `int | null`", without the names of types."""
    if not expected.startswith("Expected `"):
        return expected
    types = expected.removeprefix("Expected `").rstrip("`").split(" | ")
    return f"expected {' or '.join(_TYPES.get(t, t) for t in types if t != 'null')}"
