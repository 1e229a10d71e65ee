# SPDX-License-Identifier: Apache-2.0
"""One table of rows, in memory that outlives a process: read them, and apply gradients to them.

- A row exists once a gradient came for it; until then, its first values are read without making
  it (row_init.py). Weights and the optimizer's state are written whole when it is made.
- `admit` = n: an id takes no gradient before the n-th step in which it has one; until then it costs
  an entry of the index, not a row, and reads as its first values.
- `expire` = n: an id that had no gradient for n steps is gone. What a read or a gradient finds does
  not depend on when its memory is swept.
- `apply` of a step that a bucket has been through does nothing there, so the same push may come
  again, from anybody: after a lost answer, or after a death and `repair` (row_journal.py).

Buckets are what is shared out. Several processes may write to a store at the same time if they
`own` different buckets; nobody may read what is being written.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.training.memory.memory import Memory
from manyhands.training.state.rows import row_journal, table_part
from manyhands.training.state.rows.row_hash import (
    BUCKETS,
    IdHashes,
    Ids,
    Int64s,
    buckets_of,
    hashes_of,
    ids_of,
)
from manyhands.training.state.rows.row_index import DONE, ENTRIES, REGION, RowIndex
from manyhands.training.state.rows.row_init import FirstRows, RowInit
from manyhands.training.state.rows.row_journal import RowJournals
from manyhands.training.state.rows.row_optimizers import MOST_COLUMNS, RowOptimizer
from manyhands.training.state.rows.row_passes import row_passes
from manyhands.training.state.rows.row_slots import RowSlots, slots_per_bucket
from manyhands.training.state.rows.table_part import WEIGHTS, TablePart, groups_of, sorted_part
from manyhands.values.errors import ConfigError, TableFull, WrongArguments

Mask = NDArray[np.bool_]

_MOST_CAPACITY = 1_500_000_000
_WAITING = 8
"""Times the capacity: so many ids may wait to be admitted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    name: str
    dim: int
    capacity: int
    """The most rows at a time."""
    init: RowInit
    seed: int = 0
    admit: int = 1
    expire: int | None = None

    def __post_init__(self) -> None:
        numbers: list[Any] = [self.capacity, self.dim, self.admit, self.expire or 1]
        odd = [n for n in numbers if not isinstance(n, int)]
        wrong = [
            (bool(odd), "rows, dim, admit and expire are whole numbers", odd),
            (not 1 <= self.dim <= MOST_COLUMNS, f"dim must be in [1, {MOST_COLUMNS}]", self.dim),
            (self.capacity < 1, "rows must be at least 1", self.capacity),
            (
                self.capacity > _MOST_CAPACITY,
                f"rows must be at most {_MOST_CAPACITY:,}",
                self.capacity,
            ),
            (self.admit < 1, "admit must be at least 1 (then every id is)", self.admit),
            (
                self.expire is not None and self.expire < 1,
                "expire must be at least 1; leave it out to keep all rows",
                self.expire,
            ),
        ]
        for is_wrong, what, value in wrong:
            if is_wrong:
                raise ConfigError(f"table '{self.name}': {what}, got {value}.")


class ChangeWatcher(Protocol):
    """Somebody who wants to know what was there before a change (row_snapshot.py)."""

    def changed(
        self, hashes: IdHashes, values: Int64s, last: Int64s | None, rows: dict[str, Tensor]
    ) -> None:
        """As the index and the lanes had them: slot + 1, minus the count, or 0 of what was not
        there; `rows` are of the first kind."""
        ...


