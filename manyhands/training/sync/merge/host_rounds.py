# SPDX-License-Identifier: Apache-2.0
"""What hosts do in a round, and how far each is after a loss: pure, and the same on every host.

In a **round** every host tells all others its members' words and, if it has the head, the head's.
Then each sends one piece of one push to all others. All know what every host has told, so all know
which pieces come, and where they belong.

There is **one line of pushes** for each view: the head numbers them, and numbers none before all
hosts have applied the one before it. So the lines of the hosts of a view are the beginnings of one,
and none is more than one push behind another. A host that was not in the newest view that began to
train may have a push that nobody else has: what it keeps does not count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from manyhands.training.sync.merge.board import PushOrder
from manyhands.values.world import World


@dataclass(frozen=True, slots=True)
class Piece:
    """Of push `sequence` of a rank, the bytes [start, stop)."""

    rank: int
    sequence: int
    start: int
    stop: int


@dataclass(frozen=True)
class Sent:
    """How much of what each rank has pushed has gone to all hosts."""

    whole: Mapping[int, int] = field(default_factory=dict[int, int])
    """By rank: so many pushes."""
    begun: Mapping[int, int] = field(default_factory=dict[int, int])
    """And so many bytes of the next one."""

    def after(self, pieces: Sequence[Piece | None], size: int) -> "Sent":
        """`size`: of a push."""
        whole, begun = dict(self.whole), dict(self.begun)
        for piece in pieces:
            if piece is None:
                continue
            if piece.stop == size:
                whole[piece.rank] = piece.sequence
                begun.pop(piece.rank, None)
            else:
                begun[piece.rank] = piece.stop
        return replace(self, whole=whole, begun=begun)


def next_pieces(
    world: World, pushed: Sequence[int], sent: Sent, *, size: int, most: int
) -> list[Piece | None]:
    """By host. A push that was begun is sent to its end; then comes that of the rank of which the
    fewest were sent. `pushed`: by rank, so many are there to be sent."""
    pieces: list[Piece | None] = []
    for host in range(world.num_hosts):
        waiting = [r for r in world.ranks_of(host) if pushed[r] > sent.whole.get(r, 0)]
        if not waiting:
            pieces.append(None)
            continue
        rank = min(waiting, key=lambda r: (r not in sent.begun, sent.whole.get(r, 0), r))
        start = sent.begun.get(rank, 0)
        sequence = sent.whole.get(rank, 0) + 1
        pieces.append(Piece(rank, sequence, start, min(size, start + most)))
    return pieces


@dataclass(frozen=True, slots=True)
class LinePosition:
    """How far a host is that keeps the state."""

    generation: int
    """Of the last view that began to train there; 0: of none."""
    ordered: int
    """So many pushes are in its line, ..."""
    last: PushOrder | None = None
    """... of which this is the last."""

    @property
    def words(self) -> tuple[int, ...]:
        order = self.last or PushOrder(-1, 0, False, 0)
        return self.generation, self.ordered, order.rank, order.sequence

    @staticmethod
    def from_words(words: Sequence[int]) -> "LinePosition | None":
        """None: a host that keeps nothing."""
        generation, ordered, rank, sequence = words
        if generation < 0:
            return None
        last = PushOrder(rank, sequence, False, 0) if rank >= 0 else None
        return LinePosition(generation, ordered, last)


NOWHERE = (-1, 0, -1, 0)
"""The words of a host that keeps nothing."""


@dataclass(frozen=True, slots=True)
class Outdated:
    """What is kept here does not count: all is taken from another."""


def what_is_missing(
    positions: Sequence[LinePosition | None], here: int
) -> PushOrder | Outdated | None:
    """What a host must do to have what any host has: apply one push more, which lies in its memory,
    take everything from another, or nothing."""
    mine = positions[here]
    if mine is None:
        return None
    newest = max(p.generation for p in positions if p is not None)
    if mine.generation < newest:
        return Outdated()
    line = [p for p in positions if p is not None and p.generation == newest]
    ahead = max(line, key=lambda p: p.ordered)
    if newest == 0 or mine.ordered == ahead.ordered:
        return None
    return ahead.last if ahead.last and mine.ordered + 1 == ahead.ordered else Outdated()
