"""Encoders: fitted from facts of training records, applied to anything, repeated by serving."""

import io
import itertools
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from manyhands.data.columns.hashing import mix64
from manyhands.data.columns.schema import ID, Column, Role, Schema, name_of, type_of
from manyhands.data.encoding.choose_encoding import choose
from manyhands.data.encoding.column_facts import ColumnFacts, collect, merge, statistics
from manyhands.data.encoding.decode_images import decode, shape_of
from manyhands.data.encoding.encoders import Encoders, apply, attempt, encoded_schema, sizes
from manyhands.data.encoding.fitted_encoders import NO_CLASS, Fitted, finish
from manyhands.data.encoding.pack_columns import match, pack, packed_schema
from manyhands.data.encoding.requested_encoding import parse_encoding
from manyhands.data.encoding.unseen_values import UnseenValues, unseen
from manyhands.data.encoding.unseen_values import merged as merged_unseen
from manyhands.data.preparing.balance_classes import class_weights, resample, sample
from manyhands.data.statistics import value_counts as counts_module
from manyhands.data.statistics.moments import Moments, moments
from manyhands.data.statistics.quantile_sketch import CELLS, Sketch, merged, sketch
from manyhands.values.errors import DataError

TIME = pa.timestamp("us")
FINITE = st.floats(allow_nan=False, allow_infinity=False)


def arrow_of(schema: Schema) -> pa.Schema:
    return pa.schema([pa.field(c.name, type_of(c.type)) for c in schema])


def png(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, kind)
    return buffer.getvalue()


PICTURES = [png(np.full((4, 6, 3), shade)) for shade in (0, 80, 255)]

COLUMNS: dict[str, tuple[pa.DataType, Role, st.SearchStrategy[Any]]] = {
    "number": (pa.float64(), "feature", st.floats() | st.none()),
    "small": (pa.float32(), "feature", st.floats(width=32) | st.none()),
    "whole": (pa.int64(), "feature", st.integers(-(2**63), 2**63 - 1) | st.none()),
    "flag": (pa.bool_(), "feature", st.booleans() | st.none()),
    "word": (pa.string(), "feature", st.sampled_from(["a", "b", "", "é"]) | st.none()),
    "when": (TIME, "feature", st.integers(-(2**53), 2**53) | st.none()),
    "text": (pa.string(), "text", st.text(max_size=12) | st.none()),
    "tags": (pa.list_(pa.string()), "text", st.lists(st.sampled_from("xyz"), max_size=3)),
    "vector": (pa.list_(pa.float32(), 2), "feature", st.lists(FINITE, min_size=2, max_size=2)),
    "series": (pa.list_(pa.int64()), "feature", st.lists(st.integers(0, 9)) | st.none()),
    "picture": (pa.binary(), "image", st.sampled_from(PICTURES)),
    "key": (pa.string(), "id", st.text(max_size=3) | st.none()),
    "label": (pa.string(), "label", st.sampled_from(["no", "yes"])),
}

SCHEMA: Schema = tuple(Column(name, name_of(c[0]), c[1]) for name, c in COLUMNS.items())

ENCODINGS: dict[str, list[str]] = {
    "number": [
        "standard",
        "minmax",
        "log",
        "quantile:10",
        "raw",
        "hash:16",
        "vocabulary:2",
        "drop",
    ],
    "small": ["standard", "raw:float32", "vocabulary", "quantile:3:missing=flag", "number"],
    "whole": ["standard", "log", "raw", "raw:uint8", "vocabulary:3:2", "hash:9", "classes"],
    "flag": ["raw", "standard", "vocabulary", "classes:missing=zero", "raw:bool"],
    "word": ["vocabulary", "hash:5", "words", "chars", "bytes", "raw", "classes:missing=flag"],
    "when": ["dates", "raw", "vocabulary", "hash:7", "dates:missing=flag"],
    "text": ["words", "words:3:2", "chars", "chars:5:2:missing=flag", "bytes", "bytes:3"],
    "tags": ["words", "words:1:1"],
    "vector": ["raw", "standard", "minmax", "log", "quantile:4", "raw:uint8"],
    "series": ["raw", "standard", "raw:float32", "minmax:missing=flag"],
    "picture": ["image", "image:2x3", "image:5x5x1", "drop", "bytes"],
    "key": ["raw", "hash:8", "drop"],
    "label": ["classes", "vocabulary"],
}


