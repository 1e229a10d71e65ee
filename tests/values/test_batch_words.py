"""Below the user's own traceback: what the batch is that was taken for something else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import manyhands as mh
from manyhands.values.errors import ManyhandsError, RunFailed
from manyhands.values.user_frames import user_traceback

DICT = {"image": torch.zeros(8, 1, 4), "label": torch.zeros(8, dtype=torch.long), "name": ["a"] * 8}
DICT_SAID = "batch is a dict with image: float32 (8, 1, 4), label: int64 (8,), name: list of 8"
LIST = [torch.zeros(8, 4), torch.zeros(8)]
LIST_SAID = "batch is a list with [0]: float32 (8, 4), [1]: float32 (8,)"


def unpacked(batch: Any) -> Any:
    first, second, third, fourth = batch
    return first, second, third, fourth


def keys_for_tensors(batch: Any) -> Any:
    image, _, _ = batch
    return nn.functional.linear(image, torch.zeros(4, 4))


CASES: list[tuple[Any, Any, str]] = [
    (DICT, lambda batch: batch["x"], DICT_SAID),
    (DICT, lambda batch: batch[0], DICT_SAID),
    (DICT, lambda batch: batch[:, 0], DICT_SAID),
    (DICT, lambda batch: batch.x, DICT_SAID),
    (DICT, lambda batch: batch("image"), DICT_SAID),
    (DICT, unpacked, DICT_SAID),
    (DICT, keys_for_tensors, DICT_SAID),
    (LIST, lambda batch: batch["x"], LIST_SAID),
    (LIST, lambda batch: batch[2], LIST_SAID),
    (LIST, lambda batch: batch.x, LIST_SAID),
    (LIST, unpacked, LIST_SAID),
    (tuple(LIST), lambda batch: batch["x"], LIST_SAID.replace("list", "tuple")),
    (LIST[0], lambda batch: batch["x"], "batch is float32 (8, 4)"),
    ({str(n): n for n in range(25)}, lambda batch: batch["x"], "19: int and 5 more"),
    ({}, lambda batch: batch["x"], "batch is a dict with nothing in it"),
    # What torch says of tensors that do not fit:
    (DICT, lambda batch: batch["image"] @ torch.zeros(7), DICT_SAID),
    (DICT, lambda batch: nn.Linear(4, 2)(batch["image"].long()), DICT_SAID),
    (DICT, lambda batch: nn.Linear(5, 2)(batch["image"]), DICT_SAID),
    (DICT, lambda batch: nn.Conv2d(1, 2, 1)(batch["image"].byte()), DICT_SAID),
    (DICT, lambda batch: nn.Conv2d(3, 2, 1)(batch["image"]), DICT_SAID),
    (DICT, lambda batch: nn.Embedding(4, 2)(batch["image"]), DICT_SAID),
    (DICT, lambda batch: nn.Embedding(4, 2)(batch["label"] + 9), DICT_SAID),
    (DICT, lambda batch: cross_entropy(torch.zeros(8, 3), batch["label"].float()), DICT_SAID),
    (DICT, lambda batch: cross_entropy(torch.zeros(8, 3), batch["label"] + 3), DICT_SAID),
    (DICT, lambda batch: cross_entropy(torch.zeros(6, 3), batch["label"]), DICT_SAID),
    (DICT, lambda batch: cross_entropy(torch.zeros(8, 3), batch["image"].long()), DICT_SAID),
    (DICT, lambda batch: batch["label"].mean(), DICT_SAID),
    (DICT, lambda batch: batch["label"].softmax(0), DICT_SAID),
    (DICT, lambda batch: nn.Linear(4, 2)(batch["name"]), DICT_SAID),
    (LIST, lambda batch: nn.Linear(4, 1)(batch[1]), LIST_SAID),
    (LIST[0], lambda batch: batch + torch.zeros(3), "batch is float32 (8, 4)"),
]


@pytest.mark.parametrize("batch, loss, said", CASES)
def test_its_names_and_shapes_are_told(batch: Any, loss: Any, said: str) -> None:
    with pytest.raises(Exception) as raised:
        loss(batch)
    # From here on inwards: this frame is the test's, not that of a function which we call.
    error = raised.value.with_traceback(raised.tb.tb_next)
    assert user_traceback(error).splitlines()[-1].endswith(said), user_traceback(error)


@pytest.mark.parametrize(
    "loss",
    [
        lambda batch: torch.zeros(1).backward(),
        lambda batch: {"own": 1}["label"],
        lambda batch: [1, 2].nothing,  # type: ignore[attr-defined]
        lambda batch: int("x"),
    ],
)
def test_what_is_about_something_else_says_nothing_of_it(loss: Any) -> None:
    with pytest.raises(Exception) as raised:
        loss(DICT)
    error = raised.value.with_traceback(raised.tb.tb_next)
    assert "batch is" not in user_traceback(error)


def by_name(batch: Any, model: Any) -> Any:
    return model(batch["x"])


def attribute(batch: Any, model: Any) -> Any:
    return model.encode(batch.x)


def odd_names(rows: Any, encoder: Any) -> Any:
    x, y = rows
    return encoder(x), y


def odd_names_called(rows: Any, encoder: Any) -> Any:
    return encoder(rows)


class CalledLoss:
    def __call__(self, batch: Any, model: Any) -> Any:
        return model(batch["x"])


SWAPPED: list[tuple[Any, nn.Module, str]] = [
    (by_name, nn.Linear(4, 1), "  by_name is called as by_name(model, batch): batch is the model "),
    (by_name, nn.Sequential(nn.Linear(4, 1)), "  by_name is called as by_name(model, batch): "),
    (by_name, nn.ModuleDict(), "  by_name is called as by_name(model, batch): batch is the model "),
    (attribute, nn.Linear(4, 1), "  attribute is called as attribute(model, batch): "),
    (odd_names, nn.Linear(4, 1), "  odd_names is called as odd_names(model, batch): rows is the"),
    (odd_names_called, nn.Linear(4, 1), "  odd_names_called is called as odd_names_called(model"),
    (lambda b, m: m(b["x"]), nn.Linear(4, 1), "  it is called as (model, batch): b is the model "),
    (CalledLoss(), nn.Linear(4, 1), "  it is called as (model, batch): batch is the model (Linear"),
]


@pytest.mark.parametrize("loss, model, said", SWAPPED)
def test_a_loss_that_takes_the_batch_first_is_told(loss: Any, model: Any, said: str) -> None:
    with pytest.raises(Exception) as raised:
        loss(model, DICT)
    lines = user_traceback(raised.value.with_traceback(raised.tb.tb_next)).splitlines()
    assert lines[-1].startswith(said), lines
    assert lines[-1].endswith(DICT_SAID.removeprefix("batch ")), lines


class Wrong(nn.Module):
    def forward(self, x: Any) -> Any:
        return self["x"] + x  # type: ignore[index]


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: model.encode(batch["image"]),
        lambda model, batch: model(batch["x"]),
        lambda net, batch: int("x"),
        lambda model, batch: Wrong()(batch),
    ],
)
def test_a_loss_that_takes_the_model_first_is_not_told_so(loss: Any) -> None:
    with pytest.raises(Exception) as raised:
        loss(nn.Linear(4, 1), DICT)
    told = user_traceback(raised.value.with_traceback(raised.tb.tb_next))
    assert "is called as" not in told


def test_a_model_that_is_called_by_us_is_not_taken_for_a_loss() -> None:
    with pytest.raises(TypeError) as raised:
        Wrong()(DICT)
    trace = raised.tb
    while trace.tb_frame.f_code.co_name != "forward":
        assert trace.tb_next is not None
        trace = trace.tb_next
    assert "is called as" not in user_traceback(raised.value.with_traceback(trace))


def on_a_gpu(said: str) -> Any:
    raise (AssertionError if "compiled" in said else RuntimeError)(said)


@pytest.mark.parametrize(
    "said",
    [
        "Torch not compiled with CUDA enabled",
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
        "No CUDA GPUs are available",
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you",
    ],
)
def test_who_puts_things_on_a_gpu_hears_who_does_that(said: str) -> None:
    with pytest.raises((AssertionError, RuntimeError)) as raised:
        on_a_gpu(said)
    assert user_traceback(raised.value).splitlines()[-1] == (
        '  Workers put the model and each batch on train.device ("cpu", unless it says "cuda") '
        'themselves: leave out .cuda(), .to("cuda") and device="cuda".'
    )
    with pytest.raises(RuntimeError) as another:
        on_a_gpu("CUDA error: device-side assert triggered")
    assert "train.device" not in user_traceback(another.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("where", ["model", "loss"])
def test_a_verdict_says_who_puts_things_on_a_gpu(where: str, tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        x = batch["x"].cuda() if where == "loss" else batch["x"]
        return model(x).mean()

    task = mh.Task(
        model=lambda: nn.Linear(4, 1).to("cuda" if where == "model" else "cpu"),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data={"x": torch.zeros(16, 4)},
    )
    with pytest.raises(ManyhandsError, match=r"leave out .cuda\(\), .to\(.cuda.\)"):
        mh.train(task, to=tmp_path / "run", engine="inline", quiet=True, settings=["train.batch=8"])


def test_a_verdict_says_it(tmp_path: Path) -> None:
    task = mh.Task(
        model=lambda: nn.Linear(4, 1),
        loss=lambda model, b: model(b["x"]).mean() + b["z"].mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data={"x": torch.zeros(16, 4), "y": torch.zeros(16)},
    )
    with pytest.raises(RunFailed) as told:
        mh.train(task, to=tmp_path / "run", engine="inline", quiet=True, settings=["train.batch=8"])
    lines = told.value.verdict.splitlines()
    place = lines.index("  KeyError: 'z'" if "  KeyError: 'z'" in lines else "KeyError: 'z'")
    assert lines[place + 1] == "  b is a dict with x: float32 (1, 4), y: float32 (1,)"
    assert any("test_batch_words.py" in line for line in lines[:place])
