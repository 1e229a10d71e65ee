"""Hosts over sockets of our own: threads stand for hosts, and processes where one must die."""

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import manyhands
from manyhands.testing.contracts import F32, CollectiveContract, wait_for_state
from manyhands.testing.namespaces import Network
from manyhands.training.collective import frames
from manyhands.training.collective import handshake as door_module
from manyhands.training.collective.collective import Bytes, Collective
from manyhands.training.collective.frames import EAGER_BYTES
from manyhands.training.collective.handshake import HELLO_BYTES, MOST_CALLERS, PeerListener
from manyhands.training.collective.sockets import Sockets, opponents
from manyhands.training.state.layout import Bounds, Lanes
from manyhands.values.errors import Broken
from manyhands.values.world import World

ROOT = Path(manyhands.__file__).parent.parent
SECRET = bytes(range(32))
LONG_S = 60.0
BIG = 1_000_000
"""Elements; far more than is sent to one who is not reading."""


class Patient:
    """Gives up when it is told to; a test that hangs ends some time."""

    def __init__(self) -> None:
        self.told, self.entered = threading.Event(), threading.Event()
        self.until = time.monotonic() + LONG_S

    def broken(self) -> bool:
        return self.told.is_set() or time.monotonic() > self.until

    def __enter__(self) -> None:
        self.entered.set()

    def __exit__(self, *error: object) -> None: ...


class Hosts:
    """So many doors, and a thread for each who goes through one."""

    def __init__(self, ranks: int, address: str = "127.0.0.1", *, encrypt: bool = False) -> None:
        self.encrypt = encrypt
        self.reports: list[str] = []
        self.listeners = [PeerListener(address, self.reports.append) for _ in range(ranks)]
        self.pool = ThreadPoolExecutor(2 * ranks)
        self.patience = [Patient() for _ in range(ranks)]

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *error: object) -> None:
        for patience in self.patience:
            patience.told.set()
        self.pool.shutdown()
        for listener in self.listeners:
            listener.close()

    @property
    def sealed(self) -> list[str]:
        """What `wander` is told."""
        return ["sealed"] * self.encrypt

    @property
    def addresses(self) -> list[str]:
        return [listener.address for listener in self.listeners]

    def join(self, rank: int, slots: Sequence[Lanes] = (), **different: Any) -> Sockets:
        ranks = different.pop("ranks", len(self.listeners))
        usual: dict[str, Any] = {
            "listener": self.listeners[rank],
            "addresses": self.addresses[:ranks],
            "generation": 1,
            "secret": SECRET,
            "patience": self.patience[rank],
            "encrypt": self.encrypt,
        }
        return Sockets(World(rank, ranks, (1,) * ranks), slots, **(usual | different))

    def start(self, work: Callable[..., Any], *arguments: Any, **named: Any) -> "Future[Any]":
        return self.pool.submit(work, *arguments, **named)

    def all(
        self, body: Callable[[int, Sockets], Any], slots: int = 0, **different: Any
    ) -> list[Any]:
        """What `body` returns on each; all of them join, and leave when they are done."""

        def work(rank: int) -> Any:
            lanes: list[Lanes] = [{F32: torch.zeros(8)} for _ in range(slots)]
            with closing(self.join(rank, lanes, **different)) as links:
                return body(rank, links)

        ranks = range(different.get("ranks", len(self.listeners)))
        return [f.result(LONG_S) for f in [self.start(work, rank) for rank in ranks]]


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
def hosts(request: pytest.FixtureRequest) -> Iterator[Callable[..., Hosts]]:
    with ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(Hosts(*arguments, encrypt=request.param))


Making = Callable[..., Hosts]


def message(value: int, size: int = 6) -> Bytes:
    return np.full(size, value, dtype=np.uint8)


def values(rows: Sequence[Bytes]) -> list[int]:
    return [int(row[0]) for row in rows]


