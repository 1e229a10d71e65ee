# SPDX-License-Identifier: Apache-2.0
"""What is asked of us when somebody wants a run: what to train, where, and how fast.

Plain data, without anything that is alive: it can be kept, sent and made by the thousand.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Self

from manyhands.values.config import RunConfig
from manyhands.values.option_fields import argument, option
from manyhands.values.ported_task import PortedTask
from manyhands.values.task import Task
from manyhands.values.task_params import GivenParams

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"

FinishBy = str | datetime | timedelta
"""As people write it ("18:30", "2h", "2026-11-01 18:00"), or as Python says it."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast: a number of workers, or a speed or a time from which it follows."""

    workers: int | str | None = option(None, cli=str, metavar="N or MIN:MAX")
    """How many workers; 2:8 grows and shrinks with what is there. Left out: cores, or fewer if less
    to do."""
    samples_per_second: float | None = option(None, cli=float, metavar="SPEED")
    """As many workers, within --workers, as that takes."""
    finish_by: FinishBy | None = option(None, cli=str, metavar="18:30, 2h or DATE")
    """... as it takes to be done by then."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How workers come to agree."""

    sync: str | None = option(None, cli=str, metavar="allreduce, alone or server[:count=2]")
    """Each worker updates a part of the weights; one worker and plain PyTorch; or servers update
    them. Short for --set train.sync=... and --set server.count=..."""


@dataclass(frozen=True, kw_only=True)
class Spoken:
    """What is changed in the config, and what is printed."""

    settings: Sequence[str] = option(
        (), cli=str, many=True, flags=("--set",), metavar="section.key=value"
    )
    """Change a setting. Repeatable."""
    quiet: bool = option(False, cli=bool, flags=("--quiet", "-q"))
    """Print warnings and errors only."""
    asked: float = field(init=False, default_factory=time.time)
    """When; seconds since 1970."""

    def but(self, **changes: Any) -> Self:
        """The same with other values, asked for at the same time."""
        changed = replace(self, **changes)
        object.__setattr__(changed, "asked", self.asked)
        return changed


@dataclass(frozen=True, kw_only=True)
class TaskParams:
    params: GivenParams = option((), cli=str, many=True, flags=("--param",), metavar="name=value")
    """A parameter of the task, where a function makes it. Repeatable; in Python a dict will do."""


@dataclass(frozen=True, kw_only=True)
class WhenItEnds:
    on_end: str | None = option(None, cli=str, metavar="COMMAND")
    """A shell command to run afterwards, whatever ended it; $MANYHANDS_STATUS, ... say how."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    engine: str = option("local", cli=str, metavar="local, inline, ray or ray://HOST:PORT")
    """Processes of this host; one worker in this process; a Ray of our own, or a cluster."""


@dataclass(frozen=True, kw_only=True)
class HostAccess:
    """Hosts as they are asked for."""

    hosts: str | None = option(None, cli=str, metavar="A,B:4,here")
    """Train on these hosts, reached by ssh; :N workers each (else its cores)."""
    listen: str | None = option(None, cli=str, metavar="ADDRESS[:PORT]")
    """Let hosts join here with: manyhands worker --join."""
    token_file: str | Path | None = option(None, cli=Path)
    """The token by which hosts join, FILE.key beside it; made if they are not there."""
    ssh: str | None = option(None, cli=str, metavar="COMMAND")
    """How --hosts are reached, as in "ssh -p 2222"."""

    @property
    def asks_for_hosts(self) -> bool:
        return self.hosts is not None or self.listen is not None


@dataclass(frozen=True, kw_only=True)
class RayAccess:
    """What workers, or tasks, on Ray need."""

    worker_resources: str | None = option(None, cli=str, metavar="CPU=1,GPU=1,memory=2GB,NAME=1")
    """Ray: what each worker (or task) needs; else CPU=train.threads."""
    ray_token_file: str | Path | None = option(None, cli=Path)
    """The secret of the Ray cluster; only its owner may read it."""

    @property
    def ray_token(self) -> Path | None:
        return Path(self.ray_token_file) if self.ray_token_file else None


@dataclass(frozen=True, kw_only=True)
class Where(RayAccess, HostAccess, Engine):
    """Where workers run."""

    spread: bool = option(False, cli=bool)
    """Ray: on as many nodes as possible, not as few."""
    ship: Sequence[str | Path] = option((), cli=Path, many=True, metavar="PATH")
    """A file or folder that workers on other hosts need, found there under the same relative name.
    Repeatable."""

    @property
    def shipped(self) -> tuple[Path, ...]:
        return tuple(Path(path) for path in self.ship)


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """What to train, and where to write it down."""

    task: Task | PortedTask | str | Path = field(kw_only=False, metadata=argument(Path, "FILE"))
    """Python that defines `task`, or TOML that names it."""
    to: str | Path | None = option(None, cli=Path)
    """The run folder; else runs/NAME-TIME."""
    config: RunConfig | Mapping[str, Any] | None = None
    """In place of the one that the task's file has."""


@dataclass(frozen=True, kw_only=True)
class OldRun:
    """What to go on with."""

    run: str | Path = field(kw_only=False, metadata=argument(Path, "RUN"))
    """The run's folder."""
    task: Task | None = field(default=None, kw_only=False)
    """The task again, where it was made in Python."""


@dataclass(frozen=True, kw_only=True)
class RunRequest(Where, WhenItEnds, TaskParams, Spoken, Agreement, Pace, NewRun):
    """A run that is to be trained from its beginning."""


@dataclass(frozen=True, kw_only=True)
class ResumeRequest(Where, WhenItEnds, TaskParams, Spoken, Agreement, Pace, OldRun):
    """A run that is to go on from its newest good checkpoint."""


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest(RayAccess, OldRun):
    """A saved step that is to be scored on the held-out records, or on others."""

    data: Any = option((), cli=str, many=True, metavar="DATA")
    """Score these instead: a prepared folder, or raw files as for prepare (repeatable). From Python
    also records, columns or a Dataset."""
    split: str | None = option(None, cli=str)
    """Of a prepared folder; left out: what it holds out."""
    on_error: str = option("fail", cli=str)
    """Bad records of raw files: fail, or skip:LIMIT (leave them out)."""
    step: int | None = option(None, cli=int)
    """A saved step; left out, the newest one."""
    engine: str = option("local", cli=str, metavar="local, ray or ray://HOST:PORT")
    """Here, or by tasks of Ray."""
    weights: str | None = option(None, cli=str, metavar="trained, ema or swa")
    """Score the trained weights, or an average of them that the run kept; left out, as the run's
    evaluate.weights says."""


@dataclass(frozen=True, kw_only=True)
class DoctorRequest(HostAccess):
    """Hosts that are to be looked at before a run."""

    hosts: str | None = option(None, cli=str, metavar="A,B,here")
    """Look at these too, reached by ssh."""
    folder: Path = option(Path(), cli=Path)
    """Where runs would be: do all hosts see the same?"""
    expect: int = option(1, cli=int)
    """With --listen: how many hosts join."""
    patience: float = option(60.0, cli=float)
    """Seconds to wait for hosts to join."""
