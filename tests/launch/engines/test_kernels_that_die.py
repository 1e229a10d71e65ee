"""Machines that announce AMX and do not allow it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.launch.engines import kernels_that_die
from manyhands.launch.engines.kernels_that_die import (
    forked_trial,
    kernels_to_use,
    trial_in_new_process,
)

AMX = frozenset({"avx2", "amx_bf16", "amx_tile"})
DIES = -signal.SIGILL


@pytest.mark.parametrize(
    ("flags", "chosen", "dies_with", "uses", "tried"),
    [
        (frozenset({"avx2"}), None, {""}, "", []),
        (AMX, "AVX2", {""}, "", []),
        (AMX, None, set[str](), "", [""]),
        (AMX, None, {""}, "AVX512_CORE_BF16", ["", "AVX512_CORE_BF16"]),
        (AMX, None, {"", "AVX512_CORE_BF16"}, "AVX512_CORE",
         ["", "AVX512_CORE_BF16", "AVX512_CORE"]),
    ],
)  # fmt: skip
def test_only_where_it_is_announced_and_dies(
    flags: frozenset[str], chosen: str | None, dies_with: set[str], uses: str, tried: list[str]
) -> None:
    seen: list[str] = []

    def trial(isa: str) -> int:
        seen.append(isa)
        return DIES if isa in dies_with else 0

    assert kernels_to_use(flags, chosen, trial) == uses and seen == tried


def test_a_trial_that_fails_otherwise_changes_nothing() -> None:
    assert kernels_to_use(AMX, None, lambda isa: 1) == ""


def test_a_child_that_dies_of_it_is_seen() -> None:
    assert forked_trial("", lambda: os.kill(os.getpid(), signal.SIGILL)) == DIES
    assert forked_trial("", lambda: None) == 0


def test_here_bf16_works_held_back_or_not() -> None:
    """The real products, in a process of its own."""
    assert trial_in_new_process("AVX2") == 0


AGENT = """
import os, signal, sys, socket
from manyhands.launch.engines import fork_agent, kernels_that_die
kernels_that_die.processor_flags = lambda: frozenset({"amx_tile"})
def dies(isa):
    return kernels_that_die.real(isa, lambda: isa or os.kill(os.getpid(), signal.SIGILL))
kernels_that_die.real, kernels_that_die.forked_trial = kernels_that_die.forked_trial, dies
print(kernels_that_die.spare_workers())
print(os.environ["ONEDNN_MAX_CPU_ISA"])
"""


def test_where_it_dies_workers_are_held_to_less_and_it_is_said() -> None:
    env = {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"}
    done = subprocess.run(
        [sys.executable, "-c", AGENT],
        env={**env, "PYTHONPATH": str(Path(kernels_that_die.__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = done.stdout.splitlines()
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 is set" in said[0], done.stderr
    assert said[1] == "AVX512_CORE_BF16"
