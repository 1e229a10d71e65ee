# SPDX-License-Identifier: Apache-2.0
"""Which launcher runs the workers: by the name of an engine, and by the hosts that are wanted."""

from collections.abc import Callable

from manyhands.launch.engines.inline_thread import Inline
from manyhands.launch.engines.launcher import WORKER, Launcher
from manyhands.launch.engines.local_processes import Local
from manyhands.launch.engines.memory_segments import create_segments
from manyhands.launch.hosts.requested_hosts import open_hosts
from manyhands.launch.ray.ray_placement_groups import open_on_ray
from manyhands.launch.ray.ray_session import is_ray
from manyhands.launch.shipping.ship_files import refuse_missing
from manyhands.values.errors import RequestError
from manyhands.values.run_options import Where

ENGINES: dict[str, Callable[[str, tuple[int, int]], Launcher]] = {"local": Local, "inline": Inline}


def open_engine(where: Where) -> Launcher:
    """A launcher of manyhands' own workers."""
    engine = where.engine
    refuse_missing(where.shipped)
    if is_ray(engine):
        return open_on_ray(where)
    if engine not in ENGINES:
        raise RequestError(f"there is no engine '{engine}'; use {', '.join(ENGINES)} or ray.")
    if where.spread or where.worker_resources or where.ray_token_file:
        raise RequestError(
            "--spread, --worker-resources and --ray-token-file are for Ray: --engine ray"
        )
    if where.asks_for_hosts:
        if engine != "local":
            raise RequestError(f"--hosts and --listen are for local processes, not for {engine}.")
        return open_hosts(where)
    return ENGINES[engine](WORKER, create_segments())
