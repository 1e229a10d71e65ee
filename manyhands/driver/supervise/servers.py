# SPDX-License-Identifier: Apache-2.0
"""Who of a view's members serves: computes nothing, and updates the weights for those who compute.

The state belongs to the host, so any of its processes can do either, and may do the other in the
next view: nothing is copied when a server dies, is added or is sent away.

Where workers are at different steps, the first member of every host serves: it keeps the host's
state up to date while the others compute, and speaks with the other hosts.
"""

from collections import Counter
from collections.abc import Sequence

from manyhands.driver.supervise.worker_states import Situation, WorkerState
from manyhands.values.view import View

MANY_SERVERS = 4
"""With more of them, the number of parts that the weights have is found out first."""


def is_for_one_to_find_out(now: Situation) -> bool:
    """Many servers are wanted, and nobody has built the model yet, which says how many can have
    something to update: whoever builds it first refuses too many before there are any."""
    built = any(w.phase not in ("starting", "gone") for w in now.workers.values())
    return now.servers > MANY_SERVERS and not now.begun and not built


def servers_among(now: Situation, members: int) -> int:
    """How many of so many members: as wanted; where some are missing, their share of those who are
    there. Somebody always computes."""
    serving = now.serving
    if serving == 0 or members < 2:
        return 0
    if members >= now.wanted + serving:
        return serving
    return max(1, members * serving // (now.wanted + serving))


def computing_among(now: Situation, members: Sequence[WorkerState]) -> int:
    """How many of these compute, if they are a view."""
    return len(members) - _at_least_one_a_host(now, members)


def dealt_nothing(now: Situation, members: Sequence[WorkerState]) -> int:
    """How many of these are servers, if they are a view. Somebody is left who is dealt something,
    also where nobody can compute it."""
    return min(_at_least_one_a_host(now, members), len(members) - 1)


def _at_least_one_a_host(now: Situation, members: Sequence[WorkerState]) -> int:
    servers = servers_among(now, len(members))
    return max(servers, len({worker.at for worker in members})) if now.merges else servers


def choose_servers(now: Situation, chosen: list[WorkerState]) -> set[int]:
    """Their ranks. Never the first, who speaks for all; those who served go on with it, and hosts
    get as many as the others. Where workers are at different steps: the first of each host, then
    the second ones."""
    if now.merges:
        place = [sum(w.at == worker.at for w in chosen[:k]) for k, worker in enumerate(chosen)]
        ranks = sorted(range(len(chosen)), key=lambda rank: (place[rank], rank))
        return set(ranks[: dealt_nothing(now, chosen)])
    before = _serving(now)
    found: list[int] = []
    for _ in range(servers_among(now, len(chosen))):
        here = Counter(chosen[rank].at for rank in found)
        rest = [rank for rank in range(1, len(chosen)) if rank not in found]

        def preference(rank: int) -> tuple[int, bool, int]:
            worker = chosen[rank]
            return here[worker.at], worker.number not in before, -rank  # noqa: B023 (used at once)

        found.append(min(rest, key=preference))
    return set(found)


def _serving(now: Situation) -> set[int]:
    """The workers who serve in the current view."""
    if now.view is None:
        return set()
    pairs = zip(now.view.members, now.view.speeds, strict=True)
    return {member.worker for member, speed in pairs if speed == 0}


def servers_in(view: View) -> int:
    return sum(speed == 0 for speed in view.speeds)


def with_servers(speeds: list[float], servers: set[int]) -> list[float]:
    """Who serves has no speed; who did in the view before, and computes now, counts as usual."""
    return [0.0 if rank in servers else speed or 1.0 for rank, speed in enumerate(speeds)]


def wanted_in_words(workers: int, servers: int) -> str:
    if not servers:
        return f"{workers} workers are wanted"
    return f"{_count(workers, 'worker')} and {_count(servers, 'server')} are wanted"


def hands_in_words(view: View) -> str:
    serving = servers_in(view)
    hands = _count(len(view.members) - serving, "worker")
    return f"{hands} and {_count(serving, 'server')}" if serving else hands


def all_here_in_words(workers: int, servers: int) -> str:
    if servers:
        return f"{_count(workers, 'worker')} and {_count(servers, 'server')} are here"
    return f"all {workers} workers are here" if workers > 1 else "the worker is here"


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}{'s' * (n != 1)}"
