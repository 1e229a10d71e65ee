"""Compiled or not, a model's tensors have the names of the plain one, and its bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import manyhands as mh
from manyhands.launch.engines.launcher import Launcher
from manyhands.values.plain_names import plain_name

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.norm: nn.Module = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 2)
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.block(x)))


def whole() -> Any:
    return torch.compile(Blocks(), backend="eager")


def parts() -> nn.Module:
    model: Any = Blocks()
    model.block = torch.compile(model.block, backend="eager")
    model.norm = torch.compile(model.norm, backend="eager")  # which has buffers of its own
    return model


def twice() -> Any:
    return torch.compile(parts(), backend="eager")


def in_place() -> nn.Module:
    model = Blocks()
    model.compile(backend="eager")
    return model


def task(model: Callable[[], Any]) -> mh.Task:
    return mh.Task(
        model=model,
        loss=lambda m, b: nn.functional.cross_entropy(m(b["x"]), (b["x"].sum(1) > 0).long()),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        data={"x": X},
    )


BASE = ["train.batch=12", "train.micro_batch=4"]


def trained(launcher: Launcher, to: Path, model: Any, workers: int, *more: str) -> mh.Report:
    settings = [*BASE, "train.steps=3", *more]
    return mh.train(
        task(model), to=to, workers=workers, settings=settings, quiet=True, launcher=launcher
    )


@pytest.fixture(scope="module")
def plain(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> mh.Report:
    return trained(launcher, tmp_path_factory.mktemp("plain") / "run", Blocks, 1)


@pytest.mark.parametrize(
    "model",
    [whole, parts, *(pytest.param(m, marks=pytest.mark.slow) for m in (twice, in_place))],
)
def test_a_compiled_model_is_saved_as_the_plain_one(
    model: Callable[[], Any], plain: mh.Report, launcher: Launcher, tmp_path: Path
) -> None:
    report = trained(launcher, tmp_path / "run", model, 2)
    assert report.fingerprint == plain.fingerprint
    Blocks().load_state_dict(load_file(report.weights), strict=True)
    compiled = model()
    report.load_into(compiled)
    for name, tensor in compiled.state_dict().items():
        assert torch.equal(tensor, load_file(plain.weights)[plain_name(name)])
    for file in report.weights.parent.glob("*.safetensors"):
        assert not [name for name in load_file(file) if "_orig_mod" in name], file


def test_one_goes_on_with_what_the_other_saved(
    plain: mh.Report, launcher: Launcher, tmp_path: Path
) -> None:
    trained(launcher, tmp_path / "run", whole, 2, "train.steps=1")
    again = mh.resume(
        tmp_path / "run",
        task(Blocks),
        workers=1,
        settings=["train.steps=3"],
        quiet=True,
        launcher=launcher,
    )
    assert again.fingerprint == plain.fingerprint


def test_weights_under_the_names_of_a_compiled_model_are_taken(
    plain: mh.Report, launcher: Launcher, tmp_path: Path
) -> None:
    file = tmp_path / "compiled.safetensors"
    save_file({f"_orig_mod.{k}": v for k, v in load_file(plain.weights).items()}, file)
    found = [
        trained(launcher, tmp_path / f"run{i}", Blocks, 1, f"train.start_from={weights}")
        for i, weights in enumerate((file, plain.weights))
    ]
    assert found[0].fingerprint == found[1].fingerprint


def test_what_is_told_about_a_compiled_model_says_plain_names(
    launcher: Launcher, tmp_path: Path
) -> None:
    class Wider(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 3)

    report = trained(launcher, tmp_path / "run", Blocks, 1, "train.steps=1")
    with pytest.raises(mh.RequestError, match=r"'head\.bias' is float32\[2\] there"):
        trained(
            launcher,
            tmp_path / "next",
            lambda: torch.compile(Wider(), backend="eager"),
            1,
            f"train.start_from={report.weights}",
        )
