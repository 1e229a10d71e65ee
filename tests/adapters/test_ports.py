"""The ports in docs/coming_from.md: what stands there is what the examples are, and each has the
bits of its plain version on the same micro-batches, on any number of workers, through a kill."""

# pyright: basic

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import manyhands as mh
from manyhands.data.ordering.epoch_order import order
from manyhands.launch.engines.launcher import Launcher
from manyhands.values.loaded_task import load_task
from manyhands.values.planned_faults import FaultPlan
from tests.catalogue import reference
from tests.catalogue.case import Case, Settings
from tests.catalogue.test_catalogue import compare

ROOT = Path(mh.__file__).parent.parent
PAGE = (ROOT / "docs" / "coming_from.md").read_text()


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_loop_in_the_docs_runs_and_the_port_is_the_example() -> None:
    before, after = blocks()[:2]
    names: dict[str, Any] = {"print": lambda *words: names.setdefault("said", words)}
    exec(compile(before, "before", "exec"), names)
    with torch.random.fork_rng():
        names["main"]()
    assert names["said"][0] == "accuracy" and names["said"][1] > 0.8
    assert after in (ROOT / "examples" / "21_from_a_loop.py").read_text()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_port_of_a_loop_has_the_bits_of_the_loop(
    workers: int, launcher: Launcher, tmp_path: Path
) -> None:
    path = ROOT / "examples" / "21_from_a_loop.py"
    task = load_task(path).task
    faults = FaultPlan().kill(rank=1, at_step=5, at="update") if workers == 3 else FaultPlan()
    found = mh.train(
        path,
        to=tmp_path / "run",
        workers=workers,
        settings=["train.epochs=2"],
        quiet=True,
        launcher=launcher,
        faults=faults,
    )
    case = Case(
        "loop",
        "",
        model=task.model,
        loss=task.loss,
        optimizer=task.optimizer,
        schedule=task.schedule,
        schedule_every="epoch",
        data=task.data,
        settings=Settings(seed=0, batch=64, micro_batch=8, epochs=2),
    )
    expected = reference.train(case, lambda epoch: order(0, epoch, 1500)[range(1500)].tolist())
    compare(load_file(found.weights), expected)
