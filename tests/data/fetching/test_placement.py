"""Which host keeps which shards: what every policy promises, and what each does besides."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.data.fetching.placement import (
    POLICIES,
    SLACK,
    Placement,
    ShardHost,
    place,
)
from manyhands.data.shards.manifest import ShardInfo
from manyhands.values.config import DataConfig
from manyhands.values.errors import DataError


def shards(sizes: Sequence[int]) -> list[ShardInfo]:
    return [ShardInfo(f"train-{i:05d}.arrow", 1, n, []) for i, n in enumerate(sizes)]


def hosts(count: int) -> list[ShardHost]:
    return [ShardHost(f"host-{i}") for i in range(count)]


SIZES = st.lists(st.integers(0, 1000), max_size=60).map(shards)
SPEEDS = st.lists(st.floats(0.1, 10), min_size=1, max_size=9)
policies = pytest.mark.parametrize("policy", sorted(POLICIES))


def kept_by(placement: Placement, host: str) -> list[str]:
    return [shard for shard, held in placement.homes.items() if host in held]


def test_the_settings_offer_every_policy() -> None:
    assert set(get_args(get_type_hints(DataConfig)["placement"])) == set(POLICIES)


def loads(found: Placement) -> Counter[str]:
    return Counter(host for held in found.homes.values() for host in held)


@policies
@given(files=SIZES, count=st.integers(1, 9), copies=st.integers(1, 5), seed=st.integers())
def test_every_shard_is_placed_so_often_on_hosts_that_differ(
    policy: str, files: list[ShardInfo], count: int, copies: int, seed: int
) -> None:
    found = place(files, hosts(count), policy, copies=copies, seed=seed)
    assert sorted(found.homes) == sorted(f.file for f in files)
    for file in files:
        held = found.holders(file.file)
        assert len(set(held)) == len(held) == min(copies, count)
    assert policy in str(found) and found == place(
        files, hosts(count), policy, copies=copies, seed=seed
    )


@pytest.mark.parametrize("policy", ["balanced", "hash", "random"])
@given(files=SIZES, speeds=SPEEDS, copies=st.integers(1, 3), data=st.data())
def test_the_order_of_hosts_and_shards_does_not_matter(
    policy: str, files: list[ShardInfo], speeds: list[float], copies: int, data: st.DataObject
) -> None:
    named = [ShardHost(f"host-{i}", speed) for i, speed in enumerate(speeds)]
    found = place(files, named, policy, copies=copies)
    mixed = data.draw(st.permutations(files)), data.draw(st.permutations(named))
    assert place(*mixed, policy, copies=copies).homes == found.homes


@given(files=SIZES, count=st.integers(1, 9))
def test_block_keeps_neighbours_together_and_counts_even(
    files: list[ShardInfo], count: int
) -> None:
    found = place(files, hosts(count), "block")
    homes = [found.holders(f.file)[0] for f in files]
    assert homes == sorted(homes)
    each = loads(found)
    assert not homes or max(each.values()) - min(each[h.name] for h in hosts(count)) <= 1


@given(files=SIZES, count=st.integers(1, 9), copies=st.integers(1, 4), seed=st.integers(0, 9))
def test_random_gives_every_host_as_many(
    files: list[ShardInfo], count: int, copies: int, seed: int
) -> None:
    each = loads(place(files, hosts(count), "random", seed=seed, copies=copies))
    counts = [each[h.name] for h in hosts(count)]
    assert max(counts) - min(counts) <= min(copies, count)


def test_random_depends_on_the_seed_and_spreads_the_copies_of_a_host() -> None:
    files = shards([1] * 400)
    found = place(files, hosts(5), "random", copies=2)
    assert found.homes != place(files, hosts(5), "random", copies=2, seed=1).homes
    seconds = Counter(b for a, b in found.homes.values() if a == "host-0")
    assert set(seconds) == {"host-1", "host-2", "host-3", "host-4"}


@given(m=st.integers(1, 60), count=st.integers(1, 9), copies=st.integers(1, 9), seed=st.integers())
def test_hash_keeps_its_bound(m: int, count: int, copies: int, seed: int) -> None:
    found = place(shards([1] * m), hosts(count), "hash", copies=copies, seed=seed)
    average = min(copies, count) * m / count
    assert max(loads(found).values()) <= math.ceil((1 + SLACK) * average)


def moved(before: Placement, after: Placement) -> float:
    """The part of all copies that has to travel."""
    new = sum(len({*after.holders(s)} - {*before.holders(s)}) for s in before.homes)
    return new / sum(map(len, before.homes.values()))


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_a_host_that_joins_or_leaves_moves_about_its_own_part(n: int, copies: int) -> None:
    """Measured, as a multiple of 1 / (n + 1): 0.97 to 1.07 on average with 32 shards and more a
    host, up to 1.31 with 8; single cases up to 1.3 and 1.93."""
    joining, leaving = [], []
    for seed in range(8):
        files = shards([1] * (32 * n))
        few = place(files, hosts(n), "hash", seed=seed, copies=copies)
        many = place(files, hosts(n + 1), "hash", seed=seed, copies=copies)
        joining.append(moved(few, many))
        leaving.append(moved(many, few))
    assert 0.7 / (n + 1) <= np.mean(joining) <= 1.5 / (n + 1)
    assert 0.7 / (n + 1) <= np.mean(leaving) <= 1.5 / (n + 1)


def test_other_policies_move_nearly_everything_when_a_host_joins() -> None:
    files = shards([1] * 256)
    assert moved(place(files, hosts(8), "random"), place(files, hosts(9), "random")) > 0.5


@given(files=SIZES, speeds=SPEEDS)
def test_balanced_is_within_the_largest_shard_of_the_ideal(
    files: list[ShardInfo], speeds: list[float]
) -> None:
    named = [ShardHost(f"host-{i}", speed) for i, speed in enumerate(speeds)]
    found = place(files, named, "balanced")
    size = {f.file: f.nbytes for f in files}
    finish = [sum(size[s] for s in kept_by(found, h.name)) / h.speed for h in named]
    ideal = sum(size.values()) / sum(speeds)
    largest = max(size.values(), default=0) / np.mean(speeds)
    assert max(finish) <= ideal + largest + 1e-6


def test_balanced_gives_a_host_of_double_speed_double() -> None:
    found = place(shards([1] * 90), [ShardHost("a"), ShardHost("b", 2.0)], "balanced")
    assert loads(found) == {"a": 30, "b": 60} and "0.0% above" in found.because


@policies
@given(
    sizes=st.lists(st.integers(1, 50), max_size=30),
    capacities=st.lists(st.none() | st.integers(0, 400), min_size=1, max_size=6),
    copies=st.integers(1, 3),
)
def test_no_host_is_given_more_than_it_has_room_for(
    policy: str, sizes: list[int], capacities: list[int | None], copies: int
) -> None:
    named = [ShardHost(f"host-{i}", capacity=c) for i, c in enumerate(capacities)]
    files = shards(sizes)
    size = {f.file: f.nbytes for f in files}
    try:
        found = place(files, named, policy, copies=copies)
    except DataError as error:
        assert "no room" in str(error)
        assert sum(c is None for c in capacities) < min(copies, len(named))
        return
    for host in named:
        kept = sum(size[s] for s in kept_by(found, host.name))
        assert host.capacity is None or kept <= host.capacity


def test_hash_raises_its_bound_where_a_host_is_small() -> None:
    named = [ShardHost("small", capacity=10), ShardHost("a"), ShardHost("b")]
    found = place(shards([10] * 90), named, "hash")
    assert loads(found)["small"] == 1 and found.because.startswith("hash: ")


def test_what_was_not_possible_as_asked_is_said() -> None:
    assert "3 copies were asked for, there are 2 hosts" in str(
        place(shards([1]), hosts(2), copies=3)
    )
    tight = [ShardHost("a", 9.0, 30), ShardHost("b", 9.0, 30), ShardHost("c", 1.0, 30)]
    found = place(shards([10] * 4), tight, "balanced", copies=2)
    assert "too short for balanced" in found.because


@pytest.mark.parametrize(
    ("named", "policy", "copies", "says"),
    [
        ([], "hash", 1, "no hosts"),
        ([ShardHost("a")], "nearest", 1, "there is no placement 'nearest'; use balanced, block"),
        ([ShardHost("a")], "hash", 0, "at least 1"),
        ([ShardHost("a"), ShardHost("a")], "hash", 1, "'a' is listed twice"),
        ([ShardHost("a", 0.0)], "hash", 1, "makes no sense"),
        (
            [ShardHost("a", 1.0, 5)],
            "block",
            1,
            r"no room for train-00000.arrow: 1 hosts with 10 bytes",
        ),
    ],
)
def test_what_cannot_be_placed_is_refused(
    named: list[ShardHost], policy: str, copies: int, says: str
) -> None:
    with pytest.raises(DataError, match=says):
        place(shards([10]), named, policy, copies=copies)


def test_placements_never_change_between_releases() -> None:
    """A cluster that is upgraded must not have to move its data."""
    found = place(shards([3, 1, 2, 5]), hosts(3), "hash", copies=2)
    assert [(s[6:11], held) for s, held in sorted(found.homes.items())] == [
        ("00000", ("host-0", "host-1")),
        ("00001", ("host-2", "host-1")),
        ("00002", ("host-1", "host-2")),
        ("00003", ("host-1", "host-2")),
    ]
