"""Scores do not depend on the number of workers, and are what one would compute by hand."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
from torchmetrics.regression import PearsonCorrCoef

import manyhands as mh
from manyhands.evaluation.early_stopping import best_step, should_stop
from manyhands.launch.engines.launcher import Launcher
from manyhands.values.errors import ConfigError
from tests.support.tasks import ConvNet, classify, images


def scored() -> mh.Task:
    data = images(n=150)
    return mh.Task(
        model=ConvNet,
        loss=classify,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
        data=data,
        held_out={k: v[:83] for k, v in data.items()},
        predict=lambda m, b: (m(b["x"]), b["y"]),
        scores={
            "accuracy": MulticlassAccuracy(5, average="micro"),
            "auroc": MulticlassAUROC(5, thresholds=None),
            "some": MetricCollection({"f1": MulticlassF1Score(5), "acc": MulticlassAccuracy(5)}),
            "by_class": MulticlassAccuracy(5, average=None),
            "error": lambda p, t: (p.argmax(1) != t).float().mean(),
        },
    )


SETTINGS = ["train.batch=32", "train.micro_batch=4", "train.steps=6", "evaluate.batch=8"]


def test_scores_are_the_same_on_any_number_of_workers(launcher: Launcher, tmp_path: Path) -> None:
    found = [
        mh.train(
            scored(),
            to=tmp_path / name,
            workers=int(name[0]),
            settings=[
                *SETTINGS,
                "evaluate.every_steps=4",
                f"train.collective={name[1:] or 'auto'}",
            ],
            quiet=True,
            launcher=launcher,
        ).scores
        for name in ("1", "2", "3gloo")
    ]
    assert all(scores == found[0] for scores in found)
    assert mh.evaluate(tmp_path / "2", scored()) == found[0], "and so does evaluating it later"
    task, model = scored(), ConvNet()
    load_model(model, mh.Report.weights.fget(_report(tmp_path / "1")))  # type: ignore[misc]
    model.eval()
    with torch.no_grad():
        predicted = model(task.held_out["x"])
    truth = task.held_out["y"]
    accuracy = (predicted.argmax(1) == truth).float().mean().item()
    assert found[0]["accuracy"] == pytest.approx(accuracy)
    assert found[0]["error"] == pytest.approx(1 - accuracy)
    area = MulticlassAUROC(5, thresholds=None)(predicted, truth).item()
    assert found[0]["auroc"] == pytest.approx(area)
    assert {"some/f1", "some/acc", "by_class/0", "by_class/4", "loss"} <= found[0].keys()


def _report(run: Path) -> mh.Report:
    import msgspec

    return msgspec.json.decode((run / "report.json").read_bytes(), type=mh.Report)


def test_metrics_whose_states_cannot_be_merged_see_the_batches_in_order(
    launcher: Launcher, tmp_path: Path
) -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(64, 4, generator=g)
    task = mh.Task(
        model=lambda: torch.nn.Linear(4, 1),
        loss=lambda m, b: ((m(b["x"])[:, 0] - b["y"]) ** 2).mean(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        data={"x": x, "y": x.sum(1)},
        held_out=0.5,
        predict=lambda m, b: (m(b["x"])[:, 0], b["y"]),
        scores={"pearson": PearsonCorrCoef(), "mse": MeanSquaredError()},
    )
    found = [
        mh.train(
            task,
            to=tmp_path / str(n),
            workers=n,
            settings=["train.batch=8", "train.steps=4"],
            quiet=True,
            launcher=launcher,
        ).scores
        for n in (1, 3)
    ]
    assert found[0] == found[1]
    assert 0 < found[0]["pearson"] <= 1 and found[0]["mse"] == pytest.approx(found[0]["loss"])


def test_stopping_early_and_keeping_the_best(launcher: Launcher, tmp_path: Path) -> None:
    report = mh.train(
        scored(),
        to=tmp_path / "run",
        workers=2,
        settings=[
            "train.batch=32",
            "train.steps=400",
            "evaluate.every_steps=2",
            "evaluate.stop_early=3",
            "evaluate.by=loss",
            "checkpoint.every_steps=2",
            "checkpoint.keep_last=2",
            "checkpoint.keep_best=loss",
        ],
        quiet=True,
        launcher=launcher,
    )
    assert report.step < 400 and "loss has not improved in 3 evaluations" in report.because
    kept = sorted(int(p.name[5:]) for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == [report.step - 6, report.step - 2, report.step]
    best = mh.evaluate(tmp_path / "run", scored(), step=report.step - 6)
    assert best["loss"] < report.scores["loss"]


def test_the_best_step_and_when_to_stop() -> None:
    history = [(k * 10, {"loss": loss, "acc": -loss}) for k, loss in enumerate([3, 1, 2, 1])]
    assert best_step(history, "loss") == best_step(history, "acc") == 10
    assert best_step(history, "acc:min") == 0
    assert best_step([(5, {"loss": float("nan")})], "loss") is None
    assert should_stop(history, by="loss", patience=2) is not None
    assert should_stop(history, by="loss", patience=3) is None
    assert should_stop(history, by="loss", patience=None) is None
    with pytest.raises(ConfigError, match="names the score 'f1'; the task has: loss, acc"):
        best_step(history, "f1")
    with pytest.raises(ConfigError, match="write the direction as"):
        best_step(history, "loss:down")


def test_evaluating_needs_held_out_records(launcher: Launcher, tmp_path: Path) -> None:
    task = mh.Task(
        model=ConvNet,
        loss=classify,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        data=images(),
    )
    with pytest.raises(ConfigError, match=r"\[evaluate\] needs held-out records"):
        mh.train(
            task,
            to=tmp_path / "run",
            settings=["evaluate.every_steps=1"],
            quiet=True,
            launcher=launcher,
        )
