# SPDX-License-Identifier: Apache-2.0
"""What supervisor and workers say to each other. Plain typed data; every message has a generation.

A worker speaks: Hello → (View) → Beat*, Part*, Scored*, Written* → Left | Trouble. Its line stamps
the generation of its view on everything it sends; what belongs to another one is dropped.
The supervisor answers with View once, Reply to each round of Parts, and Commands at any time.
"""

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    generation: int = 0


class Member(msgspec.Struct, frozen=True):
    """A worker that is in: `worker` is its number for life, `rank` its place in this view."""

    worker: int
    rank: int
    pid: int
    host: str


# ---- from a worker


class Hello(Message, frozen=True):
    worker: int
    pid: int
    host: str


class StepRecord(msgspec.Struct, frozen=True):
    """A step as the leader logs it."""

    step: int
    epoch: float
    loss: float
    lr: float
    records: int
    numbers: dict[str, float] = {}


class Beat(Message, frozen=True):
    """Sent a few times a second from a thread of the worker."""

    worker: int
    step: int
    samples_per_s: float
    steps: list[StepRecord] = []
    """From the leader: steps since its last beat that are to be logged."""
    loss: float | None = None
    records: int = 0


class Part(Message, frozen=True):
    """This worker's share of a round called `round`; all shares go to the leader, or to all."""

    worker: int
    round: str
    payload: bytes
    to_all: bool = False


class Scored(Message, frozen=True):
    """From the leader: held-out scores. Every worker then waits for Reply `round`."""

    step: int
    round: str
    scores: dict[str, float]


class SavedFile(msgspec.Struct, frozen=True):
    name: str
    size_bytes: int
    sha256: str


class Written(Message, frozen=True):
    worker: int
    step: int
    files: list[SavedFile]
    blocked_s: float


class Trouble(Message, frozen=True):
    """The worker is about to end with an error."""

    worker: int
    step: int
    kind: str
    """The exception's class."""
    text: str
    """What happened, for people."""
    trace: str
    """The user's frames, innermost first."""
    request: bool
    """The request was wrong (exit code 2), not the run."""
    symptom: bool
    """Only noticed that others are gone."""
    micro_batch: int | None = None
    records: list[int] = []


class Notice(Message, frozen=True):
    """Something a person should know that does not stop the run."""

    text: str


class Left(Message, frozen=True):
    """Training is done here; everything is written."""

    worker: int
    step: int
    because: str
    peak_memory_bytes: int
    loss: float


# ---- from the supervisor


class View(Message, frozen=True):
    """Who is in, and since which step. The deal of micro-batches follows from the speeds."""

    members: list[Member]
    speeds: list[float]
    first_step: int
    because: str

    def rank_of(self, worker: int) -> int:
        return next(m.rank for m in self.members if m.worker == worker)


class Reply(Message, frozen=True):
    """All parts of a round, by rank; empty for workers that only wait for the round to end."""

    round: str
    parts: list[bytes] = []
    stop: str | None = None
    """After scores: the reason to stop early."""


class Stop(Message, frozen=True):
    """Command `number`: end after the next step that all agree on, and save it."""

    number: int


FromWorker = Hello | Beat | Part | Scored | Written | Trouble | Notice | Left
FromSupervisor = View | Reply | Stop

encode = msgspec.msgpack.Encoder().encode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
decode_from_supervisor = msgspec.msgpack.Decoder(FromSupervisor).decode
