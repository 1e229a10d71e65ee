# SPDX-License-Identifier: Apache-2.0
"""Where workers are at different steps, and no host has room for more than the one who keeps its
copy: nobody can compute. The run waits for room, and says for what."""

import time
from collections.abc import Callable

from manyhands.driver.supervise.servers import computing_among
from manyhands.driver.supervise.worker_states import Situation
from manyhands.values import events

MOMENT_S = 2.0
"""So long it may be that others are just coming."""


def room_that_lacks(now: Situation) -> str | None:
    """What training waits for, when all are here for whom there is room; None: for nothing."""
    if not now.merges or now.running or now.stop or now.paused or now.capacity is None:
        return None
    staying = [w for w in now.workers.values() if w.alive and not w.leaving]
    if not staying or any(w.phase not in ("waiting", "ready") for w in staying):
        return None
    able, hosts = computing_among(now, staying), len({w.at for w in staying})
    if able >= max(1, now.least) or len(staying) < now.capacity:
        return None
    here = f"{hosts} host{'s' * (hosts != 1)} with room for {len(staying)} in all"
    wanted = f"{max(1, now.least)} who compute" if now.least > 1 else "somebody who computes"
    return (
        f"training waits for {wanted}: there is room on {here}, and where workers are at different "
        "steps (server.mode) the first process of each host keeps its copy of the weights and "
        "computes nothing. Give a host room for two or more (--hosts NAME:2, or manyhands worker "
        '--slots 2), or stop it and resume with --set server.mode="sync", where one is enough.'
    )


class RoomToCompute:
    """Tells of it after a moment, and once for each time that it is so."""

    def __init__(
        self,
        situation: Situation,
        tell: events.EventSink,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now, self.tell, self.clock = situation, tell, clock
        self.since: float | None = None
        self.told = False

    def look(self) -> None:
        text = room_that_lacks(self.now)
        if text is None:
            self.since, self.told = None, False
        elif self.since is None:
            self.since = self.clock()
        elif not self.told and self.clock() - self.since >= MOMENT_S:
            self.told = True
            self.tell(events.Warned(text=text))
