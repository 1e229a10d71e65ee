# SPDX-License-Identifier: Apache-2.0
"""Text that others wrote, made fit for a terminal: it can neither command it nor pose as ours.

What a terminal would obey (escape codes, carriage returns), what turns the order of what is read
around (bidirectional overrides) and what cannot be written (lone surrogates) is shown as Python
would write it.
"""

import re

MOST_SHOWN = 20_000
"""Characters; of what is longer, the beginning and the end."""

NOT_SHOWN = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
"""In brackets: all of this, but tab and newline."""

_NOT_SHOWN = re.compile(f"[{NOT_SHOWN}]")


def escaped(text: str) -> str:
    """Lines stay lines."""
    return _NOT_SHOWN.sub(lambda odd: odd[0].encode("unicode_escape").decode(), text)


def one_line(text: str, most: int = 200) -> str:
    """For a name that somebody else gave."""
    return escaped(text[:most]).replace("\n", "\\n").replace("\t", "\\t")


def printable(text: str, most: int = MOST_SHOWN) -> str:
    """For somebody else's words among ours: only the first of its lines begins at the margin."""
    if len(text) > most:
        left_out = f" … ({len(text) - most:,} characters left out) … "
        text = text[: most // 2] + left_out + text[len(text) - most // 2 :]
    first, *others = escaped(text).expandtabs(4).split("\n")
    return "\n".join([first, *(line if line[:1] in ("", " ") else f"  {line}" for line in others)])
