# SPDX-License-Identifier: Apache-2.0
"""A preparation under way: its folder, its recipe, who does the work, what people are told."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.data.mapreduce.resumable_tasks import TaskRunner
from manyhands.data.preparing.recipe import Recipe
from manyhands.data.preparing.work_folder import WORK
from manyhands.values.wrap_text import wrapped

_MEMORY_PARTS = 16
"""A chunk of raw data is at most this part of a worker's memory: parsing takes several times it."""
_DATA_PARTS, _LEAST_BYTES = 256, 4 << 20
"""... and of all data, so that there is something to do for everybody."""


@dataclass(frozen=True, slots=True)
class Preparation:
    folder: Path
    recipe: Recipe
    runner: TaskRunner
    memory: int
    """For each worker."""
    target_bytes: int
    """Of raw data, for a task."""
    key: str
    """Of the recipe and the files: checkpoints of another key are not used."""
    quiet: bool = False
    notes: list[str] = field(default_factory=list[str])

    @property
    def work(self) -> Path:
        return self.folder / WORK

    def note(self, text: str) -> None:
        """Something people should know; said once, whoever asks for it again."""
        if text not in self.notes:
            self.notes.append(text)
            if not self.quiet:
                print(wrapped(text), file=sys.stderr)


def target_bytes(memory: int, total: int | None = None) -> int:
    """How much raw data a task reads. The number of workers must not matter: it may change before
    an interrupted preparation goes on."""
    most = max(1 << 16, memory // _MEMORY_PARTS)
    return most if total is None else min(most, max(_LEAST_BYTES, total // _DATA_PARTS))
