"""Files of text as records: where they begin, what they hold, and every one that is bad, named."""

import gzip
import json
import pickle
import tracemalloc
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyhands.data.columns.schema import type_of, unify
from manyhands.data.sources.cutting.record_boundaries import (
    FoundRecords,
    RecordRule,
    find_records,
    records_of,
)
from manyhands.data.sources.cutting.source import Bad, Chunk, Source, TablePiece, Types
from manyhands.data.sources.formats.access_log import AccessLog
from manyhands.data.sources.formats.csv_files import Delimited
from manyhands.data.sources.formats.json_lines import JsonLines
from manyhands.data.sources.formats.plain_text import PlainText, find_windows
from manyhands.data.sources.values.csv_fields import Dialect, split
from manyhands.data.sources.values.dates_in_text import all_times
from manyhands.data.sources.values.text_values import cleaned, converted, inferred, nulls_of
from manyhands.values.errors import DataError

TIME = pa.timestamp("us")
MB = 1 << 20
few = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def put(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def pieces(source: Source, types: Types | None = None, target: int = MB) -> list[TablePiece]:
    return [p for c in source.chunks(target) for p in source.read(c, types or {}, target)]


def rows(found: Sequence[TablePiece]) -> list[tuple[int, dict[str, Any]]]:
    return [
        (int(number), row)
        for piece in found
        for number, row in zip(piece.numbers, as_rows(piece.table), strict=True)
    ]


def as_rows(table: pa.Table) -> list[dict[str, Any]]:
    return table.to_pylist() if table.num_columns else [{}] * table.num_rows


def bads(found: Sequence[TablePiece]) -> list[Bad]:
    return [bad for piece in found for bad in piece.bad]


def values(found: Sequence[TablePiece], name: str) -> list[Any]:
    return [row.get(name) for _, row in rows(found)]


def whats(found: Sequence[TablePiece]) -> list[tuple[int, int, str]]:
    return [(bad.record, bad.byte, bad.what) for bad in bads(found)]


def types_of(found: Sequence[TablePiece]) -> dict[str, pa.DataType]:
    names = {name for piece in found for name in piece.table.column_names}
    return {
        name: unify(p.table.schema.field(name).type for p in found if name in p.table.column_names)
        for name in sorted(names)
    }


def same_however_cut(source: Source, target: int) -> None:
    """The promise of every source: types, rows, numbers and bad records do not depend on cuts."""
    whole, cut = pieces(source), pieces(source, target=target)
    types = types_of(whole)
    assert types_of(cut) == types
    assert bads(cut) == bads(whole)
    whole, cut = pieces(source, types), pieces(source, types, target)
    assert repr(filled(cut, types)) == repr(filled(whole, types))
    assert bads(cut) == bads(whole)
    found = [number for number, _ in rows(cut)] + [bad.record for bad in bads(cut)]
    assert sorted(found) == list(range(len(found)))


def filled(found: Sequence[TablePiece], names: Types) -> list[Any]:
    return [(number, [row.get(name) for name in names]) for number, row in rows(found)]


# Where records begin


def one_by_one(data: bytes, rule: RecordRule) -> list[tuple[int, bytes | None, str]]:
    """The definition, a byte at a time: where each record begins, what it is, what is wrong."""
    found: list[tuple[int, bytes | None, str]] = []
    at = 0
    while at < len(data):
        begin, state, opened = at, "start", 0
        while at < len(data) and state != "end":
            byte = data[at : at + 1]
            if state == "quoted":
                if byte == rule.quote and data[at + 1 : at + 2] == rule.quote:
                    at += 1
                elif byte == rule.quote:
                    state = "field"
            elif byte == b"\n":
                state = "end"
            elif state == "start" and rule.quote and byte == rule.quote:
                state, opened = "quoted", at
            else:
                state = "start" if byte == rule.delimiter else "field"
            at += 1
        if state == "quoted":
            found.append((begin, None, "quote"))
            end = data.find(b"\n", opened)
            at = end + 1 if end >= 0 else len(data)
            continue
        raw = data[begin:at]
        if len(raw) > rule.limit:
            found.append((begin, None, "too long"))
        elif raw.strip():
            content = raw[:-1].removesuffix(b"\r") if raw.endswith(b"\n") else raw
            found.append((begin, content, ""))
    return found


def blocks(data: bytes, size: int) -> Any:
    def read(start: int) -> Iterator[bytes]:
        for at in range(start, len(data), size):
            yield data[at : at + size]

    return read


def told(found: FoundRecords) -> list[tuple[int, bytes | None, str]]:
    return [
        (
            found.start + int(found.begins[i]),
            None if found.trouble else found.record(i),
            found.trouble,
        )
        for i in range(len(found))
    ]


@given(
    data=st.lists(st.sampled_from(b'a,"\n"\n, \r"x')).map(bytes),
    size=st.integers(1, 40),
    limit=st.sampled_from([3, 8, MB]),
    quote=st.sampled_from([b'"', b""]),
)
def test_records_are_found_whatever_the_blocks(
    data: bytes, size: int, limit: int, quote: bytes
) -> None:
    rule = RecordRule(b",", quote, limit=limit)
    found = list(find_records(blocks(data, size), rule))
    assert [record for f in found for record in told(f)] == one_by_one(data, rule)
    numbers = [f.first + i for f in found for i in range(len(f))]
    assert numbers == list(range(len(numbers)))


@given(data=st.lists(st.sampled_from(["a", "b c", "", " ", "\t", "é"])), size=st.integers(1, 20))
def test_paragraphs_are_what_blank_lines_separate(data: list[str], size: int) -> None:
    text = "\n".join(data)
    want: list[str] = []
    for line in data:
        if not line.strip():
            want.append("")
        elif want and want[-1]:
            want[-1] += "\n" + line
        else:
            want.append(line)
    raw = text.encode()
    found = find_records(blocks(raw, size), RecordRule(paragraphs=True))
    got = [f.record(i).decode().rstrip() for f in found for i in range(len(f))]
    assert got == [w.rstrip() for w in want if w]


@given(text=st.text(max_size=60), size=st.integers(1, 20), window=st.integers(2, 9))
def test_windows_hold_all_characters(text: str, size: int, window: int) -> None:
    found = list(find_windows(blocks(text.encode(), size), "x", window, utf8=True))
    got = [f.record(i).decode() for f in found for i in range(len(f))]
    want = [text[at : at + window] for at in range(0, len(text), window)]
    assert got == [w for w in want if len(w) > 1]


def test_a_quote_that_is_never_closed_costs_one_line(tmp_path: Path) -> None:
    lines = [f"{i},{'a' * (i % 7)}" for i in range(500)]
    lines[100] = '100,"open'
    path = put(tmp_path, "a.csv", "\n".join(lines) + "\n")
    source = Delimited.sniff([path], header="no")
    for target in (64, 1000, MB):
        found = pieces(source, target=target)
        assert whats(found) == [
            (100, len("\n".join(lines[:100])) + 1, 'a quote (") is opened and never closed')
        ]
        assert bads(found)[0].text == '100,"open'
        assert [number for number, _ in rows(found)] == [*range(100), *range(101, 500)]


def test_a_huge_line_is_named_and_not_held(tmp_path: Path) -> None:
    huge = b'1,"' + b"x" * (40 * MB) + b'"\n'
    path = put(tmp_path, "a.csv", b"0,a\n" + huge + b"2,b\n")
    source = Delimited.sniff([path], header="no", max_field=MB)
    tracemalloc.start()
    found = pieces(source)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert values(found, "c0") == [0, 2]
    assert whats(found) == [(1, 4, "longer than max_field (1,048,576 bytes)")]
    assert bads(found)[0].text.startswith('1,"xxx')
    assert peak < 20 * MB


# Delimited files


FIELDS = (
    *("1", "2", "-3", " 4", "5 ", "1.5", "2e3", "007", "0x1F", "true", "False", "+5", "1 2"),
    *("2020-01-01", "2020-01-02 10:00", "2020-01-01T00:00:00Z", "12:30", "NA", " ?", "", "x"),
    *('"q"', '"a,b"', '"line\nbreak"', '"dq""x"', '"tail"x', 'st"ray', "é", "nan", "inf", "\x0b7"),
    *("99999999999999999999", "None  ", "\r", "\0", '"open', "\udcff"),
)


@st.composite
def delimited(draw: st.DrawFn) -> tuple[bytes, int]:
    """Records of columns that have few values each, and now and then a wrong number of columns."""
    columns = draw(st.integers(1, 3))
    pools = [
        draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3)) for _ in range(columns)
    ]
    lines: list[str] = []
    for _ in range(draw(st.integers(1, 12))):
        count = columns if draw(st.integers(0, 15)) else draw(st.integers(0, 4))
        lines.append(",".join(draw(st.sampled_from(pools[i % columns])) for i in range(count)))
    end = draw(st.sampled_from(["\n", "\r\n"]))
    text = end.join(lines) + draw(st.sampled_from(["", end]))
    return text.encode("utf-8", "surrogateescape"), columns


