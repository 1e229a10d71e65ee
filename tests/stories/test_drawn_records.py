"""Records drawn by weights, by class, by samplers of torch's and of one's own: the bits of a plain
loop over the same records, on any number of workers, killed, resumed and replayed."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import manyhands as mh
from manyhands.accounting.ledger import read
from manyhands.accounting.ledger_lines import EpochDrawn, SampledEpochs, drawn, opening
from manyhands.accounting.proof import check
from manyhands.data.open_data import open_task
from manyhands.data.ordering.epoch_order import order
from manyhands.data.ordering.sampling import Balanced, Weighted
from manyhands.driver.resolved_run import NOTHING_ATTACHED, resolve
from manyhands.launch.engines.launcher import Launcher
from manyhands.monitor.ledger_page import show
from manyhands.values.config import RunConfig, TrainConfig
from manyhands.values.errors import ManyhandsError, TaskError
from manyhands.values.events import Warned, read_events
from manyhands.values.planned_faults import FaultPlan
from manyhands.values.run_options import RunRequest
from tests.catalogue import reference
from tests.catalogue.case import RECORDS, Case, adamw, classify, mlp, rows
from tests.catalogue.test_catalogue import compare
from tests.support.prepared_folders import mixed_table, write_folder

X, Y = rows()["x"], rows()["y"]
WEIGHTS = torch.arange(RECORDS, dtype=torch.float64) % 5
SEED, BATCH, MICRO, EPOCHS = 5, 12, 3, 2


class Noisy(Sampler[int]):
    """Half of the records, drawn from all three generators, some twice."""

    def __iter__(self) -> Iterator[int]:
        found = torch.randperm(RECORDS).tolist()[: RECORDS // 2]
        found += np.random.randint(0, RECORDS, 5).tolist()
        random.shuffle(found)
        return iter(found)


class Longest(Sampler[int]):
    """Without randomness, and in another order in odd epochs."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(RECORDS), key=lambda i: float(X[i, self.epoch % 2])))


class Pairs(TensorDataset):
    def __getitem__(self, i: int) -> Any:
        return dict(zip("xy", super().__getitem__(i), strict=True))


def as_rows(records: list[Any]) -> Any:
    return {name: torch.stack([r[name] for r in records]) for name in ("x", "y")}


PAIRS = Pairs(X, Y)


def weighted(samples: int | None, *, replacement: bool) -> Callable[[int], Sequence[int]]:
    sampling = Weighted(WEIGHTS.numpy(), samples, replacement=replacement)
    return lambda epoch: sampling.order(SEED, epoch)[range(sampling.positions)].tolist()


def by_class(epoch: int) -> Sequence[int]:
    return Balanced(Y.numpy()).order(SEED, epoch)[range(RECORDS)].tolist()


def own(sampler: Any) -> Callable[[int], Sequence[int]]:
    """As a plain loop would, that seeds for every epoch."""

    def visits(epoch: int) -> Sequence[int]:
        reference.seed(SEED, epoch, "sampler")
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        return list(sampler)

    return visits


def shuffled(epoch: int) -> Sequence[int]:
    return order(SEED, epoch, RECORDS)[range(RECORDS)].tolist()


def part(epoch: int) -> Sequence[int]:
    half = len(range(0, RECORDS, 2))
    return [2 * k for k in order(SEED, epoch, half)[range(half)].tolist()]


WHOLE = RECORDS - RECORDS % BATCH

