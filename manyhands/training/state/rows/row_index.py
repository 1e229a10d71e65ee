# SPDX-License-Identifier: Apache-2.0
"""Id → slot: open addressing in arrays that lie in memory which outlives a process.

Each bucket has a region of its own, which is searched from the lowest bits of an id's hash on. A
region that is two thirds full is rebuilt into one of twice the size, and one with dead entries into
another of its own size, beside it; then one word says which it is (`REGION`), so that nobody finds
half of it, and a table of many rows never stops for longer than one bucket takes (0.2 ms). Room for
regions of all sizes is set aside: the memory is sparse, and old regions are given back.

    keys     the hash of the id; 0 is a free place
    values   slot + 1; or minus how often the id was seen, while it waits to be admitted; 0 nothing
    last     the step in which it was last seen, where rows expire

One of all ids has the hash 0. Its place is the last one, behind all regions, free if its value is.
"""

import mmap
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from manyhands.training.memory.memory import PAGE, Boxes, Memory
from manyhands.training.state.rows.row_hash import BUCKETS, IdHashes, Int64s, buckets_of
from manyhands.training.state.rows.row_passes import NativeIndex, address, row_passes

REGION, ENTRIES, USED, FREE, DONE = range(5)
"""Words of a bucket: 2 × level + which of two; entries; slots ever used; and given back; steps."""
WORDS = 5

_SMALLEST = 8
"""Places in a region of level 0."""
_WINDOW = 16
_SCRATCH = 1 << 16


