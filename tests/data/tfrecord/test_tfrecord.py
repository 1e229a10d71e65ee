"""TFRecord files and tf.train.Examples: as TensorFlow has them, and found out when damaged."""

import importlib.util
import json
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.data.tfrecord import scan_features
from manyhands.data.tfrecord.feature_kinds import FeatureType
from manyhands.data.tfrecord.framing import check, frame, gather, index
from manyhands.data.tfrecord.parse_examples import Parsed, parse
from manyhands.data.tfrecord.write_examples import encode
from manyhands.values.errors import DataError

FIXTURES = Path(__file__).parent / "made_by_tensorflow"


def laid_out(records: Sequence[bytes]) -> tuple[bytes, Any, Any]:
    """Records end to end, with their starts and lengths."""
    lengths = np.array([len(r) for r in records], dtype=np.int64)
    return b"".join(records), np.cumsum(lengths) - lengths, lengths


def parse_all(records: Sequence[bytes], columns: dict[str, FeatureType] | None = None) -> Parsed:
    parsed = parse(*laid_out(records), columns)
    assert sorted([*parsed.rows, *(d.record for d in parsed.bad)]) == list(range(len(records)))
    assert len(parsed.rows) == parsed.table.num_rows
    return parsed


def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, every record is read field by field."""
    monkeypatch.setattr(scan_features, "_MISSES", 0)


def as_lines(parsed: Parsed) -> list[str]:
    """Rows as make.py writes them, apart from kinds and empty lists, which where others have one
    value are missing ones; `null` for the bad."""
    lines = ["null"] * (len(parsed.rows) + len(parsed.bad))
    for record, row in zip(parsed.rows.tolist(), parsed.table.to_pylist(), strict=True):
        lists = {
            k: v if isinstance(v, list) else [v] for k, v in row.items() if v not in (None, [])
        }
        shown = {k: [x.hex() if isinstance(x, bytes) else x for x in v] for k, v in lists.items()}
        lines[record] = json.dumps(shown, sort_keys=True)
    return lines


def without_kinds(lines: str) -> list[str]:
    read = [json.loads(line) for line in lines.splitlines()]
    return [json.dumps(r and {k: v for k, (_, v) in r.items() if v}, sort_keys=True) for r in read]


def open_file(path: Path) -> Parsed:
    buffer = path.read_bytes()
    starts, lengths, damage = index(buffer)
    assert damage is None
    assert check(buffer, starts, lengths).size == 0
    return parse(buffer, starts, lengths)


# Framing.


def test_the_checksum_is_computed_in_c() -> None:
    assert google_crc32c.implementation == "c"


def framed(records: Sequence[bytes]) -> bytes:
    return frame(*laid_out(records)).tobytes()


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_records_come_back_from_a_file(records: list[bytes]) -> None:
    buffer = framed(records)
    starts, lengths, damage = index(buffer)
    assert damage is None
    assert [buffer[a : a + n] for a, n in zip(starts, lengths, strict=True)] == records
    assert check(buffer, starts, lengths).size == 0


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=9), st.data())
def test_a_flipped_byte_is_found_and_named(records: list[bytes], data: st.DataObject) -> None:
    buffer = bytearray(framed(records))
    starts = index(buffer)[0]
    begins = starts - 12
    at = data.draw(st.integers(0, len(buffer) - 1))
    hurt = int(np.searchsorted(begins, at, side="right")) - 1
    buffer[at] ^= data.draw(st.integers(1, 255))
    found, sizes, damage = index(buffer)
    wrong = check(buffer, found, sizes)
    if at - begins[hurt] < 12:
        assert damage is not None
        assert (damage.record, damage.byte, damage.short) == (hurt, begins[hurt], 0)
        assert f"{len(buffer) - damage.byte:,} bytes" in damage.what
        assert found.tolist() == starts[:hurt].tolist() and wrong.size == 0
    else:
        assert damage is None and wrong.tolist() == [hurt]


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=9), st.data())
def test_a_file_cut_off_says_what_is_missing(records: list[bytes], data: st.DataObject) -> None:
    buffer = framed(records)
    starts, lengths, _ = index(buffer)
    keep = data.draw(st.integers(0, len(buffer) - 1))
    found, _, damage = index(buffer[:keep])
    whole = int((starts + lengths + 4 <= keep).sum())
    assert found.tolist() == starts[:whole].tolist()
    if keep == 0 or (whole and starts[whole - 1] + lengths[whole - 1] + 4 == keep):
        assert damage is None
    else:
        assert damage is not None and (damage.record, damage.byte) == (whole, starts[whole] - 12)
        more = index(buffer[damage.byte : keep + damage.short])
        assert len(more[0]) == 1 or keep - damage.byte < 12


def test_an_absurd_length_allocates_nothing() -> None:
    length = struct.pack("<Q", 2**60)
    crc = google_crc32c.value(length)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    buffer = framed([b"first"]) + length + struct.pack("<I", masked) + b"data"
    starts, _, damage = index(buffer)
    assert len(starts) == 1 and damage is not None
    assert (damage.record, damage.byte, damage.short) == (1, 21, 2**60)


@given(st.binary(max_size=200))
def test_any_bytes_can_be_indexed(buffer: bytes) -> None:
    starts, lengths, damage = index(buffer)
    end = int(starts[-1] + lengths[-1]) + 4 if len(starts) else 0
    assert end == (damage.byte if damage else len(buffer))


def test_stretches_are_gathered_in_any_order_and_twice() -> None:
    data = np.arange(100, dtype=np.uint8)
    for starts in ([3, 10, 50], [50, 3, 10], [3, 3, 99]):
        got = gather(data, np.array(starts), np.array([5, 0, 1])).to_pylist()
        assert got == [bytes(data[a : a + n]) for a, n in zip(starts, [5, 0, 1], strict=True)]


# What TensorFlow wrote.


@pytest.mark.parametrize("name", ["mixed", "odd"])
@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])
def test_files_of_tensorflow_are_read_as_it_reads_them(
    name: str, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if slow:
        slowly(monkeypatch)
    parsed = open_file(FIXTURES / f"{name}.tfrecord")
    assert as_lines(parsed) == without_kinds((FIXTURES / f"{name}.jsonl").read_text())


def test_we_write_the_bytes_that_tensorflow_writes() -> None:
    path = FIXTURES / "sorted.tfrecord"
    table = open_file(path).table
    assert {f.name: str(f.type) for f in table.schema} == {
        "features": "fixed_size_list<item: float>[32]",
        "id": "int64",
        "label": "int64",
        "text": "binary",
        "tokens": "list<item: int64>",
    }
    assert frame(*encode(table)).tobytes() == path.read_bytes()


# Examples there and back.


def columns_of(rows: int) -> st.SearchStrategy[pa.Array]:
    integers = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 300)
    kinds: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
        (pa.int64(), integers),
        (pa.float32(), st.floats(width=32, allow_nan=False)),
        (pa.binary(), st.binary(max_size=10) | st.binary(min_size=100, max_size=200)),
    ]

    def arrays(kind: pa.DataType, value: st.SearchStrategy[Any]) -> st.SearchStrategy[pa.Array]:
        values = st.lists(value, min_size=rows, max_size=rows)

        def made(drawn: list[Any]) -> pa.Array:
            return pa.array(drawn, kind)

        return values.map(made)

    shaped: list[st.SearchStrategy[pa.Array]] = []
    for kind, value in kinds:
        shaped.append(arrays(kind, value))
        shaped.append(arrays(kind, st.none() | value))
        shaped.append(arrays(pa.list_(kind), st.none() | st.lists(value, max_size=5)))
        three = st.lists(value, min_size=3, max_size=3)
        shaped.append(arrays(pa.list_(kind, 3), st.none() | three))
    return st.one_of(shaped)


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    rows = draw(st.integers(0, 40))
    names = draw(st.lists(st.text(max_size=5) | st.just("k" * 130), max_size=4, unique=True))
    return pa.table({name: draw(columns_of(rows)) for name in sorted(names)} or {"x": [1] * rows})


@given(tables(), st.booleans())
def test_tables_come_back(table: pa.Table, slow: bool) -> None:
    records, starts, lengths = encode(table)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if slow:
            slowly(monkeypatch)
        parsed = parse(records, starts, lengths, {f.name: f.type for f in table.schema})
        inferred = parse(records, starts, lengths)
    assert not parsed.bad and parsed.table.equals(table)
    assert not inferred.bad
    plain = Parsed(table, parsed.rows, [])
    assert as_lines(inferred) == as_lines(plain)
    order = np.arange(len(starts))[::-1]
    turned = parse(records, starts[order], lengths[order], {f.name: f.type for f in table.schema})
    assert turned.table.equals(table.take(pa.array(order)))


def test_narrow_types_are_written_as_the_kinds_there_are() -> None:
    table = pa.table(
        {
            "small": pa.array([1, None, -3], pa.int32()),
            "byte": pa.array([[1, 2], [], None], pa.list_(pa.uint8())),
            "flag": pa.array([True, False, None]),
            "wide": pa.array([1.5, 1e300, None], pa.float64()),
            "text": pa.array(["ä", "", None]),
            "code": pa.array(["a", "b", "a"]).dictionary_encode(),
            "four": pa.array([b"abcd", b"1234", None], pa.binary(4)),
            "when": pa.array([0, 10**15, None], pa.timestamp("us")),
            "nothing": pa.nulls(3),
        }
    )
    again = parse(*encode(table.slice(0, 2)))
    assert again.table.to_pylist() == [
        {"byte": [1, 2], "code": b"a", "flag": 1, "small": 1, "text": "ä".encode(), "wide": 1.5}
        | {"four": b"abcd", "when": 0},
        {"byte": None, "code": b"b", "flag": 0, "small": None, "text": b"", "wide": np.inf}
        | {"four": b"1234", "when": 10**15},
    ]
    kinds = {f.name: f.type for f in table.drop(["wide", "code"]).schema}
    assert parse(*encode(table), kinds).table.equals(table.select(list(kinds)))


def test_bits_of_floats_stay() -> None:
    bits = np.array([0x7FC00001, 0xFFC00000, 0x80000000, 1], dtype=np.uint32)
    back = parse(*encode(pa.table({"x": bits.view(np.float32)}))).table["x"].to_numpy()
    assert back.view(np.uint32).tolist() == bits.tolist()


def test_what_an_example_cannot_hold_is_refused() -> None:
    for array in (pa.array([[1, None]]), pa.array([{"a": 1}]), pa.array([2**63], pa.uint64())):
        with pytest.raises(DataError, match="column 'x'"):
            encode(pa.table({"x": array}))
    with pytest.raises(DataError, match="same name"):
        encode(pa.Table.from_arrays([pa.array([1])] * 2, ["x", "x"]))


# The same Examples in other encodings.


def varint(value: int, spare: int = 0) -> bytes:
    groups = [value >> 7 * k & 127 for k in range(max(1, -(-value.bit_length() // 7)) + spare)]
    return bytes([g | 128 for g in groups[:-1]] + groups[-1:])


@st.composite
def messages(draw: st.DrawFn, kinds: dict[str, int]) -> tuple[bytes, dict[str, list[Any]]]:
    """An Example in one of its many encodings, and what it says."""

    def field(number: int, data: bytes) -> bytes:
        return varint(number << 3 | 2) + varint(len(data), draw(spare)) + data

    def noise() -> bytes:
        return draw(st.sampled_from([b""] * 6 + [b"\x50\x01", b"\x5a\x02ab", b"\x63\x08\x01\x64"]))

    def single(kind: int, value: Any) -> bytes:
        if kind == 1:
            return value
        return struct.pack("<f", value) if kind == 2 else varint(value % 2**64)

    def feature(kind: int, values: list[Any]) -> bytes:
        raw = [single(kind, v) for v in values]
        packed = kind > 1 and draw(st.integers(0, 3)) > 0
        if packed:
            inner = field(1, b"".join(raw)) if raw else b""
        else:
            tag = {1: b"\x0a", 2: b"\x0d", 3: b"\x08"}[kind]
            inner = b"".join(field(1, r) if kind == 1 else tag + r for r in raw)
        return field(kind, noise() + inner + noise())

    spare = st.sampled_from([0, 0, 0, 0, 1])
    value = {1: st.binary(max_size=4), 2: st.floats(width=32, allow_nan=False)}
    value[3] = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 200)
    names = draw(st.lists(st.sampled_from(sorted(kinds)), max_size=4))
    said: dict[str, list[Any]] = {}
    entries = b""
    for name in names:
        said[name] = draw(st.lists(value[kinds[name]], max_size=3))
        body = [field(1, name.encode()), field(2, feature(kinds[name], said[name]))]
        entries += noise() + field(1, b"".join(draw(st.permutations(body))))
    return noise() + field(1, entries) + noise(), said


@given(st.lists(messages({"a": 3, "b": 2, "c": 1, "name": 3}), max_size=30), st.booleans())
def test_every_encoding_of_an_example_is_read(
    drawn: list[tuple[bytes, dict[str, list[Any]]]], slow: bool
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if slow:
            slowly(monkeypatch)
        parsed = parse_all([raw for raw, _ in drawn])
    assert not parsed.bad
    said = [
        {k: [v.hex() if isinstance(v, bytes) else v for v in vs] for k, vs in d.items() if vs}
        for _, d in drawn
    ]
    assert as_lines(parsed) == [json.dumps(d, sort_keys=True) for d in said]


def test_regular_records_are_not_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order their features are, with some missing, lengths of one to three bytes."""
    draw, rows = np.random.default_rng(0), 300
    names = ["id", "x", "tokens", "text", "words", "none"]
    values: list[list[Any]] = [
        list(range(0, rows * 100, 100)),
        draw.normal(size=(rows, 40)).astype(np.float32).tolist(),
        [draw.integers(-5, 10**6, n).tolist() for n in draw.integers(0, 99, rows)],
        [draw.bytes(int(n)) for n in 10 ** draw.uniform(0, 4.3, rows)],
        [[b"w" * k for k in draw.integers(0, 9, n)] for n in draw.integers(0, 5, rows)],
        [1 if i % 3 else None for i in range(rows)],
    ]
    table = pa.table(dict(zip(names, values, strict=True)))
    alone = [encode(table.select([name])) for name in names]
    records: list[bytes] = []
    for i in range(rows):
        entries = [raw[a[i] : a[i] + n[i]].tobytes() for raw, a, n in alone]
        entries = [entry[1 + len(varint(len(entry) - 2)) :] for entry in entries]
        body = b"".join(entries[k] for k in draw.permutation(len(names)))
        records.append(b"\x0a" + varint(len(body)) + body)
    calls: list[bytes] = []
    read = scan_features.read_example

    def counted(raw: bytes) -> Any:
        calls.append(raw)
        return read(raw)

    monkeypatch.setattr(scan_features, "read_example", counted)
    parsed = parse_all(records)
    assert len(calls) < 60
    assert as_lines(parsed) == as_lines(Parsed(table, parsed.rows, []))


