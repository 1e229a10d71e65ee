"""Agents that a real mpirun starts, and gradients that travel over MPI: the same bits."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.values.join_token import key_for
from tests.training.collective.test_mpi import needs_mpi

pytestmark = needs_mpi
TASK = Path(__file__).parents[3] / "examples" / "01_digits.py"
SETTINGS = ["--set", "train.epochs=2"]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.mark.parametrize("collective", ["mpi", pytest.param("sockets", marks=pytest.mark.slow)])
def test_agents_started_by_mpirun(launcher: Any, tmp_path: Path, collective: str) -> None:
    token, run = tmp_path / "token", tmp_path / "run"
    key_for(token)
    with socket.create_server(("127.0.0.1", 0)) as free:
        there = f"127.0.0.1:{free.getsockname()[1]}"
    manyhands = [sys.executable, "-m", "manyhands"]
    mpirun = ["mpirun", "-n", "2", "--oversubscribe", "--bind-to", "none"]
    join = ["--join", there, "--token-file", str(token), "--slots", "1"]
    agents = subprocess.Popen(
        [*mpirun, *manyhands, "worker", *join],
        env={**os.environ, **AS_ROOT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        train = [*manyhands, "train", str(TASK), "--to", str(run), "--quiet", "--workers", "2:2"]
        train += ["--hosts", "here:0", "--listen", there, "--token-file", str(token)]
        train += ["--set", f"train.collective={collective}", *SETTINGS]
        said = subprocess.run(train, capture_output=True, text=True, timeout=120)
        assert said.returncode == 0, said.stderr
        out, _ = agents.communicate(timeout=60)
        assert agents.returncode == 0, out
    finally:
        agents.kill()
        agents.communicate()
    calm = mh.train(
        TASK,
        to=tmp_path / "calm",
        workers=1,
        settings=SETTINGS[1::2],
        quiet=True,
        launcher=launcher,
    )
    assert mh.fingerprint(run) == calm.fingerprint
