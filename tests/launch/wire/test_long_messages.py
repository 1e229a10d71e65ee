"""Messages that are longer than what may be sent at a time, over real sockets; whole, and not."""

import os
from contextlib import closing

import pytest

from manyhands.launch.wire import long_messages
from manyhands.launch.wire.control_channel import Nonsense, SupervisorChannel, WorkerChannel
from manyhands.launch.wire.heartbeat import Heartbeat
from manyhands.launch.wire.long_messages import fragments
from manyhands.values.messages import (
    FILE_PIECE_BYTES,
    MOST_MESSAGE_BYTES,
    Fragment,
    Leaving,
    RoundPart,
    encode,
)
from tests.launch.wire.test_worker_keys import channel as channel  # a fixture
from tests.launch.wire.test_worker_keys import connected, heard

PAYLOAD = os.urandom(1 << 20)
LONG = RoundPart(worker=1, round="x", payload=PAYLOAD)
PIECES = list(fragments(LONG))
SIZE = len(encode(LONG))


def piece(at: int, size: int, data: bytes = bytes(99), worker: int = 1) -> bytes:
    return encode(Fragment(worker=worker, at=at, size=size, data=data))


@pytest.mark.timeout(60)
def test_long_messages_arrive_whole_and_in_order(channel: SupervisorChannel) -> None:
    keys = channel.keys_for(1, "127.0.0.1")
    with closing(WorkerChannel(keys, Heartbeat(1, log_every=1))) as worker:
        for number in range(3):
            worker.send(RoundPart(worker=1, round=f"{number}", payload=PAYLOAD))
            worker.send(Leaving(worker=1))

        found = heard(channel, lambda told: sum(isinstance(m, Leaving) for m in told) == 3)
    parts = [m for m in found if isinstance(m, RoundPart | Leaving)]
    assert [m.round if isinstance(m, RoundPart) else "" for m in parts] == [
        "0",
        "",
        "1",
        "",
        "2",
        "",
    ]
    assert all(m.payload == PAYLOAD for m in parts if isinstance(m, RoundPart))
    assert channel.assembly.held_bytes == 0


def test_what_is_sent_is_never_longer_than_a_message() -> None:
    assert SIZE > MOST_MESSAGE_BYTES and len(PIECES) == -(-SIZE // FILE_PIECE_BYTES)
    assert max(map(len, PIECES)) <= MOST_MESSAGE_BYTES
    assert list(fragments(Leaving(worker=1))) == [encode(Leaving(worker=1))]


WRONG = {
    "one is missing": ([PIECES[0], PIECES[2]], "was to come"),
    "the first is missing": (PIECES[1:2], "where 0 of"),
    "one is repeated": ([PIECES[0], PIECES[1], PIECES[1]], "was to come"),
    "it begins again": ([PIECES[0], PIECES[0]], "byte 0 of"),
    "another total": ([piece(0, 500), piece(99, 600)], "of 600 came where 99 of 500"),
    "more than the total": ([piece(0, 150), piece(99, 150)], "longer than the 150 bytes"),
    "no more than a total": ([piece(0, 1 << 40)], "too long"),
    "of an empty message": ([piece(0, 0)], "longer than the 0 bytes"),
    "nothing in it": ([piece(0, 9, b"")], "length >= 1"),
    "of another worker": ([piece(0, 99, worker=2)], "in another's name"),
    "no message": ([piece(0, 99, b"\xc1" * 99)], ""),
    "a fragment in it": ([piece(0, len(PIECES[-1]), PIECES[-1])], "not what was begun"),
    "another's in it": (
        [piece(0, len(encode(Leaving(worker=2))), encode(Leaving(worker=2)))],
        "not what was begun",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", WRONG)
def test_what_does_not_fit_is_refused_and_its_sender_blamed(
    channel: SupervisorChannel, how: str
) -> None:
    sent, why = WRONG[how]
    with connected(channel, channel.keys_for(1, "127.0.0.1")) as worker:
        for data in sent:
            worker.send(data)
        (blamed,) = heard(channel, bool)
        assert isinstance(blamed, Nonsense) and blamed.worker == 1 and why in blamed.why
        assert channel.assembly.held_bytes == 0, "what was begun is forgotten"
        for data in PIECES:
            worker.send(data)
        assert heard(channel, bool) == [LONG], "the next is read as if nothing had been"


@pytest.mark.timeout(60)
def test_what_is_begun_and_never_ended_is_bounded(
    channel: SupervisorChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_messages, "MOST_IN_ALL_BYTES", 2 << 20)
    full = bytes(FILE_PIECE_BYTES)
    with connected(channel, channel.keys_for(1, "127.0.0.1")) as worker:
        for _ in range(200):  # 25 MB of beginnings: each ends the one before it
            worker.send(piece(0, 1 << 20, full))
        blamed = heard(channel, lambda told: len(told) == 100)
        assert all(isinstance(m, Nonsense) for m in blamed)
        assert channel.assembly.held_bytes <= FILE_PIECE_BYTES
        for at in range(0, 3 << 20, FILE_PIECE_BYTES):  # one that goes on and on
            worker.send(piece(at, 200 << 20, full))
        last = heard(channel, bool)[0]
        assert isinstance(last, Nonsense) and "too long" in last.why
        assert channel.assembly.held_bytes <= 2 << 20
    channel.assembly.forget(1)
    assert channel.assembly.held_bytes == 0