def halves(numel: int, ranks: int) -> list[Bounds]:
    cuts = [numel * k // ranks for k in range(ranks + 1)]
    return [{F32: bounds} for bounds in itertools.pairwise(cuts)]


def one_step(links: Sockets, numel: int) -> None:
    """Of training: the sum of what everyone has in its first slot."""
    world = links.world
    owned = halves(numel, world.num_ranks)
    rows = links.gather(message(world.rank))
    assert values(rows) == list(range(world.num_ranks))
    parts = links.exchange([1] * world.num_ranks, owned)
    assert [float(p[F32][-1]) for (p,) in parts] == [float(r) for r in range(world.num_ranks)]
    sums = torch.zeros(numel)
    a, b = owned[world.rank][F32]
    sums[a:b] = world.rank
    links.share({F32: sums}, owned)
    assert [float(sums[o[F32][0]]) for o in owned] == [float(r) for r in range(world.num_ranks)]


class TestLinks(CollectiveContract):
    @pytest.fixture
    def on_ranks(self, hosts: Making) -> Callable[..., list[object]]:
        def run(ranks: int, body: Callable[[int, Collective], object]) -> list[object]:
            return hosts(ranks).all(body, slots=3)

        return run


# ---- what moves


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[int], list[Bounds], dict[torch.dtype, int]]:
    """Slots per rank, who owns what, elements per dtype."""
    ranks = draw(st.integers(2, 4))
    numbers = st.one_of(st.integers(0, 50), st.integers(2 * EAGER_BYTES, 3 * EAGER_BYTES))
    lanes = draw(st.dictionaries(st.sampled_from(DTYPES), numbers, min_size=1, max_size=3))
    counts = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
    owned: list[Bounds] = [{} for _ in range(ranks)]
    for dtype, numel in lanes.items():
        inner = draw(st.lists(st.integers(0, numel), min_size=ranks - 1, max_size=ranks - 1))
        cuts = [0, *sorted(inner), numel]
        owners = draw(st.permutations(range(ranks)))
        for rank, bounds in zip(owners, itertools.pairwise(cuts), strict=True):
            owned[rank][dtype] = bounds
    return counts, owned, lanes


def content(dtype: torch.dtype, numel: int, *seed: int) -> torch.Tensor:
    found = np.random.default_rng(seed).integers(0, 100, numel)
    return torch.from_numpy(found).to(dtype)


@settings(max_examples=30)
@given(situations(), st.booleans())
def test_any_stretches_of_any_slots_arrive_where_they_belong(
    situation: tuple[list[int], list[Bounds], dict[torch.dtype, int]], encrypt: bool
) -> None:
    counts, owned, lanes = situation

    def made(*seed: int) -> Lanes:
        return {d: content(d, n, *seed) for d, n in lanes.items()}

    def body(rank: int, links: Sockets) -> None:
        for turn in range(2):  # the second finds the rooms of the first
            links.slots = [made(turn, rank, k) for k in range(counts[rank])]
            parts = links.exchange(counts, owned)
            for other, slots in enumerate(parts):
                assert len(slots) == counts[other]
                for k, slot in enumerate(slots):
                    whole = made(turn, other, k)
                    for dtype, (a, b) in owned[rank].items():
                        assert torch.equal(slot[dtype], whole[dtype][a:b])
            whole, mine = made(turn, 99), {d: torch.zeros(n, dtype=d) for d, n in lanes.items()}
            for dtype, (a, b) in owned[rank].items():
                mine[dtype][a:b] = whole[dtype][a:b]
            links.share(mine, owned)
            assert all(torch.equal(mine[d], whole[d]) for d in lanes)

    with Hosts(len(counts), encrypt=encrypt) as made_hosts:
        made_hosts.all(body)


@pytest.mark.parametrize("size", [0, 1, 63, 64, EAGER_BYTES, EAGER_BYTES + 1, 300_000])
def test_messages_of_any_size_are_gathered(hosts: Making, size: int) -> None:
    def body(rank: int, links: Sockets) -> bool:
        called: list[int] = []
        for turn in range(4):
            mine = message(10 * turn + rank, size)
            rows = links.gather(mine, meanwhile=lambda: called.append(1))
            want = [[10 * turn + r] * size for r in range(3)]
            assert [row.tolist() for row in rows] == want
        return len(called) == 4

    assert hosts(3).all(body) == [True] * 3


