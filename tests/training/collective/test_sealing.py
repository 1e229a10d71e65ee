"""What travels between hosts: nobody on the way can read it, and nobody can change it unnoticed."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial

import pytest
import torch

from manyhands.testing.contracts import F32
from manyhands.testing.namespaces import Host, Network
from manyhands.training.collective.handshake import HELLO_BYTES, PeerListener
from manyhands.training.collective.sealing import (
    PIECE_BYTES,
    TAG_BYTES,
    Ephemeral,
    Seal,
    SessionKeys,
)
from manyhands.training.collective.sockets import Sockets
from manyhands.values.errors import Broken
from manyhands.values.world import World
from tests.training.collective.test_sockets import (
    LONG_S,
    SECRET,
    Hosts,
    Patient,
    dial,
    halves,
    one_step,
)

PATTERN = -1.2345678e-17
"""A gradient that nothing else looks like."""


def met(secret: bytes = SECRET, other: bytes = SECRET) -> tuple[SessionKeys, SessionKeys]:
    """Two ends of a connection; the other may know another secret."""
    caller, called = Ephemeral(), Ephemeral()
    signed = b"who, whom, when" + caller.public + called.public
    return (
        caller.agree(called.public, secret, signed, calls=True),
        called.agree(caller.public, other, signed, calls=False),
    )


def test_both_ends_have_the_same_keys_and_nobody_else() -> None:
    mine, theirs = met()
    assert (mine.send, mine.farewell) == (theirs.receive, theirs.their_farewell)
    assert (mine.receive, mine.their_farewell) == (theirs.send, theirs.farewell)
    assert len({*mine}) == 4, "each for one purpose"
    again, _ = met()
    assert not {*mine} & {*again}, "of this connection alone"
    wrong, right = met(other=bytes(32))
    assert not {*wrong} & {*right}
    assert "b'" not in repr(mine)


@pytest.mark.parametrize("public", [bytes(32), b"\1" + bytes(31)])
def test_a_public_half_that_gives_the_key_away_is_refused(public: bytes) -> None:
    with pytest.raises(ValueError):
        Ephemeral().agree(public, SECRET, b"", calls=True)


@pytest.mark.parametrize("sizes", [[1], [PIECE_BYTES], [5, PIECE_BYTES, 7], [3] * 50, [300_000]])
def test_what_is_sealed_here_is_opened_there(sizes: list[int]) -> None:
    mine, theirs = (Seal(keys) for keys in met())
    sent = [memoryview(torch.randint(256, (n,), dtype=torch.uint8).numpy().data) for n in sizes]
    total = sum(sizes)
    rooms = [memoryview(bytearray(total // 2)), memoryview(bytearray(total - total // 2))]
    clear, into = list(sent), [room for room in rooms if len(room)]
    while clear:
        sealed = mine.seal(clear)
        arriving = theirs.room(sum(map(len, into)))
        arriving[:] = sealed
        theirs.open(arriving, into)
    assert not into and b"".join(rooms) == b"".join(sent)


@pytest.mark.parametrize("how", ["changed", "repeated", "left out", "another's"])
def test_what_was_meddled_with_does_not_open(how: str) -> None:
    mine, theirs = (Seal(keys) for keys in met())
    pieces = [bytearray(mine.seal([memoryview(bytes([k]) * 100)])) for k in range(2)]
    if how == "changed":
        pieces[0][50] ^= 1
    elif how == "repeated":
        pieces[1] = pieces[0]
    elif how == "left out":
        del pieces[0]
    else:
        pieces[0] = bytearray(Seal(met()[0]).seal([memoryview(bytes(100))]))
    with pytest.raises(ConnectionResetError, match="changed on the way"):
        for piece in pieces:
            theirs.open(memoryview(piece), [memoryview(bytearray(100))])


# ---- between hosts


class Meddler:
    """Stands between two hosts, and turns one bit of what comes after they have met."""

    def __init__(self, address: str, after: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self._stand_between, args=(address, after))
        self.thread.start()

    def _stand_between(self, address: str, after: int) -> None:
        caller, _ = self.listener.accept()
        with caller, dial(address) as called:
            back = threading.Thread(target=self._pass_on, args=(called, caller, 1 << 60))
            back.start()
            self._pass_on(caller, called, after)
            back.join()

    def _pass_on(self, source: socket.socket, target: socket.socket, after: int) -> None:
        passed = 0
        with suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if passed <= after < passed + len(data):
                    data[after - passed] ^= 1
                passed += len(data)
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.thread.join(LONG_S)
        self.listener.close()


PROVEN = HELLO_BYTES + 32
"""Bytes that a caller sends until it is let in."""


@pytest.mark.parametrize("after", [3, 100, 200_000])
def test_a_bit_that_is_turned_on_the_way_is_noticed(after: int) -> None:
    """In a header, in a small frame and in a large one: before a number of it is used."""
    numel = 200_000 if after > 1000 else 10
    with ExitStack() as stack:
        two = stack.enter_context(Hosts(2, encrypt=True))
        meddler = stack.enter_context(closing(Meddler(two.addresses[0], PROVEN + after)))

        def work(rank: int) -> str:
            slots = [{F32: torch.full((numel,), float(rank))}]
            detour = [meddler.address, two.addresses[1]] if rank else two.addresses
            with closing(two.join(rank, slots, addresses=detour)) as links:
                with pytest.raises(Broken) as caught:
                    while True:
                        one_step(links, numel)
                return str(caught.value)

        told = [two.start(work, rank) for rank in range(2)]
        assert "changed on the way" in told[0].result(LONG_S)
        assert "left the view" in told[1].result(LONG_S)


def test_nobody_can_talk_a_host_into_doing_without() -> None:
    with Hosts(2, encrypt=True) as two:
        meeting = two.start(two.join, 0)
        plain = two.start(two.join, 1, encrypt=False)
        deadline = time.monotonic() + LONG_S
        while not two.listeners[0].strangers:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for patience in two.patience:
            patience.told.set()
        for half in (meeting, plain):
            with pytest.raises(Broken):
                half.result(LONG_S)


# ---- on the wire


def give_away(host: Host, links: Callable[[], Sockets]) -> None:
    """Sends gradients, and then weights, that can be recognised."""
    with host.inside(), closing(links()) as between:
        gradients = torch.full((50_000,), PATTERN)
        between.slots = [{F32: gradients}]
        owned = halves(len(gradients), 2)
        for (part,) in between.exchange([1, 1], owned):
            assert torch.equal(part[F32], gradients[: len(part[F32])])
        between.share({F32: gradients}, owned)


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "sealed"])
def test_gradients_cannot_be_read_on_the_wire(
    network: Callable[..., Network], encrypt: bool
) -> None:
    net = network(hosts=2)
    with ExitStack() as stack:
        listeners: list[PeerListener] = []
        for host in net.hosts:
            with host.inside():
                listeners.append(PeerListener(host.address))
            stack.callback(listeners[-1].close)
        with net.hosts[1].inside():
            sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))  # all
        stack.callback(sniffer.close)
        sniffer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 20)
        sniffer.settimeout(0.5)

        def links(rank: int) -> Sockets:
            return Sockets(
                World(rank, 2, (1, 1)),
                [],
                listener=listeners[rank],
                addresses=[listener.address for listener in listeners],
                generation=1,
                secret=SECRET,
                patience=Patient(),
                encrypt=encrypt,
            )

        pool, stopped = stack.enter_context(ThreadPoolExecutor(3)), threading.Event()
        heard = pool.submit(overhear, sniffer, stopped)
        stack.callback(stopped.set)
        sending = [
            pool.submit(give_away, host, partial(links, rank))
            for rank, host in enumerate(net.hosts)
        ]
        for host in sending:
            host.result(LONG_S)
        stopped.set()
        packets = heard.result(LONG_S)
    gradient = torch.full((8,), PATTERN).numpy().tobytes()
    assert sum(map(len, packets)) > 400_000, "all of it was overheard"
    assert any(gradient in packet for packet in packets) == (not encrypt)
    assert any(b"mhfr" in packet for packet in packets) == (not encrypt), "headers neither"


def overhear(sniffer: socket.socket, stopped: threading.Event) -> list[bytes]:
    packets: list[bytes] = []
    while True:
        try:
            packets.append(sniffer.recv(1 << 17))
        except TimeoutError:
            if stopped.is_set():
                return packets


def test_a_piece_has_room_for_its_tag() -> None:
    mine, _ = (Seal(keys) for keys in met())
    assert len(mine.seal([memoryview(bytes(PIECE_BYTES + 1))])) == PIECE_BYTES + TAG_BYTES
