# SPDX-License-Identifier: Apache-2.0
"""Who was turned away at a socket of ours, and what made no sense there: counted, for people."""

import time
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

TELL_S, FIRST_S = 10.0, 1.0
"""At most one sentence in so many seconds; and what comes within a second of the first is in it."""

_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_SEEN = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSALS


class RefusalCounts(NamedTuple):
    """Connections with another key, connections of something else, messages without sense."""

    keys: int = 0
    others: int = 0
    messages: int = 0


class Refusals:
    """Of one ROUTER. `look` and `count` belong to the thread that owns the socket; `words` may be
    asked by another, but only by one."""

    def __init__(self, context: "zmq.Context[Any]", socket: "zmq.Socket[bytes]") -> None:
        """Before the socket is bound."""
        self.where = ""
        self.connections = self.keys = self.messages = 0
        """That ended before they had proven who they are, those of them with another key, and
        messages that could not be read or came from somebody who does not exist."""
        self._unproven: list[int] = []
        """Connections whose handshake is under way."""
        self._told, self._told_at, self._first_at = RefusalCounts(), 0.0, 0.0
        self._watched = socket
        self._monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._monitor.rcvhwm = 0  # else whoever tells us would wait for us to listen
        address = f"inproc://strangers-{id(self)}"
        socket.monitor(address, _SEEN)
        self._monitor.connect(address)

    def look(self) -> None:
        """What has happened at the socket; never blocks."""
        while self._monitor.poll(0):
            seen = parse_monitor_message(self._monitor.recv_multipart())
            event, value = seen["event"], int(seen["value"])
            if event == zmq.EVENT_ACCEPTED:
                self._unproven.append(value)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                # It does not say whose. The newest is the likeliest: those who are no good stay.
                if self._unproven:
                    self._unproven.pop()
            elif event == zmq.EVENT_DISCONNECTED:
                if value in self._unproven:
                    self._unproven.remove(value)
                    self.connections += 1
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or _is_another_key(value):
                self.keys += 1

    def count(self) -> None:
        """A message that made no sense."""
        self.messages += 1

    def words(self) -> str | None:
        """About what is new, if it is time to say something."""
        now = time.monotonic()
        counts = RefusalCounts(self.keys, max(0, self.connections - self.keys), self.messages)
        if counts == self._told:
            return None
        self._first_at = self._first_at or now
        if now - self._first_at < FIRST_S or (self._told_at and now - self._told_at < TELL_S):
            return None
        new = RefusalCounts(*(a - b for a, b in zip(counts, self._told, strict=True)))
        self._told, self._told_at, self._first_at = counts, now, 0.0
        return said(new, self.where)

    def close(self) -> None:
        self._watched.disable_monitor()
        self._monitor.close(0)


def said(new: RefusalCounts, where: str) -> str:
    """ "3 connections with another key were refused at 10.0.0.1:7077" """
    parts = [
        f"{_count(n, thing)} {how}"
        for n, thing, how in (
            (new.keys, "connection", "with another key"),
            (new.others, "connection", "that did not speak our language"),
            (new.messages, "message", "that made no sense"),
        )
        if n > 0
    ]
    were = "was" if sum(new) == 1 else "were"
    listed = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    return f"{listed} {were} refused at {where}"


def _is_another_key(value: int) -> bool:
    return value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}{'s' * (n != 1)}"
