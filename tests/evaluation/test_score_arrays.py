"""What metrics keep and models predict travels between workers, however it lies in memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import BinaryAUROC

import manyhands as mh
from manyhands.evaluation.scores import BatchResult, decode, encode, from_array, to_array
from manyhands.launch.engines.launcher import Launcher

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda t: t,
    "a column": lambda t: torch.stack([t, t], -1)[..., 1],
    "turned": lambda t: t.movedim(0, -1) if t.dim() else t,
    "every other one": lambda t: t[::2] if t.dim() else t,
    "expanded": lambda t: t.unsqueeze(0).expand(3, *t.shape),
    "backwards": lambda t: t.flip(0) if t.dim() else t,
    "a part": lambda t: t[1:] if t.dim() else t,
    "nothing": lambda t: t.new_empty(0, *t.shape),
    "conjugated": lambda t: t.conj() if t.is_complex() else t,
    "negated by a bit": lambda t: t.conj().imag if t.is_complex() else t,
    "to be trained": lambda t: t.clone().requires_grad_(t.is_floating_point() or t.is_complex()),
}


@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from(DTYPES),
    looks=st.lists(st.sampled_from(sorted(VIEWS)), max_size=3),
    seed=st.integers(0, 9),
)
def test_every_tensor_comes_back_as_it_was(
    shape: list[int], dtype: torch.dtype, looks: list[str], seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, dtype=torch.complex128, generator=g) * 9
    tensor = (drawn if dtype.is_complex else drawn.real.clone()).to(dtype)
    for look in looks:
        tensor = VIEWS[look](tensor)
    sent = BatchResult(0, 1, 0.5, 1.0, {"score": {"state": [to_array(tensor)]}}, None)
    (received,) = decode([encode([sent])])
    back = from_array(received.states["score"]["state"][0])
    assert (back.dtype, back.shape, back.requires_grad) == (tensor.dtype, tensor.shape, False)
    assert torch.equal(back, tensor.detach())


class Pairs(Metric):
    """Keeps lists, as the area under a curve does: of what it was shown, and of its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", default=[], dist_reduce_fx="cat")
        self.add_state("count", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.seen.append(predictions)
        self.count += len(targets)

    def compute(self) -> Tensor:
        return torch.cat(self.seen).sum() / self.count


class Words(Pairs):
    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.seen.append("a word")


def two_classes(predict: Callable[[Tensor], Tensor], records: int, scores: Any) -> mh.Task:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(40, 4, generator=g)
    y = (x.sum(1) > 0).long()
    return mh.Task(
        model=lambda: torch.nn.Linear(4, 2),
        loss=lambda m, b: torch.nn.functional.cross_entropy(m(b["x"]), b["y"]),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        data={"x": x, "y": y},
        held_out={"x": x[:records], "y": y[:records]},
        predict=lambda m, b: (predict(m(b["x"])), b["y"]),
        scores=scores,
    )


def scored(task: mh.Task, to: Path, launcher: Launcher) -> dict[str, float]:
    settings = ["train.batch=8", "train.steps=2", "evaluate.batch=4"]
    return mh.train(task, to=to, workers=2, settings=settings, quiet=True, launcher=launcher).scores


@pytest.mark.parametrize("predict", [lambda z: z.softmax(1)[:, 1], lambda z: z[:, 1:].squeeze()])
def test_a_last_batch_of_one_record_is_scored(
    predict: Callable[[Tensor], Tensor], launcher: Launcher, tmp_path: Path
) -> None:
    scores = {"area": BinaryAUROC(), "pairs": Pairs(), "mean": lambda p, t: p.mean()}
    found = scored(two_classes(predict, 9, scores), tmp_path / "run", launcher)
    assert 0 <= found["area"] <= 1
    assert found["pairs"] == pytest.approx(found["mean"])


def test_a_state_that_cannot_travel_is_named(launcher: Launcher, tmp_path: Path) -> None:
    task = two_classes(lambda z: z[:, 1], 9, {"words": Words()})
    with pytest.raises((mh.RequestError, mh.RunFailed), match="'words' keeps str in its state"):
        scored(task, tmp_path / "run", launcher)
