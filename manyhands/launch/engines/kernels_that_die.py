# SPDX-License-Identifier: Apache-2.0
"""Machines that announce instructions and do not allow them.

Some virtual machines announce AMX and end a process that uses it with SIGILL; torch does, in its
first product in bf16. So where AMX is announced the product is tried once, in a process that may
die of it; where it does, oneDNN is told to make do with less, here and in all workers of this host.
Elsewhere nothing is tried, and nothing takes longer. Whoever sets ONEDNN_MAX_CPU_ISA is left alone.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Set
from contextlib import suppress
from pathlib import Path

from manyhands.values.environment import limit_kernels, limited_kernels

ANNOUNCED = frozenset({"amx_bf16", "amx_tile"})

LADDER = ("", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2")
"""What oneDNN may be held to, best first; "": nothing."""

TRIAL_S = 60.0

Trial = Callable[[str], int]
"""Try bf16 while oneDNN is held to this; the exit code, as subprocess has it."""


def kernels_to_use(flags: Set[str], chosen: str | None, trial: Trial) -> str:
    """What oneDNN must be held to on a processor with these flags; "": to nothing. `chosen`: what
    the user has set."""
    if chosen is not None or not flags & ANNOUNCED:
        return ""
    return next((isa for isa in LADDER if trial(isa) != -signal.SIGILL), LADDER[-1])


def processor_flags() -> frozenset[str]:
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def spare_workers() -> str:
    """Hold this process, and those it starts, to kernels that do not kill them. Returns what a
    person should know; "": nothing. Torch is imported, and has computed nothing yet."""
    isa = kernels_to_use(processor_flags(), limited_kernels(), forked_trial)
    if isa:
        limit_kernels(isa)
    return words(isa)


def words(isa: str) -> str:
    if not isa:
        return ""
    return (
        "this machine announces AMX and does not allow it: a product in bf16 would end in SIGILL. "
        f"ONEDNN_MAX_CPU_ISA={isa} is set for its workers; where AMX works, bf16 may round "
        "differently."
    )


def try_bf16() -> None:
    """What would end a process on such a machine."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(1)
    x = torch.ones(64, 64, dtype=torch.bfloat16)
    functional.linear(x, x)
    images, weights = x.view(1, 64, 8, 8), torch.ones(64, 64, 3, 3, dtype=torch.bfloat16)
    functional.conv2d(images, weights, padding=1)


def forked_trial(isa: str, body: Callable[[], None] = try_bf16) -> int:
    """In a child that has imported torch already, because this process has: 0.1 s."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if isa:
                limit_kernels(isa)
            body()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + TRIAL_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 1


def trial_in_new_process(isa: str) -> int:
    """Where this process must not fork, or has computed already."""
    held = f"environment.limit_kernels({isa!r}); " if isa else ""
    code = (
        f"from manyhands.values import environment; {held}"
        f"from {__name__} import try_bf16; try_bf16()"
    )
    command = [sys.executable, "-c", code]
    folder = Path(__file__).parents[3]
    with suppress(subprocess.TimeoutExpired):
        return subprocess.run(
            command, cwd=folder, capture_output=True, timeout=TRIAL_S, check=False
        ).returncode
    return 1