# Records that do not fit.


def ints(name: str, *values: int) -> bytes:
    return encode(pa.table({name: pa.array([list(values)], pa.list_(pa.int64()))}))[0].tobytes()


def test_a_record_that_does_not_fit_its_column_is_named() -> None:
    texts = encode(pa.table({"a": ["ok", "no"]}))
    split = int(texts[1][1])
    text, other = (
        texts[0][:split].tobytes(),
        b"\x0a\x0c\x0a\x0a\x0a\x01a\x12\x05\x0a\x03\x0a\x01\xff",
    )
    records = [ints("a", 1), ints("a", 1, 2), text, b"", b"\x0a\x05", other, ints("a", 300)]

    def whats(kind: FeatureType) -> dict[int, str]:
        bad = parse_all(records, {"a": kind}).bad
        assert [d.byte for d in bad] == [laid_out(records)[1][d.record] for d in bad]
        return {d.record: d.what for d in bad}

    one = whats(pa.int64())
    assert sorted(one) == [1, 2, 4, 5]
    assert one[1] == "feature 'a' has 2 values; its column is int64"
    assert one[2] == "feature 'a' holds bytes; integers are expected"
    assert "not an Example" in one[4]
    assert sorted(whats(pa.list_(pa.int64()))) == [2, 4, 5]
    assert sorted(whats(pa.list_(pa.int64(), 2))) == [0, 2, 4, 5, 6]
    assert sorted(whats(pa.uint8())) == [1, 2, 4, 5, 6]
    assert whats(pa.uint8())[6] == "feature 'a' does not fit its column, uint8"
    assert sorted(whats(pa.string())) == [0, 1, 4, 5, 6]
    assert sorted(whats(pa.binary())) == [0, 1, 4, 6]


