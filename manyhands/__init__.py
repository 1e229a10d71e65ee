# SPDX-License-Identifier: Apache-2.0
"""Many hands, one result: distributed training whose weights do not depend on who did the work.

Importing this is cheap: torch is imported when something needs it.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from manyhands.config import (
    CheckpointConfig,
    EvaluateConfig,
    LogConfig,
    RecoveryConfig,
    RunConfig,
    TrainConfig,
)
from manyhands.errors import Interrupted, ManyhandsError, RequestError, RunFailed
from manyhands.report import Report
from manyhands.task import Task
from manyhands.version import VERSION

if TYPE_CHECKING:
    from manyhands.answers import evaluate, fingerprint
    from manyhands.data.mapreduce.map_reduce import map_reduce
    from manyhands.data.records import prepared
    from manyhands.preparing import prepare
    from manyhands.replaying import replay
    from manyhands.run import resume, train

__version__ = VERSION

__all__ = [
    "CheckpointConfig",
    "EvaluateConfig",
    "Interrupted",
    "LogConfig",
    "ManyhandsError",
    "RecoveryConfig",
    "Report",
    "RequestError",
    "RunConfig",
    "RunFailed",
    "Task",
    "TrainConfig",
    "__version__",
    "evaluate",
    "fingerprint",
    "map_reduce",
    "prepare",
    "prepared",
    "replay",
    "resume",
    "train",
]

_LATER = {
    "evaluate": "manyhands.answers",
    "fingerprint": "manyhands.answers",
    "map_reduce": "manyhands.data.mapreduce.map_reduce",
    "prepare": "manyhands.preparing",
    "prepared": "manyhands.data.records",
    "replay": "manyhands.replaying",
    "resume": "manyhands.run",
    "train": "manyhands.run",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'manyhands' has no attribute '{name}'")


class _Package(ModuleType):
    """`mh.train` is a function to users, and `manyhands/train/` a folder: the function wins."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _LATER and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
