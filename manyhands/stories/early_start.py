# SPDX-License-Identifier: Apache-2.0
"""A command's quick start: the agent that forks workers imports torch while we do.

Importing this imports neither torch nor the driver.
"""

import gc
import importlib
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from manyhands.launch.choose_engine import open_engine
from manyhands.launch.ray.ray_session import is_ray
from manyhands.values.run_options import Where

if TYPE_CHECKING:
    from manyhands.driver.resolved_run import Attached


@contextmanager
def started_early(where: Where) -> "Generator[Attached]":
    """What a run is given: a launcher that was started before torch is imported here. Ray is waited
    for, so there torch is imported by a thread meanwhile."""
    if is_ray(where.engine):
        threading.Thread(target=_import_driver, name="import torch", daemon=True).start()
    launcher = open_engine(where)
    try:
        _import_driver()
        from manyhands.driver.resolved_run import Attached

        yield Attached(launcher=launcher)
    finally:
        launcher.close()


def _import_driver() -> None:
    """Importing torch makes a million objects; looking for garbage costs 0.4 s."""
    gc.disable()
    try:
        importlib.import_module("manyhands.stories.train")
        gc.freeze()
    finally:
        gc.enable()
