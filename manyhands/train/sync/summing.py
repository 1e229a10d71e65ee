# SPDX-License-Identifier: Apache-2.0
"""A worker's own gradients, added up as they come, as far as the canonical tree allows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from manyhands.deal import Node
from manyhands.train.collective.contract import Lanes
from manyhands.train.layout import Piece
from manyhands.train.sync.canonical import TreeSum

_FOREACH_ADD: Any = getattr(torch, "_foreach_add_")  # noqa: B009 (private, and no other way)
_FOREACH_COPY: Any = getattr(torch, "_foreach_copy_")  # noqa: B009


class Summing:
    """Into `slots`, which all workers of a view may read; a tree's values are their numbers."""

    def __init__(
        self, pieces: Sequence[Piece], parameters: Sequence[Tensor], slots: Sequence[Lanes]
    ) -> None:
        self.pieces, self.parameters, self.slots = pieces, parameters, slots
        self._views: dict[int, list[Tensor]] = {}

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
            gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
        if adding:
            _FOREACH_ADD(views, gradients)
            tree.absorb()
        else:
            _FOREACH_COPY(views, gradients)
            tree.push(Node(index, 0), slot)

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
