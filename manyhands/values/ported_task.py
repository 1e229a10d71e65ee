# SPDX-License-Identifier: Apache-2.0
"""A task that was made of a program for another trainer, and the settings that came with it."""

from typing import Any, NamedTuple

from manyhands.values.task import Task


class PortedTask(NamedTuple):
    """Written `task, config = mh.from_lightning(...)`, or given whole wherever a task is."""

    task: Task
    config: dict[str, Any]
    """As a task file's `config`."""
