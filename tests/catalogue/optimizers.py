"""Optimizers: all of torch's, with their options, and those that people write."""

# pyright: basic

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.catalogue.building import HEAD, linear, net
from tests.catalogue.case import Case
from tests.catalogue.models import sometimes

optim: Any = torch.optim


def made(kind: Any, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: kind(model.parameters(), **options)


def two_groups(model: Any) -> Any:
    return optim.AdamW(
        [
            {"params": [model[0].weight, model[2].weight], "weight_decay": 0.5},
            {"params": [model[0].bias, model[2].bias], "lr": 3e-2, "betas": (0.8, 0.9)},
        ],
        lr=1e-2,
    )


class InPlace(optim.Optimizer):
    """Gradient descent as in a tutorial, with momentum in its state."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["calls"] = state.get("calls", 0) + 1
                if "speed" not in state:
                    state["speed"] = torch.zeros_like(p)
                state["speed"].mul_(0.9).add_(p.grad)
                p.add_(state["speed"], alpha=-group["lr"] / state["calls"])


class NewMemory(InPlace):
    """p.data = ..., and not in place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


class WritesGradients(InPlace):
    """Changes the gradient in place, as gradient centralization does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.dim() > 1:
                    p.grad.sub_(p.grad.mean(1, keepdim=True))
        super().step()


class Lamb(InPlace):
    """Trust ratios: norms over whole tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    ratio = (p.norm() / (p.grad.norm() + 1e-6)).clamp(max=10.0)
                    p.add_(p.grad * ratio, alpha=-group["lr"])


class GlobalNorm(InPlace):
    """A norm over all parameters: it must see them all at once."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        ps = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in ps]).norm()
        for p in ps:
            p.add_(p.grad, alpha=-0.1 / float(total + 1e-6))


class Lookahead(optim.Optimizer):
    """Wraps another optimizer and shares its state; every third step the slow weights follow."""

    def __init__(self, inner: Any) -> None:
        super().__init__([p for g in inner.param_groups for p in g["params"]], {"lr": 0.1})
        self.inner, self.state = inner, inner.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        before = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.inner.step()
        for p, first in zip(self.param_groups[0]["params"], before, strict=True):
            state = self.state[p]
            if "slow" not in state:  # after the inner one has made its own
                state["slow"], state["calls"] = first, 0
            state["calls"] += 1
            if state["calls"] % 3 == 0:
                state["slow"].add_(p.detach() - state["slow"], alpha=0.5)
                p.copy_(state["slow"])


class Lion(InPlace):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                speed = self.state[p].setdefault("speed", torch.zeros_like(p))
                p.add_(torch.sign(0.9 * speed + 0.1 * p.grad), alpha=-1e-2)
                speed.lerp_(p.grad, 0.01)


class Noisy(InPlace):
    """Langevin dynamics: random numbers in the step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn(p.shape), alpha=1e-3)


class Sub(optim.Adam):
    """A subclass that changes nothing."""


