"""Rounds between hosts, and how hosts that were interrupted come to one line of pushes."""

from hypothesis import given
from hypothesis import strategies as st

from manyhands.training.sync.merge.board import PushOrder
from manyhands.training.sync.merge.host_rounds import (
    NOWHERE,
    LinePosition,
    Outdated,
    Sent,
    next_pieces,
    what_is_missing,
)
from manyhands.values.world import World


@given(
    st.lists(st.integers(1, 3), min_size=2, max_size=4),
    st.integers(1, 40),
    st.integers(1, 17),
    st.data(),
)
def test_all_that_is_pushed_is_sent_once_and_in_order(
    hosts: list[int], size: int, most: int, data: st.DataObject
) -> None:
    """Whoever pushes when; nobody is kept waiting for good."""
    ranks = sum(hosts)
    world, sent = World(0, ranks, tuple(hosts)), Sent()
    goal = [data.draw(st.integers(0, 3)) for _ in range(ranks)]
    pushed, received = [0] * ranks, [[0, 0] for _ in range(ranks)]
    rounds = 0
    while [whole for whole, _ in received] != goal:
        for rank in range(ranks):
            room = pushed[rank] < min(goal[rank], received[rank][0] + 2)
            if room and (rounds > 3 * ranks or data.draw(st.booleans())):
                pushed[rank] += 1
        pieces = next_pieces(world, pushed, sent, size=size, most=most)
        assert len(pieces) == len(hosts)
        for host, piece in enumerate(pieces):
            mine = [r for r in world.ranks_of(host) if pushed[r] > received[r][0]]
            assert (piece is None) == (not mine), "who has something sends something"
            if piece is None:
                continue
            assert piece.rank in mine and 0 < piece.stop - piece.start <= most
            whole, begun = received[piece.rank]
            assert (piece.sequence, piece.start) == (whole + 1, begun) and piece.stop <= size
            done = piece.stop == size
            received[piece.rank] = [whole + 1, 0] if done else [whole, piece.stop]
        sent = sent.after(pieces, size)
        for rank in range(ranks):
            assert [sent.whole.get(rank, 0), sent.begun.get(rank, 0)] == received[rank]
        rounds += 1
        assert rounds < 100 + 4 * ranks * (size + 1)


def order(n: int) -> PushOrder:
    return PushOrder(n % 3, n + 1, False, 0)


def position(generation: int, ordered: int, began: int = 0) -> LinePosition:
    return LinePosition(generation, ordered, order(ordered - 1) if ordered > began else None)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=5), st.integers(1, 50), st.data())
def test_hosts_of_one_view_come_to_the_line_of_the_one_ahead(
    behind: list[int], ahead: int, data: st.DataObject
) -> None:
    """A host can keep nothing, or what it kept in a view before."""
    kinds = [data.draw(st.sampled_from(["here", "here", "new", "old"])) for _ in behind]
    found: list[LinePosition | None] = []
    for lag, kind in zip(behind, kinds, strict=True):
        at = {"here": position(7, ahead - lag), "old": position(5, ahead + lag), "new": None}
        found.append(at[kind])
    here = [k for k, kind in enumerate(kinds) if kind == "here"]
    newest = max((p.ordered for k in here if (p := found[k])), default=0)
    for k, mine in enumerate(found):
        missing = what_is_missing(found, k)
        if mine is None:
            assert missing is None, "it takes everything anyway"
        elif kinds[k] == "old" and here:
            assert missing == Outdated(), "also when it is ahead: it may have what nobody else has"
        elif kinds[k] == "here":
            assert missing == (None if mine.ordered == newest else order(newest - 1))


def test_who_is_further_behind_than_can_be_takes_everything() -> None:
    found = [position(3, 9), position(3, 7)]
    assert what_is_missing(found, 0) is None and what_is_missing(found, 1) == Outdated()


def test_before_the_first_view_has_begun_there_is_no_line() -> None:
    found = [LinePosition(0, 5), LinePosition(0, 5), None]
    assert all(what_is_missing(found, k) is None for k in range(3))


@given(st.integers(0, 9), st.integers(0, 99))
def test_positions_travel_as_words(generation: int, ordered: int) -> None:
    for at in (position(generation, ordered), LinePosition(generation, ordered)):
        assert LinePosition.from_words(at.words) == at
    assert LinePosition.from_words(NOWHERE) is None
