# SPDX-License-Identifier: Apache-2.0
"""What a process that crashed said last: faulthandler's words, or those of the C++ runtime."""

import re

from manyhands.values.printable_text import printable
from manyhands.values.user_frames import is_library

_FATAL = "Fatal Python error: "
_STACK = re.compile(r"^(Current thread |Stack \().*most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')
_THROWN = re.compile(r"^  what\(\):\s*(?P<text>.+)$", re.MULTILINE)
MOST_FRAMES, MOST_SAID = 8, 2000


def explain_crash(log_tail: str) -> tuple[str, str]:
    """What it was, and where in the user's code, innermost first. Either may be empty."""
    before, found, after = log_tail.rpartition(_FATAL)
    thrown = _THROWN.findall(before if found else log_tail)
    what = thrown[-1].strip() if thrown else after.partition("\n")[0].strip() if found else ""
    frames = _frames(after) if found else []
    own = [f for f in frames if not is_library(f[0])] or frames[:3]
    where = "\n".join(f"  {file}:{line} in {name}" for file, line, name in own[:MOST_FRAMES])
    return printable(what, MOST_SAID), printable(where)


def _frames(text: str) -> list[tuple[str, str, str]]:
    """Of the thread that crashed."""
    frames: list[tuple[str, str, str]] = []
    inside = False
    for line in text.splitlines():
        if _STACK.match(line):
            inside = True
        elif inside and (frame := _FRAME.match(line)) is not None:
            frames.append((frame["file"], frame["line"], frame["name"]))
        elif inside and not line.startswith("  "):
            break
    return frames
