"""Every option of `train` works with --fold all, or is refused by its name."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

import manyhands as mh
from manyhands.stories.cross_validate import REFUSED, fold_command, train_folds
from manyhands.values.errors import RequestError
from manyhands.values.option_fields import command_option
from manyhands.values.report import Report
from manyhands.values.run_options import RunRequest

GIVEN: dict[str, tuple[Any, list[str]]] = {
    "workers": ("1:3", ["--workers=1:3"]),
    "samples_per_second": (50.0, ["--samples-per-second=50.0"]),
    "sync": ("server:count=2", ["--sync=server:count=2"]),
    "settings": (("log.csv=true", "train.seed=3"), ["--set=log.csv=true", "--set=train.seed=3"]),
    "params": (("lr=0.1", "width=8"), ["--param=lr=0.1", "--param=width=8"]),
    "engine": ("inline", ["--engine=inline"]),
    "hosts": ("a,b:4", ["--hosts=a,b:4"]),
    "token_file": (Path("t o k e n"), ["--token-file=t o k e n"]),
    "ssh": ("ssh -p 2222", ["--ssh=ssh -p 2222"]),
    "worker_resources": ("CPU=2", ["--worker-resources=CPU=2"]),
    "ray_token_file": (Path("ray"), ["--ray-token-file=ray"]),
    "spread": (True, ["--spread"]),
    "ship": ((Path("a"), Path("b c")), ["--ship=a", "--ship=b c"]),
}
"""Option → a value, and what the command of a fold is given."""

OURS = {"task", "to", "quiet", "on_end"}
"""The file, a folder with one for each fold, whether we say what they came to, and what follows."""


def test_every_option_is_passed_on_or_refused() -> None:
    options = {each.name for each in fields(RunRequest) if command_option(each)}
    assert options == set(GIVEN) | set(REFUSED) | OURS


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("resumed", [False, True])
def test_an_option_is_passed_on(name: str, resumed: bool) -> None:
    value, words = GIVEN[name]
    request = RunRequest(Path("-task.py"), **{name: value})
    command = fold_command(request, Path("runs/f"), 2, resumed=resumed)
    beginning = ["resume"] if resumed else ["train", "--to", "runs/f", "--fold", "2"]
    assert command == [*beginning, *words, "--json", "--", "runs/f" if resumed else "-task.py"]


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_cannot_be_is_refused_by_name(name: str, tmp_path: Path) -> None:
    request = RunRequest(tmp_path / "task.py", **{name: "2h"})
    with pytest.raises(RequestError, match=f"--fold all takes no --{name.replace('_', '-')}: "):
        train_folds(request, tmp_path / "folds", say=print)


TASK = """
import torch
from torch import nn

import manyhands as mh

task = mh.Task(
    model=lambda: nn.Linear(1, 2),
    loss=lambda m, b: nn.functional.cross_entropy(m(b["x"].float().reshape(-1, 1)), b["y"].long()),
    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    data={data!r},
)
"""


def test_the_options_reach_the_runs(tmp_path: Path) -> None:
    csv = tmp_path / "rows.csv"
    csv.write_text("x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(24)))
    mh.prepare(csv, to=tmp_path / "data", label="y", folds=2, workers=1, quiet=True)
    file = tmp_path / "task.py"
    file.write_text(TASK.format(data=str(tmp_path / "data")))
    settings = ("train.batch=4", "train.micro_batch=2", "train.steps=2")
    request = RunRequest(file, engine="inline", settings=settings)
    said: list[str] = []
    folded = train_folds(request, tmp_path / "all of them", say=said.append)
    assert len(folded.reports) == len(said) == 2
    first = tmp_path / "all of them" / "fold-0"
    # Inline has no worker of its own, and so no log.
    assert not list((first / "logs").iterdir()), "--engine inline did not get there"
    report = msgspec.json.decode((first / "report.json").read_bytes(), type=Report)
    assert report.fingerprint == folded.reports[0].fingerprint != folded.reports[1].fingerprint
    # The same again computes nothing; something else is not what is there.
    assert train_folds(request, tmp_path / "all of them", say=said.append) == folded
    longer = request.but(settings=(*settings, "train.steps=3"))
    with pytest.raises(RequestError, match=r"was trained with train\.steps = 2; now it would be 3"):
        train_folds(longer, tmp_path / "all of them", say=said.append)
