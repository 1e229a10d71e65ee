# SPDX-License-Identifier: Apache-2.0
"""The tables of one model: a store for each `mh.Embedding`, and the gradients of a micro-batch.

Who looks rows up gets a copy of them that wants a gradient, and the lookup is noted; after backward
the copies have their gradients, by position. Positions are added up in the order of the lookups
(sum_rows.py), so the sum does not depend on the order in which backward came to them.

Where several processes of a host have the same memory, each `owns` some of the buckets and applies
gradients there; all read. A snapshot of own buckets is read by another thread while steps go on, so
`applying` is held whenever rows change.
"""

import hashlib
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from manyhands.training.memory.memory import Memory
from manyhands.training.state.rows.embedding import Embedding
from manyhands.training.state.rows.load_rows import begin_at, clear, load
from manyhands.training.state.rows.row_hash import BUCKETS, Ids
from manyhands.training.state.rows.row_snapshot import RowSnapshot
from manyhands.training.state.rows.row_store import RowStore
from manyhands.training.state.rows.sum_rows import (
    GradientRows,
    GroupedIds,
    group_ids,
    sum_positions,
)
from manyhands.training.state.rows.table_part import TablePart
from manyhands.values.errors import TaskError
from manyhands.values.machine import MOST_RANKS
from manyhands.values.plain_names import plain_name

NO_BUCKETS: NDArray[np.bool_] = np.zeros(BUCKETS, np.bool_)
ALL_BUCKETS: NDArray[np.bool_] = np.ones(BUCKETS, np.bool_)


@dataclass(frozen=True, slots=True)
class Lookup:
    """Rows that a model looked up, by position; backward puts their gradient there."""

    ids: Ids
    grouped: GroupedIds
    rows: Tensor


class ModelTable:
    """One of them."""

    def __init__(self, name: str, module: Embedding, memory: Memory, seed: int) -> None:
        self.name, self.dim, self.follows = name, module.dim, module.follows
        self.trained, self.padding_idx = module.trained, module.padding_idx
        writers = MOST_RANKS if memory.shared else 1
        spec, optimizer = module.spec(name, seed), module.row_optimizer()
        self.store = RowStore(spec, optimizer, memory, writers=writers)
        self.owns = ALL_BUCKETS
        self._lookups: list[Lookup] | None = None
        module.bind(self)

    @property
    def mark(self) -> str:
        """What all workers must have alike."""
        alike = self.store.spec, self.store.optimizer, self.follows, self.trained, self.padding_idx
        return repr(alike)

    def look_up(self, ids: Ids) -> Tensor:
        if not torch.is_grad_enabled():
            return self.store.read(ids)
        if self._lookups is None or len(ids) == 0:
            return self.store.read(ids).requires_grad_()
        grouped = group_ids(ids)  # as its gradient will need it
        found = grouped.spread(self.store.read(grouped.distinct)).requires_grad_()
        self._lookups.append(Lookup(ids, grouped, found))
        return found.clone()  # which may be changed in place

    def __deepcopy__(self, memo: object) -> "ModelTable":
        return self  # a copy of the module looks up the same rows

    def __reduce__(self) -> Any:
        raise TaskError(
            f"the rows of table '{self.name}' are in this process, or in the run's memory: its "
            "module cannot be pickled. mh.load(RUN) and mh.open_table(RUN, name) read them."
        )

    def begin(self) -> None:
        """Before a micro-batch: what is looked up from now on counts."""
        self._lookups = []

    def take_gradient(self) -> GradientRows:
        """What backward has found since `begin`."""
        lookups, self._lookups = self._lookups or [], None
        there = [(lookup, lookup.rows.grad) for lookup in lookups]
        trained = [(lookup, grad) for lookup, grad in there if grad is not None]
        match trained:
            case []:
                return self.nothing()
            case [(lookup, grad)]:
                return sum_positions(lookup.ids, grad, lookup.grouped)
            case _:
                ids = np.concatenate([lookup.ids for lookup, _ in trained])
                return sum_positions(ids, torch.cat([grad for _, grad in trained]))

    def nothing(self) -> GradientRows:
        return GradientRows(np.zeros(0, np.int64), torch.zeros(0, self.dim, dtype=torch.float32))

    def apply(self, gradient: GradientRows, step: int, lr: float) -> None:
        """The optimizer's step after `step` steps, in own buckets; `lr`: the task's rate."""
        if not self.owns.any():
            return
        store = self.store
        before: Any = store.optimizer
        if self.follows and before.lr != lr:
            store.optimizer = replace(before, lr=lr)
        store.apply(gradient.ids, gradient.rows, step + 1)


