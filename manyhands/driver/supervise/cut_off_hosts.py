# SPDX-License-Identifier: Apache-2.0
"""Two hosts that answer the driver and do not reach each other: which of them has to go. Pure."""

from collections import Counter

from manyhands.driver.supervise.decisions import DropHost
from manyhands.driver.supervise.worker_states import Situation

LINK_S = 0.5
"""How long to wait for other signs when a connection between two hosts has failed."""
MUTE_S = 1.0
"""A host of which nothing was heard for so long since a connection to it failed is gone."""


def cut_off(now: Situation) -> DropHost | None:
    """One of two hosts that have lost their connection to each other: the one that is mute since
    then, or (both live) the one that has lost more of them; among equals, the one that came last.
    The driver's own host stays.
    """
    members = [w for w in now.members() if w.alive]
    hosts = {w.at: w for w in reversed(members)}
    links: set[frozenset[str]] = set()
    for worker in members:
        others = [at for at in worker.lost if at in hosts and at != worker.at]
        if not worker.broken or worker.phase_s < LINK_S:
            continue
        for other in sorted(others):
            # Who has answered since would have told of a worker that died.
            pair = (worker.at, other)
            mute = [at for at in pair if hosts[at].host_silent_s >= worker.phase_s]
            if len(mute) == 1 and worker.phase_s >= MUTE_S:
                name = hosts[mute[0]].host_name
                return DropHost(mute[0], f"{name} does not answer, and its connections have ended")
            if not mute:
                links.add(frozenset(pair))
    if not links:
        return None
    failed = Counter(at for link in links for at in link)
    order = list(dict.fromkeys(w.at for w in members))
    worst = max(failed, key=lambda at: (at != "", failed[at], order.index(at)))
    link = min(sorted(link) for link in links if worst in link)
    names = " and ".join(sorted(hosts[at].host_name for at in link))
    return DropHost(worst, f"{names} both answer, but do not reach each other")
