"""Strangers at a socket: what they can make us hold is bounded, and they are told of."""

import os
import random
import re
import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import zmq

from manyhands.values import guarded_router
from manyhands.values.credentials import Credentials, new_secret
from manyhands.values.guarded_router import MOST_UNPROVEN, MOST_WAITING, GuardedRouter
from manyhands.values.refusals import RefusalCounts, Refusals, said
from tests.support.hostile_clients import GREETING, dealer, half_open, pour, throw

MOST_BYTES = 1 << 16
PATIENCE_S = 30.0

pytestmark = pytest.mark.timeout(120)


def until(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)
    return found


class Guarded:
    def __init__(self) -> None:
        credentials = Credentials.of(new_secret(), "test")
        self.server = credentials.server_public
        self.keys = self.server, credentials.client_public, credentials.client_secret
        self.router = GuardedRouter(
            self.server,
            credentials.server_secret,
            credentials.client_public,
            most_bytes=MOST_BYTES,
        )
        self.port = self.router.bind(["127.0.0.1"])
        self.refusals = self.router.refusals

    def hears(self, friend: "zmq.Socket[bytes]", data: bytes) -> bool:
        friend.send(data)
        return until(self.router.receive)[1] == data


@contextmanager
def opened() -> Generator[Guarded]:
    guarded = Guarded()
    try:
        yield guarded
    finally:
        guarded.router.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_strangers_are_counted_and_friends_are_not() -> None:
    with opened() as door:

        def counts() -> tuple[int, int]:
            return door.refusals.connections, door.refusals.keys

        with dealer(door.port, *door.keys) as friend:
            assert door.hears(friend, b"hello")
        throw(door.port, random.Random(1).randbytes(1000))
        throw(door.port, GREETING + random.Random(1).randbytes(1000))
        throw(door.port, b"")
        until(lambda: counts() == (3, 0))
        with dealer(door.port, door.server, *zmq.curve_keypair()):
            until(lambda: counts() == (4, 1))
        other = Credentials.of(new_secret(), "test")
        with dealer(door.port, other.server_public, other.client_public, other.client_secret):
            until(lambda: counts()[1] >= 2)
        assert door.refusals.words() is None, "what comes within a second of the first is in it"
        text = until(door.refusals.words)
        assert re.fullmatch(
            r"\d+ connections? with another key and 3 connections that did not speak our language "
            rf"were refused at 127.0.0.1:{door.port}; they came from 127.0.0.1",
            text,
        )
        door.router.refuse()
        assert door.refusals.words() is None, "at most once in a while"


def test_a_friend_that_goes_without_a_word_is_no_stranger() -> None:
    with opened() as door:
        with dealer(door.port, *door.keys) as friend:
            monitor = friend.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            throw(door.port, GREETING)
            assert monitor.poll(10_000)
            friend.disable_monitor()
            monitor.close(0)
        until(lambda: door.refusals.connections == 1)
        with dealer(door.port, *door.keys) as friend:
            assert door.hears(friend, b"the next")
        assert door.refusals.connections == 1


def test_a_strangers_long_frame_is_refused_before_there_is_room_for_it() -> None:
    with opened() as door:
        taken = pour(door.port, 1 << 30)
        assert taken < 64 << 20, "sockets' buffers, at the most"
        until(lambda: door.refusals.connections == 1)
        with dealer(door.port, *door.keys) as friend:
            assert door.hears(friend, bytes(MOST_BYTES - 100))


def test_a_thousand_that_do_not_say_who_they_are_leave_descriptors_and_friends_in_peace() -> None:
    with opened() as door, dealer(door.port, *door.keys) as friend:
        assert door.hears(friend, b"before")
        with half_open(door.port, 400) as strangers:
            before = descriptors() - len(strangers)
            until(lambda: door.refusals.crowd >= 400 - MOST_UNPROVEN)
            until(lambda: descriptors() <= len(strangers) + before)
            assert sum(not c.proven for c in door.router.connections.values()) <= MOST_UNPROVEN
            assert door.hears(friend, b"meanwhile")
            with dealer(door.port, *door.keys) as newcomer:
                assert door.hears(newcomer, b"new")
            text = until(door.refusals.words)
        assert "too many that had not said who they are" in text and "127.0.0.1" in text


def test_who_does_not_finish_its_handshake_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_router, "HANDSHAKE_MS", 200)
    with opened() as door, half_open(door.port, 3, GREETING[:20]) as strangers:
        for stranger in strangers:
            with suppress(ConnectionResetError):
                while stranger.recv(1000):  # our greeting, then the end
                    pass
        until(lambda: door.refusals.connections == 3)


def test_a_holder_of_the_key_cannot_send_more_than_is_read() -> None:
    """A frame's limit is none of a message: parts are kept until the last has come."""
    with opened() as door, dealer(door.port, *door.keys) as flood:
        flood.linger = 0
        flood.send_multipart(2 * MOST_WAITING * [bytes(MOST_BYTES - 100)])
        until(lambda: door.refusals.floods)
        with dealer(door.port, *door.keys) as friend:
            assert door.hears(friend, b"after")


def test_a_message_of_many_parts_ends_its_connection() -> None:
    with opened() as door, dealer(door.port, *door.keys) as strange:
        monitor = strange.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        strange.send_multipart([b"", b"many", b"parts"])
        assert until(lambda: door.router.receive() or door.refusals.messages)
        assert monitor.poll(10_000), "hung up on"
        strange.disable_monitor()
        monitor.close(0)


def test_a_socket_that_is_closed_leaves_no_descriptor() -> None:
    before = descriptors()
    with opened() as door, socket.create_connection(("127.0.0.1", door.port)):
        pass
    assert descriptors() == before


def test_what_was_refused_in_words() -> None:
    assert (
        said(RefusalCounts(keys=3), "h:1", [])
        == "3 connections with another key were refused at h:1"
    )
    assert said(RefusalCounts(messages=1), "h:1", ["10.0.0.9"]) == (
        "1 message that made no sense was refused at h:1; it came from 10.0.0.9"
    )
    many = [f"10.0.0.{n}" for n in range(5)]
    assert said(RefusalCounts(others=9), "h:1", many).endswith(
        "; they came from 10.0.0.0, 10.0.0.1, 10.0.0.2 and 2 more"
    )


def test_of_a_flood_of_addresses_only_some_are_remembered() -> None:
    refusals = Refusals()
    for n in range(10_000):
        refusals.note(f"2001:db8::{n:x}")
    assert len(refusals.addresses) <= 256
