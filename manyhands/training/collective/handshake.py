# SPDX-License-Identifier: Apache-2.0
"""Where the hosts of a view find each other: one listening socket, and proof of who calls.

Of each pair the higher rank dials. Both prove that they know the run's secret by signing both
nonces, both ranks and the generation (HMAC-SHA256, another label for each message), so what was
recorded from one connection opens no other. Before that a caller is read HELLO_BYTES at most and
given HANDSHAKE_S; whoever is not one of us is dropped, counted and costs the others nothing.

Where what follows is to be encrypted, the nonces are public halves of fresh X25519 pairs: both ends
then hold the same keys (sealing.py), and nobody who was between them does. That is signed too, so
nobody can talk two hosts into doing without.

Nothing runs between meetings. Callers then wait in the kernel's queue, and one that is ahead of
us (already in the next view) is let in and kept until that view is met here too.
"""

import errno
import hmac
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import NamedTuple, cast

from manyhands.training.collective.collective import Patience, nothing
from manyhands.training.collective.sealing import Ephemeral, SessionKeys
from manyhands.values.errors import Broken
from manyhands.values.world import World

MEET_S = 2.0
"""Whoever is in a view listens since before it was issued. One that cannot even be reached for so
long is lost; one that can, and does not answer yet, is busy (with a checkpoint, say)."""
HANDSHAKE_S = 2.0
CONNECT_S = 1.0
NAP_S = 0.02
MOST_CALLERS = 128
"""Half-open connections; when there are more, the longest silent one is dropped."""
BACKLOG = 4096

_MAGIC = b"manyhan1"
_CLAIM = struct.Struct("<qII32s")  # generation, who calls, who is called, nonce of who calls
_MAC_BYTES = _NONCE_BYTES = 32
HELLO_BYTES = len(_MAGIC) + _CLAIM.size + _MAC_BYTES
_WELCOME = b"\x01"
FAREWELL = b"manyhands: I leave, all is well."
"""The last bytes of who closes a connection on purpose; as long as a header of a frame."""

OnRefusal = Callable[[str], None]
_Steps = Generator[int, bytes, "SessionKeys | None"]
"""One side of a handshake: yields how many bytes it needs, is sent these bytes; returns the keys of
the connection, if it is to be encrypted."""


class PeerLink(NamedTuple):
    """A connection to another host."""

    socket: socket.socket
    keys: SessionKeys | None = None
    """None: all that follows is plain."""

    @property
    def farewell(self) -> bytes:
        return FAREWELL if self.keys is None else self.keys.farewell

    @property
    def their_farewell(self) -> bytes:
        return FAREWELL if self.keys is None else self.keys.their_farewell


class _Refused(Exception):
    """This connection will not do; the meeting goes on."""

    stranger = True


class _OutOfPlace(_Refused):
    """It is one of us, but not here or not now."""

    stranger = False


class PeerListener:
    """Where this process can be reached by its peers, for all views of its life.

    `address` must be one of this host's that the others can reach (names are resolved here,
    once). `report` is told of refused callers, once a second at most.
    """

    def __init__(self, address: str = "127.0.0.1", report: OnRefusal | None = None) -> None:
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self.listener = socket.create_server(place, family=family, backlog=BACKLOG)
        self.listener.setblocking(False)
        host, port = cast(tuple[str, int], self.listener.getsockname()[:2])
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.refused = self.strangers = 0
        """How many connections were refused, and how many of them were none of ours."""
        self.last_stranger = ""
        self._report, self._reported = report, 0.0
        self.leave_last: Callable[[], None] = nothing
        """Ends what is done with the connections that were given out last."""
        self._early: dict[tuple[int, int, int], PeerLink] = {}
        self._seen: set[tuple[int, bytes]] = set()

    def meet(
        self,
        world: World,
        addresses: Sequence[str],
        *,
        generation: int,
        secret: bytes,
        patience: Patience,
        dead_s: float,
        encrypt: bool = False,
    ) -> dict[int, PeerLink]:
        """A connection to each of the others, by rank; those of a view before it are left. All of
        them must agree whether to `encrypt`.

        Raises Broken when one cannot be reached for MEET_S, or when `patience` ends.
        """
        self.leave_last()
        self.leave_last = nothing
        for key in [key for key in self._early if key[0] < generation]:
            self._early.pop(key).socket.close()
        self._seen = {(g, nonce) for g, nonce in self._seen if g >= generation}
        meeting = _Meeting(self, world, addresses, generation, secret, dead_s, encrypt)
        with patience:
            return meeting.run(patience)

    def close(self) -> None:
        self.leave_last()
        for sock in (self.listener, *(link.socket for link in self._early.values())):
            sock.close()

    def early(self, generation: int, caller: int, me: int) -> PeerLink | None:
        return self._early.pop((generation, caller, me), None)

    def keep(self, generation: int, caller: int, me: int, link: PeerLink) -> None:
        if older := self.early(generation, caller, me):
            older.socket.close()
        self._early[generation, caller, me] = link

    def is_new(self, generation: int, nonce: bytes) -> bool:
        """No two callers have the same nonce; a recording has that of the original."""
        known = (generation, nonce) in self._seen
        self._seen.add((generation, nonce))
        return not known

    def refuse(self, why: str, *, stranger: bool = True) -> None:
        self.refused += 1
        if stranger:
            self.strangers, self.last_stranger = self.strangers + 1, why
        if self._report and time.monotonic() - self._reported >= 1:
            self._reported = time.monotonic()
            self._report(f"a connection to {self.address} was refused: {why}")


