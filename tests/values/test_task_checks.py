"""Tasks as strangers write them: each is answered in a sentence, where it is written."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.values.errors import TaskError

GOOD: dict[str, Any] = {
    "model": lambda: nn.Linear(1, 1),
    "loss": lambda model, batch: model(batch["x"]).mean(),
    "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "data": {"x": torch.zeros(4, 1)},
}
PREDICT = {"predict": lambda model, batch: (batch["x"], batch["x"])}
ARRAYS = (torch.zeros(4, 1), torch.zeros(4))

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"optimiser": 1}, "Task has no 'optimiser'; did you mean 'optimizer'? There are: model, loss"),
    ({"metrics": {}}, "did you mean 'scores'?"),
    ({"collate_fn": list}, "did you mean 'collate'?"),
    ({"train_dataset": []}, "did you mean 'data'?"),
    ({"train_dataloader": []}, "did you mean 'data'?"),
    ({"eval_dataset": []}, "did you mean 'held_out'?"),
    ({"val_dataset": []}, "did you mean 'held_out'?"),
    ({"compute_metrics": len}, "did you mean 'scores'?"),
    ({"n_critic": 5}, 'how often each optimizer steps is every={"g": 5}'),
    ({"callbacks": []}, "is given to mh.train(task, on_step=..., on_evaluate=...)"),
    ({"something": 1}, "Task has no 'something'. There are: model, loss"),
    ({"learning_rate": 0.1}, "that is the optimizer's, as in optimizer=lambda model: "),
    ({"epochs": 3}, "That is a setting: --set train.epochs=..."),
    ({"batch_size": 3}, "That is a setting: --set train.batch=..."),
    ({"model": nn.Linear}, "Linear(in_features, out_features, bias, device, dtype) does not take"),
    ({"loss": nn.CrossEntropyLoss()}, "CrossEntropyLoss()(model(batch["),
    ({"loss": nn.MSELoss}, "loss is MSELoss(), which is given predictions"),
    ({"loss": nn.functional.mse_loss}, "loss=lambda model, batch: mse_loss(model(batch["),
    ({"loss": lambda batch: 0}, "loss is called with (model, batch), which <lambda>(batch) does"),
    ({"optimizer": torch.optim.Adam}, "lambda model: Adam(model.parameters(), lr=...)"),
    ({"optimizer": partial(torch.optim.Adam, lr=1)}, "optimizer is the class Adam"),
    ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "a SGD that has been made already"),
    ({"schedule": torch.optim.lr_scheduler.CosineAnnealingLR}, "argument: 'T_max'"),
    ({"predict": lambda model: 0}, "predict is called with (model, batch)"),
    ({"collate": lambda: 0}, "collate is called with (records)"),
    ({**PREDICT, "scores": ["accuracy"]}, 'scores is list; give each a name: scores={"'),
    ({**PREDICT, "scores": {"a": lambda p: 0}}, "score 'a' is called with (predictions, targets)"),
    ({"held_out": "0.2"}, "a fraction is a number: held_out=0.2."),
    ({"held_out": "20%"}, "a fraction is a number: held_out=0.2."),
    ({"held_out": ARRAYS}, "held_out is a tuple of 2 arrays; give its columns names"),
    ({"data": ARRAYS}, "data is a tuple of 2 arrays; give its columns names"),
]


@pytest.mark.parametrize("wrong, said", WRONG, ids=[said[:40] for _, said in WRONG])
def test_it_is_answered(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError) as told:
        mh.Task(**{**GOOD, **wrong})
    assert said in str(told.value), str(told.value)


def test_fields_are_given_by_name_and_some_are_needed() -> None:
    with pytest.raises(TaskError, match="given by name"):
        mh.Task(GOOD["model"])  # type: ignore[misc]
    with pytest.raises(TaskError, match="model is missing"):
        mh.Task(loss=GOOD["loss"])  # type: ignore[call-arg]


class OwnOptimizer(torch.optim.SGD):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)


class Callable_:  # noqa: N801
    def __call__(self, model: nn.Module, batch: Any, more: int = 3, **others: Any) -> Any:
        return model(batch["x"]).mean()


RIGHT: list[dict[str, Any]] = [
    {"model": nn.Linear(1, 1)},
    {"model": partial(nn.Linear, 1, 1)},
    {"optimizer": OwnOptimizer},
    {"loss": Callable_()},
    {"loss": lambda *arguments: 0},
    {"data": "data/clicks", "held_out": "2024/clicks"},
    {"data": [torch.zeros(2), torch.zeros(2)]},
    {"schedule": partial(torch.optim.lr_scheduler.StepLR, step_size=3)},
]


@pytest.mark.parametrize("right", RIGHT)
def test_what_works_is_let_through(right: dict[str, Any]) -> None:
    mh.Task(**{**GOOD, **right})


@pytest.mark.parametrize(
    "wrong, said",
    [
        ("worker", "'worker'; did you mean 'workers'? There are: task, to, config, workers"),
        ("epochs", 'that is a setting: settings=["train.epochs=..."]'),
        ("batch_size", 'that is a setting: settings=["train.batch=..."]'),
        ("lr", 'that is the task\'s: params={"lr": ...}'),
    ],
)
def test_keywords_of_train_are_answered_too(wrong: str, said: str) -> None:
    with pytest.raises(mh.RequestError) as told:
        mh.train(mh.Task(**GOOD), **{wrong: 3})
    assert said in str(told.value) and isinstance(told.value, TypeError)


@pytest.mark.parametrize(
    "setting, said",
    [
        ("lr=3e-4", "--param lr=3e-4; while a run trains: manyhands set RUN lr=3e-4"),
        ("train.lr=0.5", "--param lr=0.5; while"),
        ("learning_rate=1", "def task(lr=...): return mh.Task(...)"),
        ("batch=3", "did you mean --set train.batch=3?"),
        ("batch_size=3", "did you mean --set train.batch=3?"),
        ("train.batch_size=3", "did you mean train.batch?"),
        ("train.csv=true", "did you mean log.csv?"),
        ("every_steps=3", "write it as section.key=value"),
        ("something=3", "Parameters of the task are given by --param"),
    ],
)
def test_settings_in_the_wrong_place_are_answered(setting: str, said: str) -> None:
    with pytest.raises(mh.RequestError) as told:
        mh.RunConfig().with_settings([setting])
    assert said in str(told.value), str(told.value)
