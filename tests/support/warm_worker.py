"""A worker as the launcher starts it, forked from an agent that has imported more than torch.

What the tasks of tests and examples import takes each worker seconds; here all of them share it.
"""

import importlib

import sklearn.datasets  # noqa: F401
import torchmetrics.classification  # noqa: F401

from manyhands.launch.engines.launcher import WORKER

_module, _, _name = WORKER.partition(":")
main = getattr(importlib.import_module(_module), _name)
companion = importlib.import_module(_module).companion
