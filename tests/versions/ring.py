# SPDX-License-Identifier: Apache-2.0
"""The promise on the torch that is installed here: a few tasks, trained on one, two and three
workers, over shared memory and gloo, with one of them killed, resumed and replayed. Prints one JSON
object: fingerprints by task, and what was not the same."""

import json
import platform
import tempfile
from pathlib import Path

import torch

import manyhands as mh
from manyhands.launch.choose_engine import open_engine
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories.replay import replay
from manyhands.values.planned_faults import FaultPlan
from manyhands.values.run_options import Where
from tests.support.tasks import make

CUT = ["train.batch=24", "train.micro_batch=4", "train.steps=8"]
KINDS: dict[str, list[str]] = {
    "wide": [],
    "cnn": [],
    "cnn-sgd": ["train.clip_norm=0.3"],
    "lstm": ["train.clip_norm=0.1"],
    "transformer": ["train.precision=bf16"],
    "own": [],
    "augmented": [],
}


def fingerprints(launcher: Launcher, kind: str, under: Path) -> dict[str, str]:
    """What was done → the weights that came of it."""

    def trained(to: str, workers: int, *settings: str, faults: FaultPlan | None = None) -> str:
        return mh.train(
            make(kind),
            to=under / to,
            workers=workers,
            settings=[*CUT, *KINDS[kind], *settings],
            quiet=True,
            launcher=launcher,
            faults=faults,
        ).fingerprint

    killed = FaultPlan().kill(rank=1, at_step=3, at="update")
    found = {
        "plain loop": trained("alone", 1, "train.sync=alone"),
        "1 worker": trained("1", 1),
        "2 workers": trained("2", 2, "checkpoint.every_steps=3"),
        "3 workers": trained("3", 3),
        "3 workers, one killed": trained("killed", 3, faults=killed),
        "2 workers over gloo": trained("gloo", 2, "train.collective=gloo"),
    }
    trained("resumed", 2, "train.steps=5")
    found["5 steps, resumed"] = mh.resume(
        under / "resumed",
        make(kind),
        workers=1,
        settings=["train.steps=8"],
        quiet=True,
        launcher=launcher,
    ).fingerprint
    again = replay(under / "2", make(kind), step=4, to=8, launcher=launcher)
    found["replayed"] = again.fingerprint if again.same else "; ".join(again.differences)
    return found


def main() -> None:
    launcher = open_engine(Where())
    try:
        with tempfile.TemporaryDirectory() as under:
            found = {kind: fingerprints(launcher, kind, Path(under) / kind) for kind in KINDS}
    finally:
        launcher.close()
    unlike = {kind: prints for kind, prints in found.items() if len(set(prints.values())) > 1}
    print(
        json.dumps(
            {
                "torch": str(torch.__version__),
                "python": platform.python_version(),
                "kernels": torch.backends.cpu.get_cpu_capability(),
                "fingerprints": {kind: prints["plain loop"] for kind, prints in found.items()},
                "unlike": unlike,
            }
        )
    )


if __name__ == "__main__":
    main()
