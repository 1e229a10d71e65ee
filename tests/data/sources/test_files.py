"""Files wherever they are: what is shown of them, finding, reading, unpacking, their format."""

import bz2
import contextlib
import functools
import gzip
import http.server
import importlib.util
import io
import lzma
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from manyhands.data.sources.access import files
from manyhands.data.sources.access.url_secrets import hide, shown
from manyhands.data.sources.cutting.source import Source
from manyhands.data.sources.open_sources import Options, open_sources
from manyhands.data.tfrecord.framing import frame
from manyhands.data.tfrecord.write_examples import encode
from manyhands.values.errors import DataError

needs_http = pytest.mark.skipif(
    importlib.util.find_spec("aiohttp") is None, reason="aiohttp is not installed"
)


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


PACKED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    ".gz": ("gzip", gzip.compress),
    ".zst": ("zstd", zstd),
    ".bz2": ("bz2", bz2.compress),
    ".xz": ("xz", lzma.compress),
}

# ---- what is shown


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("a/b.csv", "a/b.csv"),
        ("a?b#c.csv", "a?b#c.csv"),
        ("s3://bucket/a.csv", "s3://bucket/a.csv"),
        ("s3://key:secret@bucket/a.csv", "s3://bucket/a.csv"),
        ("s3://key:se/cr+et@bucket/a.csv", "s3://bucket/a.csv"),
        ("s3://key:se?cret@bucket/a.csv", "s3://bucket/a.csv"),
        ("simplecache::s3://key:secret@bucket/x", "simplecache::s3://bucket/x"),
        ("zip://a.csv::https://u:p@h/a.zip?sig=1", "zip://a.csv::https://h/a.zip?..."),
        ("zip://a.csv::https://u:p::q@h/a.zip", "zip://a.csv::https://h/a.zip"),
        ("https://h/x?X-Amz-Signature=abc&y=2", "https://h/x?..."),
        ("https://h/x?next=https://b&token=SECRET", "https://h/x?..."),
        ("https://h/x#token=SECRET", "https://h/x?..."),
        ("filecache::https://h/x?sig=S::zip://a", "filecache::https://h/x?...::zip://a"),
        ("hdfs://name:8020/a@b/c", "hdfs://name:8020/a@b/c"),
        ("abfs://box@account.dfs.core.windows.net/a", "abfs://box@account.dfs.core.windows.net/a"),
        ("http://[::1]:80/x?tok=1", "http://[::1]:80/x?..."),
        ("a\udcff.csv", "a\\udcff.csv"),
    ],
)
def test_secrets_are_not_shown(url: str, seen: str) -> None:
    assert shown(url) == seen
    assert shown(shown(url)) == seen


SECRET = st.text(st.sampled_from("aZ09+/=%:@?#&~-_."), min_size=6, max_size=20).map("S{}T".format)


@given(secret=SECRET, tail=st.sampled_from(["", "?a=1", "?"]))
def test_no_password_survives(secret: str, tail: str) -> None:
    plain = secret.replace("@", "").replace("/", "").replace("?", "").replace("#", "")
    assert plain not in shown(f"https://user:{plain}@host/data.csv{tail}")
    odd = secret.replace("@", "")
    if not odd[1:].split("/")[0].split("?")[0].split("#")[0].isdigit():
        assert odd not in shown(f"s3://user:{odd}@bucket/data.csv")
    assert secret not in shown(f"https://host/data.csv?sig={secret}&x=1")
    assert secret not in hide(f"no luck with ?sig={secret}", f"https://h/a?sig={secret}")


def test_messages_of_others_are_cleaned() -> None:
    url = "https://user:pass%20word@host/a.csv?sig=abcdef&x=12"
    text = f"GET {url} failed: 'pass word' at /a.csv?sig=abcdef; see https://u:p@b/?q=1"
    assert hide(text, url) == (
        "GET https://host/a.csv?... failed: '***' at /a.csv?***; see https://b/?..."
    ).replace("?***", "?sig=***")


# ---- finding


@pytest.mark.parametrize(
    ("url", "suffix"),
    [
        ("a/B.CSV.gz", ".csv"),
        ("a.tar.gz", ".tar"),
        ("x.gz", ""),
        ("https://h/a.tsv.zst?token=x.json", ".tsv"),
        ("simplecache::s3://b/a.parquet", ".parquet"),
        ("zip://in.csv::https://h/a.zip", ".csv"),
    ],
)
def test_the_suffix_is_that_of_the_data(url: str, suffix: str) -> None:
    assert files.suffix_of(url) == suffix


