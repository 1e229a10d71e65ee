# SPDX-License-Identifier: Apache-2.0
"""Ray by itself: room for two workers in a placement group, and an empty actor in each.

python alone.py FILE      writes down when both had answered, and stays for a moment
"""

import sys
import time
from pathlib import Path

from manyhands.launch.ray.ray_session import Session

STAYS_S = 4.0

session = Session(None)
ray = session.ray


class Empty:
    def here(self) -> bool:
        return True


group = ray.util.placement_group([{"CPU": 1}] * 2, strategy="PACK")
ray.get(group.ready())
placed = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
actors = [
    ray.remote(Empty)
    .options(
        num_cpus=1,
        scheduling_strategy=placed(placement_group=group, placement_group_bundle_index=k),
    )
    .remote()
    for k in range(2)
]
ray.get([actor.here.remote() for actor in actors])
Path(sys.argv[1]).write_text(str(time.time()))
time.sleep(STAYS_S)
session.close()
