"""Parquet, Arrow, TFRecords, images, IDX and Python's records: cut anywhere, the same rows come
out."""

import datetime as dt
import decimal
import gzip
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from manyhands.data.columns.schema import name_of, type_of
from manyhands.data.sources.cutting.source import Bad, Source, TablePiece
from manyhands.data.sources.formats.idx_files import Idx
from manyhands.data.sources.formats.image_folder import Images
from manyhands.data.sources.formats.parquet_and_arrow import Columnar
from manyhands.data.sources.formats.python_iterable import spool
from manyhands.data.sources.formats.tfrecord_files import TFRecords
from manyhands.data.tfrecord.framing import frame
from manyhands.data.tfrecord.write_examples import encode
from manyhands.values.errors import DataError, DataTaskFailed

BIG = 1 << 40
UTC = dt.UTC


def pieces(source: Source, target: int, types: Mapping[str, str] = {}) -> Iterator[TablePiece]:
    kinds = {name: type_of(kind) for name, kind in types.items()}
    for chunk in source.chunks(target):
        for piece in source.read(chunk, kinds, target):
            assert len(piece.numbers) == piece.table.num_rows
            yield piece


def everything(
    source: Source, target: int = BIG, types: Mapping[str, str] = {}
) -> tuple[list[tuple[int, dict[str, object]]], list[Bad]]:
    """All rows with their numbers, and all bad records."""
    rows: list[tuple[int, dict[str, object]]] = []
    bad: list[Bad] = []
    for piece in pieces(source, target, types):
        rows += zip(piece.numbers.tolist(), piece.table.to_pylist(), strict=True)
        bad += piece.bad
    return rows, bad


def types_of(source: Source) -> dict[str, str]:
    table = next(pieces(source, BIG)).table
    return {field.name: name_of(field.type) for field in table.schema}


def mixed(rows: int) -> pa.Table:
    return pa.table(
        {
            "n": range(rows),
            "text": [f"{'row' * (i % 7)} {i}" for i in range(rows)],
            "deep": [{"a": i, "b": {"c": str(i)}} if i % 5 else None for i in range(rows)],
            "class": pa.array([f"c{i % 3}" for i in range(rows)]).dictionary_encode(),
            "list": [[i] * (i % 3) for i in range(rows)],
        }
    )


def write(table: pa.Table, path: Path, kind: str, rows: int, **options: object) -> None:
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=rows, **options)  # type: ignore[arg-type]
        return
    make = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
    with make(str(path), table.schema, **options) as writer:  # type: ignore[arg-type]
        for batch in table.to_batches(max_chunksize=rows):
            writer.write_batch(batch)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
def test_how_it_is_cut_changes_nothing(tmp_path: Path, kind: str) -> None:
    table = mixed(400)
    for name, rows in (("a", 7), ("b", 400), ("c", 133)):
        write(table, tmp_path / name, kind, rows)
    source = Columnar(tuple(str(tmp_path / name) for name in "abc"), kind)  # type: ignore[arg-type]
    whole, bad = everything(source)
    assert not bad
    assert [number for number, _ in whole] == [*range(400)] * 3
    assert whole[6][1] == {
        **{"n": 6, "text": "rowrowrowrowrowrow 6", "deep.a": 6, "deep.b.c": "6"},
        **{"class": "c0", "list": []},
    }
    assert whole[5][1]["deep.b.c"] is None
    for target in (500, 5_000, 60_000):
        assert everything(source, target) == (whole, [])
        sizes = [piece.table.num_rows for piece in pieces(source, target)]
        assert max(sizes) <= 1.5 * target / 20 or target > 50_000
    if kind != "stream":
        assert len(source.chunks(5_000)) > 3 == len(source.chunks(BIG))


