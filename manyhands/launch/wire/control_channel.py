# SPDX-License-Identifier: Apache-2.0
"""The control channel: authenticated, encrypted (CURVE) messages between supervisor and workers.

The supervisor makes a key pair per run for itself, and one for each worker, which receives it with
the supervisor's public key from the process that starts it, never on a command line. A worker is
known by its key: nobody speaks in the name of another, and who has ended, or is on a host that was
dropped, cannot speak at all. A connection with any other key is refused before a message of it is
read, and what it could make us hold is bounded (guarded_router.py). It listens on loopback unless
told otherwise.

In a worker one thread owns the socket: it sends heartbeats, and what arrives is put where the
training thread looks for it.
"""

import itertools
import os
import queue
import threading
import time
from contextlib import suppress
from typing import NamedTuple

import msgspec
import zmq

from manyhands.launch.wire.heartbeat import Heartbeat, Waiting
from manyhands.launch.wire.long_messages import Assembly, fragments
from manyhands.values.bounded_types import NotUnderstood
from manyhands.values.errors import Broken
from manyhands.values.guarded_router import GuardedRouter, bracketed
from manyhands.values.messages import (
    MOST_MESSAGE_BYTES,
    Answer,
    Break,
    FromSupervisor,
    FromWorker,
    Halt,
    ReadFile,
    Reply,
    SaveNow,
    StoreFile,
    decode_from_supervisor,
    decode_from_worker,
    encode,
)
from manyhands.values.printable_text import printable
from manyhands.values.view import View
from manyhands.values.worker_orders import Keys

BEAT_S = 0.25
MOST_UNSENT = 256
"""Messages that are kept for a worker that does not read them."""


class Nonsense(NamedTuple):
    """A worker said something that cannot be read: why not."""

    worker: int
    why: str


class WorkersByKey:
    """Who speaks, by its public key; that is also what its connection is called. Asked by the
    authenticator's thread too."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._ended: set[bytes] = set()

    def add(self, worker: int, public: bytes) -> None:
        self._numbers[public], self._names[worker] = worker, public

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._numbers and key not in self._ended

    def number(self, public: bytes) -> int | None:
        return self._numbers.get(public)

    def name(self, worker: int) -> bytes:
        return self._names.get(worker, b"")

    def ended(self, worker: int) -> None:
        """It does not connect any more; what it has said may still be read."""
        self._ended.add(self.name(worker))

    def revoke(self, worker: int) -> None:
        """Nothing that is said with its key is heard any more."""
        self._numbers.pop(self.name(worker), None)


class SupervisorChannel:
    """The supervisor's end."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.public, secret = zmq.curve_keypair()
        self.workers = WorkersByKey()
        self.router = GuardedRouter(
            self.public, secret, self.workers, most_bytes=MOST_MESSAGE_BYTES
        )
        self.socket, self.refusals = self.router.socket, self.router.refusals
        self.socket.sndhwm = MOST_UNSENT
        self.assembly = Assembly()
        self.port = self.router.bind([address])

    def keys_for(self, worker: int, host: str) -> Keys:
        """New ones, for a worker that reaches this host under that name."""
        public, secret = zmq.curve_keypair()
        self.workers.add(worker, public)
        return Keys(f"tcp://{bracketed(host)}:{self.port}", self.public, public, secret)

    def send(self, worker: int, message: FromSupervisor) -> None:
        self.router.send(self.workers.name(worker), encode(message))

    def receive(self) -> list[FromWorker | Nonsense]:
        """What has arrived; never blocks. What makes no sense, or is in the name of another, is
        told of with the worker whose key it came with; if it is nobody's, it is counted."""
        messages: list[FromWorker | Nonsense] = []
        while (received := self.router.receive()) is not None:
            _, data = received
            if (number := self.workers.number(self.router.key)) is None:
                self.router.refuse()
                continue
            try:
                message = decode_from_worker(data)
                if number != message.worker:
                    raise msgspec.ValidationError("it is in another's name")
                whole = self.assembly.add(message)
            except NotUnderstood as error:
                messages.append(Nonsense(number, printable(str(error), 200)))
                continue
            if whole is not None:
                messages.append(whole)
        return messages

    def close(self) -> None:
        self.router.close()


