"""Schedules by epoch and by score, against plain PyTorch; through kills, resumes and replays."""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as lr

import manyhands as mh
from manyhands.accounting import ledger, ledger_lines
from manyhands.checkpoint.step_files import read_state
from manyhands.data.ordering.epoch_order import order
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories.replay import replay
from manyhands.training.state.schedules import split_heard
from manyhands.values.config import HEARD_SCORE
from manyhands.values.errors import RequestError
from manyhands.values.events import Warned, read_events
from manyhands.values.planned_faults import FaultPlan
from tests.catalogue import reference
from tests.catalogue.case import Case, Settings

RECORDS, EPOCHS = 29, 5


def rows(seed: int, records: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(records, 6, generator=g), "y": torch.randn(records, generator=g)}


DATA, HELD = rows(1, RECORDS), rows(2, 7)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]).squeeze(1), batch["y"])


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)


def plateau(optimizer: torch.optim.Optimizer) -> lr.ReduceLROnPlateau:
    return lr.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


TASK = mh.Task(
    model=model, loss=loss, optimizer=optimizer, schedule=plateau, data=DATA, held_out=HELD
)
BASE = ["train.batch=12", "train.micro_batch=3", "train.seed=5", "evaluate.by=loss"]


def run(
    launcher: Launcher, to: Path, workers: int, *settings: str, faults: FaultPlan | None = None
) -> mh.Report:
    return mh.train(
        TASK,
        to=to,
        workers=workers,
        settings=[*BASE, *(settings or [f"train.epochs={EPOCHS}"])],
        quiet=True,
        launcher=launcher,
        faults=faults,
    )


def by_hand() -> tuple[dict[str, torch.Tensor], list[float]]:
    """With a scheduler that hears the held-out loss after each epoch."""
    made: dict[str, Any] = {}
    heard: list[float] = []

    def make(model: nn.Module) -> torch.optim.Optimizer:
        made["optimizer"] = optimizer(model)
        made["schedule"] = plateau(made["optimizer"])
        return made["optimizer"]

    def after(model: nn.Module, step: int, ends_epoch: bool) -> None:
        if not ends_epoch:
            return
        model.eval()
        with torch.no_grad():
            cut = [{k: v[i : i + 3].clone() for k, v in HELD.items()} for i in range(0, 7, 3)]
            heard.append(sum(loss(model, b).item() * float(len(b["x"])) for b in cut) / 7.0)
        model.train()
        made["schedule"].step(heard[-1])

    case = Case(
        "plateau",
        "",
        model=model,
        loss=loss,
        optimizer=make,
        data=DATA,
        settings=Settings(epochs=EPOCHS),
    )
    visits: Callable[[int], list[int]] = lambda epoch: order(5, epoch, RECORDS)[  # noqa: E731
        range(RECORDS)
    ].tolist()
    return reference.train(case, visits, after), heard


def rate(folder: Path) -> float:
    _, state = read_state(folder)
    return state["groups"][0]["lr"]


def same(report: mh.Report, expected: dict[str, torch.Tensor]) -> bool:
    found = load_file(report.weights)
    return all(reference.same(found[name], expected[name]) for name in expected)


def test_a_plateau_hears_the_held_out_loss_as_plain_pytorch_does(
    launcher: Launcher, tmp_path: Path
) -> None:
    expected, heard = by_hand()
    for workers in (1, 3):
        report = run(launcher, tmp_path / str(workers), workers)
        assert same(report, expected)
        journal = ledger_lines.changes_by_step(
            ledger.read(tmp_path / str(workers) / "ledger.jsonl")
        )
        assert [journal[3 * k][HEARD_SCORE] for k in range(1, EPOCHS + 1)] == heard
        assert rate(Path(report.weights).parent) < 0.1, "it is no test unless the rate fell"


