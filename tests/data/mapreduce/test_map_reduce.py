"""Checkpointed tasks, the external shuffle, and map_reduce on top of sorted runs."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.mapreduce import external_shuffle
from manyhands.data.mapreduce.external_shuffle import KEY, bucket_of, buckets_for, gather, spill
from manyhands.data.mapreduce.external_sort import Sorter, merged, ranges
from manyhands.data.mapreduce.function_digest import function_digest
from manyhands.data.mapreduce.map_reduce import map_reduce
from manyhands.data.mapreduce.plain_values import decode, encode, key_bytes, key_value
from manyhands.data.mapreduce.resumable_tasks import DataTask, PhaseProgress, TaskRunner
from manyhands.values.errors import DataDamaged, DataError

# ---- tasks


class Square(msgspec.Struct):
    n: int


def note(log: Path, text: str) -> None:
    """An effect that can be counted, from any process."""
    with log.open("a") as file:
        file.write(f"{text}\n")


def noted(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


def square(n: int, log: Path) -> Square:
    note(log, str(n))
    return Square(n * n)


def fails(n: int, log: Path, bad: tuple[int, ...]) -> Square:
    if n in bad:
        raise ValueError(f"cannot do {n}")
    return square(n, log)


def dies(n: int, log: Path, times: int) -> Square:
    """Kills its own process the first `times` times."""
    note(log, str(n))
    if noted(log).count(str(n)) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return Square(n * n)


class SubmitOnly:
    """The least an executor can be: at once, and right here."""

    def __init__(self) -> None:
        self.calls = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.calls += 1
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Counting:
    """Knows how many calls it was given that have not ended."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(1)
        self.waiting = 0
        self.peak = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.waiting += 1
        self.peak = max(self.peak, self.waiting)
        future = self.threads.submit(fn, *args, **kwargs)
        future.add_done_callback(lambda _: setattr(self, "waiting", self.waiting - 1))
        return future


def squares(log: Path, n: int, key: str = "") -> list[DataTask]:
    return [DataTask(f"{i:03}", square, (i, log), nbytes=10, key=key) for i in range(n)]


@pytest.mark.parametrize("how", ["inline", "processes", "threads", "submit only"])
def test_results_come_in_order_and_are_kept(tmp_path: Path, how: str) -> None:
    log, seen = tmp_path / "log", list[PhaseProgress]()
    with ThreadPoolExecutor(3) as threads:
        executor = {"threads": threads, "submit only": SubmitOnly()}.get(how)
        workers = 1 if how == "inline" else 2
        with TaskRunner(
            tmp_path, workers=workers, executor=executor, progress=seen.append
        ) as runner:
            for n in (7, 9):
                results = runner.do("square", squares(log, n), Square)
                assert [r.n for r in results] == [i * i for i in range(n)]
    assert sorted(noted(log)) == sorted(str(i) for i in range(9))
    assert seen[-1] == PhaseProgress("square", 9, 9, 90, 90)


def test_another_key_or_a_damaged_checkpoint_is_done_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with TaskRunner(tmp_path, workers=1) as runner:
        runner.do("square", squares(log, 3, "a"), Square)
        runner.do("square", squares(log, 3, "b"), Square)
        assert len(noted(log)) == 6
        (tmp_path / "square" / "001.done").write_bytes(b"\x93half")
        runner.do("square", squares(log, 3, "b"), Square)
    assert noted(log)[6:] == ["1"]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_failure_is_named_and_the_rest_is_kept(tmp_path: Path, workers: int) -> None:
    log = tmp_path / "log"
    jobs = [DataTask(f"{i:03}", fails, (i, log, (5, 6))) for i in range(40)]
    with TaskRunner(tmp_path, workers=workers) as runner:
        with pytest.raises(DataError, match="cannot do 5") as caught:
            runner.do("fail", jobs, Square)
        assert "task 005" in str(caught.value) and "test_map_reduce.py" in str(caught.value)
        assert len(noted(log)) < 38, "what had not begun was cancelled"
        done = [DataTask(j.name, fails, (i, log, ())) for i, j in enumerate(jobs)]
        assert [r.n for r in runner.do("fail", done, Square)] == [i * i for i in range(40)]
    assert sorted(map(int, noted(log))) == list(range(40))


