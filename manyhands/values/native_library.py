# SPDX-License-Identifier: Apache-2.0
"""What is compiled when manyhands is installed, where there is a compiler: nothing needs it.

Whatever is done there can be done without it, slower and with the same bits; who uses it has tried
that they are the same. `MANYHANDS_NATIVE=0` leaves it unused.
"""

import ctypes
import sysconfig
from functools import cache
from pathlib import Path

from manyhands.values.environment import switched_off

VERSION = 3
"""As the source says it: what was compiled may be older than what is installed."""


@cache
def native_library() -> ctypes.CDLL | None:
    return None if why_not() else ctypes.CDLL(str(_compiled()))


@cache
def why_not() -> str | None:
    """Why it is not used."""
    if switched_off("MANYHANDS_NATIVE"):
        return "MANYHANDS_NATIVE switches them off"
    if not _compiled().exists():
        return "there was no C compiler when manyhands was installed"
    try:
        found = int(ctypes.CDLL(str(_compiled())).version())
    except (OSError, AttributeError) as error:
        return f"{_compiled().name} cannot be loaded ({error})"
    if found != VERSION:
        return f"{_compiled().name} is of version {found}, not {VERSION}: install manyhands again"
    return None


def _compiled() -> Path:
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    return Path(__file__).parents[1] / f"native{suffix}"