@few
@given(data=delimited(), target=st.integers(1, 60))
def test_delimited_records_are_the_same_however_cut_and_read(
    tmp_path: Path, data: tuple[bytes, int], target: int
) -> None:
    content, columns = data
    path = put(tmp_path, "a.csv", content)
    source = Delimited((path,), Dialect(), tuple(f"c{i}" for i in range(columns)))
    same_however_cut(source, target)
    whole = Chunk(0, 0, len(content), 0, len(content))
    for found in records_of(path, whole, source.dialect.rule, MB):
        if not found.trouble:
            quick, exact = source._piece(found, {}, path), source._exactly(found, {}, path)
            assert quick.table.schema == exact.table.schema
            assert repr(quick.table.to_pylist()) == repr(exact.table.to_pylist())
            assert quick.numbers.tolist() == exact.numbers.tolist() and quick.bad == exact.bad


@given(fields=st.lists(st.text(st.sampled_from('a," \n\r;é')), min_size=1))
def test_what_is_quoted_is_read_back(fields: list[str]) -> None:
    record = ",".join('"' + field.replace('"', '""') + '"' for field in fields)
    assert split(record, ",", '"') == fields


def test_quotes_newlines_and_blank_lines(tmp_path: Path) -> None:
    text = 'id,t\r\n1,"a ""b""\nc, d"\r\n\r\n  \n2,5\'10"\r\n3,"x"y\n'
    found = pieces(Delimited.sniff([put(tmp_path, "a.csv", text)]))
    assert rows(found) == [
        (0, {"id": 1, "t": 'a "b"\nc, d'}),
        (1, {"id": 2, "t": "5'10\""}),
        (2, {"id": 3, "t": "xy"}),
    ]
    assert bads(found) == []