def test_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    log = tmp_path / "log"
    jobs = [DataTask(f"{i:03}", dies, (i, log, int(i in (3, 9)))) for i in range(12)]
    with TaskRunner(tmp_path, workers=2) as runner:
        assert [r.n for r in runner.do("die", jobs, Square)] == [i * i for i in range(12)]


def test_a_task_that_always_kills_its_worker_is_named(tmp_path: Path) -> None:
    log = tmp_path / "log"
    jobs = [DataTask(f"{i:03}", dies, (i, log, 99 if i == 4 else 0)) for i in range(8)]
    died = pytest.raises(DataError, match=r"task 004 died twice .* is kept")
    with TaskRunner(tmp_path, workers=2) as runner, died:
        runner.do("die", jobs, Square)
    assert (tmp_path / "die" / "000.done").exists()
    assert noted(log).count("4") == 3  # with others, and twice alone


def test_a_broken_executor_of_others_is_told(tmp_path: Path) -> None:
    class Broken(SubmitOnly):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            if self.calls == 2:
                raise BrokenExecutor("the cluster went away")
            return super().submit(fn, *args, **kwargs)

    gone = pytest.raises(DataError, match="that ran task 002 died")
    with TaskRunner(tmp_path, workers=2, executor=Broken()) as runner, gone:
        runner.do("square", squares(tmp_path / "log", 4), Square)
    assert (tmp_path / "square" / "001.done").exists()


def test_only_a_few_jobs_are_under_way(tmp_path: Path) -> None:
    counting = Counting()
    with TaskRunner(tmp_path, workers=2, executor=counting) as runner:
        runner.do("square", squares(tmp_path / "log", 30), Square)
    counting.threads.shutdown()
    assert counting.peak <= 4


def test_what_cannot_be_sent_is_said(tmp_path: Path) -> None:
    lock, refused = Lock(), pytest.raises(DataError, match="cannot be sent")
    with TaskRunner(tmp_path, workers=2) as runner, refused:
        runner.do("x", [DataTask(n, lambda: lock) for n in "ab"], Square)


# ---- a script of somebody, in a process of its own; without `if __name__ == "__main__"`

SCRIPT = """
import os, sys, time
from pathlib import Path
from manyhands.data.mapreduce.map_reduce import map_reduce

log, to, slow = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
with open(log, "a") as file:
    file.write("start\\n")

def letters(word):
    with open(log, "a") as file:
        file.write(word + "\\n")
    time.sleep(slow)
    return [[c, word] for c in word[:7]]

def count(letter, pairs):
    found = [word for _, word in pairs]
    return {"letter": letter, "first": found[0], "last": found[-1], "count": len(found)}

words = [f"word{i}" + "abcdefgh"[i % 8] * (i % 5) + "-" * 100 for i in range(1500)]
map_reduce(words, map=letters, key=lambda pair: pair[0], reduce=count, workers=2,
           memory="64KiB", to=to)
"""