CASES: dict[str, tuple[dict[str, Any], Callable[[int], Sequence[int]]]] = {
    "weights": ({"weights": WEIGHTS}, weighted(None, replacement=True)),
    "weights once": (
        {"weights": WEIGHTS.tolist(), "replacement": False},
        weighted(None, replacement=False),
    ),
    "balanced": ({"sampler": "balanced"}, by_class),
    "balanced by labels": ({"sampler": mh.balanced(Y), "data": PAIRS}, by_class),
    "torch's weighted": (
        {"sampler": WeightedRandomSampler(WEIGHTS, 40)},
        weighted(40, replacement=True),
    ),
    "noisy": ({"sampler": Noisy(), "data": PAIRS}, own(Noisy())),
    "told the epoch": ({"sampler": Longest()}, own(Longest())),
    "a list": ({"sampler": [3, 1, 3, 20]}, lambda epoch: [3, 1, 3, 20]),
    "in order": ({"sampler": SequentialSampler(PAIRS)}, lambda epoch: range(RECORDS)),
    "loader": ({"data": DataLoader(PAIRS, collate_fn=as_rows)}, lambda epoch: range(RECORDS)),
    "loader shuffled": ({"data": DataLoader(PAIRS, shuffle=True)}, shuffled),
    "loader with whole batches": (
        {"data": DataLoader(PAIRS, batch_size=7, shuffle=True, drop_last=True)},
        lambda epoch: shuffled(epoch)[:WHOLE],
    ),
    "loader with weights": (
        {"data": DataLoader(PAIRS, sampler=WeightedRandomSampler(WEIGHTS, 40, True))},
        weighted(40, replacement=True),
    ),
    "loader of a part": (
        {"data": DataLoader(PAIRS, sampler=SubsetRandomSampler(range(0, RECORDS, 2)))},
        part,
    ),
    "loader with a sampler and whole batches": (
        {"data": DataLoader(PAIRS, sampler=Longest(), drop_last=True)},
        lambda epoch: own(Longest())(epoch)[:WHOLE],
    ),
}


def task(**given: Any) -> mh.Task:
    given = {"data": rows(), **given}
    return mh.Task(model=mlp, loss=classify, optimizer=adamw, **given)


def run(to: Path, launcher: Launcher, workers: int = 1, **given: Any) -> mh.Report:
    faults = given.pop("faults", FaultPlan())
    settings = [f"train.batch={BATCH}", f"train.micro_batch={MICRO}", f"train.seed={SEED}"]
    settings += given.pop("settings", [f"train.epochs={EPOCHS}"])
    return mh.train(
        task(**given),
        to=to,
        workers=workers,
        settings=settings,
        quiet=True,
        launcher=launcher,
        faults=faults,
    )


@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_a_plain_loop_over_the_same_records(
    name: str, launcher: Launcher, tmp_path: Path
) -> None:
    given, visits = CASES[name]
    workers = 1 + list(CASES).index(name) % 3
    faults = FaultPlan()
    if workers == 3:
        faults = faults.kill(rank=1, at_step=1, at="gather").kill(rank=0, at_step=3, at="update")
    report = run(tmp_path / "run", launcher, workers, faults=faults, **given)
    case = Case("drawn", "The same records.", data=PAIRS)
    compare(load_file(report.weights), reference.train(case, visits))
    proof = check(read(tmp_path / "run" / "ledger.jsonl"))
    assert proof.ok, proof.problems
    assert [epoch.of for epoch in proof.epochs] == [len(visits(0))] * EPOCHS
    every_record_once = name in ("loader shuffled", "loader of a part")
    assert (proof.sampled is None) == every_record_once


def test_runs_that_draw_are_resumed_replayed_and_audited(
    launcher: Launcher, tmp_path: Path
) -> None:
    for name, given in (("noisy", {"sampler": Noisy()}), ("weights", {"weights": WEIGHTS})):
        whole = run(tmp_path / name, launcher, 2, settings=["train.steps=5"], **given)
        half = tmp_path / f"{name}-half"
        run(
            half,
            launcher,
            1,
            settings=["train.steps=3", "checkpoint.every_steps=1", "checkpoint.keep_last=9"],
            **given,
        )
        again = mh.resume(
            half,
            task(**given),
            settings=["train.steps=5"],
            workers=3,
            quiet=True,
            launcher=launcher,
        )
        assert again.fingerprint == whole.fingerprint
        replayed = mh.replay(half, task(**given), step=2, to=5, workers=2, launcher=launcher)
        assert replayed.same and replayed.compared_losses == [3, 4, 5]
        replayed = mh.replay(half, task(**given), step=0, audit=True, workers=2, launcher=launcher)
        assert replayed.same
        proof = check(read(half / "ledger.jsonl"))
        assert proof.ok, proof.problems