def test_types_become_ours(tmp_path: Path) -> None:
    moment = dt.datetime(2020, 1, 2, 3, 4, 5, 678901)
    table = pa.table(
        {
            "decimal": pa.array([decimal.Decimal("1.25")]),
            "half": pa.array([1.5], pa.float16()),
            "date": pa.array([dt.date(2020, 1, 2)]),
            "nanos": pa.array([moment], pa.timestamp("ns")),
            "zone": pa.array([moment.replace(tzinfo=UTC)], pa.timestamp("us", "+02:00")),
            "u16": pa.array([7], pa.uint16()),
            "f32": pa.array([0.5], pa.float32()),
            "fixed": pa.array([[1, 2]], pa.list_(pa.int8(), 2)),
            "bytes": pa.array([b"ab"], pa.binary(2)),
            "large": pa.array(["x"], pa.large_string()),
            "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
            "structs": pa.array([[{"a": 1}]]),
            "nothing": pa.nulls(1),
            "clock": pa.array([dt.time(1, 2, 3)]),
            "view": pa.array([[1]], pa.list_view(pa.int16())),
        }
    )
    write(table, tmp_path / "a", "arrow", 1)
    source = Columnar((str(tmp_path / "a"),), "arrow")
    assert types_of(source) == {
        **{"decimal": "float64", "half": "float64", "date": "time", "nanos": "time"},
        **{"zone": "time", "u16": "int64", "f32": "float32", "fixed": "int64[2]"},
        **{"bytes": "binary", "large": "string", "map": "string", "structs": "string"},
        **{"nothing": "null", "clock": "string", "view": "list<int64>"},
    }
    ((_, row),), _ = everything(source)
    assert row["zone"] == row["nanos"] == moment
    assert row["structs"] == '[{"a": 1}]' and row["map"] == '[["k", 1]]'
    assert row["decimal"] == 1.25 and row["fixed"] == [1, 2] and row["view"] == [1]


def test_values_that_do_not_fit_are_named(tmp_path: Path) -> None:
    table = pa.table(
        {
            "word": ["1", " 2 ", "three", "", None],
            "size": [1, 2, 3, 300, -1],
            "when": ["2020-01-02", "1577934245", "2020-01-02T03:04:05Z", "never", None],
            "big": pa.array([1, 2, 3, 4, 2**63], pa.uint64()),
            "list": [[1], [1, 2], [], None, [5]],
        }
    )
    write(table, tmp_path / "a", "parquet", 2)
    source = Columnar((str(tmp_path / "a"),), "parquet")
    rows, bad = everything(source, 50, {"word": "int64", "size": "uint8"})
    assert [n for n, _ in rows] == [0, 1]
    assert [(r["word"], r["size"]) for _, r in rows] == [(1, 1), (2, 2)]
    assert [(b.record, b.what, b.text) for b in bad] == [
        (2, "column 'word' is no int64", "three"),
        (3, "column 'size' is no uint8", "300"),
        (4, "column 'size' is no uint8", "-1"),
    ]
    assert str(bad[0]) == f"{tmp_path}/a, record 3: column 'word' is no int64: three"
    rows, bad = everything(source, BIG, {"when": "time", "list": "int64"})
    assert rows[0][1]["when"] == dt.datetime(2020, 1, 2)
    assert [(b.record, b.what) for b in bad] == [
        (1, "column 'list' is no int64"),
        (2, "column 'list' is no int64"),
        (3, "column 'when' is no timestamp[us]"),
    ]
    assert rows[-1][1]["big"] == str(2**63)
    rows, bad = everything(source, BIG, {"size": "list<int64>", "list": "string", "big": "float64"})
    assert not bad and rows[3][1]["size"] == [300] and rows[1][1]["list"] == "[1, 2]"
    with pytest.raises(DataError, match="cannot be made"):
        everything(source, BIG, {"list": "list<list<int64>>"})


def test_text_that_is_none_is_a_bad_record(tmp_path: Path) -> None:
    good = pa.array([b"a", b"\xff\xfe", "ü".encode()])
    table = pa.table({"t": pa.Array.from_buffers(pa.string(), 3, good.buffers())})
    for kind in ("parquet", "arrow"):
        write(table, tmp_path / kind, kind, 3)
        rows, bad = everything(Columnar((str(tmp_path / kind),), kind))  # type: ignore[arg-type]
        assert rows == [(0, {"t": "a"}), (2, {"t": "ü"})]
        assert [(b.record, b.text) for b in bad] == [(1, r"b'\\xff\\xfe'")]


def test_columns_can_be_chosen(tmp_path: Path) -> None:
    for kind in ("parquet", "arrow", "stream"):
        write(mixed(10), tmp_path / kind, kind, 5)
        for columns, names in (
            (("n", "deep.b.c"), ["n", "deep.b.c"]),
            (("deep",), ["deep.a", "deep.b.c"]),
        ):
            source = Columnar((str(tmp_path / kind),), kind, columns)  # type: ignore[arg-type]
            assert list(types_of(source)) == names
        with pytest.raises(DataError, match="has no column 'm'"):
            everything(Columnar((str(tmp_path / kind),), kind, ("n", "m")))  # type: ignore[arg-type]


