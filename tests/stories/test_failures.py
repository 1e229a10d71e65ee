"""When something fails: exit codes, a verdict that names the cause, nothing left behind."""

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import manyhands as mh
from manyhands.accounting import ledger
from manyhands.accounting.proof import check
from manyhands.driver.bookkeeping import Bookkeeping
from manyhands.launch.engines.launcher import Launcher
from manyhands.monitor.run_status import status
from manyhands.values.machine import open_files
from manyhands.values.planned_faults import FaultPlan
from manyhands.values.run_folder import RunDir
from tests.support.tasks import ConvNet, classify, images, make

SETTINGS = ["train.batch=32", "train.micro_batch=4", "train.steps=8", "checkpoint.every_steps=2"]


def children(pid: int) -> list[str]:
    out = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return out.stdout.split()


def verdict_of(launcher: Launcher, to: Path, **more: object) -> str:
    task = more.pop("task", None) or make("cnn")
    with pytest.raises(mh.RunFailed) as caught:
        mh.train(
            task,  # type: ignore[arg-type]
            to=to,
            workers=3,
            settings=[*SETTINGS, *more.pop("settings", [])],  # type: ignore[misc]
            quiet=True,
            launcher=launcher,
            **more,  # type: ignore[arg-type]
        )
    assert RunDir(to).verdict.exists()
    agent = launcher.agent.pid  # type: ignore[attr-defined]
    assert not children(agent), "workers are left"
    return caught.value.verdict


def bad_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if 77 in batch["i"].tolist():
        raise ValueError("record 77 is no good")
    return model(batch["x"]).mean()


def nan_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    poison = torch.where(batch["i"] == 50, torch.nan, 1.0)
    return (model(batch["x"]).mean(1) * poison).mean()


def numbered(loss: object, model: type[torch.nn.Module] = ConvNet) -> mh.Task:
    return mh.Task(
        model=model,
        loss=loss,  # type: ignore[arg-type]
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
        data={**images(), "i": torch.arange(101)},
    )


GIVE_UP = ["recovery.losses=0"]
"""At the first loss; how losses are survived is in test_recovery."""


def test_a_killed_worker(launcher: Launcher, tmp_path: Path) -> None:
    faults = FaultPlan().kill(rank=1, at_step=5)
    said = verdict_of(launcher, tmp_path / "run", faults=faults, settings=GIVE_UP)
    assert "on rank 1: it was killed by signal 9 (SIGKILL)" in said
    assert "step 4; continue: mh.resume(" in said


def test_a_killed_worker_over_gloo(launcher: Launcher, tmp_path: Path) -> None:
    faults = FaultPlan().kill(rank=2, at_step=3)
    settings = [*GIVE_UP, "train.collective=gloo"]
    said = verdict_of(launcher, tmp_path / "run", faults=faults, settings=settings)
    assert "on rank 2: it was killed by signal 9" in said


def test_a_worker_that_exits_without_a_word(launcher: Launcher, tmp_path: Path) -> None:
    faults = FaultPlan().exit(rank=0, at_step=3)
    said = verdict_of(launcher, tmp_path / "run", faults=faults, settings=GIVE_UP)
    assert "on rank 0: it ended with exit code 0 without finishing" in said


def test_memory_that_runs_out(launcher: Launcher, tmp_path: Path) -> None:
    faults = FaultPlan().out_of_memory(rank=1, at_step=1)
    said = verdict_of(launcher, tmp_path / "run", faults=faults, settings=GIVE_UP)
    assert "memory ran out. Lower train.micro_batch" in said
    assert "saved     nothing" in said


def test_an_exception_in_user_code(launcher: Launcher, tmp_path: Path) -> None:
    said = verdict_of(launcher, tmp_path / "run", task=numbered(bad_loss))
    lines = said.splitlines()
    assert "ValueError: record 77 is no good" in lines[0]
    assert "test_failures.py" in lines[2] and "in bad_loss" in lines[2], "the user's frame on top"
    assert "records" in said and "77" in said.split("records", 1)[1]


