# SPDX-License-Identifier: Apache-2.0
"""Single passes over ids and rows in native code, where numpy and torch take many (row_passes.c).

Whatever is done here is done without it too, by whoever calls it, with the same bits: ids are found
and rows copied, and gradients added one by one in the same order. `row_passes()` is None where it
was not compiled or is switched off (native_library.py), or where the sums that it makes are not
those of torch, which is tried on made-up numbers before the first use.

What it is given is contiguous. It does not hold Python's lock while it works.
"""

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.training.state.rows.row_hash import IdHashes, Ids, Int64s
from manyhands.values.native_library import native_library

Int32s = NDArray[np.int32]
_ADDRESS, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_KINDS = {"A": _ADDRESS, "N": _NUMBER, "U": ctypes.c_uint64, "F": ctypes.c_float}
_PASSES = {  # name: its arguments, and whether it answers with a number
    "group": ("ANANAAAA", True),
    "spread": ("AANNA", False),
    "sum": ("AAANNA", False),
    "merge": ("ANAANANAA", True),
    "select": ("ANANAAA", True),
    "hash": ("ANAA", True),
    "find": ("AANAA", True),
    "read": ("AANANNAA", True),
    "insert": ("AAAANAAA", False),
    "allocate": ("ANAAANA", False),
    "first": ("ANUNAA", False),
    "write": ("ANANANF", False),
    "keep": ("ANANAA", False),
    "put": ("ANAN", False),
}


class NativeIndex(ctypes.Structure):
    """As row_passes.c has it, and so the next."""

    _fields_ = (
        *((name, _ADDRESS) for name in ("regions", "starts", "sizes", "keys", "values")),
        ("zero_place", _NUMBER),
        *((name, _ADDRESS) for name in ("last", "done")),
        ("expire", _NUMBER),
    )


class NativeLane(ctypes.Structure):
    _fields_ = (
        *((name, _ADDRESS) for name in ("rows", "copies", "work")),
        ("width", _NUMBER),
    )


def address(array: NDArray[Any]) -> int:
    return array.__array_interface__["data"][0]