def tables() -> st.SearchStrategy[pa.Table]:
    @st.composite
    def made(draw: st.DrawFn) -> pa.Table:
        count = draw(st.integers(1, 8))
        columns: dict[str, pa.Array] = {ID: pa.array(range(count), pa.int64())}
        for name, (kind, _, values) in COLUMNS.items():
            drawn = draw(st.lists(values, min_size=count, max_size=count))
            if pa.types.is_fixed_size_list(kind):
                drawn = np.clip(np.array(drawn, np.float64).reshape(count, 2), -1e38, 1e38).tolist()
            columns[name] = pa.array(drawn, kind)
        return pa.table(columns)

    return made()


def choices() -> st.SearchStrategy[dict[str, str]]:
    return st.fixed_dictionaries({n: st.sampled_from(e) for n, e in ENCODINGS.items()})


def facts_of(
    table: pa.Table, schema: Schema, wishes: Mapping[str, str] = {}, piece: int = 10**9
) -> dict[str, ColumnFacts]:
    encodings = {name: parse_encoding(text) for name, text in wishes.items()}
    pieces = [table.slice(i, piece) for i in range(0, table.num_rows, piece)]
    # Pieces without training records are common: a split by time leaves many.
    return merge(collect(p, schema, encodings) for p in [table.slice(0, 0), *pieces])


def fit(
    table: pa.Table, schema: Schema, wishes: Mapping[str, str] = {}, piece: int = 10**9
) -> dict[str, Fitted]:
    facts = facts_of(table, schema, wishes, piece)
    return {
        c.name: finish(
            parse_encoding(wishes[c.name]) if c.name in wishes else choose(c, facts[c.name])[0],
            facts[c.name],
        )
        for c in schema
    }


def column(values: Any, kind: pa.DataType | None = None, role: Role = "feature") -> Any:
    """A table and a schema of one column, `x`."""
    array = pa.array(values, kind)
    return pa.table({"x": array}), (Column("x", name_of(array.type), role),)


def encoded(train: Any, wish: str, test: Any = None, kind: pa.DataType | None = None) -> Any:
    """`test` as encoders that were fitted to `train` encode it."""
    table, schema = column(train, kind)
    fitted = fit(table, schema, {"x": wish})
    found = apply(fitted, table if test is None else column(test, kind)[0]).column("x")
    return np.array(found.to_pylist())


# ---- wishes


def test_encodings_are_read_and_written() -> None:
    for wishes in ENCODINGS.values():
        for text in wishes:
            assert parse_encoding(str(parse_encoding(text))) == parse_encoding(text)
    assert str(parse_encoding("image:28x28", "zero")) == "image:28x28:missing=zero"
    assert parse_encoding("image:28x28x1").shape == (28, 28, 1)
    assert parse_encoding("vocabulary:10:3").seen == 3


@pytest.mark.parametrize(
    "text",
    [
        "", "onehot", "hash", "hash:x", "hash:2", "standard:3", "image:28", "image:2x2x2",
        "vocabulary:0", "vocabulary:9:9:9", "words:missing=mean", "standard:missing=never",
        "raw:complex", "bytes:0", "vocabulary:-3",
    ],
)  # fmt: skip
def test_an_encoding_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"missing=|standard|there is no type"):
        parse_encoding(text)


# ---- facts