def hooked(model: nn.Module) -> Any:
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def limit(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.clamp_(-0.3, 0.3)

    optimizer.register_step_post_hook(limit)
    return optimizer


def reversed_order(model: nn.Module) -> Any:
    return optim.Adam(list(model.parameters())[::-1], lr=1e-2)


SOMETIMES = net(sometimes, head=HEAD, other=linear(6, 6))
WIDE = net(lambda m, x: m.head(m.first(x).relu()), first=linear(6, 4003), head=linear(4003, 3))

TORCH = {
    "adadelta": made(optim.Adadelta, lr=0.5, weight_decay=0.01),
    "adagrad": made(optim.Adagrad, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.2),
    "adam-amsgrad": made(optim.Adam, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "adam-foreach": made(optim.Adam, lr=1e-2, foreach=True),
    "adam-fused": made(optim.Adam, lr=1e-2, fused=True),
    "adam-decoupled": made(optim.Adam, lr=1e-2, weight_decay=0.3, decoupled_weight_decay=True),
    "adamw-maximize": made(optim.AdamW, lr=1e-3, maximize=True),
    "adamw-fused-amsgrad": made(optim.AdamW, lr=1e-2, fused=True, amsgrad=True),
    "adamax": made(optim.Adamax, lr=1e-2, weight_decay=0.1),
    "asgd": made(optim.ASGD, lr=0.1, t0=2.0, lambd=1e-2),
    "nadam": made(optim.NAdam, lr=1e-2, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": made(optim.RAdam, lr=1e-2, weight_decay=0.1),
    "rmsprop-centered": made(optim.RMSprop, lr=1e-2, centered=True, momentum=0.5),
    "rmsprop": made(optim.RMSprop, lr=1e-2, weight_decay=0.1),
    "rprop": made(optim.Rprop, lr=1e-2, step_sizes=(1e-5, 0.5)),
    "sgd": made(optim.SGD, lr=0.1),
    "sgd-nesterov": made(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd-dampening": made(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
    "sgd-fused": made(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "sgd-foreach": made(optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "adafactor": made(optim.Adafactor, lr=1e-2),
}


def grouped(kind: Any, **settings: Any) -> Any:
    """Two groups with settings of their own."""

    def make(model: nn.Module) -> Any:
        own = {"momentum": 0.9} if kind is optim.SGD else {"betas": (0.7, 0.9), "eps": 1e-4}
        first, *rest = model.parameters()
        groups = [{"params": [first], "lr": 0.05, **own}, {"params": rest, "weight_decay": 0.1}]
        return kind(groups, lr=0.01, **settings)

    return make


def some(make: Callable[[Any], Any]) -> Any:
    """For the first and the last layer alone; the others get gradients that nobody uses."""
    return lambda model: make(nn.ModuleList([model.first, model.head]))


def late(m: Any, x: Tensor) -> Tensor:
    """`other` is used by micro-batches of some steps alone."""
    hidden = torch.tanh(m.first(x))
    if len(x) == 3 and float(x[0, 0]) > 0.9:
        hidden = hidden + m.other(x)
    return m.head(hidden)


WIDE_SOMETIMES = net(late, first=linear(6, 3001), other=linear(6, 3001), head=linear(3001, 3))

CASES = [
    *(Case(name, f"torch.optim: {name}, with layers that some steps leave out.",
           model=SOMETIMES, optimizer=optimizer) for name, optimizer in TORCH.items()),
    *(Case(f"{name}-in-parts", f"{name} over tensors that several workers update in parts.",
           model=WIDE, optimizer=TORCH[name])
      for name in ("adam-fused", "sgd-nesterov", "nadam", "rprop", "asgd", "adafactor")),
    Case("muon", "Matrices only; the others are not trained.",
         optimizer=lambda m: optim.Muon([m[0].weight, m[2].weight], lr=1e-2)),
    Case("lr-is-a-tensor", "A learning rate that is a tensor.",
         optimizer=lambda m: optim.Adam(m.parameters(), lr=torch.tensor(1e-2))),
    Case("betas-are-tensors", "So are the betas.",
         optimizer=lambda m: optim.AdamW(m.parameters(), lr=torch.tensor(1e-2),
                                         betas=(torch.tensor(0.8), torch.tensor(0.9)))),
    Case("lr-zero", "Nothing moves, but momentum.", optimizer=made(optim.AdamW, lr=0.0)),
    Case("groups", "Groups with settings of their own.", optimizer=two_groups),
    Case("other-order", "Parameters in another order than the model's.", optimizer=reversed_order),
    Case("named-parameters", "An optimizer that knows the names.",
         optimizer=lambda m: optim.AdamW(m.named_parameters(), lr=1e-2)),
    Case("own-in-place", "Written for oneself, with state.", model=SOMETIMES,
         optimizer=made(InPlace)),
    Case("own-new-memory", "p.data = p.data - lr * grad.", optimizer=made(NewMemory)),
    Case("own-writes-gradients", "It may write to the gradient.", optimizer=made(WritesGradients)),
    Case("own-lamb", "Norms of whole tensors.", optimizer=made(Lamb)),
    Case("own-global-norm", "A norm over all of them.", optimizer=made(GlobalNorm)),
    Case("own-lion", "setdefault in the state.", optimizer=made(Lion), model=SOMETIMES),
    Case("own-subclass", "A subclass of torch's.", optimizer=made(Sub, lr=1e-2)),
    Case("own-noisy", "Random numbers in the step, whoever takes it.", optimizer=made(Noisy)),
    Case("fused-late", "Fused: weights that some steps do not use, in several blocks.",
         optimizer=made(optim.AdamW, lr=1e-2, fused=True), model=WIDE_SOMETIMES),
    Case("fused-groups-and-betas", "Fused: groups, and a schedule that changes their betas.",
         optimizer=grouped(optim.AdamW, fused=True), model=WIDE_SOMETIMES,
         schedule=lambda o: optim.lr_scheduler.OneCycleLR(o, max_lr=[0.05, 0.01], total_steps=12)),
    Case("momentum-late", "Momentum that begins when a weight is first used.",
         optimizer=made(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01), model=WIDE_SOMETIMES),
    Case("momentum-in-one-group", "One group with momentum, one without.",
         optimizer=grouped(optim.SGD, momentum=0), model=WIDE_SOMETIMES),
    *(Case(f"some-weights-{name}", "The optimizer was given some of the weights.",
           optimizer=some(make), model=WIDE_SOMETIMES)
      for name, make in {"fused": made(optim.AdamW, lr=1e-2, fused=True),
                         "momentum": made(optim.SGD, lr=0.1, momentum=0.9),
                         "adagrad": made(optim.Adagrad, lr=0.1)}.items()),
    Case("step-hook", "Weights are limited after the step.", optimizer=hooked, slow=True),
    Case("lookahead", "An optimizer around another, with one state for both.",
         optimizer=lambda m: Lookahead(optim.Adam(m.parameters(), lr=1e-2)), slow=True),
]  # fmt: skip