def test_no_value_where_others_have_one_is_a_missing_one() -> None:
    records = [ints("a", 4), ints("a"), b"", ints("a", 5)]
    for columns in (None, {"a": pa.int64()}):
        parsed = parse_all(records, columns)
        assert not parsed.bad and parsed.table["a"].type == pa.int64()
        assert parsed.table["a"].to_pylist() == [4, None, None, 5]
    assert parse_all([ints("a"), ints("a")]).table["a"].null_count == 2
    ragged = parse_all([*records, ints("a", 1, 2)]).table["a"]
    assert ragged.to_pylist() == [[4], None, None, [5], [1, 2]]
    asked = parse_all([*records, ints("a", 1, 2)], {"a": pa.list_(pa.int64())}).table["a"]
    assert asked.to_pylist() == [[4], [], None, [5], [1, 2]]


# Feature lists.


def delimited(tag: int, data: bytes) -> bytes:
    return bytes([tag]) + varint(len(data)) + data


def sequence(context: bytes, **lists: Sequence[bytes]) -> bytes:
    """A SequenceExample: an Example, and lists of features by name."""
    entries = b"".join(
        delimited(0x0A, delimited(0x0A, name.encode()) + delimited(0x12, b"".join(steps)))
        for name, steps in lists.items()
    )
    return context + delimited(0x12, entries)