@given(st.lists(FINITE | st.integers(-9, 9).map(float)), st.integers(1, 9))
def test_sums_are_exact(values: list[float], size: int) -> None:
    total = Moments()
    for i in range(0, len(values), size):
        total += moments(np.array(values[i : i + size]))
    assert total == moments(np.array(values[::-1]))
    exact = [Fraction(v) for v in values]
    if values:
        mean = sum(exact, Fraction()) / len(exact)
        assert total.mean == float(mean)
        variance = sum(((v - mean) ** 2 for v in exact), Fraction()) / len(exact)
        found = Fraction(total.deviation) ** 2
        tiny = Fraction(5e-324)  # floats are no closer than this, however small they are
        rounding = 2 * Fraction(total.deviation) * tiny + 2 * tiny**2
        assert abs(found - variance) <= variance / 2**51 + rounding


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 9)))
def test_sums_of_integers_are_exact(values: list[int]) -> None:
    found = moments(np.array(values, np.int64))
    assert int(found.total, 16) >> 1126 == sum(values)
    assert int(found.squares, 16) >> 2252 == sum(v * v for v in values)


def test_sketches_are_close_and_do_not_depend_on_cutting() -> None:
    random = np.random.default_rng(0)
    for values in (random.standard_normal(400_000), np.exp(3 * random.standard_normal(400_000))):
        whole = sketch(values)
        parts = [sketch(p) for p in np.array_split(random.permutation(values), 7)]
        assert merged(parts) == whole == merged([merged(parts[:3]), *parts[3:]])
        assert len(whole.cells) <= 8 * CELLS
        fractions = np.linspace(0, 1, 101)
        found = whole.quantiles(fractions.tolist(), values.min(), values.max())
        ranks = np.searchsorted(np.sort(values), found) / len(values)
        assert np.abs(ranks - fractions).max() < 1e-3
    few = sketch(np.array([3.0, 3.0, 5.0]))
    assert isinstance(few, Sketch)
    assert few.quantiles([0, 0.5, 1], 3.0, 5.0).tolist() == [3.0, 3.0, 5.0]


@settings(max_examples=25, deadline=None)
@given(tables(), choices(), st.integers(1, 5))
def test_what_is_fitted_does_not_depend_on_cutting(
    table: pa.Table, wishes: dict[str, str], size: int
) -> None:
    filled = [n for n in wishes if table.column(n).null_count < table.num_rows]
    filled = [n for n in filled if not np.isnan(_floats(table, n)).all()]
    schema = tuple(c for c in SCHEMA if c.name in filled)
    wishes = {n: wishes[n] for n in filled}
    assert fit(table, schema, wishes, size) == fit(table, schema, wishes)
    chunked = pa.concat_tables([table.slice(0, size), table.slice(size)])
    assert fit(chunked, schema, wishes) == fit(table, schema, wishes)


def _floats(table: pa.Table, name: str) -> np.ndarray:
    if not pa.types.is_floating(table.schema.field(name).type):
        return np.zeros(1)
    found = table.column(name).to_numpy().astype(np.float64)
    return np.where(np.isinf(found), np.nan, found)


def test_beyond_the_limit_the_rarest_values_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts_module, "LIMIT", 100)
    random = np.random.default_rng(0)
    values = np.concatenate([np.repeat(np.arange(20), 500), random.integers(1000, 10**9, 5000)])
    table, schema = column(random.permutation(values).astype(str).tolist())
    for size in (700, 1500, 10**9):
        facts = facts_of(table, schema, {"x": "vocabulary:20"}, size)["x"]
        assert facts.values is not None and facts.values.capped and len(facts.values) == 100
        assert sorted(facts.values.values[:20].to_pylist(), key=int) == [str(i) for i in range(20)]
        assert choose(schema[0], facts)[0].kind == "hash"


def test_statistics_are_plain_data() -> None:
    table = pa.table(
        {
            "n": [1.0, 3.0, None, float("nan")],
            "s": ["b", "b", "a", None],
            "t": pa.array([0, 0, 10**6, None], TIME),
            "w": ["One two", "two", "", None],
        }
    )
    schema = (*_schema(table, "nst"), Column("w", "string", "text"))
    told = {name: statistics(f) for name, f in facts_of(table, schema).items()}
    assert msgspec.json.decode(msgspec.json.encode(told)) == told
    assert told["n"] == {
        "count": 2, "missing": 2, "least": 1.0, "most": 3.0, "mean": 2.0, "deviation": 1.0,
    }  # fmt: skip
    assert told["s"]["common values"] == {"b": 2, "a": 1}
    assert told["t"]["most"] == "1970-01-01 00:00:01"
    assert told["w"]["common tokens"] == {"two": 2, "one": 1} and told["w"]["length"]["most"] == 7