def test_what_a_sampler_gave_is_journalled(launcher: Launcher, tmp_path: Path) -> None:
    run(tmp_path / "run", launcher, 2, sampler=Noisy())
    entries = read(tmp_path / "run" / "ledger.jsonl")
    assert entries[1] == SampledEpochs(RECORDS, "records as Noisy gives them", True)
    found = drawn(entries)
    assert found.keys() == {0, 1} and found[0] != found[1]
    said = str(show(check(entries), [])[0])
    assert "every position of 2 epochs was consumed exactly once" in said
    assert f"positions are records as Noisy gives them (of {RECORDS} records)" in said
    assert "as was journalled for every epoch" in said
    other = [e if not isinstance(e, EpochDrawn) else EpochDrawn(0, "0") for e in entries]
    (problem, *more) = check(other).problems
    assert "nothing says what the sampler gave for epoch 1" in problem and not more
    again = check([*entries, EpochDrawn(1, "0")]).problems
    assert len(again) == 1 and "epoch 1 was drawn otherwise than in line" in again[0]
    replayed = mh.replay(tmp_path / "run", task(sampler=Longest()), step=0, to=1, launcher=launcher)
    assert any("epoch 0: the sampler gave other records" in text for text in replayed.differences)


class ByProcess(Sampler[int]):
    """Other records in every process."""

    def __iter__(self) -> Iterator[int]:
        import os

        return iter([(os.getpid() * k) % RECORDS for k in range(20)])


class ByProcessLater(Longest):
    """... from the second epoch on."""

    def __iter__(self) -> Iterator[int]:
        return iter(ByProcess()) if self.epoch else iter(range(20))


@pytest.mark.parametrize(
    ("sampler", "says"),
    [(ByProcess(), "rank 1 has other data than rank 0"), (ByProcessLater(), "the sampler gave")],
)
def test_a_sampler_on_which_workers_do_not_agree_is_refused(
    sampler: Any, says: str, launcher: Launcher, tmp_path: Path
) -> None:
    with pytest.raises(ManyhandsError) as caught:
        run(tmp_path / "run", launcher, 2, sampler=sampler)
    assert says in str(caught.value)


def test_a_verdict_names_the_records_that_were_drawn(launcher: Launcher, tmp_path: Path) -> None:
    def fails(model: Any, batch: Any) -> Any:
        if 7 in batch["i"]:
            raise ValueError("seven")
        return classify(model, batch)

    given = mh.Task(
        model=mlp, loss=fails, optimizer=adamw, data=rows(), sampler=[20, 21, 22, 3, 7, 3, 7, 5]
    )
    with pytest.raises(ManyhandsError) as caught:
        mh.train(
            given,
            to=tmp_path / "run",
            workers=2,
            settings=["train.batch=8", "train.micro_batch=4"],
            quiet=True,
            launcher=launcher,
        )
    assert "records 7, 3, 7, 5" in str(caught.value)


def test_held_out_records_are_not_drawn(launcher: Launcher, tmp_path: Path) -> None:
    config = RunConfig(train=TrainConfig(batch=BATCH, micro_batch=MICRO, seed=SEED))
    for given in ({"weights": WEIGHTS}, {"sampler": mh.balanced(Y)}, {"sampler": "balanced"}):
        train, held = open_task(task(held_out=0.25, **given), config)
        assert held is not None and len(train) == RECORDS - len(held)
        kept = set(held.names(np.arange(len(held))))
        seen = train.names(train.order(SEED, 0)[range(len(train))])
        assert not kept & set(seen) and len(kept | set(seen)) > RECORDS // 2
        if "weights" in given:
            assert all(float(WEIGHTS[record]) > 0 for record in seen)
    train, _ = open_task(task(held_out=0.25, data=DataLoader(PAIRS)), config)
    seen = train.names(train.order(SEED, 0)[range(len(train))])
    assert list(seen) == sorted(seen)


def test_a_loader_of_held_out_records_is_understood() -> None:
    config = RunConfig()
    loader = DataLoader(PAIRS, sampler=SubsetRandomSampler([4, 2, 9]), collate_fn=as_rows)
    _, held = open_task(task(held_out=loader), config)
    assert held is not None and held.names(np.arange(3)) == [4, 2, 9]
    assert torch.equal(held.batch(np.arange(3))["x"], X[[4, 2, 9]])
    _, held = open_task(task(held_out=DataLoader(PAIRS, shuffle=True)), config)
    assert held is not None and held.names(np.arange(3)) == [0, 1, 2]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield X[0]


