# SPDX-License-Identifier: Apache-2.0
"""What the driver's join server and the daemons of other hosts say to each other. Plain typed data.

A host daemon says Here and is told to Load the task; it asks for its bytes piece by piece (Want,
Piece) and says that it is Settled. From then on it starts and kills workers as told, and passes on
how they ended. A Ping goes to every daemon a few times a second, and its Echo comes back:

- the driver gives up a host of which it has heard nothing for `lease_s`, no echo and nothing else;
- a host daemon that has heard nothing of the driver for as long kills its workers and forgets their
  memory, and then tries to join anew.

So a link that is cut, both ways or one way, is noticed on both of its sides, within a lease on the
side that hears nothing, and at the latest a lease after that on the other. Whatever is heard is a
sign of life: where a link is slow, echoes stand behind what else there is to say.
"""

from typing import Annotated

import msgspec

from manyhands.launch.engines.fork_agent import KillWorker, StartWorker, WorkerExit, WorkerStarted
from manyhands.values.bounded_types import Name, Natural, PathText, Seconds, Small, Words
from manyhands.values.printable_messages import printable_decoder

PING_S = 0.25
IDLE_S = 10.0
"""The lease as long as there is no run."""
PIECE_BYTES = 64 << 10
"""Of the task; how many are on their way at a time is for the host daemon to say (BulkWindow). A
link must carry one within a lease: 32 KB/s for the usual 2 s."""


class Here(msgspec.Struct, frozen=True, tag=True):
    """A host offers its hands."""

    name: Name
    slots: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    memory_bytes: Natural
    address: Name
    """Where its workers are reached by those of other hosts."""
    version: Name
    torch: Name
    python: Name
    messages: Name = ""
    """The digest of those that it knows (message_digest.py)."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """There is a run: this many bytes of task, and its folder on the driver's host."""

    run: PathText
    end: Natural
    marker: Annotated[str, msgspec.Meta(pattern=r"^\.here-[0-9a-f-]+\Z")]
    """A file of that folder; a host that finds it sees the same folder."""
    lease_s: Seconds
    files: Natural = 0
    """From there on, the bytes are files for the workers; 0: there are none."""


class Want(msgspec.Struct, frozen=True, tag=True):
    offset: Natural


class FilePiece(msgspec.Struct, frozen=True, tag=True):
    offset: Natural
    data: bytes


class Settled(msgspec.Struct, frozen=True, tag=True):
    """Workers can be started here."""

    fds: tuple[Small, Small]
    run: PathText
    """The run's folder, as this host sees it."""
    shares: bool
    """It is the driver's own folder."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    number: Natural


class Echo(msgspec.Struct, frozen=True, tag=True):
    number: Natural


class Logged(msgspec.Struct, frozen=True, tag=True):
    """More of a worker's log, from a host that does not see the run's folder."""

    worker: Small
    data: bytes


class LogTaken(msgspec.Struct, frozen=True, tag=True):
    """That was taken: more can come."""


class ProbeQuestion(msgspec.Struct, frozen=True, tag=True):
    """A question for a probe of that host, which is started by the first (probe.py)."""

    line: bytes


class ProbeAnswer(msgspec.Struct, frozen=True, tag=True):
    """A probe's answer."""

    line: bytes
    ended: Words = ""
    """There will be no answer: why."""


class Blank(msgspec.Struct, frozen=True, tag=True):
    """The run is over: forget everything about it."""


class Blanked(msgspec.Struct, frozen=True, tag=True):
    """It is forgotten, and its workers are dead."""


class HostDropped(msgspec.Struct, frozen=True, tag=True):
    """You were given up; come back as somebody new, after a while."""

    because: Words
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0


class TurnedAway(msgspec.Struct, frozen=True, tag=True):
    """This run does not want you: there is no use in coming back."""

    because: Words


class Going(msgspec.Struct, frozen=True, tag=True):
    """This host was told to go: its workers hand over, and none is to be started here."""


class Bye(msgspec.Struct, frozen=True, tag=True):
    """The driver goes, or the daemon does."""

    because: Words


FromHost = (
    Here
    | Want
    | Settled
    | Echo
    | WorkerStarted
    | WorkerExit
    | Logged
    | ProbeAnswer
    | Blanked
    | Going
    | Bye
)
ToHost = (
    Load
    | FilePiece
    | StartWorker
    | KillWorker
    | Ping
    | ProbeQuestion
    | LogTaken
    | Blank
    | HostDropped
    | TurnedAway
    | Bye
)

encode = msgspec.msgpack.Encoder().encode
decode_from_host = printable_decoder(msgspec.msgpack.Decoder(FromHost).decode)
decode_to_host = printable_decoder(msgspec.msgpack.Decoder(ToHost).decode)
