"""Small runs whose fingerprints are known: does this machine agree?

What `train.portable` computes must be the same on all x86-64-v3 processors with one torch; on a
machine where it is not, this fails. Of runs without it the fingerprint is known for the kernels (by
their marks) that made it. What was found is told at the end of the tests. With another torch, or on
other kernels, nothing is known; `python -m tests.stories.test_known_fingerprints` writes down what
this machine computes.

Data are made by whole numbers, so that they are the same before any kernel has computed.
"""

import json
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.accounting.ledger import read
from manyhands.accounting.ledger_lines import Computing
from manyhands.launch.choose_engine import open_engine
from manyhands.launch.engines.launcher import Launcher
from manyhands.values.kernels import Kernels
from manyhands.values.run_folder import RunDir
from manyhands.values.run_options import Where
from tests.support.tasks import ConvNet, Tied, classify, next_token

KNOWN = Path(__file__).parents[1] / "known_fingerprints.json"
SETTINGS = ["train.batch=48", "train.micro_batch=24", "train.steps=6", "train.clip_norm=0.5"]
TORCH = str(torch.__version__).partition("+")[0]


def whole(below: int, *shape: int) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    return ((torch.arange(count) * 7919 + 104729) % 1009 % below).view(shape)


def images(*shape: int) -> dict[str, Tensor]:
    return {"x": whole(1009, 96, *shape) / 512 - 1, "y": whole(5, 96)}


def mlp() -> nn.Module:
    """Its products are large enough for oneDNN."""
    return nn.Sequential(nn.Linear(300, 256), nn.Tanh(), nn.Dropout(0.2), nn.Linear(256, 5))


def decayed(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


TASKS: dict[str, Callable[[], mh.Task]] = {
    "mlp, AdamW": lambda: mh.Task(
        model=mlp,
        loss=classify,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
        schedule=decayed,
        data=images(300),
    ),
    "cnn with BatchNorm, SGD": lambda: mh.Task(
        model=ConvNet,
        loss=classify,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
        data=images(3, 8, 8),
    ),
    "transformer, Adam": lambda: mh.Task(
        model=Tied,
        loss=next_token,
        optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=1e-2),
        data={"t": whole(40, 96, 12)},
    ),
}


def trained(launcher: Launcher, under: Path, *, portable: bool) -> tuple[dict[str, str], Kernels]:
    """Fingerprints by task, and what computed them."""
    found: dict[str, str] = {}
    for number, (name, task) in enumerate(TASKS.items()):
        to = under / f"{portable}-{number}"
        settings = [*SETTINGS, f"train.portable={str(portable).lower()}"]
        report = mh.train(
            task(), to=to, workers=2, settings=settings, quiet=True, launcher=launcher
        )
        found[name] = report.fingerprint
        (computing,) = [e for e in read(RunDir(to).ledger) if isinstance(e, Computing)]
    return found, computing.kernels[0]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="train.portable is for x86-64-v3")
def test_portable_runs_have_the_fingerprints_that_are_known(
    launcher: Launcher, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    found, kernels = trained(launcher, tmp_path, portable=True)
    known = json.loads(KNOWN.read_text())["portable"].get(TORCH)
    if known is None:
        record_property("told", f"portable runs: none are known for torch {TORCH}")
        return
    agrees = found == known["fingerprints"]
    word = "agrees" if agrees else "DOES NOT AGREE"
    record_property("told", f"portable runs: {kernels.words} {word} with {known['made_on']}")
    assert found == known["fingerprints"], f"made on {known['made_on']}, here {kernels.words}"


def test_other_runs_are_compared_where_the_same_kernels_are_known(
    launcher: Launcher, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Not a promise: marks do not try all kernels. So it is told, and nothing fails."""
    found, kernels = trained(launcher, tmp_path, portable=False)
    assert found.keys() == TASKS.keys() and kernels.marks
    alike = [k for k in json.loads(KNOWN.read_text())["plain"] if k["marks"] == kernels.marks]
    if not alike:
        record_property("told", f"plain runs: none are known for the kernels of {kernels.words}")
    for known in alike:
        word = "agrees" if found == known["fingerprints"] else "does not agree"
        record_property("told", f"plain runs: {kernels.words} {word} with {known['made_on']}")


def write_down() -> None:
    """What this machine computes, in the place of what was known of its torch or kernels."""
    known = json.loads(KNOWN.read_text()) if KNOWN.exists() else {"portable": {}, "plain": []}
    launcher = open_engine(Where())
    try:
        with tempfile.TemporaryDirectory() as under:
            portable, kernels = trained(launcher, Path(under), portable=True)
            plain, by = trained(launcher, Path(under), portable=False)
    finally:
        launcher.close()
    known["portable"][TORCH] = {"made_on": kernels.processor, "fingerprints": portable}
    known["plain"] = [k for k in known["plain"] if k["marks"] != by.marks]
    known["plain"].append({"made_on": by.words, "marks": by.marks, "fingerprints": plain})
    KNOWN.write_text(json.dumps(known, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(write_down())
