"""What a run must come to: plain PyTorch in one process, which knows nothing of manyhands.

The definition, as docs/exactness.md gives it. Every micro-batch starts from the step's weights and
buffers, with random generators seeded from (seed, step, index). The gradients, each scaled by its
share of the records (or the loss's own weight), are added over a fixed binary tree. Then come
clipping, the buffers, `optimizer.step()` and `schedule.step()`.

A loss over the whole batch is one graph: every micro-batch is embedded by a copy of the model, and
the gradients of its copy are its own. What the loss does with the model's parameters itself is
added to the first one's.

Only the order in which an epoch visits the records is not computed here; it is given.
"""

# pyright: basic

import copy
import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from tests.catalogue.case import Case, Settings

BLOCK = 16384
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

Bag = dict[str, Tensor]


class Uneven(Exception):
    """An integer buffer on which the micro-batches of a step do not agree."""


def train(
    case: Case,
    visits: Callable[[int], Sequence[int]],
    after: Callable[[nn.Module, int, bool], None] = lambda model, step, ends_epoch: None,
) -> Bag:
    """The state_dict after training. `visits(epoch)` are the records in their order, `after` is
    called after each step of the optimizer."""
    s = case.settings
    seed(s.seed, "model")
    model = copy.deepcopy(case.model) if isinstance(case.model, nn.Module) else case.model()
    model.train()
    made = case.optimizer if isinstance(case.optimizer, dict) else {"": case.optimizer}
    optimizers = {name: make(model) for name, make in made.items()}
    timed = case.schedule if isinstance(case.schedule, dict) else {"": case.schedule}
    schedules = {name: make(optimizers[name]) for name, make in timed.items() if make}
    losses = case.loss if isinstance(case.loss, dict) else {"": case.loss}
    trained = {n: p.requires_grad for n, p in model.named_parameters()}
    step = 0
    for batch, phases, last in rounds(case, visits, list(optimizers)):
        fetched = step
        for name in phases:
            optimizer = optimizers[name]
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for n, p in model.named_parameters():
                p.requires_grad_(trained[n] and (not name or id(p) in own))
            cut = parts(batch, s.micro_batch)
            take_step(case, model, optimizer, step, cut, losses[name], fetched)
            at_end = last and name == phases[-1]
            seed(s.seed, step, "after_step")
            after(model, step, at_end)
            for of, schedule in schedules.items():
                if at_end if case.schedule_every == "epoch" else of == name:
                    seed(s.seed, step, "schedule")
                    schedule.step()
            step += 1
    return model.state_dict()


def rounds(
    case: Case, visits: Callable[[int], Sequence[int]], names: list[str]
) -> Iterator[tuple[list[int], list[str], bool]]:
    """Batch, whoever takes a step with it, and whether it is the last of its epoch."""

    def due(round: int) -> list[str]:
        return [n for n in names if round % case.every.get(n, 1) == case.offset.get(n, 0)]

    turns = (name for round in itertools.count() for name in due(round))
    done = 0
    for epoch in range(case.settings.epochs):
        cut = batches(list(visits(epoch)), case.settings.batch)
        for k, batch in enumerate(cut):
            yield batch, due(done) if case.share_batch else [next(turns)], k == len(cut) - 1
            done += 1


def take_step(
    case: Case,
    model: nn.Module,
    optimizer: Any,
    step: int,
    cut: list[Any],
    loss: Any,
    fetched: int,
) -> None:
    s, records = case.settings, sum(map(len, cut))
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    own = dict(model.named_buffers(remove_duplicate=False))
    before = {n: b.detach().clone() for n, b in own.items()}
    gradients: list[dict[str, Tensor]] = []
    outcomes: list[Bag] = []
    scales: list[float] = []
    shares = [len(ids) / records for ids in cut]
    weighted = False
    longer: Bag = {}  # tables in which nn.Embedding(max_norm=...) shortened rows
    if case.batch_loss is not None:
        gradients, outcomes, scales = whole_batch(case, model, before, step, cut)
    for index, ids in enumerate(cut if case.batch_loss is None else ()):
        optimizer.zero_grad(set_to_none=True)
        model.zero_grad(set_to_none=True)
        begin_buffers(model, own, before, alone=len(cut) == 1)
        data = fetch(case, ids, (s.seed, fetched, index, "data"))
        seed(s.seed, step, index, "forward")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=s.precision == "bf16"):
            returned = loss(model, data)
        returned = returned if isinstance(returned, tuple) else (returned,)
        rest = [r for r in returned[1:] if not isinstance(r, Mapping)]
        weighted = bool(rest)
        scales.append(float(rest[0]) if rest else shares[index])
        (returned[0].reshape(()) * scales[-1]).backward()
        gradients.append(take_gradients(model))
        outcomes.append({n: buffer.detach().clone() for n, buffer in now(model, own).items()})
        keep_shortened(model, weights, longer)
    commit_buffers(model, own, before, outcomes, shares)
    total = sum(scales)
    for name, parameter in model.named_parameters():
        if name in longer:
            parameter.data.copy_(longer[name])
        found = [g.get(name) for g in gradients]
        some = next((g for g in found if g is not None), None)
        if some is None:
            parameter.grad = None
            continue
        parameter.grad = add_up([torch.zeros_like(some) if g is None else g for g in found])
        if weighted:
            parameter.grad /= total
    if s.clip_norm is not None:
        clip(model, s)
    seed(s.seed, step, "optimizer")
    optimizer.step()


