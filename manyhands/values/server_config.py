# SPDX-License-Identifier: Apache-2.0
"""Settings of servers, which update the weights for workers that only compute: [server]."""

from dataclasses import dataclass
from typing import Literal

from manyhands.values.errors import ConfigError
from manyhands.values.setting_fields import setting
from manyhands.values.train_config import at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    count: int = setting(1, "nothing")
    """How many servers there are beside the workers. The weights, gradients and the optimizer's
    state are shared out over them; `manyhands scale RUN --servers 3` changes it."""

    mode: Literal["sync", "stale", "async"] = setting("sync", "timing")
    """When a gradient is applied. "sync": when all micro-batches of its step are there; the bits
    are those of allreduce and of one worker. Otherwise each worker computes whole steps by itself
    and nobody waits for the slowest: "stale" with a bound (`staleness`), "async" without one. Which
    weights come of it depends on timing, in these two."""

    staleness: int | None = setting(None, "timing")
    """With mode = "stale": a step may begin when all but this many of the steps before it have been
    applied. 0 is sync."""

    def __post_init__(self) -> None:
        at_least("server", "count", self.count, 1, 'For none, set train.sync = "allreduce".')
        at_least("server", "staleness", self.staleness, 0)
        if self.mode == "stale" and self.staleness is None:
            raise ConfigError(
                'server.mode = "stale" has no bound: set server.staleness (as in 2), or use '
                'server.mode = "async".'
            )
        if self.mode != "stale" and self.staleness is not None:
            raise ConfigError(
                f'server.staleness = {self.staleness} is for server.mode = "stale", and it is '
                f'"{self.mode}". Set server.mode, or leave it out.'
            )

    @property
    def merges(self) -> bool:
        """Workers are at different steps; else all take each step together."""
        return self.mode == "async" or bool(self.staleness)


NO_CHOICE = {
    "transfer": (
        "server.transfer: there is nothing to choose. Workers read the weights where servers write "
        "them, in the memory of their host, so they are neither pulled nor pushed; between hosts "
        "gradients are sent, and each host updates its own weights. Leave it out."
    ),
    "replicas": (
        "server.replicas: there is nothing to choose. Each host of a run holds all weights and all "
        "of the optimizer's state, in memory that outlives its servers: on several hosts there are "
        "as many copies as hosts, on one there is one. Leave it out; for another copy, add a host."
    ),
}
"""Settings that parameter servers have elsewhere, and why not here."""


def sync_settings(given: str) -> list[str]:
    """`--sync server:count=2` as settings: train.sync=server server.count=2."""
    name, colon, more = given.partition(":")
    settings = [f"train.sync={name.strip()}"]
    if not colon:
        return settings
    if name.strip() != "server":
        raise ConfigError(f"--sync {given}: only a server has settings, as in server:count=2.")
    for part in more.split(","):
        key, sign, value = part.partition("=")
        if not sign or not key.strip() or not value.strip():
            raise ConfigError(f"--sync {given}: write it as server:count=2.")
        settings.append(f"server.{key.strip()}={value.strip()}")
    return settings
