# SPDX-License-Identifier: Apache-2.0
"""The hosts of a run, and who works on them."""

from collections.abc import Mapping
from dataclasses import replace

from manyhands.driver.supervise.worker_states import Situation
from manyhands.values.worker_status import HostStatus


def with_ranks(roster: Mapping[str, HostStatus], now: Situation) -> list[HostStatus]:
    """`roster` by `WorkerPlace.at`. The driver's host comes first, and the others as they came."""
    if now.view is None:
        return list(roster.values())
    ranks: dict[str, list[int]] = {}
    for member, worker in zip(now.view.members, now.members(), strict=True):
        if worker.phase != "gone":
            ranks.setdefault(worker.at, []).append(member.rank)
    return [replace(host, ranks=ranks.get(at, [])) for at, host in roster.items()]