def test_every_kind_of_bad_record_is_named(tmp_path: Path) -> None:
    lines = [b"1,a", b"2,b,c", b"3", b"4,\xff", b"5,x\0y", b'6,"' + b"z" * 200 + b'"', b"7,g"]
    path = put(tmp_path, "a.csv", b"\n".join(lines) + b"\n")
    found = pieces(Delimited.sniff([path], header=False, delimiter=",", max_field=100))
    assert rows(found) == [(0, {"c0": 1, "c1": "a"}), (6, {"c0": 7, "c1": "g"})]
    assert whats(found) == [
        (1, 4, "3 columns, expected 2"),
        (2, 10, "1 column, expected 2"),
        (3, 12, "not utf-8: byte 0xff at 14; perhaps encoding=latin-1"),
        (4, 16, "a NUL at byte 19"),
        (5, 22, "longer than max_field (100 bytes)"),
    ]
    assert str(bads(found)[3]) == f"{path}, record 5, byte 16: a NUL at byte 19: 5,x\\x00y"


def test_one_bad_record_among_many_is_found(tmp_path: Path) -> None:
    lines = [f"{i},word{i},{i / 4}" for i in range(20_000)]
    lines[12_345] = "12345,oops"
    found = pieces(Delimited.sniff([put(tmp_path, "a.csv", "\n".join(lines))], header="no"))
    assert [b.record for b in bads(found)] == [12_345]
    assert [number for number, _ in rows(found)] == [i for i in range(20_000) if i != 12_345]
    assert [str(kind) for kind in types_of(found).values()] == ["int64", "string", "double"]


def test_given_types_and_what_does_not_fit_them(tmp_path: Path) -> None:
    text = "3,3,2015-03-01 12:00,yes,007\n3.0,x,n/a,0,b\nNA,2.5,1425211200,?,c\n300,1,nope,1,d\n"
    source = Delimited.sniff([put(tmp_path, "a.csv", text)], header="no")
    kinds = {"c0": pa.uint8(), "c1": pa.float64(), "c2": TIME, "c3": pa.bool_(), "c4": pa.string()}
    found = pieces(source, kinds)
    noon = datetime(2015, 3, 1, 12)
    assert rows(found) == [
        (0, {"c0": 3, "c1": 3.0, "c2": noon, "c3": True, "c4": "007"}),
        (2, {"c0": None, "c1": 2.5, "c2": noon, "c3": None, "c4": "c"}),
    ]
    assert [what for _, _, what in whats(found)] == [
        "column 'c0': '3.0' is no uint8",
        "column 'c0': '300' is no uint8",
    ]
    loose = pieces(source, {"c1": pa.float64(), "c2": TIME})
    assert [what for _, _, what in whats(loose)] == [
        "column 'c1': 'x' is no float64",
        "column 'c2': 'nope' is no time",
    ]
    with pytest.raises(DataError, match="cannot be"):
        pieces(source, {"c0": pa.list_(pa.int64())})


ADULT = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, White, Male, 2174, United-States, <=50K\n"
    "54, ?, 180211, Some-college, 10, Married-civ-spouse, Black, Male, 0, South, >50K\n"
)