def whole_batch(
    case: Case, model: nn.Module, before: Bag, step: int, cut: list[Any]
) -> tuple[list[dict[str, Tensor]], list[Bag], list[float]]:
    """Gradients and buffers of each micro-batch, from one graph of all of them."""
    s, copies, made, outcomes = case.settings, [], [], []
    assert case.embed is not None and case.batch_loss is not None
    model.zero_grad(set_to_none=True)
    bf16 = torch.autocast("cpu", dtype=torch.bfloat16, enabled=s.precision == "bf16")
    for index, ids in enumerate(cut):
        copies.append(copy.deepcopy(model))
        own = dict(copies[-1].named_buffers(remove_duplicate=False))
        begin_buffers(copies[-1], own, before, alone=len(cut) == 1)
        data = fetch(case, ids, (s.seed, step, index, "data"))
        seed(s.seed, step, index, "forward")
        with bf16:
            embeddings = case.embed(copies[-1], data)
        made.append(embeddings if isinstance(embeddings, tuple) else (embeddings,))
        outcomes.append({n: b.detach().clone() for n, b in now(copies[-1], own).items()})
    rows = [torch.cat(parts) for parts in zip(*made, strict=True)]
    seed(s.seed, step, "batch loss")
    with bf16:
        returned = case.batch_loss(model, *rows)
    (returned[0] if isinstance(returned, tuple) else returned).backward()
    gradients = [take_gradients(each) for each in copies]
    for name, direct in take_gradients(model).items():
        own = gradients[0].get(name)
        gradients[0][name] = direct if own is None else direct + own
    return gradients, outcomes, [1.0] * len(cut)


def seed(*key: int | str) -> None:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little") >> 1
    torch.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)


def batches(ids: list[int], size: int) -> list[list[int]]:
    """A last one of a single record joins the one before it."""
    cut = [ids[k : k + size] for k in range(0, len(ids), size)]
    if len(cut) > 1 and len(cut[-1]) == 1:
        cut[-2:] = [cut[-2] + cut[-1]]
    return cut


def parts(ids: list[int], size: int) -> list[list[int]]:
    """Near-equal ones, as few as have at most `size` records; larger ones first."""
    return [p.tolist() for p in np.array_split(np.array(ids), math.ceil(len(ids) / size))]


def fetch(case: Case, ids: list[int], key: tuple[int | str, ...]) -> Any:
    data, collate = case.data, case.collate or default_collate
    if isinstance(data, Mapping):
        columns = {name: column_of(values).detach() for name, values in data.items()}
        if case.collate is None:
            return {name: column[ids] for name, column in columns.items()}
        data = [{n: c[i].clone() for n, c in columns.items()} for i in range(len(columns["y"]))]
    seed(*key)
    return collate([data[i] for i in ids])


def column_of(values: Any) -> Tensor:
    return values if isinstance(values, Tensor) else torch.tensor(np.array(values))


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return {n: (g.to_dense() if g.is_sparse else g).detach() for n, g in found.items()}


def add_up(values: list[Tensor]) -> Tensor:
    """Neighbours in pairs, level by level; who has no neighbour rises as it is."""
    while len(values) > 1:
        pairs = [values[k : k + 2] for k in range(0, len(values), 2)]
        values = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return values[0]