def _schema(table: pa.Table, names: Iterable[str]) -> Schema:
    return tuple(Column(n, name_of(table.schema.field(n).type)) for n in names)


# ---- one kind after the other


@given(st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=50))
def test_standard_has_mean_0_and_deviation_1(values: list[float]) -> None:
    found = encoded(values, "standard")
    if np.ptp(values) < 1e-6 * max(1, np.abs(values).max()):
        return  # float32 cannot show it
    assert abs(found.mean()) < 1e-4 and abs(found.std() - 1) < 1e-4
    scaled = encoded(values, "minmax")
    assert scaled.min() == 0 and scaled.max() == 1
    logs = encoded(values, "log")
    assert abs(logs.mean()) < 1e-3


def test_a_constant_is_divided_by_one() -> None:
    for wish in ("standard", "minmax", "log"):
        assert encoded([5.0, 5.0], wish).tolist() == [0, 0]
    assert encoded([5.0, 5.0], "standard", [7.0]).tolist() == [2]


def test_quantiles_are_uniform() -> None:
    values = np.random.default_rng(0).exponential(size=20_000)
    found = encoded(values, "quantile:100")
    assert found.min() > 0 and found.max() < 1
    held, _ = np.histogram(found, 10, (0, 1))
    assert abs(held - 2000).max() < 20
    assert np.all(np.diff(found[np.argsort(values)]) >= 0)
    assert encoded([1.0, 1.0, 1.0, 2.0], "quantile", [0.0, 1.0, 9.0])[1] == pytest.approx(
        0.5, abs=0.01
    )


@pytest.mark.parametrize(
    ("how", "value", "flag"),
    [("", 0.0, None), ("mean", 0.0, None), ("zero", -2.0, None), ("flag", 0.0, 1.0)],
)
def test_missing_numbers(how: str, value: float, flag: float | None) -> None:
    table, schema = column([1.0, 3.0])
    fitted = {"x": finish(parse_encoding("standard", how), facts_of(table, schema)["x"])}
    for missing in (None, float("nan"), float("inf")):
        found = apply(fitted, column([missing, 3.0], pa.float64())[0])
        assert found.column("x").to_pylist() == [value, 1.0]
        assert ("x_missing" in found.column_names) == (flag is not None)
        if flag is not None:
            assert found.column("x_missing").to_pylist() == [flag, 0.0]


def test_missing_may_be_an_error_that_names_the_record() -> None:
    table, schema = column([1.0, 3.0])
    fitted = fit(table, schema, {"x": "standard:missing=error"})
    bad = pa.table({ID: [7, 8, 9], "x": pa.array([1.0, None, 3.0])})
    good, refused = attempt(fitted, bad)
    assert good.column(ID).to_pylist() == [7, 9] and refused == {1: "column 'x': no value"}
    with pytest.raises(DataError, match="record 2 of 3: column 'x': no value"):
        apply(fitted, bad)


def test_known_values_are_numbered_by_falling_count_then_value() -> None:
    train = ["b", "c", "c", "a", "d", None]
    assert encoded(train, "vocabulary", ["c", "a", "b", "d", "x", None]).tolist() == [
        2,
        3,
        4,
        5,
        0,
        1,
    ]
    assert encoded(train, "vocabulary:2", ["c", "a", "b"]).tolist() == [2, 3, 0]
    assert encoded(train, "vocabulary:9:2", ["c", "a"]).tolist() == [2, 0]
    assert encoded([0.0, 2.5], "vocabulary", [-0.0, 2.5, float("nan"), 1.0]).tolist() == [
        2,
        3,
        1,
        0,
    ]
    assert encoded([b"\xff", b"a"], "vocabulary", [b"a", b"\xff", b""]).tolist() == [2, 3, 0]
    assert encoded([5, 1], "vocabulary", [1, 5, 2], TIME).tolist() == [2, 3, 0]


