# SPDX-License-Identifier: Apache-2.0
"""Runs that are disturbed at random, for as long as you like: `make soak SECONDS=600`.

Every round picks a model, an optimizer, a number of workers and settings from its seed, trains it
calmly on one worker, and then again while a thread kills, stops, terminates and resizes, all from
outside, at moments that nobody planned. Afterwards the fingerprint must be the calm run's, the
ledger must prove that nothing was lost or repeated, and nothing may be left behind. A round that
fails prints its seed; `--seed` runs it again (its choices are the same, the moments are not).
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyhands.accounting import ledger
from manyhands.accounting.proof import check
from manyhands.driver.live.command_socket import Change, Continue, Pause, Scale, ask
from manyhands.launch.choose_engine import open_engine
from manyhands.launch.engines.launcher import Launcher
from manyhands.monitor.run_status import status
from manyhands.stories.train import train
from manyhands.values.errors import RequestError
from manyhands.values.run_folder import RunDir
from manyhands.values.run_options import Where
from manyhands.values.task import Task

MOST_DISTURBANCES = 30
"""In a round; a run that is killed more often than it can take a step would never end."""


@dataclass(frozen=True, slots=True)
class Round:
    """Everything a seed decides."""

    seed: int
    task: Task
    settings: list[str]
    workers: int
    faults: list[str]
    mean_wait_s: float
    name: str


@dataclass(slots=True)
class Done:
    disturbances: list[str]
    recoveries: int
    problems: list[str]
    """Promises that were broken."""


class Net(nn.Module):
    """Something of everything: BatchNorm, dropout, a frozen part, tied weights, an own buffer."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(24, width)
        self.norm = nn.BatchNorm1d(width) if kind != "layer" else nn.LayerNorm(width)
        self.second = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 5)
        self.unused = nn.Linear(3, 3)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.norm(self.first(x))), 0.2, self.training)
        x = x + self.frozen(F.relu(self.second(x)))
        if self.training:
            self.seen = self.seen + x.detach().mean()
        return self.head(x)


class Own(torch.optim.SGD):
    """Not known to manyhands: one worker runs it."""


optim: Any = torch.optim

OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": lambda m: optim.AdamW(_trained(m), lr=1e-3),
    "adamw fused": lambda m: optim.AdamW(_trained(m), lr=1e-3, fused=True),
    "sgd": lambda m: optim.SGD(_trained(m), lr=1e-2, momentum=0.9),
    "adagrad": lambda m: optim.Adagrad(_trained(m), lr=1e-2),
    "adafactor": lambda m: optim.Adafactor(_trained(m), lr=1e-2),
    "own": lambda m: Own(_trained(m), lr=1e-2, momentum=0.9),
}
SCHEDULES: dict[str, Callable[[Any], Any] | None] = {
    "no schedule": None,
    "cosine": lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 400),
    "lambda": lambda o: optim.lr_scheduler.LambdaLR(o, _hyperbola),
}


def _hyperbola(step: int) -> float:
    return 1 / (1 + step / 100)


def choose(seed: int) -> Round:
    dice = random.Random(seed)
    width = dice.choice([8, 40, 300])
    kind = dice.choice(["batch", "layer"])
    optimizer, schedule = dice.choice(list(OPTIMIZERS)), dice.choice(list(SCHEDULES))
    records = dice.choice([97, 160, 333])
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(records, 24, generator=numbers)
    y = torch.randint(0, 5, (records,), generator=numbers)
    pause_s = dice.choice([0.0, 0.0, 0.001])

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        time.sleep(pause_s)
        return F.cross_entropy(model(batch["x"]), batch["y"])

    micro_batches = dice.choice([4, 8, 16])
    steps = dice.choice([120, 250, 400])
    settings = [
        f"train.batch={4 * micro_batches}",
        "train.micro_batch=4",
        f"train.steps={steps}",
        f"train.seed={seed % 1000}",
        f"checkpoint.every_steps={dice.choice([7, 50, 1000])}",
        f"evaluate.every_steps={dice.choice([13, 60, 1000])}",
        "recovery.silent_s=1",
        "recovery.stuck_s=5",
        "recovery.losses=50",
    ]
    if dice.random() < 0.4:
        settings.append("train.clip_norm=0.5")
    if dice.random() < 0.2:
        settings.append("train.audit_every=5")
    if dice.random() < 0.2:
        settings.append("train.collective=gloo")
    faults = dice.sample(["kill", "kill two", "kill all", "stop", "terminate", "scale", "pause"], 4)
    return Round(
        seed,
        Task(
            model=lambda: Net(width, kind),
            loss=loss,
            optimizer=OPTIMIZERS[optimizer],
            schedule=SCHEDULES[schedule],
            data={"x": x, "y": y},
            held_out={"x": x[:20], "y": y[:20]},
        ),
        settings,
        dice.choice([1, 2, 3, 4]),
        ["kill", *faults],
        dice.choice([0.05, 0.15, 0.4]),
        f"{width} wide, {kind}, {optimizer}, {schedule}, {' '.join(settings)}",
    )