def test_folders_that_name_columns(tmp_path: Path) -> None:
    urls: list[str] = []
    for year, city in ((2023, "K%C3%B6ln"), (2024, "__HIVE_DEFAULT_PARTITION__")):
        folder = tmp_path / f"year={year}" / f"city={city}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"n": [1]}), folder / "a.parquet")
        urls.append(str(folder / "a.parquet"))
    rows, _ = everything(Columnar(tuple(urls), "parquet"))
    assert [row for _, row in rows] == [
        {"n": 1, "year": 2023, "city": "Köln"},
        {"n": 1, "year": 2024, "city": None},
    ]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
def test_damage_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    options = {"write_page_checksum": True, "compression": "none"} if kind == "parquet" else {}
    table = pa.table({"n": np.arange(4000), "t": ["word"] * 4000})
    write(table, path, kind, 1000, **options)
    source = Columnar((str(path),), kind)  # type: ignore[arg-type]
    whole = path.read_bytes()
    for size in (0, 5, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:size])
        if kind == "stream" and size == len(whole) - 5:  # only the end mark is cut
            continue
        with pytest.raises(DataError) as error:
            everything(source)
        assert str(path) in str(error.value), size
    if kind == "parquet":
        at = whole.index(np.arange(2000, 2010).tobytes())
        path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
        with pytest.raises(DataError, match="row group 2"):
            everything(source)


@settings(max_examples=60)
@given(data=st.data(), kind=st.sampled_from(["parquet", "arrow", "stream"]))
def test_random_damage_never_crashes(
    data: st.DataObject, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("damage") / "a"
    options = {"write_page_checksum": True} if kind == "parquet" else {}
    write(mixed(60), path, kind, 20, **options)
    raw = bytearray(path.read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=4)):
        raw[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    source = Columnar((str(path),), kind)  # type: ignore[arg-type]
    try:
        rows, bad = everything(source, 2_000)
    except DataError as error:
        assert str(path) in str(error)
    else:
        numbers = [n for n, _ in rows] + [b.record for b in bad]
        assert sorted(numbers) == list(range(len(numbers)))


# ---- TFRecords


def examples(rows: int, blob: int = 40) -> pa.Table:
    rng = np.random.default_rng(rows)
    blobs = [rng.bytes(int(size)) for size in rng.integers(0, blob, rows)]
    return pa.table(
        {
            "blob": pa.array(blobs, pa.binary()),
            "n": range(rows),
            "some": [[i] * (i % 4) for i in range(rows)],
            "text": [f"row {i}" for i in range(rows)],
        }
    )


def written(path: Path, table: pa.Table) -> bytes:
    data = frame(*encode(table)).tobytes()
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)
    return data


EXAMPLES = frame(*encode(examples(12))).tobytes()


@pytest.mark.parametrize("name", ["a", "a.gz"])
@pytest.mark.parametrize("blob", [40, 60_000])
def test_tfrecords_however_cut(tmp_path: Path, name: str, blob: int) -> None:
    table = examples(100, blob)
    written(tmp_path / name, table)
    source = TFRecords((str(tmp_path / name),))
    assert types_of(source) == {
        **{"blob": "binary", "n": "int64", "some": "list<int64>", "text": "string"}
    }
    for target in (100, 30_000, BIG):
        rows, bad = everything(source, target)
        assert not bad
        assert [n for n, _ in rows] == [row["n"] for _, row in rows] == list(range(100))
    assert [row["blob"] for _, row in rows] == table["blob"].to_pylist()
    assert (len(source.chunks(30_000)) > 1) == (name == "a" and blob > 40)


def test_types_of_tfrecords_can_be_given(tmp_path: Path) -> None:
    written(tmp_path / "a", examples(9))
    source = TFRecords((str(tmp_path / "a"),))
    types = {"n": "float32", "text": "binary", "some": "int64[2]", "blob": "string"}
    rows, bad = everything(source, BIG, {k: types[k] for k in ("n", "text")})
    assert not bad and rows[3][1]["n"] == 3.0 and rows[3][1]["text"] == b"row 3"
    rows, bad = everything(source, BIG, {"some": "int64[2]"})
    assert [n for n, _ in rows] == [0, 2, 4, 6, 8] and len(bad) == 4
    assert rows[0][1]["some"] is None  # it has no value


