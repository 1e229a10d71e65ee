# SPDX-License-Identifier: Apache-2.0
"""Many hands, one result: distributed training whose weights do not depend on who did the work.

Importing this is cheap: torch is imported when something needs it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from manyhands.values.config import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    LogConfig,
    RecoveryConfig,
    RunConfig,
    TrainConfig,
)
from manyhands.values.errors import Interrupted, ManyhandsError, RequestError, RunFailed
from manyhands.values.report import Report
from manyhands.values.task import Task
from manyhands.values.version import VERSION

if TYPE_CHECKING:
    from manyhands.adapters.from_hf import from_hf
    from manyhands.adapters.from_lightning import from_lightning
    from manyhands.data.mapreduce.map_reduce import map_reduce
    from manyhands.data.reading.choose_sampling import balanced
    from manyhands.data.reading.prepared_data import prepared
    from manyhands.stories.evaluate import evaluate, fingerprint
    from manyhands.stories.load import encoders, load, report
    from manyhands.stories.open_table import open_table
    from manyhands.stories.predict import predict
    from manyhands.stories.prepare import prepare
    from manyhands.stories.replay import replay
    from manyhands.stories.train import resume, train
    from manyhands.training.state.rows.embedding import Embedding
    from manyhands.training.warmup import steps_per_epoch, warmup

__version__ = VERSION

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "Embedding",
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
    "balanced",
    "encoders",
    "evaluate",
    "fingerprint",
    "from_hf",
    "from_lightning",
    "load",
    "map_reduce",
    "open_table",
    "predict",
    "prepare",
    "prepared",
    "replay",
    "report",
    "resume",
    "steps_per_epoch",
    "train",
    "warmup",
]

_LATER = {
    "Embedding": "manyhands.training.state.rows.embedding",
    "balanced": "manyhands.data.reading.choose_sampling",
    "encoders": "manyhands.stories.load",
    "evaluate": "manyhands.stories.evaluate",
    "fingerprint": "manyhands.stories.evaluate",
    "from_hf": "manyhands.adapters.from_hf",
    "from_lightning": "manyhands.adapters.from_lightning",
    "load": "manyhands.stories.load",
    "map_reduce": "manyhands.data.mapreduce.map_reduce",
    "open_table": "manyhands.stories.open_table",
    "predict": "manyhands.stories.predict",
    "prepare": "manyhands.stories.prepare",
    "prepared": "manyhands.data.reading.prepared_data",
    "replay": "manyhands.stories.replay",
    "report": "manyhands.stories.load",
    "resume": "manyhands.stories.train",
    "steps_per_epoch": "manyhands.training.warmup",
    "train": "manyhands.stories.train",
    "warmup": "manyhands.training.warmup",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'manyhands' has no attribute '{name}'")
