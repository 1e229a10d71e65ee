# SPDX-License-Identifier: Apache-2.0
"""Between hosts: what is written on one host's board comes to the boards of the others.

The first server of each host has a thread for it, its courier (two_level.py), which all the time of
a view does rounds with those of the other hosts (host_rounds.py): a round begins when anybody has
something new. When a round has ended here, all that the others had said as it began is here; when
all have begun the next one, all have the pieces of it. So a push is held by all hosts (HELD) one
round after its last piece. All else is as on one host: members wait for words in its memory.

Every worker has two pushes under way at most, and a host sends one piece of PIECE_BYTES in a round:
a slow link delays what is pushed, and keeps no worker from computing.
"""

import threading
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from manyhands.training.collective.collective import Patience
from manyhands.training.collective.sequence_words import Bells
from manyhands.training.collective.sockets import Sockets
from manyhands.training.state.layout import Bounds
from manyhands.training.sync.merge.board import (
    AGREED,
    ANSWERED,
    APPLIED,
    ASKED,
    AT,
    FREED,
    GRANTED,
    HEARD,
    HELD,
    MEETING,
    ORDERED,
    PUSHED,
    TAKEN,
    Board,
    PushOrder,
)
from manyhands.training.sync.merge.host_rounds import Piece, Sent, next_pieces
from manyhands.values.errors import Broken
from manyhands.values.world import World

PIECE_BYTES = 1 << 20
NAP_S = 1e-3
"""How long a change on this host may wait until it is seen."""

_SAID = (APPLIED, AT, ASKED, HEARD, PUSHED)
_HEAD = 8  # words of the head: ORDERED, the order of the last push, MEETING, AGREED
_ANSWERS = (FREED, ANSWERED, GRANTED)

RoundWords = NDArray[np.int64]


