# SPDX-License-Identifier: Apache-2.0
"""After a death: nothing that was acknowledged is lost, nothing is applied twice.

The first member of the new view goes on with the board of the old one, as its head and its only
server: what was being written is put back, the push that was ordered last is brought to the units
that do not have it, and what lies acknowledged in mailboxes is ordered and applied after it. All of
it is written down before it is done, as the head does it: a mender can die too, and the next one
goes on from there.

On several hosts that is done on each, but for the mailboxes: what has no number yet may not be on
all hosts, so it is dealt again. A host that has not heard the last number hears it before that
(host_rounds.py).
"""

from collections.abc import Callable

import torch

from manyhands.training.state.layout import rest_of, share_out, units
from manyhands.training.sync.merge.board import PUSHED, TAKEN, Board, PushOrder, StepPush
from manyhands.training.sync.merge.seat import MergeParts
from manyhands.values.errors import Broken


def mend(
    parts: MergeParts,
    rank: int,
    catch_up: Callable[[int], None],
    unheard: PushOrder | None = None,
) -> Board:
    """The board that tells what has been applied then. `rank` on its host; `catch_up`: with groups
    and schedule as after so many pushes; `unheard`: the last order, if this host has not heard
    it."""
    parts.undo_log.repair()
    board = parts.boards.in_force
    assert board is not None, "state without a board is not held (merge_server.py)"
    if (done := board.ordered) > board.began:
        _finish(parts, rank, board.push(board.order(done - 1)), done - 1, catch_up)
    left = _acknowledged(board) if board.hosts == 1 else []
    if unheard is not None:
        taken, pushed = (board.column(word, [unheard.rank])[0] for word in (TAKEN, PUSHED))
        if not taken < unheard.sequence <= pushed:
            raise Broken(f"another host tells of push {unheard.sequence} of rank {unheard.rank}")
    for order in left if unheard is None else [unheard]:
        n, push = board.ordered, board.push(order)
        board.put_order(n, order, board.tally().add(order.rank, push, n))
        _finish(parts, rank, push, n, catch_up)
    return board


def _acknowledged(board: Board) -> list[PushOrder]:
    """What was pushed and not ordered yet."""
    found: list[PushOrder] = []
    applied = board.tally().applied
    for rank in range(len(board.tally().computed)):
        taken, pushed = board.column(TAKEN, [rank])[0], board.column(PUSHED, [rank])[0]
        orders = [PushOrder(rank, k, False, 0) for k in range(taken + 1, pushed + 1)]
        # Its head may have died after ordering one, before it counted it as taken.
        found += [order for order in orders if not applied.covers(board.push(order).step)]
    return found


def _finish(
    parts: MergeParts, rank: int, push: StepPush, n: int, catch_up: Callable[[int], None]
) -> None:
    """Bring push n to all that does not have it. Where all do, its mailbox may have been written to
    since."""
    undo_log, layout, cut = parts.undo_log, parts.layout, parts.optimizer.cut
    committed = parts.replica.buffers.committed
    if not undo_log.get_buffers(n + 1, committed):
        whole = undo_log.get_buffers(n, committed)
        assert whole, f"buffers of push {n} are kept until those after it are"
        parts.commit_buffers(parts.read(push, n))
    spans = share_out(layout, int(undo_log.updaters[0]), cut=cut)
    left = [
        rest_of(layout, unit, undo_log.done, n)
        for owned in spans
        for unit in units(layout, owned, cut=cut)
    ]
    behind = [unit for unit in left if unit is not None]
    if not behind:
        return
    parts.record.applies(n, push.step)
    catch_up(n)
    parts.optimizer.regroup(rank, behind, n, own=True)
    with torch.no_grad():
        parts.apply(push, parts.read(push, n))
