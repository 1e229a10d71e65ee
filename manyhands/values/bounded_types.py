# SPDX-License-Identifier: Apache-2.0
"""Types of what comes from other processes: checked where it is decoded, so nothing that is beyond
all sense gets any further."""

from itertools import islice
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from manyhands.values.printable_text import NOT_SHOWN

Natural = Annotated[int, Meta(ge=0, lt=1 << 53)]
Small = Annotated[int, Meta(ge=0, lt=1 << 31)]
"""Of a worker, a process, a rank."""
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Rate = Annotated[float, Meta(ge=0, le=1e18)]
Name = Annotated[str, Meta(max_length=4096, pattern=rf"^[^{NOT_SHOWN}\t\n]*\Z")]
"""Of a host, a round, a file: something that is printed, and looked up."""
PathText = Annotated[str, Meta(max_length=4096)]
"""Of a folder or file of the user's, whatever it is called."""
Words = Annotated[str, Meta(max_length=1 << 17)]
"""For people; made printable where they are decoded (printable_messages.py)."""
ProcessOutput = Annotated[str, Meta(max_length=1 << 15)]
"""What a process wrote, as it is; made printable where something of it is shown."""

SOME, MANY, FEW = 1 << 12, 1 << 16, 64
T = TypeVar("T")
Some = Annotated[list[T], Meta(max_length=SOME)]
"""Hosts of a run, groups of an optimizer, files of a step, steps since the last beat."""
Many = Annotated[list[T], Meta(max_length=MANY)]
"""Records of a batch."""
Table = Annotated[dict[Name, T], Meta(max_length=SOME)]
Scores = Annotated[dict[Words, float], Meta(max_length=MANY)]
"""By whatever the user calls them."""
Few = Annotated[dict[Words, T], Meta(max_length=FEW)]
PlainValue = bool | int | float | Words | None
Hyperparameters = Few[PlainValue | Annotated[list[PlainValue], Meta(max_length=FEW)]]
"""Of a group of parameters."""


def fitting(groups: list[dict[str, Any]]) -> list[Hyperparameters]:
    """As much of an optimizer's groups as is sent: what is left out, nobody can set or see."""
    return [
        dict(islice(((key, value) for key, value in group.items() if _fits(value)), FEW))
        for group in groups[:SOME]
    ]


def _fits(value: Any) -> bool:
    try:
        msgspec.convert({"": value}, Hyperparameters)
    except msgspec.ValidationError:
        return False
    return True


NotUnderstood = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""What decoders raise, whatever they are given."""