class _Talk:
    """A handshake under way."""

    def __init__(self, sock: socket.socket, steps: _Steps, until: float, rank: int | None) -> None:
        self.sock, self.steps, self.until = sock, steps, until
        self.rank = rank
        """Whom we dialled; None for a caller."""
        self.keys: SessionKeys | None = None
        self.wanted, self.got = next(steps), b""

    def go_on(self) -> bool:
        """Whether it has succeeded; raises _Refused or OSError when it never will."""
        if self.wanted == 0:  # was dialling
            if number := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(number, os.strerror(number))
            self.wanted = self.steps.send(b"")
        while True:
            try:
                data = self.sock.recv(self.wanted - len(self.got))
            except BlockingIOError:
                return False
            if not data:  # one of us that gave up, unless it was in the middle of something
                kind = _Refused if self.got else _OutOfPlace
                raise kind("it ended before it had proven who it is")
            self.got += data
            if len(self.got) == self.wanted:
                try:
                    self.wanted, self.got = self.steps.send(self.got), b""
                except StopIteration as end:
                    self.keys = end.value
                    return True


class _Meeting:
    """One view's use of a door. Every socket is non-blocking and in one selector."""

    def __init__(
        self,
        listener: PeerListener,
        world: World,
        addresses: Sequence[str],
        generation: int,
        secret: bytes,
        dead_s: float,
        encrypt: bool,
    ) -> None:
        self.listener, self.world, self.addresses = listener, world, addresses
        self.generation, self.secret, self.dead_s = generation, secret, dead_s
        self.encrypt = encrypt
        self.found: dict[int, PeerLink] = {}
        self.talks: dict[socket.socket, _Talk] = {}
        self.redial = dict.fromkeys(range(world.rank), 0.0)
        self.selector = selectors.DefaultSelector()

    def run(self, patience: Patience) -> dict[int, PeerLink]:
        try:
            self.selector.register(self.listener.listener, selectors.EVENT_READ)
            self._meet(patience)
        except BaseException:
            for link in self.found.values():
                leave(link)
            raise
        finally:
            for sock in self.talks:
                sock.close()
            self.selector.close()
        return self.found

    def _meet(self, patience: Patience) -> None:
        me, ranks = self.world.rank, range(self.world.num_ranks)
        for rank in ranks[me + 1 :]:
            if link := self.listener.early(self.generation, rank, me):
                self.found[rank] = link
        until = time.monotonic() + MEET_S
        while missing := [rank for rank in ranks if rank != me and rank not in self.found]:
            who = named(missing)
            if patience.broken():
                raise Broken(f"waiting for {who} to connect was broken off")
            if (now := time.monotonic()) > until and (nowhere := self._not_reached(missing)):
                why = f"{named(nowhere)} could not be reached for {MEET_S:g} s"
                raise Broken(why, lost=tuple(nowhere))
            for rank in [rank for rank, when in self.redial.items() if when <= now]:
                self._dial(rank)
            for key, _ in self.selector.select(NAP_S):
                if key.data is None:
                    self._accept()
                elif key.fileobj in self.talks:  # not dropped in this round
                    self._go_on(key.data)
            for talk in [talk for talk in self.talks.values() if talk.until < now]:
                self._drop(talk, "it took too long to say who it is")

    def _not_reached(self, missing: Sequence[int]) -> list[int]:
        """Those we dial, and to whom there is no connection at present."""
        reached = {talk.rank for talk in self.talks.values() if talk.wanted}
        return [rank for rank in missing if rank < self.world.rank and rank not in reached]

    def _dial(self, rank: int) -> None:
        host, _, port = self.addresses[rank].rpartition(":")
        family, _, _, _, place = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        talk = _Talk(sock, self._call(sock, rank), time.monotonic() + CONNECT_S, rank)
        self.talks[sock] = talk  # from now on it is closed, whatever happens
        prepare(sock, self.dead_s)
        self.selector.register(sock, selectors.EVENT_WRITE, talk)
        del self.redial[rank]
        if sock.connect_ex(place) not in (0, errno.EINPROGRESS):
            self._drop(talk, "nobody is there")

    def _accept(self) -> None:
        for _ in range(MOST_CALLERS):  # then it is the turn of those who are in
            try:
                sock, _ = self.listener.listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._make_room()
                    return
                continue  # it was gone before it was let in
            if sum(talk.rank is None for talk in self.talks.values()) >= MOST_CALLERS:
                self._make_room()
            talk = _Talk(sock, self._answer(sock), time.monotonic() + HANDSHAKE_S, None)
            self.talks[sock] = talk
            prepare(sock, self.dead_s)
            self.selector.register(sock, selectors.EVENT_READ, talk)
            self._go_on(talk)

    def _make_room(self) -> None:
        """The oldest goes, and last of all those who seem to know the secret."""
        callers = [talk for talk in self.talks.values() if talk.rank is None]
        if callers:
            silent = min(callers, key=lambda talk: talk.wanted == _MAC_BYTES)
            self._drop(silent, "too many called at once")

    def _go_on(self, talk: _Talk) -> None:
        try:
            connecting = talk.wanted == 0
            done = talk.go_on()
            if connecting:
                talk.until = float("inf")  # whoever does not want us closes
                self.selector.modify(talk.sock, selectors.EVENT_READ, talk)
            if done:
                self.selector.unregister(talk.sock)
                del self.talks[talk.sock]
                if talk.rank is not None:
                    self.found[talk.rank] = PeerLink(talk.sock, talk.keys)
        except _Refused as why:
            self._drop(talk, str(why), stranger=why.stranger)
        except OSError as why:
            self._drop(talk, str(why), stranger=False)

    def _drop(self, talk: _Talk, why: str, *, stranger: bool = True) -> None:
        if talk.rank is None:
            self.listener.refuse(why, stranger=stranger)
        else:
            self.redial[talk.rank] = time.monotonic() + NAP_S
        self.selector.unregister(talk.sock)
        del self.talks[talk.sock]
        talk.sock.close()

    def _call(self, sock: socket.socket, rank: int) -> _Steps:
        yield 0
        pair, nonce = self._nonce()
        claim = _CLAIM.pack(self.generation, self.world.rank, rank, nonce)
        sock.send(_MAGIC + claim + self._sign(b"hello", claim))
        answer = yield _NONCE_BYTES + _MAC_BYTES
        theirs, mac = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        self._check(mac, b"answer", claim + theirs)
        sock.send(self._sign(b"call", claim + theirs))
        yield len(_WELCOME)
        return self._agree(pair, theirs, claim + theirs, calls=True)

    def _answer(self, sock: socket.socket) -> _Steps:
        if (yield len(_MAGIC)) != _MAGIC:
            raise _Refused("it does not speak our language")
        hello = yield HELLO_BYTES - len(_MAGIC)
        claim, mac = hello[: _CLAIM.size], hello[_CLAIM.size :]
        generation, caller, called, nonce = _CLAIM.unpack(claim)
        try:
            self._check(mac, b"hello", claim)
        except _Refused:
            if generation > self.generation:  # whose secret may be another; it calls again
                raise _OutOfPlace("it belongs to a view that has not begun here") from None
            raise
        if generation < self.generation:
            raise _OutOfPlace(f"it belongs to view {generation}, this is {self.generation}")
        wanted = called == self.world.rank < caller < self.world.num_ranks
        if generation == self.generation and not wanted:
            raise _OutOfPlace(f"host {caller} called host {called}, this is {self.world.rank}")
        if not self.listener.is_new(generation, nonce):
            raise _Refused("it repeats what another has said")
        pair, mine = self._nonce()
        sock.send(mine + self._sign(b"answer", claim + mine))
        self._check((yield _MAC_BYTES), b"call", claim + mine)
        link = PeerLink(sock, self._agree(pair, nonce, claim + mine, calls=False))
        sock.send(_WELCOME)
        if generation > self.generation:
            self.listener.keep(generation, caller, called, link)
            return None
        if older := self.found.pop(caller, None):
            older.socket.close()
        self.found[caller] = link
        return None

    def _nonce(self) -> tuple[Ephemeral | None, bytes]:
        if not self.encrypt:
            return None, os.urandom(_NONCE_BYTES)
        pair = Ephemeral()
        return pair, pair.public

    def _agree(
        self, pair: Ephemeral | None, theirs: bytes, signed: bytes, *, calls: bool
    ) -> SessionKeys | None:
        if pair is None:
            return None
        try:
            return pair.agree(theirs, self.secret, signed, calls=calls)
        except ValueError as why:
            raise _Refused(f"there are no keys to be had with it: {why}") from why

    def _sign(self, label: bytes, what: bytes) -> bytes:
        how = b" sealed" if self.encrypt else b""
        return hmac.digest(self.secret, b"manyhands " + label + how + b"\0" + what, "sha256")

    def _check(self, mac: bytes, label: bytes, what: bytes) -> None:
        if not hmac.compare_digest(mac, self._sign(label, what)):
            raise _Refused("it does not know the secret of this run")


def prepare(sock: socket.socket, dead_s: float) -> None:
    """The kernel finds out that a link is cut, while it is idle and while something is sent."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, int(1000 * dead_s)),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def named(ranks: Sequence[int]) -> str:
    return f"host{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def leave(link: PeerLink) -> None:
    """Close a connection on which nothing is half sent."""
    with suppress(OSError):
        link.socket.send(link.farewell)
    link.socket.close()
