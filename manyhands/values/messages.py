# SPDX-License-Identifier: Apache-2.0
"""What supervisor and workers say to each other. Plain typed data; every message has the generation
of a view (view.py).

A worker speaks: Hello → (View) → Begun → Beat*, Part*, Scored*, Written* → Ready → (View) ... and
at the end Left, or Trouble. Its line stamps the generation of its view on everything it sends.

The supervisor answers with Views, a Reply to each round of Parts, and two ways to make a new view
possible: Halt (leave the loop after the next step that all agree on: nothing is computed in vain)
and Break (stop waiting for somebody who is gone). SaveNow is agreed on as a Halt is; both are
commands, numbered in one sequence.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from manyhands.values.bounded_types import (
    Few,
    Hyperparameters,
    Many,
    Name,
    Natural,
    PathText,
    Rate,
    Scores,
    Seconds,
    Small,
    Some,
    Table,
    Words,
)
from manyhands.values.kernels import Kernels
from manyhands.values.printable_messages import printable_decoder
from manyhands.values.server_load import ServerLoad
from manyhands.values.view import View
from manyhands.values.work_in_hand import WorkInHand


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    generation: Natural = 0


class Built(msgspec.Struct, frozen=True):
    """What a worker's model looks like."""

    layout: str
    marks: Annotated[dict[str, int], Meta(max_length=1 << 18)]
    data: str
    kernels: Table[Name]
    """By which they were built: other ones draw other first weights from the same seed."""


# ---- from a worker


class Hello(Message, frozen=True):
    """Everything is built; what it looks like is for the others to compare."""

    worker: Small
    pid: Small
    host: Name
    built: bytes
    peer_address: Name = ""
    """Where workers of other hosts reach it."""
    cache: Name = ""
    """Which folder of shards it serves to other hosts, if it does, ..."""
    shards: Name = ""
    """... and where."""
    kernels: Kernels | None = None
    """What it computes with."""
    most_servers: Natural = 0
    """More of them would have nothing to update; 0: any number, one has all of it."""


class Begun(Message, frozen=True):
    """From the leader: the view is in force, after this many steps."""

    worker: Small
    step: Natural
    groups: Some[Hyperparameters]
    """The optimizer's hyper-parameters, as far as they are plain and fit (`fitting`)."""
    schedule: Some[Words] = []
    """The kinds of schedule that act on them."""


class Ready(Message, frozen=True):
    """Out of the loop, between steps or because others are gone; a new view can begin."""

    worker: Small
    step: Natural
    broken: bool
    """It could not go on by itself."""
    held: bool = False
    """The state is whole in its memory: there is something to go on from."""
    differs: tuple[Natural, Natural] | None = None
    """Workers do not agree on this micro-batch (step, index)."""
    lost: Some[Small] = []
    """Hosts, by their number in the view, to which its connection failed."""


class Leaving(Message, frozen=True):
    """This worker was told to go (SIGTERM) and asks to hand over."""

    worker: Small


class StepRecord(msgspec.Struct, frozen=True):
    """A step as the leader logs it."""

    step: Natural
    epoch: float
    loss: float
    lr: float
    records: Natural
    numbers: Few[float] = {}


class Measured(Message, frozen=True):
    """From those who speak for their hosts: how far the others are."""

    worker: Small
    links: Some[tuple[Small, Seconds, Annotated[float, Meta(gt=0, le=1e18)]]]
    """Host by its number in the view, seconds there and back, bytes per second each way."""
    gradient_bytes: Natural


class Beat(Message, frozen=True):
    """Sent a few times a second from a thread of the worker."""

    worker: Small
    step: Natural
    samples_per_s: Rate
    steps: Some[StepRecord] = []
    """From the leader: steps since its last beat that are to be logged."""
    losses: Some[tuple[Natural, float]] = []
    """From the leader: of every step since its last beat."""
    reads: Some[tuple[Natural, Natural]] = []
    """From the leader: what a stream gave for those steps, as digests."""
    loss: float | None = None
    records: Natural = 0
    progress: Natural = 0
    """Grows with everything this worker gets done."""
    waiting: bool = False
    """For others; then it is not its own fault that nothing is done."""
    micro_batch_s: Seconds = 0.0
    """How long a micro-batch took lately; 0: not known yet."""
    work: WorkInHand = WorkInHand()
    """What it is at, ..."""
    first: bool = True
    """... for the first time: it may have to compile, or to load what it needs."""
    where: Words = ""
    """When it has been at it for a while: where in the user's code."""
    load: ServerLoad | None = None
    """From a server: what it did since its last beat."""


class RoundPart(Message, frozen=True):
    """This worker's share of a round called `round`; all shares go to the leader, or to all."""

    worker: Small
    round: Name
    payload: bytes
    to_all: bool = False


class Scored(Message, frozen=True):
    """From the leader: held-out scores. Every worker then waits for Reply `round`."""

    worker: Small
    step: Natural
    round: Name
    scores: Scores
    heard: bool = False
    """Schedules wait for the score that decides (evaluate.by)."""


