"""Hashes, splits that never leak or move, links between ids, and exact quantiles."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.columns.hashing import (
    NULL,
    Hashes,
    fraction,
    hash_rows,
    hash_values,
    mix64,
    near,
)
from manyhands.data.preparing.balance_classes import sample
from manyhands.data.splitting.leakage import LeakageReport, shared
from manyhands.data.splitting.linked_records import KeyLinks, linked, linking
from manyhands.data.splitting.split_rule import (
    NOWHERE,
    SplitRule,
    assign,
    folds,
    instants,
    keys,
    parse_split,
    refuse_empty,
)
from manyhands.data.statistics import exact_quantiles as quantile_module
from manyhands.data.statistics.exact_quantiles import Quantile, disordered, ordered
from manyhands.values.errors import DataError

WORDS = st.sampled_from(["ann", "Ann ", "bob", "eve", "7", "", "é", "e\u0301"]) | st.none()
INTS = st.integers(-(2**63), 2**63 - 1)


def records() -> st.SearchStrategy[pa.Table]:
    row = st.tuples(
        st.integers(0, 8),
        WORDS,
        st.sampled_from([0.0, -0.0, 1.5, float("nan")]) | st.none(),
        st.lists(st.integers(0, 2), max_size=2),
        st.integers(0, 20),
    )
    return st.lists(row, min_size=1, max_size=40).map(
        lambda rows: pa.table(
            {
                "id": pa.array([r[0] for r in rows]),
                "user": pa.array([r[1] for r in rows], pa.string()),
                "x": pa.array([r[2] for r in rows], pa.float64()),
                "tags": pa.array([r[3] for r in rows], pa.list_(pa.int64())),
                "when": pa.array([r[4] for r in rows], pa.timestamp("us")),
            }
        )
    )


RULES = [
    parse_split("ratio=0.5"),
    parse_split("group=user:0.4:0.3:0.3"),
    parse_split("segment=user:ann,bob"),
    parse_split("time=when:1970-01-01T00:00:00.000009"),
    folds(3),
    folds(3, "user"),
]


def contents(table: pa.Table) -> Hashes:
    return hash_rows(table, [n for n in table.column_names if n != "id"])


def rechunked(table: pa.Table, size: int) -> pa.Table:
    pieces = [table.slice(i, size) for i in range(0, table.num_rows, size)]
    return pa.concat_tables([table.slice(0, 0), *pieces])


# ---- hashes


def test_equal_values_hash_alike_whatever_their_type() -> None:
    ints = hash_values(pa.array([3, 0, None, -7]))
    for kind in (pa.float64(), pa.float32(), pa.int32()):
        assert (hash_values(pa.array([3, 0, None, -7], kind)) == ints).all()
    zeros = hash_values(pa.array([0.0, -0.0, float("nan"), -float("nan")]))
    assert zeros[0] == zeros[1] == ints[1] and zeros[2] == zeros[3] and ints[2] == NULL
    lists = pa.array([[1, 2], [2, 1], [], None])
    fixed = pa.array([[1, 2], [2, 1]], pa.list_(pa.float32(), 2))
    assert (hash_values(lists)[:2] == hash_values(fixed)).all()
    assert len(set(hash_values(lists).tolist())) == 4
    texts = pa.array(["a", None, "b", "a"])
    assert (hash_values(texts) == hash_values(texts.dictionary_encode())).all()
    assert (hash_values(texts) == hash_values(texts.cast(pa.binary()))).all()
    assert hash_values(pa.nulls(2)).tolist() == [NULL, NULL]


@given(st.lists(st.floats() | INTS.map(float), min_size=1), st.integers(1, 5))
def test_floats_hash_by_value(values: list[float], size: int) -> None:
    column = pa.chunked_array([values[i : i + size] for i in range(0, len(values), size)])
    hashes = hash_values(column).tolist()
    for (a, x), (b, y) in itertools.combinations(zip(values, hashes, strict=True), 2):
        assert (a == b or (a != a and b != b)) == (x == y)


@given(st.lists(INTS, unique=True), st.integers(0, 2**63))
def test_keys_of_distinct_ids_are_distinct(ids: list[int], seed: int) -> None:
    mixed = mix64(seed, np.array(ids, np.int64))
    assert len(set(mixed.tolist())) == len(ids)
    assert ((fraction(mixed) >= 0) & (fraction(mixed) < 1)).all()


def test_fractions_are_even_and_seeds_differ() -> None:
    ids = np.arange(100_000)
    for seed in (0, 1):
        held, _ = np.histogram(fraction(mix64(seed, ids)), 10, (0, 1))
        assert abs(held - 10_000).max() < 500
    assert abs(np.corrcoef(fraction(mix64(0, ids)), fraction(mix64(1, ids)))[0, 1]) < 0.02


def test_hashes_never_change_between_releases() -> None:
    """Prepared data would fall into other splits."""
    table = pa.table({"b": [1, None, 2], "a": ["x", "", None], "c": [[0.5], [], None]})
    assert hash_rows(table, ["a", "b", "c"]).tolist() == PINNED_ROWS
    assert mix64(5, np.arange(2)).tolist() == PINNED_MIX
    assert near(pa.array([" Straße  9", "42"])).tolist() == PINNED_NEAR


PINNED_ROWS = [11351989124228569957, 17346410359174948343, 10618952213104419828]
PINNED_MIX = [15648576789129160154, 16343078396099975447]
PINNED_NEAR = [1654031809722235385, 13679457532755275413]


def test_a_column_order_does_not_matter_but_which_column_does() -> None:
    table = pa.table({"a": [1], "b": [2]})
    swapped = pa.table({"b": [1], "a": [2]})
    assert hash_rows(table, ["a", "b"]) == hash_rows(table, ["b", "a"])
    assert hash_rows(table, ["a", "b"]) != hash_rows(swapped, ["a", "b"])


def test_near_keys_are_one_key() -> None:
    same = near(pa.array([" Ann  Lee", "ann lee", "ANN\tLEE ", "ａｎｎ lee"]))
    assert len(set(same.tolist())) == 1
    assert len(set(near(pa.array(["é", "e\u0301", "É"])).tolist())) == 1
    assert (near(pa.array(["7", "-12", "0"])) == near(pa.array([7, -12, 0]))).all()
    assert len(set(near(pa.array(["7", "07", "7.0", "seven"])).tolist())) == 4
    assert near(pa.array(["x", None])).tolist()[1] == NULL


@given(records(), st.integers(1, 7))
def test_hashes_do_not_depend_on_chunks_or_neighbours(table: pa.Table, size: int) -> None:
    names = table.column_names
    whole = hash_rows(table, names)
    assert (hash_rows(rechunked(table, size), names) == whole).all()
    assert (hash_rows(table.slice(3), names) == whole[3:]).all()
    assert (near(rechunked(table, size).column("user")) == near(table.column("user"))).all()


# ---- rules


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("ratio=0.8", SplitRule("ratio", (0.8, 1 - 0.8))),
        ("ratio=.75:.25", SplitRule("ratio", (0.75, 0.25))),
        ("ratio=0.8:0.1:0.1", SplitRule("ratio", (0.8, 0.1, 0.1))),
        ("time=when:0.8", SplitRule("time", (0.8, 1 - 0.8), "when")),
        ("time=a:b:0.8:0.1:0.1", SplitRule("time", (0.8, 0.1, 0.1), "a:b")),
        ("time=when:2015-03-01", SplitRule("time", (), "when", at="2015-03-01")),
        ("time=when:2015-03-01T10:00:00", SplitRule("time", (), "when", at="2015-03-01T10:00:00")),
        ("time=when:893286638", SplitRule("time", (), "when", at="893286638")),
        ("group=user:0.8", SplitRule("group", (0.8, 1 - 0.8), "user")),
        ("segment=region:north, south", SplitRule("segment", (), "region", ("north", "south"))),
        ("none", SplitRule("none")),
    ],
)
def test_rules_are_read(text: str, rule: SplitRule) -> None:
    assert parse_split(text) == rule
    assert msgspec.json.decode(msgspec.json.encode(rule), type=SplitRule) == rule
    assert rule.names == ("train", "valid", "test")[:: 1 if len(rule.parts) == 3 else 2] or (
        rule.kind == "none"
    )


@pytest.mark.parametrize(
    "text",
    [
        "", "ratio", "ratio=", "ratio=1", "ratio=0", "ratio=0.8:0.3", "ratio=0.5:0.2:0.2:0.1",
        "ratio=x", "time=when", "time=when:soon", "time=when:2015-99-01", "group=user",
        "group=:0.8", "segment=region", "segment=region:,", "random=0.8", "0.8",
    ],
)  # fmt: skip
def test_a_rule_that_makes_no_sense_is_answered_with_those_that_do(text: str) -> None:
    with pytest.raises(DataError, match=r"segment=region:north,south"):
        parse_split(text)


@given(records(), st.sampled_from(RULES), st.integers(1, 7))
def test_a_side_depends_on_the_record_alone(table: pa.Table, rule: SplitRule, size: int) -> None:
    sides = assign(rule, table, contents(table))
    cut = rechunked(table, size)
    assert (assign(rule, cut, contents(cut)) == sides).all()
    order = np.random.default_rng(size).permutation(table.num_rows)
    mixed = table.take(order)
    assert (assign(rule, mixed, contents(mixed)) == sides[order]).all()
    assert ((sides >= 0) & (sides < len(rule.names))).all()
    assert shared(contents(table), sides) == 0


@given(records(), st.sampled_from([r for r in RULES if r.links]))
def test_nothing_that_belongs_together_is_separated(table: pa.Table, rule: SplitRule) -> None:
    ids, held = near(table.column("id")), contents(table)
    links = linked(ids, keys(rule, table, held))
    sides = assign(rule, table, held, links)
    assert shared(ids, sides) == 0
    assert shared(held, sides) == 0
    if rule.column:
        assert shared(near(table.column("user")), sides) == 0


def test_shares_are_about_right_and_splits_say_nothing_of_samples_or_folds() -> None:
    table = pa.table({"x": np.arange(50_000)})
    held = contents(table)
    sides = assign(parse_split("ratio=0.7:0.2:0.1"), table, held)
    assert np.abs(np.bincount(sides) / 50_000 - [0.7, 0.2, 0.1]).max() < 0.01
    taken = sample(held, 0.5)
    assert abs(sides[taken].mean() - sides[~taken].mean()) < 0.03
    fold = assign(folds(5), table, held)
    assert np.abs(np.bincount(fold) - 10_000).max() < 400
    assert abs(np.corrcoef(fold, sides)[0, 1]) < 0.02


def test_a_record_without_a_group_is_a_group_of_its_own() -> None:
    table = pa.table({"user": pa.nulls(1000, pa.string()), "x": np.arange(1000)})
    sides = assign(parse_split("group=user:0.5"), table, contents(table))
    assert 400 < sides.sum() < 600


def test_a_moment_belongs_to_the_later_side_and_no_time_to_none() -> None:
    days = [None, "2015-02-28", "2015-03-01", "2015-03-02"]
    table = pa.table({"when": pa.array(days).cast(pa.timestamp("us"))})
    for text in ("2015-03-01", "2015-03-01T01:00:00+01:00"):
        sides = assign(parse_split(f"time=when:{text}"), table, contents(table))
        assert sides.tolist() == [NOWHERE, 0, 1, 1]
    for kind in (pa.int64(), pa.float64()):
        numbers = pa.table({"when": pa.array([None, 4, 5, 6], kind)})
        sides = assign(parse_split("time=when:5"), numbers, contents(numbers))
        assert sides.tolist() == [NOWHERE, 0, 1, 1]
    with pytest.raises(DataError, match="holds numbers"):
        assign(parse_split("time=when:2015-03-01"), numbers, contents(numbers))
    words = pa.table({"when": ["a"]})
    with pytest.raises(DataError, match="--type when=time"):
        assign(parse_split("time=when:5"), words, contents(words))
    with pytest.raises(DataError, match="no such column; there are when"):
        assign(parse_split("time=then:5"), words, contents(words))


def test_segments_are_compared_as_people_would() -> None:
    table = pa.table({"region": [" North", "south", "west", None], "job": [1, 2, 3, None]})
    by_name = assign(parse_split("segment=region:north,South"), table, contents(table))
    assert by_name.tolist() == [1, 1, 0, 0]
    by_number = assign(parse_split("segment=job:2,3"), table, contents(table))
    assert by_number.tolist() == [0, 1, 1, 0]
    with pytest.raises(DataError, match="cannot be read"):
        assign(parse_split("segment=job:doctor"), table, contents(table))


def test_an_empty_split_is_refused() -> None:
    rule = parse_split("segment=region:nroth")
    with pytest.raises(DataError, match=r"'test' \(train: 9, test: 0\). Does 'region' hold nroth"):
        refuse_empty(rule, {"train": 9})
    refuse_empty(rule, {"train": 9, "test": 1})


# ---- links


PAIRS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=40)


def components(pairs: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Key → the smallest key it is linked with, by patience."""
    smallest = {key: key for _, key in pairs}
    for _ in pairs:
        for (i, a), (j, b) in itertools.product(pairs, pairs):
            if i == j:
                smallest[a] = smallest[b] = min(smallest[a], smallest[b])
    return smallest


