"""Readers fetch ahead, and the weights do not show it: however many, and whatever befalls them."""

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

import manyhands as mh
from manyhands.accounting.deal_micro_batches import steps_per_epoch
from manyhands.data.open_data import open_data
from manyhands.data.ordering.epoch_order import order
from manyhands.data.reading.micro_batch_feed import MicroBatchFeed
from manyhands.data.reading.read_ahead_plan import LOST_IN_A_ROW, FetchJob
from manyhands.launch.engines.launcher import Launcher
from manyhands.launch.engines.nursery import Nursery
from manyhands.training.compute.seeds import seed_everything
from manyhands.values.errors import ManyhandsError
from manyhands.values.planned_faults import FaultPlan
from manyhands.worker.readers import reader_process
from manyhands.worker.readers.reading_crew import MISSING, ReadingCrew
from manyhands.worker.readers.slot_memory import BatchMissing, FetchOrder, SlotMemory, create_slots
from tests.support.who_reads import adam, build, in_worker, net, note, warned_in

pytestmark = pytest.mark.timeout(120)

RECORDS, SEED = 50, 5
CUT = ["train.batch=12", "train.micro_batch=2", "train.epochs=2", f"train.seed={SEED}"]


class Sample(NamedTuple):
    x: Tensor
    y: int
    name: str


class Drawn:
    """Draws from all three sources of randomness, and lets `happen` strike in readers."""

    def __init__(self, folder: Path, happen: "Callable[[Drawn, int], None] | None" = None) -> None:
        self.folder, self.happen = folder, happen

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, k: int) -> Sample:
        if not in_worker():
            self.note(f"reader-{os.getpid()}")
            if self.happen is not None:
                self.happen(self, k)
        drawn = torch.rand(6) + random.random() + float(np.random.rand())
        return Sample(drawn + k / 10, k % 3, f"record {k}")

    def note(self, name: str) -> bool:
        return note(self.folder, name)


def loss(model: nn.Module, batch: Sample) -> Tensor:
    assert type(batch) is Sample and batch.name[0].startswith("record")
    return F.cross_entropy(model(batch.x), torch.as_tensor(batch.y))


class Patient:
    """The loss, which waits (in the worker's n-th micro-batch) until something was noted: on a busy
    machine a reader may otherwise come too late to be needed."""

    def __init__(self, folder: Path, *awaited: str) -> None:
        self.folder, self.awaited, self.calls = folder, awaited, 0

    def __call__(self, model: nn.Module, batch: Sample) -> Tensor:
        deadline = time.monotonic() + 30
        pattern = self.awaited[min(self.calls, len(self.awaited) - 1)]
        while not list(self.folder.glob(pattern)) and time.monotonic() < deadline:
            time.sleep(0.002)
        self.calls += 1
        return loss(model, batch)


def task(data: Any, with_loss: Any = loss) -> mh.Task:
    return mh.Task(model=build, loss=with_loss, optimizer=adam, data=data)


class Told(NamedTuple):
    fingerprint: str
    weights: Path
    notices: str


def trained(
    launcher: Launcher,
    to: Path,
    data: Drawn,
    *settings: str,
    workers: int = 1,
    awaited: Sequence[str] = ("reader-*",),
    **more: Any,
) -> Told:
    calm = "data.readers=0" in settings or not awaited
    report = mh.train(
        task(data, loss if calm else Patient(data.folder, *awaited)),
        to=to,
        workers=workers,
        settings=[*CUT, *settings],
        quiet=True,
        launcher=launcher,
        **more,
    )
    return Told(report.fingerprint, report.weights, warned_in(to))


