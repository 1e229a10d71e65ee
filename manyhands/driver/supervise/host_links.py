# SPDX-License-Identifier: Apache-2.0
"""How far the hosts of a run are from each other, as they have measured it themselves."""

from itertools import accumulate

from manyhands.accounting.deal_micro_batches import deal
from manyhands.driver.supervise.uneven_deal import LEAST_MEASURED_S
from manyhands.driver.supervise.worker_states import Situation, WorkerState
from manyhands.values import events
from manyhands.values.messages import Measured
from manyhands.values.worker_status import Link


class HostLinks:
    """Keeps what was measured; `membership.not_measured` decides when it is to be."""

    def __init__(self, situation: Situation, tell: events.EventSink) -> None:
        self.now, self.tell = situation, tell
        self.links: dict[frozenset[str], Link] = {}
        self.gradient_bytes = 0
        self.warned: set[frozenset[str]] = set()

    def hear(self, worker: WorkerState, message: Measured) -> None:
        """Both of a pair have the same numbers; whoever speaks first is believed."""
        homes = self._homes()
        self.gradient_bytes = message.gradient_bytes
        for number, round_trip_s, bytes_per_s in message.links:
            if not 0 <= number < len(homes) or homes[number].at == worker.at:
                continue
            pair = frozenset((worker.at, homes[number].at))
            if pair in self.links:
                continue
            one, other = sorted((worker.host_name, homes[number].host_name))
            self.links[pair] = link = Link(one, other, round_trip_s, bytes_per_s)
            self.now.measured |= {pair}
            self.tell(
                events.Linked(
                    host=link.host,
                    other=link.other,
                    round_trip_s=link.round_trip_s,
                    bytes_per_s=link.bytes_per_s,
                )
            )

    def present(self) -> list[Link]:
        """Between hosts of the current view."""
        here = {w.at for w in self._homes()}
        return [link for pair, link in self.links.items() if pair <= here]

    def look(self) -> None:
        """Warn, once, of a link over which gradients take longer than it takes to compute them."""
        now, homes = self.now, self._homes()
        if now.view is None or len(homes) < 2 or now.measured_s < LEAST_MEASURED_S:
            return
        here = {w.at for w in homes}
        found = {p: link for p, link in self.links.items() if p <= here and p not in self.warned}
        if not found:
            return
        shares = deal(now.micro_batches, tuple(now.view.speeds))
        times = [len(s) * w.micro_batch_s for s, w in zip(shares, now.members(), strict=True)]
        pair = min(found, key=lambda p: found[p].bytes_per_s)
        if all(times) and (text := slow(found[pair], self.gradient_bytes, len(homes), max(times))):
            self.warned |= set(found)
            self.tell(events.Warned(text=text))

    def _homes(self) -> list[WorkerState]:
        """Who speaks for each host of the current view."""
        if self.now.view is None:
            return []
        members = self.now.members()
        return [members[first] for first in accumulate(self.now.view.hosts[:-1], initial=0)]


def slow(link: Link, gradient_bytes: int, hosts: int, step_s: float) -> str | None:
    """What to tell people about the slowest link, if it is what a step waits for.

    Each host sends every other its part of the gradient, and then its part of the sum.
    """
    exchange_s = 2 * gradient_bytes / hosts / link.bytes_per_s + 2 * link.round_trip_s
    if exchange_s <= step_s:
        return None
    return (
        f"the network between {link.host} and {link.other} ({link.bytes_per_s / 1e6:.1f} MB/s, "
        f"{link.round_trip_s * 1e3:.2f} ms there and back) is what steps wait for: "
        f"{1e3 * exchange_s:.0f} ms to exchange the gradients ({gradient_bytes / 1e6:.1f} MB), "
        f"{1e3 * step_s:.0f} ms to compute them. A larger train.batch makes steps longer and fewer."
    )