def test_slots_may_be_many(hosts: Making) -> None:
    """More than one system call takes."""

    def body(rank: int, links: Sockets) -> list[float]:
        links.slots = [{F32: torch.full((8,), 1000.0 * rank + k)} for k in range(700)]
        return [float(p[F32][3]) for p in links.exchange([700, 700], halves(8, 2))[1 - rank]]

    second, first = hosts(2).all(body)
    assert first == [float(k) for k in range(700)] and second == [1000.0 + k for k in range(700)]


def test_a_host_alone_meets_nobody(hosts: Making) -> None:
    def body(rank: int, links: Sockets) -> list[float]:
        one_step(links, 8)
        assert links.measure() == []
        return links.exchange([1], halves(8, 1))[0][0][F32].tolist()

    assert hosts(1).all(body, slots=1) == [[0.0] * 8]


def test_hosts_meet_over_ipv6(hosts: Making) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    two = hosts(2, "::1")
    assert two.addresses[0].startswith("[::1]:")
    assert two.all(lambda rank, links: values(links.gather(message(rank)))) == [[0, 1]] * 2


def test_everyone_is_measured_by_everyone(hosts: Making) -> None:
    found = hosts(3).all(lambda rank, links: links.measure())
    for rank, row in enumerate(found):
        assert [other for other, _, _ in row] == [r for r in range(3) if r != rank]
        for other, seconds, speed in row:
            assert 0 < seconds < LONG_S and speed > 0
            assert (rank, seconds, speed) in found[other], "both sides say the same"


@pytest.mark.parametrize("ranks", range(1, 10))
def test_in_a_tournament_nobody_plays_twice_at_once(ranks: int) -> None:
    plays = [opponents(World(rank, ranks)) for rank in range(ranks)]
    for rank, others in enumerate(plays):
        met = [other for other in others if other is not None]
        assert sorted(met) == [r for r in range(ranks) if r != rank]
    for pairs in zip(*plays, strict=True):
        assert all(other is None or pairs[other] == rank for rank, other in enumerate(pairs))


def test_one_who_comes_late_is_waited_for(hosts: Making) -> None:
    """The kernel takes one who reads nothing for dead, so nothing much is sent before it reads."""
    dead_s = 0.2

    def body(rank: int, links: Sockets) -> None:
        links.slots = [{F32: torch.full((BIG,), float(rank))}]
        links.gather(message(0, EAGER_BYTES))
        if rank == 1:
            threading.Event().wait(5 * dead_s)
        one_step(links, BIG)

    hosts(2).all(body, dead_s=dead_s)


# ---- ends


def test_hosts_that_disagree_are_told(hosts: Making) -> None:
    def body(rank: int, links: Sockets) -> str:
        with pytest.raises(Broken, match="disagree") as caught:
            if rank:
                links.gather(message(1))
            else:
                links.share({F32: torch.zeros(8)}, halves(8, 2))
        assert caught.value.lost == ()
        with pytest.raises(Broken, match="disagree"):  # and that is that
            links.gather(message(1))
        return str(caught.value)

    first, _ = hosts(2).all(body)
    assert "host 1 sent gather 1 of view 1 (6 bytes) where share 1 of view 1 (16 bytes)" in first


def test_one_who_is_waited_for_may_be_given_up(hosts: Making) -> None:
    two = hosts(2)
    here, there = two.start(two.join, 0), two.start(two.join, 1)
    with closing(here.result(LONG_S)) as links, closing(there.result(LONG_S)):
        two.patience[0].entered.clear()
        waiting = two.start(links.gather, message(0))
        assert two.patience[0].entered.wait(LONG_S), "others can tell that it waits"
        two.patience[0].told.set()
        with pytest.raises(Broken, match="waiting for host 1 was broken off") as caught:
            waiting.result(LONG_S)
        assert caught.value.lost == ()


