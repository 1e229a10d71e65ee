# SPDX-License-Identifier: Apache-2.0
"""Which launcher runs the workers: by the name of an engine, and by the hosts that are wanted."""

from collections.abc import Callable

from manyhands.launch.engines.launcher import WORKER, Inline, Launcher, Local, create_segments
from manyhands.launch.hosts.requested_hosts import Wish, open_cluster
from manyhands.launch.ray.ray_hosts import open_on_ray
from manyhands.launch.ray.ray_session import is_ray
from manyhands.launch.shipping.ship_files import refuse_missing
from manyhands.values.errors import RequestError

ENGINES: dict[str, Callable[[str, tuple[int, int]], Launcher]] = {"local": Local, "inline": Inline}


def open_engine(engine: str, wish: Wish | None = None) -> Launcher:
    """A launcher of manyhands' own workers."""
    wish = wish or Wish()
    refuse_missing(wish.ship)
    if is_ray(engine):
        return open_on_ray(engine, wish)
    if engine not in ENGINES:
        raise RequestError(f"there is no engine '{engine}'; use {', '.join(ENGINES)} or ray.")
    if wish.spread or wish.worker_resources or wish.ray_token_file:
        raise RequestError(
            "--spread, --worker-resources and --ray-token-file are for Ray: --engine ray"
        )
    if wish.any:
        if engine != "local":
            raise RequestError(f"--hosts and --listen are for local processes, not for {engine}.")
        cluster = open_cluster(wish)
        cluster.ship = wish.ship
        return cluster
    return ENGINES[engine](WORKER, create_segments())