class Relay:
    def __init__(
        self,
        world: World,
        board: Board,
        between: Sockets,
        bells: Bells,
        patience: Patience,
        workers: Sequence[int],
    ) -> None:
        self.world, self.board, self.between = world, board, between
        self.bells, self.patience, self.workers = bells, patience, frozenset(workers)
        self.mine = world.ranks_of(world.host)
        self._row = len(_SAID) * max(world.hosts)
        self._told: RoundWords = np.zeros(
            _HEAD + len(_ANSWERS) * world.num_ranks + self._row, np.int64
        )
        """What was said here in the last round."""
        self._sent = Sent()
        self._size = sum(view.nbytes for view in board.boards.buffers(0, 0))
        self._stage = torch.zeros(world.num_hosts * min(PIECE_BYTES, self._size), dtype=torch.uint8)
        self._unsure = False
        """Not all hosts are known to have the pieces of the last round."""
        self._pending = False
        """There is more to be sent, by somebody."""
        self._changed = threading.Condition()
        self._announced = 0
        self._failed: BaseException | None = None

    # ---- for the thread that trains

    def check(self) -> None:
        """Raises what has put an end to it."""
        if self._failed is not None:
            raise self._failed

    def announce(self, step: int) -> None:
        """On the head's host: on return the others have been told of the meeting after so many
        steps. They may leave as soon as they hear of it, and so may this one then."""
        with self._changed, self.patience:
            while self._announced < step:
                self.check()
                if self.patience.broken():
                    raise Broken("waiting for other hosts was broken off")
                self._changed.wait(0.02)

    # ---- the courier's

    def run(self) -> None:
        """Until the view is over."""
        try:
            while True:
                if self._is_due(block := self._said()) or self.between.called(NAP_S):
                    self._round(block)
        except BaseException as error:
            self._failed = error
            self.bells.ring([self.world.rank])

    def _is_due(self, block: RoundWords) -> bool:
        return self._unsure or self._pending or not np.array_equal(block, self._told)

    def _round(self, block: RoundWords) -> None:
        self._told = block
        told = [m.view(np.int64).copy() for m in self.between.gather(block.view(np.uint8))]
        held = self._sent.whole
        pushed = self._pushed(told)
        pieces = next_pieces(self.world, pushed, self._sent, size=self._size, most=PIECE_BYTES)
        self._unsure = any(piece is not None for piece in pieces)
        if self._unsure:
            self._swap(pieces)
            self._sent = self._sent.after(pieces, self._size)
        self._pending = any(n > self._sent.whole.get(r, 0) for r, n in enumerate(pushed))
        if self.world.host == 0:
            self._hear_members(told, held)
        else:
            self._hear_head(told[0])
        with self._changed:
            self._announced = int(block[5])
            self._changed.notify_all()

    # ---- words

    def _said(self) -> RoundWords:
        """What is to be told from here. Words that are written later are read earlier: whoever sees
        one of them sees what it speaks of."""
        board, rows = self.board, self.board.rows
        block = np.zeros_like(self._told)
        answers = block[_HEAD : len(block) - self._row].reshape(len(_ANSWERS), -1)
        said = block[len(block) - self._row :].reshape(len(_SAID), -1)
        if self.world.host == 0:
            for k, word in enumerate(_ANSWERS):
                answers[k] = rows[: self.world.num_ranks, word]
            block[5] = board.words[MEETING]
            block[6] = board.words[AGREED]
            block[0] = ordered = board.ordered
            if ordered > board.began:
                order = board.order(ordered - 1)
                block[1:5] = order.rank, order.sequence, order.meets, order.agreed
        for k, word in enumerate(_SAID):
            said[k, : len(self.mine)] = rows[self.mine.start : self.mine.stop, word]
        return block

    def _by_host(self, block: RoundWords) -> RoundWords:
        return block[len(block) - self._row :].reshape(len(_SAID), -1)

    def _pushed(self, told: Sequence[RoundWords]) -> list[int]:
        """By rank, as their hosts tell."""
        found: list[int] = []
        at = _SAID.index(PUSHED)
        for host, block in enumerate(told):
            ranks = self.world.ranks_of(host)
            found += (int(n) for n in self._by_host(block)[at, : len(ranks)])
        for rank, n in enumerate(found):
            if not 0 <= n - self._sent.whole.get(rank, 0) <= 2:
                raise Broken(f"rank {rank} tells of {n} pushes: hosts disagree about what they do")
        return found

    def _hear_members(self, told: Sequence[RoundWords], held: Mapping[int, int]) -> None:
        """On the head's host."""
        rows, new = self.board.rows, False
        for host in range(1, self.world.num_hosts):
            ranks, said = self.world.ranks_of(host), self._by_host(told[host])
            for k, word in enumerate(_SAID):
                if word == PUSHED:  # it is here when its last piece is
                    continue
                there, here = said[k, : len(ranks)], rows[ranks.start : ranks.stop, word]
                if not np.array_equal(here, there):
                    here[:] = there
                    new = True
        for rank, count in held.items():
            if rows[rank, HELD] != count:
                rows[rank, HELD] = count
                new = True
        if new:
            self.bells.ring([0])

    def _hear_head(self, block: RoundWords) -> None:
        """On all other hosts. What is granted after a meeting is heard after it."""
        board, rows = self.board, self.board.rows
        before = board.words[[ORDERED, MEETING]].tolist()
        if int(block[0]) != board.ordered:
            self._take_order(block)
        if board.words[MEETING] != block[5]:
            if block[5] > board.ordered:
                raise Broken("the head tells of a meeting after pushes that it did not tell of")
            board.words[AGREED] = block[6]
            board.words[MEETING] = block[5]
        answers = block[_HEAD : len(block) - self._row].reshape(len(_ANSWERS), -1)
        new = before != board.words[[ORDERED, MEETING]].tolist()
        for word in (FREED, GRANTED, ANSWERED):
            there, here = answers[_ANSWERS.index(word)], rows[: self.world.num_ranks, word]
            if not np.array_equal(here, there):
                here[:] = there
                new = True
        if new:
            self.bells.ring(self.mine)

    def _take_order(self, block: RoundWords) -> None:
        board = self.board
        ordered, rank, sequence, meets, agreed = (int(n) for n in block[:5])
        known = rank in self.workers and (
            board.rows[rank, TAKEN] + 1 == sequence <= board.rows[rank, PUSHED]
        )
        if ordered != board.ordered + 1 or not known:
            raise Broken(
                f"the head orders push {sequence} of rank {rank} as number {ordered}, after "
                f"{board.ordered}: hosts disagree about what they do"
            )
        order, n = PushOrder(rank, sequence, bool(meets), agreed), ordered - 1
        board.put_order(n, order, board.tally().add(rank, board.push(order), n))

    # ---- pushes

    def _swap(self, pieces: Sequence[Piece | None]) -> None:
        """Each host's piece to all others."""
        room = len(self._stage) // self.world.num_hosts
        owned: list[Bounds] = []
        for host, piece in enumerate(pieces):
            length = 0 if piece is None else piece.stop - piece.start
            owned.append({torch.uint8: (host * room, host * room + length)})
        stage = self._stage.numpy().data
        if (mine := pieces[self.world.host]) is not None:
            a, b = owned[self.world.host][torch.uint8]
            self._copy(mine, stage[a:b], out=True)
        self.between.share({torch.uint8: self._stage}, owned)
        for host, piece in enumerate(pieces):
            if piece is not None and host != self.world.host:
                a, b = owned[host][torch.uint8]
                self._copy(piece, stage[a:b], out=False)
                self._note_if_whole(piece)

    def _copy(self, piece: Piece, staged: memoryview, *, out: bool) -> None:
        at = 0
        for buffer in self.board.boards.buffers(piece.rank, piece.sequence % 2):
            a, b = max(piece.start, at), min(piece.stop, at + buffer.nbytes)
            if a < b:
                there, here = staged[a - piece.start : b - piece.start], buffer[a - at : b - at]
                if out:
                    there[:] = here
                else:
                    here[:] = there
            at += buffer.nbytes

    def _note_if_whole(self, piece: Piece) -> None:
        if piece.stop < self._size:
            return
        if problem := self.board.boards.problem(piece.rank, piece.sequence % 2):
            raise Broken(f"rank {piece.rank} is said to have made a push {problem}")
        self.board.boards.arrived(piece.rank, piece.sequence % 2)
        self.board.rows[piece.rank, PUSHED] = piece.sequence