@pytest.mark.parametrize(
    ("name", "text", "delimiter", "names", "kinds"),
    [
        ("adult.data", ADULT + "\n", ",", None, "isisisssiss"),
        ("u.data", "196\t242\t3\t881250949\n186\t302\t3\t891717742\n", "\t", None, "iiii"),
        ("u.user", "1|24|M|technician|85711\n2|53|F|other|E2201\n", "|", None, "iisss"),
        ("u.genre", "unknown|0\nAction|1\n\n", "|", None, "si"),
        ("u.occupation", "artist\ndoctor\nwriter\n", ",", None, "s"),
        ("ratings.dat", "1::1193::5\n1::661::3\n", "::", None, "iii"),
        (
            "housing.csv",
            "longitude,rooms,near\n-122.23,880.0,BAY\n-122.22,,BAY\n",
            *(",", "longitude rooms near", "ffs"),
        ),
        ("movies.csv", 'id,title\n1,Toy|Story\n2,"A, B"\n', ",", "id title", "is"),
        ("words.csv", "text,label\nhello there,pos\nbad,neg\n", ",", "text label", "ss"),
        ("mushrooms.data", "p,x,s\ne,x,s\ne,b,s\np,x,y\n", ",", None, "sss"),
        ("pandas.csv", ",a\n0,x\n1,y\n", ",", "c0 a", "is"),
        ("european.csv", "a;b\n1,5;2\n2,5;3\n", ";", "a b", "si"),
        ("wine.csv", '"acid";"quality"\n7.4;5\n7.8;5\n', ";", "acid quality", "fi"),
        ("one.csv", "x\n1\n2\n", ",", "x", "i"),
        ("twice.csv", "a,a,,a_2\n1,2,3,4\n", ",", "a a_3 c2 a_2", "iiii"),
        ("bom.csv", "\ufeffa,b\r\n1,x\r\n", ",", "a b", "is"),
        ("when.tsv", "at\tx\n2020-01-01\t1\n2020-01-02 10:00Z\t2\n", "\t", "at x", "ti"),
    ],
)
def test_the_beginning_tells_how_a_file_is_written(
    tmp_path: Path, name: str, text: str, delimiter: str, names: str | None, kinds: str
) -> None:
    source = Delimited.sniff([put(tmp_path, name, text)])
    assert source.dialect.delimiter == delimiter
    assert bool(source.header) == (names is not None)
    expected = names.split() if names else [f"c{i}" for i in range(len(kinds))]
    assert list(source.names) == expected
    found = pieces(source)
    letters = {"int64": "i", "double": "f", "string": "s", "timestamp[us]": "t"}
    schema = found[0].table.schema
    assert [letters[str(schema.field(n).type)] for n in expected] == list(kinds)
    assert not bads(found)
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(rows(found)) == len(lines) - (names is not None)


@pytest.mark.parametrize(
    "header", ["", "label," + ",".join(f"pixel{i}" for i in range(784)) + "\n"]
)
def test_mnist_with_and_without_a_header(tmp_path: Path, header: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 785))
    text = header + "\n".join(",".join(map(str, row)) for row in pixels.tolist()) + "\n"
    source = Delimited.sniff([put(tmp_path, "mnist.csv", text)])
    assert source.names[:2] == (("label", "pixel0") if header else ("c0", "c1"))
    found = pieces(source)
    assert np.array_equal(np.stack([c.to_numpy() for c in found[0].table.columns], 1), pixels)


def test_missing_values_and_white_space(tmp_path: Path) -> None:
    words = ["1", " NA", "N/A ", "NaN", "nan", "null", "NULL", "None", " ? ", '""', "-", " 7 "]
    path = put(tmp_path, "a.csv", "\n".join(f"{i},{word}" for i, word in enumerate(words)))
    source = Delimited.sniff([path], header="no", null=["-"])
    found = pieces(source)
    assert values(found, "c1") == [1, *[None] * 10, 7]
    assert types_of(found)["c1"] == pa.int64()


def test_other_encodings(tmp_path: Path) -> None:
    text = "1|Les Misérables (1995)|01-Jan-1995\n2|Æon|\n"
    path = put(tmp_path, "u.item", text.encode("latin-1"))
    source = Delimited.sniff([path], encoding="latin-1")
    assert values(pieces(source), "c1") == ["Les Misérables (1995)", "Æon"]
    assert values(pieces(source, {"c2": TIME}), "c2") == [datetime(1995, 1, 1), None]
    assert [b.record for b in bads(pieces(Delimited.sniff([path])))] == [0, 1]
    windows = put(tmp_path, "w.csv", b"a,b\n1,\x80\n2,\x81\n3,c\n")
    found = pieces(Delimited.sniff([windows], encoding="cp1252"))
    assert values(found, "b") == ["€", "c"]
    assert whats(found) == [(1, 8, "not cp1252: byte 0x81 at 10")]
    wide = put(tmp_path, "wide.csv", "a,b\n1,2\n".encode("utf-16"))
    for options in ({}, {"encoding": "utf-16"}):
        with pytest.raises(DataError, match="iconv"):
            Delimited.sniff([wide], **options)
    with pytest.raises(DataError, match="no encoding"):
        Delimited.sniff([path], encoding="klingon")
    with pytest.raises(DataError, match="tr "):
        Delimited.sniff([put(tmp_path, "mac.csv", "a,b\r1,2\r3,4\r")])


