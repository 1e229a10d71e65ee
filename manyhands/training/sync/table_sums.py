# SPDX-License-Identifier: Apache-2.0
"""The gradients of tables (`mh.Embedding`), from micro-batches to what is applied.

They are summed over the same tree as all other gradients; a row that only one side of an addition
has goes on as it is. Each worker adds up its own micro-batches and puts the parts that are left
into its box, in memory that outlives it, before it tells the facts of the step: when the facts of
all are there, so are the boxes. Whoever applies a step, or finishes one that others began, reads
the boxes of all and takes from them what is in its buckets.

    box    step + 1, bytes | of each table: parts | of each part: start, level, ids | ids | rows

Between hosts boxes are copied, so that each host has those of all workers.

Norms are taken bucket by bucket, so that they do not depend on who has which buckets.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from manyhands.accounting.deal_micro_batches import Node
from manyhands.training.collective.collective import ROWS, Collective
from manyhands.training.collective.two_level import TwoLevel
from manyhands.training.memory.memory import Boxes, Memory
from manyhands.training.state.layout import Bounds
from manyhands.training.state.rows.part_arrow import pack_part, unpack_part
from manyhands.training.state.rows.row_hash import BUCKETS, buckets_of, hashes_of
from manyhands.training.state.rows.sum_rows import GradientRows, merge_rows, rows_in
from manyhands.training.state.rows.table_part import TablePart
from manyhands.training.state.rows.tables import Tables
from manyhands.training.sync.canonical_sum import TreeSum, finish
from manyhands.training.sync.finite import reach
from manyhands.values.errors import Broken, ConfigError
from manyhands.values.machine import MOST_RANKS
from manyhands.values.world import World

TableParts = list[tuple[Node, GradientRows]]
"""Subtrees of a step's sum for one table, in index order."""

_BOX = 1 << 32
_HEAD = 64
_STAMP, _BYTES = range(2)


def finished(parts: TableParts, leaves: int, divisor: float | None) -> GradientRows:
    """The gradient of a table, from parts that cover all micro-batches."""
    total = finish(parts, leaves, merge_rows)
    return (
        total
        if divisor is None or divisor == 1.0
        else GradientRows(total.ids, total.rows / divisor)
    )


def bucket_norms(gradients: Iterable[GradientRows]) -> NDArray[np.float64]:
    """[tables x buckets]: of what each holds; NaN where that is not finite."""
    found: list[NDArray[np.float64]] = []
    for gradient in gradients:
        buckets = buckets_of(hashes_of(gradient.ids))
        squares = np.square(gradient.rows.numpy().astype(np.float64)).sum(axis=1)
        sums = np.bincount(buckets, squares, BUCKETS)  # adds in the order of ids
        found.append(np.where(np.isfinite(sums), np.sqrt(sums), math.nan))
    return np.concatenate(found) if found else np.zeros(0)


def scaled(gradient: GradientRows, factor: float) -> GradientRows:
    return gradient if factor == 1.0 else GradientRows(gradient.ids, gradient.rows * factor)