def steps(kind: int, *values: bytes) -> list[bytes]:
    """Features of one value each."""
    return [delimited(0x0A, delimited(kind << 3 | 2, delimited(0x0A, v))) for v in values]


def test_feature_lists_are_lists() -> None:
    floats = [struct.pack("<f", x) for x in (0.5, -1.0)]
    records = [
        sequence(ints("id", 1), words=steps(1, b"a", b"bc", b""), x=steps(2, *floats)),
        sequence(ints("id", 2), words=steps(1, b"d"), x=steps(2, floats[0])),
        sequence(ints("id", 3), words=[], tokens=steps(3, varint(7), varint(300))),
        ints("id", 4),
    ]
    parsed = parse_all(records)
    assert not parsed.bad
    assert parsed.table.to_pydict() == {
        "id": [1, 2, 3, 4],
        "tokens": [None, None, [7, 300], None],
        "words": [[b"a", b"bc", b""], [b"d"], None, None],
        "x": [[0.5, -1.0], [0.5], None, None],
    }
    alone = parse_all(records[1:2]).table
    assert alone["x"].to_pylist() == [[0.5]]  # of one step, and a list for all that


def test_feature_lists_that_have_no_column_are_named() -> None:
    two = delimited(0x0A, delimited(0x1A, delimited(0x0A, b"\x01\x02")))
    none = delimited(0x0A, delimited(0x1A, b""))
    records = [
        sequence(ints("id", 1), a=steps(3, b"\x05")),
        sequence(ints("id", 2), a=[*steps(3, b"\x05"), two]),
        sequence(ints("id", 3), a=[none]),
        sequence(ints("id", 4), a=[*steps(3, b"\x05"), *steps(1, b"x")]),
        sequence(ints("a", 5), a=steps(3, b"\x05")),
    ]
    parsed = parse_all(records)
    assert parsed.table["a"].to_pylist() == [[5]]
    whats = [damage.what for damage in parsed.bad]
    assert "feature list 'a' has 2 values at step 1" in whats[0]
    assert "feature list 'a' has 0 values at step 0" in whats[1]
    assert "steps of different kinds" in whats[2]
    assert "'a' is a feature of its context and a feature list" in whats[3]