def start(folder: Path, to: Path, slow: float = 0.0) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    args = [sys.executable, str(script), str(folder / "log"), str(to), str(slow)]
    return subprocess.Popen(args, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for(folder: Path, lines: int, process: subprocess.Popen[str]) -> bool:
    """Until the log has this many lines; False when the process ended before."""
    while len(noted(folder / "log")) < lines:
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    return True


def nobody_left(process: subprocess.Popen[str]) -> bool:
    """Whether every process of the session has ended."""
    for _ in range(1000):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("calm")
    process = start(folder, folder / "to")
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    log = noted(folder / "log")
    assert log.count("start") == 1, "workers must not run the script"
    assert len(log) == 1501
    return contents(folder / "to")


def test_a_killed_driver_goes_on_where_it_was(tmp_path: Path, calm: dict[str, bytes]) -> None:
    to, log = tmp_path / "to", tmp_path / "log"
    for lines in (3, 400, 900, 10**9):
        chunks = [int(p.name[:12]) for p in sorted((to / ".work" / "source").glob("[0-9]*.run"))]
        sizes = [b - a for a, b in pairwise([*chunks, 1500])]
        done = sum(sizes[int(p.stem)] for p in (to / ".work" / "map").glob("*.done"))
        before = len(noted(log))
        process = start(tmp_path, to)
        if wait_for(tmp_path, before + lines, process):
            process.kill()
        process.communicate()
        assert nobody_left(process), "workers must end with the driver"
        assert len(noted(log)) - before - 1 <= 1500 - done, "a finished task was done again"
    assert contents(to) == calm


def test_ctrl_c_leaves_no_process_and_keeps_what_is_done(
    tmp_path: Path, calm: dict[str, bytes]
) -> None:
    process = start(tmp_path, tmp_path / "to", slow=0.001)
    assert wait_for(tmp_path, 300, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, errors = process.communicate()
    assert "KeyboardInterrupt" in errors and nobody_left(process)
    assert "Process" not in errors, "workers say nothing"
    assert list((tmp_path / "to" / ".work" / "map").glob("*.done"))
    again = start(tmp_path, tmp_path / "to")
    again.communicate()
    assert again.returncode == 0
    assert contents(tmp_path / "to") == calm


# ---- shuffle


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20), st.integers(1, 2**31 - 1))
def test_buckets_are_equal_ranges_exactly(keys: list[int], n: int) -> None:
    edges = [0, 2**64 - 1, 2**63, *(-(-(b * 2**64) // n) for b in range(1, min(n, 5)))]
    keys += [k + d for k in edges for d in (-1, 0, 1) if 0 <= k + d < 2**64]
    found = bucket_of(np.array(keys, dtype=np.uint64), n)
    assert found.tolist() == [k * n >> 64 for k in keys]


def test_how_many_buckets() -> None:
    assert buckets_for([0, 1, 100, 101], 100) == [1, 1, 1, 2]


def rows(n: int, seed: int) -> tuple[pa.Table, Any, Any]:
    random = np.random.default_rng(seed)
    words = [None if i % 7 == 0 else "w" * (i % 11) for i in range(n)]
    lists = [list(range(i % 4)) if i % 5 else None for i in range(n)]
    flat = pa.array(random.random(n * 3, dtype=np.float32))
    table = pa.table(
        {
            "_id": pa.array(range(n), pa.int64()),
            "x": pa.FixedSizeListArray.from_arrays(flat, 3),
            "word": pa.array(words, pa.string()),
            "raw": pa.array([w and w.encode() for w in words], pa.binary()),
            "list": pa.array(lists, pa.list_(pa.int32())),
            "flag": pa.array([i % 3 == 0 for i in range(n)]),
        }
    )
    keys = random.permutation(np.arange(n, dtype=np.uint64) * np.uint64((1 << 64) // (n + 2)))
    return table, random.integers(0, 2, n).astype(np.int8), keys


def shuffled(
    folder: Path,
    table: pa.Table,
    splits: Any,
    keys: Any,
    cuts: list[int],
    buckets: list[int],
) -> list[pa.Table]:
    """Each split's rows, after both passes."""
    bounds = sorted({0, len(keys), *(c % (len(keys) + 1) for c in cuts)})
    paths: list[Path] = []
    for start, stop in zip(bounds, [*bounds[1:], len(keys)], strict=True):
        here = slice(start, stop)
        path = folder / f"{len(paths)}.spill"
        spill(path, table.slice(start, stop - start), splits[here], keys[here], buckets)
        paths.append(path)
    return [
        pa.concat_tables([gather(paths, split, b) for b in range(n)])
        for split, n in enumerate(buckets)
    ]


@settings(max_examples=30)
@given(
    n=st.integers(0, 60),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    buckets=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_the_order_depends_on_the_keys_alone(
    tmp_path_factory: pytest.TempPathFactory,
    n: int,
    cuts: list[int],
    buckets: tuple[int, int],
) -> None:
    table, splits, keys = rows(n, seed=n)
    folder = tmp_path_factory.mktemp("spills")
    found = shuffled(folder, table, splits, keys, cuts, list(buckets))
    for split, got in enumerate(found):
        mine = np.flatnonzero(splits == split)
        expected = table.take(pa.array(mine[np.argsort(keys[mine])], pa.int64()))
        assert got.drop_columns([KEY]).equals(expected)
        assert got.column(KEY).to_pylist() == sorted(keys[mine].tolist())


def test_columns_too_large_for_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, splits, keys = rows(200, seed=1)
    table = pa.concat_tables([table.slice(0, 90), table.slice(90)])
    expected = shuffled(tmp_path, table, splits, keys, [50], [3, 2])
    monkeypatch.setattr(external_shuffle, "LIMIT", 100)
    for got, want in zip(
        shuffled(tmp_path, table, splits, keys, [50], [3, 2]), expected, strict=True
    ):
        assert got.equals(want)


def test_many_spill_files_need_few_open_files(tmp_path: Path) -> None:
    table, splits, keys = rows(300, seed=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        found = shuffled(tmp_path, table, splits, keys, list(range(300)), [2, 2])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sum(t.num_rows for t in found) == 300


@pytest.mark.parametrize("damage", ["flip", "cut", "tail", "gone", "other columns"])
def test_a_damaged_spill_file_is_named(tmp_path: Path, damage: str) -> None:
    table, splits, keys = rows(50, seed=3)
    paths = [tmp_path / "a.spill", tmp_path / "b.spill"]
    for path in paths:
        spill(path, table, splits, keys, [1, 1])
    whole = bytearray(paths[1].read_bytes())
    if damage == "flip":
        whole[len(whole) // 2] ^= 1
        paths[1].write_bytes(whole)
    elif damage == "cut":
        paths[1].write_bytes(whole[: len(whole) // 2])
    elif damage == "tail":
        paths[1].write_bytes(whole[:-20])
    elif damage == "gone":
        paths[1].unlink()
    else:
        spill(paths[1], table.drop_columns(["flag"]), splits, keys, [1, 1])
    with pytest.raises(DataDamaged, match=r"b\.spill is not what was written"):
        for split in range(2):
            gather(paths, split, 0)


# ---- values and sorted runs

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.binary(max_size=4)
)
KEYS = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.tuples(inner), max_leaves=5)


def rank(key: Any) -> Any:
    """Python's own comparison, with kinds one after the other."""
    if isinstance(key, tuple):
        return (6, [rank(k) for k in key])
    kinds: list[type] = [type(None), bool, int, float, str, bytes]
    kind = kinds.index(type(key))
    return (min(kind, 2) if kind < 4 else kind, 0 if key is None else key)


@given(KEYS, KEYS)
def test_the_bytes_of_keys_sort_as_keys_do(a: Any, b: Any) -> None:
    left, right = key_bytes(a), key_bytes(b)
    assert (left < right, left == right) == (rank(a) < rank(b), rank(a) == rank(b))
    assert key_value(left) == a and type(key_value(left)) in (type(a), int)


def test_equal_numbers_are_one_key() -> None:
    assert key_bytes(2) == key_bytes(2.0) == key_bytes(np.float32(2)) != key_bytes(True)
    assert key_bytes(0.0) == key_bytes(-0.0)
    assert key_bytes(float("nan")) == key_bytes(-float("nan")) > key_bytes(float("inf"))


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.integers(0, 5) | st.integers(0, 1000), max_size=40), max_size=6),
    st.integers(1, 20000),
    st.integers(300, 9000),
)
def test_runs_cut_in_any_ranges_are_a_stable_sort(
    tmp_path_factory: pytest.TempPathFactory,
    lists: list[list[int]],
    share: int,
    memory: int,
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    pairs = [
        [(key_bytes(k), encode([i, j])) for j, k in enumerate(keys)] for i, keys in enumerate(lists)
    ]
    runs: list[Any] = []
    for i, some in enumerate(pairs):
        sorter = Sorter(folder, str(i), memory)
        for key, value in some:
            sorter.add(key, value)
        runs += sorter.finish()
    expected = sorted((p for some in pairs for p in some), key=lambda p: p[0])
    assert list(merged(folder, runs)) == expected
    assert [p for part in ranges(runs, share) for p in part.pairs(folder)] == expected


# ---- map_reduce

TEXT = """Call me Ishmael. Some years ago, never mind how long precisely, having little or no money
in my purse, and nothing particular to interest me on shore, I thought I would sail about a little
and see the watery part of the world.""".splitlines()


def words(line: str) -> Iterator[str]:
    for word in line.lower().split():
        yield word.strip(".,")


def itself(record: Any) -> Any:
    return record


def count(key: Any, records: Iterator[Any]) -> list[Any]:
    return [[key, sum(1 for _ in records)]]


def expected_words() -> list[list[Any]]:
    found = Counter(word for line in TEXT * 40 for word in words(line))
    return [[word, n] for word, n in sorted(found.items())]


@pytest.mark.parametrize(
    ("workers", "memory"), [(1, "64KiB"), (2, "64KiB"), (4, "64KiB"), (2, "1GiB")]
)
def test_words_are_counted(workers: int, memory: str) -> None:
    found = map_reduce(TEXT * 40, words, count, itself, workers=workers, memory=memory)
    assert found == expected_words()


@pytest.mark.parametrize("kind", ["threads", "submit only"])
def test_executors_of_others(kind: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        executor = threads if kind == "threads" else SubmitOnly()
        found = map_reduce(
            TEXT * 40, words, count, itself, executor=executor, memory="64KiB", work=tmp_path
        )
    assert found == expected_words()
    assert not list(tmp_path.iterdir())


def test_two_relations_are_joined() -> None:
    users = [{"user": i, "name": f"n{i}"} for i in range(0, 50, 2)]
    visits = [{"user": float(i % 50), "page": f"p{i}"} for i in range(200)]

    def join(user: int, records: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        found = list(records)
        names = [r["name"] for r in found if "name" in r]
        for name in names:
            for r in found:
                if "page" in r:
                    yield {"name": name, "page": r["page"]}

    found = map_reduce([*users, *visits], None, join, lambda r: r["user"], workers=1)
    assert found == [
        {"name": f"n{u}", "page": f"p{u + 50 * k}"} for u in range(0, 50, 2) for k in range(4)
    ]


def test_left_out_functions() -> None:
    numbers = [3, 1, None, 2, 1]
    assert map_reduce(numbers) == numbers
    assert map_reduce(numbers, lambda n: n and -n) == [-3, -1, -2, -1]
    assert map_reduce([3, 1, 2], key=itself) == [1, 2, 3]
    assert map_reduce([3, 1, 2], reduce=lambda _, ns: sum(ns)) == [6]
    assert map_reduce([]) == []
    assert map_reduce((n for n in range(3)), lambda n: range(n)) == [0, 0, 1]
    assert map_reduce([[1, 2], [3, 4]], lambda r: (r[0], b"x")) == [[1, b"x"], [3, b"x"]]


def test_one_key_larger_than_memory_streams() -> None:
    """The records of a key are read once, and need not be read to the end."""
    records = [f"{i:04}" + "x" * 200 for i in range(1000)]

    def first_three(_: Any, found: Iterator[str]) -> list[str]:
        assert iter(found) is found
        return [next(found)[:4] for _ in range(3)]

    found = map_reduce(
        records, None, first_three, lambda r: len(r) + int(r[3] == "9"), memory="64k"
    )
    assert found == ["0000", "0001", "0002", "0009", "0019", "0029"]


@pytest.mark.parametrize("work", [None, "work"])
def test_results_go_to_a_folder(tmp_path: Path, work: str | None) -> None:
    to = map_reduce(
        TEXT * 40, words, count, itself, workers=1, memory="64KiB",
        to=tmp_path / "to", work=work and tmp_path / work,
    )  # fmt: skip
    assert to == tmp_path / "to"
    listed = json.loads((tmp_path / "to" / "results.json").read_text())
    files = [tmp_path / "to" / part["file"] for part in listed["parts"]]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert lines == expected_words()
    assert sorted(p.name for p in to.iterdir()) == sorted(
        [f.name for f in files] + ["results.json"]
    )
    with pytest.raises(DataError, match="holds finished results"):
        map_reduce(TEXT, to=to)
    with pytest.raises(DataError, match="not empty"):
        map_reduce(TEXT, to=tmp_path)


@pytest.mark.parametrize("memory", ["256KiB", "1GiB"])
def test_rows_of_files_are_records(tmp_path: Path, memory: str) -> None:
    """A column has one type in all files, wherever they are cut: here 7 is text, because of A."""
    lines = [f"{i},{i % 7 if i < 5000 else 'A'},2024-01-0{1 + i % 9}" for i in range(6000)]
    for name, part in (("a.csv", lines[:3000]), ("b.csv", lines[3000:])):
        (tmp_path / name).write_text("\n".join(["n,code,day", *part]) + "\n")

    def total(code: str, rows: Iterator[dict[str, Any]]) -> list[Any]:
        found = list(rows)
        return [[code, sum(r["n"] for r in found), min(r["day"] for r in found)[:10]]]

    expected = [[str(code), sum(range(code, 5000, 7)), "2024-01-01"] for code in range(7)] + [
        ["A", sum(range(5000, 6000)), "2024-01-01"]
    ]
    for source in (str(tmp_path / "*.csv"), [tmp_path / "a.csv", tmp_path / "b.csv"]):
        found = map_reduce(source, None, total, lambda r: r["code"], workers=1, memory=memory)
        assert found == expected
    with pytest.raises(DataError, match=r"b\.csv, record 12: .*\n.*in <lambda>"):
        map_reduce(tmp_path / "b.csv", lambda r: 1 // (r["n"] - 3011), workers=1)


def killer(record: list[Any]) -> list[Any]:
    """Kills its process once."""
    number, log = record[0], Path(record[1])
    if number == 700 and not log.exists():
        note(log, "dying")
        os.kill(os.getpid(), signal.SIGKILL)
    return [[number % 7, number]]


def test_a_killed_worker_changes_nothing(tmp_path: Path) -> None:
    records = [[i, str(tmp_path / "log")] for i in range(1500)]
    found = map_reduce(
        records, killer, lambda k, rs: [[k, sum(n for _, n in rs)]], lambda r: r[0],
        workers=2, memory="64KiB",
    )  # fmt: skip
    assert (tmp_path / "log").exists()
    assert found == [[k, sum(range(k, 1500, 7))] for k in range(7)]


def explode(record: Any) -> Any:
    return 1 // record


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: map_reduce([3, 2, 0], explode), r"map failed at record 3: 0\n.*in explode"),
        (lambda: map_reduce([1, 0], key=explode), r"key failed at record 2: 0\n.*in explode"),
        (lambda: map_reduce([1, 0], None, lambda k, r: explode(k), itself), "failed at key 0"),
        (lambda: map_reduce([1, datetime(2024, 1, 1)]), "record 2 of the source is .*datetime"),
        (lambda: map_reduce([1], lambda r: {"a": [1, object()]}), r"record 1 .* object at \['a'\]"),
        (lambda: map_reduce([1], key=lambda r: [1]), "key of record 1 is .* list; give a tuple"),
        (lambda: map_reduce([1], reduce=lambda k, r: 2**70), "result for the key None"),
        (lambda: map_reduce([1], lambda r: {1, 2}), "has no order"),
        (lambda: map_reduce(iter_fails()), r"source failed at record 2:\n.*in iter_fails"),
        (lambda: map_reduce([1], memory="lots"), "is not a size"),
    ],
)
def test_errors_name_the_record_and_the_line(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(DataError, match=f"(?s){says}"):
        call()


@pytest.mark.parametrize("value", [b"bytes", float("nan"), {1: 2}])
def test_what_json_has_no_word_for_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(DataError, match="the result for the key"):
        map_reduce([1], lambda r: [value], to=tmp_path / "to")


def iter_fails() -> Iterator[int]:
    yield 1
    raise OSError("the well is dry")


def test_a_changed_function_is_noticed() -> None:
    def with_closure(n: int) -> Callable[[int], int]:
        return lambda x: x + n

    assert function_digest(with_closure(1)) == function_digest(with_closure(1))
    assert function_digest(with_closure(1)) != function_digest(with_closure(2))
    assert function_digest(str.split) != function_digest(str.upper)
    assert function_digest(None, words) != function_digest(words, None)
    digests = {function_digest(f) for f in (lambda x: x + 1, lambda x: x - 1, explode, itself)}
    assert len(digests) == 4


def test_plain_values_come_back() -> None:
    value = {"a": [1, 2.5, None, True, b"x", "y"], "b": {"c": []}, 3: np.float32(0.5)}
    assert decode(encode(value)) == value