def test_hashing_needs_no_vocabulary() -> None:
    found = encoded(["a"], "hash:10", [*(str(i) for i in range(500)), None])
    assert set(found[:-1].tolist()) == set(range(2, 10)) and found[-1] == 1


def test_dates_are_circles() -> None:
    monday = np.datetime64("2024-01-01T06:00", "us").astype(np.int64).item()
    found = encoded([monday, None, monday + 86_400_000_000], "dates", kind=TIME)
    assert found.shape == (3, 7) and (found[1] == 0).all()
    assert found[:, 0].tolist() == [-1, 0, 1]
    assert found[0, 1:3] == pytest.approx([1, 0], abs=1e-6)  # a quarter of the day
    assert found[0, 3:5] == pytest.approx([np.sin(np.pi / 14), np.cos(np.pi / 14)], abs=1e-6)
    assert found[0, 6] == pytest.approx(1, abs=1e-4)  # the year has just begun
    early = encoded([-1, 0], "dates", kind=TIME)
    assert np.isfinite(early).all()


def test_text_becomes_tokens() -> None:
    train = ["The cat, the dog", "the END", None]
    table, schema = column(train, role="text")
    fitted = fit(table, schema)
    found = apply(fitted, column(["the ﬁrst cat", "", None, "THE,the"])[0]).column("x")
    assert found.to_pylist() == [[2, 0, 4], [], [1], [2, 3, 2]]
    assert sizes(fitted) == {"x": 2 + 5}  # the , cat dog end
    table = column(["the cat", None])[0]
    for wish, tokens in {
        "bytes:2": [118, 106],
        "words:9:1": [2],
        "chars:3:4": [0, 4, 3, 2],
    }.items():
        short = fit(*column(train), {"x": wish})
        assert apply(short, table).column("x").to_pylist() == [tokens, [1]], wish
    letters = fit(*column(["aab", "ü"]), {"x": "chars"})
    assert apply(letters, column(["büa?"])[0]).column("x").to_pylist() == [[3, 4, 2, 0]]
    lists = fit(*column([["x y", "z"], ["z"]]), {"x": "words"})
    assert apply(lists, column([["z", "q"], None, []])[0]).column("x").to_pylist() == [
        [2, 0],
        [1],
        [],
    ]


def test_images_are_decoded_and_resized() -> None:
    grey, wide = png(np.arange(16).reshape(4, 4)), png(np.full((8, 2, 3), 200), "JPEG")
    table, schema = column([grey, grey], pa.binary(), "image")
    fitted = fit(table, schema)
    assert encoded_schema(schema, fitted)[0].shape == (4, 4, 1)
    found, refused = attempt(fitted, column([grey, b"junk", wide, None, grey[:40]], pa.binary())[0])
    assert found.column("x").to_pylist()[0] == list(range(16))
    assert set(found.column("x").to_pylist()[1]) == {200}
    assert (
        set(refused) == {1, 3, 4}
        and "known format" in refused[1]
        and refused[3].endswith("no value")
    )
    assert "0x" not in "".join(refused.values())
    table, schema = column([grey, wide], pa.binary(), "image")
    with pytest.raises(DataError, match="image:64x64"):
        choose(schema[0], facts_of(table, schema)["x"])
    assert fit(table, schema, {"x": "image:5x6"})["x"].shape == (5, 6, 3)  # pyright: ignore
    deep = io.BytesIO()
    Image.fromarray(np.full((2, 2), 0x8000, np.uint16)).save(deep, "PNG")
    assert shape_of(deep.getvalue()) == (2, 2, 1)
    pixels = decode(deep.getvalue(), (2, 2, 1))
    assert isinstance(pixels, np.ndarray) and (pixels == 0x80).all()


def test_labels_become_classes() -> None:
    for values, kind, classes in (
        (["no", "yes", "no"], pa.string(), ["no", "yes"]),
        ([10, -3, 10], pa.int64(), [-3, 10]),
        ([True, False, True], pa.bool_(), [False, True]),
    ):
        table, schema = column(values, kind, "label")
        fitted = fit(table, schema)
        found = apply(fitted, table).column("x").to_pylist()
        assert found == [classes.index(v) for v in values]
        assert sizes(fitted) == {"x": 2}
    table, schema = column(["a"], role="label")
    fitted = fit(table, schema)
    assert apply(fitted, column(["z"])[0]).column("x").to_pylist() == [NO_CLASS]
    assert attempt(fitted, column(["a", None])[0])[1] == {1: "column 'x': no value"}