@settings(max_examples=25)
@given(data=st.data())
def test_damaged_tfrecords_lose_what_is_damaged_only(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damage")
    raw = bytearray(EXAMPLES)
    flips = data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=3, unique=True))
    for at in flips:
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(1, len(raw))) :]
    (folder / "a").write_bytes(raw)
    (folder / "a.gz").write_bytes(gzip.compress(bytes(raw), 1))
    source, packed = TFRecords((str(folder / "a"),)), TFRecords((str(folder / "a.gz"),))
    types = {"blob": "binary", "n": "int64", "some": "list<int64>", "text": "string"}
    rows, bad = everything(source, BIG, types)
    for target in (150, 500):
        assert everything(source, target, types) == (rows, bad)
    again, named = everything(packed, 500, types)
    assert again == rows
    assert [(b.record, b.byte, b.what) for b in named] == [(b.record, b.byte, b.what) for b in bad]
    assert len(bad) <= len(flips) + 1
    numbers = sorted([n for n, _ in rows] + [b.record for b in bad])
    assert numbers == list(range(len(numbers)))


def test_damage_in_tfrecords_is_placed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    raw = written(path, examples(5))
    source = TFRecords((str(path),))
    size = len(frame(*encode(examples(5).slice(0, 1))))
    for at, what in ((size + 3, "checksum of its length"), (size + 14, "checksum of its data")):
        path.write_bytes(raw[:at] + b"\xee" + raw[at + 1 :])
        rows, (bad,) = everything(source)
        assert [row["n"] for _, row in rows] == [0, 2, 3, 4]
        assert (bad.record, bad.byte) == (1, size) and what in bad.what
    path.write_bytes(raw[:-1])
    rows, (bad,) = everything(source)
    assert len(rows) == 4 and bad.record == 4 and "cut off" in bad.what
    assert "1 are missing" in bad.what


# ---- images


def image(kind: str) -> bytes:
    sink = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (20, 30), dtype=np.uint8)
    Image.fromarray(pixels).save(sink, kind)
    return sink.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"])
