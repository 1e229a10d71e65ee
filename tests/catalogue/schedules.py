"""Schedules: all of torch's that need no score, and those that people write."""

# pyright: basic

from typing import Any

import torch

from tests.catalogue.case import Case, Settings, sgd

lr: Any = torch.optim.lr_scheduler


class OnlyStep:
    """No class of torch's: it has `step` and nothing else."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.calls = optimizer, 0

    def step(self) -> None:
        self.calls += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.calls)


class EveryOption(OnlyStep):
    """Changes whatever a group has, and not the learning rate alone."""

    def step(self) -> None:
        super().step()
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.05 * self.calls
            group["momentum"] = 0.5 + 0.05 * self.calls


class Drawn(OnlyStep):
    """A learning rate that is drawn at random."""

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.2 * float(torch.rand(()))


def sequential(optimizer: Any) -> Any:
    warm = lr.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    rest = lr.CosineAnnealingLR(optimizer, T_max=4)
    return lr.SequentialLR(optimizer, [warm, rest], milestones=[3])


def chained(optimizer: Any) -> Any:
    parts = [lr.ExponentialLR(optimizer, 0.9), lr.ConstantLR(optimizer, 0.5, total_iters=2)]
    return lr.ChainedScheduler(parts, optimizer=optimizer)


def two_groups(model: Any) -> Any:
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.01}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def tensor_lr(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))


LONG = Settings(epochs=3)

TORCH = {
    "step-lr": lambda o: lr.StepLR(o, step_size=2, gamma=0.5),
    "multi-step": lambda o: lr.MultiStepLR(o, milestones=[2, 5], gamma=0.3),
    "one-cycle": lambda o: lr.OneCycleLR(o, max_lr=0.2, total_steps=12),
    "cosine": lambda o: lr.CosineAnnealingLR(o, T_max=5),
    "cosine-restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2),
    "polynomial": lambda o: lr.PolynomialLR(o, total_iters=8, power=2.0),
    "multiplicative": lambda o: lr.MultiplicativeLR(o, lambda step: 0.9),
    "lambda": lambda o: lr.LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "warm-up-from-zero": lambda o: lr.LambdaLR(o, lambda step: min(1.0, step / 4)),
    "sequential": sequential,
    "chained": chained,
    "swa-lr": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=4),
}

CASES = [
    *(Case(name, f"A schedule of torch's, stepped once after every step: {name}.", schedule=made,
           optimizer=sgd, settings=LONG) for name, made in TORCH.items()),
    Case("cyclic-momentum", "A schedule that changes momentum too.", optimizer=sgd, settings=LONG,
         schedule=lambda o: lr.CyclicLR(o, 0.01, 0.2, step_size_up=3, cycle_momentum=True)),
    Case("one-cycle-betas", "A schedule that changes betas.", settings=LONG,
         schedule=lambda o: lr.OneCycleLR(o, max_lr=0.05, total_steps=12)),
    Case("lambda-per-group", "One function for each group.", optimizer=two_groups, settings=LONG,
         schedule=lambda o: lr.LambdaLR(o, [lambda s: 0.9**s, lambda s: 1 / (1 + s)])),
    Case("schedule-of-a-tensor", "The learning rate is a tensor, changed in place.",
         optimizer=tensor_lr, schedule=TORCH["step-lr"]),
    Case("only-step", "An object that can step and nothing else.", optimizer=sgd,
         schedule=OnlyStep),
    Case("every-option", "It changes whatever a group has.", optimizer=sgd, schedule=EveryOption),
    Case("drawn", "A learning rate that is drawn: the same on all workers.", optimizer=sgd,
         schedule=Drawn),
]  # fmt: skip
