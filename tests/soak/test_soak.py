"""A short soak: runs that are disturbed from outside at moments nobody planned."""

from pathlib import Path

import pytest

from manyhands.launch.engines.launcher import Launcher
from tests.soak.one_host import choose, run_round


@pytest.mark.slow
@pytest.mark.parametrize("seed", [6, 7, 8])
def test_disturbed_at_random(launcher: Launcher, tmp_path: Path, seed: int) -> None:
    done = run_round(choose(seed), launcher, tmp_path)
    assert not done.problems, f"after {done.disturbances}, {done.recoveries} recoveries"
