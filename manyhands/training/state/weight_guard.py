# SPDX-License-Identifier: Apache-2.0
"""Only the optimizer writes weights.

The micro-batches of a step all start from the same weights. What forward or backward writes to
them would reach whoever computes next, on this worker or (the weights are in shared memory) on
another: a result that depends on who computed what, and when. So it is refused, by name.

Three looks, because there are three ways to do it:

- the version counter, the memory and the identity of every parameter, around each micro-batch:
  finds `weight.copy_(...)`, `weight.data = ...` and a parameter put in another's place. Values are
  compared where they could have been written (`weight.data.mul_` moves no counter):
- a worker's first micro-batch is a **rehearsal**, on a copy of the weights that is compared with
  them afterwards. What a model does always, it does there, and is told of in a sentence;
- from then on the module's parameters are views of memory that can only be read (memory.twins):
  what a model does rarely ends its worker with SIGSEGV, and its log says in which line. Where
  memory cannot be protected (a worker that is a thread of somebody's program, a GPU), the weights
  are compared around every micro-batch.
"""

import types
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Module

from manyhands.training.state.layout import Layout, TensorPlace, parameters_of
from manyhands.training.state.module_paths import module_at, modules_of
from manyhands.values.errors import TaskError

LOOK_EVERY = 64
"""Micro-batches between two looks at which parameters a model has."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class HasWeights(Protocol):
    """What is guarded: a replica."""

    model: Module
    layout: Layout
    parameters: dict[str, Tensor]

    def rehearse(self) -> None:
        """Give the parameters memory of their own, with the weights in it."""
        ...

    def adopt(self) -> None: ...
    def weight(self, piece: TensorPlace) -> Tensor: ...


class WeightGuard:
    """Entered around every micro-batch (and a batch loss): `with guard: ...`."""

    def __init__(self, replica: HasWeights, *, protected: bool) -> None:
        """`protected`: memory that only the optimizer can write to."""
        self.replica, self.protected = replica, protected
        self._named = [(name, parameter) for name, parameter, _ in parameters_of(replica.model)]
        slots = [name.rpartition(".") for name, _ in self._named]
        self._slots = [(module_at(replica.model, path), leaf) for path, _, leaf in slots]
        self._own = [parameter for _, parameter in self._named]
        self._ids = [id(parameter) for parameter in self._own]
        self._needs = [parameter.requires_grad for parameter in self._own]
        modules = list(modules_of(replica.model))
        self._modules = [module for _, module in modules]
        dicts = [(path, vars(m)[kind]) for path, m in modules for kind in _HOOKS if kind in vars(m)]
        self._hooked = [hooks for _, hooks in dicts]
        self._carriers = [f"parameter '{name}'" for name, _ in self._named]
        self._carriers += [f"module '{path}'" if path else "the model" for path, _ in dicts]
        self._hooks = self._count_hooks()
        self._count, self._lendings, self._rehearsing = 0, 0, False
        self._modes: list[bool] = []
        self._threads = torch.get_num_threads()
        self._versions: list[int] = []
        self._places: list[int] = []
        self._marks: list[int] | None = None

    def afresh(self) -> None:
        """What comes next has not been looked at yet: it is a rehearsal too."""
        self._count = 0

    def __enter__(self) -> None:
        self._rehearsing = self._count == 0
        if self._rehearsing:
            self.replica.rehearse()
        self._modes = [module.training for module in self._modules]
        self._threads = torch.get_num_threads()
        self._versions = [p._version for p in self._own]
        self._places = [p.data_ptr() for p in self._own]
        self._marks = None if self.protected or self._rehearsing else self._sums()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if kind is None:
            self._look()
            self._count += 1
        self._as_before()
        if self._rehearsing:
            self._rehearsing = False
            self.replica.adopt()

    def expect_gradients(self) -> None:
        """Those that want a gradient now are the ones that should."""
        self._needs = self._needs_now()

    @contextmanager
    def lent(self, to: str) -> Generator[None]:
        """Around code that may write to weights and buffers, and must change nothing else: what is
        trained, by which hooks, is settled when the model is built, on every worker."""
        ids, needs, hooks = self._ids_now(), self._needs_now(), self._count_hooks()
        self._modes = [module.training for module in self._modules]
        self._threads = torch.get_num_threads()
        yield
        self._as_before()
        said = "Other workers do not know of it, nor would a resumed run."
        if ids != (found := self._ids_now()):
            name = self._named[_first(found, ids)][0]
            raise TaskError(
                f"{to} put another one in the place of parameter '{name}'. {said} Write to it."
            )
        if needs != (wanted := self._needs_now()):
            name = self._named[_first([*map(int, wanted)], [*map(int, needs)])][0]
            raise TaskError(
                f"{to} changed requires_grad of parameter '{name}'. {said} Freeze it when the "
                "model is built, or set its group's lr to 0 when its time has come."
            )
        if hooks != (counted := self._count_hooks()):
            carrier = self._carriers[_first(counted, hooks)]
            raise TaskError(f"{to} gave a hook to {carrier}, or took one away. {said}")
        self._lendings += 1
        if self._lendings % LOOK_EVERY == 1:
            self._look_at_names()

    def _ids_now(self) -> list[int]:
        return [id(module._parameters.get(name)) for module, name in self._slots]  # pyright: ignore[reportPrivateUsage]

    def _needs_now(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._own]

    def _as_before(self) -> None:
        """Whatever a micro-batch did to mode and threads ends with it: the next one may be computed
        elsewhere."""
        if self._modes != [module.training for module in self._modules]:
            for module, mode in zip(self._modules, self._modes, strict=True):
                module.training = mode
        if self._threads != torch.get_num_threads():
            torch.set_num_threads(self._threads)

    def _count_hooks(self) -> list[int]:
        """Of each parameter, then of each module and kind. (Modules keep their dicts of them.)"""
        return [len(p._backward_hooks or ()) for p in self._own] + list(map(len, self._hooked))

    def _look(self) -> None:
        ids = self._ids_now()
        if ids != self._ids:
            raise TaskError(self._tell(_first(ids, self._ids), "puts another one in the place of"))
        places = [p.data_ptr() for p in self._own]
        if places != self._places:
            raise TaskError(self._tell(_first(places, self._places), "gives other memory to"))
        versions = [p._version for p in self._own]
        if versions != self._versions:
            raise TaskError(self._tell(_first(versions, self._versions), "writes to"))
        if self._rehearsing:  # what a model does in its first forward, it does on every worker
            self._hooks = self._count_hooks()
        if self._hooks != (hooks := self._count_hooks()):
            raise TaskError(_told_of_hooks(self._carriers[_first(hooks, self._hooks)]))
        if self._needs != self._needs_now():
            self._look_at_gradients()
        if self._rehearsing or self._count % LOOK_EVERY == 0:
            self._look_at_names()
        if self._rehearsing and (name := self._written()) is not None:
            raise TaskError(self._tell(name, "writes to"))
        if self._marks is not None and (sums := self._sums()) != self._marks:
            piece = self.replica.layout.pieces[_first(sums, self._marks)]
            raise TaskError(self._tell(piece.name, "writes to"))

    def _look_at_names(self) -> None:
        """A parameter that came later, or that only now wants a gradient, would be trained by
        nobody."""
        known = set(self._ids)
        for name, parameter, _ in parameters_of(self.replica.model):
            if id(parameter) not in known:
                raise TaskError(
                    f"parameter '{name}' of the model was made while it computed. Nobody trains, "
                    "merges or saves it. Make all parameters when the model is built."
                )

    def _look_at_gradients(self) -> None:
        needs = self._needs_now()
        for (name, _), needed, needs_now in zip(self._named, self._needs, needs, strict=True):
            if needed and not needs_now:
                raise TaskError(
                    f"parameter '{name}' was frozen while a micro-batch was computed. Other "
                    "workers do not know of it. Freeze it when the model is built, or set its "
                    "group's lr to 0 when its time has come."
                )
            if needs_now and not needed:
                raise TaskError(
                    f"parameter '{name}' was frozen when the model was built, and now wants a "
                    "gradient. Build the model with requires_grad = True and leave it out of the "
                    "computation (or set its group's lr to 0) until its time comes."
                )

    def _written(self) -> str | None:
        """The first parameter whose copy, on which the rehearsal was, is not what it was."""
        replica = self.replica
        for piece in replica.layout.pieces:
            raw = [t.detach() for t in (replica.parameters[piece.name], replica.weight(piece))]
            if not torch.equal(*(_bits(t, piece) for t in raw)):
                return piece.name
        return None

    def _sums(self) -> list[int]:
        replica = self.replica
        sums = [_bits(replica.weight(piece), piece).sum() for piece in replica.layout.pieces]
        return [int(s) for s in torch.stack(sums).tolist()] if sums else []

    def _tell(self, which: int | str, does: str) -> str:
        name = which if isinstance(which, str) else self._named[which][0]
        path, _, leaf = name.rpartition(".")
        module = module_at(self.replica.model, path)
        where = f"module '{path}' ({type(module).__name__})" if path else "the model"
        return (
            f"{where} {does} its parameter '{leaf}' while a micro-batch is computed. All "
            "micro-batches of a step start from the same weights, on whichever worker, and only "
            "the optimizer may write them. Use a parametrization (torch.nn.utils.parametrizations, "
            "register_parametrization), nn.Embedding(max_norm=...), or Task(after_step=...), which "
            "may write to weights after each step; what is no weight belongs in a buffer."
        )


def _told_of_hooks(carrier: str) -> str:
    return (
        f"{carrier} was given a hook, or lost one, while a micro-batch was computed. Other workers "
        "do not know of it. Register hooks when the model is built, or remove those of a "
        "micro-batch at its end (handle.remove())."
    )


def _first(now: list[int], before: list[int]) -> int:
    return next(k for k, (a, b) in enumerate(zip(now, before, strict=True)) if a != b)


def _bits(tensor: Tensor, piece: TensorPlace) -> Tensor:
    """All elements in the order of memory, as integers: NaN equals itself, 0.0 is not -0.0."""
    flat = tensor.as_strided((piece.numel,), (1,))
    return flat.view(_INTEGERS[piece.dtype.itemsize])
