# SPDX-License-Identifier: Apache-2.0
"""A worker's own gradients, added up as they come, as far as the canonical tree allows.

Between hosts, gradients are sent while the last micro-batch is still being computed: what backward
has finished of it is added up parameter by parameter (`streamed`). The additions are those that
`collect` would have made, so the bits are the same; only the moment differs.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manyhands.accounting.deal_micro_batches import Node
from manyhands.training.state.layout import Lanes, TensorPlace
from manyhands.training.sync.canonical_sum import TreeSum
from manyhands.training.sync.finite import reach
from manyhands.values.errors import TaskError

_FOREACH_ADD: Any = getattr(torch, "_foreach_add_")  # noqa: B009 (private, and no other way)
_FOREACH_COPY: Any = getattr(torch, "_foreach_copy_")  # noqa: B009


class LocalSum:
    """Into `slots`, which all workers of a view may read; a tree's values are their numbers."""

    def __init__(
        self, pieces: Sequence[TensorPlace], parameters: Sequence[Tensor], slots: Sequence[Lanes]
    ) -> None:
        self.pieces, self.parameters, self.slots = pieces, parameters, slots
        self._views: dict[int, list[Tensor]] = {}
        self._watched: set[tuple[bool, ...]] = set()
        self._twice: set[tuple[bool, ...]] = set()
        """By which parameters want a gradient: each optimizer's steps differ from the others'."""

    def tree(self, leaves: int) -> TreeSum[int]:
        """For a step of so many micro-batches."""
        return TreeSum(leaves, self._add)

    def collect(self, tree: TreeSum[int], index: int) -> None:
        """Move the gradients in `.grad` into a slot, or add them to the left sibling's."""
        adding = tree.completes_pair(index)
        slot = tree.parts[-1][1] if adding else len(tree.parts)
        views, gradients = [], []
        for view, parameter in zip(self._in_slot(slot), self.parameters, strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                # Adding 0.0 and not nothing: the other worker's zeros would be added too.
                view.add_(0.0) if adding else view.zero_()
                continue
            views.append(view)
            gradients.append(_dense(gradient))
        if views:  # a batch loss may train nothing but what it uses itself
            (_FOREACH_ADD if adding else _FOREACH_COPY)(views, gradients)
        if adding:
            tree.absorb()
        else:
            tree.push(Node(index, 0), slot)

    def reach(self, tree: TreeSum[int]) -> float:
        """Of the partial sums that this worker has put together (finite.py)."""
        return reach(lane for _, slot in tree.parts for lane in self.slots[slot].values())

    # ---- the last micro-batch, parameter by parameter

    @contextmanager
    def streamed(
        self,
        tree: TreeSum[int],
        index: int,
        finished: Callable[[int], None],
        *,
        at_once: bool = True,
    ) -> Generator[None]:
        """Around backward of the last micro-batch: `finished(k)` is called when all that this
        worker has to add for parameter k is in its slots. `collect_rest` comes after it, and does
        the same for all that are left (not `at_once`: all of them).

        A parameter whose gradient comes in two parts (shared by checkpointed segments) cannot be
        sent after the first. The first time, who comes twice is only watched.
        """
        adding, slot, merges = self._additions(tree, index)
        views = self._in_slot(slot)
        done: set[int] = set()
        self._done = done
        wanted = tuple(parameter.requires_grad for parameter in self.parameters)
        watched = wanted in self._watched

        def come(k: int, parameter: Tensor) -> None:
            if k in done:
                self._twice.add(wanted)
                if watched:
                    raise TaskError(
                        f"the gradient of '{self.pieces[k].name}' came in two parts, and in one "
                        "before. Set train.overlap = false."
                    )
            done.add(k)
            if not watched:
                return
            self._move(k, views[k], parameter.grad, adding, merges)
            finished(k)

        hooks = (
            []
            if not at_once or (watched and wanted in self._twice)
            else [
                parameter.register_post_accumulate_grad_hook(partial(come, k))
                for k, parameter in enumerate(self.parameters)
                if wanted[k]
            ]
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            if not watched:
                done.clear()
                self._watched.add(wanted)

    def collect_rest(self, tree: TreeSum[int], index: int, finished: Callable[[int], None]) -> None:
        """What did not come on its own: parameters without a gradient, or all of them."""
        adding, slot, merges = self._additions(tree, index)
        views = self._in_slot(slot)
        for k, parameter in enumerate(self.parameters):
            gradient, parameter.grad = parameter.grad, None
            if k not in self._done:
                self._move(k, views[k], gradient, adding, merges)
                finished(k)
        tree.add = _left  # it has been done
        if adding:
            tree.absorb()
        else:
            tree.push(Node(index, 0), slot)

    def _additions(self, tree: TreeSum[int], index: int) -> tuple[bool, int, list[tuple[int, int]]]:
        """What micro-batch `index` brings about: is it added to a slot or copied into it, into
        which one, and which slots are then added to which."""
        adding = tree.completes_pair(index)
        slot = tree.parts[-1][1] if adding else len(tree.parts)
        merges: list[tuple[int, int]] = []

        def note(left: int, right: int) -> int:
            merges.append((left, right))
            return left

        trial = TreeSum(tree.leaves, note)
        trial.parts = list(tree.parts)
        trial.absorb() if adding else trial.push(Node(index, 0), slot)
        return adding, slot, merges

    def _move(
        self,
        k: int,
        view: Tensor,
        gradient: Tensor | None,
        adding: bool,
        merges: list[tuple[int, int]],
    ) -> None:
        with torch.no_grad():
            if gradient is None:
                view.add_(0.0) if adding else view.zero_()
            elif adding:
                view.add_(_dense(gradient))
            else:
                view.copy_(_dense(gradient))
            for left, right in merges:
                self._in_slot(left)[k].add_(self._in_slot(right)[k])

    def _in_slot(self, slot: int) -> list[Tensor]:
        """The parameters' gradients as they live in a slot."""
        if slot not in self._views:
            lanes = self.slots[slot]
            self._views[slot] = [piece.view(lanes[piece.dtype]) for piece in self.pieces]
        return self._views[slot]

    def _add(self, left: int, right: int) -> int:
        for dtype, lane in self.slots[left].items():
            lane.add_(self.slots[right][dtype])
        return left


def _left(left: int, right: int) -> int:
    return left


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