def test_a_plateau_through_kills_resumes_and_replays(launcher: Launcher, tmp_path: Path) -> None:
    expected, _ = by_hand()
    faults = FaultPlan().kill(rank=1, at_step=4, at="update").kill(rank=0, at_step=10, at="gather")
    killed = run(launcher, tmp_path / "killed", 2, faults=faults)
    assert same(killed, expected)
    stopped = tmp_path / "stopped"
    run(launcher, stopped, 2, "train.epochs=2", "checkpoint.every_steps=4")
    resumed = mh.resume(
        stopped,
        TASK,
        workers=3,
        settings=[f"train.epochs={EPOCHS}"],
        quiet=True,
        launcher=launcher,
    )
    assert same(resumed, expected)
    for first, to in ((0, 15), (7, 12)):
        again = replay(stopped, TASK, step=first, to=to, workers=2, launcher=launcher)
        assert again.same and again.compared_losses, again.differences


def test_a_plateau_without_scores_is_told_what_it_needs(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"Give held_out=0.1"):
        task = replace(TASK, held_out=None)
        mh.train(task, to=tmp_path / "run", workers=1, quiet=True, launcher=launcher)


def test_a_plateau_is_scored_once_an_epoch_unless_one_says_otherwise(
    launcher: Launcher, tmp_path: Path
) -> None:
    expected, _ = by_hand()
    settings = [*BASE[:3], f"train.epochs={EPOCHS}"]
    report = mh.train(
        TASK, to=tmp_path / "run", workers=2, settings=settings, quiet=True, launcher=launcher
    )
    assert same(report, expected)


def slow_combine(predictions: torch.Tensor, targets: torch.Tensor) -> float:
    """Long enough for a death in between to be noticed first."""
    time.sleep(1.5)
    return 0.0


def test_a_score_that_comes_while_somebody_dies_is_heard_by_all(
    launcher: Launcher, tmp_path: Path
) -> None:
    expected, _ = by_hand()
    task = replace(
        TASK,
        predict=lambda model, batch: (model(batch["x"]), batch["y"]),
        scores={"slow": slow_combine},
    )
    victim: list[int] = []

    def kill(event: Any) -> None:
        """The second worker, when it has scored its part of the second evaluation."""
        if event.step == 6 and not victim:
            views = [
                e for e in read_events(tmp_path / "run" / "events.jsonl") if hasattr(e, "members")
            ]
            victim.append(views[-1].members[1])
            threading.Timer(0.7, os.kill, (victim[0], signal.SIGKILL)).start()

    report = mh.train(
        task,
        to=tmp_path / "run",
        workers=2,
        settings=[*BASE, f"train.epochs={EPOCHS}"],
        quiet=True,
        launcher=launcher,
        on_step=kill,
    )
    assert victim and report.recoveries >= 1
    assert same(report, expected)


def test_schedules_of_two_optimizers_one_of_which_is_not_plain_data(
    launcher: Launcher, tmp_path: Path
) -> None:
    task = mh.Task(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)),
        loss={"a": loss, "b": loss},
        optimizer={
            "a": lambda model: torch.optim.SGD(model[0].parameters(), 0.1),
            "b": lambda model: torch.optim.SGD(model[1].parameters(), 0.1),
        },
        schedule={
            "a": lambda o: lr.ReduceLROnPlateau(o, factor=0.5, patience=0, mode="max"),
            "b": lambda o: lr.MultiStepLR(o, [4, 9]),
        },
        data=DATA,
        held_out=HELD,
        predict=lambda model, batch: (model(batch["x"]).squeeze(1), batch["y"]),
        scores={"loss2": lambda p, t: float(F.mse_loss(p, t))},
    )
    base = [*BASE[:3], "evaluate.by=loss2", "evaluate.every_steps=2"]

    def trained(to: str, workers: int, steps: int, faults: FaultPlan | None = None) -> mh.Report:
        return mh.train(
            task,
            to=tmp_path / to,
            workers=workers,
            settings=[*base, f"train.steps={steps}"],
            quiet=True,
            launcher=launcher,
            faults=faults,
        )

    calm = trained("calm", 1, 16)
    killed = trained("killed", 2, 16, FaultPlan().kill(rank=1, at_step=11, at="compute"))
    trained("stopped", 2, 11)
    resumed = mh.resume(
        tmp_path / "stopped",
        task,
        workers=3,
        settings=["train.steps=16"],
        quiet=True,
        launcher=launcher,
    )
    assert calm.fingerprint == killed.fingerprint == resumed.fingerprint
    assert replay(tmp_path / "stopped", task, step=12, to=16, launcher=launcher).same