class Batches(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        yield [1, 2]


GENERATOR = torch.Generator()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"data": DataLoader(Stream())}, "streams"),
        ({"data": DataLoader(PAIRS, batch_sampler=Batches())}, r"batch_sampler \(Batches\).*samp"),
        ({"data": DataLoader(PAIRS, batch_size=None)}, "batch_size=None: its records are batches"),
        ({"data": DataLoader(PAIRS, worker_init_fn=print)}, "worker_init_fn: .*Leave it out"),
        ({"data": DataLoader(PAIRS, generator=GENERATOR)}, "generator: .*train.seed"),
        (
            {"data": DataLoader(PAIRS, collate_fn=as_rows), "collate": as_rows},
            "collate is given, and so is the DataLoader's collate_fn",
        ),
        (
            {"data": DataLoader(PAIRS, sampler=Noisy()), "weights": WEIGHTS},
            "has a Noisy, and the task has a sampler or weights too",
        ),
        ({"held_out": DataLoader(PAIRS, sampler=Noisy())}, "every held-out record is scored once"),
        ({"data": DataLoader(Subset(PAIRS, range(9)), drop_last=True)}, "fewer than one batch"),
        ({"sampler": RandomSampler(PAIRS, generator=GENERATOR)}, "has a generator of its own"),
        ({"sampler": DistributedSampler(PAIRS, 2, 0)}, "DistributedSampler deals records"),
        ({"sampler": BatchSampler(Noisy(), 2, False)}, "BatchSampler gives batches"),
        ({"data": Stream(), "weights": [1.0]}, "data is a stream, which is read in sequence"),
        ({"sampler": "balance"}, "sampler = 'balance' is none"),
        ({"sampler": 3}, "sampler is int, which is no iterable"),
        ({"sampler": "balanced", "data": PAIRS}, "finds no labels.*mh.balanced"),
        ({"sampler": Noisy(), "held_out": 0.2}, "Noisy draws from all of data"),
        ({"weights": [1.0]}, f"weights has 1, but data has {RECORDS} records"),
        ({"sampler": SubsetRandomSampler([RECORDS])}, "SubsetRandomSampler of data names 1"),
        ({"weights": WEIGHTS, "sampler": Noisy()}, "sampler and weights are both given"),
        ({"replacement": False}, "replacement=False is for weights="),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        open_task(task(**given), RunConfig())


def test_shards_are_not_drawn_from(tmp_path: Path) -> None:
    write_folder(tmp_path / "made", {"train": [mixed_table(5)]})
    for data in (str(tmp_path / "made"), mh.prepared(tmp_path / "made")):
        with pytest.raises(TaskError, match=r"shards of a prepared folder .* --balance over"):
            open_task(task(data=data, weights=[1.0] * 5), RunConfig())


def test_a_shuffle_of_another_length() -> None:
    train, _ = open_task(task(sampler=RandomSampler(PAIRS, num_samples=RECORDS + 4)), RunConfig())
    seen = train.order(0, 0)[range(len(train))].tolist()
    assert sorted(seen[:RECORDS]) == list(range(RECORDS)) and len(seen) == RECORDS + 4
    again, _ = open_task(task(sampler=RandomSampler(PAIRS, True, 50)), RunConfig())
    assert len(again) == 50 and len(set(again.order(0, 0)[range(50)].tolist())) < RECORDS


