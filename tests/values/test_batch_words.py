"""Below the user's own traceback: what the batch is that was taken for something else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.values.errors import RunFailed
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
        lambda batch: batch["image"] @ torch.zeros(7),
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
