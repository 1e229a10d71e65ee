"""The canonical sum performs exactly the additions of one tree, however the leaves are split."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from manyhands.accounting.deal_micro_batches import Node, deal, subtrees
from manyhands.training.sync.canonical_sum import TreeSum, finish, most_parts

Tree = int | tuple["Tree", "Tree"]


def whole(start: int, level: int, leaves: int) -> Tree | None:
    """The definition, written down recursively."""
    if start >= leaves:
        return None
    if level == 0:
        return start
    left = whole(start, level - 1, leaves)
    right = whole(start + (1 << (level - 1)), level - 1, leaves)
    assert left is not None
    return left if right is None else (left, right)


def expression(leaves: int, ranges: list[range]) -> Tree:
    parts: list[tuple[Node, Tree]] = []
    for leaves_here in ranges:
        tree: TreeSum[Tree] = TreeSum(leaves, lambda a, b: (a, b))
        for i in leaves_here:
            tree.push(Node(i, 0), i)
        assert len(tree.parts) <= most_parts(leaves)
        assert tuple(node for node, _ in tree.parts) == subtrees(leaves_here, leaves)
        parts += tree.parts
    return finish(parts, leaves, lambda a, b: (a, b))


@given(leaves=st.integers(1, 70), cuts=st.lists(st.integers(0, 70), max_size=6))
def test_any_split_into_ranges_gives_the_same_additions(leaves: int, cuts: list[int]) -> None:
    edges = [0, *sorted(min(c, leaves) for c in cuts), leaves]
    ranges = [range(a, b) for a, b in pairwise(edges)]
    level = (leaves - 1).bit_length()
    assert expression(leaves, ranges) == whole(0, level, leaves)


@given(leaves=st.integers(1, 40), workers=st.integers(1, 9))
def test_so_does_every_deal(leaves: int, workers: int) -> None:
    level = (leaves - 1).bit_length()
    dealt = list(deal(leaves, (1.0,) * workers))
    assert expression(leaves, dealt) == whole(0, level, leaves)
