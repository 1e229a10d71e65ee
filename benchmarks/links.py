# SPDX-License-Identifier: Apache-2.0
"""Sums of vectors over two hosts: how many per second can be moved? Both are on loopback here.

    python benchmarks/links.py [--quick] [--rounds 5] [--json FILE]

    gloo       torch.distributed: all_reduce of the vector (all_gather of a small message)
    group      our exchange and share (gather) over gloo
    manyhands  our exchange and share (gather) over sockets of our own

One process per host has all three; they take turns within each round. Gloo also adds what it moves;
ours leave that to the canonical tree, so `manyhands-adds` is the same with the sum done between
exchange and share, as in training. Ratios are to gloo.
"""

import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import rows
import torch
from rows import Metric, Wanted, console

from manyhands.training.collective.collective import Collective
from manyhands.training.collective.handshake import PeerListener
from manyhands.training.collective.sockets import Sockets
from manyhands.training.collective.torch_group import TorchGroup, torch_distributed
from manyhands.training.state.layout import Bounds
from manyhands.values.world import World

HOSTS = 2
F32 = torch.float32
SIZES = {"4 KB": 1_000, "1 MB": 250_000, "25 MB": 6_250_000, "100 MB": 25_000_000}
MESSAGE, MESSAGE_BYTES = "message of 256 B", 256
SECONDS, QUICK_SECONDS = 0.5, 0.1
METRICS = (Metric("per_s", "per second", digits=1),)
TARGETS = {("25 MB", "per_s"): Wanted("≥", 0.9)}


class Patient:
    def broken(self) -> bool:
        return False

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


Call = Callable[[], object]


class Host:
    def __init__(self, rank: int, listeners: Connection, rendezvous: Path) -> None:
        torch.set_num_threads(1)  # as in a worker
        self.rank, listener = rank, PeerListener()
        listeners.send(listener.address)
        world, patience = World(rank, HOSTS, (1,) * HOSTS), Patient()
        self.group = TorchGroup(
            world,
            [],
            backend="gloo",
            rendezvous=rendezvous,
            device=torch.device("cpu"),
            patience=patience,
        )
        self.links = Sockets(
            world,
            [],
            listener=listener,
            addresses=listeners.recv(),
            generation=1,
            secret=bytes(32),
            patience=patience,
        )

    def summing(self, numel: int) -> dict[str, Call]:
        lane, out = torch.ones(numel), torch.zeros(numel)
        cuts = [numel * k // HOSTS for k in range(HOSTS + 1)]
        owned: list[Bounds] = [{F32: (a, b)} for a, b in itertools.pairwise(cuts)]
        mine = out[slice(*owned[self.rank][F32])]
        self.group.slots = self.links.slots = [{F32: lane}]

        def ours(collective: Collective, adds: bool = False) -> None:
            parts = collective.exchange([1] * HOSTS, owned)
            if adds:
                torch.add(parts[0][0][F32], parts[1][0][F32], out=mine)
            collective.share({F32: out}, owned)

        return {
            "gloo": partial(torch_distributed.all_reduce, lane),
            "group": lambda: ours(self.group),
            "manyhands": lambda: ours(self.links),
            "manyhands-adds": lambda: ours(self.links, adds=True),
        }

    def gathering(self) -> dict[str, Call]:
        mine = np.ones(MESSAGE_BYTES, dtype=np.uint8)
        everyone = torch.zeros(HOSTS * MESSAGE_BYTES, dtype=torch.uint8)
        return {
            "gloo": partial(torch_distributed.all_gather_single, everyone, torch.from_numpy(mine)),
            "group": lambda: self.group.gather(mine),
            "manyhands": lambda: self.links.gather(mine),
        }

    def per_second(self, call: Call, seconds: float) -> float:
        """Both hosts must make the same number of calls, so one tells the other how many."""
        call()
        started = time.perf_counter()
        call()
        took = np.frombuffer(np.float64(time.perf_counter() - started).tobytes(), dtype=np.uint8)
        (leaders, _) = self.links.gather(took)
        calls = max(3, min(2000, int(seconds / float(leaders.view(np.float64)[0]))))
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return calls / (time.perf_counter() - started)


def host(rank: int, listeners: Connection, rendezvous: Path, rounds: int, seconds: float) -> None:
    here = Host(rank, listeners, rendezvous)
    for _ in range(rounds):
        for work in (MESSAGE, *SIZES):
            calls = here.gathering() if work == MESSAGE else here.summing(SIZES[work])
            for name, call in calls.items():
                listeners.send((work, name, here.per_second(call, seconds)))
    here.links.close()
    here.group.close()
    listeners.close()


def measure(under: Path, rounds: int, seconds: float) -> rows.Samples:
    spawn = multiprocessing.get_context("spawn")
    lines: list[Connection] = []
    for rank in range(HOSTS):
        mine, theirs = spawn.Pipe()
        lines.append(mine)
        arguments = (rank, theirs, under / "rendezvous", rounds, seconds)
        spawn.Process(target=host, args=arguments, daemon=True).start()
        theirs.close()
    listeners = [line.recv() for line in lines]
    for line in lines:
        line.send(listeners)
    samples: rows.Samples = {}
    try:
        while True:
            (work, name, per_s), *_ = [line.recv() for line in lines]
            samples.setdefault((work, name, "per_s"), []).append(per_s)
            console.print(f"{work:<17} {name:<15} {per_s:,.1f} per second")
    except EOFError:
        return samples


def reference(metric: str, values: Mapping[str, float]) -> float | None:
    return values["gloo"]


def main() -> None:
    asked = rows.arguments(__doc__, rounds=5, quick_rounds=2).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        seconds = QUICK_SECONDS if asked.quick else SECONDS
        samples = measure(Path(scratch), rows.rounds_of(asked), seconds)
    rows.report(rows.summarise(samples, reference), METRICS, TARGETS, asked.json)


if __name__ == "__main__":
    main()
