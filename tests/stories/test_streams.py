"""A stream gives the same weights on any number of workers, through a kill, resumed, replayed."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import manyhands as mh
from manyhands.accounting import ledger
from manyhands.accounting.proof import check
from manyhands.launch.engines.launcher import Launcher
from manyhands.monitor.ledger_page import show
from manyhands.stories.replay import replay
from manyhands.training.compute.seeds import seed_everything
from manyhands.values.config import read_toml
from manyhands.values.errors import ManyhandsError, RequestError
from manyhands.values.planned_faults import FaultPlan

pytestmark = pytest.mark.timeout(120)

RECORDS = 83
CUT = ["train.batch=12", "train.micro_batch=3", "train.seed=2"]


def record(k: int) -> dict[str, Any]:
    x = torch.sin(torch.arange(6.0) * (k + 1))
    return {"x": x, "y": k % 3}


class Endless(IterableDataset[dict[str, Any]]):
    """Draws as it goes, tells its state, and notes how much it was read."""

    def __init__(self, notes: Path | None = None) -> None:
        self.start = self.position = 0
        self.notes = notes

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        k, self.start = self.start, 0
        if self.notes is not None:
            (self.notes / f"{os.getpid()}-from-{k}").touch()
        while True:
            self.position = k + 1
            drawn = 0.1 * torch.rand(())
            yield {**record(k), "drawn": drawn}
            k += 1


def once() -> Iterator[dict[str, Any]]:
    """A pass that ends."""
    for k in range(RECORDS):
        yield record(k)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 3))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"] + batch["drawn"].unsqueeze(1) if "drawn" in batch else batch["x"]
    return F.cross_entropy(model(x), batch["y"])


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def task(data: Any, held_out: Any = None) -> mh.Task:
    return mh.Task(model=build, loss=loss, optimizer=adam, data=data, held_out=held_out)


def train(
    data: Any, to: Path, launcher: Launcher, *settings: str, workers: int = 1, **more: Any
) -> mh.Report:
    return mh.train(
        task(data, more.pop("held", None)),
        to=to,
        workers=workers,
        settings=[*CUT, *settings],
        quiet=True,
        launcher=launcher,
        **more,
    )


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        (Endless(), ["train.steps=9"]),
        (once, ["train.steps=9", "data.shuffle_window=20"]),
        (once, ["train.epochs=2", "data.shuffle_window=20"]),
    ],
    ids=["endless", "repeated", "epochs"],
)
def test_any_number_of_workers_gives_the_same_bits(
    data: Any, settings: list[str], launcher: Launcher, tmp_path: Path
) -> None:
    calm = train(data, tmp_path / "calm", launcher, *settings)
    for workers in (2, 3):
        found = train(data, tmp_path / f"{workers}", launcher, *settings, workers=workers)
        assert found.fingerprint == calm.fingerprint, workers
    faults = FaultPlan().kill(rank=1, at_step=4, at="compute")
    struck = train(data, tmp_path / "struck", launcher, *settings, workers=2, faults=faults)
    assert struck.fingerprint == calm.fingerprint
    assert check(ledger.read(tmp_path / "struck" / "ledger.jsonl")).ok


@pytest.mark.parametrize("workers", [1, 2])
def test_it_is_plain_torch_with_a_data_loader_over_the_stream(
    workers: int, launcher: Launcher, tmp_path: Path
) -> None:
    """One micro-batch a worker."""
    settings = [f"train.micro_batch={12 // workers}", "train.epochs=2"]
    report = train(once, tmp_path / "run", launcher, *settings, workers=workers)

    class Plain(IterableDataset[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            return once()

    seed_everything(2, "model")
    model = build().train()
    optimizer, step = adam(model), 0
    for _ in range(2):
        for batch in DataLoader(Plain(), batch_size=12):
            records = len(batch["y"])
            optimizer.zero_grad()
            for index in range(workers):
                first = -(-records * index // workers)
                part = slice(first, -(-records * (index + 1) // workers))
                seed_everything(2, step, index, "forward")
                value = loss(model, {name: column[part] for name, column in batch.items()})
                (value * (len(batch["y"][part]) / records)).backward()
            optimizer.step()
            step += 1
    expected = model.state_dict()
    for name, tensor in load_file(report.weights).items():
        assert torch.equal(tensor, expected[name]), name


def test_epochs_are_counted_and_the_run_keeps_the_number(
    launcher: Launcher, tmp_path: Path
) -> None:
    report = train(once, tmp_path / "run", launcher, "train.epochs=2")
    assert report.step == 2 * 7
    config, _ = read_toml(tmp_path / "run" / "config.toml")
    assert config.data.pass_records == RECORDS
    proof = check(ledger.read(tmp_path / "run" / "ledger.jsonl"))
    assert proof.ok and [e.consumed for e in proof.epochs] == [RECORDS, RECORDS]


def test_a_run_goes_on_from_the_state_that_the_stream_told(
    launcher: Launcher, tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    whole = train(Endless(), tmp_path / "whole", launcher, "train.steps=40")
    run = tmp_path / "run"
    train(Endless(tmp_path / "notes"), run, launcher, "train.steps=30")
    starts = {p.name.partition("-from-")[2] for p in (tmp_path / "notes").iterdir()}
    assert starts == {"0"}
    # Another number of workers reads on from record 320 (of 360), the last state that was told.
    found = mh.resume(
        run,
        task(Endless(tmp_path / "notes")),
        workers=2,
        settings=["train.steps=40"],
        quiet=True,
        launcher=launcher,
    )
    assert found.fingerprint == whole.fingerprint
    starts = {p.name.partition("-from-")[2] for p in (tmp_path / "notes").iterdir()}
    assert starts == {"0", "320"}
    again = replay(run, task(Endless()), step=33, to=36, launcher=launcher)
    assert again.same
    page = "\n".join(str(part) for part in show(check(ledger.read(run / "ledger.jsonl")), []))
    assert "the first 480 records of the stream were consumed exactly once" in page


def test_epochs_of_a_run_without_end_are_refused(launcher: Launcher, tmp_path: Path) -> None:
    train(Endless(), tmp_path / "run", launcher, "train.steps=2")
    with pytest.raises(RequestError, match=r"say how long .* train\.steps"):
        mh.resume(
            tmp_path / "run",
            task(Endless()),
            settings=["train.epochs=3"],
            quiet=True,
            launcher=launcher,
        )


def test_held_out_records_are_scored_beside_a_stream(launcher: Launcher, tmp_path: Path) -> None:
    held = [record(k) for k in range(100, 120)]
    report = train(once, tmp_path / "run", launcher, "train.steps=3", held=held)
    assert report.scores["loss"] > 0


def fails() -> Iterator[dict[str, Any]]:
    for k in range(50):
        if k == 31:
            raise ValueError("the line was cut")
        yield record(k)


def test_a_stream_that_fails_is_told_with_its_line(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(ManyhandsError) as caught:
        train(fails, tmp_path / "run", launcher, "train.steps=9", workers=2)
    assert "the line was cut" in str(caught.value) and "in fails" in str(caught.value)