def test_columns_are_those_asked_for() -> None:
    records = encode(pa.table({"a": [1, 2], "b": [1.0, 2.0], "c": ["x", "y"]}))
    named = {"b": pa.float64(), "d": pa.list_(pa.int64(), 2)}
    assert parse(*records, named).table.to_pydict() == {"b": [1.0, 2.0], "d": [None, None]}
    every = parse(*records, named, others=True).table
    assert every.column_names == ["b", "d", "a", "c"]
    assert parse(*records, {}).table.num_rows == 2
    assert parse_all([]).table.num_rows == 0
    assert parse_all([b"", b"\x0a\x00"]).table.shape == (2, 0)


@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_damage_that_no_checksum_saw_never_raises(random: Any, records: int) -> None:
    """Whatever bytes there are, fast and slow reading agree about them."""
    path = FIXTURES / "mixed.tfrecord"
    buffer = bytearray(path.read_bytes())
    starts, lengths, _ = index(buffer)
    starts, lengths = starts[:records], lengths[:records].copy()
    for _ in range(random.choice([1, 5, 50])):
        record = random.randrange(len(starts))
        if random.random() < 0.2:
            lengths[record] = random.randrange(int(lengths[record]) + 1)
        elif lengths[record]:
            at = int(starts[record]) + random.randrange(min(int(lengths[record]), 10**9))
            buffer[at] = random.choice([buffer[at] ^ 1 << random.randrange(8), 0xFF, 0, 0x0A])
    fast = parse(buffer, starts, lengths)
    with pytest.MonkeyPatch.context() as monkeypatch:
        slowly(monkeypatch)
        slow = parse(buffer, starts, lengths)
    assert len(fast.rows) + len(fast.bad) == len(starts)
    assert [d.record for d in fast.bad] == [d.record for d in slow.bad]
    assert fast.table.schema == slow.table.schema
    assert as_lines(fast) == as_lines(slow)