def _trained(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


class Disturber(threading.Thread):
    """Does harm to a run from outside, until it is over."""

    def __init__(self, run: RunDir, chosen: Round) -> None:
        super().__init__(name="disturber", daemon=True)
        self.run_dir, self.chosen = run, chosen
        self.dice = random.Random(chosen.seed + 1)
        self.over = threading.Event()
        self.did: list[str] = []

    def run(self) -> None:
        while not self.over.wait(self.dice.expovariate(1 / self.chosen.mean_wait_s)):
            pids = [w["pid"] for w in status(self.run_dir).get("workers", [])]
            if pids and len(self.did) < MOST_DISTURBANCES:
                self._disturb(self.dice.choice(self.chosen.faults), pids)

    def _disturb(self, what: str, pids: list[int]) -> None:
        match what:
            case "kill":
                self._signal(signal.SIGKILL, [self.dice.choice(pids)])
            case "kill two":
                self._signal(signal.SIGKILL, self.dice.sample(pids, min(2, len(pids))))
            case "kill all":
                self._signal(signal.SIGKILL, pids)
            case "stop":
                self._signal(signal.SIGSTOP, [self.dice.choice(pids)])
            case "terminate":
                self._signal(signal.SIGTERM, [self.dice.choice(pids)])
            case "scale":
                self._ask(Scale(self.dice.randint(1, 4)))
            case "pause":
                self._ask(Pause())
                self._ask(Continue())
            case _:
                raise ValueError(what)
        self.did.append(what)

    def _signal(self, number: signal.Signals, pids: list[int]) -> None:
        for pid in pids:
            if _is_worker(pid):
                os.kill(pid, number)

    def _ask(self, what: Scale | Pause | Continue | Change) -> None:
        try:
            ask(self.run_dir.control, what, patience_s=20)
        except RequestError as error:
            if "within" in str(error) and not self.over.is_set():
                self.did.append(f"no answer to {what}")


def _is_worker(pid: int) -> bool:
    """Only what we started is harmed: a number may have been given to somebody else since."""
    try:
        return b"manyhands.launch.engines.fork_agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def run_round(chosen: Round, launcher: Launcher, folder: Path) -> Done:
    calm = train(
        chosen.task,
        to=folder / "calm",
        workers=1,
        settings=chosen.settings,
        quiet=True,
        launcher=launcher,
    )
    run = RunDir(folder / "rough")
    disturber = Disturber(run, chosen)
    disturber.start()
    try:
        rough = train(
            chosen.task,
            to=run.root,
            workers=chosen.workers,
            settings=chosen.settings,
            quiet=True,
            launcher=launcher,
        )
    finally:
        disturber.over.set()
        disturber.join()
    proof = check(ledger.read(run.ledger))
    problems = list(proof.problems)
    if not proof.steps == rough.step == calm.step:
        problems.append(f"{proof.steps} steps in the ledger, {rough.step} done, {calm.step} due")
    if rough.fingerprint != calm.fingerprint:
        problems.append("the weights are not the calm run's")
    if rough.scores != calm.scores:
        problems.append("the scores are not the calm run's")
    left = [p.name for p in run.root.iterdir() if p.name.startswith((".rendezvous", ".control"))]
    left += [p.name for p in run.checkpoints.iterdir() if p.name.startswith(".")]
    if left:
        problems.append(f"left behind: {left}")
    return Done(disturber.did, rough.recoveries, problems)


def soak(seconds: float, first_seed: int, *, rounds: int | None = None) -> int:
    """Round after round; returns how many failed."""
    launcher, failed, count = open_engine(Where()), 0, 0
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline and (rounds is None or count < rounds):
            chosen = choose(first_seed + count)
            count += 1
            folder = Path(tempfile.mkdtemp(prefix="manyhands-soak-"))
            started = time.monotonic()
            try:
                done = run_round(chosen, launcher, folder)
            except Exception as error:
                done = Done([], 0, [str(error)])
            if done.problems:
                failed += 1
                said = "; ".join(done.problems)
                print(f"seed {chosen.seed}: FAILED: {said}\n  {chosen.name}\n  {folder}")
                continue
            took = time.monotonic() - started
            print(
                f"seed {chosen.seed}: {len(done.disturbances)} disturbances, "
                f"{done.recoveries} recoveries, {took:.1f} s",
                flush=True,
            )
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        launcher.close()
    print(f"{count} rounds, {failed} failed")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None, help="of the first round")
    parser.add_argument("--rounds", type=int, default=None)
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"first seed {seed}", flush=True)
    sys.exit(1 if soak(given.seconds, seed, rounds=given.rounds) else 0)


if __name__ == "__main__":
    main()