def test_raw_keeps_what_floats_cannot() -> None:
    big = 2**62 + 1
    assert encoded([big, None], "raw", [big, 3]).tolist() == [big, 3]
    assert encoded([[1, 2], [3, 4]], "raw", kind=pa.list_(pa.int32(), 2)).tolist() == [
        [1, 2],
        [3, 4],
    ]
    assert encoded([300, -5, 7], "raw:uint8").tolist() == [255, 0, 7]
    assert encoded([1e300, -0.6], "raw:int64").tolist() == [2**63 - 1024, -1]
    assert np.isfinite(encoded([1e300, -1e300], "raw:float32")).all()
    keys, schema = column(["a", None, "b"], role="id")
    assert apply(fit(keys, schema), keys).column("x").to_pylist() == ["a", "", "b"]


# ---- all kinds together


@settings(max_examples=40, deadline=None)
@given(tables(), tables(), choices(), st.integers(1, 5))
def test_encoding_depends_on_the_row_alone_and_serving_repeats_it(
    train: pa.Table, test: pa.Table, wishes: dict[str, str], size: int
) -> None:
    try:
        fitted = fit(train, SCHEMA, wishes)
    except DataError as error:
        assert "no training record has a value" in str(error)
        return
    found, refused = attempt(fitted, test)  # unseen values never raise
    assert found.num_rows + len(refused) == test.num_rows
    assert all("no value" in what for what in refused.values())
    for name in found.column_names:
        values = found.column(name).combine_chunks()
        assert not values.null_count
        values = values.flatten() if pa.types.is_nested(values.type) else values
        assert not pa.types.is_floating(values.type) or np.isfinite(values.to_numpy()).all()

    schema = encoded_schema((Column(ID, "int64", "id"), *SCHEMA), fitted)
    assert arrow_of(schema).equals(found.schema)

    again = Encoders.load(msgspec.json.encode(fitted)).fitted
    assert again == fitted and attempt(again, test)[0].equals(found)
    assert Encoders.load(Encoders(fitted).dump()).fitted == fitted

    pieces = [attempt(fitted, test.slice(i, size))[0] for i in range(0, test.num_rows, size)]
    assert pa.concat_tables(pieces).equals(found.combine_chunks())
    turned = np.arange(test.num_rows)[::-1]
    mirrored = attempt(fitted, test.take(turned))[0]
    assert mirrored.take(np.arange(found.num_rows)[::-1]).equals(found)


def test_serving_takes_columns_as_lists() -> None:
    table = pa.table(
        {
            "age": [20, 40],
            "city": ["Ulm", "Bonn"],
            "when": pa.array([0, 10**6], TIME),
            "label": ["a", "b"],
            "note": [1, 1],
        }
    )
    features = _schema(table, ("age", "city", "when", "note"))
    schema = (*features, Column("label", "string", "label"))
    encoders = Encoders(fit(table, schema))
    found = encoders.apply(
        {"city": ["Ulm", "Rom"], "age": [30, None], "when": ["1970-01-01", None]}
    )
    assert found.column_names == ["age", "city", "when"]
    assert found.column("age").to_pylist() == [0, 0]
    assert found.column("city").to_pylist() == [3, 0]
    same = encoders.apply(table)
    assert same.column("label").to_pylist() == [0, 1]
    with pytest.raises(DataError, match="missing: city, when"):
        encoders.apply({"age": [30]})
    with pytest.raises(DataError, match="'age' cannot be read as int64"):
        encoders.apply({"age": ["old"], "city": ["Ulm"], "when": [None]})
    with pytest.raises(DataError, match="not encoders"):
        Encoders.load(b'{"x": {"kind": "magic"}}')