def keep_shortened(model: nn.Module, weights: Bag, longer: Bag) -> None:
    """Rows that plain PyTorch shortened in forward: noted for the update, and put back."""
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(m.max_norm is not None and m.weight is parameter for m in tables):
                into = longer.setdefault(name, weights[name].clone())
                changed = (parameter != weights[name]).any(1)
                into[changed] = parameter[changed]
                parameter.data.copy_(weights[name])


def clip(model: nn.Module, s: Settings) -> None:
    trained = [p for p in model.parameters() if p.grad is not None]
    assert s.clip_norm is not None
    if s.batch == s.micro_batch:
        torch.nn.utils.clip_grad_norm_(trained, s.clip_norm)
        return
    gradients = [p.grad for p in trained if p.grad is not None]
    pieces = [piece for g in gradients for piece in lying(g).split(BLOCK)]
    norms = np.array([torch.linalg.vector_norm(piece).item() for piece in pieces])
    factor = min(1.0, s.clip_norm / (math.sqrt(float(np.square(norms).sum())) + 1e-6))
    for gradient in gradients:
        gradient.mul_(factor)


def lying(gradient: Tensor) -> Tensor:
    """Its elements in the order of memory."""
    return gradient.permute(
        sorted(range(gradient.dim()), key=lambda d: -gradient.stride(d))
    ).ravel()


# Buffers


def running(model: nn.Module) -> dict[str, Any]:
    """BatchNorms that keep statistics in this step, by name."""
    return {
        n: m
        for n, m in model.named_modules()
        if type(m) in NORMS and m.training and m.track_running_stats and m.running_mean is not None
    }


def slot(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path)._buffers, leaf


def now(model: nn.Module, own: Bag) -> Bag:
    """Buffers by name as they are: forward may have put other tensors in their place."""
    held = {name: slot(model, name) for name in own}
    return {
        n: values[leaf] if values[leaf] is not None else own[n]
        for n, (values, leaf) in held.items()
    }


def begin_buffers(model: nn.Module, own: Bag, before: Bag, *, alone: bool) -> None:
    with torch.no_grad():
        for name, buffer in own.items():
            buffer.copy_(before[name])
            values, leaf = slot(model, name)
            values[leaf] = buffer
        if not alone:
            for norm in running(model).values():
                norm.reset_running_stats()
                norm.running_var.zero_()


def commit_buffers(
    model: nn.Module, own: Bag, before: Bag, outcomes: list[Bag], shares: list[float]
) -> None:
    done: set[str] = set()
    with torch.no_grad():
        if len(outcomes) == 1:
            before = outcomes[0]
        else:
            for path, norm in running(model).items():
                dot = f"{path}." if path else ""
                done |= {dot + n for n in ("running_mean", "running_var", "num_batches_tracked")}
                commit_norm(norm, dot, before, outcomes)
            for name in own.keys() - done:
                before[name] = merged(name, before[name], [o[name] for o in outcomes], shares)
        for name, buffer in own.items():
            buffer.copy_(before[name])
            values, leaf = slot(model, name)
            values[leaf] = buffer


def commit_norm(norm: Any, dot: str, before: Bag, outcomes: list[Bag]) -> None:
    """Each micro-batch's update of the running statistics, one after the other."""
    for outcome in outcomes:
        seen, calls = (int(b[f"{dot}num_batches_tracked"]) for b in (before, outcome))
        if calls == 0:
            continue
        for name in (f"{dot}running_mean", f"{dot}running_var"):
            value, rest = before[name], outcome[name]
            if norm.momentum is None:
                value.mul_(seen / (seen + calls)).add_(rest, alpha=calls / (seen + calls))
            else:
                value.mul_((1 - norm.momentum) ** calls).add_(rest)
        before[f"{dot}num_batches_tracked"] += calls


def merged(name: str, before: Tensor, after: list[Tensor], shares: list[float]) -> Tensor:
    """What all agree on; else the weighted mean of the changes."""
    if all(same(a, after[0]) for a in after):
        return after[0]
    if not (before.is_floating_point() or before.is_complex()):
        raise Uneven(name)
    wide = before.to(torch.complex128 if before.is_complex() else torch.float64)
    changes = [(a.to(wide.dtype) - wide) * share for a, share in zip(after, shares, strict=True)]
    total = torch.zeros_like(wide)
    for change in changes:
        total += change
    return (wide + total).to(before.dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """To the last bit: NaN equals itself, 0.0 does not equal -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*raw)
