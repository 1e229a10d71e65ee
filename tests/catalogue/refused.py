"""What cannot be trained to the same bits on any number of workers is refused, by name."""

# pyright: basic

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from tests.catalogue.building import HEAD, embedding, linear, net, param, vector
from tests.catalogue.case import RECORDS, Case, classify, mlp, rows, sgd, tokens
from tests.catalogue.optimizers import InPlace, made

optim: Any = torch.optim
lr: Any = torch.optim.lr_scheduler
X, Y = rows()["x"], rows()["y"]


# Models that write what is not theirs


def normalizes(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.head.weight.copy_(F.normalize(m.head.weight))
    return m.head(x)


def other_memory(m: Any, x: Tensor) -> Tensor:
    m.head.weight.data = m.head.weight.data * 0.99
    return m.head(x)


def unseen(m: Any, x: Tensor) -> Tensor:
    m.head.bias.data.mul_(0.99)
    return m.head(x)


def replaced(m: Any, x: Tensor) -> Tensor:
    m.head.weight = nn.Parameter(m.head.weight.detach().clone())
    return m.head(x)


def grows(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "more"):
        m.more = nn.Linear(6, 6)
    return m.head(m.more(x))


def thaws(m: Any, x: Tensor) -> Tensor:
    m.head.bias.requires_grad_()
    return m.head(x)


def frozen_head() -> nn.Module:
    layer = nn.Linear(6, 3)
    layer.bias.requires_grad_(False)
    return layer


def renorm(m: Any, t: Tensor) -> Tensor:
    return m.head(F.embedding(t, m.table, max_norm=0.1).mean(1))


def teacher(m: Any, x: Tensor) -> Tensor:
    """A teacher that follows: frozen weights, written in forward."""
    with torch.no_grad():
        m.slow.weight.lerp_(m.head.weight, 0.01)
    return m.head(x) + m.slow(x)


def averaged(model: Any, batch: Any) -> Tensor:
    model.slow.update_parameters(model.head)
    return F.cross_entropy(model.head(batch["x"]), batch["y"])


def keeps_average() -> nn.Module:
    model: Any = nn.Module()
    model.head = nn.Linear(6, 3)
    model.slow = AveragedModel(model.head).requires_grad_(False)
    return model


def queue(m: Any, x: Tensor) -> Tensor:
    """As MoCo's: keys go where a whole-number buffer points to, which then moves on."""
    at = int(m.at)
    m.keys[at : at + len(x)] = x.detach()
    m.at[()] = (at + len(x)) % 24
    return m.head(x) + (x @ m.keys.mean(0))[:, None]


def makes_buffer(m: Any, x: Tensor) -> Tensor:
    """Keeps what the first micro-batch of this worker had."""
    if not hasattr(m, "first"):
        m.register_buffer("first", x.mean(0))
    return m.head(x - m.first)


def other_shape(m: Any, x: Tensor) -> Tensor:
    m.last = x.detach().mean().reshape(1)
    return m.head(x + m.last)


def shared_memory() -> nn.Module:
    both: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    both[1].weight = nn.Parameter(both[0].weight.data)
    return both


def view_in_a_buffer() -> nn.Module:
    model: Any = mlp()
    model.register_buffer("first_row", model[0].weight.data[0])
    return model


def max_norm_and_tied() -> nn.Module:
    model: Any = nn.Module()
    model.embed = nn.Embedding(20, 3, max_norm=1.0)
    model.head = nn.Linear(3, 20, bias=False)
    model.head.weight = model.embed.weight
    return model


# Optimizers


class Sam(InPlace):
    """Needs the loss a second time."""

    def step(self, closure: Callable[[], Any]) -> None:
        closure()
        super().step()


class KeepsLists(InPlace):
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = [0.0]


class KeepsViews(InPlace):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.flat = [p.data.view(-1) for p in self.param_groups[0]["params"]]


class Grows(InPlace):
    """Makes a longer vector of a bias."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        p = self.param_groups[0]["params"][0]
        p.data = torch.cat([p.data, p.data])


class Around(optim.Optimizer):
    def __init__(self, inner: Any) -> None:
        super().__init__([p for g in inner.param_groups for p in g["params"]], {"lr": 0.1})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Counting(optim.Optimizer):
    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 / self.calls)


class Counts:
    """A rate that falls each time it is asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, step: int) -> float:
        self.asked += 1
        return 1 / self.asked