def test_broken_images_are_bad_records(tmp_path: Path, kind: str) -> None:
    data = image(kind)
    contents = [data, data[: len(data) // 2], b"", b"no image" * 9, data]
    for i, content in enumerate(contents):
        (tmp_path / f"{i}.img").write_bytes(content)
    urls = tuple(str(tmp_path / f"{i}.img") for i in range(5))
    source = Images.of(str(tmp_path), urls)
    for target in (10, BIG):
        rows, bad = everything(source, target)
        assert [(n, row["file"]) for n, row in rows] == [(0, "0.img"), (4, "4.img")]
        assert rows[0][1] == {"image": data, "file": "0.img"}
        assert [b.record for b in bad] == [1, 2, 3]
        assert bad[1].what == "2.img is empty" and bad[1].byte == -1
        assert bad[2].what == "3.img is no image that can be read"
    assert len(source.chunks(10)) == 5


# ---- IDX


def idx(path: Path, values: np.ndarray, kind: int = 8) -> Path:
    """Written as MNIST is, compressed if the name says so."""
    dims = b"".join(dim.to_bytes(4, "big") for dim in values.shape)
    data = bytes([0, 0, kind, values.ndim]) + dims + values.tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def digits(folder: Path, name: str = "train", count: int = 50, end: str = "") -> tuple[Path, Path]:
    draw = np.random.default_rng(count)
    pixels = draw.integers(0, 256, (count, 5, 4), dtype=np.uint8)
    labels = draw.integers(0, 10, count, dtype=np.uint8)
    return (
        idx(folder / f"{name}-images-idx3-ubyte{end}", pixels),
        idx(folder / f"{name}-labels-idx1-ubyte{end}", labels),
    )


def test_idx_files_are_read_in_pairs(tmp_path: Path) -> None:
    found: list[object] = []
    for end in ("", ".gz"):
        train, test = digits(tmp_path, end=end), digits(tmp_path, "t10k", 7, end)
        source = Idx.sniff([str(test[1]), str(train[0]), str(train[1]), str(test[0])])
        assert source.together == ((1, 2), (3, 0)) and len(source.files) == 4
        assert [n for n, _ in everything(source)[0]] == [*range(50), *range(7)]
        found += [everything(source, target) for target in (1, 100, BIG)]
        assert len(source.chunks(100)) == (15 if end == "" else 2)
    assert all(rows == found[0] for rows in found)
    rows, bad = everything(source)
    pixels = np.random.default_rng(50).integers(0, 256, (50, 5, 4), dtype=np.uint8)
    with Image.open(io.BytesIO(rows[9][1]["image"])) as shown:  # type: ignore[arg-type]
        assert np.array_equal(np.asarray(shown), pixels[9])
    assert not bad and types_of(source) == {"image": "binary", "label": "int64"}
    assert types_of(Idx.sniff([str(train[0])])) == {"image": "binary"}
    assert types_of(Idx.sniff([str(train[1])])) == {"label": "int64"}


def test_idx_files_of_other_types(tmp_path: Path) -> None:
    numbers = idx(tmp_path / "a-labels.idx1-float", np.array([0.5, -2], dtype=">f4"), 13)
    assert [row["label"] for _, row in everything(Idx.sniff([str(numbers)]))[0]] == [0.5, -2.0]
    colours = np.arange(24, dtype=np.uint8).reshape(1, 2, 4, 3)
    ((_, row),) = everything(Idx.sniff([str(idx(tmp_path / "c-images.idx4-ubyte", colours))]))[0]
    with Image.open(io.BytesIO(row["image"])) as shown:  # type: ignore[arg-type]
        assert np.array_equal(np.asarray(shown), colours[0])
    flat = idx(tmp_path / "x.idx", np.zeros((2, 3), dtype=np.uint8))
    with pytest.raises(DataError, match=r"2 x 3 values of type 8 .* neither images"):
        Idx.sniff([str(flat)])


@pytest.mark.parametrize("end", ["", ".gz"])
def test_idx_files_that_are_damaged_are_named_with_the_byte(tmp_path: Path, end: str) -> None:
    images, labels = digits(tmp_path, end=end)
    data = gzip.decompress(images.read_bytes()) if end else images.read_bytes()

    def told(content: bytes) -> str:
        images.write_bytes(gzip.compress(content) if end else content)
        with pytest.raises(DataError) as error:
            everything(Idx.sniff([str(images), str(labels)]), 100)
        assert str(images) in str(error.value)
        return str(error.value)

    assert "cut off at byte 1,000: its header promises 50 records" in told(data[:1000])
    assert "ends at byte 1,016" in told(data + b"x")
    assert "is no IDX file: byte 1 is 0x01" in told(b"\0\1" + data[2:])
    assert "byte 2 is 0x07" in told(b"\0\0\7" + data[3:])
    assert "ends at byte 9, within its dims" in told(data[:9])
    assert "has 49 images" in told(data[:7] + b"\x31" + data[8:])


def test_idx_files_that_do_not_belong_together(tmp_path: Path) -> None:
    train, test = digits(tmp_path), digits(tmp_path, "t10k", 7)
    twice = digits(tmp_path, end=".gz")
    for given_, told in (
        ((*train, test[0]), "t10k-images-idx3-ubyte: its labels are not among the files"),
        ((train[0], test[1]), "train-images-idx3-ubyte: its labels are not among the files"),
        ((train[0], twice[0]), "hold the same images, by their names"),
    ):
        with pytest.raises(DataError, match=told):
            Idx.sniff([str(path) for path in given_])


# ---- what Python makes


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Place:
    x: int
    y: int


@pytest.mark.parametrize(
    "record",
    [{"x": 1, "y": 2}, Point(1, 2), Place(1, 2), (1, 2), [1, 2]],
    ids=lambda r: type(r).__name__,
)
def test_records_of_many_kinds(tmp_path: Path, record: object) -> None:
    source = spool([record] * 3, tmp_path, BIG, names=("x", "y"))
    assert everything(source) == ([(i, {"x": 1, "y": 2}) for i in range(3)], [])


def values(n: int) -> Iterator[dict[str, object]]:
    for i in range(n):
        yield {
            "n": i,
            "text": f"t{i}",
            "array": np.full((2, 2), i, dtype=np.float32),
            "tensor": torch.full((3,), i) if i % 5 else None,
            "half": torch.tensor(0.5 * i, dtype=torch.bfloat16),
            "ragged": np.arange(i % 3),
            "when": dt.datetime(2020, 1, 1, tzinfo=UTC),
            "deep": {"a": i},
            "raw": b"\0\1",
        }


def test_values_of_many_kinds(tmp_path: Path) -> None:
    source = spool(values(3000), tmp_path / "a", 50_000)
    assert types_of(source) == {
        **{"n": "int64", "text": "string", "array": "float32[4]", "tensor": "int64[3]"},
        **{"half": "float32", "ragged": "list<int64>", "when": "time", "deep.a": "int64"},
        **{"raw": "binary"},
    }
    assert len(source.parts) > 3
    rows, bad = everything(source)
    assert not bad and [n for n, _ in rows] == [row["n"] for _, row in rows] == list(range(3000))
    assert rows[7][1]["tensor"] == [7, 7, 7] and rows[5][1]["tensor"] is None
    assert everything(spool(values(3000), tmp_path / "b", BIG)) == (rows, bad)
    assert spool(values(3000), tmp_path / "a", 50_000).digest == source.digest
    assert spool(values(2999), tmp_path / "a", 50_000).digest != source.digest


def test_words_for_nothing_are_none_in_dicts_within_records_too(tmp_path: Path) -> None:
    records = [{"a": {"b": "NA", "c": {"d": "?"}}}, {"a": {"b": 2, "c": {"d": "x"}}}]
    source = spool(records, tmp_path, BIG, missing=("NA", "?"))
    assert types_of(source) == {"a.b": "int64", "a.c.d": "string"}
    assert everything(source)[0] == [
        (0, {"a.b": None, "a.c.d": None}),
        (1, {"a.b": 2, "a.c.d": "x"}),
    ]


def test_records_that_do_not_fit_are_bad(tmp_path: Path) -> None:
    def given_() -> Iterator[object]:
        for i in range(5000):
            odd = {7: {"a": 1}, 1500: "text", 3000: {"a": 1, "b": 2, "c": 3}, 4999: {"a": 1, 2: 3}}
            yield odd.get(i, {"a": i, "b": object() if i == 2000 else i})

    for target in (1000, BIG):
        rows, bad = everything(spool(given_(), tmp_path / str(target), target))
        numbers = [7, 1500, 2000, 3000, 4999]
        assert [b.record for b in bad] == numbers
        assert [n for n, _ in rows] == [i for i in range(5000) if i not in numbers]
        assert "has no b" in bad[0].what and "column 'b' is a object" in bad[2].what
        assert "has c, which the first record has not" in bad[3].what


def test_mixed_values_are_joined_wherever_they_stand(tmp_path: Path) -> None:
    together = spool([{"a": 1}, {"a": "x"}, {"a": 2.5}], tmp_path / "a", BIG)
    assert [row["a"] for _, row in everything(together)[0]] == ["1", "x", "2.5"]
    apart = spool(({"a": 1 if i < 1024 else "x"} for i in range(2048)), tmp_path / "b", BIG)
    kinds = [name_of(piece.table["a"].type) for piece in pieces(apart, BIG)]
    assert kinds == ["int64", "string"]
    rows, bad = everything(apart, BIG, {"a": "string"})
    assert not bad and rows[0][1] == {"a": "1"} and [n for n, _ in rows] == list(range(2048))


@pytest.mark.parametrize(
    ("records", "told"),
    [
        ([], "gave no records"),
        ([5], "record 1 of the generator is a int"),
        ([(1, 2)], "give names"),
        ([{}], "is empty"),
        (({"a": 1 // (3 - i)} for i in range(9)), "failed at record 4"),
    ],
)
def test_generators_that_give_nothing_useful(tmp_path: Path, records: object, told: str) -> None:
    with pytest.raises(DataError, match=told):
        spool(records, tmp_path, BIG)  # type: ignore[arg-type]


def test_the_user_is_told_which_record_failed(tmp_path: Path) -> None:
    def failing() -> Iterator[dict[str, int]]:
        yield {"a": 1}
        yield {"a": 2}
        raise KeyError("lost")

    with pytest.raises(DataTaskFailed) as error:
        spool(failing(), tmp_path, BIG)
    assert "failed at record 3" in str(error.value) and 'raise KeyError("lost")' in str(error.value)


def test_nothing_is_left_open(tmp_path: Path) -> None:
    write(mixed(10), tmp_path / "a", "arrow", 5)
    before = set(os.listdir("/proc/self/fd"))
    everything(Columnar((str(tmp_path / "a"),), "arrow"))
    assert set(os.listdir("/proc/self/fd")) <= before