@pytest.fixture(scope="module")
def calm(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Without readers."""
    folder = tmp_path_factory.mktemp("calm")
    return trained(launcher, folder / "run", Drawn(folder), "data.readers=0").fingerprint


def here(tmp_path: Path) -> Path:
    (tmp_path / "seen").mkdir()
    return tmp_path / "seen"


def readers_in(folder: Path) -> list[int]:
    return [int(p.name.partition("-")[2]) for p in folder.glob("reader-*")]


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize(("workers", "readers"), [(1, 2), (2, 1), (3, 2)])
def test_the_bits_are_those_without_readers(
    workers: int, readers: int, calm: str, launcher: Launcher, tmp_path: Path
) -> None:
    seen = here(tmp_path)
    found = trained(
        launcher, tmp_path / "run", Drawn(seen), f"data.readers={readers}", workers=workers
    )
    assert found.fingerprint == calm
    assert readers_in(seen), "nobody has read ahead"
    assert gone(readers_in(seen))
    assert found.notices == ""


def test_one_micro_batch_a_step_is_the_loop_one_would_write(
    launcher: Launcher, tmp_path: Path
) -> None:
    seen, batch = here(tmp_path), 12
    found = trained(
        launcher, tmp_path / "run", Drawn(seen), "data.readers=2", "train.micro_batch=12"
    )
    seed_everything(SEED, "model")
    model = net().train()
    optimizer = adam(model)
    data, per_epoch = Drawn(seen), steps_per_epoch(RECORDS, batch)
    for step in range(2 * per_epoch):
        epoch, k = divmod(step, per_epoch)
        ids = order(SEED, epoch, RECORDS)[np.arange(k * batch, min((k + 1) * batch, RECORDS))]
        seed_everything(SEED, step, 0, "data")
        drawn = default_collate([data[i] for i in ids.tolist()])
        seed_everything(SEED, step, 0, "forward")
        optimizer.zero_grad()
        loss(model, drawn).backward()
        optimizer.step()
    expected = model.state_dict()
    for name, tensor in load_file(found.weights).items():
        assert torch.equal(tensor, expected[name]), name
    assert len(readers_in(seen)) > 1  # this process is among them


def dies(number: int, times: int) -> Callable[[Drawn, int], None]:
    def happen(data: Drawn, k: int) -> None:
        if any(data.note(f"death-{n}") for n in range(times)):
            os.kill(os.getpid(), number)
        data.note("again")

    return happen


@pytest.mark.parametrize("workers", [1, 2])
def test_readers_that_are_killed_are_replaced(
    workers: int, calm: str, launcher: Launcher, tmp_path: Path
) -> None:
    seen = here(tmp_path)
    data = Drawn(seen, dies(signal.SIGKILL, 2))
    settings, run = ["data.readers=2"], tmp_path / "run"
    awaited = ["death-1"] * 6 + ["again"]
    found = trained(launcher, run, data, *settings, workers=workers, awaited=awaited)
    assert found.fingerprint == calm
    assert "was killed by signal 9 (SIGKILL); another takes its place" in found.notices
    assert len(readers_in(seen)) > 2 and gone(readers_in(seen))


def dies_of_its_first_order(files: list[int]) -> None:
    socket.socket(fileno=files[0]).recv(100)
    os.kill(os.getpid(), signal.SIGKILL)


def test_readers_that_always_die_are_done_without() -> None:
    told: list[str] = []
    nursery = Nursery(dies_of_its_first_order)
    with closing(nursery):
        crew = ReadingCrew(nursery, 2, stuck_s=30.0, tell=told.append, still_wanted=lambda: None)
        deadline, jobs = time.monotonic() + 60, [FetchJob(0, k) for k in range(9)]
        while crew.readers:
            assert time.monotonic() < deadline
            crew.want(jobs)
            assert crew.take(jobs[0]) is MISSING
            time.sleep(0.002)
    assert "no readers any more, and fetches its own: readers are lost" in told[-1]
    assert crew.lost_in_a_row == LOST_IN_A_ROW + 1


def test_a_reader_that_hangs_is_replaced(calm: str, launcher: Launcher, tmp_path: Path) -> None:
    """SIGSTOP: it neither answers nor ends. (A worker is judged after stuck_s.)"""
    data = Drawn(here(tmp_path), dies(signal.SIGSTOP, 1))
    settings = ["data.readers=1", "recovery.stuck_s=3"]
    found = trained(
        launcher, tmp_path / "run", data, *settings, awaited=["death-0"] * 4 + ["again"]
    )
    assert found.fingerprint == calm
    assert "took too long, and was ended; another takes its place" in found.notices
    assert gone(readers_in(data.folder))


def kills_nursery(data: Drawn, k: int) -> None:
    if data.note("death"):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)


def test_without_a_nursery_the_worker_goes_on(
    calm: str, launcher: Launcher, tmp_path: Path
) -> None:
    seen = here(tmp_path)
    data, awaited = Drawn(seen, kills_nursery), ["death"]
    found = trained(launcher, tmp_path / "run", data, "data.readers=2", awaited=awaited)
    assert found.fingerprint == calm
    assert "the process that starts readers is gone" in found.notices
    assert gone(readers_in(seen))


@pytest.mark.parametrize("at", ["compute", "gather", "update"])
def test_readers_end_with_a_worker_that_is_killed(
    at: str, calm: str, launcher: Launcher, tmp_path: Path
) -> None:
    seen = here(tmp_path)
    faults = FaultPlan().kill(rank=1, at_step=3, at=at)
    settings, run = ["data.readers=1"], tmp_path / "run"
    found = trained(launcher, run, Drawn(seen), *settings, workers=2, faults=faults)
    assert found.fingerprint == calm
    assert gone(readers_in(seen))


class Spoilt(Drawn):
    def __getitem__(self, k: int) -> Sample:
        if k == 31:
            raise ValueError("this record is spoilt")
        return super().__getitem__(k)


def test_an_error_in_a_reader_is_the_workers(launcher: Launcher, tmp_path: Path) -> None:
    told: list[str] = []
    for readers in (0, 2):
        with pytest.raises(ManyhandsError) as caught:
            run = tmp_path / f"{readers}" / "run"
            run.parent.mkdir()
            trained(launcher, run, Spoilt(here(run.parent)), f"data.readers={readers}")
        told.append(str(caught.value).replace(str(run), "RUN"))
    assert "this record is spoilt" in told[0] and 'raise ValueError("this record' in told[0]
    assert "31" in told[0]
    assert told[0].splitlines()[:6] == told[1].splitlines()[:6]


class Unwritable(Drawn):
    def __getitem__(self, k: int) -> Sample:
        return super().__getitem__(k)._replace(name="record \ud800")


def test_what_cannot_be_sent_the_worker_fetches(
    calm: str, launcher: Launcher, tmp_path: Path
) -> None:
    seen = here(tmp_path)
    found = trained(launcher, tmp_path / "run", Unwritable(seen), "data.readers=2")
    assert found.fingerprint == calm
    assert "a reader cannot send a value that cannot be written down" in found.notices
    assert "what they fetch cannot be sent" in found.notices


def test_a_batch_larger_than_a_slot_is_left_to_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_process, "MOST_BATCH_BYTES", 100)
    records, _ = open_data(Drawn(tmp_path), None)
    feed = MicroBatchFeed(records, seed=0, batch=8, micro_batch=4, seeder=seed_everything)
    memory = SlotMemory(create_slots(3), 3)
    answer = reader_process._obey(FetchOrder(1, 0, 0, 0), feed, memory)  # pyright: ignore
    assert isinstance(answer, BatchMissing)
    assert "in one micro-batch (100 B at the most)" in answer.why
    memory.close()


class Slow(Drawn):
    """Waits, as for a disk."""

    def __getitem__(self, k: int) -> Sample:
        time.sleep(0.04)
        return super().__getitem__(k)


def test_readers_are_chosen_where_fetching_holds_steps_up_and_it_is_said(
    calm: str, launcher: Launcher, tmp_path: Path
) -> None:
    seen = here(tmp_path)
    found = trained(launcher, tmp_path / "run", Slow(seen), awaited=())
    assert found.fingerprint == calm
    assert "of a step, most of it waiting: 4 readers now fetch up to 12" in found.notices
    assert readers_in(seen)
