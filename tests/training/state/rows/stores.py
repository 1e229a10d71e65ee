"""Tables for tests: how they are made, and what must hold in them at any time."""

import numpy as np
import pytest
import torch
from torch import Tensor

from manyhands.training.memory.memory import Memory
from manyhands.training.state.rows import (
    row_index,
    row_init,
    row_journal,
    row_slots,
    row_store,
    sum_rows,
)
from manyhands.training.state.rows.row_hash import BUCKETS, buckets_of, ids_of
from manyhands.training.state.rows.row_index import ENTRIES, FREE, USED
from manyhands.training.state.rows.row_init import NormalInit
from manyhands.training.state.rows.row_store import RowStore, TableSpec
from tests.training.state.rows.plain_torch import OURS

ZERO_HASH = int(ids_of(np.zeros(1, np.uint64))[0])
"""The one id whose hash is 0."""


def table(
    kind: str = "adagrad",
    *,
    fd: int | None = None,
    dim: int = 5,
    capacity: int = 1000,
    admit: int = 1,
    expire: int | None = None,
    writers: int = 1,
) -> RowStore:
    spec = TableSpec(
        name="user",
        dim=dim,
        capacity=capacity,
        init=NormalInit(0.1),
        admit=admit,
        expire=expire,
    )
    return RowStore(spec, OURS[kind], Memory(fd), writers=writers)


def without_native(patch: pytest.MonkeyPatch) -> None:
    """As where it was not compiled."""
    for module in (row_index, row_init, row_journal, row_slots, row_store, sum_rows):
        patch.setattr(module, "row_passes", lambda: None)


def crowd(
    count: int, buckets: int = 2, seed: int = 0
) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Ids that share few buckets, so that those grow: and the one whose hash is 0."""
    made = np.random.default_rng(seed)
    hashes = made.integers(0, 1 << 54, count - 1, dtype=np.uint64)
    hashes |= made.integers(0, buckets, count - 1, dtype=np.uint64) << np.uint64(54)
    return np.sort(np.append(ids_of(hashes), ZERO_HASH))


def gradient(ids: "np.ndarray[tuple[int], np.dtype[np.int64]]", dim: int, step: int) -> Tensor:
    made = torch.Generator().manual_seed(step)
    return torch.randn(len(ids), dim, generator=made)


def is_sound(store: RowStore) -> None:
    """Entries are found, each has its own slot, and all that is counted is right."""
    index, words = store.index, store.words
    places = index.places_in(np.arange(BUCKETS))
    hashes, values = index.keys[places], index.values[places]
    assert (values != 0).all() and len(np.unique(hashes)) == len(hashes)
    assert (index.find(hashes) == places).all()
    assert (np.bincount(buckets_of(hashes), minlength=BUCKETS) == words[ENTRIES]).all()
    slots = values[values > 0].astype(np.int64) - 1
    assert len(np.unique(slots)) == len(slots) == store.rows
    of_slots = slots // store.slots.per_bucket
    assert (of_slots == buckets_of(hashes)[values > 0]).all()
    assert (np.bincount(of_slots, minlength=BUCKETS) == words[USED] - words[FREE]).all()
    given_back = getattr(store.slots, "_given_back")  # noqa: B009
    for bucket in np.flatnonzero(words[FREE]):
        free = given_back[bucket, : words[FREE][bucket]] + bucket * store.slots.per_bucket
        assert len(np.unique(free)) == len(free) and not set(free) & set(slots)
        assert (free % store.slots.per_bucket < words[USED][bucket]).all()
