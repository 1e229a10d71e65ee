# SPDX-License-Identifier: Apache-2.0
"""status.json: how the run is, for whoever looks into its folder."""

import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from manyhands.monitor.terminal import Progress
from manyhands.values.run_folder import RunDir, write_whole
from manyhands.values.server_load import ServerStatus
from manyhands.values.worker_status import HostStatus, Link, WorkerStatus


def write_status(
    run: RunDir,
    state: str,
    progress: Progress,
    workers: Sequence[WorkerStatus],
    hosts: Sequence[HostStatus],
    links: Sequence[Link],
    outlook: Mapping[str, str],
    servers: Sequence[ServerStatus],
    staleness: Sequence[int],
) -> None:
    """A disk that is full does not stop a run for the sake of its status."""
    status = {
        "state": state,
        "step": progress.step,
        "total_steps": progress.total_steps,
        "loss": progress.loss,
        "samples_per_s": progress.samples_per_s,
        **outlook,
        "pid": os.getpid(),
        "host": platform.node(),
        "time": time.time(),
        "workers": workers,
        "hosts": hosts,
        "links": links,
        "servers": servers,
        "staleness_counts": staleness,
    }
    with suppress(OSError):
        encoded = msgspec.json.format(msgspec.json.encode(status))
        write_whole(run.status, encoded, durable=False)