class Tables:
    def __init__(self, model: Module, memory: Memory, seed: int) -> None:
        """All workers of a host call for the same in the same memory."""
        for path, module in model.named_modules():
            if isinstance(module, Embedding) and not re.fullmatch(r"\w[\w.-]*", plain_name(path)):
                raise TaskError(
                    f"mh.Embedding as '{path}' of the model: a table is saved under its name, "
                    "which has letters, digits, '_', '.' and '-'. Name it so, as a part of the "
                    "model."
                )
        self.all = [
            ModelTable(plain_name(path), module, memory, seed)
            for path, module in model.named_modules()
            if isinstance(module, Embedding)
        ]
        self.shared, self.applying = memory.shared, threading.Lock()
        self._being_read: list[_Reading] = []

    def __bool__(self) -> bool:
        return bool(self.all)

    def __iter__(self) -> Iterator[ModelTable]:
        return iter(self.all)

    def mark(self) -> str:
        """What all workers must have alike; nothing if there is none."""
        told = "".join(table.mark for table in self.all)
        return hashlib.sha256(told.encode()).hexdigest() if told else ""

    def begin(self) -> None:
        for table in self.all:
            table.begin()

    def take_gradients(self) -> list[GradientRows]:
        return [table.take_gradient() for table in self.all]

    def looked_up(self) -> str | None:
        """The name of a table that was looked at since `begin`; that is forgotten."""
        names = [table.name for table in self.all if len(table.take_gradient().ids)]
        return names[0] if names else None

    def own(self, writer: int, part: int | None, parts: int) -> None:
        """This process is writer number `writer` of its host, and has one of so many near equal
        `parts` of the buckets (None: none of them)."""
        mask = NO_BUCKETS.copy()
        if part is not None:
            mask[BUCKETS * part // parts : BUCKETS * (part + 1) // parts] = True
        for table in self.all:
            table.owns = mask
            table.store.own(writer, mask)

    def rate(self, optimizer: torch.optim.Optimizer) -> float:
        """That tables without one of their own follow: to be asked before the optimizer's step,
        which may change it."""
        follow = any(table.follows for table in self.all)
        return float(optimizer.param_groups[0]["lr"]) if follow else 0.0

    def see_room(self, step: int) -> None:
        """Before the facts of a step are told."""
        for table in self.all:
            table.store.see_room(step)

    def apply(self, gradients: Iterable[GradientRows], step: int, lr: float) -> None:
        with self.applying:
            for table, gradient in zip(self.all, gradients, strict=True):
                table.apply(gradient, step, lr)

    def pass_over(self, step: int) -> None:
        """A step that changes nothing is one all the same: rows grow older."""
        self.apply([table.nothing() for table in self.all], step, lr=0.0)

    # ---- kept by a host

    def repair(self) -> None:
        """Undo what dead processes were in the middle of. Nobody may be writing."""
        for table in self.all:
            table.store.repair()

    def steps(self) -> tuple[int, int]:
        """The fewest and the most steps that a bucket of any table has been through."""
        words = [table.store.steps(ALL_BUCKETS) for table in self.all]
        return min(low for low, _ in words), max(high for _, high in words)

    def reset(self, step: int, saved: Iterable[tuple[str, TablePart]]) -> None:
        """Begin after `step` steps with these rows, whatever was here before."""
        by_name = {table.name: table.store for table in self.all}
        for store in by_name.values():
            store.own(0, ALL_BUCKETS)
            clear(store)
            begin_at(store, step)
        for name, part in saved:
            load(by_name[name], part)

    def parts(self) -> Iterator[tuple[int, TablePart]]:
        """All rows of all tables, between steps; with the number of the table."""
        for number, table in enumerate(self.all):
            for part in table.store.parts(ALL_BUCKETS):
                yield number, part

    # ---- saved while steps go on

    def snapshots(self) -> Mapping[str, Iterator[TablePart]]:
        """Own buckets as they are now, by table; to be read by another thread."""
        found: dict[str, Iterator[TablePart]] = {}
        for table in self.all:
            if table.owns.any():
                reading = _Reading(RowSnapshot(table.store), self.applying)
                self._being_read.append(reading)
                found[table.name] = reading
        self._being_read = [r for r in self._being_read if not r.done]
        return found

    def detach(self) -> None:
        """Others may write to what this process owned: what is still to be read is copied now."""
        for reading in self._being_read:
            reading.detach()
        self._being_read.clear()


class _Reading:
    """Parts of a snapshot; nobody changes rows while one is read."""

    def __init__(self, snapshot: RowSnapshot, applying: threading.Lock) -> None:
        self._parts, self._applying, self.done = snapshot.parts(), applying, False

    def __iter__(self) -> Iterator[TablePart]:
        return self

    def __next__(self) -> TablePart:
        with self._applying:
            try:
                return next(self._parts)
            except StopIteration:
                self.done = True
                raise

    def detach(self) -> None:
        with self._applying:
            if not self.done:
                self._parts = iter(list(self._parts))