class SavedFile(msgspec.Struct, frozen=True):
    name: Name
    size_bytes: Natural
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Written(Message, frozen=True):
    """This worker has written its files of a step. `attempt`: the generation that saved it."""

    worker: Small
    step: Natural
    attempt: Natural
    files: Some[SavedFile]
    blocked_s: Seconds
    writing_s: Seconds = 0.0
    """How long it took to write them, while training went on."""


class Fragment(Message, frozen=True):
    """A piece of a message that is too long for one; the next follows at once."""

    worker: Small
    at: Natural
    """How much of it went before."""
    size: Natural
    """Of the whole."""
    data: Annotated[bytes, Meta(min_length=1, max_length=1 << 17)]


MOST_MESSAGE_BYTES = 256 << 10
"""No message to the supervisor is longer, because strangers must not make it hold more: whoever
sends more at a time is hung up on. What is longer travels in fragments."""
FILE_PIECE_BYTES = 128 << 10
"""Files are carried in pieces of at most this size."""


class StoreFile(Message, frozen=True):
    """A piece of a file of a step, from a host that does not see the run's folder."""

    worker: Small
    number: Natural
    step: Natural
    attempt: Natural
    name: Name
    offset: Natural
    data: Annotated[bytes, Meta(max_length=1 << 17)]
    last: bool


class ReadFile(Message, frozen=True):
    """A piece of a file of the run is wanted, on a host that does not see its folder."""

    worker: Small
    number: Natural
    path: PathText
    offset: Natural
    size: Natural


class Trouble(Message, frozen=True):
    """The worker is about to end with an error."""

    worker: Small
    step: Natural
    kind: Words
    """The exception's class."""
    text: Words
    """What happened, for people."""
    trace: Words
    """The user's frames, innermost first."""
    request: bool
    """The request was wrong (exit code 2), not the run."""
    ours: bool = False
    """Raised by manyhands itself, which would raise it again."""
    symptom: bool = False
    """Another worker reports the cause."""
    micro_batch: Natural | None = None
    held_out: bool = False
    """It is a batch of held-out records."""
    records: Many[Natural] = []
    """The first of them, if there are very many."""


class Testimony(Message, frozen=True):
    """In an audit: what this worker computed for a micro-batch, twice."""

    worker: Small
    step: Natural
    micro_batch: Natural
    digests: Annotated[list[int], Meta(min_length=2, max_length=2)]


class Notice(Message, frozen=True):
    """Something a person should know that does not stop the run."""

    worker: Small
    text: Words


class Passed(Message, frozen=True):
    """A step changed nothing, because something in it was not finite."""

    worker: Small
    step: Natural
    why: Words


class Merged(Message, frozen=True):
    """From the leader, where workers are at different steps: what is true after `step` pushes."""

    worker: Small
    step: Natural
    of: Natural
    """The view in which they were made: this one, or the one before it."""
    applied: Annotated[list[Natural], Meta(max_length=1024)]
    """The steps that are in: all below the first number, then start and stop of each run."""
    computed: Some[tuple[Natural, Natural, Natural]]
    """By rank: steps, micro-batches, records, since that view began."""
    staleness: Annotated[list[Natural], Meta(max_length=1024)]
    """By staleness: how many of these steps."""


class Drew(Message, frozen=True):
    """A sampler of the user's own was run for the epoch of this step."""

    worker: Small
    step: Natural
    digest: Name
    """Of the records that it gave."""


class Read(Message, frozen=True):
    """Somebody has begun to read a stream anew, and this is what it gave for this step."""

    worker: Small
    step: Natural
    digest: Natural


class Left(Message, frozen=True):
    """Training is done here; everything is written."""

    worker: Small
    step: Natural
    because: Words
    peak_memory_bytes: Natural
    loss: float


# ---- from the supervisor


class Reply(Message, frozen=True):
    """All parts of a round, by rank; empty for workers that only wait for the round to end."""

    round: str
    parts: list[bytes] = []
    stop: str | None = None
    """After scores: the reason to stop early."""
    heard: float | None = None
    """After scores: what schedules that wait for one are told. It is in the journal."""


class Answer(Message, frozen=True):
    """To question `number` of one worker."""

    number: int
    data: bytes = b""
    error: str = ""


class Halt(Message, frozen=True):
    """Command `number`: leave the loop after the next step that all agree on."""

    number: int


class SaveNow(Message, frozen=True):
    """Command `number`: save after the next step that all agree on, and go on."""

    number: int


class Break(Message, frozen=True):
    """Members of view `generation` are gone: stop waiting, at once."""


FromWorker = (
    Hello
    | Begun
    | Ready
    | Leaving
    | Measured
    | Beat
    | RoundPart
    | Scored
    | Written
    | Fragment
    | StoreFile
    | ReadFile
    | Trouble
    | Testimony
    | Notice
    | Passed
    | Merged
    | Drew
    | Read
    | Left
)
FromSupervisor = View | Reply | Answer | Halt | SaveNow | Break

encode = msgspec.msgpack.Encoder().encode
decode_from_worker = printable_decoder(msgspec.msgpack.Decoder(FromWorker).decode)
decode_bulk = printable_decoder(msgspec.msgpack.Decoder(Hello | RoundPart).decode)
"""Of what can be very long, being bytes that are passed on as they are."""
decode_from_supervisor = msgspec.msgpack.Decoder(FromSupervisor).decode
