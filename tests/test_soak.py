"""A short soak: runs that are disturbed from outside at moments nobody planned."""

from pathlib import Path

import pytest

from manyhands.launch.launchers import Launcher
from tests.soak import choose, run_round


@pytest.mark.parametrize(
    "seed", [7, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (6, 8))]
)
def test_disturbed_at_random(launcher: Launcher, tmp_path: Path, seed: int) -> None:
    done = run_round(choose(seed), launcher, tmp_path)
    assert not done.problems, f"after {done.disturbances}, {done.recoveries} recoveries"