class RowPasses:
    def __init__(self, library: ctypes.CDLL) -> None:
        for name, (arguments, answers) in _PASSES.items():
            made = getattr(library, f"rows_{name}")
            made.argtypes = [_KINDS[letter] for letter in arguments]
            made.restype = _NUMBER if answers else None
            setattr(self, f"_{name}", made)

    _group: Any
    _spread: Any
    _sum: Any
    _merge: Any
    _select: Any
    _hash: Any
    _find: Any
    _read: Any
    _insert: Any
    _allocate: Any
    _first: Any
    _write: Any
    _keep: Any
    _put: Any

    # ---- gradients (sum_rows.py)

    def group(self, ids: Ids) -> tuple[Ids, Int32s, Int32s]:
        """Ids in ascending order, each once; of each position, which of them it is; and of each of
        them, the first position."""
        n, size = len(ids), 1 << (2 * len(ids)).bit_length()
        table, room = np.empty(size, np.int32), np.empty(4 * n, np.int64)
        distinct, each, first = np.empty(n, np.int64), np.empty(n, np.int32), np.empty(n, np.int32)
        given = (address(ids), n, address(table), size, address(room))
        count = self._group(*given, address(distinct), address(each), address(first))
        return distinct[:count], each, first[:count]

    def spread(self, rows: Tensor, each: Int32s) -> Tensor:
        n, dim = len(each), rows.shape[1]
        out = torch.empty(n, dim, dtype=torch.float32)
        self._spread(rows.data_ptr(), address(each), n, dim, out.data_ptr())
        return out

    def sum(self, grads: Tensor, each: Int32s, first: Int32s) -> Tensor:
        n, dim = grads.shape
        out = torch.empty(len(first), dim, dtype=torch.float32)
        self._sum(grads.data_ptr(), address(each), address(first), n, dim, out.data_ptr())
        return out

    def merge(self, left: Ids, mine: Tensor, right: Ids, others: Tensor) -> tuple[Ids, Tensor]:
        most, dim = len(left) + len(right), mine.shape[1]
        ids, rows = np.empty(most, np.int64), torch.empty(most, dim, dtype=torch.float32)
        sides = (address(left), len(left), mine.data_ptr())
        sides += (address(right), len(right), others.data_ptr())
        count = self._merge(*sides, dim, address(ids), rows.data_ptr())
        return ids[:count], rows[:count]

    def select(self, ids: Ids, rows: Tensor, marked: NDArray[np.bool_]) -> tuple[Ids, Tensor]:
        """Those in buckets that are marked."""
        n, dim = rows.shape
        out, chosen = np.empty(n, np.int64), torch.empty(n, dim, dtype=torch.float32)
        given = (address(ids), n, rows.data_ptr(), dim, address(marked))
        count = self._select(*given, address(out), chosen.data_ptr())
        return out[:count], chosen[:count]

    # ---- tables

    def hash(self, ids: Ids, marked: NDArray[np.bool_]) -> tuple[IdHashes, int]:
        """Of all; and how many are in buckets that are marked."""
        hashes = np.empty(len(ids), np.uint64)
        return hashes, self._hash(address(ids), len(ids), address(marked), address(hashes))

    def find(self, index: NativeIndex, hashes: IdHashes) -> tuple[Int64s, Int32s, int]:
        """Where these are, and what is said there; how many of them are rows."""
        places, values = np.empty(len(hashes), np.int64), np.empty(len(hashes), np.int32)
        given = (ctypes.addressof(index), address(hashes), len(hashes))
        return places, values, self._find(*given, address(places), address(values))

    def read(self, index: NativeIndex, ids: Ids, lane: Tensor, out: Tensor) -> Int64s:
        """Rows to `out`; positions of those that are not there."""
        n, dim = out.shape
        unknown = np.empty(n, np.int64)
        given = (ctypes.addressof(index), address(ids), n, lane.data_ptr(), lane.shape[1], dim)
        return unknown[: self._read(*given, out.data_ptr(), address(unknown))]

    def insert(
        self,
        index: NativeIndex,
        regions: Int64s,
        hashes: IdHashes,
        values: Int32s,
        claims: tuple[int, int] | None,
    ) -> Int64s:
        """Takes free places; where. `claims`: addresses at which they are noted, and counted."""
        places = np.empty(len(hashes), np.int64)
        given = (address(regions), address(hashes), address(values), len(hashes))
        self._insert(ctypes.addressof(index), *given, address(places), *(claims or (None, None)))
        return places

    def allocate(self, hashes: IdHashes, used: Int64s, free: Int64s, given_back: Int32s) -> Int64s:
        slots = np.empty(len(hashes), np.int64)
        given = (address(used), address(free), address(given_back), given_back.shape[1])
        self._allocate(address(hashes), len(hashes), *given, address(slots))
        return slots

    def first(self, ids: Ids, key: int, quantiles: NDArray[np.float32], dim: int) -> Any:
        out = np.empty((len(ids), dim), np.float32)
        self._first(address(ids), len(ids), key, dim, address(quantiles), address(out))
        return out

    def write(self, lane: Tensor, slots: Int64s, values: Tensor | None, initial: float) -> None:
        rows, columns = (None, 0) if values is None else (values.data_ptr(), values.shape[1])
        given = (lane.data_ptr(), lane.shape[1], address(slots), len(slots))
        self._write(*given, rows, columns, initial)

    def keep(self, lanes: Any, slots: Int64s, aside: int, counter: int) -> None:
        """Copies rows aside and then counts them. Addresses: where slots are noted, and the
        count."""
        self._keep(lanes, len(lanes), address(slots), len(slots), aside, counter)

    def put(self, lanes: Any, slots: Int64s) -> None:
        self._put(lanes, len(lanes), address(slots), len(slots))


@cache
def row_passes() -> RowPasses | None:
    if (library := native_library()) is None:
        return None
    passes = RowPasses(library)
    return passes if all(_adds_as_torch(passes, dim) for dim in (1, 5, 16)) else None


def _adds_as_torch(passes: RowPasses, dim: int) -> bool:
    made = np.random.default_rng(dim)
    values = (made.standard_normal((64, dim)) * np.exp(4 * made.standard_normal((64, dim)))).astype(
        np.float32
    )
    values[made.random((64, dim)) < 0.2] = -0.0
    grads, ids = torch.from_numpy(values), made.integers(-3, 9, 64)
    distinct, each, first = passes.group(ids)
    expected: dict[int, Tensor] = {}
    for id_, gradient in zip(ids.tolist(), grads, strict=True):
        expected[id_] = expected[id_] + gradient if id_ in expected else gradient
    summed, plain = (
        passes.sum(grads, each, first),
        torch.stack([expected[i] for i in sorted(expected)]),
    )
    _, merged = passes.merge(distinct, summed, distinct, plain)
    return (
        distinct.tolist() == sorted(expected)
        and torch.equal(summed.view(torch.int32), plain.view(torch.int32))
        and torch.equal(merged.view(torch.int32), (plain + plain).view(torch.int32))
    )