@pytest.mark.parametrize(
    ("values", "kind", "role", "wish"),
    [
        ([1, 2, 1], pa.int64(), "feature", "standard"),
        ([1.5, None], pa.float64(), "feature", "standard:missing=flag"),
        ([True, False], pa.bool_(), "feature", "raw:float32"),
        (["a", "b"], pa.string(), "feature", "vocabulary:1000000"),
        ([0, 1], TIME, "feature", "dates"),
        (["a b"], pa.string(), "text", "words:30000"),
        ([b"ab"], pa.binary(), "text", "bytes"),
        ([["a"], ["b"]], pa.list_(pa.string()), "feature", "words:30000"),
        ([[1.0], [2.0]], pa.list_(pa.float64()), "feature", "raw"),
        (PICTURES[:1], pa.binary(), "image", "image:4x6x3"),
        ([[1, 2]], pa.list_(pa.uint8(), 2), "image", "raw"),
        (["a", "a"], pa.string(), "feature", "drop"),
        ([1, 1], pa.int64(), "feature", "drop"),
        ([None], pa.float64(), "feature", "drop"),
        ([float("nan")], pa.float64(), "feature", "drop"),
        ([None], pa.null(), "feature", "drop"),
        ([b"a", b"b"], pa.binary(), "feature", "drop"),
        ([1, 2], pa.int64(), "ignore", "drop"),
        ([1, 2], pa.int64(), "id", "raw"),
        ([0.5, 2], pa.float64(), "weight", "raw:float32"),
        (["x"], pa.string(), "group", "raw"),
        ([0.5, 1.0], pa.float64(), "label", "number"),
        ([3, 4], pa.int64(), "label", "classes"),
        (list(range(1001)), pa.int64(), "label", "number"),
        ([str(i) for i in range(1001)], pa.string(), "label", "classes"),
    ],
)
def test_a_column_gets_what_suits_it(
    values: list[Any], kind: pa.DataType, role: Role, wish: str
) -> None:
    table, schema = column(values, kind, role)
    facts = facts_of(table, schema)["x"]
    chosen, reason = choose(schema[0], facts)
    assert str(chosen) == wish and reason
    table = table.append_column(ID, pa.array(range(len(values)), pa.int64()))
    assert attempt({"x": finish(chosen, facts)}, table)[0].num_rows == len(values)


@pytest.mark.parametrize(
    ("values", "kind", "wish"),
    [
        (["a"], pa.string(), "standard"),
        (["a"], pa.string(), "image:2x2"),
        (["a"], pa.string(), "raw:uint8"),
        ([1], pa.int64(), "dates"),
        ([1], pa.int64(), "words"),
        ([[1]], pa.list_(pa.int64()), "vocabulary"),
        ([[1]], pa.list_(pa.int64()), "hash:9"),
    ],
)
def test_an_encoding_that_does_not_fit_the_type_is_refused(
    values: list[Any], kind: pa.DataType, wish: str
) -> None:
    with pytest.raises(DataError, match=r"cannot be encoded as .*--type x="):
        fit(*column(values, kind), {"x": wish})


def test_a_mean_beyond_the_greatest_whole_number_fills_as_near_as_can_be() -> None:
    table, schema = column([2**63 - 512, None], pa.int64())
    for wish in ("standard", "raw"):
        assert apply(fit(table, schema, {"x": wish}), table).num_rows == 2


def test_a_flag_never_hides_a_column() -> None:
    table = pa.table({"x": [1.0, 2.0], "x_missing": [1.0, 2.0]})
    schema = (Column("x", "float64"), Column("x_missing", "float64"))
    with pytest.raises(DataError, match="two columns 'x_missing'"):
        encoded_schema(schema, fit(table, schema, {"x": "standard:missing=flag"}))


@pytest.mark.parametrize("clash", ["text_length", "text_offsets"])
def test_a_column_never_hides_the_lengths_of_another(clash: str) -> None:
    table = pa.table({"text": ["a b", "c"], clash: [1.0, 2.0]})
    schema = (Column("text", "string", "text"), Column(clash, "float64"))
    fitted = fit(table, schema, {})
    with pytest.raises(DataError, match=f"there is a column '{clash}'.*--drop {clash}"):
        encoded_schema(schema, fitted)
    plain = (Column("text", "string", "id"), Column(clash, "float64"))  # is given as it is
    assert len(encoded_schema(plain, fit(table, plain, {}))) == 2


