# SPDX-License-Identifier: Apache-2.0
"""What test_mpi has mpirun start: `python -m tests.support.mpi_ranks bodies|forked FOLDER`.

`bodies`: run the functions that a test puts into the folder, one after the other, each with a
collective of its own. `forked`: be a host's driver, whose agent forks the worker that uses MPI.
"""

import itertools
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import cloudpickle
import torch

from manyhands.launch.engines.fork_agent import WorkerExit
from manyhands.launch.engines.local_processes import Local
from manyhands.launch.engines.memory_segments import create_segments
from manyhands.testing.contracts import orders
from manyhands.training.collective.mpi import Mpi, finish, load_mpi
from manyhands.training.state.layout import Lanes
from manyhands.values.run_folder import write_whole
from manyhands.values.world import World

IDLE_S = 60
"""Nobody needs a rank that has waited so long for something to do."""

F32 = torch.float32
Body = Callable[[int, Mpi], object]


class Patient:
    """Gives up at a time of the test's choice."""

    def __init__(self) -> None:
        self.until = float("inf")
        self.entered = self.asked = 0

    def broken(self) -> bool:
        self.asked += 1
        return time.monotonic() > self.until

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *error: object) -> None: ...


def join(generation: int) -> Mpi:
    """Our ranks go the other way round: MPI's order is not ours."""
    comm = load_mpi().COMM_WORLD
    world = World(comm.size - 1 - comm.rank, comm.size)
    slots: list[Lanes] = [{F32: torch.zeros(8)} for _ in range(3)]
    return Mpi(world, slots, patience=Patient(), generation=generation)


def run_bodies(folder: Path) -> None:
    rank = join(0).world.rank
    (folder / f"ready-{rank}").touch()
    for turn in itertools.count(1):
        deadline = time.monotonic() + IDLE_S
        while not (path := folder / f"body-{turn}").exists():
            time.sleep(0.005)
            if time.monotonic() > deadline:
                return
        if not (content := path.read_bytes()):
            break
        run_body(turn, cloudpickle.loads(content), folder)
    finish()


def run_body(turn: int, body: Body, folder: Path) -> None:
    collective = join(10 * turn)  # bodies may use the nine that follow
    try:
        result = body(collective.world.rank, collective)
    except BaseException as error:
        result = error
    collective.close()
    path = folder / f"result-{turn}-{collective.world.rank}"
    write_whole(path, cloudpickle.dumps(result), durable=False)


def fork_a_worker(folder: Path) -> None:
    def work() -> None:
        run_body(1, cloudpickle.loads((folder / "body-1").read_bytes()), folder)
        finish()

    call = folder / f"call-{os.getpid()}"
    call.write_bytes(cloudpickle.dumps(partial(work)))
    with closing(Local("manyhands.testing.contracts:contract_worker", create_segments())) as local:
        local.start(0, orders(f"call {call}".encode()), folder / f"log-{os.getpid()}")
        exits: list[WorkerExit] = []
        while not exits:
            exits = [sign for sign in local.poll() if isinstance(sign, WorkerExit)]
            time.sleep(0.005)
        print(f"worker {exits[0].pid} ended with {exits[0].code}", flush=True)
        deadline = time.monotonic() + IDLE_S
        while not (folder / "enough").exists() and time.monotonic() < deadline:
            time.sleep(0.005)  # mpirun ends the job when one of its own children goes like that


if __name__ == "__main__":
    verbs = {"bodies": run_bodies, "forked": fork_a_worker}
    verbs[sys.argv[1]](Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # MPI is finished, or cannot be
