"""Tasks on their way to workers: everything arrives, whatever it is made of."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import manyhands as mh
from manyhands.launch.choose_engine import open_engine
from manyhands.launch.engines.launcher import Launcher
from manyhands.launch.hosts.many_hosts import ManyHosts
from manyhands.launch.shipping import ship_files
from manyhands.testing.namespaces import why_not
from manyhands.values.errors import RequestError
from manyhands.values.join_token import write_token
from manyhands.values.run_options import Where

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


# ---- to another host

AWAY = """
import torch, manyhands as mh
from pathlib import Path
from sibling_of_the_task import loss
import aunt_of_the_task
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
def scaled(model, batch):
    scale = float(Path("shipped/scale.txt").read_text())
    return loss(model, batch) * scale * aunt_of_the_task.one()
task = mh.Task(
    model=lambda: torch.nn.Linear(4, 1),
    loss=scaled,
    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    data={'x': x, 'y': x.sum(1)},
)
"""


def test_modules_beside_the_task_and_shipped_files_arrive_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why_not():
        pytest.skip(f"hiding folders: {why_not()}")
    home, away = tmp_path / "home", tmp_path / "away"
    for folder in (home / "shipped", away):
        folder.mkdir(parents=True)
    (home / "sibling_of_the_task.py").write_text(SIBLING)
    (home / "aunt_of_the_task.py").write_text("from math import tau\ndef one():\n    return 1.0\n")
    (home / "shipped" / "scale.txt").write_text("0.5")
    (home / "task.py").write_text(AWAY)
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(home)])
    for name in ("sibling_of_the_task", "aunt_of_the_task"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    how: dict[str, Any] = {"workers": 1, "settings": ["train.batch=16"], "quiet": True}
    here = mh.train("task.py", to=tmp_path / "here", **how)
    where = Where(hosts="here:0", listen="127.0.0.1", ship=(Path("shipped"),))
    hands = open_engine(where)
    assert isinstance(hands, ManyHosts)
    write_token(tmp_path / "token", hands.hosts.listening.key.token())
    join = [sys.executable, "-m", "manyhands", "worker", "--slots", "1"]
    join += [
        "--join",
        f"127.0.0.1:{hands.hosts.server.port}",
        "--token-file",
        str(tmp_path / "token"),
    ]
    hidden = f"mount -t tmpfs none {home}; exec {shlex.join(join)}"
    environment = {**os.environ, "TMPDIR": str(away)}
    daemon = subprocess.Popen(["unshare", "-m", "sh", "-c", hidden], cwd=away, env=environment)
    try:
        there = mh.train("task.py", to=tmp_path / "there", launcher=hands, **how)
        assert there.fingerprint == here.fingerprint
    finally:
        hands.close()
        assert daemon.wait(30) == 0
    assert list(away.iterdir()) == []


def test_what_cannot_be_shipped_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=r"--ship nowhere: there is no such"):
        open_engine(Where(ship=(Path("nowhere"),)))
    for folder in ("in", "out"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.txt").write_text("x" * 100)
    fd = os.memfd_create("test")
    try:
        monkeypatch.chdir(tmp_path / "in")
        with pytest.raises(RequestError, match="the same name"):
            ship_files.pack_files([Path("same.txt"), Path("../out/same.txt")], fd, 0)
        monkeypatch.setattr(ship_files, "MOST_BYTES", 99)
        with pytest.raises(RequestError, match="too much to send to every host"):
            ship_files.pack_files([Path("same.txt")], fd, 0)
        assert ship_files.pack_files([], fd, 7) == 7
    finally:
        os.close(fd)