@pytest.mark.parametrize("target", [30, 333, MB])
def test_compressed_files_give_the_same_records(tmp_path: Path, target: int) -> None:
    lines = [f'{i},"text {i}\nmore",{i / 3}' for i in range(40)]
    lines += ['40,"never closed,1', *(f"{i},bare,{i / 3}" for i in range(41, 60))]
    lines[7] = "7,short"
    content = ("\n".join(["id,text,x", *lines]) + "\n").encode()
    plain = Delimited.sniff([put(tmp_path, "a.csv", content)])
    packed = Delimited.sniff([put(tmp_path, "a.csv.gz", gzip.compress(content))])
    assert plain.names == packed.names == ("id", "text", "x")
    assert len(packed.chunks(target)) == 1
    ours, theirs = pieces(plain, target=target), pieces(packed, target=target)
    assert rows(ours) == rows(theirs)
    assert whats(ours) == whats(theirs) and len(whats(ours)) == 2


def test_several_files_share_one_header(tmp_path: Path) -> None:
    first = put(tmp_path, "1.csv", "a,b\n1,x\n")
    second = put(tmp_path, "2.csv", "a,b\n2,y\n3,z\n")
    source = Delimited.sniff([first, put(tmp_path, "e.csv", ""), second])
    found = pieces(source)
    assert [row for _, row in rows(found)] == [
        *({"a": 1, "b": "x"}, {"a": 2, "b": "y"}, {"a": 3, "b": "z"})
    ]
    assert [c.file for c in source.chunks(MB)] == [0, 2]
    assert pickle.loads(pickle.dumps(source)) == source
    other = Delimited.sniff([first, put(tmp_path, "3.csv", "b,a\n1,x\n")])
    with pytest.raises(DataError, match="its header should be that of the first file: a, b"):
        other.chunks(MB)


def test_options_that_make_no_sense_are_answered(tmp_path: Path) -> None:
    path = put(tmp_path, "a.csv", "1,2\n3,4\n")
    for options, words in [
        ({"names": ["a"]}, "1 names are given, but .* has 2 columns"),
        ({"header": "maybe"}, "yes, no or auto"),
        ({"delimiter": "\n"}, "delimiter cannot be"),
        ({"quote": "''"}, "quote cannot be"),
    ]:
        with pytest.raises(DataError, match=words):
            Delimited.sniff([path], **options)
    with pytest.raises(DataError, match="there is nothing in"):
        Delimited.sniff([put(tmp_path, "empty.csv", "\n")])
    named = Delimited.sniff([path], names=["a", "b"], delimiter="comma")
    assert rows(pieces(named))[0] == (0, {"a": 1, "b": 2})


# Values


def test_times_in_many_forms() -> None:
    day, noon = datetime(2015, 3, 1), datetime(2015, 3, 1, 12)
    texts = {
        day: ["2015-03-01", "01-Mar-2015", "March 1, 2015", "2015/03/01"],
        noon: [
            *("2015-03-01 12:00", "2015-03-01T12:00:00Z", "2015-03-01T14:00:00.000+02:00"),
            *("01/Mar/2015:12:00:00 +0000", "01/Mar/2015:05:00:00 -0700", "1425211200"),
            *("1425211200000", "1425211200000000000", "1425211200.0"),
            *("Sun, 01 Mar 2015 12:00:00 GMT", "Sun Mar  1 12:00:00 2015", "20150301T120000Z"),
        ],
        None: [
            "2015-02-30",
            "25/3/2015",
            "3/1/2015",
            "1.3.2015 12:00",
            "x",
            "2015-03-01 24:00",
            "12:00",
            "1 Foo 2015",
            "0000-01-01",
        ],
    }
    for want, forms in texts.items():
        assert [(f, t.as_py()) for f, t in zip(forms, all_times(pa.array(forms)), strict=True)] == [
            (form, want) for form in forms
        ]
        alone = [all_times(pa.array([form]))[0].as_py() for form in forms]
        assert alone == [want] * len(forms)


