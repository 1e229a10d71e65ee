# SPDX-License-Identifier: Apache-2.0
"""Whether a worker can have said what it says: pure. What no worker of ours says ends that worker,
and nobody else is blamed for it.

Ranges and lengths were checked when the message was decoded (values/messages.py); this is about
what depends on the run: who is in which view, who leads, how many steps there are.
"""

import ipaddress
import re
from collections.abc import Mapping

import msgspec

from manyhands.driver.supervise.worker_states import Situation, WorkerState
from manyhands.values.bounded_types import NotUnderstood
from manyhands.values.messages import (
    Beat,
    Begun,
    Built,
    Drew,
    FromWorker,
    Hello,
    Left,
    Measured,
    Merged,
    Passed,
    Read,
    Ready,
    RoundPart,
    Scored,
    StoreFile,
    Testimony,
    Trouble,
    Written,
)
from manyhands.values.work_in_hand import WorkInHand

FromMembers = (
    Begun | Ready | Measured | RoundPart | Scored | Testimony | Passed | Merged | Drew | Read | Left
)


def objection(
    now: Situation,
    worker: WorkerState,
    message: FromWorker,
    *,
    steps: int,
    views: Mapping[int, tuple[int, ...]],
) -> str | None:
    """Why it makes no sense, if so. `views`: the workers of each generation, by rank."""
    if message.generation > max(views, default=0):
        return f"it speaks of view {message.generation}, which there is not"
    if (step := getattr(message, "step", 0)) > steps:
        return f"it speaks of step {step} of {steps}"
    members = views.get(message.generation, ())
    if isinstance(message, FromMembers) and worker.number not in members:
        return f"it speaks of view {message.generation} as if it were in it"
    match message:
        case Hello():
            return _of_hello(worker, message)
        case Begun() | Scored() | Passed() | Merged() if members[0] != worker.number:
            return "it speaks as the leader of its view, and is not"
        case Drew() if not now.samples:
            return "it speaks of a sampler, and the task has none"
        case Read() if not now.streams:
            return "it speaks of a stream, and the task's data is none"
        case Merged() if not now.merges:
            return "it speaks of merged steps, and none are merged in this run"
        case Beat(load=load) if load is not None and not now.servers:
            return "it speaks as a server, and this run has none"
        case Beat(steps=log, losses=losses, reads=reads, loss=loss, work=work):
            led = any(worker.number == members[0] for members in views.values())
            if not led and (log or losses or reads or loss is not None):
                return "it speaks as the leader of its view, and is not"
            if reads and not now.streams:
                return "it speaks of a stream, and the task's data is none"
            told = (*(record.step for record in log), *(s for s, _ in (*losses, *reads)))
            if any(s > steps for s in told):
                return f"it speaks of steps that there are not; there are {steps}"
            return odd_work(now, work, steps=steps)
        case Written(attempt=attempt) | StoreFile(attempt=attempt):
            if worker.number not in views.get(attempt, ()):
                return f"it saves for view {attempt}, in which it was not"
            names = [f.name for f in message.files] if isinstance(message, Written) else []
            if odd := [name for name in names if not re.fullmatch(r"\w[\w.-]*", name)]:
                return f"it has saved {odd[0]!r}, which is no name for a file of a step"
        case (
            Ready(differs=(_, index))
            | Testimony(micro_batch=index)
            | Trouble(micro_batch=index, held_out=False)
        ):
            if index is not None and index >= now.micro_batches:
                return f"it speaks of micro-batch {index} of {now.micro_batches}"
        case _:
            pass
    return None


def odd_work(now: Situation, work: WorkInHand, *, steps: int) -> str | None:
    """Why nobody can be at this work, if so."""
    if work.step > steps:
        return f"it is at step {work.step} of {steps}"
    if work.kind == "compute" and not 0 <= work.index < now.micro_batches:
        return f"it is at micro-batch {work.index} of {now.micro_batches}"
    return None


def _of_hello(worker: WorkerState, hello: Hello) -> str | None:
    if worker.phase != "starting":
        return "it introduces itself for the second time"
    if not is_address(hello.peer_address):
        return f"others are to reach it at {hello.peer_address!r}, which is no address"
    try:
        msgspec.msgpack.decode(hello.built, type=Built)
    except NotUnderstood:
        return "what it says that it has built makes no sense"
    return None


def is_address(text: str) -> bool:
    """ "10.0.0.1:7077", "[::1]:7077", or nothing"""
    if not text:
        return True
    host, _, port = text.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return port.isascii() and port.isdigit() and 0 < int(port[:6]) < 1 << 16
