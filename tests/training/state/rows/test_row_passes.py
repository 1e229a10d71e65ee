"""Native passes do what is done without them, bit for bit, and can be broken off at any store."""

import os
import signal
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manyhands.training.state.rows.row_hash import BUCKETS, hashes_of
from manyhands.training.state.rows.row_index import REGION
from manyhands.training.state.rows.row_init import FirstRows, NormalInit, UniformInit
from manyhands.training.state.rows.row_passes import NativeLane, RowPasses, row_passes
from manyhands.training.state.rows.row_store import RowStore
from manyhands.training.state.rows.sum_rows import (
    GradientRows,
    group_ids,
    merge_rows,
    rows_in,
    sum_positions,
)
from manyhands.values.native_library import why_not
from tests.support.hands import segment
from tests.support.single_steps import single_steps
from tests.training.state.rows.plain_torch import OURS, same_bits
from tests.training.state.rows.stores import crowd, gradient, is_sound, table, without_native

PASSES = row_passes()
pytestmark = pytest.mark.skipif(PASSES is None, reason=f"no native passes: {why_not()}")

T = TypeVar("T")
ID = st.integers(-(2**63), 2**63 - 1) | st.integers(-4, 4) | st.sampled_from([-(2**63), 2**63 - 1])
ODD = [0.0, -0.0, 1.0, -1.0, 0.1, 3e7, 1e-8, 1e-42, -1e-44, 3e38, -3e38, float("inf")]


def both_ways(act: Callable[[], T]) -> tuple[T, T]:
    """With native passes, and without."""
    native = act()
    with pytest.MonkeyPatch.context() as patch:
        without_native(patch)
        return native, act()


def numbers(count: int, dim: int, seed: int) -> Tensor:
    made = np.random.default_rng(seed)
    odd = made.choice(np.array(ODD, np.float32), (count, dim))
    plain = made.standard_normal((count, dim)).astype(np.float32)
    return torch.from_numpy(np.where(made.random((count, dim)) < 0.5, odd, plain))


def alike(native: GradientRows, plain: GradientRows) -> None:
    assert native.ids.tolist() == plain.ids.tolist()
    assert native.rows.shape == plain.rows.shape
    nothing = native.rows.isnan()  # inf - inf: which of all NaNs it is means nothing
    assert torch.equal(nothing, plain.rows.isnan())
    assert same_bits(native.rows.masked_fill(nothing, 0), plain.rows.masked_fill(nothing, 0))


# ---- gradients


@settings(max_examples=300, deadline=None)
@given(st.lists(ID, max_size=60), st.integers(1, 40), st.integers(0, 999))
def test_positions_are_summed_alike(ids: list[int], dim: int, seed: int) -> None:
    given_ids, grads = np.array(ids, np.int64), numbers(len(ids), dim, seed)
    alike(*both_ways(lambda: sum_positions(given_ids, grads)))


@pytest.mark.parametrize("dim", [1, 8, 16, 17])
@pytest.mark.parametrize("spread", [1, 40, 2**20, 2**62])
def test_many_positions_are_summed_and_spread_alike(dim: int, spread: int) -> None:
    made = np.random.default_rng(dim)
    ids = made.integers(-spread, spread, 20_000)
    grads = numbers(len(ids), dim, seed=dim)
    alike(*both_ways(lambda: sum_positions(ids, grads)))
    rows = numbers(len(np.unique(ids)), dim, seed=1)
    native, plain = both_ways(lambda: group_ids(ids))
    assert native.distinct.tolist() == plain.distinct.tolist()
    assert (native.each == plain.each).all()
    assert same_bits(native.spread(rows), plain.spread(rows))


@settings(max_examples=300, deadline=None)
@given(st.sets(ID), st.sets(ID), st.sets(ID), st.integers(1, 40), st.integers(0, 999))
def test_sides_are_merged_alike(
    left: set[int], right: set[int], shared: set[int], dim: int, seed: int
) -> None:
    sides = [np.array(sorted(ids | shared), np.int64) for ids in (left, right)]
    rows = [GradientRows(ids, numbers(len(ids), dim, seed + k)) for k, ids in enumerate(sides)]
    alike(*both_ways(lambda: merge_rows(*rows)))


@settings(max_examples=100, deadline=None)
@given(st.sets(ID), st.integers(1, 20), st.integers(0, 999))
def test_buckets_are_selected_alike(ids: set[int], dim: int, seed: int) -> None:
    whole = GradientRows(np.array(sorted(ids), np.int64), numbers(len(ids), dim, seed))
    owned = np.random.default_rng(seed).random(BUCKETS) < 0.5
    alike(*both_ways(lambda: rows_in(whole, owned)))


def test_memory_of_any_shape_is_taken() -> None:
    """What autograd gives may be expanded or transposed, and ids may be every second one."""
    ids = np.arange(40, dtype=np.int64)[::2] % 7
    for grads in (torch.randn(1, 16).expand(20, 16), torch.randn(16, 20).t()):
        alike(*both_ways(lambda grads=grads: sum_positions(ids, grads)))


# ---- tables


@settings(max_examples=100, deadline=None)
@given(st.lists(ID, min_size=1, max_size=30), st.integers(1, 70), st.integers(0, 9))
def test_first_values_are_the_same(ids: list[int], dim: int, seed: int) -> None:
    for init in (NormalInit(0.3), UniformInit(-2, 1)):
        first = FirstRows(init, dim, seed=seed, table="t")
        native, plain = both_ways(lambda first=first: first(np.array(ids, np.int64)))
        assert native.tobytes() == plain.tobytes()