@pytest.mark.parametrize(
    ("form", "texts", "want"),
    [
        ("dmy", ["1/3/2015", "1.3.2015", "01-03-2015", "2015-03-01"], datetime(2015, 3, 1)),
        ("mdy", ["3/1/2015", "3.1.2015", "03-01-2015", "March 1, 2015"], datetime(2015, 3, 1)),
        ("mdy", ["3/1/2015 12:00 PM", "3/1/2015T14:00 +02:00"], datetime(2015, 3, 1, 12)),
        ("", ["3/3/2015", "3.3.2015", "03-03-2015"], datetime(2015, 3, 3)),
        ("dmy", ["4/13/2015", "31/2/2015", "1/3.2015", "1/3/15"], None),
        ("mdy", ["13/4/2015", "2/31/2015"], None),
        ("%d/%m/%Y", ["1/3/2015", "01/03/2015"], datetime(2015, 3, 1)),
        ("%d/%m/%Y", ["2015-03-01", "31/02/2015", "01/03/2015x", "1425211200"], None),
        ("%d.%m.%y", ["01.03.15"], datetime(2015, 3, 1)),
        ("%d.%m.%y", ["01.03.69"], datetime(1969, 3, 1)),
        ("%I:%M %p, %a %b %d %Y %z", ["02:00 PM, Sun Mar 1 2015 +0200"], datetime(2015, 3, 1, 12)),
        ("%Y%m%d %H%M%S.%f", ["20150301 120000.0"], datetime(2015, 3, 1, 12)),
        ("%Y-%m-%d 100%%", ["2015-03-01 100%"], datetime(2015, 3, 1)),
    ],
)
def test_times_in_a_form_that_is_said(form: str, texts: list[str], want: datetime | None) -> None:
    assert all_times(pa.array(texts), form).to_pylist() == [want] * len(texts)


def test_only_single_times_have_a_form() -> None:
    with pytest.raises(DataError, match="no lists"):
        type_of("list<time:dmy>")


@pytest.mark.parametrize("form", ["ymd", "%d/%m", "%Q", "%d/%m/%Y %d", "%Y %y %m %d", "%d/%m/%Y%"])
def test_forms_that_say_no_moment_are_refused(form: str) -> None:
    with pytest.raises(DataError, match=r"%d/%m/%Y|must name year"):
        type_of(f"time:{form}")


@given(parts=st.lists(st.lists(st.sampled_from(FIELDS[:-3]), max_size=4), max_size=4))
def test_the_type_of_a_column_is_that_of_its_parts(parts: list[list[str]]) -> None:
    nulls = nulls_of(())
    clean = [cleaned(pa.array(part, pa.string()), nulls) for part in parts]
    whole = pa.concat_arrays([pa.array([], pa.string()), *clean])
    kind = inferred(whole)
    assert kind == unify(map(inferred, clean))
    assert not converted(whole, kind)[1].any()


# JSON lines


@st.composite
def json_lines(draw: st.DrawFn) -> bytes:
    scalars = st.sampled_from(
        [
            *("1", "-0", "12345678901234567890", "1.5", "-0.0", "1e400", "true", "null", "NaN"),
            *('"x"', '"2020-01-01"', '"2020-01-01T00:00:00Z"', '"é\\u00e9"', '"5"', '""'),
            *("[]", "[1,2]", "[1.5,null]", "[-0]", '["a"]', "[[1]]", "{}", '{"b":1}'),
            *('{"b":{"c":"x"}}', '{"b":"2020-01-01"}'),
        ]
    )
    pools = {key: draw(st.lists(scalars, min_size=1, max_size=2)) for key in "abc"}
    lines: list[str] = []
    for _ in range(draw(st.integers(1, 10))):
        keys = draw(st.lists(st.sampled_from("abc"), unique=True))
        inner = ",".join(f'"{key}":{draw(st.sampled_from(pools[key]))}' for key in keys)
        lines.append("{" + inner + "}")
        wrong = ["", " ", "x", "[1]", '{"a":1', '{"a":1}{"a":2}', '{"a":1,"a":2}', ' {"a":1}']
        if not draw(st.integers(0, 15)):
            lines.append(draw(st.sampled_from(wrong)))
    return ("\n".join(lines) + draw(st.sampled_from(["", "\n"]))).encode()


@few
@given(data=json_lines(), target=st.integers(1, 80))
def test_json_lines_are_the_same_however_cut_and_read(
    tmp_path: Path, data: bytes, target: int
) -> None:
    path = put(tmp_path, "a.jsonl", data or b"{}")
    source = JsonLines((path,), columns=("b", "a"), times=(("a",), ("c", "b")))
    same_however_cut(source, target)
    whole = Chunk(0, 0, len(data), 0, len(data))
    both = zip(records_of(path, whole, RecordRule(), MB), source.read(whole, {}, MB), strict=True)
    for found, quick in both:
        exact = source._exactly(found, {}, path)
        assert quick.table.schema == exact.table.schema
        assert repr(as_rows(quick.table)) == repr(as_rows(exact.table))
        assert quick.numbers.tolist() == exact.numbers.tolist() and quick.bad == exact.bad


