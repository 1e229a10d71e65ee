# SPDX-License-Identifier: Apache-2.0
"""Messages that fit a terminal: long lines are broken between words, and words never are.

A word may stand out over the edge: names of files are worth more whole than a straight margin.
"""

import textwrap

WIDTH = 100


def wrapped(text: str, *, first: int = 0) -> str:
    """The text in lines of at most WIDTH columns, `first` of which are taken on the first one. What
    a line is indented by, what it is continued in is indented by too, and a little more."""
    lines = text.split("\n")
    return "\n".join(_wrapped(line, 0 if i else first) for i, line in enumerate(lines))


def _wrapped(line: str, taken: int) -> str:
    if taken + len(line) <= WIDTH:
        return line
    indent = line[: len(line) - len(line.lstrip(" "))]
    made = textwrap.fill(
        line[len(indent) :],
        WIDTH,
        initial_indent=" " * taken + indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
        expand_tabs=False,
        replace_whitespace=False,
    )
    return made[taken:]