def history(
    kind: str, dim: int, seed: int, native: Callable[[int], bool], **rules: Any
) -> tuple[list[str], RowStore]:
    """A digest after each of some pushes; `native`: whether that step is taken so."""
    store, made = table(kind, dim=dim, **rules), np.random.default_rng(seed)
    ids, found = np.append(crowd(200, buckets=3, seed=seed), np.arange(50) + 2**40), list[str]()
    for step in range(1, 9):
        chosen = np.sort(made.permutation(np.unique(ids))[: made.integers(0, 180)])
        with pytest.MonkeyPatch.context() as patch:
            if not native(step):
                without_native(patch)
            store.apply(chosen, gradient(chosen, dim, step), step)
            found.append(f"{store.digest()} {store.read(ids).numpy().tobytes().hex()}")
            if step % 3 == 0:
                store.sweep(np.arange(BUCKETS))
        is_sound(store)
    return found, store


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("dim", [1, 5, 16])
@pytest.mark.parametrize("rules", [{}, {"admit": 2, "expire": 2}], ids=str)
def test_tables_have_the_same_history(kind: str, dim: int, rules: dict[str, int]) -> None:
    """Also where those with native passes and those without take turns in the same memory."""
    plain, _ = history(kind, dim, 1, lambda step: False, **rules)
    assert len(set(plain)) > 5
    assert history(kind, dim, 1, lambda step: True, **rules)[0] == plain
    assert history(kind, dim, 1, lambda step: step % 2 == 0, **rules)[0] == plain


def test_between_any_two_instructions_all_can_be_undone() -> None:
    """A child takes free places, copies rows aside and changes them, one instruction after the
    other; after each it is as if it were killed there."""
    assert PASSES is not None
    with segment() as fd:
        store = table("adagrad", fd=fd, dim=5)
        ids = crowd(20)
        known, fresh = ids[::2], ids[1::2]
        store.apply(known, gradient(known, 5, 1), 1)
        index, journal, lanes = store.index, store.journal, list(store.slots.lanes.values())
        hashes = hashes_of(fresh)
        slots = index.values.take(index.find(hashes_of(known))).astype(np.int64) - 1
        changed = [torch.randn(len(slots), lane.shape[1]) for lane in lanes]
        work = [torch.zeros(len(slots), lane.shape[1]) for lane in lanes]
        put = (NativeLane * len(lanes))(
            *(
                (lane.data_ptr(), None, new.data_ptr(), lane.shape[1])
                for lane, new in zip(lanes, changed, strict=True)
            )
        )
        for lane, room in zip(journal.native, work, strict=True):
            lane.work = room.data_ptr()
        everything = np.ones(BUCKETS, np.bool_)
        values, regions = np.arange(1, len(fresh) + 1, dtype=np.int32), store.words[REGION].copy()

        def act() -> None:
            journal.open(everything)
            os.kill(os.getpid(), signal.SIGSTOP)
            PASSES.insert(index.native, regions, hashes, values, journal.claims)
            PASSES.keep(journal.native, slots, *getattr(journal, "_kept"))  # noqa: B009
            PASSES.put(put, slots)

        starts, sizes = index.regions()
        touched = np.concatenate(
            [np.arange(starts[b], starts[b] + sizes[b]) for b in (0, 1)] + [[index.zero_place]]
        ).astype(np.int64)

        def seen_now() -> list[Any]:
            rows = [lane[torch.from_numpy(slots)].clone() for lane in lanes]
            return [*rows, index.keys[touched], index.values[touched]]

        def put_back(state: list[Any], head: Any) -> None:
            for lane, rows in zip(lanes, state, strict=False):
                lane[torch.from_numpy(slots)] = rows
            index.keys[touched], index.values[touched] = state[-2:]
            journal.head[:] = head

        before = _bytes(seen_now())
        states, torn, was = 0, 0, b""
        for _ in single_steps(act):
            state, head = seen_now(), journal.head.copy()
            if (now := _bytes([*state, head])) == was:
                continue
            was, states, torn = now, states + 1, torn + (_bytes(state) != before)
            journal.undo()
            assert _bytes(seen_now()) == before, head
            put_back(state, head)
        assert states > 40 and torn > 30, (states, torn)
        for lane, rows in zip(lanes, changed, strict=True):
            assert same_bits(lane[torch.from_numpy(slots)], rows)
        assert (index.values.take(index.find(hashes)) == values).all()


def _bytes(state: list[Any]) -> bytes:
    return b"".join(np.asarray(part).tobytes() for part in state)


# ---- what is tried before the first use


@pytest.mark.parametrize("broken", ["sum", "merge", "group"])
def test_sums_that_are_not_torchs_are_not_used(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = getattr(RowPasses, broken)

    def other(self: RowPasses, *given: Any) -> Any:
        found = whole(self, *given)
        last = found if isinstance(found, Tensor) else found[1]
        last += 1e-6 if isinstance(last, Tensor) else 1
        return found

    monkeypatch.setattr(RowPasses, broken, other)
    row_passes.cache_clear()
    try:
        assert row_passes() is None
    finally:
        row_passes.cache_clear()
    monkeypatch.undo()
    assert row_passes() is not None