class AddsGroup:
    """A schedule that lets a layer join later, as fastai's gradual unfreezing does."""

    def __init__(self, optimizer: Any, layer: Any) -> None:
        self.optimizer, self.layer, self.calls = optimizer, layer, 0

    def step(self) -> None:
        self.calls += 1
        if self.calls == 2:
            self.optimizer.add_param_group({"params": self.layer, "lr": 0.01})


def head_first(model: Any) -> Any:
    optimizer = optim.SGD(model[2].parameters(), lr=0.1)
    optimizer.later = list(model[0].parameters())
    return optimizer


# Data


class NoLength:
    def __getitem__(self, i: int) -> Any:
        return {"x": X[i], "y": Y[i]}


def sometimes_weighted(model: Any, batch: Any) -> Any:
    mean = classify(model, batch)
    return (mean, 1.0) if float(batch["x"][0, 0]) > 0 else mean


def changing_numbers(model: Any, batch: Any) -> Any:
    return classify(model, batch), {f"n{int(batch['i'][0])}": 1.0}


def infinite(model: Any, batch: Any) -> Any:
    return classify(model, batch) / (0.0 if 3 in batch["i"] else 1.0)


WRITES = "module 'head' .* its parameter '{}' while a micro-batch is computed"

CASES = [
    Case("writes-weights", "weight.copy_ in forward.", model=net(normalizes, head=HEAD),
         refused=WRITES.format("weight")),
    Case("gives-other-memory", "weight.data = ... in forward.", model=net(other_memory, head=HEAD),
         refused=WRITES.format("weight")),
    Case("writes-unseen", "bias.data.mul_ in forward, which no counter tells.",
         model=net(unseen, head=HEAD), refused=WRITES.format("bias")),
    Case("replaces-a-parameter", "Another Parameter in forward.", model=net(replaced, head=HEAD),
         refused=WRITES.format("weight")),
    Case("makes-a-layer", "A layer that is made in forward.", model=net(grows, head=HEAD),
         refused="parameter 'more.weight' of the model was made while it computed"),
    Case("thaws", "A frozen parameter that wants a gradient later.",
         model=net(thaws, head=frozen_head), refused="parameter 'head.bias' was frozen"),
    Case("renorm-by-hand", "F.embedding(max_norm) over a parameter of one's own.", data=tokens(),
         model=net(renorm, table=lambda: param(20, 8), head=linear(8, 3)),
         refused="writes to its parameter 'table'"),
    Case("teacher-that-follows", "Frozen weights that are written are weights that are written.",
         model=net(teacher, head=HEAD, slow=lambda: nn.Linear(6, 3).requires_grad_(False)),
         refused="module 'slow' .* writes to its parameter 'weight'"),
    Case("averaged-model", "AveragedModel, updated in the loss.", model=keeps_average,
         loss=averaged, refused="writes to its parameter 'weight'"),
    Case("queue", "Where a queue's end is depends on who computed before.", optimizer=sgd,
         model=net(queue, head=HEAD, keys=lambda: vector(30, 6),
                   at=lambda: torch.zeros((), dtype=torch.long)),
         refused="integer buffer 'at' changed differently"),
    Case("makes-a-buffer", "A buffer that is made in forward has what its worker saw first.",
         model=net(makes_buffer, head=HEAD), refused="buffer 'first'"),
    Case("buffer-of-another-shape", "A buffer that forward gives another shape.",
         model=net(other_shape, head=HEAD, last=lambda: vector(6)), refused="buffer 'last'"),
    Case("shared-memory", "Two Parameters over the same memory.", model=shared_memory,
         refused="share memory"),
    Case("view-in-a-buffer", "A buffer that is a view of a weight.", model=view_in_a_buffer,
         refused="second view of the memory of parameter '0.weight'"),
    Case("max-norm-and-tied", "Rows that somebody else uses too.", model=max_norm_and_tied,
         data=tokens(), refused="has max_norm, and its weight is tied"),
    Case("lazy", "A parameter without a shape.", model=lambda: nn.Sequential(nn.LazyLinear(3)),
         refused="has no shape yet"),
    Case("meta", "Parameters without memory.", model=lambda: nn.Linear(6, 3, device="meta"),
         refused="weight of the model is on the meta device"),
    Case("scripted", "A part went through torch.jit.script.",
         model=lambda: nn.Sequential(torch.jit.script(nn.Linear(6, 3))),
         refused="Task: 0 went through torch.jit.script"),
    Case("not-a-module", "A function is no model.", model=lambda: lambda x: x,
         refused="model built function, not a torch.nn.Module"),
    Case("lbfgs", "It calls the loss again.", optimizer=made(optim.LBFGS), refused="closure"),
    Case("sam", "So does sharpness-aware minimization.", optimizer=made(Sam), refused="closure"),
    Case("sparse-adam", "Gradients are dense here.", data=tokens(), model=embedding(sparse=True),
         optimizer=lambda m: optim.SparseAdam([m.embed.weight]), refused="SparseAdam"),
    Case("keeps-lists", "State that cannot be saved.", optimizer=made(KeepsLists),
         refused="KeepsLists keeps 'history' of type list"),
    Case("keeps-views", "An optimizer that holds views of the weights.", optimizer=made(KeepsViews),
         refused="the optimizer's 'flat' is a second view"),
    Case("grows-parameters", "An optimizer that changes a shape.", optimizer=made(Grows),
         refused="the optimizer made a float32"),
    Case("strange-parameters", "The optimizer has weights that the model has not.",
         optimizer=lambda m: optim.SGD([*m.parameters(), nn.Parameter(torch.ones(2))], lr=0.1),
         refused="that are not the model's"),
    Case("two-optimizers", "A list of optimizers.", refused="optimizer built list",
         optimizer=lambda m: [optim.SGD(layer.parameters(), lr=0.1) for layer in (m[0], m[2])]),
    Case("inner-optimizer", "An optimizer around another, whose state nobody sees.",
         optimizer=lambda m: Around(optim.Adam(m.parameters(), lr=1e-2)),
         refused="holds another optimizer .Adam. in 'inner'"),
    Case("counts-its-steps", "An optimizer that counts outside its state.",
         optimizer=lambda m: Counting(m.parameters(), {"lr": 0.1}),
         refused="Counting changes its attribute 'calls'"),
    Case("adds-a-group", "A group that a schedule adds.", optimizer=head_first,
         schedule=lambda o: AddsGroup(o, o.later), refused="added a parameter group"),
    Case("counting-schedule", "A function of the step that counts by itself.",
         schedule=lambda o: lr.LambdaLR(o, Counts()), refused="another number each time"),
    Case("plateau", "A schedule that wants a score.", refused="ReduceLROnPlateau",
         schedule=lambda o: lr.ReduceLROnPlateau(o)),
    Case("no-length", "Records without a number of them.", data=NoLength(), refused="no length"),
    Case("bare-array", "An array without a name.", data=X, refused="bare array"),
    Case("texts-as-a-column", "A column that is not numeric.",
         data={"x": X, "y": ["a"] * RECORDS}, refused="column 'y' of data is not numeric"),
    Case("unequal-columns", "Columns of unequal length.", data={"x": X, "y": Y[:-1]},
         refused="differ in length"),
    Case("nothing", "No records.", data={"x": X[:0], "y": Y[:0]}, refused="0 records"),
    Case("loss-per-record", "A loss for each record is no mean.", refused="must return a mean",
         loss=lambda m, b: F.cross_entropy(m(b["x"]), b["y"], reduction="none")),
    Case("loss-is-a-number", "A loss without a history.", refused="must return a mean",
         loss=lambda m, b: classify(m, b).item()),
    Case("loss-is-detached", "A loss that nothing can be learnt from.",
         loss=lambda m, b: classify(m, b).detach(),
         refused="does not depend on any weight that is trained"),
    Case("loss-is-forgotten", "A loss that does not return.", loss=lambda m, b: None,
         refused="returned NoneType; it must return a mean"),
    Case("negative-weight", "A weight below zero.", refused="it must be 0 or more",
         loss=lambda m, b: (classify(m, b), -1.0)),
    Case("weight-is-nan", "A weight that is not a number.", refused="it must be 0 or more",
         loss=lambda m, b: (classify(m, b), float("nan"))),
    Case("all-weights-zero", "A step in which nothing counts.", refused="all weights .* are 0",
         loss=lambda m, b: (classify(m, b), 0.0)),
    Case("some-weights", "A weight for some micro-batches.", loss=sometimes_weighted,
         refused="a weight for some micro-batches and none for others"),
    Case("changing-numbers", "Numbers under other names each time.", loss=changing_numbers,
         refused="same names"),
    Case("infinite", "A loss that is not finite, and the record that made it so.", loss=infinite,
         refused=r"the loss is inf at step .* records"),
]  # fmt: skip