def test_a_call_ends_when_another_thread_closes(hosts: Making) -> None:
    two = hosts(2)
    here, there = two.start(two.join, 0), two.start(two.join, 1)
    with closing(here.result(LONG_S)) as links, closing(there.result(LONG_S)) as other:
        two.patience[0].entered.clear()
        waiting = two.start(links.gather, message(0))
        assert two.patience[0].entered.wait(LONG_S)
        links.close()
        with pytest.raises(Broken, match="this host has left"):
            waiting.result(LONG_S)
        with pytest.raises(Broken, match="host 0 left") as caught:
            for _ in range(2):  # the first has got its answer
                other.gather(message(1))
        assert caught.value.lost == (), "who says farewell is not lost"


class Stuck(Patient):
    """Its host hangs when it should be reading, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs, self.go = threading.Event(), threading.Event()

    def broken(self) -> bool:
        self.hangs.set()
        self.go.wait(LONG_S)
        return super().broken()


def test_one_who_gives_up_in_the_middle_of_a_frame_is_not_taken_for_dead(
    hosts: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "LEAVE_S", LONG_S)
    two, stuck, numel = hosts(2), Stuck(), 20 * BIG
    slots = [{F32: torch.zeros(numel)}]
    meetings = [two.start(two.join, rank, slots, dead_s=LONG_S) for rank in range(2)]
    ours, theirs = (meeting.result(LONG_S) for meeting in meetings)
    with closing(ours), closing(theirs):
        theirs.patience = stuck
        calls = [two.start(x.exchange, [1, 1], halves(numel, 2)) for x in (ours, theirs)]
        assert stuck.hangs.wait(LONG_S)
        two.patience[0].told.set()  # what it sends is stuck by now, or soon
        stuck.go.set()
        with pytest.raises(Broken, match="waiting for host 1 was broken off"):
            calls[0].result(LONG_S)
        with pytest.raises(Broken, match="host 0 left") as caught:
            calls[1].result(LONG_S)
        assert caught.value.lost == ()


def test_one_who_cannot_be_reached_is_lost_and_one_who_is_busy_is_not(
    hosts: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "MEET_S", 0.2)
    three = hosts(3)
    three.listeners[0].close()  # its process is gone; host 1 listens and has not come yet
    with pytest.raises(Broken, match="host 0 could not be reached") as caught:
        three.join(2)
    assert caught.value.lost == (0,)


@pytest.mark.parametrize("rank", [0, 1])
def test_meeting_may_be_broken_off(hosts: Making, rank: int) -> None:
    two = hosts(2)
    meeting = two.start(two.join, rank)
    assert two.patience[rank].entered.wait(LONG_S)
    two.patience[rank].told.set()
    with pytest.raises(Broken, match=f"waiting for host {1 - rank} to connect") as caught:
        meeting.result(LONG_S)
    assert caught.value.lost == ()


def test_the_next_view_meets_at_the_same_doors_after_an_abrupt_end(hosts: Making) -> None:
    three = hosts(3)
    left: list[Sockets] = []

    def stop(rank: int, links: Sockets) -> None:
        left.append(links)
        with pytest.raises((RuntimeError, Broken)):
            links.gather(message(0), meanwhile=lambda: stumble(rank))

    def stumble(rank: int) -> None:
        if rank == 1:
            raise RuntimeError("on the way")

    for generation in range(1, 6):
        meetings = [three.start(three.join, rank, generation=generation) for rank in range(3)]
        for rank, meeting in enumerate(meetings):
            three.start(stop, rank, meeting.result(LONG_S))
    found = three.all(lambda rank, links: values(links.gather(message(rank))), generation=9)
    assert found == [[0, 1, 2]] * 3
    for links in left:
        with pytest.raises(Broken):
            links.gather(message(0))


def test_one_that_is_ahead_is_let_in_and_waits(hosts: Making) -> None:
    three = hosts(3)
    stuck = three.start(three.join, 0)  # in view 1, of which nobody else is
    assert three.patience[0].entered.wait(LONG_S)
    ahead = three.start(three.join, 1, ranks=2, generation=2).result(LONG_S)
    three.patience[0].told.set()
    with pytest.raises(Broken):
        stuck.result(LONG_S)
    three.patience[0] = Patient()
    with closing(ahead), closing(three.join(0, ranks=2, generation=2)) as links:
        later = three.start(ahead.gather, message(1))
        assert values(links.gather(message(0))) == values(later.result(LONG_S)) == [0, 1]
    assert three.listeners[0].refused == 0


def test_one_that_is_ahead_and_has_a_new_secret_is_no_stranger(hosts: Making) -> None:
    """A host was dropped, and this one has not heard yet by which secret the others go on."""
    two = hosts(2)
    new: dict[str, Any] = {"generation": 2, "secret": bytes(32)}
    meeting = two.start(two.join, 0)
    ahead = two.start(two.join, 1, **new)
    until(lambda: two.listeners[0].refused > 1)
    assert two.listeners[0].strangers == 0
    two.patience[0].told.set()
    with pytest.raises(Broken):
        meeting.result(LONG_S)
    two.patience[0] = Patient()
    with closing(two.join(0, **new)) as ours, closing(ahead.result(LONG_S)) as theirs:
        later = two.start(theirs.gather, message(1))
        assert values(ours.gather(message(0))) == values(later.result(LONG_S)) == [0, 1]


def test_one_that_is_behind_is_refused(hosts: Making) -> None:
    two = hosts(2)
    behind = two.start(two.join, 1)
    assert two.patience[1].entered.wait(LONG_S)
    meeting = two.start(two.join, 0, generation=2)
    until(lambda: two.listeners[0].refused > 1)  # it tries again
    two.patience[1].told.set()
    with pytest.raises(Broken):
        behind.result(LONG_S)
    two.patience[1] = Patient()
    with closing(two.join(1, generation=2)), closing(meeting.result(LONG_S)):
        assert "it belongs to view 1, this is 2" in two.reports[0]


# ---- strangers


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def dial(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=LONG_S)


class Recorder:
    """Stands between who dials and who is dialled, and writes down what either says."""

    def __init__(self, address: str) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.said: dict[str, bytes] = {"caller": b"", "called": b""}
        self.thread = threading.Thread(target=self._stand_between, args=(address,))
        self.thread.start()

    def _stand_between(self, address: str) -> None:
        caller, _ = self.listener.accept()
        with caller, dial(address) as called:
            back = threading.Thread(target=self._pass_on, args=("called", called, caller))
            back.start()
            self._pass_on("caller", caller, called)
            back.join()

    def _pass_on(self, who: str, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.said[who] += data
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.thread.join(LONG_S)
        self.listener.close()


def test_a_flood_of_strangers_disturbs_nobody(hosts: Making) -> None:
    two = hosts(2)
    address, lots = two.addresses[0], random.Random(1)
    meeting = two.start(two.join, 0)
    assert two.patience[0].entered.wait(LONG_S)
    with ExitStack() as stack:
        for _ in range(2 * MOST_CALLERS):  # who say nothing
            stack.enter_context(dial(address))
        for _ in range(250):  # who say anything, a million bytes of it
            with dial(address) as stranger, suppress(ConnectionError):
                stranger.sendall(lots.randbytes(4000))
        until(lambda: two.listeners[0].refused >= 250 + MOST_CALLERS)

        over = threading.Event()

        def go_on() -> None:
            while not over.is_set():
                with suppress(OSError), dial(address) as stranger:
                    stranger.sendall(lots.randbytes(lots.choice((0, 7, 8, 90, 4000))))

        flood = [two.start(go_on) for _ in range(2)]
        stack.callback(over.set)
        with closing(two.join(1)) as theirs, closing(meeting.result(LONG_S)) as ours:
            ours.slots, theirs.slots = ([{F32: torch.full((64,), float(r))}] for r in range(2))
            later = two.start(one_step, theirs, 64)
            one_step(ours, 64)
            later.result(LONG_S)
        over.set()
        for thread in flood:
            thread.result(LONG_S)


def test_refusals_are_counted_and_told_now_and_then(hosts: Making) -> None:
    one = hosts(1)
    for _ in range(1000):
        one.listeners[0].refuse("it is a stranger")
    assert one.listeners[0].refused == 1000
    told = f"a connection to {one.addresses[0]} was refused: it is a stranger"
    assert set(one.reports) == {told} and len(one.reports) < 100


def test_what_was_recorded_opens_no_door(hosts: Making) -> None:
    """Host 1 is recorded, and played back while the door still waits for host 2."""
    three = hosts(3)
    with ExitStack() as stack:
        recorder = stack.enter_context(closing(Recorder(three.addresses[0])))
        detour = [recorder.address, *three.addresses[1:]]
        meetings = [three.start(three.join, 0), three.start(three.join, 1, addresses=detour)]
        until(lambda: len(recorder.said["called"]) == 65)  # it has been let in
        hello = recorder.said["caller"]
        assert len(hello) == HELLO_BYTES + 32
        for number in range(20):
            assert play_back(three.addresses[0], hello) == b"", "it is not even answered"
            until(lambda number=number: three.listeners[0].refused == number + 1)
        meetings.append(three.start(three.join, 2))
        links = [stack.enter_context(closing(m.result(LONG_S))) for m in meetings]
        calls = [three.start(x.gather, message(rank)) for rank, x in enumerate(links)]
        assert [values(c.result(LONG_S)) for c in calls] == [[0, 1, 2]] * 3

    two = hosts(2)  # with doors that have not heard it before
    meeting = two.start(two.join, 0)
    assert len(play_back(two.addresses[0], hello)) == 64, "a question that was never asked before"
    until(lambda: two.listeners[0].refused == 1)
    with closing(two.join(1)), closing(meeting.result(LONG_S)):
        pass


def play_back(address: str, hello: bytes) -> bytes:
    """What is answered, until it is hung up."""
    answer = b""
    with dial(address) as stranger, suppress(OSError):
        stranger.sendall(hello)
        while part := stranger.recv(1000):
            answer += part
    return answer


@pytest.mark.parametrize(
    "different", [{"secret": bytes(32)}, {"generation": 0}, {"rank": 2, "ranks": 3}]
)
def test_who_is_not_of_this_view_is_refused(hosts: Making, different: dict[str, Any]) -> None:
    """Of another run, of a view before this one, or a host too many."""
    different, two = dict(different), hosts(3)
    meeting = two.start(two.join, 0, ranks=2)
    rank = different.pop("rank", 1)
    wrong = two.start(two.join, rank, **{"ranks": 2} | different)
    until(lambda: two.listeners[0].refused > 1)
    for patience in two.patience[1:]:
        patience.told.set()
    with pytest.raises(Broken):
        wrong.result(LONG_S)
    two.patience[1] = Patient()
    with closing(two.join(1, ranks=2)) as theirs, closing(meeting.result(LONG_S)) as ours:
        later = two.start(theirs.gather, message(1))
        assert values(ours.gather(message(0))) == values(later.result(LONG_S)) == [0, 1]


def test_an_impostor_at_the_address_of_a_host_learns_nothing(hosts: Making) -> None:
    two = hosts(2)
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        address = f"127.0.0.1:{impostor.getsockname()[1]}"
        meeting = two.start(two.join, 1, addresses=[address, two.addresses[1]])
        for _ in range(3):  # it dials again
            caller, _ = impostor.accept()
            with caller:
                hello = caller.recv(1000)
                assert len(hello) == HELLO_BYTES
                caller.sendall(bytes(64))
                assert caller.recv(1000) == b"", "no proof is given to who gave none"
        two.patience[1].told.set()
        with pytest.raises(Broken):
            meeting.result(LONG_S)


# ---- processes


def wander() -> None:
    """A host that is a process: says where its door is, is told of the others', takes steps."""
    rank, ranks, numel, address, *sealed = sys.argv[1:]
    torch.set_num_threads(1)
    world, listener = World(int(rank), int(ranks), (1,) * int(ranks)), PeerListener(address)
    print(listener.address, flush=True)
    slots = [{F32: torch.full((int(numel),), float(rank))}]
    links = Sockets(
        world,
        slots,
        listener=listener,
        addresses=json.loads(input()),
        generation=1,
        secret=SECRET,
        patience=Patient(),
        encrypt=bool(sealed),
    )
    try:
        for step in itertools.count():
            one_step(links, int(numel))
            if step == 5:
                print("going", flush=True)
    except Broken as error:
        print(json.dumps([str(error), error.lost]), flush=True)


