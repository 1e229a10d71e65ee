"""The promise: the fingerprint does not depend on the number of workers or how bytes move."""

from pathlib import Path

import pytest

import manyhands as mh
from manyhands.launch.engines.launcher import Launcher
from tests.support.tasks import make

SETTINGS: dict[str, list[str]] = {
    "cnn": [],
    "cnn-sgd": ["train.clip_norm=0.3"],
    "lstm": ["train.clip_norm=0.1"],
    "transformer": ["train.precision=bf16"],
    "odd": ["train.clip_norm=0.5"],
    "augmented": [],
    "own": [],
    "wide": ["train.threads=2", "train.clip_norm=0.2"],
}


def fingerprint(launcher: Launcher, to: Path, kind: str, workers: int, *settings: str) -> str:
    report = mh.train(
        make(kind),
        to=to,
        workers=workers,
        settings=["train.epochs=2", *SETTINGS[kind], *settings],
        quiet=True,
        launcher=launcher,
    )
    return report.fingerprint


CUTS = [(8, 4), (6, 6), (13, 3)]
CASES = [
    pytest.param(
        kind, *cut, marks=[pytest.mark.slow] * ((k > 0 and kind != "odd") or kind == "wide")
    )
    for kind in SETTINGS
    for k, cut in enumerate(CUTS)
]


@pytest.mark.parametrize(("kind", "m", "size"), CASES)
def test_any_number_of_workers_gives_the_same_bits(
    kind: str, m: int, size: int, launcher: Launcher, tmp_path: Path
) -> None:
    cut = (f"train.batch={m * size}", f"train.micro_batch={size}")
    alone = fingerprint(launcher, tmp_path / "alone", kind, 1, "train.sync=alone", *cut)
    counts = {6: (1, 3), 8: (2, 5, 8), 13: (3, 4)}[m]
    for n in counts:
        shared = fingerprint(launcher, tmp_path / f"shared{n}", kind, n, *cut)
        assert shared == alone, f"{n} workers over shared memory"
    gloo = fingerprint(launcher, tmp_path / "gloo", kind, 2, "train.collective=gloo", *cut)
    assert gloo == alone, "2 workers over gloo"
