# SPDX-License-Identifier: Apache-2.0
"""A view: who is in, since when, and from where they go on. The supervisor issues one after the
other, numbered by generation; whatever is said in one (messages.py) carries its number.
"""

from typing import Any

import msgspec

from manyhands.values.bounded_types import Natural
from manyhands.values.hidden_secrets import discreet
from manyhands.values.world import World

Settings = dict[str, Any]
"""As `manyhands set` takes them: lr=3e-4, train.clip_norm=1, log.every_steps=5."""


class Member(msgspec.Struct, frozen=True):
    """A worker that is in: `worker` is its number for life, `rank` its place in this view."""

    worker: int
    rank: int
    pid: int
    host: str


class Keeper(msgspec.Struct, frozen=True):
    """A folder of shards that is served to all hosts."""

    cache: str
    """Hosts that share the folder have the same."""
    host: str
    address: str


class View(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Who is in. The deal of micro-batches follows from the speeds. Who is not named leaves."""

    generation: Natural = 0
    members: list[Member]
    speeds: list[float]
    because: str
    hosts: list[int] = []
    """How many members share the memory of each host, in the order of ranks; empty: all do."""
    peer_addresses: list[str] = []
    """Where each host is reached by the others."""
    keepers: list[Keeper] = []
    """Where shards of prepared data are to be had."""
    secret: bytes = b""
    """By which hosts know each other from now on; empty: as they were ordered."""
    measure: bool = False
    """Hosts first measure the network between them, and say Measured."""
    fresh: bool = False
    """Begin from the task or a checkpoint; otherwise go on from what members hold."""
    restore: int | None = None
    """With `fresh`: the checkpoint's step."""
    built: list[bytes] = []
    """What each member built, by rank."""
    halts: int = 0
    """How many commands (Halt, SaveNow) were given before it."""
    journal: dict[int, Settings] = {}
    """All changes so far: after how many steps, and what."""
    changes: Settings = {}
    """New ones: wait for Reply `go-GENERATION` before the first step."""
    scored: int = -1
    """The last step that was scored."""
    enough: str | None = None
    """What those scores were a reason for: to stop early."""
    saved: int = -1
    """The last step that is on disk."""
    stop: bool = False
    """Save and end."""
    audit: int | None = None
    """First testify: everyone computes this micro-batch of the next step twice, and waits for
    Reply `judged-GENERATION`."""

    __repr__ = discreet

    def rank_of(self, worker: int) -> int | None:
        return next((m.rank for m in self.members if m.worker == worker), None)

    def world_of(self, rank: int) -> World:
        return World(rank, len(self.members), tuple(self.hosts))
