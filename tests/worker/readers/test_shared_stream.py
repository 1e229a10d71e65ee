"""One process of a host reads a stream for all its workers, and no weights show it, whatever
happens to it. What a stream gave is written down; one that gives something else is told by name."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import date
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

import manyhands as mh
from manyhands.accounting import ledger
from manyhands.accounting.ledger_lines import StreamRead, read_from
from manyhands.accounting.proof import check
from manyhands.accounting.read_digests import joined_digest, stretches, unrolled
from manyhands.data.reading.batch_bytes import PackedBatch
from manyhands.data.reading.batch_digest import batch_digest
from manyhands.data.reading.read_ahead_plan import RING_BATCHES, next_batch
from manyhands.launch.engines.fork_agent import COMPANIONS
from manyhands.launch.engines.launcher import Launcher
from manyhands.launch.engines.memory_segments import RESERVED_BYTES
from manyhands.stories.replay import replay
from manyhands.values.errors import ConfigError, ManyhandsError
from manyhands.values.machine import birth
from manyhands.values.planned_faults import FaultPlan
from manyhands.values.worker_orders import Orders
from manyhands.worker.build_worker import state_memory
from manyhands.worker.readers.shared_stream import ReaderWatch, SharedStream
from manyhands.worker.readers.stream_ring import (
    MOST_SENT_BYTES,
    RING_AT,
    CannotBeSent,
    FoundBatch,
    ReaderSigns,
    StreamRing,
    WrittenOver,
    has_ring,
)
from tests.support.who_reads import adam, build, in_worker, note, warned_in

pytestmark = pytest.mark.timeout(120)

STEPS, BATCH = 12, 12


class Record(NamedTuple):
    x: Tensor
    y: int


class Noted(IterableDataset[Record]):
    """Notes who made which record, and lets `happen` strike in the reader."""

    def __init__(self, folder: Path, happen: "Callable[[Noted, int], None] | None" = None) -> None:
        self.folder, self.happen = folder, happen
        folder.mkdir(exist_ok=True)

    def __iter__(self) -> Iterator[Record]:
        who = "worker" if in_worker() else "reader"
        k = 0
        while True:
            if self.happen is not None and not in_worker():
                self.happen(self, k)
            with open(self.folder / f"{who}-{os.getpid()}", "a") as file:
                file.write(f"{k}\n")
            yield Record(torch.sin(torch.arange(6.0) * (k + 1)) + 0.1 * torch.rand(6), k % 3)
            k += 1

    def made(self, who: str) -> list[int]:
        """Records, in whatever processes of that kind."""
        return [int(k) for p in self.folder.glob(f"{who}-*") for k in p.read_text().split()]

    def first_time(self, name: str) -> bool:
        return note(self.folder, name)


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), torch.as_tensor(y))


def task(data: Any, with_loss: Any = loss) -> mh.Task:
    return mh.Task(model=build, loss=with_loss, optimizer=adam, data=data)


def trained(
    data: Any,
    to: Path,
    launcher: Launcher,
    *settings: str,
    workers: int = 2,
    with_loss: Any = loss,
    **more: Any,
) -> tuple[str, str]:
    """The fingerprint, and what people were told."""
    report = mh.train(
        task(data, with_loss),
        to=to,
        workers=workers,
        settings=[f"train.batch={BATCH}", "train.micro_batch=3", f"train.steps={STEPS}", *settings],
        quiet=True,
        launcher=launcher,
        **more,
    )
    return report.fingerprint, warned_in(to)


@pytest.fixture(scope="module")
def calm(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> str:
    """One worker, which reads for itself."""
    folder = tmp_path_factory.mktemp("calm")
    data = Noted(folder / "notes")
    found, _ = trained(data, folder / "run", launcher, workers=1)
    assert not data.made("reader") and data.made("worker") == list(range(STEPS * BATCH))
    return found


def test_each_record_is_made_once_for_all_workers(
    calm: str, launcher: Launcher, tmp_path: Path
) -> None:
    data = Noted(tmp_path / "notes")
    found, said = trained(data, tmp_path / "run", launcher, workers=3)
    assert found == calm and not said
    assert data.made("reader") == list(range(STEPS * BATCH))
    # A worker learns what its batches are made of, and the first one compares.
    assert max(data.made("worker")) < BATCH
    assert check(ledger.read(tmp_path / "run" / "ledger.jsonl")).ok
    each = Noted(tmp_path / "each")
    found, _ = trained(each, tmp_path / "alone", launcher, "data.readers=0")
    assert found == calm and not each.made("reader")
    assert len(each.made("worker")) > (2 * STEPS - 1) * BATCH
    digests = [read_from(ledger.read(tmp_path / run / "ledger.jsonl")) for run in ("run", "alone")]
    assert digests[0] == digests[1] and list(digests[0]) == list(range(STEPS))


def killed(data: Noted, k: int) -> None:
    if k == 70 and data.first_time("killed"):
        os.kill(os.getpid(), signal.SIGKILL)


def stopped(data: Noted, k: int) -> None:
    if k == 70 and data.first_time("stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)


def always_killed(data: Noted, k: int) -> None:
    if k == 70:
        os.kill(os.getpid(), signal.SIGKILL)


def fails(data: Noted, k: int) -> None:
    if k == 70:
        raise ValueError("in the reader alone")


@pytest.mark.parametrize(
    ("happen", "said"),
    [
        (killed, "is gone; until another is there, each worker reads it"),
        (stopped, "took too long, and was ended"),  # after half of stuck_s
        (always_killed, "is gone; until another is there, each worker reads it"),
        (fails, "each worker reads the stream itself: reading failed here (ValueError"),
    ],
    ids=["killed", "hanging", "killed again and again", "failing"],
)
def test_a_reader_that_is_lost_costs_nothing_but_time(
    happen: Any, said: str, calm: str, launcher: Launcher, tmp_path: Path
) -> None:
    data = Noted(tmp_path / "notes", happen)
    patience = ["recovery.stuck_s=4"] if happen is stopped else []
    found, notices = trained(data, tmp_path / "run", launcher, *patience)
    assert found == calm
    assert said in notices
    assert check(ledger.read(tmp_path / "run" / "ledger.jsonl")).ok


def killed_and_noted(data: Noted, k: int) -> None:
    if k == 70:
        (data.folder / f"killed-{os.getpid()}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


class AfterThat:
    """The loss, which waits, when readers are to have come so far, until so many were killed."""

    def __init__(self, folder: Path, deaths: int) -> None:
        self.folder, self.deaths, self.calls = folder, deaths, 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        deadline = time.monotonic() + 60
        while self.calls >= 20 and len(list(self.folder.glob("killed-*"))) < self.deaths:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return loss(model, batch)


def test_where_no_other_reader_will_come_that_is_said(
    calm: str, launcher: Launcher, tmp_path: Path
) -> None:
    data = Noted(tmp_path / "notes", killed_and_noted)
    patient = AfterThat(data.folder, COMPANIONS)
    found, notices = trained(data, tmp_path / "run", launcher, with_loss=patient)
    assert found == calm
    assert "is gone; there will be no other, so from now on each worker reads it" in notices


def test_a_worker_that_is_lost_leaves_the_reader_where_it_is(
    calm: str, launcher: Launcher, tmp_path: Path
) -> None:
    data = Noted(tmp_path / "notes")
    faults = FaultPlan().kill(rank=0, at_step=4, at="compute").kill(rank=1, at_step=7, at="gather")
    found, _ = trained(data, tmp_path / "run", launcher, workers=2, faults=faults)
    assert found == calm
    assert data.made("reader") == list(range(STEPS * BATCH))


class Odd:
    """What cannot be sent."""

    __slots__ = ("x", "y")

    def __init__(self, records: list[Record]) -> None:
        self.x = torch.stack([r.x for r in records])
        self.y = torch.tensor([r.y for r in records])

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.x, self.y))


def test_what_cannot_be_sent_each_worker_reads(
    calm: str, launcher: Launcher, tmp_path: Path
) -> None:
    odd = mh.Task(model=build, loss=loss, optimizer=adam, data=Noted(tmp_path / "n"), collate=Odd)
    settings = [f"train.batch={BATCH}", "train.micro_batch=3", f"train.steps={STEPS}"]
    report = mh.train(
        odd, to=tmp_path / "run", workers=2, settings=settings, quiet=True, launcher=launcher
    )
    assert report.fingerprint == calm
    assert "cannot be sent as data" in warned_in(tmp_path / "run")


class Told(Noted):
    """Which tells its state."""

    position = start = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]

    def __iter__(self) -> Iterator[Record]:
        k, self.start = self.start, 0
        (self.folder / f"from-{k}-{'worker' if in_worker() else 'reader'}-{os.getpid()}").touch()
        while True:
            self.position = k + 1
            if self.happen is not None and not in_worker():
                self.happen(self, k)
            yield Record(torch.sin(torch.arange(6.0) * (k + 1)) + 0.1 * torch.rand(6), k % 3)
            k += 1


def killed_late(data: Noted, k: int) -> None:
    if k == 330 and data.first_time("killed"):
        os.kill(os.getpid(), signal.SIGKILL)


def test_states_pass_from_the_reader_to_checkpoints_and_to_the_next_reader(
    launcher: Launcher, tmp_path: Path
) -> None:
    whole, _ = trained(Told(tmp_path / "w"), tmp_path / "w1", launcher, "train.steps=40", workers=1)
    data = Told(tmp_path / "notes", killed_late)
    trained(data, tmp_path / "run", launcher, "train.steps=30")
    found = mh.resume(
        tmp_path / "run",
        task(data),
        workers=3,
        settings=["train.steps=40"],
        quiet=True,
        launcher=launcher,
    )
    assert found.fingerprint == whole
    starts = {p.name.split("-")[1] for p in data.folder.glob("from-*-reader-*")}
    assert starts == {"0", "256", "320"}, starts  # killed at 330, it goes on at 256, or at 320
    assert check(ledger.read(tmp_path / "run" / "ledger.jsonl")).ok


# ---- a stream that gives something else when it is read again


class Changing(Noted):
    """Gives what a file says."""

    def __iter__(self) -> Iterator[Record]:
        shift = float((self.folder / "shift").read_text())
        k = 0
        while True:
            yield Record(torch.full((6,), shift + (k + 1) / 100), k % 3)
            k += 1


def changing(folder: Path, shift: str = "0") -> Changing:
    data = Changing(folder)
    (folder / "shift").write_text(shift)
    return data


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stream_that_has_changed_is_told_when_a_run_goes_on(
    workers: int, launcher: Launcher, tmp_path: Path
) -> None:
    data, run = changing(tmp_path / "notes"), tmp_path / "run"
    trained(data, run, launcher, "train.steps=6", workers=workers)

    def resume() -> str:
        settings = ["train.steps=8"]
        return mh.resume(
            run, task(data), workers=workers, settings=settings, quiet=True, launcher=launcher
        ).fingerprint

    changing(tmp_path / "notes", "1")
    with pytest.raises(ManyhandsError, match=r"other values for step 5, records 60 to 71, than"):
        resume()
    again = replay(run, task(data), step=3, to=6, launcher=launcher)
    assert "step 3: the stream gave other records 36 to 47 than then" in again.differences
    changing(tmp_path / "notes")
    assert replay(run, task(data), step=3, to=6, launcher=launcher).same
    assert resume() == trained(data, tmp_path / "whole", launcher, "train.steps=8", workers=1)[0]


class EachItsOwn(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        k = 0
        while True:
            yield torch.full((6,), float(os.getpid() + k)), k % 3
            k += 1


@pytest.mark.parametrize("readers", ["auto", "0"])
def test_a_stream_that_depends_on_the_process_is_told(
    readers: str, launcher: Launcher, tmp_path: Path
) -> None:
    words = {"auto": "gives other records to the process", "0": "other values for step 0, records"}
    with pytest.raises(ManyhandsError, match=words[readers]):
        trained(EachItsOwn(), tmp_path / "run", launcher, f"data.readers={readers}")


# ---- pieces


@pytest.mark.parametrize(
    ("wanted", "start", "held", "found"),
    [
        (0, 0, range(0), 0),
        (0, 0, range(0, 1), 1),
        (0, 0, range(0, 2), None),  # it is a batch ahead
        (1, 0, range(0, 2), 2),
        (4, 3, range(2, 5), 5),
        (3, 2, range(2, 5), None),
        (1, 0, range(2, 5), 0),  # workers went back
        (9, 8, range(2, 5), 8),  # ... or are far ahead
        (5, 5, range(2, 5), 5),
    ],
)
def test_which_batch_is_read_next(wanted: int, start: int, held: range, found: int | None) -> None:
    assert next_batch(wanted, start, held) == found


def test_the_ring_gives_what_was_put_and_nothing_else() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 1 << 46)
    reader, worker = StreamRing(fd, 4), StreamRing(fd, 4)
    reader.begin_reading()
    assert worker.signs().pid == os.getpid() and worker.wanted() is None and not worker.crowded
    worker.want(3, 1, 7)
    worker.want(0, 2, 5)  # a later view counts, though it is at an earlier batch
    worker.want(0, 2, 4)
    assert reader.wanted() == 5
    worker.present[[0, 2]] = 1
    assert reader.crowded
    batch = {"x": torch.arange(5.0), "name": "ä"}
    for index in range(4):
        reader.put(5, index, PackedBatch(batch), 7 + index)
    found = worker.find(5, 2, {})
    assert isinstance(found, FoundBatch) and found.digest == 9
    assert batch_digest(found.batch) == batch_digest(batch)
    assert worker.find(5 + RING_BATCHES, 2, {}) is None
    assert worker.digests(5, 4) == [7, 8, 9, 10] and worker.digests(4, 4) is None
    reader.put_nothing(5 + RING_BATCHES, 2, "a set")
    assert worker.find(5, 2, {}) is None and worker.digests(5, 4) is None
    assert worker.find(5 + RING_BATCHES, 2, {}) == CannotBeSent("a set")
    reader.put_state(5, [0, 3, [0, 3], {"a": 1}])
    worker.put_saved(1, [0, 2, [0, 2], None])
    assert worker.state_after(5) == [0, 3, [0, 3], {"a": 1}] and worker.state_after(4) is None
    assert reader.states() == [[0, 2, [0, 2], None], [0, 3, [0, 3], {"a": 1}]]
    reader.give_up("no")
    assert worker.signs().unable and worker.why() == "no"
    os.close(fd)


@pytest.fixture
def rings() -> Iterator[tuple[StreamRing, StreamRing]]:
    """A reader's, and a worker's."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, RESERVED_BYTES)
    yield StreamRing(fd, 4), StreamRing(fd, 4)
    os.close(fd)


