"""A child that user code forks, and that comes back from it, is not the worker."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import manyhands as mh
from manyhands.launch.engines.launcher import Launcher

G = torch.Generator().manual_seed(3)
X, Y = torch.randn(60, 6, generator=G), torch.randint(0, 3, (60,), generator=G)
ODD = 17


class Rows(Dataset[Any]):
    def __init__(self, *, forks: bool = False) -> None:
        self.forks = forks

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        if self.forks and k == ODD:
            os.fork()
        return {"x": X[k], "y": Y[k], "k": torch.tensor(k)}


def plain(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def forks(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if ODD in batch["k"].tolist():
        os.fork()
    return plain(model, batch)


def train(loss: Any, data: Any, to: Path, launcher: Launcher) -> mh.Report:
    task = mh.Task(
        model=lambda: nn.Linear(6, 3),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
        data=data,
    )
    return mh.train(
        task,
        config={"train": {"batch": 12, "micro_batch": 3, "epochs": 3}},
        workers=2,
        to=to,
        quiet=True,
        launcher=launcher,
    )


@pytest.mark.timeout(120)
def test_it_ends_where_it_comes_back(tmp_path: Path, launcher: Launcher) -> None:
    calm = train(plain, Rows(), tmp_path / "calm", launcher)
    for name, loss, data in (("loss", forks, Rows()), ("data", plain, Rows(forks=True))):
        found = train(loss, data, tmp_path / name, launcher)
        assert found.fingerprint == calm.fingerprint, name
        logs = "".join(p.read_text() for p in (tmp_path / name / "logs").iterdir())
        assert "a process that your code forked came back from it" in logs