class WorkerChannel:
    """A worker's end. Its thread sends the pulse; whoever waits for an answer is seen to wait."""

    def __init__(self, keys: Keys, heartbeat: Heartbeat) -> None:
        self.heartbeat, self.waiting = heartbeat, Waiting(heartbeat, self.broken)
        self.context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        self.socket.identity = keys.worker_public  # which nobody else knows
        self.socket.curve_serverkey = keys.supervisor_public
        self.socket.curve_publickey = keys.worker_public
        self.socket.curve_secretkey = keys.worker_secret
        self.socket.linger, self.socket.ipv6 = 5000, True
        self.socket.connect(keys.address)
        self.outgoing: queue.SimpleQueue[FromWorker | None] = queue.SimpleQueue()
        self.views: queue.SimpleQueue[View] = queue.SimpleQueue()
        self.replies: dict[str, Reply] = {}
        self.answers: dict[int, Answer] = {}
        self.closed = False
        self._numbers = itertools.count(1)
        self.arrived = threading.Condition()
        self.generation = 0
        """Of the view that the training thread is in."""
        self._heard = 0
        self._saves: set[int] = set()
        """Which commands were SaveNow; the others were Halts."""
        self._broken = 0
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="line", daemon=True)
        self._thread.start()

    def send(self, message: FromWorker) -> None:
        self.outgoing.put(self._stamped(message))
        os.eventfd_write(self._wake, 1)

    def next_view(self) -> View:
        """Wait for a place in the next view."""
        with self.waiting:
            view = self.views.get()
        self.generation, self._heard = view.generation, max(self._heard, view.halts)
        with self.arrived:
            self.replies.clear()  # those of earlier views
        return view

    def reply(self, round: str) -> Reply:
        """Wait for the supervisor's reply to a round."""
        with self.waiting, self.arrived:
            while round not in self.replies:
                if self.broken():
                    raise Broken(f"waiting for '{round}' was broken off")
                self.arrived.wait(0.1)
            return self.replies.pop(round)

    def new_number(self) -> int:
        return next(self._numbers)

    def ask(self, message: StoreFile | ReadFile) -> int:
        """A question whose answer is waited for later, in whichever view. From any thread."""
        self.send(message)
        return message.number

    def answer(self, number: int) -> Answer:
        with self.arrived:
            while number not in self.answers:
                if self.closed:
                    raise Broken("the line to the driver was closed")
                self.arrived.wait(0.1)
            return self.answers.pop(number)

    def heard(self) -> int:
        """The number of the last command that arrived here."""
        return self._heard

    def told_to_halt(self, after: int, upto: int) -> bool:
        """Whether there is a Halt among these commands, which have all been heard."""
        return any(number not in self._saves for number in range(after + 1, upto + 1))

    def told_to_save(self, after: int, upto: int) -> bool:
        return any(number in self._saves for number in range(after + 1, upto + 1))

    def broken(self) -> bool:
        """Whether members of the current view are gone."""
        return self._broken >= self.generation > 0

    def stop_if_broken(self) -> None:
        if self.broken():
            raise Broken("other members of this view are gone")

    def close(self) -> None:
        """Send what is still waiting, then hang up."""
        self.closed = True
        self.outgoing.put(None)
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self.context.term()
        os.close(self._wake)

    def _stamped(self, message: FromWorker) -> FromWorker:
        return msgspec.structs.replace(message, generation=self.generation)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        due = time.monotonic() + BEAT_S
        while True:
            ready = dict(poller.poll(max(0, int((due - time.monotonic()) * 1000) + 1)))
            if self.socket in ready:
                self._receive()
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if not self._send_waiting():
                self.socket.close()
                return
            if time.monotonic() >= due:
                due = time.monotonic() + BEAT_S
                self._send(self._stamped(self.heartbeat.beat()))

    def _send(self, message: FromWorker) -> None:
        """What cannot be encoded is left out: this thread must live to send the rest."""
        with suppress(UnicodeEncodeError, msgspec.MsgspecError):
            for piece in fragments(message):
                self.socket.send(piece)

    def _send_waiting(self) -> bool:
        with suppress(queue.Empty):
            while True:
                message = self.outgoing.get_nowait()
                if message is None:
                    return False
                self._send(message)
        return True

    def _receive(self) -> None:
        with suppress(zmq.Again):
            while True:
                message: FromSupervisor = decode_from_supervisor(
                    self.socket.recv(flags=zmq.NOBLOCK)
                )
                match message:
                    case View():
                        self.views.put(message)
                    case Reply():
                        with self.arrived:
                            self.replies[message.round] = message
                            self.arrived.notify_all()
                    case Answer(number=number):
                        with self.arrived:
                            self.answers[number] = message
                            self.arrived.notify_all()
                    case Halt(number=number):
                        self._heard = max(self._heard, number)
                    case SaveNow(number=number):
                        self._saves.add(number)  # first: whoever has heard it knows what it is
                        self._heard = max(self._heard, number)
                    case Break(generation=generation):
                        self._broken = max(self._broken, generation)
                        with self.arrived:
                            self.arrived.notify_all()