WANDER = [
    sys.executable,
    "-c",
    "from tests.training.collective.test_sockets import wander; wander()",
]
PIPES: dict[str, Any] = {
    "stdin": subprocess.PIPE,
    "stdout": subprocess.PIPE,
    "cwd": ROOT,
    "text": True,
}


def tell(process: "subprocess.Popen[str]", what: object) -> None:
    assert process.stdin is not None
    print(json.dumps(what), file=process.stdin, flush=True)


def hear(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def reap(process: "subprocess.Popen[str]") -> None:
    process.kill()
    with process:
        pass


@pytest.mark.parametrize("victim, numel", [(0, 64), (1, BIG), (2, BIG)])
def test_whoever_waits_for_one_who_is_killed_is_told_whom(
    hosts: Making, victim: int, numel: int
) -> None:
    three = hosts(3)
    command = [*WANDER, str(victim), "3", str(numel), "127.0.0.1", *three.sealed]
    process = subprocess.Popen(command, **PIPES)
    with ExitStack() as stack:
        stack.callback(reap, process)
        addresses = three.addresses
        addresses[victim] = hear(process)
        tell(process, addresses)

        def work(rank: int) -> Broken:
            slots = [{F32: torch.full((numel,), float(rank))}]
            with closing(three.join(rank, slots, addresses=addresses)) as links:
                with pytest.raises(Broken) as caught:
                    while True:
                        one_step(links, numel)
                return caught.value

        others = [three.start(work, rank) for rank in range(3) if rank != victim]
        assert hear(process) == "going"
        process.kill()
        for other in others:
            error = other.result(LONG_S)
            assert error.lost == (victim,) and f"host {victim} broke" in str(error)


def test_whoever_waits_for_one_who_hangs_may_give_up(hosts: Making) -> None:
    two = hosts(2)
    process = subprocess.Popen([*WANDER, "1", "2", "64", "127.0.0.1", *two.sealed], **PIPES)
    with ExitStack() as stack:
        stack.callback(reap, process)
        addresses = [two.addresses[0], hear(process)]
        tell(process, addresses)
        slots = [{F32: torch.zeros(64)}]
        links = stack.enter_context(closing(two.join(0, slots, addresses=addresses)))

        def work() -> None:
            while True:
                one_step(links, 64)

        steps = two.start(work)
        assert hear(process) == "going"
        os.kill(process.pid, signal.SIGSTOP)
        wait_for_state(process.pid, "T")
        with suppress(TimeoutError):
            steps.result(0.5)  # it waits, and the kernel sees nothing wrong
        assert not steps.done()
        two.patience[0].told.set()
        with pytest.raises(Broken, match="waiting for host 1 was broken off") as caught:
            steps.result(LONG_S)
        assert caught.value.lost == ()


@pytest.mark.parametrize("numel", [pytest.param(64, marks=pytest.mark.slow), BIG])
def test_both_ends_of_a_link_that_is_cut_are_told(
    network: Callable[..., Network], numel: int
) -> None:
    net = network(hosts=2)
    with ExitStack() as stack:
        processes: list[subprocess.Popen[str]] = []
        for rank, host in enumerate(net.hosts):
            command = [*WANDER, str(rank), "2", str(numel), host.address, "sealed"]
            processes.append(host.popen(command, **PIPES))
            stack.callback(reap, processes[rank])
        addresses = [hear(process) for process in processes]
        for process in processes:
            tell(process, addresses)
        for process in processes:
            assert hear(process) == "going"
        net.cut(*net.hosts)
        for rank, process in enumerate(processes):
            why, lost = json.loads(hear(process))
            assert lost == [1 - rank] and f"the connection to host {1 - rank} broke" in why
