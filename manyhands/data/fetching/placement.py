# SPDX-License-Identifier: Apache-2.0
"""Which host keeps which shards: pure functions of names and sizes, one for each `data.placement`.

Invariant: every shard is placed `copies` times, on hosts that differ (on all of them where there
are fewer), and never on a host without room for it; what cannot be placed so is refused. The order
in which shards and hosts are listed matters to `block` alone.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec
import xxhash

from manyhands.data.ordering.keyed_permutation import permutation
from manyhands.values.errors import DataError

SLACK = 0.25
"""Under `hash` no host keeps more than ceil((1 + SLACK) * average) shards."""


class PlacedShard(Protocol):
    """What of a `ShardInfo` matters here."""

    @property
    def file(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


class ShardHost(msgspec.Struct, frozen=True):
    name: str
    speed: float = 1.0
    """Relative to the others."""
    capacity: int | None = None
    """Bytes of shards it has room for; None: any number."""


class Placement(msgspec.Struct, frozen=True):
    homes: dict[str, tuple[str, ...]]
    """Shard → the hosts that keep it, the preferred one first."""
    because: str

    def holders(self, shard: str) -> tuple[str, ...]:
        return self.homes.get(shard, ())

    def __str__(self) -> str:
        hosts = {host for held in self.homes.values() for host in held}
        return f"{len(self.homes)} shards on {len(hosts)} hosts ({self.because})"


class _HostRoom:
    """What each host keeps so far: how many shards, how many bytes."""

    def __init__(self, hosts: Sequence[ShardHost]) -> None:
        self.left = {h.name: math.inf if h.capacity is None else h.capacity for h in hosts}
        self.nbytes = {h.name: 0 for h in hosts}
        self.shards = {h.name: 0 for h in hosts}

    def take(self, shard: PlacedShard, hosts: Iterable[str], copies: int) -> tuple[str, ...] | None:
        """The first `copies` of these hosts that have room; None where fewer have."""
        found: list[str] = []
        for host in hosts:
            if len(found) == copies:
                break
            if self.left[host] >= shard.nbytes and host not in found:
                found.append(host)
        if len(found) < copies:
            return None
        for host in found:
            self.left[host] -= shard.nbytes
            self.nbytes[host] += shard.nbytes
            self.shards[host] += 1
        return tuple(found)


Homes = dict[str, tuple[str, ...]]
Policy = Callable[[Sequence[PlacedShard], Sequence[ShardHost], int, int], tuple[Homes | None, str]]
"""Shards, hosts, seed and copies → homes (None: no room found) and why."""


def _block(
    shards: Sequence[PlacedShard], hosts: Sequence[ShardHost], seed: int, copies: int
) -> tuple[Homes | None, str]:
    names, room, homes = [h.name for h in hosts], _HostRoom(hosts), Homes()
    for i, shard in enumerate(shards):
        first = i * len(names) // len(shards)
        held = room.take(shard, names[first:] + names[:first], copies)
        if held is None:
            return None, ""
        homes[shard.file] = held
    return homes, "block: consecutive shards, further copies on the hosts that follow"


def _random(
    shards: Sequence[PlacedShard], hosts: Sequence[ShardHost], seed: int, copies: int
) -> tuple[Homes | None, str]:
    names, room, homes = sorted(h.name for h in hosts), _HostRoom(hosts), Homes()
    by_name = sorted(shards, key=lambda s: s.file)
    shuffled = permutation(len(by_name), "place", seed)[range(len(by_name))]
    for place, index in enumerate(shuffled):
        # Every round of as many shards as hosts gives each host one of every copy. The hosts of
        # the further copies turn with the rounds, so that no two hosts are always a pair.
        turn, first = divmod(place, len(names))
        others = [(first + 1 + (turn + c) % max(1, len(names) - 1)) for c in range(len(names) - 1)]
        wished = [names[i % len(names)] for i in (first, *others)]
        held = room.take(by_name[index], wished, copies)
        if held is None:
            return None, ""
        homes[by_name[index].file] = held
    return homes, f"random: shuffled with seed {seed}, as many shards on each host"


def _hash(
    shards: Sequence[PlacedShard], hosts: Sequence[ShardHost], seed: int, copies: int
) -> tuple[Homes | None, str]:
    average = copies * len(shards) / max(1, len(hosts))
    bound = math.ceil((1 + SLACK) * average)
    homes = _bounded(shards, hosts, seed, copies, bound)
    while homes is None and bound < len(shards):  # some hosts are too small for their part
        bound = min(len(shards), 2 * bound)
        homes = _bounded(shards, hosts, seed, copies, bound)
    return homes, f"hash: consistent hashing, at most {bound} on a host (average {average:.1f})"


def _bounded(
    shards: Sequence[PlacedShard], hosts: Sequence[ShardHost], seed: int, copies: int, bound: int
) -> Homes | None:
    """Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018), where
    a full host's shards go on to the next host of the shard's own (rendezvous) order instead of the
    next on a ring: they spread over all hosts, and fewer follow when one joins or leaves."""
    names, room, homes = [h.name for h in hosts], _HostRoom(hosts), Homes()
    left = len(shards)
    for shard in sorted(shards, key=lambda s: (_score(seed, s.file), s.file)):
        wished = sorted(names, key=lambda host: (_score(seed, f"{host}\n{shard.file}"), host))
        free = {h: bound - room.shards[h] for h in wished if room.shards[h] < bound}
        held = room.take(shard, [*_owed(free, left, copies), *free], copies)
        if held is None:
            return None
        homes[shard.file] = tuple(sorted(held, key=wished.index))
        left -= 1
    return homes


def _owed(free: dict[str, int], left: int, copies: int) -> list[str]:
    """Hosts that must be taken now, or else the last shards would not find enough different ones.

    `left` shards fit if and only if the sum of min(free, left) over the hosts is at least
    copies * left. A host with room for all of them loses one of that sum whether taken or not, so
    no more such hosts may be passed over than there are places to spare.
    """
    roomy = [host for host, room in free.items() if room >= left]
    spare = sum(min(room, left) for room in free.values()) - copies * left
    return roomy[: max(0, len(roomy) - max(0, spare))]


def _balanced(
    shards: Sequence[PlacedShard], hosts: Sequence[ShardHost], seed: int, copies: int
) -> tuple[Homes | None, str]:
    """Largest first, each to the host that would finish it earliest.

    With one copy and enough room no host finishes later than the ideal (all bytes / all speeds)
    plus the time that the largest shard takes on a host of average speed.
    """
    room, homes = _HostRoom(hosts), Homes()
    by_name = sorted(hosts, key=lambda h: h.name)
    for shard in sorted(shards, key=lambda s: (-s.nbytes, s.file)):
        ready = sorted(by_name, key=lambda h: (room.nbytes[h.name] + shard.nbytes) / h.speed)
        held = room.take(shard, [h.name for h in ready], copies)
        if held is None:
            return None, ""
        homes[shard.file] = held
    last = max((room.nbytes[h.name] / h.speed for h in hosts), default=0.0)
    ideal = sum(room.nbytes.values()) / max(sum(h.speed for h in hosts), 1e-300)
    over = last / ideal - 1 if ideal else 0.0
    return homes, f"balanced: by bytes and speed, the last host {over:.1%} above the ideal"


POLICIES: dict[str, Policy] = {
    "balanced": _balanced,
    "block": _block,
    "hash": _hash,
    "random": _random,
}


def place(
    shards: Sequence[PlacedShard],
    hosts: Sequence[ShardHost],
    policy: str = "hash",
    *,
    seed: int = 0,
    copies: int = 1,
) -> Placement:
    _refuse(shards, hosts, policy, copies)
    wanted = min(copies, len(hosts))
    homes, because = POLICIES[policy](shards, hosts, seed, wanted)
    if homes is None:
        homes = _where_there_is_room(shards, hosts, wanted)
        because = f"room is too short for {policy}, so the largest go first to where most is left"
    if wanted < copies:
        because += f"; {copies} copies were asked for, there are {len(hosts)} hosts"
    return Placement(homes, because)


def _refuse(
    shards: Sequence[PlacedShard], hosts: Sequence[ShardHost], policy: str, copies: int
) -> None:
    if policy not in POLICIES:
        raise DataError(f"there is no placement '{policy}'; use {', '.join(sorted(POLICIES))}.")
    if not hosts:
        raise DataError("shards cannot be placed: there are no hosts.")
    if copies < 1:
        raise DataError(f"{copies} copies of each shard: give at least 1.")
    for what, names in (("host", [h.name for h in hosts]), ("shard", [s.file for s in shards])):
        if len(set(names)) < len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise DataError(f"the {what} '{twice}' is listed twice.")
    for host in hosts:
        if not (host.speed > 0 and math.isfinite(host.speed)):
            raise DataError(f"host {host.name}: a speed of {host.speed} makes no sense.")


def _where_there_is_room(
    shards: Sequence[PlacedShard], hosts: Sequence[ShardHost], copies: int
) -> Homes:
    room, homes = _HostRoom(hosts), Homes()
    for shard in sorted(shards, key=lambda s: (-s.nbytes, s.file)):
        roomiest = sorted(room.left, key=lambda host: (-room.left[host], host))
        held = room.take(shard, roomiest, copies)
        if held is None:
            most = ", ".join(f"{host} {room.left[host]:,}" for host in roomiest[:4])
            raise DataError(
                f"there is no room for {shard.file}: {copies} hosts with {shard.nbytes:,} bytes "
                f"free are needed, and what is left is {most}. Raise the hosts' capacity, add a "
                "host, or ask for fewer copies."
            )
        homes[shard.file] = held
    return homes


def _score(seed: int, text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode(), seed & (1 << 64) - 1)
