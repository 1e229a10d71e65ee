# SPDX-License-Identifier: Apache-2.0
"""Environment variables and the search path. The only reader of the environment."""

import os
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


def agent_environment() -> dict[str, str]:
    """The environment of a host agent and so of its workers.

    malloc is told to keep freed memory: a training step frees and asks again for the same large
    blocks, and returning them to the kernel each time costs page faults (5-10 % of a GPT step).
    """
    tunables = {
        "glibc.malloc.mmap_threshold": 1 << 30,
        "glibc.malloc.trim_threshold": 1 << 32,
    }
    ours = ":".join(f"{name}={value}" for name, value in tunables.items())
    theirs = os.environ.get("GLIBC_TUNABLES")
    # OMP_NUM_THREADS is left alone: train.threads decides, by torch.set_num_threads.
    return {**os.environ, "GLIBC_TUNABLES": f"{ours}:{theirs}" if theirs else ours}


PORTABLE = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
}
"""They fix the kernels of torch, oneDNN and MKL to those of every x86-64-v3 processor. MKL's AVX2
branch will not do: on an AMD processor MKL silently takes another."""


KERNELS = "ONEDNN_MAX_CPU_ISA"


def limited_kernels() -> str | None:
    """What the user holds oneDNN to, if anything."""
    return os.environ.get(KERNELS, os.environ.get("DNNL_MAX_CPU_ISA"))


def limit_kernels(isa: str) -> None:
    """Hold oneDNN to these instructions, in this process (before it computes anything: oneDNN looks
    once) and in those that it starts."""
    os.environ[KERNELS] = isa


COMPILED_CODE = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled_code(cache: Path, name: str) -> None:
    """In a folder of this name inside of inductor's cache, in this process and in those that it
    starts."""
    if cache.name != name:
        os.environ[COMPILED_CODE] = str(cache / name)


def user_cache() -> Path:
    """Where this user's programs keep what they can fetch again. A user without a name (in many
    containers) may have no home."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return named if named.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"


def search_path(path: Sequence[str]) -> None:
    """Find modules as the driver does, where this host has the folders; then as here."""
    theirs = [entry for entry in path if not entry or os.path.exists(entry)]
    sys.path[:] = [*theirs, *(entry for entry in sys.path if entry not in theirs)]


def switched_on(variable: str) -> bool:
    """Whether a variable of the environment says yes."""
    return os.environ.get(variable, "").lower() in ("1", "true")


def switched_off(variable: str) -> bool:
    """Whether a variable of the environment says no."""
    return os.environ.get(variable, "").lower() in ("0", "false")


def environment_with(more: Mapping[str, str]) -> dict[str, str]:
    """This process's, and these."""
    return {**os.environ, **more}


@contextmanager
def variables(changes: Mapping[str, str | None], also: Sequence[str] = ()) -> Generator[None]:
    """Environment variables for the time being; None takes one away.

    Afterwards they are as before, and so are those in `also`, which a library sets by itself.
    """
    before = {name: os.environ.get(name) for name in (*changes, *also)}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