def test_records_that_share_no_features_need_no_memory_for_what_they_lack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scan_features, "_CELLS", 1000)
    records = [ints(f"name {i}", i) for i in range(200)]
    with pytest.raises(DataError, match="Name the columns"):
        parse_all(records)
    assert parse_all(records, {"name 7": pa.int64()}).table["name 7"].null_count == 199


# With TensorFlow itself.


@pytest.fixture(scope="module")
def tensorflow() -> str:
    """An interpreter that has TensorFlow."""
    named = os.environ.get("TENSORFLOW_PYTHON")
    if named is None and importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed; TENSORFLOW_PYTHON may name a Python that has it")
    return named or sys.executable


def run_make(tensorflow: str, *args: str) -> str:
    command = [tensorflow, str(FIXTURES / "make.py"), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestWithTensorFlow:
    def test_it_reads_what_we_write(self, tensorflow: str, tmp_path: Path) -> None:
        draw = np.random.default_rng(3)
        lists = [draw.integers(-(2**62), 2**62, draw.integers(0, 300)).tolist() for _ in range(200)]
        table = pa.table(
            {
                "numbers": lists,
                "few": [[1.5, -0.0] if i % 3 else None for i in range(200)],
                "raw": [draw.bytes(int(n)) for n in draw.integers(0, 20_000, 200)],
                "words": [[b"w" * (i % 7)] * (i % 4) for i in range(200)],
                "id": range(200),
            }
        )
        path = tmp_path / "ours.tfrecord"
        path.write_bytes(frame(*encode(table)).tobytes())
        theirs = without_kinds(run_make(tensorflow, "--read", str(path)))
        assert theirs == as_lines(Parsed(table, np.arange(200), []))

    def test_we_read_what_it_writes(self, tensorflow: str, tmp_path: Path) -> None:
        run_make(tensorflow, str(tmp_path))
        for name in ("mixed", "odd"):
            lines = without_kinds((tmp_path / f"{name}.jsonl").read_text())
            assert as_lines(open_file(tmp_path / f"{name}.tfrecord")) == lines
        path = tmp_path / "sorted.tfrecord"
        assert frame(*encode(open_file(path).table)).tobytes() == path.read_bytes()
