# SPDX-License-Identifier: Apache-2.0
"""The hosts of a run and who works on them, as people see them."""

from collections.abc import Mapping
from dataclasses import replace

from manyhands.accounting.deal_micro_batches import deal
from manyhands.driver.supervise.worker_states import Situation
from manyhands.values.view import View
from manyhands.values.worker_status import HostStatus, WorkerStatus


def with_ranks(roster: Mapping[str, HostStatus], now: Situation) -> list[HostStatus]:
    """`roster` by `WorkerPlace.at`. The driver's host comes first, and the others as they came."""
    if now.view is None:
        return list(roster.values())
    ranks: dict[str, list[int]] = {}
    for member, worker in zip(now.view.members, now.members(), strict=True):
        if worker.phase != "gone":
            ranks.setdefault(worker.at, []).append(member.rank)
    return [replace(host, ranks=ranks.get(at, [])) for at, host in roster.items()]


def worker_statuses(now: Situation, view: View) -> list[WorkerStatus]:
    """Of the members of the view that is in force, by rank; without those that are gone."""
    dealt = [len(mine) for mine in deal(now.micro_batches, tuple(view.speeds))]
    if now.merges:  # each takes whole steps
        dealt = [now.micro_batches * (speed > 0) for speed in view.speeds]
    return [
        WorkerStatus(
            m.rank,
            m.worker,
            m.pid,
            worker.at_name or m.host,
            worker.step,
            worker.samples_per_s,
            dealt[m.rank],
            view.speeds[m.rank] == 0,
        )
        for m, worker in zip(view.members, now.members(), strict=True)
        if worker.phase != "gone"
    ]
