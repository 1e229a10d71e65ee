# SPDX-License-Identifier: Apache-2.0
"""What outlives a worker: the committed state of a host, and how it is never found torn.

Weights and optimizer slots exist once, and workers update their parts of them in place. A worker
can be killed between any two instructions of that, so this is kept beside them:

- `done[b]`: how many steps block b has been through. All equal: a whole step. Two neighbouring
  numbers: a step that was being taken; its gradients are still there (nobody starts the next step
  before all have finished this one), so whoever comes next finishes it.
- one **undo log** per rank, for the one unit which that rank is updating. Written before the first
  store to the unit, void after `done` says that the unit is through.

Invariant: after `repair`, every block holds exactly the state after `done[b]` steps.

    open(unit)    copy the unit aside, then mark the log as holding it      died here: nothing
    (update)      weights, slots and counters change in place               died here: copied back
    close(unit)   done = step + 1, then mark the log as void                died here: copied back

Where native code takes the step (one_pass_update.py), it copies aside what it updates as it goes,
and closes block by block; the log then says how far its copy of the one block has come, and a unit
may be found through with the first of its blocks and not with the rest.

Copying back is idempotent: a repairer may be killed too. Stores of a killed process take effect in
the order of its program, and nobody reads before it is known to be dead (launch.membership).

Buffers, the hyper-parameters at the start of a view, and optimizer state that has no place in a
flat slot ("extras") are small or rare; they are written to the box of the parity that is not
current, with a stamp at the end.

In private memory (torch groups) nothing survives its worker, so nothing is copied aside.

Where there are several hosts, each keeps all of this. `summed` says of which step the whole sum of
gradients is in the host's memory, and how many workers of this host shared the update. A host that
takes over another's state is `void` until it has all of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.training.memory.memory import Memory
from manyhands.training.state.layout import Lanes, Layout, Unit
from manyhands.values.errors import OptimizerRefused
from manyhands.values.machine import MOST_RANKS

SlotKey = tuple[str, torch.dtype]
Number = float | int | bool
KeptValue = Tensor | Number

_FOREACH_COPY: Any = getattr(torch, "_foreach_copy_")  # noqa: B009 (private, and no other way)
_IDLE, _HOLDS, _PASSING = range(3)
HEAD_WORDS = 8
"""Of a log: state; first block, stop, step; and of a pass: elements copied, counter, lanes."""
_NOTE_BYTES = 1 << 24
_EXTRA_BYTES = 1 << 26


class UndoLog:
    def __init__(
        self,
        layout: Layout,
        weights: Lanes,
        slots: Mapping[SlotKey, torch.dtype],
        scalars: Mapping[str, torch.dtype],
        buffers: Mapping[torch.dtype, int],
        memory: Memory,
        *,
        extras: bool,
        frozen: bool = False,
    ) -> None:
        """`slots`: vectors beside the weights, and their dtypes; `scalars`: numbers per block.
        `frozen`: parameters that receive no gradient may change too, with any unit."""
        self.layout, self.journals = layout, memory.shared
        sizes, blocks = layout.trainable_sizes, layout.first_blocks[-1]
        self.slots: dict[SlotKey, Tensor] = {
            (key, dtype): memory.tensor(sizes[dtype], dtype=kept)
            for (key, dtype), kept in sorted(slots.items(), key=str)
        }
        self.scalars: dict[str, Tensor] = {
            key: memory.tensor(blocks, dtype=dtype) for key, dtype in sorted(scalars.items())
        }
        self.exists = memory.tensor(blocks, dtype=torch.uint8)
        """1: the optimizer has made state for this block's parameter."""
        self.done = cast(NDArray[np.int64], memory.array(blocks, dtype=np.int64))
        # What the undo log copies: stretches of lanes, and ranges of blocks.
        self._lanes = [(d, weights[d][: sizes[d]]) for d in sorted(sizes, key=str)]
        self._lanes += [(dtype, lane) for (_, dtype), lane in self.slots.items()]
        self._per_block = [*self.scalars.values(), self.exists]
        whole = sorted(weights, key=str) if frozen else []
        self._frozen = [weights[d][sizes.get(d, 0) :] for d in whole]
        room = [_padded(t.numel() * t.element_size()) for _, t in self._lanes]
        room += [_padded(t.numel() * t.element_size()) for t in (*self._per_block, *self._frozen)]
        self._logs = memory.shelf(MOST_RANKS, 64 + sum(room))
        self._opened: dict[int, list[Tensor]] = {}
        self._planned: dict[tuple[int, tuple[int, int]], tuple[list[Tensor], list[Tensor]]] = {}
        self._heads = cast(Any, memory.array(MOST_RANKS, HEAD_WORDS, dtype=np.int64))
        self.summed = cast(NDArray[np.int64], memory.array(2, dtype=np.int64))
        """[step + 1, updaters]; [0, 0]: of none."""
        self.updaters = cast(NDArray[np.int64], memory.array(1, dtype=np.int64))
        """Among how many the update was shared out when the last view began."""
        self._boxes = memory.shelf(2, 64 + sum(n * d.itemsize + 64 for d, n in buffers.items()))
        self._buffer_sizes = buffers
        self._boxed: dict[int, tuple[NDArray[np.int64], Lanes]] = {}
        self._notes = memory.shelf(2, _NOTE_BYTES)
        self._groups = memory.shelf(2, _NOTE_BYTES)
        pieces = len(layout.trainable) if extras else 0
        largest = max((p.numel * 8 for p in layout.trainable), default=0)
        self._has_extras, self._extra_bytes = extras, _EXTRA_BYTES + 8 * largest
        self._extras = memory.shelf(max(1, 2 * pieces), self._extra_bytes)

    # ---- updates that are never found half done

    def open(self, rank: int, unit: Unit, step: int) -> None:
        """Before the first store to `unit`: copy it aside."""
        if not self.journals:
            return
        head, (first, stop) = self._heads[rank], unit.blocks
        _FOREACH_COPY(*self._pairs(rank, unit))
        head[1:4] = first, stop, step
        head[0] = _HOLDS

    def _pairs(self, rank: int, unit: Unit) -> tuple[list[Tensor], list[Tensor]]:
        """What `open` copies, where to and where from; found once for each unit."""
        key = (rank, unit.blocks)
        if key not in self._planned:
            (first, stop), copies = unit.blocks, self._log(rank)
            pairs = [
                (copy[: b - a], lane[a:b])
                for (dtype, lane), copy in zip(self._lanes, copies, strict=False)
                if dtype in unit.bounds
                for a, b in [unit.bounds[dtype]]
            ]
            pairs += [
                (copy[: stop - first], lane[first:stop])
                for lane, copy in zip(self._per_block, copies[len(self._lanes) :], strict=False)
            ]
            pairs += list(zip(copies[len(copies) - len(self._frozen) :], self._frozen, strict=True))
            self._planned[key] = [copy for copy, _ in pairs], [lane for _, lane in pairs]
        return self._planned[key]

    def close(self, rank: int, unit: Unit, step: int) -> None:
        """After the last store to `unit`."""
        first, stop = unit.blocks
        self.done[first:stop] = step + 1
        if self.journals:
            self._heads[rank, 0] = _IDLE

    def repair(self) -> int:
        """Copy back what killed workers were updating; how many units that were."""
        torn = [r for r in range(MOST_RANKS) if self._heads[r, 0] != _IDLE]
        for rank in torn:
            if self._heads[rank, 0] == _PASSING:
                self._undo_pass(rank)
                continue
            first, stop, step = (int(n) for n in self._heads[rank, 1:4])
            for (dtype, lane), copy in zip(self._lanes, self._log(rank), strict=False):
                if (stretch := self._stretch(dtype, first, stop)) is not None:
                    a, b = stretch
                    lane[a:b].copy_(copy[: b - a])
            copies = self._log(rank)[len(self._lanes) :]
            for lane, copy in zip(self._per_block, copies, strict=False):
                lane[first:stop].copy_(copy[: stop - first])
            for lane, copy in zip(self._frozen, copies[len(self._per_block) :], strict=True):
                lane.copy_(copy)
            self.done[first:stop] = step
            self._heads[rank, 0] = _IDLE
        return len(torn)

    def aside(self, rank: int, slots: Sequence[str]) -> tuple[Any, list[Tensor], list[int]]:
        """For a pass over float32: its head; where weights and slots are copied to; their bits."""
        weights = [("", dtype) for dtype in sorted(self.layout.trainable_sizes, key=str)]
        lanes: list[SlotKey] = [*weights, *self.slots]
        wanted: list[SlotKey] = [(key, torch.float32) for key in ("", *slots)]
        places = [lanes.index(key) for key in wanted if key in lanes]
        copies = self._log(rank)
        return self._heads[rank], [copies[k] for k in places], [1 << k for k in places]

    def _undo_pass(self, rank: int) -> None:
        """Copy back what a pass had copied aside of its block."""
        block, stop, step, copied, counter, lanes = (int(n) for n in self._heads[rank, 1:7])
        for k, ((dtype, lane), copy) in enumerate(zip(self._lanes, self._log(rank), strict=False)):
            if lanes >> k & 1 and (stretch := self._stretch(dtype, block, stop)) is not None:
                lane[stretch[0] : stretch[0] + copied].copy_(copy[:copied])
        for numbers in self.scalars.values():
            numbers[block] = counter
        self.done[block] = step
        self._heads[rank, 0] = _IDLE

    def reset(self, step: int) -> None:
        """Begin at `step`, whatever was here before."""
        self.void()
        self._heads[:, 0] = _IDLE
        self.summed[:] = 0
        self.exists.zero_()
        self.done[:] = step

    def take(self, step: int, buffers: Lanes) -> None:
        """The state after `step` steps has been written here; it counts when a note does."""
        self._heads[:, 0] = _IDLE
        self.summed[:] = 0
        self.done[:] = step
        self.put_buffers(step, buffers)

    def void(self) -> None:
        """From here on until there is a new note, nothing that is kept counts."""
        for k in range(2):
            for shelf in (self._notes, self._boxes):
                cast(Any, shelf.array(k, 1, dtype=np.int64))[0] = -1

    @property
    def holds(self) -> bool:
        """Whether there is anything to go on from."""
        return self.get_note() is not None

    def steps(self) -> tuple[int, int]:
        """The fewest and the most steps that a block has been through."""
        if len(self.done) == 0:
            return self._newest(self._boxes), self._newest(self._boxes)
        return int(self.done.min()), int(self.done.max())

    def _newest(self, shelf: Any) -> int:
        return max(int(shelf.array(k, 1, dtype=np.int64)[0]) for k in range(2))

    def _log(self, rank: int) -> list[Tensor]:
        """A rank's copies: of each lane, of each number per block, of what is frozen."""
        if rank not in self._opened:
            at, copies = 64, list[Tensor]()
            for lane in [*(lane for _, lane in self._lanes), *self._per_block, *self._frozen]:
                copies.append(self._logs.tensor(rank, lane.numel(), dtype=lane.dtype, at=at))
                at += _padded(lane.numel() * lane.element_size())
            self._opened[rank] = copies
        return self._opened[rank]

    def _stretch(self, dtype: torch.dtype, first: int, stop: int) -> tuple[int, int] | None:
        """Which elements of a lane the blocks [first, stop) are."""
        spans = self.layout.spans_of(first, stop)
        ours = [(a, b) for piece, a, b in spans if piece.dtype == dtype]
        return (ours[0][0], ours[-1][1]) if ours else None

    # ---- buffers: two boxes, by the parity of the step

    def put_buffers(self, step: int, lanes: Lanes) -> None:
        stamp, copies = self._box(step)
        stamp[0] = -1
        for dtype, lane in lanes.items():
            copies[dtype].copy_(lane)
        stamp[0] = step

    def get_buffers(self, step: int, lanes: Lanes) -> bool:
        """Copies those after `step` steps into `lanes`; False when they are not here."""
        stamp, copies = self._box(step)
        if int(stamp[0]) != step:
            return False
        for dtype, lane in lanes.items():
            lane.copy_(copies[dtype])
        return True

    def newest_buffers(self, lanes: Lanes) -> int:
        """Copies the newest into `lanes`, while somebody may put newer ones; after how many
        steps."""
        while True:
            step = self._newest(self._boxes)
            if self.get_buffers(step, lanes) and int(self._box(step)[0][0]) == step:
                return step

    def _box(self, step: int) -> tuple[NDArray[np.int64], Lanes]:
        if (k := step % 2) not in self._boxed:
            at, lanes = 64, Lanes()
            for dtype, size in self._buffer_sizes.items():
                lanes[dtype] = self._boxes.tensor(k, size, dtype=dtype, at=at)
                at += _padded(size * dtype.itemsize)
            stamp = cast(NDArray[np.int64], self._boxes.array(k, 1, dtype=np.int64))
            self._boxed[k] = stamp, lanes
        return self._boxed[k]

    # ---- the note: hyper-parameters as they were when a view began

    def put_note(self, step: int, note: bytes) -> None:
        if len(note) > _NOTE_BYTES - 64:
            raise OptimizerRefused(f"the schedule's state takes {len(note):,} bytes; too much.")
        heads = [cast(Any, self._notes.array(k, 3, dtype=np.int64)) for k in range(2)]
        numbers = [int(head[0]) for head in heads]
        k = numbers.index(min(numbers))  # the newest stays until there is another
        head = heads[k]
        head[0] = -1
        self._notes.box(k)[64 : 64 + len(note)] = note
        head[1:] = step, len(note)
        head[0] = max(0, *numbers) + 1

    def get_note(self) -> tuple[int, bytes] | None:
        """The newest: at which step it was written, and what it says."""
        heads = [(self._notes.array(k, 3, dtype=np.int64), k) for k in range(2)]
        head, k = max(heads, key=lambda h: int(h[0][0]))
        number, step, length = (int(n) for n in head)
        return (step, self._notes.box(k)[64 : 64 + length]) if number > 0 else None

    # ---- what an optimizer that is left whole keeps in its groups, by the parity of the step

    def put_groups(self, step: int, groups: bytes) -> None:
        if len(groups) > _NOTE_BYTES - 64:
            raise OptimizerRefused(f"the optimizer's groups take {len(groups):,} bytes; too much.")
        head = cast(Any, self._groups.array(step % 2, 2, dtype=np.int64))
        head[0] = 0
        self._groups.box(step % 2)[64 : 64 + len(groups)] = groups
        head[1] = len(groups)
        head[0] = step + 1  # never 0, which is what untouched memory says

    def get_groups(self, step: int) -> bytes | None:
        """As they were after `step` steps; None when they are not here."""
        stamp, length = (int(n) for n in self._groups.array(step % 2, 2, dtype=np.int64))
        return self._groups.box(step % 2)[64 : 64 + length] if stamp == step + 1 else None

    # ---- extras: optimizer state without a flat slot, per piece and by the parity of the step

    def put_extras(self, piece: int, step: int, values: Mapping[str, KeptValue]) -> None:
        tensors = {k: v.detach().contiguous() for k, v in values.items() if isinstance(v, Tensor)}
        index = {k: (str(t.dtype), list(t.shape)) for k, t in tensors.items()}
        numbers = {k: v for k, v in values.items() if k not in tensors}
        head = msgspec.msgpack.encode((index, numbers))
        total = 64 + _padded(len(head)) + sum(_padded(t.nbytes) for t in tensors.values())
        if total > self._extra_bytes:
            raise OptimizerRefused(
                f"the optimizer keeps {total:,} bytes for '{self.layout.trainable[piece].name}'; "
                f"{self._extra_bytes:,} can be kept safe from a crash."
            )
        box = 2 * piece + step % 2
        stamp = cast(NDArray[np.int64], self._extras.array(box, 2, dtype=np.int64))
        stamp[0] = -1
        self._extras.box(box)[64 : 64 + len(head)] = head
        at = 64 + _padded(len(head))
        for tensor in tensors.values():
            self._extras.tensor(box, *tensor.shape, dtype=tensor.dtype, at=at).copy_(tensor)
            at += _padded(tensor.nbytes)
        stamp[1] = len(head)
        stamp[0] = step + 1  # never 0, which is what untouched memory says

    def get_extras(self, piece: int, step: int) -> dict[str, KeptValue]:
        box = 2 * piece + step % 2
        stamp = self._extras.array(box, 2, dtype=np.int64)
        if int(stamp[0]) != step + 1:
            return {}
        head = self._extras.box(box)[64 : 64 + int(stamp[1])]
        index, numbers = msgspec.msgpack.decode(head)
        values: dict[str, KeptValue] = dict(numbers)
        at = 64 + _padded(len(head))
        for key, (kind, shape) in index.items():
            dtype: torch.dtype = getattr(torch, kind.removeprefix("torch."))
            tensor = self._extras.tensor(box, *shape, dtype=dtype, at=at).clone()
            values[key] = tensor
            at += _padded(tensor.nbytes)
        return values

    def pack_extras(self, step: int) -> bytes:
        """All of them after `step` steps, to be sent to another host."""
        if not self._has_extras:
            return b""
        packed: dict[int, dict[str, Any]] = {}
        for piece in range(len(self.layout.trainable)):
            values = self.get_extras(piece, step)
            packed[piece] = {key: _packed(value) for key, value in values.items()}
        return msgspec.msgpack.encode((packed, self.get_groups(step)))

    def unpack_extras(self, step: int, data: bytes) -> None:
        if not self._has_extras:
            return
        kept = tuple[dict[int, dict[str, Any]], bytes | None]
        packed, groups = msgspec.msgpack.decode(data, type=kept)
        if groups is not None:
            self.put_groups(step, groups)
        for piece, values in packed.items():
            self.put_extras(piece, step, {key: _unpacked(value) for key, value in values.items()})


def _packed(value: KeptValue) -> Any:
    if not isinstance(value, Tensor):
        return value
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(value.dtype).removeprefix("torch."), list(value.shape), raw]


def _unpacked(value: Any) -> KeptValue:
    if not isinstance(value, list):
        return value
    dtype, shape, raw = value
    flat = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)) if raw else torch.empty(0)
    return flat.view(shape)


def _padded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
