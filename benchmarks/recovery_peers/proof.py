# SPDX-License-Identifier: Apache-2.0
"""What the workers' diaries (diary.py) prove about a recovery."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

Diary = list[tuple[int, int]]
"""(nanoseconds of CLOCK_MONOTONIC, steps done) for every step, or part of one, that was begun."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """Infinite is never."""

    next_step_s: float = math.inf
    both_again_s: float = math.inf
    steps_lost: float = math.inf


def judge(diaries: Mapping[int, Diary], *, killed_ns: int, victim: int) -> Recovery:
    """From all diaries, by process, as far as they have been written.

    A step that a survivor was in when the kill came may still end, with what the victim had given
    to it, so it counts as done before. Only steps that were begun after the kill prove anything.
    """
    newest, later = 0, list[tuple[int, int, int]]()
    for pid, diary in diaries.items():
        for (begun, before), (ended, after) in pairwise(diary):
            is_a_step = after == before + 1  # else a part of one, a retry, or a jump to others
            if begun <= killed_ns:
                newest = max(newest, after if is_a_step else before)
            elif is_a_step and pid != victim:
                later.append((ended, after, pid))
        newest = max([newest, *(done for begun, done in diary[-1:] if begun <= killed_ns)])
    if not later:
        return Recovery()
    later.sort()
    first: dict[int, float] = {}
    for ended, done, pid in later:
        if done > newest:
            first.setdefault(pid, (ended - killed_ns) / 1e9)
    soonest, second, *_ = [*first.values(), math.inf, math.inf]
    went_on_from = later[0][1] - 1
    return Recovery(soonest, second, max(0, newest - went_on_from))


class Diaries:
    """A folder of them, read on from where it was left off."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.by_process: dict[int, Diary] = {}
        self._read_bytes: dict[Path, int] = {}

    def read(self) -> dict[int, Diary]:
        for path in self.folder.iterdir():
            done = self._read_bytes.get(path, 0)
            with open(path, "rb") as file:
                file.seek(done)
                lines = file.read()
            lines = lines[: lines.rfind(b"\n") + 1]
            self._read_bytes[path] = done + len(lines)
            diary = self.by_process.setdefault(int(path.name.split("-")[1]), [])
            diary += [(int(t), int(step)) for t, step in map(bytes.split, lines.splitlines())]
        return self.by_process

    def are_steady(self, workers: int, seconds: float) -> bool:
        """Whether that many workers have been training for so long."""
        spans = [diary[-1][0] - diary[0][0] for diary in self.read().values() if diary]
        return sum(span > seconds * 1e9 for span in spans) >= workers
