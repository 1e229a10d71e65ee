"""A table of rows is what plain torch makes of them, whatever came when and lies where."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.training.state.rows import row_journal
from manyhands.training.state.rows.load_rows import begin_at, clear, load
from manyhands.training.state.rows.row_hash import BUCKETS
from manyhands.training.state.rows.row_init import NormalInit
from manyhands.training.state.rows.row_snapshot import RowSnapshot
from manyhands.training.state.rows.row_store import RowStore, TableSpec
from manyhands.training.state.rows.table_part import bucket_digests, whole_digest
from manyhands.values.errors import ConfigError, TableFull, WrongArguments
from tests.support.hands import segment
from tests.training.state.rows.plain_torch import OURS, Reference, same_bits
from tests.training.state.rows.stores import ZERO_HASH, crowd, gradient, is_sound, table

UNIVERSE = crowd(40, buckets=3)


class History:
    """What should be in a table: plain torch, and a count and a date for each id."""

    def __init__(self, kind: str, first: torch.Tensor, admit: int, expire: int | None) -> None:
        self.reference, self.admit, self.expire = Reference(kind, first), admit, expire
        self.seen = dict.fromkeys(range(len(first)), 0)
        self.last = dict.fromkeys(range(len(first)), 0)

    def step(self, chosen: list[int], grads: torch.Tensor) -> None:
        step = self.reference.steps + 1
        for k in chosen:
            self.seen[k], self.last[k] = self.seen[k] + 1, step
        taken = [self.seen[k] >= self.admit for k in chosen]
        at = [k for k, is_taken in zip(chosen, taken, strict=True) if is_taken]
        self.reference.step(at, grads[torch.tensor(taken, dtype=torch.bool)])
        for k in self.seen if self.expire is not None else ():
            if self.expire is not None and step - self.last[k] >= self.expire:
                self.seen[k] = 0
                self.reference.begin_anew(k)


@pytest.mark.parametrize("kind", OURS)
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_a_table_has_the_bits_of_plain_torch(kind: str, data: st.DataObject) -> None:
    torch.set_num_threads(1)
    admit, expire = data.draw(st.integers(1, 3)), data.draw(st.none() | st.integers(1, 4))
    dim = data.draw(st.sampled_from([1, 5, 16, 33]))
    store = table(kind, dim=dim, admit=admit, expire=expire)
    plain = History(kind, torch.from_numpy(store.first_rows(UNIVERSE)), admit, expire)
    assert same_bits(store.read(UNIVERSE), plain.reference.weights) and store.rows == 0
    for step in range(1, 9):
        count = data.draw(st.integers(1, len(UNIVERSE)), label="rows")
        chosen = data.draw(st.permutations(range(len(UNIVERSE))))[:count]
        grads = gradient(UNIVERSE[chosen], dim, step)
        store.apply(UNIVERSE[chosen], grads, step)
        plain.step(chosen, grads)
        if data.draw(st.booleans(), label="sweep"):
            store.sweep(np.arange(BUCKETS))
        is_sound(store)
        assert same_bits(store.read(UNIVERSE), plain.reference.weights), step
    (part,) = (part for part in store.parts() if len(part.ids))
    places = {int(id_): k for k, id_ in enumerate(UNIVERSE)}
    alive = {k for k, seen in plain.seen.items() if seen > 0}
    assert {places[int(id_)] for id_ in part.ids} == alive
    assert {places[int(i)] for i in part.row_ids} == {k for k in alive if plain.seen[k] >= admit}
    for name, lane in plain.reference.state.items():
        rows = torch.tensor([places[int(id_)] for id_ in part.row_ids], dtype=torch.int64)
        assert same_bits(part.lanes[name], lane[rows])


def test_order_and_slots_leave_no_trace() -> None:
    ids = crowd(300)
    made = np.random.default_rng(1)
    digests: set[str] = set()
    for order in (np.arange(300), made.permutation(300), made.permutation(300)):
        store = table("adam")
        for k, part in enumerate(np.array_split(order, 3)):
            store.apply(ids[part], torch.ones(len(part), 5), 3 * k + 1)  # who came when differs
            clear(store)
        for step in (1, 2):
            store.apply(ids[order], gradient(ids, 5, step)[torch.from_numpy(order)], step)
        digests.add(store.digest())
    other = table("adam")
    other.apply(ids[:150], gradient(ids, 5, 1)[:150], 1)
    assert len(digests) == 1 and other.digest() not in digests


def test_a_step_is_taken_once() -> None:
    store, ids = table(), crowd(20)
    store.apply(ids, gradient(ids, 5, 1), 1)
    once = store.digest()
    store.apply(ids, gradient(ids, 5, 1), 1)
    assert store.digest() == once and store.steps() == (1, 1)


def test_more_rows_than_the_capacity_are_refused_by_name() -> None:
    """In the step after: all processes see the same rows then, whoever made them."""
    store, ids = table(capacity=30), crowd(40)
    store.apply(ids[:30], gradient(ids[:30], 5, 1), 1)
    store.see_room(1)
    store.apply(ids, gradient(ids, 5, 2), 2)
    before = store.digest()
    with pytest.raises(
        TableFull, match=r"'user' is full in step 2: it may have 30 rows, and has 40"
    ):
        store.see_room(2)
    assert store.digest() == before and store.steps() == (2, 2)
    is_sound(store)


def test_what_has_expired_makes_room() -> None:
    store, ids = table(capacity=30, expire=2), crowd(60)
    store.apply(ids[:30], gradient(ids[:30], 5, 1), 1)
    store.apply(ids[:5], gradient(ids[:5], 5, 2), 2)
    store.apply(ids[30:55], gradient(ids[30:55], 5, 3), 3)
    assert store.rows == 55
    store.see_room(3)  # 25 of them are gone, and 30 are left
    store.apply(ids[30:55], gradient(ids[30:55], 5, 4), 4)
    assert store.rows == 30
    is_sound(store)
    store.apply(ids[:30], gradient(ids[:30], 5, 5), 5)
    with pytest.raises(TableFull, match="has 55"):
        store.see_room(5)


def test_ids_that_wait_are_bounded_too() -> None:
    store, made = table(capacity=3, admit=2), np.random.default_rng(0)
    with pytest.raises(TableFull, match="wait to be admitted"):
        for step in range(1, 1000):
            ids = np.unique(made.integers(0, 1 << 60, 1000))
            store.apply(ids, gradient(ids, 5, step), step)
    assert store.rows == 0


def test_two_gradients_for_one_id_are_refused() -> None:
    store = table()
    with pytest.raises(WrongArguments, match="two gradients for id 7"):
        store.apply(np.array([7, 3, 7]), torch.ones(3, 5), 1)
    with pytest.raises(WrongArguments, match="5 columns"):
        store.apply(np.array([7, 3]), torch.ones(2, 6), 1)
    assert store.rows == 0


def test_an_error_in_a_step_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    store, ids = table(), crowd(40)
    store.apply(ids[:20], gradient(ids[:20], 5, 1), 1)
    before = store.digest()

    def fail(*given: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(type(store.optimizer), "update", fail)
        store.apply(ids, gradient(ids, 5, 2), 2)
    assert store.digest() == before and store.steps() == (1, 1)
    is_sound(store)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"dim": 0}, "dim must be"),
        ({"capacity": 0}, "rows must be at least 1"),
        ({"capacity": 10**10}, "at most 1,500,000,000"),
        ({"admit": 0}, "admit"),
        ({"expire": 0}, "expire"),
    ],
)
def test_tables_that_make_no_sense_are_refused(wrong: dict[str, int], match: str) -> None:
    settings = {"dim": 4, "capacity": 4, **wrong}
    with pytest.raises(ConfigError, match=f"table 'user': .*{match}"):
        TableSpec(name="user", init=NormalInit(), **settings)


def test_pushes_larger_than_a_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = crowd(500, buckets=1024)
    calm = table()
    for step in (1, 2):
        calm.apply(ids, gradient(ids, 5, step), step)
    monkeypatch.setattr(row_journal, "MOST_ROWS", 64)
    store = table()
    for step in (1, 2):
        store.apply(ids, gradient(ids, 5, step), step)
    assert store.digest() == calm.digest()


def test_writers_of_different_buckets_share_a_table() -> None:
    """Each is given the whole push, and takes what is its own."""
    ids = crowd(300, buckets=8)
    calm = table(expire=2)
    with segment() as fd:
        stores = [table(fd=fd, expire=2, writers=4) for _ in range(3)]
        for step in range(1, 5):
            mine = ids[np.random.default_rng(step).permutation(300)[:200]]
            calm.apply(mine, gradient(mine, 5, step), step)
            count = 1 + step % 3  # there are sometimes more of them, sometimes fewer
            for writer, store in enumerate(stores[:count]):
                store.own(writer, np.arange(BUCKETS) % count == writer)
                store.apply(mine, gradient(mine, 5, step), step)
        whole: dict[int, bytes] = {}
        for writer, store in enumerate(stores[:2]):
            store.own(writer, np.arange(BUCKETS) % 2 == writer)
            for part in store.parts():
                whole |= bucket_digests(part)
        assert whole_digest(whole) == calm.digest()
        is_sound(stores[2])


# ---- the whole of it


def pushes(count: int) -> Iterator[tuple[np.ndarray[tuple[int], np.dtype[np.int64]], int]]:
    made = np.random.default_rng(3)
    ids = crowd(400, buckets=1024)
    for step in range(1, count + 1):
        yield ids[np.sort(made.permutation(len(ids))[:120])], step


@pytest.mark.parametrize(("admit", "expire"), [(1, None), (2, None), (1, 3), (2, 3)])
def test_a_snapshot_is_of_one_step(admit: int, expire: int | None) -> None:
    store = table(admit=admit, expire=expire)
    later = pushes(40)
    for _ in range(6):
        ids, step = next(later)
        store.apply(ids, gradient(ids, 5, step), step)
    expected = store.digest()
    snapshot = RowSnapshot(store)
    found: dict[int, bytes] = {}
    restored = table(admit=admit, expire=expire)
    begin_at(restored, snapshot.step)
    for part in snapshot.parts():
        found |= bucket_digests(part)
        load(restored, part)
        for _ in range(2):
            ids, step = next(later)
            store.apply(ids, gradient(ids, 5, step), step)
        store.sweep(np.arange(BUCKETS))
    assert snapshot.step == 6 and whole_digest(found) == expected == restored.digest()
    assert not len(store.watchers)
    is_sound(restored)
    again = pushes(40)
    for ids, step in again:
        restored.apply(ids, gradient(ids, 5, step), step)
        if step > store.steps()[0]:
            store.apply(ids, gradient(ids, 5, step), step)
    assert restored.digest() == store.digest()


def test_rows_from_elsewhere() -> None:
    store, ids = table("adam"), crowd(50)
    store.apply(ids, gradient(ids, 5, 1), 1)
    (part,) = (part for part in store.parts() if len(part.ids))
    with pytest.raises(WrongArguments, match="already"):
        load(store, part)
    clear(store)
    assert store.rows == 0 and store.steps() == (0, 0)
    load(store, part)
    store.drop(np.array([0]))
    is_sound(store)
    assert 0 < store.rows < 50
    unknown = store.read(np.array([ZERO_HASH]))
    assert same_bits(unknown, torch.from_numpy(store.first_rows(np.array([ZERO_HASH]))))


def test_memory_is_given_back() -> None:
    """A table whose ids come and go does not grow."""
    with segment() as fd:
        store = table(fd=fd, dim=16, capacity=20_000, expire=1)
        made, used = np.random.default_rng(0), list[int]()
        for step in range(1, 13):
            ids = np.unique(made.integers(0, 1 << 60, 9_000))
            store.apply(ids, torch.ones(len(ids), 16), step)
            used.append(os.fstat(fd).st_blocks * 512)
            store.sweep(np.arange(BUCKETS))
        assert used[-1] < 1.3 * used[2]


def test_a_table_is_found_again_in_its_memory() -> None:
    with segment() as fd:
        ids = crowd(100)
        table(fd=fd).apply(ids, gradient(ids, 5, 1), 1)
        again: RowStore = table(fd=fd)
        calm = table()
        calm.apply(ids, gradient(ids, 5, 1), 1)
        assert again.repair() == 0 and again.digest() == calm.digest()
