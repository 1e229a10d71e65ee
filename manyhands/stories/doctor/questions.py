# SPDX-License-Identifier: Apache-2.0
"""What `manyhands doctor` asks the probes of hosts, and what they answer: a line of JSON each."""

import msgspec

from manyhands.values.hidden_secrets import discreet
from manyhands.values.printable_messages import printable_decoder


class Look(msgspec.Struct, frozen=True, tag=True):
    """What are you, and do you see this file?"""

    address: str
    """Where others reach this host."""
    marker: str


class HostFacts(msgspec.Struct, frozen=True, tag=True):
    host: str
    python: str
    torch: str
    manyhands: str
    cores: int
    memory_bytes: int
    shm_bytes: int
    """Of /dev/shm; -1: there is none."""
    open_files: int
    segments: str
    """Why memory cannot be shared between workers; empty: it can."""
    listener: str
    """Where it can be reached for now."""
    bound: str
    """Why no port could be bound there; empty: one was."""
    ports: str
    """From which the kernel takes one, as "32768-60999"."""
    loopback_s: float
    """There and back on this host; -1: not at all."""
    sees: bool
    """The file that was asked for."""
    free_bytes: int = -1
    """On the disk where that file is, or would be; -1: it does not see it."""
    zombies: bool = False
    """Processes that lose their parent are not reaped when they end."""
    kernels: str = ""
    """What bf16 has to be held to here, because better is announced and not allowed."""
    not_native: str = ""
    """Why nothing that is compiled is used."""


class Clock(msgspec.Struct, frozen=True, tag=True):
    """What time is it?"""


class Time(msgspec.Struct, frozen=True, tag=True):
    seconds: float
    """Since 1970."""


class Dial(msgspec.Struct, frozen=True, tag=True):
    """Can you connect to this address?"""

    address: str


class Dialled(msgspec.Struct, frozen=True, tag=True):
    error: str


class Meet(msgspec.Struct, frozen=True, tag=True):
    """Meet another host as workers do, and measure what is between you."""

    rank: int
    addresses: tuple[str, str]
    generation: int
    secret: bytes

    __repr__ = discreet


class Met(msgspec.Struct, frozen=True, tag=True):
    round_trip_s: float = 0.0
    bytes_per_s: float = 0.0
    error: str = ""


Question = Look | Clock | Dial | Meet
ProbeFinding = HostFacts | Time | Dialled | Met


class Asked(msgspec.Struct, frozen=True):
    """A question; its answer has the same number, for it may come after it was waited for."""

    number: int
    question: Question


class Answered(msgspec.Struct, frozen=True):
    number: int
    finding: ProbeFinding


encode = msgspec.json.Encoder().encode
decode_asked = msgspec.json.Decoder(Asked).decode
decode_answered = printable_decoder(msgspec.json.Decoder(Answered).decode)