def test_json_objects_lists_and_texts(tmp_path: Path) -> None:
    lines = [
        {"id": 1, "user": {"name": "ann", "born": "1990-05-01"}, "v": [1, 2], "tags": ["a", "é"]},
        {"id": 2, "user": {"name": None}, "v": [0.5], "extra": True},
    ]
    path = put(tmp_path, "a.jsonl", "\n\n".join(json.dumps(line) for line in lines))
    source = JsonLines.sniff([path])
    assert source.columns == ("id", "user.name", "user.born", "v", "tags", "extra")
    found = pieces(source)
    assert [row[name] for _, row in rows(found[:1])[:1] for name in source.columns[:5]] == [
        *(1, "ann", datetime(1990, 5, 1), [1, 2], '["a","é"]')
    ]
    assert values(found, "v") == [[1, 2], [0.5]]
    assert values(found, "extra") == [None, True]
    assert types_of(found)["v"] == pa.list_(pa.float64())
    assert pickle.loads(pickle.dumps(source)) == source


def test_bad_lines_of_json_are_named(tmp_path: Path) -> None:
    lines = [
        *(b'{"a":1}', b'{"a":', b"[1]", b'{"a":1,"a":2}', b'{"a":"\xff"}', b'{"a":"\\ud800"}'),
        *(b'{"a":1} {"a":2}', b'{"a":{"b":1},"a.b":2}', b'{"a":' * 99 + b"1" + b"}" * 99),
        *(b'{"t":"' + b"x" * 2000 + b'"}', b'{"a":"x\0"}', b'{"a":2}'),
    ]
    path = put(tmp_path, "a.jsonl", b"\n".join(lines))
    found = pieces(JsonLines.sniff([path], max_field=1000))
    assert values(found, "a") == [1, 2]
    assert [what for _, _, what in whats(found)] == [
        "no JSON: expecting value at byte 13",
        "not an object ({...})",
        "the key 'a' is there twice",
        "not utf-8: byte 0xff at 38",
        "half of a surrogate pair (\\ud800 to \\udfff)",
        "no JSON: extra data at byte 65",
        "two of its keys make the same column",
        "nested more than 64 deep",
        "longer than max_field (1,000 bytes)",
        f"a NUL at byte {sum(map(len, lines[:10])) + 10 + 7:,}",
    ]
    assert [b.record for b in bads(found)] == list(range(1, 11))


def test_given_types_for_json(tmp_path: Path) -> None:
    lines = ['{"a":3,"t":"2015-03-01","v":[1]}', '{"a":3.5,"t":"x"}', '{"a":true,"t":0,"v":[2.5]}']
    source = JsonLines.sniff([put(tmp_path, "a.jsonl", "\n".join(lines))])
    found = pieces(source, {"a": pa.float64(), "t": TIME, "v": pa.list_(pa.float32())})
    assert rows(found) == [(0, {"a": 3.0, "t": datetime(2015, 3, 1), "v": [1.0]})]
    assert [what for _, _, what in whats(found)] == [
        "column 't': 'x' is no time",
        "column 'a': 'true' is no float64",
    ]
    assert values(pieces(source, {"a": pa.int64()}), "a") == [3]
    assert values(pieces(source, {"a": pa.string()}), "a") == ["3", "3.5", "true"]
    assert values(pieces(source, {"t": pa.string()}), "t") == ["2015-03-01", "x", "0"]


# Access logs


LOG = r"""127.0.0.1 - frank [10/Oct/2000:13:55:36 -0700] "GET /pb.gif HTTP/1.0" 200 2326
::1 - - [10/Oct/2000:20:55:36 +0000] "-" 408 - "-" "-"
2001:db8::1 - a b [10/Oct/2000:20:55:36 +0000] "GET /x\"y" 304 0 "http://e.com/" "say \"hi\""
1.2.3.4 - - [10/Oct/2000:20:55:36 +0000] "\x16\x03" 400 226 "-" "curl"

garbage
1.2.3.4 - - [10/Foo/2000:20:55:36 +0000] "GET / HTTP/1.1" 200 1
1.2.3.4 - - [10/Oct/2000:20:55:36 +0000] "GET / HTTP/1.1" 2x0 1
"""