@pytest.mark.parametrize(
    ("size", "header"),
    [
        (1 << 60, 10),
        (10, 1 << 60),
        ((1 << 63) - 1, (1 << 63) - 1),
        (-7, 10),
        (10, -7),
        (-1, 1 << 60),  # as if it could not be sent
        (MOST_SENT_BYTES, 1),
        (0, 0),  # no header
        (0, 10),  # a header that is none
    ],
)
def test_sizes_that_cannot_be_are_nonsense_and_workers_read_it_themselves(
    size: int, header: int, rings: tuple[StreamRing, StreamRing]
) -> None:
    reader, ring = rings
    reader.begin_reading()
    reader.put(5, 2, PackedBatch({"x": torch.ones(5)}), 7)
    reader.slots[5 % RING_BATCHES * 4 + 2, 1:3] = size, header
    assert isinstance(ring.find(5, 2, {}), WrittenOver)
    said: list[str] = []
    shared = SharedStream(
        ring,
        cast(Any, SimpleNamespace(batch_number=lambda step: 5)),
        cast(Any, None),
        order=0,
        stuck_s=60,
        tell=said.append,
        prove=lambda cut, digest: None,
    )
    ring.present[:2] = 1
    assert shared.take(cast(Any, None), 2) is None
    assert said == ["what the stream's reader left in memory was written over; workers read it"]


