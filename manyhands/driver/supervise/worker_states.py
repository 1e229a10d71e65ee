# SPDX-License-Identifier: Apache-2.0
"""Everything the supervisor has learnt: of each worker, and of the run. Decisions look at it alone.

Times are in seconds until now, as the supervisor's clocks (liveness.py) last wrote them down.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from manyhands.launch.engines.fork_agent import WorkerExit
from manyhands.values.kernels import Kernels
from manyhands.values.messages import Left, Trouble
from manyhands.values.verdict import Cause
from manyhands.values.view import Settings, View
from manyhands.values.work_in_hand import WorkInHand

Phase = Literal["starting", "waiting", "in", "ready", "left", "gone"]


@dataclass(frozen=True, slots=True)
class Limits:
    silent_s: float = 3.0
    """Without a heartbeat."""
    stuck_s: float = 30.0
    """Without progress, though it waits for nobody."""
    stuck_times: float = 10.0
    """... but at least this many times the usual time of a micro-batch."""
    losses: int = 5
    """Views that may be lost one after the other without a step between them."""
    evaluate_s: float = 300.0
    """The same, while it scores."""
    starting_s: float = 600.0
    """The same, for what it does for the first time."""
    join_s: float = 0.5
    """How long somebody who is ready to join waits for others who are about to be."""


@dataclass(slots=True)
class WorkerState:
    """Everything known of one worker."""

    number: int
    phase: Phase = "starting"
    pid: int = 0
    host: str = ""
    at: str = ""
    """Its host, among those of the launcher."""
    at_name: str = ""
    """What that host is called."""
    peer_address: str = ""
    cache: str = ""
    shards: str = ""
    """Where it serves that folder of shards."""
    built: bytes = b""
    kernels: Kernels | None = None
    """What it computes with, when it has said so."""
    most_servers: int = 0
    """More than these would have nothing to update in a model like its own; 0: any number."""
    step: int = 0
    exit: WorkerExit | None = None
    trouble: Trouble | None = None
    left: Left | None = None
    fenced: str | None = None
    """Why it was killed by us."""
    stuck: bool = False
    """... because it got nothing done."""
    wrong: str | None = None
    """An audit found that it computes wrongly."""
    leaving: bool = False
    """It was told to go and asks to hand over."""
    broken: bool = False
    """Ready, but because it could not go on."""
    held: bool = True
    """When it was last ready: whether the state was in its memory."""
    lost: frozenset[str] = frozenset()
    """... its connection to these hosts having failed."""
    host_silent_s: float = 0.0
    """How long ago its host last answered."""
    phase_s: float = 0.0
    silent_s: float = 0.0
    stuck_s: float = 0.0
    ended_s: float = 0.0
    """Since it ended."""
    micro_batch_s: float = 0.0
    samples_per_s: float = 0.0
    work: WorkInHand = field(default_factory=WorkInHand)
    """What it is at, or was, ..."""
    first: bool = True
    """... for the first time, ..."""
    where: str = ""
    """... and where in the user's code, when it has been there for a while."""

    @property
    def host_name(self) -> str:
        return self.at_name or self.host or "this host"

    @property
    def alive(self) -> bool:
        return self.phase not in ("gone", "left") and self.fenced is None


@dataclass(frozen=True, slots=True)
class ComputingHost:
    """The host whose bits are the run's."""

    name: str
    kernels: Kernels


@dataclass(slots=True)
class Situation:
    """Everything the supervisor has learnt."""

    wanted: int
    """So many are to compute, ..."""
    servers: int = 0
    """... and so many to serve: they update the weights for those who compute."""
    merges: bool = False
    """Workers are at different steps: the first member of each host serves, and some other
    computes."""
    hosts: int = 1
    """So many have room for workers."""
    samples: bool = False
    """Workers may run a sampler of the user's own, and say what it drew."""
    streams: bool = False
    """Workers may read a stream, and say what it gave."""
    least: int = 1
    """With fewer, training waits for replacements."""
    replaceable: bool = True
    """Workers are processes: they can be killed and started again."""
    private: bool = False
    """Every worker has memory of its own, and its state goes with it."""
    held: frozenset[str] = frozenset()
    """Hosts in whose memory there is state, whoever of their workers lives."""
    measured: frozenset[frozenset[str]] = frozenset()
    """Pairs of hosts between which the network was measured."""
    secret: bytes = field(default=b"", repr=False)
    """By which hosts know each other, since one was dropped that knows the one before."""
    capacity: int | None = None
    """No more workers than this can be started at present."""
    restore: int | None = None
    """The newest checkpoint of this run, or that it was resumed from."""
    micro_batches: int = 1
    most: int = 1
    """No more workers than this can be used."""
    limits: Limits = field(default_factory=Limits)
    workers: dict[int, WorkerState] = field(default_factory=dict[int, WorkerState])
    view: View | None = None
    begun: bool = False
    """Some view has begun: there is state to go on from."""
    running: bool = False
    """The current view has begun, and was neither halted nor broken."""
    halted: str | None = None
    broken: str | None = None
    """Why, in the current view."""
    halts: int = 0
    step: int = 0
    """The newest that is known to be done."""
    first_step: int = 0
    """After so many steps the current view began."""
    losses: int = 0
    """Views lost since the last new step."""
    failed_starts: int = 0
    troubles: list[Trouble] = field(default_factory=list[Trouble])
    """All of them, oldest first."""
    unlike: Literal["refuse", "warn"] = "refuse"
    """What becomes of hosts that compute other bits than the first."""
    first_host: ComputingHost | None = None
    """Settled when training has begun."""
    rebalance: bool = True
    better: tuple[float, ...] = ()
    """Speeds for which the current view was halted."""
    measured_s: float = 0.0
    """For how long speeds have been measured under the current deal."""
    redealt: tuple[tuple[int, ...], int] = ((), 0)
    """Members, and how often in a row they were dealt anew because the last deal did not last."""
    # What people asked for.
    stop: bool = False
    paused: bool = False
    changes: Settings = field(default_factory=dict[str, Any])
    journal: dict[int, Settings] = field(default_factory=dict[int, dict[str, Any]])
    """Changes that were made, by step."""
    scored: int = -1
    enough: str | None = None
    saved: int = -1
    audit: int | None = None
    """A micro-batch of the next step that everybody is to compute."""
    audited: str = ""
    """What the last audit came to; empty: the one that was asked for is not over."""
    witnesses: int = 0
    """Workers beyond those wanted, because two do not agree and nobody knows who is right."""
    unsteady: Cause | None = None
    """An audit found that nobody gets the same result twice."""

    @property
    def serving(self) -> int:
        """How many servers are to be in a view."""
        return max(self.servers, self.hosts) if self.merges else self.servers

    @property
    def hands(self) -> int:
        """How many processes are to be in a view."""
        return self.wanted + self.serving + self.witnesses

    def members(self) -> list[WorkerState]:
        """Of the current view, by rank."""
        return [self.workers[m.worker] for m in self.view.members] if self.view else []

    def holds(self, worker: WorkerState) -> bool:
        """Whether there is state in its memory to go on from."""
        if worker.phase != "ready":
            return worker.at in self.held
        same = [w for w in self.workers.values() if w.at == worker.at and not self.private]
        return all(w.held for w in (worker, *same) if w.phase == "ready")

    def rank_of(self, worker: int) -> int:
        """Its rank in the current view (its number stands for a rank it never got)."""
        rank = self.view.rank_of(worker) if self.view else None
        return worker if rank is None else rank
