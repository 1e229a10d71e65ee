# SPDX-License-Identifier: Apache-2.0
"""A worker's place in the run: ranks, and the hosts they are on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    """One worker's place: `rank` of `num_ranks`. Rank 0 is the leader; it speaks for all.

    Workers that share memory are on one host and have neighbouring ranks; the first of them speaks
    for the host. Whoever shares memory with nobody counts as a host of its own.
    """

    rank: int
    num_ranks: int
    hosts: tuple[int, ...] = ()
    """How many workers each host has, in the order of ranks; left out: all are on one."""

    def __post_init__(self) -> None:
        if not self.hosts:
            object.__setattr__(self, "hosts", (self.num_ranks,))
        assert sum(self.hosts) == self.num_ranks and 0 <= self.rank < self.num_ranks, self

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def leads_host(self) -> bool:
        return self.local_rank == 0

    @property
    def num_hosts(self) -> int:
        return len(self.hosts)

    @property
    def host(self) -> int:
        return next(h for h in range(self.num_hosts) if self.rank in self.ranks_of(h))

    @property
    def local_rank(self) -> int:
        return self.rank - self.ranks_of(self.host).start

    @property
    def local_ranks(self) -> int:
        return self.hosts[self.host]

    def ranks_of(self, host: int) -> range:
        first = sum(self.hosts[:host])
        return range(first, first + self.hosts[host])

    def among_hosts(self) -> "World":
        """The world in which each host is one."""
        return World(self.host, self.num_hosts, (1,) * self.num_hosts)


def opponents(world: World) -> list[int | None]:
    """Round by round of a tournament in which everyone meets everyone, each one at a time."""
    last = world.num_ranks - 1 + world.num_ranks % 2
    met: list[int | None] = []
    for turn in range(last):
        if world.rank == last:
            other = turn * (last + 1) // 2 % last
        else:
            other = (turn - world.rank) % last
            other = last if other == world.rank else other
        met.append(other if other < world.num_ranks else None)
    return met