@settings(deadline=None)
@given(PAIRS)
def test_links_are_the_chains_that_ids_make(pairs: list[tuple[int, int]]) -> None:
    ids = np.array([i for i, _ in pairs], np.uint64)
    held = np.array([k for _, k in pairs], np.uint64)
    links = linked(ids, held)
    assert links.follow(held).tolist() == [components(pairs)[k] for _, k in pairs]
    assert (links.keys != links.leaders).all()
    found = [linking(ids[ids % 3 == b], held[ids % 3 == b]) for b in range(3)]
    again = linked(*(np.concatenate(part) for part in zip(*found, strict=True)))
    assert np.array_equal(again.keys, links.keys) and np.array_equal(again.leaders, links.leaders)


def test_a_long_chain_is_one() -> None:
    size = 50_000
    names = mix64(0, np.arange(size))
    ids = np.repeat(np.arange(size - 1, dtype=np.uint64), 2)
    held = np.stack([names[:-1], names[1:]], 1).reshape(-1)
    links = linked(ids, held)
    assert set(links.follow(held).tolist()) == {names.min()}


def test_unique_or_missing_ids_link_nothing() -> None:
    held = mix64(0, np.arange(100))
    assert len(linked(held, held).keys) == 0
    assert len(linked(np.full(100, NULL), held).keys) == 0