def test_access_logs_in_both_formats(tmp_path: Path) -> None:
    source = AccessLog.sniff([put(tmp_path, "access.log", LOG)])
    found = pieces(source)
    good = [row for _, row in rows(found)]
    assert [row["host"] for row in good] == ["127.0.0.1", "::1", "2001:db8::1", "1.2.3.4"]
    assert {row["time"] for row in good} == {datetime(2000, 10, 10, 20, 55, 36)}
    assert [row["user"] for row in good] == ["frank", None, "a b", None]
    parts = [(row["method"], row["path"], row["protocol"]) for row in good]
    assert parts == [
        ("GET", "/pb.gif", "HTTP/1.0"),
        (None, None, None),
        ("GET", '/x"y', None),
        (None, r"\x16\x03", None),
    ]
    assert [(row["status"], row["bytes"]) for row in good] == [
        *((200, 2326), (408, None), (304, 0), (400, 226))
    ]
    assert [row["agent"] for row in good] == [None, None, 'say "hi"', "curl"]
    assert [(b.record, b.what) for b in bads(found)] == [
        (4, "not in the common or combined log format: its host is not"),
        (5, "column 'time': '10/Foo/2000:20:55:36 +0000' is no time"),
        (6, "not in the common or combined log format: its status is not"),
    ]
    assert AccessLog.looks_like(LOG.encode()) and not AccessLog.looks_like(ADULT.encode())


@settings(few, max_examples=15)
@given(
    target=st.integers(1, 500),
    lines=st.lists(st.sampled_from(LOG.split("\n")), min_size=1, max_size=12),
)
def test_access_logs_are_the_same_however_cut(
    tmp_path: Path, target: int, lines: list[str]
) -> None:
    path = put(tmp_path, "access.log", "\n".join(["", *lines]))
    same_however_cut(AccessLog.sniff([path]), target)


# Plain text


NOVEL = "Call me Ishmael.\r\nSome years ago\n\n \nnever mind  \n\tHöw long\n\n\nEnd"


def test_text_by_lines_paragraphs_and_windows(tmp_path: Path) -> None:
    path = put(tmp_path, "novel.txt", NOVEL)
    lines = pieces(PlainText.sniff([path]))
    assert values(lines, "text") == [
        *("Call me Ishmael.", "Some years ago", "never mind  ", "\tHöw long", "End")
    ]
    paragraphs = pieces(PlainText.sniff([path], unit="paragraph"))
    assert values(paragraphs, "text") == [
        *("Call me Ishmael.\r\nSome years ago", "never mind  \n\tHöw long", "End")
    ]
    windows = pieces(PlainText.sniff([path], window=10))
    assert "".join(values(windows, "text")) == NOVEL
    assert {len(text) for text in values(windows, "text")[:-1]} == {10}
    latin = put(tmp_path, "latin.txt", NOVEL.encode("latin-1"))
    assert values(pieces(PlainText.sniff([latin], window=10, encoding="latin-1")), "text") == (
        values(windows, "text")
    )


@few
@given(
    text=st.text(st.sampled_from("ab é\n\r\t\0"), min_size=1),
    target=st.integers(1, 60),
    options=st.sampled_from([{}, {"unit": "paragraph"}, {"window": 3}]),
)
def test_text_is_the_same_however_cut(
    tmp_path: Path, text: str, target: int, options: dict[str, Any]
) -> None:
    text = f"x\n{text}"
    path = put(tmp_path, "a.txt", text)
    source = PlainText.sniff([path], **options)
    same_however_cut(source, target)
    packed = put(tmp_path, "a.txt.gz", gzip.compress(text.encode()))
    ours, theirs = pieces(source), pieces(PlainText.sniff([packed], **options), target=target)
    assert rows(ours) == rows(theirs) and whats(ours) == whats(theirs)


def test_what_is_no_text_is_named(tmp_path: Path) -> None:
    path = put(tmp_path, "a.txt", b"good\nb\xffd\n" + b"x" * 500 + b"\nn\0l\nend")
    found = pieces(PlainText.sniff([path], max_field=100))
    assert values(found, "text") == ["good", "end"]
    assert [b.record for b in bads(found)] == [1, 2, 3]
    windows = pieces(PlainText.sniff([path], window=4, max_field=100))
    assert bads(windows)[0].what == "not utf-8: byte 0xff at 6; perhaps encoding=latin-1"
    binary = put(tmp_path, "b.txt", b"\x80" * 500)
    with pytest.raises(DataError, match=r"b\.txt is not in UTF-8"):
        pieces(PlainText.sniff([binary], window=4))
    with pytest.raises(DataError, match="a window has 2 to"):
        PlainText.sniff([path], window=1)
    with pytest.raises(DataError, match="line, paragraph or window"):
        PlainText.sniff([path], unit="word")