class RowStore:
    def __init__(
        self, spec: TableSpec, optimizer: RowOptimizer, memory: Memory, *, writers: int = 1
    ) -> None:
        """`writers`: the most processes that ever write at a time. Whoever calls for the same store
        in the same place of the same memory has the same rows."""
        self.spec, self.optimizer = spec, optimizer
        private = None if memory.shared else os.memfd_create("rows")
        if private is not None:
            memory = Memory(private)
            os.ftruncate(private, 1 << 46)
        per_bucket = slots_per_bucket(spec.capacity)
        most = per_bucket * (1 + _WAITING) if spec.admit > 1 else per_bucket
        self.index = RowIndex(memory, most, dates=spec.expire is not None)
        self.index.native.expire = spec.expire or 0
        self.words = self.index.words
        self.slots = RowSlots(memory, self.index, spec.capacity, spec.dim, optimizer)
        lanes = list(self.slots.lanes.values())
        self.journals = RowJournals(memory, self.index, lanes, writers)
        self.first_rows = FirstRows(spec.init, spec.dim, seed=spec.seed, table=spec.name)
        self.watchers: WeakSet[ChangeWatcher] = WeakSet()
        self._sweeps = False
        self.own(0, np.ones(BUCKETS, np.bool_))
        if private is not None:
            os.close(private)  # mappings stay

    def own(self, writer: int, buckets: Mask) -> None:
        """Which writer this process is, and of which buckets. Others may hold the rest."""
        self.journal, self.buckets = self.journals.of(writer), buckets.copy()

    def repair(self) -> int:
        """Undo what dead writers were in the middle of; how many they were. Nobody may write."""
        return self.journals.undo()

    def steps(self, buckets: Mask | None = None) -> tuple[int, int]:
        """The fewest and the most steps that an own bucket (or one of these) has been through."""
        done = self.words[DONE][self.buckets if buckets is None else buckets]
        return int(done.min()), int(done.max())

    @property
    def rows(self) -> int:
        return self.slots.rows

    # ---- reading

    def read(self, ids: Ids, out: Tensor | None = None) -> Tensor:
        """[ids, dim]: the weights. Unknown ids read as their first values, and are not made."""
        if (passes := row_passes()) is not None and (out is None or out.is_contiguous()):
            ids = np.ascontiguousarray(ids)
            rows = out
            if rows is None:
                rows = torch.empty(len(ids), self.spec.dim, dtype=torch.float32)
            unknown = passes.read(self.index.native, ids, self.slots.lanes[WEIGHTS], rows)
            return self._with_first_rows(rows, ids, unknown)
        hashes = hashes_of(ids)
        places = self.index.find(hashes)
        values = self.index.values.take(places)
        known = values > 0
        if self.index.last is not None:
            known &= ~self._dead(hashes, places)
        slots = np.maximum(values - 1, 0).astype(np.int64)
        rows = self.slots.gather_lane(WEIGHTS, slots, out)
        return self._with_first_rows(rows, ids, np.flatnonzero(~known))

    def _with_first_rows(self, rows: Tensor, ids: Ids, unknown: Int64s) -> Tensor:
        if len(unknown):
            first = torch.from_numpy(self.first_rows(ids.take(unknown)))
            rows.index_copy_(0, torch.from_numpy(unknown), first)
        return rows

    def _dead(self, hashes: IdHashes, places: Int64s, clock: int | None = None) -> Mask:
        """Which of these entries have expired, as of `clock` (default: of their bucket's)."""
        assert self.index.last is not None and self.spec.expire is not None
        now = self.words[DONE].take(buckets_of(hashes)) if clock is None else clock
        return now - self.index.last.take(places) >= self.spec.expire

    # ---- gradients

    def apply(self, ids: Ids, grads: Tensor, step: int) -> None:
        """The optimizer's step `step` (from 1) with these gradients [ids, dim], one for each id.

        Only rows of own buckets that have not been through `step` change; all of them have been
        through it afterwards. TableFull: nothing of the buckets that were refused has changed.
        """
        ids, grads = self._checked(ids, grads)
        if self._sweeps:
            self._sweeps = False
            self.sweep(np.flatnonzero(self.buckets))
        behind = self.buckets & (self.words[DONE] < step)
        hashes, grads = self._those_in(behind, ids, grads)
        for buckets in self._shares(hashes, behind):
            if buckets is behind:
                self._apply(hashes, grads, step, buckets)
                continue
            mine = np.flatnonzero(buckets.take(buckets_of(hashes)))
            self._apply(
                hashes.take(mine), grads.index_select(0, torch.from_numpy(mine)), step, buckets
            )

    def _those_in(self, buckets: Mask, ids: Ids, grads: Tensor) -> tuple[IdHashes, Tensor]:
        """Hashes and gradients of these buckets. Mostly all are."""
        if (passes := row_passes()) is not None:
            hashes, inside = passes.hash(np.ascontiguousarray(ids), buckets)
        else:
            hashes = hashes_of(ids)
            inside = int(buckets.take(buckets_of(hashes)).sum())
        if inside == len(ids):
            return hashes, grads
        mine = np.flatnonzero(buckets.take(buckets_of(hashes)))
        return hashes.take(mine), grads.index_select(0, torch.from_numpy(mine))

    def _checked(self, ids: Ids, grads: Tensor) -> tuple[Ids, Tensor]:
        name, dim = self.spec.name, self.spec.dim
        if grads.shape != (len(ids), dim) or grads.dtype != torch.float32:
            raise WrongArguments(
                f"table '{name}' takes {len(ids)} gradients of {dim} columns, float32, for as many "
                f"ids; these are {tuple(grads.shape)}, {grads.dtype}."
            )
        if (ids[1:] > ids[:-1]).all():
            return ids, grads
        order = np.argsort(ids)
        ids = ids.take(order)
        again = ids[1:] == ids[:-1]
        if again.any():
            raise WrongArguments(
                f"table '{name}' was given two gradients for id {ids[1:][again][0]} in one step. "
                "Add them first (sum_rows)."
            )
        return ids, grads.index_select(0, torch.from_numpy(order))

    def _shares(self, hashes: IdHashes, buckets: Mask) -> Iterator[Mask]:
        """Cut so that each share fits into a journal."""
        if len(hashes) <= row_journal.MOST_ROWS:
            yield buckets
            return
        counts = np.bincount(buckets_of(hashes), minlength=BUCKETS)
        if counts.max() > row_journal.MOST_ROWS:
            raise WrongArguments(
                f"{len(hashes):,} gradients for the table '{self.spec.name}' in one push, of which "
                f"{counts.max():,} are for one bucket. Use smaller batches."
            )
        share, rows = np.zeros(BUCKETS, np.bool_), 0
        for bucket in np.flatnonzero(buckets):
            if rows + counts[bucket] > row_journal.MOST_ROWS:
                yield share
                share, rows = np.zeros(BUCKETS, np.bool_), 0
            share[bucket], rows = True, rows + int(counts[bucket])
        yield share

    def _apply(self, hashes: IdHashes, grads: Tensor, step: int, mask: Mask) -> None:
        """One transaction."""
        places, values = self._make_room(hashes, step)
        last = None if self.index.last is None else self.index.last.take(places)
        rows = values > 0
        with self.journal.transaction(mask):
            now = self._make_rows(hashes, places, values)
            if self.index.last is not None:
                self.index.last[places] = step
            active = now > 0
            if not active.all():
                now, grads = now[active], grads[torch.from_numpy(active)]
            slots = now.astype(np.int64) - 1
            self.slots.update(slots, grads, step, self.optimizer, self.journal)
            self.words[DONE, mask] = step
        if len(self.watchers):
            copies = zip(self.slots.columns.items(), self.journal.copies, strict=True)
            kept = torch.from_numpy(np.flatnonzero(rows[active]))
            old = {name: copy[kept, :columns] for (name, columns), copy in copies}
            self._tell(hashes, values, last, old)

    def _make_rows(
        self, hashes: IdHashes, places: Int64s, values: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Count these as seen, make rows of those whose time it is, and note where they are in
        `places`. What the index says of each from now on."""
        index, unknown, rows = self.index, values == 0, values > 0
        if index.last is not None or bool((values < 0).any()):
            self.journal.keep_entries(places[~unknown])
        if rows.all():
            return values
        now = np.where(rows, values, values - 1)  # seen once more
        births = -now >= self.spec.admit
        if births.any():
            slots = self.slots.allocate(hashes[births])
            first = self.first_rows(ids_of(hashes[births]))
            self.slots.write(slots, {WEIGHTS: torch.from_numpy(first)})
            now[births] = slots + 1
        places[unknown] = index.insert(hashes[unknown], now[unknown], self.journal)
        waited = ~rows & ~unknown
        index.values[places[waited]] = now[waited]
        return now

    def _tell(
        self,
        hashes: IdHashes,
        values: NDArray[np.int32],
        last: Int64s | None,
        rows: dict[str, Tensor],
    ) -> None:
        for watcher in self.watchers:
            watcher.changed(hashes, values.astype(np.int64), last, rows)

    # ---- room

    def _make_room(self, hashes: IdHashes, step: int) -> tuple[Int64s, NDArray[np.int32]]:
        """Where these are, with room for those that are not; who has expired is not."""
        buckets, swept = buckets_of(hashes), False
        while True:
            places, values, complete = self.index.look(hashes)
            if self.index.last is not None:
                dead = (values != 0) & self._dead(hashes, places)
                if dead.any():
                    self.sweep(np.unique(buckets[dead]))
                    continue
            if complete:
                return places, values
            more = np.bincount(buckets[values == 0], minlength=BUCKETS)
            coming = (values <= 0) & (1 - values >= self.spec.admit)
            births = np.bincount(buckets[coming], minlength=BUCKETS)
            why = self.why_full(more, births, step)
            if why is not None and self.index.last is not None and not swept:
                self.sweep(np.flatnonzero(self.buckets))
                swept = True
                continue
            if why is not None:
                raise why
            crowded = self.index.crowded(more)
            if not len(crowded):
                return places, values
            for group in groups_of(crowded, self.words[ENTRIES], most=BUCKETS):
                self.rebuild(group, more, np.zeros(0, np.int64))

    def why_full(self, more: Int64s, births: Int64s, step: int) -> TableFull | None:
        spec, slots = self.spec, self.slots
        if (slots.in_use() + births > slots.per_bucket).any():
            bucket = int((slots.in_use() + births).argmax())
            here, room = int(slots.in_use()[bucket]), slots.per_bucket
            return TableFull(spec.name, room, here, int(births[bucket]), step, "bucket")
        if (self.words[ENTRIES] + more > self.index.most_entries).any():
            waiting = int(self.words[ENTRIES].sum()) - slots.rows
            room = _WAITING * spec.capacity
            return TableFull(spec.name, room, waiting, int(more.sum()), step, "waiting")
        return None

    def see_room(self, step: int) -> None:
        """Between steps, when nobody writes: refuse to go on with more rows than there may be.

        All processes see the same rows then, so all of them refuse, or none; the rows of one step
        may be too many. Those that have expired do not count, and are swept with the next step.
        """
        rows, capacity = self.slots.rows, self.spec.capacity
        if rows <= capacity:
            return
        if self.index.last is not None:
            places = self.index.places_in(np.arange(BUCKETS))
            places = places[self.index.values.take(places) > 0]
            rows -= int(self._dead(self._hashes_at(places), places).sum())
            self._sweeps = rows <= capacity
        if rows > capacity:
            raise TableFull(self.spec.name, capacity, rows, 0, step, "rows")

    def sweep(self, buckets: Int64s) -> int:
        """Give back the memory of those in these buckets that have expired; how many."""
        gone = 0
        if self.index.last is None:
            return gone
        for group in groups_of(buckets, self.words[ENTRIES]):
            places = self.index.places_in(group)
            dead = places[self._dead(self._hashes_at(places), places)]
            if len(dead):
                concerned = np.unique(buckets_of(self._hashes_at(dead)))
                self.rebuild(concerned, np.zeros(BUCKETS, np.int64), dead)
            gone += len(dead)
        return gone

    def drop(self, buckets: Int64s) -> None:
        """Forget all that is in these buckets: somebody else has them now."""
        for group in groups_of(buckets, self.words[ENTRIES]):
            places = self.index.places_in(group)
            self.rebuild(group, np.zeros(BUCKETS, np.int64), places)

    def rebuild(self, buckets: Int64s, more: Int64s, gone: Int64s) -> None:
        """Regions with room for `more`, and without the entries at `gone`. One transaction."""
        index, places = self.index, self.index.places_in(buckets)
        values = index.values.take(gone)
        if len(gone) and len(self.watchers):
            last = None if index.last is None else index.last.take(gone)
            rows = self.slots.gather(values[values > 0].astype(np.int64) - 1)
            self._tell(self._hashes_at(gone), values, last, rows)
        before = self.words[REGION, buckets]
        keep = np.setdiff1d(places, gone) if len(gone) else places
        codes, counts = index.rebuilt(buckets, keep, more)
        mask = np.zeros(BUCKETS, np.bool_)
        mask[buckets] = True
        with self.journal.transaction(mask):
            if (gone == index.zero_place).any():
                self.journal.keep_entries(np.array([index.zero_place]))
                index.values[index.zero_place] = 0
            self.slots.release(values[values > 0].astype(np.int64) - 1)
            self.words[REGION, buckets] = codes
            self.words[ENTRIES, buckets] = counts
        index.give_back(buckets, before)

    def _hashes_at(self, places: Int64s) -> IdHashes:
        return self.index.keys.take(places)  # that of the last place is 0, as it should be

    # ---- the whole

    def part(self, buckets: Int64s, clock: int | None = None) -> TablePart:
        """What is in these buckets; `clock`: who has expired after so many steps is left out."""
        index, places = self.index, self.index.places_in(buckets)
        if index.last is not None:
            places = places[~self._dead(self._hashes_at(places), places, clock)]
        values = index.values.take(places).astype(np.int64)
        last = None if index.last is None else index.last.take(places)
        rows = self.slots.gather(values[values > 0] - 1)
        return sorted_part(ids_of(self._hashes_at(places)), values, last, rows)

    def parts(self, buckets: Mask | None = None) -> Iterator[TablePart]:
        """All of own buckets (or these), a few at a time; each as it is when it is its turn."""
        chosen = self.buckets if buckets is None else buckets
        for group in groups_of(np.flatnonzero(chosen), self.words[ENTRIES]):
            yield self.part(group)

    def digest(self) -> str:
        """Of all that counts in own buckets: ids, rows, state, and not where they lie."""
        found: dict[int, bytes] = {}
        for part in self.parts():
            found |= table_part.bucket_digests(part)
        return table_part.whole_digest(found)
