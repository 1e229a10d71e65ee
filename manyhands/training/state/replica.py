# SPDX-License-Identifier: Apache-2.0
"""A replica: model, optimizer and schedule of one worker, as flat vectors.

`Replica.weights` holds one lane per dtype, and the module's parameters are views into them: what
is written to the lanes, by this worker or (in shared memory) by another, the module sees. The
module itself has no right to write there (weight_guard.py).
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import Parameter, is_lazy
from torch.optim import Optimizer

from manyhands.training.memory.memory import Memory
from manyhands.training.state import loss_scale
from manyhands.training.state.layout import (
    Lanes,
    Layout,
    TensorPlace,
    buffers_of,
    lay_out,
    parameters_of,
    refuse_second_views,
)
from manyhands.training.state.loss_scale import LossScale, first_state
from manyhands.training.state.module_buffers import ModuleBuffers, kind_of
from manyhands.training.state.module_paths import without_compilers
from manyhands.training.state.phased_optimizer import PhasedOptimizer, parts_of
from manyhands.training.state.rows.tables import Tables
from manyhands.training.state.schedules import Schedules, no_schedules, split_heard
from manyhands.training.state.weight_average import AverageKind, WeightAverage
from manyhands.training.state.weight_guard import WeightGuard
from manyhands.values.errors import CheckpointMismatch, TaskError
from manyhands.values.plain_names import plain_name


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What all workers know about a step once its gradients are in place; equal on all of them."""

    step: int
    """Of steps, how many were done before this one."""
    loss: float
    records: int
    agreed: int
    """Number of the last command that every worker has heard."""
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    skipped: str = ""
    """What in it was not finite: nothing was changed."""
    read: int = 0
    """Of a stream: the digest of what was read for it; 0: nothing is known."""