def test_links_are_stored(tmp_path: Path) -> None:
    path = tmp_path / "links"
    links = linked(np.array([1, 1], np.uint64), np.array([5, 4], np.uint64))
    path.write_bytes(links.dump())
    again = KeyLinks.load(path)
    assert again.keys.tolist() == [5] and again.leaders.tolist() == [4]


# ---- quantiles


def find(cuts: tuple[float, ...], pieces: Sequence[np.ndarray]) -> tuple[int, ...]:
    quantile = Quantile(cuts)
    while not quantile.done:
        parts = [quantile.partial(piece) for piece in pieces]
        half = quantile.merge(parts[: len(parts) // 2])
        quantile = quantile.narrow(quantile.merge([half, *parts[len(parts) // 2 :]]))
        quantile = msgspec.json.decode(msgspec.json.encode(quantile), type=Quantile)
    return quantile.found


@given(st.lists(INTS | st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 9), st.data())
def test_quantiles_are_exact_for_any_cutting(
    values: list[int], size: int, data: st.DataObject
) -> None:
    keep = data.draw(st.integers(0, 3))
    pieces = [np.array(values[i : i + size], np.int64) for i in range(0, len(values), size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantile_module, "KEPT", keep)
        patch.setattr(quantile_module, "BINS", 16)
        found = find((0.2, 0.8), [*pieces, np.empty(0, np.int64)])
    ranks = [min(len(values) - 1, int(f * len(values) + 0.5)) for f in (0.2, 0.8)]
    assert found == tuple(sorted(values)[r] for r in ranks)


def test_many_times_need_three_rounds() -> None:
    times = np.random.default_rng(0).integers(10**15, 2 * 10**15, 300_000)
    quantile, rounds = Quantile((0.8,)), 0
    while not quantile.done:
        quantile = quantile.narrow(quantile.merge([quantile.partial(times)]))
        rounds += 1
    assert rounds == 3 and abs((times < quantile.found[0]).mean() - 0.8) < 1e-5


def test_a_time_split_by_share() -> None:
    table = pa.table({"when": pa.array([5, 3, None, 1, 2, 4], pa.timestamp("us"))})
    rule = parse_split("time=when:0.6:0.2:0.2")
    assert rule.open
    rule = msgspec.structs.replace(rule, moments=find(rule.cuts, [instants(rule, table)]))
    assert not rule.open
    assert assign(rule, table, contents(table)).tolist() == [2, 0, NOWHERE, 0, 0, 1]
    with pytest.raises(DataError, match="no record has a time"):
        find((0.5,), [np.empty(0, np.int64)])


@given(st.lists(st.floats(allow_nan=False), min_size=2))
def test_floats_keep_their_order_as_integers(values: list[float]) -> None:
    floats = np.array(sorted(values))
    assert (ordered(floats)[1:] >= ordered(floats)[:-1]).all()
    assert (disordered(ordered(floats)) == floats).all()


# ---- leakage


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 2))))
def test_what_splits_share_is_counted(rows: list[tuple[int, int]]) -> None:
    found = {h: {s for g, s in rows if g == h and s >= 0} for h, _ in rows}
    hashes = np.array([h for h, _ in rows], np.uint64)
    sides = np.array([s for _, s in rows], np.int8)
    assert shared(hashes, sides) == sum(len(s) > 1 for s in found.values())
    assert shared(np.full(len(rows), NULL), sides) == 0


def test_a_report_advises() -> None:
    clean, leaking = LeakageReport(("train", "test")), LeakageReport(("train", "test"), 3, 0, 2)
    assert clean.advice == "" and "--split group=" in leaking.advice and "--id" in leaking.advice