def test_a_state_in_the_ring_that_cannot_be_is_none(rings: tuple[StreamRing, StreamRing]) -> None:
    reader, worker = rings
    worker.put_saved(1, [0, 2, [0, 2], None])
    assert reader.saved() == [0, 2, [0, 2], None]
    words = np.frombuffer(worker._head, np.int64, 2, worker._texts[0])
    for length in (1 << 60, -7, 3):
        words[1] = length
        assert reader.saved() is None and reader.states() == []


def reader_signs(pid: int, began: int) -> ReaderSigns:
    return ReaderSigns(1, pid, 0, 0, 0, 1, False, 3, began)


@pytest.mark.parametrize(
    "other", ["reader", "began later", "of another parent", "gone", "nonsense"]
)
def test_a_process_that_got_the_readers_number_is_not_killed(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        began = birth(sleeping.pid).began
        signs = reader_signs(sleeping.pid, began - (other == "began later"))
        if other != "of another parent":
            monkeypatch.setattr(os, "getppid", os.getpid)
        if other == "gone":
            sleeping.kill()
            sleeping.wait()
        if other == "nonsense":
            signs = reader_signs(1 << 60, began)
        with closing(ReaderWatch()) as watch:
            watch.look(signs, 1.0)
            assert (watch.gone_since is None) == (other == "reader")
            watch.end()
        if other in ("reader", "gone"):
            assert sleeping.wait() == -signal.SIGKILL
        else:
            assert sleeping.poll() is None
            sleeping.kill()


def few_orders(fd: int, *, micro_batches: int = 4, **given: Any) -> Orders:
    train = SimpleNamespace(micro_batches=micro_batches)
    known = {"collective": "shared", "stream": True, "state_fd": fd, **given}
    return cast(Orders, SimpleNamespace(config=SimpleNamespace(train=train), **known))


def test_the_state_never_reaches_the_ring() -> None:
    fd = os.memfd_create("test")
    memory = state_memory(few_orders(fd))
    memory.shelf(1 << 10, RING_AT >> 10)  # just below it
    with pytest.raises(ConfigError, match=r"takes 35.2 TB or more .* set data.readers = 0"):
        memory.shelf(1, 1)
    assert state_memory(few_orders(fd, stream=False)).shelf(2, RING_AT).offset == 0
    assert not state_memory(few_orders(fd, collective="gloo")).shared
    os.close(fd)


def test_there_is_no_ring_where_its_slots_would_not_fit() -> None:
    most = (RESERVED_BYTES - RING_AT) // (RING_BATCHES * 2 * MOST_SENT_BYTES)
    assert has_ring(few_orders(0, micro_batches=most - 1))  # and one for the last record
    assert not has_ring(few_orders(0, micro_batches=most))


def test_digests_are_of_values_and_not_of_how_they_lie() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    same = {"x": x, "s": ["a", None, 1 << 70], "n": np.float32(2)}
    other = {"x": x.t().contiguous().t(), "s": ["a", None, 1 << 70], "n": np.float32(2)}
    assert batch_digest(same) == batch_digest(other)
    changed = [
        {**same, "x": x.reshape(4, 3)},
        {**same, "x": x.double()},
        {**same, "x": -x},
        {**same, "s": ["a", 1 << 70, None]},
        {**same, "n": 2.0},
        {"s": same["s"], "x": x, "n": same["n"]},
        [x, same["s"]],
    ]
    assert len({batch_digest(b) for b in (same, *changed)}) == 1 + len(changed)
    special = [x.bfloat16(), -x.to_sparse(), x.requires_grad_(), torch.empty(0), np.array(["a"])]
    assert len({batch_digest(b) for b in special}) == len(special)
    assert joined_digest([3, 4]) != joined_digest([4, 3]) and joined_digest([3, 0]) == 0


class Slotted:
    __slots__ = ("me", "value")

    def __init__(self, value: int) -> None:
        self.value, self.me = value, self


def test_digests_look_at_dates_sets_and_slots_and_come_back_from_what_lies_in_itself() -> None:
    row = [1.0, Slotted(3)]
    row.append(row)
    masked = np.ma.array([1, 2], mask=[False, True])
    values = [row, Slotted(4), date(2026, 1, 1), Decimal("1.5"), {1, 2}, range(3), bytearray(b"a")]
    others = [Slotted(3), date(2026, 1, 2), Decimal("1.50"), {1, 3}, range(4), bytearray(b"b")]
    others += [masked, np.ma.array([1, 2], mask=False)]
    assert len({batch_digest(b) for b in (*values, *others)}) == len(values) + len(others)
    assert batch_digest(Slotted(4)) == batch_digest(values[1])


@pytest.mark.parametrize(("first", "told"), [(0, "xyz"), (0, "0" * 11), (-1, "0" * 12), (0, "")])
def test_a_damaged_line_of_the_ledger_is_named(first: int, told: str) -> None:
    (problem,) = check([ledger.Opened(100, 10, 5, 0), StreamRead(first, told)]).problems
    assert problem.startswith("line 2: digests from step")


def test_the_ledger_keeps_what_was_read_and_says_when_that_differs(tmp_path: Path) -> None:
    digests = {3: 1, 4: (1 << 48) - 1, 6: 5}
    rows = stretches(digests)
    assert [first for first, _ in rows] == [3, 6]
    assert {s: d for row in rows for s, d in unrolled(*row).items()} == digests
    opened = ledger.Opened(100, 10, 5, 0)
    first, other = (StreamRead(3, stretches({3: d})[0][1]) for d in (7, 8))
    assert check([opened, first, first]).ok
    (problem,) = check([opened, first, other]).problems
    assert problem == "line 3: the stream gave step 3 other records than in line 2."