@pytest.mark.parametrize(
    ("config", "settings", "batch", "says"),
    [
        (None, [], 4, "train.batch: 4 (the DataLoader's batch_size)"),
        ({"train": {"micro_batch": 2}}, [], 4, "train.batch: 4 (the DataLoader's"),
        (None, ["train.batch=8"], 8, "train.batch: 8 (as the config says; the DataLoader's"),
        ({"train": {"batch": 5}}, [], 5, "train.batch: 5 (as the config says"),
        (RunConfig(train=TrainConfig(batch=6)), [], 6, "train.batch: 6 (as the config says"),
    ],
)
def test_the_batch_of_a_loader_is_used_where_nobody_says_another(
    config: Any,
    settings: list[str],
    batch: int,
    says: str,
    launcher: Launcher,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    mh.train(
        task(data=DataLoader(PAIRS, batch_size=4, drop_last=True, shuffle=True)),
        to=tmp_path / "run",
        workers=1,
        config=config,
        settings=[*settings, "train.steps=1"],
        quiet=True,
        launcher=launcher,
    )
    opened = opening(read(tmp_path / "run" / "ledger.jsonl"))
    assert (opened.batch, opened.records) == (batch, RECORDS - RECORDS % batch)
    planned = (tmp_path / "run" / "plan.json").read_text()
    assert says in planned and "leaves out what is no whole batch" in planned
    warned = (tmp_path / "run" / "events.jsonl").read_text()
    assert "DataLoader" not in warned and "DataLoader" not in capfd.readouterr().err


def test_a_config_that_says_what_is_the_default_says_it(tmp_path: Path) -> None:
    loaded = task(data=DataLoader(PAIRS, batch_size=4))
    (tmp_path / "task.py").write_text("from tests.stories.test_drawn_records import CHOSEN as task")
    (tmp_path / "run.toml").write_text('task = "task.py"\n[train]\nbatch = 128\n')
    for request, batch in (
        (RunRequest(task=loaded), 4),
        (RunRequest(task=loaded, config={"train": {"batch": 128}}), 128),
        (RunRequest(task=tmp_path / "run.toml"), 128),
        (RunRequest(task=tmp_path / "task.py"), 4),
        (RunRequest(task=loaded, config={"train": {"micro_batch": 2}}), 4),
        (RunRequest(task=THIRTY, config={"train": {"micro_batch": 10}}), 30),
        (RunRequest(task=THIRTY, settings=["train.micro_batch=10"]), 30),
    ):
        assert resolve(request, NOTHING_ATTACHED).config.train.batch == batch


def test_the_workers_of_a_loader_are_readers_where_nobody_says_other_ones() -> None:
    loaded = task(data=DataLoader(PAIRS, num_workers=2))
    resolved = resolve(RunRequest(task=loaded), NOTHING_ATTACHED)
    assert resolved.config.data.readers == 2
    assert "data.readers: 2 (the DataLoader's num_workers)" in resolved.plan_notes
    for given in ({"settings": ["data.readers=0"]}, {"config": {"data": {"readers": 0}}}):
        resolved = resolve(RunRequest(task=loaded, **given), NOTHING_ATTACHED)
        assert resolved.config.data.readers == 0 and len(resolved.plan_notes) == 1
    resolved = resolve(RunRequest(task=CHOSEN), NOTHING_ATTACHED)
    assert resolved.config.data.readers == "auto"


THIRTY = task(data=DataLoader(PAIRS, batch_size=30))
CHOSEN = task(data=DataLoader(PAIRS, batch_size=4))


def test_a_batch_of_a_loader_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ManyhandsError, match=r"train.batch \(4\) is not divisible"):
        mh.train(task(data=DataLoader(PAIRS, batch_size=4)), settings=["train.micro_batch=3"])


def test_readers_do_not_ask_a_sampler_of_ones_own(launcher: Launcher, tmp_path: Path) -> None:
    """They would be other processes, whose answers nobody compares."""
    asked = Backwards(29)
    seen: list[str] = []
    for readers in (0, 2):
        task = mh.Task(
            model=lambda: torch.nn.Linear(6, 1),
            loss=lambda model, batch: model(batch["x"]).square().mean(),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1),
            data=[{"x": torch.full((6,), float(k))} for k in range(29)],
            sampler=asked,
        )
        to = tmp_path / str(readers)
        settings = ["train.batch=12", "train.micro_batch=3", f"data.readers={readers}"]
        report = mh.train(task, to=to, workers=2, settings=settings, quiet=True, launcher=launcher)
        seen.append(report.fingerprint)
    told = [e.text for e in read_events(tmp_path / "2" / "events.jsonl") if isinstance(e, Warned)]
    assert seen[0] == seen[1]
    assert any("no effect with a sampler of one's own" in text for text in told), told


class Backwards(torch.utils.data.Sampler[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1, -1, -1))