def test_a_loss_that_is_nan(launcher: Launcher, tmp_path: Path) -> None:
    said = verdict_of(launcher, tmp_path / "run", task=numbered(nan_loss))
    assert "the loss is nan at step" in said and "micro-batch" in said
    records = said.split("(records ")[1].split(")")[0].split(", ")
    assert "50" in records and len(records) <= 4


def one_is_nan() -> dict[str, torch.Tensor]:
    columns = images()
    columns["x"][50].view(-1)[3] = torch.nan
    return columns


class OneIsNan(Dataset[Any]):
    def __len__(self) -> int:
        return 101

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        return {name: column[k] for name, column in one_is_nan().items()}


class OneIsNanInAStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        columns = one_is_nan()
        for k in range(101):
            yield {name: column[k] for name, column in columns.items()}


class Unreadable(OneIsNan):
    """Only once."""

    def __init__(self) -> None:
        self.been: set[int] = set()

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        if k in self.been:
            raise OSError("the tape has been rewound")
        self.been.add(k)
        return super().__getitem__(k)


@pytest.mark.parametrize(
    "data", [one_is_nan(), OneIsNan(), OneIsNanInAStream()], ids=["columns", "items", "stream"]
)
def test_a_record_that_is_nan_itself_is_named(
    data: Any, launcher: Launcher, tmp_path: Path
) -> None:
    task = replace(make("cnn"), data=data, held_out=None)
    said = verdict_of(launcher, tmp_path / "run", task=task).splitlines()[0]
    assert ": record 50 holds nan in batch['x'] (of records " in said, said
    assert "Look there first; otherwise lower the learning rate" in said


def test_looking_for_such_a_record_hides_nothing_when_it_fails(
    launcher: Launcher, tmp_path: Path
) -> None:
    task = replace(make("cnn"), data=Unreadable(), held_out=None)
    settings = ["train.steps=3", "data.readers=0"]
    said = verdict_of(launcher, tmp_path / "run", task=task, settings=settings).splitlines()[0]
    assert "the loss is nan at step" in said and "Look at those records first" in said, said


def test_an_integer_buffer_that_differs_is_named(launcher: Launcher, tmp_path: Path) -> None:
    said = verdict_of(launcher, tmp_path / "run", task=numbered(count_large, Counting))
    assert "the integer buffer 'seen'" in said


class Counting(ConvNet):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))