def test_folders_and_globs_are_sorted(tmp_path: Path) -> None:
    for name in ("b.csv", "a.csv", "sub/c.csv", ".hidden.csv", "_SUCCESS", "10.csv", "9.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    names = ["10.csv", "9.csv", "a.csv", "b.csv"]
    assert files.expand(f"{tmp_path}/*.csv") == [f"{tmp_path}/{name}" for name in names]
    whole = [f"{tmp_path}/{name}" for name in (*names, "sub/c.csv")]
    assert files.expand(str(tmp_path)) == whole
    assert files.expand(f"file://{tmp_path}/a.csv") == [f"{tmp_path}/a.csv"]


def test_a_file_whose_name_is_a_pattern_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a[1].csv").write_text("x")
    (tmp_path / "a1.csv").write_text("x")
    assert files.expand(f"{tmp_path}/a[1].csv") == [f"{tmp_path}/a[1].csv"]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("nowhere.csv", "there is no file at nowhere.csv"),
        ("no*.csv", "there is no file at no*.csv"),
        ("memory://nowhere.csv", "there is no file at memory://nowhere.csv"),
        ("foo://x", "foo"),
        ("/dev/null", "is not a file"),
    ],
)
def test_what_is_not_there_is_named(source: str, told: str) -> None:
    with pytest.raises(DataError) as error:
        files.expand(source)
    assert told in str(error.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("manyhands.data.sources.access.remote_files.url_to_fs", lacking)
    with pytest.raises(DataError) as error:
        files.expand("s3://key:secret@bucket/x.csv")
    assert "pip install s3fs" in str(error.value)
    assert "secret" not in str(error.value) and "key" not in str(error.value)


def test_whatever_a_storage_library_raises_is_cleaned(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "s3://key:secret@bucket/x.csv?versionId=hidden"

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError(f"403 for {url} (secret, hidden)\nlong\ntraceback")

    monkeypatch.setattr("manyhands.data.sources.access.remote_files.url_to_fs", failing)
    for act in (files.expand, files.open_bytes, files.size_of, files.open_anywhere):
        with pytest.raises(DataError) as error:
            act(url)
        text = str(error.value)
        assert "403" in text and "traceback" not in text
        assert "secret" not in text and "hidden" not in text
        assert error.value.__cause__ is None and error.value.__suppress_context__


# ---- reading


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def test_urls_are_read_like_files(memory: fsspec.AbstractFileSystem) -> None:
    memory.pipe("/d/b.csv", b"0123456789")
    memory.pipe("/d/a.csv.gz", gzip.compress(b"abc"))
    memory.pipe("/d/sub/c.csv", b"")
    assert files.expand("memory://d") == [
        "memory://d/a.csv.gz",
        "memory://d/b.csv",
        "memory://d/sub/c.csv",
    ]
    assert files.expand("memory://d/*.csv") == ["memory://d/b.csv"]
    assert files.expand("simplecache::memory://d/*.csv") == ["simplecache::memory://d/b.csv"]
    assert files.is_folder("memory://d") and not files.is_folder("memory://d/b.csv")
    assert files.size_of("memory://d/b.csv") == 10
    assert files.read_range("memory://d/b.csv", 3, 6) == b"345"
    with files.open_bytes("memory://d/a.csv.gz") as one, files.open_bytes("memory://d/b.csv") as b:
        assert b.read(2) + one.read() + b.read() == b"01abc23456789"
    with files.open_anywhere("memory://d/b.csv") as file:
        file.seek(-2, os.SEEK_END)
        assert file.read() == b"89"
    with files.open_bytes("simplecache::memory://d/b.csv") as file:
        assert file.read() == b"0123456789"


def test_ranges_of_local_files(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    assert files.read_range(str(path), 2, 4) == b"23"
    assert files.read_range(str(path), 8, 40) == b"89"
    assert files.read_range(str(path), 40, 50) == files.read_range(str(path), 5, 5) == b""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass

    def copyfile(self, source: object, outputfile: object) -> None:
        with contextlib.suppress(ConnectionError):  # the reader had enough
            super().copyfile(source, outputfile)  # type: ignore[arg-type]


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """A web server without ranges over tmp_path/web."""
    folder = tmp_path / "web"
    folder.mkdir()
    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://user:password@127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@needs_http
def test_a_web_server_without_ranges(web: str, tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    (tmp_path / "web" / "a.bin").write_bytes(data)
    (tmp_path / "web" / "b.csv.gz").write_bytes(gzip.compress(data))
    url = f"{web}/a.bin?token=SECRET"
    assert files.expand(url) == [url]
    assert files.size_of(url) == len(data)
    with files.open_bytes(url) as file:
        assert file.read() == data
    with files.open_bytes(f"{web}/b.csv.gz") as file:
        assert file.read() == data
    assert files.read_range(url, 5, 9) == data[5:9]
    assert files.read_range(url, 2 << 20, (2 << 20) + 9) == data[2 << 20 : (2 << 20) + 9]
    assert files.read_range(url, len(data) - 3, len(data) + 9) == data[-3:]
    with files.open_anywhere(url) as file:
        file.seek(-3, os.SEEK_END)
        assert file.read() == data[-3:]
    assert files.expand(f"{web}/") == [f"{web}/a.bin", f"{web}/b.csv.gz"]
    with pytest.raises(DataError) as error:
        files.open_bytes(f"{web}/nothing.csv?token=SECRET")
    assert "no file" in str(error.value) and "SECRET" not in str(error.value)
    assert "password" not in str(error.value)


@needs_http
def test_parquet_from_the_web(web: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": range(100)}), tmp_path / "web" / "a.parquet")
    (source,) = opened(f"{web}/a.parquet?sig=SECRET", tmp_path)
    assert [*rows(source, "a")] == list(range(100))
    for text in (str(source.files), repr(source)):
        assert "SECRET" not in text and "password" not in text


# ---- unpacking


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("named", [True, False])
def test_compressed_files_are_unpacked(tmp_path: Path, suffix: str, named: bool) -> None:
    kind, pack = PACKED[suffix]
    data = os.urandom(1000) * 1500
    path = tmp_path / ("a.csv" + suffix if named else "a.csv")
    path.write_bytes(pack(data[: 1 << 20]) + pack(data[1 << 20 :]))
    assert files.compression_of(str(path)) == kind
    with files.open_bytes(str(path)) as file:
        assert file.read() == data
    assert files.read_head(str(path), 5) == data[:5]


@pytest.mark.parametrize("suffix", PACKED)
def test_damaged_compression_is_named(tmp_path: Path, suffix: str) -> None:
    kind, pack = PACKED[suffix]
    path = tmp_path / f"a.csv{suffix}"
    packed = pack(os.urandom(300_000))
    for data, word in ((packed[:-1], "cut off"), (packed + b"more", "damaged")):
        path.write_bytes(data)
        with pytest.raises(DataError) as error, files.open_bytes(str(path)) as file:
            file.read()
        assert str(path) in str(error.value) and word in str(error.value)
        assert kind in str(error.value) and f"{len(data):,}" in str(error.value)


@given(st.data())
def test_a_flipped_byte_in_gzip_changes_nothing_unseen(data: st.DataObject) -> None:
    plain = data.draw(st.binary(max_size=200))
    packed = bytearray(gzip.compress(plain, mtime=0))
    at = data.draw(st.integers(10, len(packed) - 1))
    packed[at] ^= 1 << data.draw(st.integers(0, 7))
    fs = fsspec.filesystem("memory")
    fs.pipe("/flipped", bytes(packed))
    try:
        with files.open_bytes("memory://flipped") as file:
            assert file.read() == plain  # a bit that has no meaning
    except DataError as error:
        assert "memory://flipped: the gzip data is" in str(error)
    finally:
        fs.store.clear()


def test_a_suffix_that_lies_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(b"a,b\n1,2\n")
    with pytest.raises(DataError, match=r"named \.gz but is no gzip data"):
        files.open_bytes(str(path))


def test_a_tfrecord_that_begins_like_gzip_is_none(tmp_path: Path) -> None:
    payload = b"x" * 559_903
    assert framed(payload).startswith(b"\x1f\x8b\x08\0")
    (tmp_path / "a").write_bytes(framed(payload))
    assert files.compression_of(str(tmp_path / "a")) is None


def framed(payload: bytes) -> bytes:
    import numpy as np

    return frame(payload, np.array([0]), np.array([len(payload)])).tobytes()


# ---- formats


def opened(source: object, tmp_path: Path, **options: object) -> list[Source]:
    made = open_sources(source, Options(**options), spool=tmp_path / "spool", target=1 << 20)  # type: ignore[arg-type]
    return pickle.loads(pickle.dumps(made))


def rows(source: Source, column: str) -> Iterator[object]:
    for chunk in source.chunks(1 << 20):
        for piece in source.read(chunk, {}, 1 << 20):
            assert not piece.bad
            yield from piece.table[column].to_pylist()


TABLE = pa.table({"a": [1, 2, 3], "b": [0.5, 1.5, 2.5]})
LOG = b'1.2.3.4 - - [10/Oct/2000:13:55:36 -0700] "GET /a HTTP/1.0" 200 2326\n'


def parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(TABLE, sink)
    return sink.getvalue()


def arrow(stream: bool) -> bytes:
    sink = io.BytesIO()
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)
    return sink.getvalue()


def png() -> bytes:
    sink = io.BytesIO()
    Image.new("L", (2, 2)).save(sink, "PNG")
    return sink.getvalue()


def tfrecord() -> bytes:
    return frame(*encode(TABLE)).tobytes()


CONTENTS = {
    "csv": b"a,b\n1,0.5\n2,1.5\n3,2.5\n",
    "jsonl": b'{"a": 1, "b": 0.5}\n{"a": 2, "b": 1.5}\n{"a": 3, "b": 2.5}\n',
    "parquet": parquet(),
    "arrow": arrow(False),
    "stream": arrow(True),
    "tfrecord": tfrecord(),
}
NAMES = {
    "Delimited": ["a.csv", "a.tsv", "a.data", "a", "a.txt"],
    "JsonLines": ["a.jsonl", "a.json", "a.ndjson", "a"],
    "Columnar": ["a.parquet", "a", "a.csv"],
    "TFRecords": ["a.tfrecord", "a.tfrecords-00000-of-00002", "a"],
}


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_formats_are_found_out(tmp_path: Path, kind: str, suffix: str) -> None:
    made = {"csv": "Delimited", "jsonl": "JsonLines", "tfrecord": "TFRecords"}.get(kind, "Columnar")
    if suffix and made == "Columnar":
        return
    for name in NAMES[made]:
        path = tmp_path / f"{name}{suffix}"
        data = CONTENTS[kind]
        data = data.replace(b",", b"\t") if name == "a.tsv" else data
        path.write_bytes(gzip.compress(data) if suffix else data)
        (source,) = opened(path, tmp_path)
        assert type(source).__name__ == made, name
        assert [*rows(source, "a")] == [1, 2, 3]
        path.unlink()


@pytest.mark.parametrize(
    ("name", "content", "made"),
    [
        ("access.log", LOG * 3, "AccessLog"),
        ("access", LOG, "AccessLog"),
        ("novel.txt", b"It was the best of times,\nit was the worst of times\n" * 9, "PlainText"),
        ("server.log", b"started\nstopped, at last\n", "PlainText"),
        ("u.data", b"196\t242\t3\t881250949\n186\t302\t3\t891717742\n", "Delimited"),
        ("ratings.dat", b"1::1193::5::978300760\n1::661::3::978302109\n", "Delimited"),
        ("adult.data", b"39, State-gov, 77516\n50, Private, 83311\n", "Delimited"),
    ],
)
def test_text_formats_are_known_by_what_they_look_like(
    tmp_path: Path, name: str, content: bytes, made: str
) -> None:
    (tmp_path / name).write_bytes(content)
    (source,) = opened(tmp_path / name, tmp_path)
    assert type(source).__name__ == made


def test_a_forced_format_wins(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(CONTENTS["csv"])
    (source,) = opened(tmp_path / "a.csv", tmp_path, format="text")
    assert [*rows(source, "text")] == ["a,b", "1,0.5", "2,1.5", "3,2.5"]
    (tmp_path / "a.arrow").write_bytes(CONTENTS["stream"])
    (source,) = opened(tmp_path / "a.arrow", tmp_path, format="feather")
    assert [*rows(source, "a")] == [1, 2, 3]
    with pytest.raises(DataError, match="there is no format 'xls'; use csv, jsonl"):
        opened(tmp_path / "a.csv", tmp_path, format="xls")


ZIPPED = gzip.compress(b"a,b\n1,2\n", mtime=0)  # without the time: it is part of a test's name


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.json", b'[\n{"a": 1},\n{"a": 2}\n]', "jq -c"),
        ("a.json", b'{\n "a": 1\n}\n', "JSON lines"),
        ("a.bin", b"\0\1\2\3" * 9, "format of .* is unknown"),
        ("a.arrow", b"FEA1 and so on", "Feather version 1"),
        ("a.dat", "a,b\n1,2".encode("utf-16"), "UTF-16"),
        ("a.parquet.gz", gzip.compress(parquet()), "Unpack it first"),
        ("a.csv.gz", gzip.compress(ZIPPED, mtime=0), "gzip data inside gzip data"),
        ("a.csv.bz2", bz2.compress(ZIPPED), "gzip data inside bz2 data"),
        ("train-images-idx3-ubyte", b"<html>not found</html>", "no IDX file: byte 0 is 0x3c"),
    ],
)
def test_what_cannot_be_read_is_said_so(
    tmp_path: Path, name: str, content: bytes, told: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=told):
        opened(tmp_path / name, tmp_path)[0].chunks(1 << 20)


def test_a_folder_is_of_one_format(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, kind in (("b.csv", "csv"), ("a.csv", "csv"), ("x.parquet", "parquet")):
        (folder / name).write_bytes(CONTENTS[kind])
    (folder / "README.md").write_text("about")
    with pytest.raises(DataError) as error:
        opened(folder, tmp_path)
    assert "csv: 2 (a.csv, b.csv); parquet: 1 (x.parquet)" in str(error.value)
    (folder / "x.parquet").unlink()
    (source,) = opened(folder, tmp_path)
    assert source.files == (f"{folder}/a.csv", f"{folder}/b.csv")
    assert "1 other file was left out (README.md)" in source.notes  # type: ignore[attr-defined]
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="prepared data set already"):
        opened(folder, tmp_path)


def test_idx_is_known_by_its_first_bytes_and_all_of_it_is_one_source(tmp_path: Path) -> None:
    for name, count in (("a/x", 2), ("b/y", 3)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"\0\0\x08\1\0\0\0" + bytes([count, *range(count)]))
    (source,) = opened([str(tmp_path / "a" / "x"), str(tmp_path / "b" / "y")], tmp_path)
    assert type(source).__name__ == "Idx"
    assert [*rows(source, "label")] == [0, 1, 0, 1, 2]


def test_several_sources_keep_their_order(tmp_path: Path) -> None:
    for name in ("b.csv", "a.csv", "c.jsonl"):
        (tmp_path / name).write_bytes(CONTENTS[name[2:]])
    given = [str(tmp_path / name) for name in ("b.csv", "a.csv", "c.jsonl")]
    one, two = opened(given, tmp_path)
    assert one.files == (f"{tmp_path}/b.csv", f"{tmp_path}/a.csv")
    assert two.files == (f"{tmp_path}/c.jsonl",)


def test_the_same_file_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(CONTENTS["csv"])
    (tmp_path / "link.csv").symlink_to(tmp_path / "a.csv")
    for second in ("a.csv", "link.csv", "*.csv"):
        with pytest.raises(DataError, match="is given twice"):
            opened([str(tmp_path / "a.csv"), str(tmp_path / second)], tmp_path)


def test_images_in_folders_are_labelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dog/b.PNG", "cat/deep/c.png", "cat/a.png"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png())
    (tmp_path / "in" / "README").write_text("about")
    (tmp_path / "in" / "cat" / ".DS_Store").write_text("x")
    (source,) = opened(tmp_path / "in", tmp_path)
    assert [*rows(source, "file")] == ["cat/a.png", "cat/deep/c.png", "dog/b.PNG"]
    assert [*rows(source, "label")] == ["cat", "cat", "dog"]
    assert [*rows(source, "image")] == [png()] * 3
    assert source.notes == ("2 other files were left out (README)",)  # type: ignore[attr-defined]
    (source,) = opened(f"{tmp_path}/in/*/*.png", tmp_path)
    assert source.files == (f"{tmp_path}/in/cat",)
    monkeypatch.chdir(tmp_path)
    (source,) = opened(["in/cat/a.png", f"{tmp_path}/in/dog/b.PNG"], tmp_path)
    assert source.files == (f"{tmp_path}/in",) and [*rows(source, "label")] == ["cat", "dog"]
    (tmp_path / "in" / "labels.csv").write_bytes(CONTENTS["csv"])
    with pytest.raises(DataError, match="several formats"):
        opened(tmp_path / "in", tmp_path)
    (source,) = opened(tmp_path / "in", tmp_path, format="images")
    assert len([*rows(source, "file")]) == 3


def test_python_objects_are_sources(tmp_path: Path) -> None:
    given = [{"a": 1}, {"a": 2}]
    for source in (given, iter(given), {"a": [1, 2]}, pa.table({"a": [1, 2]})):
        (made,) = opened(source, tmp_path)
        assert [*rows(made, "a")] == [1, 2]
    (tmp_path / "a.csv").write_bytes(CONTENTS["csv"])
    first, second = opened([str(tmp_path / "a.csv"), iter(given)], tmp_path)
    assert [*rows(first, "a")] == [1, 2, 3] and [*rows(second, "a")] == [1, 2]
    with pytest.raises(DataError, match="there are no sources"):
        opened([], tmp_path)
    with pytest.raises(DataError, match="differ in length"):
        opened({"a": [1], "b": [1, 2]}, tmp_path)
