"""Every worker has a key of its own: what it opens, in whose name, and until when."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import zmq

from manyhands.launch.wire.control_channel import FromWorker, Nonsense, SupervisorChannel
from manyhands.values.messages import Halt, Leaving, decode_from_supervisor, encode
from manyhands.values.worker_orders import Keys
from tests.support.hostile_clients import dealer


@pytest.fixture
def channel() -> Iterator[SupervisorChannel]:
    made = SupervisorChannel()
    yield made
    made.close()


def connected(
    channel: SupervisorChannel, keys: Keys, name: bytes = b""
) -> AbstractContextManager["zmq.Socket[bytes]"]:
    mine = keys.supervisor_public, keys.worker_public, keys.worker_secret
    return dealer(channel.port, *mine, name=name or keys.worker_public)


def heard(
    channel: SupervisorChannel, enough: Callable[[list[FromWorker | Nonsense]], bool]
) -> list[FromWorker | Nonsense]:
    found, deadline = list[FromWorker | Nonsense](), time.monotonic() + 20
    while not enough(found):
        assert time.monotonic() < deadline, found
        found += channel.receive()
        channel.socket.poll(20)
    return found


@pytest.mark.timeout(60)
def test_nobody_speaks_in_the_name_of_another(channel: SupervisorChannel) -> None:
    one, two = (channel.keys_for(n, "127.0.0.1") for n in (1, 2))
    with connected(channel, one, b"worker-2") as odd, connected(channel, two) as right:
        odd.send(encode(Leaving(worker=2)))
        right.send(encode(Leaving(worker=2)))
        found = heard(channel, lambda told: len(told) == 2)
        assert sorted(map(str, found)) == sorted(
            map(str, [Nonsense(1, "it is in another's name"), Leaving(worker=2)])
        )
        channel.send(2, Halt(number=7))
        assert right.poll(10_000) and not odd.poll(100), "what is for worker 2 comes to worker 2"
        assert decode_from_supervisor(right.recv()) == Halt(number=7)


@pytest.mark.timeout(60)
def test_a_key_that_was_revoked_opens_nothing(channel: SupervisorChannel) -> None:
    dropped, stays = (channel.keys_for(n, "127.0.0.1") for n in (1, 2))
    with connected(channel, dropped) as before, connected(channel, stays) as other:
        before.send(encode(Leaving(worker=1)))
        heard(channel, lambda told: len(told) == 1)
        channel.workers.revoke(1)
        before.send(encode(Leaving(worker=1)))  # over the connection that it has
        with connected(channel, dropped) as after:  # over a new one
            watch = after.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            after.send(encode(Leaving(worker=1)))
            assert watch.poll(10_000), "the connection is refused"
            after.disable_monitor()
            watch.close(0)
        other.send(encode(Leaving(worker=2)))
        found = heard(channel, lambda told: bool(told) and channel.refusals.messages == 1)
        assert found == [Leaving(worker=2)]


@pytest.mark.timeout(60)
def test_last_words_are_heard_and_nobody_comes_after_them(channel: SupervisorChannel) -> None:
    keys = channel.keys_for(1, "127.0.0.1")
    with connected(channel, keys) as before:
        before.send(encode(Leaving(worker=1)))
        heard(channel, lambda told: len(told) == 1)
        channel.workers.ended(1)
        before.send(encode(Leaving(worker=1)))
        heard(channel, lambda told: len(told) == 1)
    with connected(channel, keys) as after:
        watch = after.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        assert watch.poll(10_000), "the connection is refused"
        after.disable_monitor()
        watch.close(0)