def count_large(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    model.seen += int((batch["i"] > 50).sum())  # type: ignore[operator]
    return model(batch["x"]).mean()


def undecodable(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    raise ValueError("bad name caf\udce9")


def test_an_exception_that_cannot_be_encoded(launcher: Launcher, tmp_path: Path) -> None:
    said = verdict_of(launcher, tmp_path / "run", task=numbered(undecodable))
    assert "ValueError: bad name caf" in said


def no_score(predicted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    return predicted.nothing  # type: ignore[attr-defined]


def test_a_score_that_fails_does_not_cost_the_weights(launcher: Launcher, tmp_path: Path) -> None:
    task = mh.Task(
        model=ConvNet,
        loss=classify,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
        data=images(),
        held_out=0.2,
        predict=lambda m, b: (m(b["x"]), b["y"]),
        scores={"wrong": no_score},
    )
    said = verdict_of(launcher, tmp_path / "run", task=task)
    assert "no attribute 'nothing'" in said and "step 8; when it is mended, continue" in said


def test_a_last_score_that_failed_is_made_up_for_by_resuming(
    launcher: Launcher, tmp_path: Path
) -> None:
    """As the verdict says: with the task mended, from the saved last step, without training."""

    def task(predict: Callable[..., Any]) -> mh.Task:
        return mh.Task(
            model=ConvNet,
            loss=classify,
            optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
            data=images(),
            held_out=0.2,
            predict=predict,
            scores={"size": lambda predictions, targets: len(targets)},
        )

    wrong, right = task(lambda m, b: m(b["x"])), task(lambda m, b: (m(b["x"]), b["y"]))
    to, calm = tmp_path / "run", tmp_path / "calm"
    said = verdict_of(launcher, to, task=wrong)
    assert "predict must return two tensors" in said and "step 8; continue: mh.resume(" in said
    with pytest.raises(mh.RequestError, match="predict must return two tensors"):
        mh.resume(to, wrong, workers=2, quiet=True, launcher=launcher)
    again = mh.resume(to, right, workers=2, quiet=True, launcher=launcher)
    known = mh.train(right, to=calm, workers=1, settings=SETTINGS, quiet=True, launcher=launcher)
    assert (again.step, again.fingerprint) == (8, known.fingerprint)
    assert (again.scores, again.loss) == (known.scores, known.loss)
    assert check(ledger.read(RunDir(to).ledger)).ok
    with pytest.raises(mh.RequestError, match="is finished"):
        mh.resume(to, right, workers=2, quiet=True, launcher=launcher)


def changing(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> object:
    name = "a" if 50 in batch["i"].tolist() else "b"
    return model(batch["x"]).mean(), {name: 1.0}


def test_numbers_whose_names_change_are_refused(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises((mh.RequestError, mh.RunFailed), match="differently named numbers"):
        mh.train(
            numbered(changing),
            to=tmp_path / "run",
            workers=2,
            settings=SETTINGS,
            quiet=True,
            launcher=launcher,
        )


def failing_fetch(i: int) -> dict[str, torch.Tensor]:
    if i == 5:
        raise OSError("record 5 cannot be read")
    return {"x": images()["x"][i], "y": torch.tensor(0)}


class Fetching:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return failing_fetch(i)


def test_a_fetch_that_fails_names_its_records(launcher: Launcher, tmp_path: Path) -> None:
    task = mh.Task(
        model=ConvNet,
        loss=classify,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
        data=Fetching(),
    )
    said = verdict_of(launcher, tmp_path / "run", task=task)
    records = said.split("records ")[1].splitlines()[0].split(", ")
    assert "5" in records and len(records) <= 4


def test_a_callback_that_raises_is_blamed_by_name(launcher: Launcher, tmp_path: Path) -> None:
    def on_step(event: object) -> None:
        raise KeyError("no such chart")

    said = verdict_of(launcher, tmp_path / "run", on_step=on_step)
    assert "in the driver: on_step raised KeyError: 'no such chart'" in said
    assert f"{__file__}:" in said and "in on_step" in said
    assert status(RunDir(tmp_path / "run"))["verdict"] == said


def test_a_callback_that_exits_does_not_look_like_success(
    launcher: Launcher, tmp_path: Path
) -> None:
    def leave(event: object) -> None:
        raise SystemExit(0)

    said = verdict_of(launcher, tmp_path / "run", on_step=leave)
    assert "in the driver: on_step raised SystemExit: 0" in said


def test_a_bug_of_ours_is_called_so(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bookkeeping, "begun", None)
    said = verdict_of(launcher, tmp_path / "run")
    assert "in the driver: this is a bug of manyhands: TypeError: 'NoneType'" in said
    assert "supervisor.py:" in said and "report it" in said
    assert status(RunDir(tmp_path / "run"))["state"] == "failed"


def test_no_more_descriptors(launcher: Launcher, tmp_path: Path) -> None:
    """As strangers can bring about who connect and say nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []

    def take_all(event: object) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + 20, hard))
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))

    try:
        said = verdict_of(launcher, tmp_path / "run", on_step=take_all)
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "there are no more file descriptors" in said and "ulimit -n" in said
    assert status(RunDir(tmp_path / "run"))["state"] == "failed"