class Replica:
    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        schedules: Schedules | None,
        memory: Memory,
        device: torch.device,
        *,
        protect: bool = False,
        seed: int = 0,
        averages: Sequence[AverageKind] = (),
        scaled: bool = False,
        notes: Sequence[str] = (),
    ) -> None:
        """`protect`: end this process when anything but the optimizer writes to the weights.
        `scaled`: losses are, for half precision."""
        self.model, self.optimizer, self.seed = model, optimizer, seed
        self.notes = notes
        """What a person should know of how it was built."""
        self.schedules = schedules or no_schedules(optimizer, model)
        self.step = 0
        """Optimizer steps done."""
        self.phase = ""
        """Of several optimizers: whose step is computed."""
        self.changes: Mapping[int, Mapping[str, Any]] = {}
        """Settings that change after so many steps."""
        self.clip_norm: float | None = None
        self.facts: StepFacts | None = None
        """Of the last step whose gradients were in place."""
        for name, tensor, _ in (*parameters_of(model), *buffers_of(model)):
            if is_lazy(tensor):
                kind = "parameter" if isinstance(tensor, Parameter) else "buffer"
                raise TaskError(
                    f"Task: {kind} '{name}' has no shape yet (a lazy module). Let the function "
                    "that builds the model run it once on an example before it returns it."
                )
        self.layout: Layout = lay_out(parameters_of(model))
        self.weights: Lanes = {}
        self._shown: Lanes = {}
        """The same memory, as the module sees it."""
        protect = protect and device.type == "cpu"
        for dtype, size in self.layout.sizes.items():
            if protect:
                self.weights[dtype], self._shown[dtype] = memory.twins(size, dtype=dtype)
            elif device.type == "cpu":
                self.weights[dtype] = self._shown[dtype] = memory.tensor(size, dtype=dtype)
            else:
                lane = torch.zeros(size, dtype=dtype, device=device)
                self.weights[dtype] = self._shown[dtype] = lane
        self._protect, self._own, self._own_shown = protect, Lanes(), Lanes()
        self.apart = False
        """The module computes with a copy of the weights, which is brought up to date when its
        worker says so (`own`)."""
        self.averages = {
            kind.name: WeightAverage(kind, self.layout, self.weights, memory, protect=protect)
            for kind in averages
        }
        self.parameters: dict[str, Tensor] = {
            plain_name(name): parameter for name, parameter in model.named_parameters()
        }
        for part in parts_of(optimizer):
            refuse_second_views(model, part)
        if isinstance(optimizer, PhasedOptimizer):
            optimizer.refuse_shared_parameters({id(p): n for n, p in self.parameters.items()})
        self._trained = [p for p in self.parameters.values() if p.requires_grad]
        self.buffers = ModuleBuffers(model, {loss_scale.NAME: first_state()} if scaled else {})
        self.loss_scale = LossScale(self.buffers.carried(loss_scale.NAME) if scaled else None)
        self.tables = Tables(model, memory, seed)
        self._refuse_strangers()
        self.guard = WeightGuard(self, protected=protect)

    def _refuse_strangers(self) -> None:
        """Parameters that only the optimizer knows would be trained by nobody."""
        known = {id(p) for p in self.parameters.values()}
        strangers = [
            p for g in self.optimizer.param_groups for p in g["params"] if id(p) not in known
        ]
        if strangers:
            raise TaskError(
                f"Task: the optimizer has {len(strangers)} parameter(s) that are not the model's "
                f"(the first of shape {list(strangers[0].shape)}). Make them part of the model."
            )

    def publish(self) -> None:
        """Copy the module's own weights into the lanes: once, by whoever starts them."""
        with torch.no_grad():
            for piece in self.layout.pieces:
                piece.view(self.weights[piece.dtype]).copy_(self.parameters[piece.name])

    def adopt(self) -> None:
        """Make the module's parameters views of the lanes; its own copies are freed."""
        shown = self._own_shown if self.apart else self._shown
        for piece in self.layout.pieces:
            self.parameters[piece.name].data = piece.view(shown[piece.dtype])

    def set_apart(self, apart: bool) -> None:
        """Whether, from the next `adopt` on, the module computes with a copy of its own."""
        self.apart = apart
        if not apart or self._own:
            return
        memory = Memory(None)
        for dtype, size in self.layout.sizes.items():
            if self._protect:
                self._own[dtype], self._own_shown[dtype] = memory.twins(size, dtype=dtype)
            else:
                self._own[dtype] = self._own_shown[dtype] = memory.tensor(size, dtype=dtype)

    @property
    def own(self) -> Lanes:
        """The weights that the module computes with, to be brought up to date."""
        return self._own if self.apart else self.weights

    def rehearse(self) -> None:
        """Give the module's parameters memory of their own, with the weights in it."""
        for piece in self.layout.pieces:
            own = torch.empty_strided(
                piece.shape, piece.stride, dtype=piece.dtype, device=self.weight(piece).device
            )
            self.parameters[piece.name].data = own.copy_(self.weight(piece))

    def weight(self, piece: TensorPlace) -> Tensor:
        """A parameter as it lives in the lanes that the module computes with: to be written to by
        the optimizer."""
        return piece.view(self.own[piece.dtype])

    def advance(self) -> None:
        """A step has been taken."""
        self.schedules.after(self.step)
        self.step += 1
        if self.step in self.changes:
            self.change(self.changes[self.step])

    def change(self, settings: Mapping[str, Any]) -> None:
        """What was journalled after as many steps as are done: hyper-parameters of every group, a
        score that schedules heard. Doing it twice is the same as doing it once."""
        before, score, after = split_heard(settings)
        if score is None or not self.schedules.have_heard(self.step):
            self.schedules.change(before)
        if score is not None:
            self.schedules.hear(self.step, score)
        self.schedules.change(after)

    def hear_journal(self) -> None:
        """A score of the weights as they are, which came when this worker had left off waiting."""
        _, score, _ = split_heard(self.changes.get(self.step, {}))
        if score is not None:
            self.schedules.hear(self.step, score)

    def turn_to(self, step: int) -> None:
        """The phase that takes step `step` is to compute: only its parameters want gradients."""
        optimizer = self.optimizer
        if not isinstance(optimizer, PhasedOptimizer):
            return
        if (phase := optimizer.phases.phase(step)) != self.phase:
            self.phase = phase
            groups = optimizer.parts[phase].param_groups
            moved = {id(parameter) for group in groups for parameter in group["params"]}
            for parameter in self._trained:
                parameter.requires_grad_(id(parameter) in moved)
            self.guard.expect_gradients()

    def tensors(self) -> dict[str, Tensor]:
        """Weights and persistent buffers by name, as in a state_dict, tied ones once."""
        found = {p.name: p.view(self.weights[p.dtype]) for p in self.layout.pieces}
        persistent = {plain_name(name) for name in self.model.state_dict(keep_vars=True)}
        for piece in self.buffers.layout.pieces:
            if piece.name in persistent:
                found[piece.name] = piece.view(self.buffers.committed[piece.dtype])
        return found

    def averaged(self, name: str) -> dict[str, Tensor]:
        """The same with an average in place of the weights, between steps. Until it has begun,
        these are the weights."""
        average, found = self.averages[name], self.tensors()
        if average.count:
            found |= {p.name: p.view(average.lanes[p.dtype]) for p in self.layout.trainable}
        return found

    @contextmanager
    def showing(self, weights: str) -> Generator[None]:
        """The module computes with these weights meanwhile: "trained", or an average."""
        average = self.averages.get(weights)
        if average is None or not average.count:
            yield
            return
        for piece in self.layout.trainable:
            self.parameters[piece.name].data = piece.view(average.shown[piece.dtype])
        try:
            yield
        finally:
            self.adopt()

    def aliases(self) -> dict[str, str]:
        """Other names of tied tensors → the name they are stored under."""
        pieces = (*self.layout.pieces, *self.buffers.layout.pieces)
        return {alias: p.name for p in pieces for alias in p.aliases}

    def passing_buffers(self) -> dict[str, Tensor]:
        """Buffers that a state_dict leaves out, but that a resumed run needs."""
        kept = self.tensors().keys() | self.buffers.rows.keys()
        return {
            p.name: p.view(self.buffers.committed[p.dtype])
            for p in self.buffers.layout.pieces
            if p.name not in kept
        }

    def load(self, tensors: Mapping[str, Tensor], *, where: str) -> None:
        """Take weights and buffers by name, before `publish`; whatever does not fit is named."""
        expected = self.tensors()
        given = {plain_name(name): tensor for name, tensor in tensors.items()}
        for alias, name in self.aliases().items():
            if alias in given and name not in given:
                given[name] = given[alias]
            given.pop(alias, None)
        problems = [f"it lacks '{name}'" for name in expected.keys() - given.keys()]
        problems += [
            f"it has '{name}', which the model has not" for name in given.keys() - expected
        ]
        for name in expected.keys() & given.keys():
            ours, theirs = expected[name], given[name]
            if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
                problems.append(
                    f"'{name}' is {kind_of(theirs)} there and {kind_of(ours)} in the model"
                )
        if problems:
            shown = "; ".join(sorted(problems)[:5])
            more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise CheckpointMismatch(f"{where} belongs to another model: {shown}{more}.")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(given[name])
        self.buffers.load({k: v for k, v in given.items() if k not in self.parameters})


def build_model(model: Any, note: Callable[[str], None] = lambda text: None) -> Module:
    """A task's model: built by a function, or given ready made; without torch.compile. `note` is
    told what a person should know."""
    built = model if isinstance(model, Module) else model()
    if not isinstance(built, Module):
        raise TaskError(f"Task: model built {type(built).__name__}, not a torch.nn.Module.")
    built, compiled = without_compilers(built)
    if compiled:
        note(
            "the model came compiled (torch.compile), and is trained as it was before: what that "
            "computes depends on what each worker has computed before. train.compile = true "
            "compiles it in a way that does not"
        )
    for path, module in built.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TaskError(
                f"Task: {path or 'the model'} went through torch.jit.script or torch.jit.trace, "
                "whose modules keep their weights to themselves. Give the module as it was before."
            )
    without = [name for name, t in (*built.named_parameters(), *built.named_buffers()) if t.is_meta]
    if without:
        raise TaskError(
            f"Task: {without[0]} of the model is on the meta device and has no values. Build the "
            "model on the CPU, or call model.to_empty(device='cpu') and initialize it."
        )
    return built