def test_what_encoders_do_not_know_is_counted_however_it_is_cut() -> None:
    table = pa.table({"y": ["a", "b", "a"], "word": ["p", "q", None], "text": ["m n", "m", "n"]})
    schema = tuple(
        Column(name, "string", role)
        for name, role in (("y", "label"), ("word", "feature"), ("text", "text"))
    )
    fitted = fit(table, schema, {})
    letters = [chr(ord("a") + i % 9) for i in range(40)]
    fresh = pa.table(
        {"y": letters, "word": [None, "x", "p", "q"] * 10, "text": ["m never", None] * 20}
    )
    found = unseen(fitted, fresh, attempt(fitted, fresh)[0])
    assert found["y"] == UnseenValues(40, 30, ["c", "d", "e", "f", "g"])
    assert found["word"] == UnseenValues(30, 10, ["x"])
    assert found["text"] == UnseenValues(40, 20)
    cuts = [0, 1, 17, 40]
    parts = [fresh.slice(a, b - a) for a, b in itertools.pairwise(cuts)]
    assert merged_unseen(unseen(fitted, p, attempt(fitted, p)[0]) for p in parts) == found


# ---- packing, balance, samples


def test_columns_are_packed() -> None:
    table = pa.table(
        {"id": [1, 2], "p0": [1, 2], "y": ["a", "b"], "p1": [3.5, None], "p10": [5, 6]}
    )
    groups = {"x": match(["p*"], table.column_names)}
    packed = pack(table, groups)
    assert packed.column_names == ["id", "x", "y"]
    assert packed.column("x").to_pylist() == [[1, 3.5, 5], [2, None, 6]]
    schema = packed_schema(_schema(table, ("id", "p0", "y", "p1", "p10")), groups)
    assert arrow_of(schema).equals(packed.schema) and schema[1].shape == (3,)
    assert match(["b*", "a?"], ["a1", "b", "a2", "bc"]) == ["b", "bc", "a1", "a2"]
    with pytest.raises(DataError, match="no column matches 'q\\*'"):
        match(["q*"], ["a"])
    with pytest.raises(DataError, match="only numbers"):
        pack(table, {"x": ["p0", "y"]})
    with pytest.raises(DataError, match="already"):
        pack(table, {"y": ["p0", "p1"]})


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300))
def test_packing_is_transposing(rows: int, columns: int) -> None:
    pixels = np.arange(rows * columns).reshape(rows, columns)
    table = pa.table({f"p{i}": pixels[:, i] for i in range(columns)})
    packed = pack(table, {"x": table.column_names}).column("x").combine_chunks()
    assert (packed.flatten().to_numpy().reshape(rows, columns) == pixels).all()


def test_classes_are_balanced() -> None:
    counts = [9000, 900, 100, 0]
    weights = class_weights(counts)
    assert weights[:3] * counts[:3] == pytest.approx([10_000 / 3] * 3) and weights[3] == 0
    labels = np.repeat([0, 1, 2], counts[:3])
    hashes = mix64("records", np.arange(len(labels)))
    for how, goal in (("under", 100), ("over", 9000)):
        repeats = resample(hashes, labels, counts, how)
        taken = np.bincount(labels, weights=repeats)
        assert np.abs(taken / goal - 1).max() < 0.25
        order = np.random.default_rng(0).permutation(len(labels))
        assert (resample(hashes[order], labels[order], counts, how) == repeats[order]).all()
    assert resample(hashes[:1], np.array([NO_CLASS]), counts, "over").tolist() == [1]


def test_a_smaller_sample_is_part_of_a_larger_one() -> None:
    hashes = mix64(0, np.arange(10_000))
    small, large = sample(hashes, 0.1), sample(hashes, 0.3)
    assert not (small & ~large).any() and abs(small.mean() - 0.1) < 0.01
    assert sample(hashes, 1.0).all()
