# SPDX-License-Identifier: Apache-2.0
"""The canonical sum: M leaves added over one fixed binary tree on their indices.

Floating point addition does not associate, so the tree is part of the definition of a gradient.
Node (start, level) is the sum of its two children; a node whose right child does not exist *is*
its left child (never + 0.0, which would turn -0.0 into 0.0).

Invariant: however the leaves are split into ranges, summing each range's maximal subtrees and then
those subtrees performs exactly the additions of the tree, no more and no fewer.
"""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from manyhands.accounting.deal_micro_batches import Node, root

T = TypeVar("T")


class TreeSum(Generic[T]):
    """Adds neighbouring nodes, which arrive from left to right, as far as the tree allows.

    `parts` is what could not be merged yet: the maximal subtrees of the leaves so far.
    `add(left, right)` returns their sum and may put it in `left`'s memory; it is called once for
    each addition of the tree.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self.leaves, self.add = leaves, add
        self.parts: list[tuple[Node, T]] = []

    def push(self, node: Node, value: T) -> None:
        node = risen(node, self.leaves)
        while self.parts and is_left_sibling(self.parts[-1][0], node):
            left_node, left = self.parts.pop()
            node, value = risen(left_node.parent(), self.leaves), self.add(left, value)
        self.parts.append((node, value))

    def completes_pair(self, leaf: int) -> bool:
        """Whether leaf number `leaf` is the right sibling of the part before it."""
        return bool(self.parts) and is_left_sibling(self.parts[-1][0], Node(leaf, 0))

    def absorb(self) -> None:
        """The caller has added the right sibling to the last part's value itself."""
        node, value = self.parts.pop()
        self.push(node.parent(), value)


def finish(parts: Iterable[tuple[Node, T]], leaves: int, add: Callable[[T, T], T]) -> T:
    """The root of the tree, from subtrees in index order that together cover all leaves."""
    total = TreeSum(leaves, add)
    for node, value in parts:
        total.push(node, value)
    ((node, value),) = total.parts
    assert node == root(leaves), "the parts do not cover the leaves"
    return value


def most_parts(leaves: int) -> int:
    """No range of the tree falls into more subtrees than this, at any moment of summing it."""
    return 2 * leaves.bit_length() + 1


def is_left_sibling(node: Node, other: Node) -> bool:
    return node.start < other.start and node.sibling() == other


def risen(node: Node, leaves: int) -> Node:
    """The highest node that equals this one because its right siblings do not exist."""
    while node != root(leaves):
        sibling = node.sibling()
        if sibling.start < leaves:
            break
        node = node.parent()
    return node