class TableSums:
    """Of one worker."""

    def __init__(self, tables: Tables, memory: Memory) -> None:
        self.tables = tables
        if tables and not memory.shared:
            raise ConfigError(
                "mh.Embedding keeps its rows in memory that the workers of a host share, which "
                "this way of exchanging gradients does not have. Leave train.collective out."
            )
        self._boxes: Boxes | None = memory.shelf(MOST_RANKS, _BOX) if tables else None
        self._trees: list[TreeSum[GradientRows]] = []
        self._leaves = 0

    def __bool__(self) -> bool:
        return bool(self.tables)

    @property
    def norms_size(self) -> int:
        return BUCKETS * len(self.tables.all)

    # ---- a worker's own micro-batches

    def begin(self, leaves: int) -> None:
        self._leaves = leaves
        self._trees = [TreeSum(leaves, merge_rows) for _ in self.tables]

    def add(self, index: int, gradients: Sequence[GradientRows]) -> None:
        for tree, gradient in zip(self._trees, gradients, strict=True):
            tree.push(Node(index, 0), gradient)

    def reach(self) -> float:
        """Of the sums so far (finite.py)."""
        return reach(part.rows for tree in self._trees for _, part in tree.parts)

    @property
    def parts(self) -> list[TableParts]:
        """By table: what is summed here."""
        return [tree.parts for tree in self._trees]

    # ---- everybody's

    def put(self, rank: int, step: int) -> int:
        """Into the box of `rank`, to be found by others; how many bytes."""
        pieces: list[NDArray[Any]] = []
        for tree in self._trees:
            pieces.append(np.array([len(tree.parts)], np.int64))
            for node, part in tree.parts:
                pieces.append(np.array([node.start, node.level, len(part.ids)], np.int64))
                rows = part.rows.contiguous().numpy().reshape(-1)
                odd = np.zeros(len(rows) % 2, np.float32)  # whatever follows is aligned to 8 bytes
                pieces += [part.ids, rows, odd]
        size = sum(piece.nbytes for piece in pieces)
        if size > _BOX - _HEAD:
            raise ConfigError(
                f"the tables' gradients of one worker take {size >> 20:,} MiB in step {step}, and "
                f"{_BOX >> 20:,} is the most. Use a smaller train.batch, or more workers."
            )
        content, at = self._content(rank, size), 0
        for piece in pieces:
            content[at : at + piece.nbytes] = piece.view(np.uint8)
            at += piece.nbytes
        self._stamp(rank, step, size)
        return size

    def exchange(self, levels: TwoLevel, step: int, mine: int) -> None:
        """With several hosts, before the facts are told: each host gets the boxes of all."""
        told = levels.gather(np.array([mine], np.int64).view(np.uint8), ROWS, step)
        sizes = [int(size.view(np.int64)[0]) for size in told]
        if levels.between is not None:
            levels.carry(lambda: self._copy_boxes(levels, step, sizes))

    def _copy_boxes(self, levels: TwoLevel, step: int, sizes: Sequence[int]) -> None:
        world, between = levels.world, levels.between
        assert between is not None
        if not all(0 <= size <= _BOX - _HEAD for size in sizes):
            raise Broken(f"another host speaks of {sizes} bytes of tables' gradients")
        ends = np.cumsum(sizes)
        whole = torch.zeros(int(ends[-1]), dtype=torch.uint8)
        bytes_of = [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        for rank in world.ranks_of(world.host):
            bytes_of[rank].numpy()[:] = self._content(rank, sizes[rank])
        owned: list[Bounds] = []
        for host in range(world.num_hosts):
            ranks = world.ranks_of(host)
            start = int(ends[ranks[0]]) - sizes[ranks[0]]
            owned.append({torch.uint8: (start, int(ends[ranks[-1]]))})
        between.share({torch.uint8: whole}, owned)
        for rank, content in enumerate(bytes_of):
            if rank not in world.ranks_of(world.host):
                self._content(rank, sizes[rank])[:] = content.numpy()
                self._stamp(rank, step, sizes[rank])

    def gradients(
        self, step: int, ranks: int, leaves: int, divisor: float | None
    ) -> list[GradientRows]:
        """Of a step that so many workers computed: those of own buckets, by table."""
        boxes = [self._read(rank, step) for rank in range(ranks)]
        found: list[GradientRows] = []
        for number, table in enumerate(self.tables):
            parts = [
                (node, rows_in(part, table.owns)) for box in boxes for node, part in box[number]
            ]
            found.append(finished(parts, leaves, divisor))
        return found

    def _read(self, rank: int, step: int) -> list[TableParts]:
        head = self._head(rank)
        assert head[_STAMP] == step + 1, f"box {rank} is of step {head[_STAMP] - 1}, not {step}"
        content, at = self._content(rank, int(head[_BYTES])), 0

        def words(count: int) -> NDArray[np.int64]:
            nonlocal at
            at += 8 * count
            if not (count >= 0 and at <= len(content)):
                raise Broken(f"the gradients that worker {rank} left for tables make no sense")
            return content[at - 8 * count : at].view(np.int64)

        found: list[TableParts] = []
        for table in self.tables:
            parts: TableParts = []
            for _ in range(int(words(1)[0])):
                start, level, count = (int(n) for n in words(3))
                ids = words(count)
                elements = count * table.dim
                rows = content[at : at + 4 * elements].view(np.float32).reshape(count, table.dim)
                at += 4 * (elements + elements % 2)
                parts.append((Node(start, level), GradientRows(ids, torch.from_numpy(rows))))
            found.append(parts)
        return found

    def _head(self, rank: int) -> NDArray[np.int64]:
        assert self._boxes is not None
        return cast(NDArray[np.int64], self._boxes.array(rank, 2, dtype=np.int64))

    def _content(self, rank: int, size: int) -> NDArray[np.uint8]:
        assert self._boxes is not None
        return cast(NDArray[np.uint8], self._boxes.array(rank, size, dtype=np.uint8, at=_HEAD))

    def _stamp(self, rank: int, step: int, size: int) -> None:
        head = self._head(rank)
        head[_BYTES] = size
        head[_STAMP] = step + 1


def level_tables(
    tables: Tables, between: Collective, world: World, holder: int, step: int, *, receives: bool
) -> None:
    """Between hosts: those who are behind take all rows from `holder`, part by part."""
    if not tables:
        return
    here = world.host == holder
    parts = tables.parts() if here else iter(())
    arriving = _arriving(tables, parts, between, world.num_hosts, holder, here=here)
    if receives:
        tables.reset(step, arriving)
    else:
        for _ in arriving:
            pass


def _arriving(
    tables: Tables,
    parts: Iterator[tuple[int, TablePart]],
    between: Collective,
    hosts: int,
    holder: int,
    *,
    here: bool,
) -> Iterator[tuple[str, TablePart]]:
    while True:
        number, part = next(parts, (0, None)) if here else (0, None)
        sent = pack_part(part) if part is not None else b""
        head = np.array([number, len(sent)], np.int64)
        told = between.gather(head.view(np.uint8))[holder].view(np.int64)
        number, size = (int(n) for n in told)
        if size == 0:
            return
        if not (0 < size <= _BOX and 0 <= number < len(tables.all)):
            raise Broken(f"another host sends {size:,} bytes of table {number}")
        lane = torch.zeros(size, dtype=torch.uint8)
        if here:
            lane.numpy()[:] = np.frombuffer(sent, np.uint8)
        owned: list[Bounds] = [{torch.uint8: (0, 0)}] * hosts
        owned[holder] = {torch.uint8: (0, size)}
        between.share({torch.uint8: lane}, owned)
        yield tables.all[number].name, unpack_part(lane.numpy().tobytes())
