"""Which tests one of pytest's processes runs one after the other, when several share them.

xdist has groups of its own (`--dist loadgroup`); with pytest 9.2 they are silently not heeded.
"""

from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]

GROUPS = {
    "launch/hosts": "hosts",  # several hosts, ssh, mpirun: leases, heartbeats, links that are cut
    "launch/ray": "hosts",
    "launch/wire": "hosts",
    "driver/supervise/test_host_links.py": "hosts",  # these measure the network
    "stories/test_doctor.py": "hosts",
    "soak": "hosts",
    "training/collective/test_mpi.py": "mpi",  # its ranks are started once for all of them
    "test_surfaces.py": "surfaces",  # and so is its run
}
"""File or folder → group. All others go to whoever is free. "hosts" are tests that judge silence,
or that use what a machine has once."""


def group_of(nodeid: str) -> str:
    """A test that is in no group is one of its own."""
    file = nodeid.partition("::")[0].removeprefix(f"{HERE.name}/")
    found = (group for start, group in GROUPS.items() if file.startswith(start))
    return next(found, nodeid)


def scheduler(config: Any, log: Any) -> Any:
    """Groups first, those with most tests before others; then the tests that are in none."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)
