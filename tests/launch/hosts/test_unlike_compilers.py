"""`train.compile` on hosts whose compilers are not the same: one of them is turned away.

The other compiler is ours under another version, so that it really runs and no bits would differ:
what is tested is that it is asked, and heard.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import manyhands as mh
from manyhands.accounting.ledger import read
from manyhands.accounting.ledger_lines import Computing
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories.replay import replay
from manyhands.values.kernels import COMPILED
from manyhands.values.run_folder import RunDir
from tests.catalogue.case import adamw, classify, rows
from tests.support.unlike_host import beside_another

OTHER = """#!/bin/sh
[ "$1" = --version ] && echo 'g++ (Elsewhere 99.1) 99.1.0' && exit
exec {real} "$@"
"""


def other_compiler(folder: Path) -> Path:
    real = shutil.which(os.environ.get("CXX", "g++"))
    assert real is not None
    path = folder / "g++"
    path.write_text(OTHER.format(real=real))
    path.chmod(0o755)
    return path


def task() -> mh.Task:
    return mh.Task(model=lambda: nn.Linear(6, 3), loss=classify, optimizer=adamw, data=rows())


def train(launcher: Launcher, to: Path, workers: int) -> mh.Report:
    settings = ["train.batch=12", "train.micro_batch=6", "train.steps=1", "train.compile=true"]
    return mh.train(
        task(), to=to, workers=workers, settings=settings, quiet=True, launcher=launcher
    )


def told(run: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_host_with_another_compiler_is_turned_away(launcher: Launcher, tmp_path: Path) -> None:
    # Which instructions work has been tried in the cache that all of us use.
    here = {"CXX": str(other_compiler(tmp_path)), "TORCHINDUCTOR_CACHE_DIR": default_cache_dir()}
    with beside_another(tmp_path, **here) as hosts:
        refused = train(hosts, tmp_path / "refused", 2)
    assert refused.workers == 1
    (warned,) = told(tmp_path / "refused", "Warned")
    assert "with another compiler (other: " in warned["text"]
    assert "compiled by GCC (Elsewhere 99.1) 99.1.0 for" in warned["text"]
    assert "other is turned away. Give both the same C++ compiler" in warned["text"]
    assert "portable" not in warned["text"], "it does not go with train.compile"
    gone = [e["what"] for e in told(tmp_path / "refused", "Hosted") if e["host"] == "other"]
    assert any("it computes otherwise than" in what for what in gone)

    run = RunDir(tmp_path / "refused")
    (computing,) = [e for e in read(run.ledger) if isinstance(e, Computing)]
    (kernels,) = computing.kernels
    assert kernels.compiler and warned["text"].count(kernels.compiler) == 1, "both are named"
    run.ledger.write_text(run.ledger.read_text().replace(kernels.marks[COMPILED], "0" * 12))
    again = replay(tmp_path / "refused", task(), step=0, launcher=launcher)
    assert again.same and "with another compiler" in (again.otherwise or "")