def test_what_was_set_and_what_was_heard_after_the_same_step_keep_their_order() -> None:
    assert split_heard({"lr": 1, HEARD_SCORE: 0.5, "momentum": 2, "a.b": 3}) == (
        {"lr": 1},
        0.5,
        {"momentum": 2},
    )
    assert split_heard({HEARD_SCORE: "nan"})[1] != split_heard({HEARD_SCORE: "nan"})[1]
    assert split_heard({"lr": 1}) == ({"lr": 1}, None, {})


def test_a_rate_that_falls_too_soon_is_pointed_out(launcher: Launcher, tmp_path: Path) -> None:
    for every in ("step", "epoch"):
        task = mh.Task(
            model=model,
            loss=loss,
            optimizer=optimizer,
            schedule=lambda o: lr.StepLR(o, 1, 0.3),
            schedule_every=every,
            data=DATA,
        )
        to = tmp_path / every
        mh.train(task, to=to, workers=2, settings=BASE[:3], quiet=True, launcher=launcher)
        told = [e.text for e in read_events(to / "events.jsonl") if isinstance(e, Warned)]
        found = [text for text in told if "after the first epoch" in text]
        assert len(found) == (every == "step"), told
        if found:
            assert "0.1 now and 0.0027 after" in found[0] and 'schedule_every="epoch"' in found[0]
        (saved,) = to.glob("checkpoints/step-*")
        assert rate(saved) == pytest.approx(0.1 * 0.3**3 if every == "step" else 0.1 * 0.3)


def test_a_schedule_that_ends_before_the_run_is_refused_before_the_first_step(
    launcher: Launcher, tmp_path: Path
) -> None:
    def trained(every: Literal["step", "epoch"], total: int) -> mh.Report:
        task = mh.Task(
            model=model,
            loss=loss,
            optimizer=optimizer,
            schedule=lambda o: lr.OneCycleLR(o, 0.1, total_steps=total),
            schedule_every=every,
            data=DATA,
        )
        to = tmp_path / f"{every}-{total}"
        settings = [*BASE[:2], "train.epochs=2"]
        return mh.train(task, to=to, workers=2, settings=settings, quiet=True, launcher=launcher)

    assert trained("step", 6).step == trained("epoch", 2).step == 6
    with pytest.raises(RequestError, match=r"total_steps = 5, and this run .* it 6 times"):
        trained("step", 5)
    with pytest.raises(RequestError, match=r"total_steps = 1, and this run .* it 2 times"):
        trained("epoch", 1)
    assert not (tmp_path / "epoch-1").exists()


def test_warming_up_and_falling() -> None:
    model = nn.Linear(1, 1)
    for shape, at in (("cosine", 0.5), ("linear", 0.5), ("constant", 1.0)):
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        schedule = mh.warmup(4, total=12, shape=shape)(optimizer)  # type: ignore[arg-type]
        rates: list[float] = []
        for _ in range(13):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
        assert rates[8] == pytest.approx(at)
        assert rates[12] == pytest.approx(1.0 if shape == "constant" else 0.0)
    assert mh.steps_per_epoch(DATA, 12) == 3 and mh.steps_per_epoch(25, 12) == 2
    with pytest.raises(RequestError, match="more than the 100 steps"):
        mh.warmup(100)
    with pytest.raises(RequestError, match="shape is 'square'"):
        mh.warmup(100, shape="square")  # type: ignore[arg-type]