class RowIndex:
    def __init__(self, memory: Memory, most_entries: int, *, dates: bool) -> None:
        """`most_entries`: of one bucket. `dates`: keep when an id was last seen."""
        self.levels = 1
        while most_fit(self.levels - 1) < most_entries:
            self.levels += 1
        self.most_entries = most_entries
        codes = 2 * self.levels
        sizes = _SMALLEST << (np.arange(codes) // 2)
        self._sizes = sizes
        self._starts = (np.cumsum(sizes) - sizes) * BUCKETS
        self.zero_place = int(sizes.sum()) * BUCKETS
        places = self.zero_place + 1
        self.words = cast(Int64s, memory.array(WORDS, BUCKETS, dtype=np.int64))
        boxes = [memory.shelf(1, places * 8), memory.shelf(1, places * 4)]
        self.keys = cast(IdHashes, boxes[0].array(0, places, dtype=np.uint64))
        self.values = cast(NDArray[np.int32], boxes[1].array(0, places, dtype=np.int32))
        self.last: Int64s | None = None
        if dates:
            boxes.append(memory.shelf(1, places * 8))
            self.last = cast(Int64s, boxes[2].array(0, places, dtype=np.int64))
        self._boxes = list(zip(boxes, (8, 4, 8), strict=False))
        self._numbers = np.arange(BUCKETS)
        self._scratch = np.zeros(_SCRATCH, np.int64)
        self.native = NativeIndex(zero_place=self.zero_place)
        self.native.regions = address(self.words[REGION])
        self.native.starts, self.native.sizes = address(self._starts), address(self._sizes)
        self.native.keys, self.native.values = address(self.keys), address(self.values)
        if self.last is not None:
            self.native.last, self.native.done = address(self.last), address(self.words[DONE])

    # ---- where things are

    def regions(self, codes: Int64s | None = None) -> tuple[Int64s, Int64s]:
        """Of all buckets: where its region starts, and its size; `codes`: of other regions."""
        known = self.words[REGION] if codes is None else codes
        sizes = self._sizes.take(known)
        return self._starts.take(known) + self._numbers * sizes, sizes

    def find(self, hashes: IdHashes) -> Int64s:
        """The place of each, or a free one (its value is 0) of an id that is not here."""
        if (passes := row_passes()) is not None:
            return passes.find(self.native, np.ascontiguousarray(hashes))[0]
        starts, sizes = self.regions()
        buckets = buckets_of(hashes)
        start, mask = starts.take(buckets), (sizes - 1).take(buckets)
        offset = hashes.view(np.int64) & mask
        places = start + offset
        keys = self.keys.take(places)
        todo = np.flatnonzero((keys != hashes) & (keys != 0))
        if len(todo):
            start, mask, offset = start.take(todo), mask.take(todo), offset.take(todo)
            self._search_on(hashes.take(todo), start, mask, offset, todo, places)
        if not hashes.all():
            places[hashes == 0] = self.zero_place
        return places

    def look(self, hashes: IdHashes) -> tuple[Int64s, NDArray[np.int32], bool]:
        """Where these are, what is said there, and whether all of them are rows."""
        if (passes := row_passes()) is not None:
            places, values, rows = passes.find(self.native, np.ascontiguousarray(hashes))
            return places, values, rows == len(hashes)
        places = self.find(hashes)
        values = self.values.take(places)
        return places, values, bool((values > 0).all())

    def _search_on(
        self,
        hashes: IdHashes,
        start: Int64s,
        mask: Int64s,
        offset: Int64s,
        todo: Int64s,
        places: Int64s,
    ) -> None:
        """A few places at once, then many at once: few searches are long, but some are."""
        steps = np.arange(1, 3)
        while len(todo):
            window = ((offset[:, None] + steps) & mask[:, None]) + start[:, None]
            keys = self.keys.take(window)
            ends = (keys == hashes[:, None]) | (keys == 0)
            first = ends.argmax(1)
            numbers = np.arange(len(todo))
            found = ends[numbers, first]
            places[todo[found]] = window[numbers[found], first[found]]
            rest = np.flatnonzero(~found)
            hashes, todo, start = hashes.take(rest), todo.take(rest), start.take(rest)
            mask, offset = mask.take(rest), offset.take(rest) + len(steps)
            steps = np.arange(1, _WINDOW + 1)

    def places_in(self, buckets: Int64s) -> Int64s:
        """Of all entries of these buckets; in no order that means anything."""
        starts, sizes = self.regions()
        start, size = starts.take(buckets), sizes.take(buckets)
        ends = np.cumsum(size)
        places = np.repeat(start - (ends - size), size) + np.arange(ends[-1] if len(ends) else 0)
        taken = places[self.keys.take(places) != 0]
        if self.values[self.zero_place] != 0 and (buckets == 0).any():
            taken = np.append(taken, self.zero_place)
        return taken

    # ---- changes

    def count(self, word: int, more: Int64s) -> None:
        """Add to a word of the buckets that are concerned: the others may be somebody else's."""
        buckets = np.flatnonzero(more)
        self.words[word, buckets] += more[buckets]

    def insert(self, hashes: IdHashes, values: NDArray[np.int32], journal: "Any | None") -> Int64s:
        """Takes free places for ids that are not here, in regions that have room; where."""
        places = self._insert(hashes, values, self.words[REGION], journal)
        self.count(ENTRIES, np.bincount(buckets_of(hashes), minlength=BUCKETS))
        return places

    def _insert(
        self,
        hashes: IdHashes,
        values: NDArray[np.int32],
        codes: Int64s,
        journal: "Any | None",
    ) -> Int64s:
        if (passes := row_passes()) is not None:
            claims = None if journal is None else journal.claims
            hashes, values = np.ascontiguousarray(hashes), np.ascontiguousarray(values)
            return passes.insert(self.native, codes, hashes, values, claims)
        starts, sizes = self.regions(codes)
        buckets = buckets_of(hashes)
        start, mask = starts.take(buckets), (sizes - 1).take(buckets)
        offset = hashes.view(np.int64) & mask
        places = start + offset
        todo = np.arange(len(hashes))
        if not hashes.all():
            places[hashes == 0] = self.zero_place  # which is free: its key is always 0
        while len(todo):
            here = places.take(todo)
            free = self.keys.take(here) == 0
            # Of those that want the same place one may have it. Numbers that share a cell for
            # another reason come again.
            cells = here & (_SCRATCH - 1)
            numbers = np.arange(len(todo))
            self._scratch[cells[free]] = numbers[free]
            won = free & (self._scratch.take(cells) == numbers)
            winners = todo[won]
            taken = here[won]
            if journal is not None:
                journal.claim(taken)
            self.values[taken] = values.take(winners)
            self.keys[taken] = hashes.take(winners)
            passed = todo[~free]
            offset[passed] = (offset.take(passed) + 1) & mask.take(passed)
            places[passed] = start.take(passed) + offset.take(passed)
            todo = todo[~won]
        return places

    def crowded(self, more: Int64s) -> Int64s:
        """Buckets whose regions have no room for so many more entries."""
        sizes = self._sizes.take(self.words[REGION])
        return np.flatnonzero((self.words[ENTRIES] + more > sizes * 2 // 3) & (more > 0))

    def rebuilt(self, buckets: Int64s, keep: Int64s, more: Int64s) -> tuple[Int64s, Int64s]:
        """Write regions with the entries at `keep` and room for `more`, which nobody sees yet.
        Returns their codes and how many entries they have, in the order of `buckets`."""
        regular = keep[keep != self.zero_place]
        hashes = self.keys.take(regular)
        counts = np.bincount(buckets_of(hashes), minlength=BUCKETS)
        counts[0] += len(keep) - len(regular)  # counts as an entry, though it takes no place
        now = self.words[REGION]
        level = np.zeros(BUCKETS, np.int64)
        for size_level in range(self.levels - 1):
            level += counts + more > most_fit(size_level)
        codes = now.copy()
        beside = np.where(now // 2 == level, now ^ 1, level * 2)
        codes[buckets] = beside[buckets]
        starts, sizes = self.regions(codes)
        self._wipe(buckets, starts, sizes)
        places = self._insert(hashes, self.values.take(regular), codes, None)
        if self.last is not None:
            self.last[places] = self.last.take(regular)
        return codes[buckets], counts[buckets]

    def forget(self, buckets: Int64s) -> None:
        """All that there is in these buckets, whether it fits together or not."""
        before = self.words[REGION, buckets]
        self.words[:, buckets] = 0
        starts, sizes = self.regions()
        self._wipe(buckets, starts, sizes)
        if (buckets == 0).any():
            self.values[self.zero_place] = 0
        self.give_back(buckets, before)

    def _wipe(self, buckets: Int64s, starts: Int64s, sizes: Int64s) -> None:
        for first, stop in _stretches(starts[buckets], sizes[buckets]):
            self.keys[first:stop] = 0
            self.values[first:stop] = 0

    def give_back(self, buckets: Int64s, codes: Int64s) -> None:
        """The pages of regions that no word names any more."""
        whole = self.words[REGION].copy()
        whole[buckets] = codes
        starts, sizes = self.regions(whole)
        for first, stop in _stretches(starts[buckets], sizes[buckets]):
            for box, itemsize in self._boxes:
                _punch(box, first * itemsize, (stop - first) * itemsize)


def _stretches(starts: Int64s, sizes: Int64s) -> list[tuple[int, int]]:
    """First and stop of regions, those that lie side by side as one: mostly many buckets grow at
    the same time."""
    order = np.argsort(starts)
    starts, stops = starts[order], (starts + sizes)[order]
    ends = np.flatnonzero(np.append(starts[1:] != stops[:-1], True)) if len(starts) else order
    firsts = np.append(0, ends + 1)[: len(ends)]
    return list(zip(starts[firsts].tolist(), stops[ends].tolist(), strict=True))


def most_fit(level: int) -> int:
    """How many entries a region takes before it is crowded."""
    return (_SMALLEST << level) * 2 // 3


def _punch(box: Boxes, at: int, nbytes: int) -> None:
    first, stop = -(-at // PAGE) * PAGE, (at + nbytes) // PAGE * PAGE
    if stop > first:
        box.box(0).madvise(mmap.MADV_REMOVE, first, stop - first)
