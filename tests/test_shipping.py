"""Tasks on their way to workers: everything arrives, whatever it is made of."""

from pathlib import Path

import numpy as np
import torch

import manyhands as mh
from manyhands.launch.launchers import Launcher

SIBLING = "import torch\ndef loss(m, b):\n    return ((m(b['x'])[:, 0] - b['y']) ** 2).mean()\n"
TASK = """
import torch, manyhands as mh
from sibling_of_the_task import loss
torch.set_default_dtype(torch.float64)
print("this must not spoil what a command prints")
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
task = mh.Task(
    model=lambda: torch.nn.Linear(4, 1),
    loss=loss,
    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    data={DATA},
)
"""


def train(path: Path, to: Path, launcher: Launcher) -> mh.Report:
    try:
        return mh.train(
            path, to=to, workers=2, settings=["train.batch=16"], quiet=True, launcher=launcher
        )
    finally:
        torch.set_default_dtype(torch.float32)


def test_siblings_and_settings_of_a_task_file_arrive(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "sibling_of_the_task.py").write_text(SIBLING)
    path = tmp_path / "task.py"
    path.write_text(TASK.replace("{DATA}", "{'x': x, 'y': x.sum(1)}"))
    report = train(path, tmp_path / "run", launcher)
    from safetensors.torch import load_file

    assert load_file(report.weights)["weight"].dtype == torch.float64


def test_what_cannot_be_pickled_is_made_in_each_worker(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "sibling_of_the_task.py").write_text(SIBLING)
    path = tmp_path / "task.py"
    unpicklable = "[{'x': x[i], 'y': x[i].sum(), 'f': 0} for i in range(64)]"
    text = TASK.replace("{DATA}", "data").replace(
        "task = ",
        f"import threading\nclass Held(list): pass\ndata = Held({unpicklable})\n"
        "data.lock = threading.Lock()\ntask = ",
    )
    path.write_text(text)
    assert train(path, tmp_path / "run", launcher).step == 4


class Many:
    """A list of small arrays, as variable-length records are."""

    def __init__(self) -> None:
        self.rows = [np.full(1 + i % 7, i, dtype=np.float32) for i in range(30_000)]
        self.large = [np.zeros(5000, dtype=np.float32) for _ in range(300)]

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {"x": np.resize(self.rows[i * 400], 4), "y": self.rows[i][:1][0]}


def test_many_arrays_arrive(launcher: Launcher, tmp_path: Path) -> None:
    task = mh.Task(
        model=lambda: torch.nn.Linear(4, 1),
        loss=lambda m, b: ((m(b["x"] / 3e4)[:, 0] - b["y"] / 64) ** 2).mean(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        data=Many(),
    )
    report = mh.train(
        task,
        to=tmp_path / "run",
        workers=3,
        settings=["train.batch=16"],
        quiet=True,
        launcher=launcher,
    )
    assert report.step == 4
