"""What train.portable computes otherwise than torch, in a process of its own."""

import os
import subprocess
import sys

import pytest

from manyhands.values.config import TrainConfig
from manyhands.values.environment import PORTABLE
from manyhands.values.errors import ConfigError


def test_replaced_kernels_compute_what_torch_does_but_for_last_bits() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.training.compute.portable_trial"],
        env={**os.environ, **PORTABLE},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout == "all is well\n", done.stderr


def test_what_cannot_be_portable_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'portable .*"bf16".*"fp32"'):
        TrainConfig(portable=True, precision="bf16")
