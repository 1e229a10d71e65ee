"""The sum over hosts is the canonical one, whatever is dealt to whom and sent in which order."""

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from manyhands.accounting.deal_micro_batches import Node, subtrees
from manyhands.training.state.layout import Lanes, Layout, lay_out, parameters_of
from manyhands.training.sync.allreduce import overlapped_host_sum
from manyhands.training.sync.allreduce.local_sum import LocalSum
from manyhands.training.sync.allreduce.overlapped_host_sum import OverlappedHostSum, buckets
from manyhands.training.sync.canonical_sum import TreeSum, finish, most_parts
from manyhands.values.errors import TaskError
from manyhands.values.world import World
from tests.training.sync.test_finish_interrupted_step_hosts import Between, View

DTYPES = (torch.float32, torch.float64, torch.bfloat16)

layouts = st.lists(
    st.tuples(st.sampled_from([1, 1, 3, 15, 16, 17, 64, 100, 333]), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=8,
).map(
    lambda pieces: lay_out(
        [(f"p{k}", torch.empty(n, dtype=dtype), k % 5 != 4) for k, (n, dtype) in enumerate(pieces)]
    )
)


@given(layout=layouts, nbytes=st.sampled_from([1, 64, 200, 1000, 1 << 22]))
def test_buckets_cover_every_element_once(layout: Layout, nbytes: int) -> None:
    times = {d: torch.zeros(n, dtype=torch.int) for d, n in layout.trainable_sizes.items()}
    for bucket in buckets(layout, nbytes):
        for dtype, (a, b) in bucket.bounds.items():
            times[dtype][a:b] += 1
            for k, piece in enumerate(layout.trainable):
                if piece.dtype == dtype and piece.start < b and a < piece.stop:
                    assert k in bucket.pieces, "it would be sent before it is there"
    for piece in layout.trainable:
        assert (times[piece.dtype][piece.start : piece.stop] == 1).all()
    assert all((lane <= 1).all() for lane in times.values())


@given(start=st.integers(0, 99), size=st.integers(0, 999), parts=st.integers(1, 9))
def test_shares_cover_a_stretch_once(start: int, size: int, parts: int) -> None:
    cut = overlapped_host_sum._share  # pyright: ignore[reportPrivateUsage]
    found = [cut((start, start + size), part, parts) for part in range(parts)]
    assert found[0][0] == start and found[-1][1] == start + size
    assert all(a[1] == b[0] for a, b in pairwise(found))
    assert all(a <= b and (a - start) % 16 == 0 for a, b in found)


# ---- the sum


class Host:
    """What `OverlappedHostSum` sees of the workers of one host, who are all done."""

    def __init__(self, world: World, view: View, slots: Sequence[Sequence[Lanes]]) -> None:
        self.world, self.of_workers = world, slots
        self.slots = slots[0]
        self.between = Between(world.among_hosts(), view, view, [])

    def readiness(self) -> "Host":
        return self

    def wait_until(self, number: int) -> None: ...

    def left_by(self, rank: int) -> Sequence[Lanes]:
        return self.of_workers[rank]

    def send(self, errand: Callable[[], None]) -> None:
        errand()


def lanes_of(layout: Layout, generator: torch.Generator) -> Lanes:
    found: Lanes = {}
    for dtype, n in layout.trainable_sizes.items():
        large = 10.0 ** torch.randint(-6, 7, (n,), generator=generator)
        found[dtype] = (torch.randn(n, generator=generator) * large).to(dtype)
        found[dtype][torch.rand(n, generator=generator) < 0.2] = -0.0
    return found


def added(left: Lanes, right: Lanes) -> Lanes:
    return {dtype: lane + right[dtype] for dtype, lane in left.items()}


def partial_sums(leaves: Sequence[Lanes], held: range) -> list[Lanes]:
    tree = TreeSum(len(leaves), added)
    for index in held:
        tree.push(Node(index, 0), {d: lane.clone() for d, lane in leaves[index].items()})
    return [lanes for _, lanes in tree.parts]


def raw(lanes: Lanes) -> dict[torch.dtype, bytes]:
    return {d: lane.view(torch.uint8).numpy().tobytes() for d, lane in lanes.items()}


@settings(max_examples=15)
@given(
    layout=layouts,
    workers=st.lists(st.integers(1, 3), min_size=2, max_size=4),
    leaves=st.integers(1, 13),
    cuts=st.lists(st.integers(0, 13), min_size=12, max_size=12),
    nbytes=st.sampled_from([1, 300, 1 << 22]),
    seed=st.integers(0, 99),
)
def test_hosts_come_to_the_canonical_sum(
    layout: Layout, workers: list[int], leaves: int, cuts: list[int], nbytes: int, seed: int
) -> None:
    """With any deal: hosts without a leaf, ranges that are no subtrees."""
    generator, ranks = torch.Generator().manual_seed(seed), sum(workers)
    gradients = [lanes_of(layout, generator) for _ in range(leaves)]
    edges = [0, *sorted(min(cut, leaves) for cut in cuts[: ranks - 1]), leaves]
    ranges = [range(a, b) for a, b in pairwise(edges)]
    expected = finish([(Node(i, 0), g) for i, g in enumerate(gradients)], leaves, added)
    view, sums, done = View(1), list[Lanes](), list[int]()
    threads: list[threading.Thread] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlapped_host_sum, "bucket_bytes", lambda *_: nbytes)
        for host in range(len(workers)):
            world = World(sum(workers[:host]), ranks, tuple(workers))
            slots = [partial_sums(gradients, ranges[r]) for r in world.ranks_of(host)]
            levels: Any = Host(world, view, slots)
            sums.append({d: torch.zeros(n, dtype=d) for d, n in layout.trainable_sizes.items()})
            made = OverlappedHostSum(layout, levels, sums[host])
            arguments = (ranges, leaves, lambda host=host: done.append(host))
            threads.append(threading.Thread(target=made.begin, args=arguments, daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(done) == list(range(len(workers)))
    for found in sums:
        for piece in layout.trainable:
            a, b = piece.start, piece.stop
            pair = [raw({piece.dtype: lanes[piece.dtype][a:b]}) for lanes in (found, expected)]
            assert pair[0] == pair[1]


# ---- gradients that are passed on as they come


class Plain(nn.Module):
    """A layer that is never used, one that some inputs do not use, and one under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)
        self.never = nn.Linear(2, 2)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = x + self.sometimes(x) if float(x.detach().sum()) > 0 else x
        return self.second(x)


class Rows(nn.Module):
    """Gradients of embeddings that are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(9, 6, sparse=True)
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows((x[:, 0].abs() * 8).long() % 9) + x)


class Twice(nn.Module):
    """One layer in two checkpointed segments: its gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.shared = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for _ in range(2):
            x = torch.tanh(checkpoint(self.shared, x, use_reentrant=True))  # type: ignore[arg-type]
        return x


class Frame:
    """A model, slots, and the two ways of summing into them."""

    def __init__(self, make: Callable[[], nn.Module], leaves: int) -> None:
        torch.manual_seed(3)
        self.model = make()
        layout = lay_out(parameters_of(self.model))
        sizes = layout.trainable_sizes
        self.slots = [
            {d: torch.full((n,), 7.0, dtype=d) for d, n in sizes.items()}
            for _ in range(most_parts(leaves))
        ]
        parameters = dict(self.model.named_parameters())
        self.parameters = [parameters[p.name] for p in layout.trainable]
        self.pieces = layout.trainable
        self.summing = LocalSum(self.pieces, self.parameters, self.slots)

    def backward(self, step: int, index: int) -> None:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + index))
        (F.mse_loss(self.model(x), x) / 3).backward()

    def value(self, slot: int, k: int) -> bytes:
        piece = self.pieces[k]
        lane = self.slots[slot][piece.dtype][piece.start : piece.stop]
        return lane.view(torch.uint8).numpy().tobytes()

    def values(self, parts: list[tuple[Node, int]]) -> list[list[bytes]]:
        return [[self.value(slot, k) for k in range(len(self.pieces))] for _, slot in parts]


@settings(max_examples=40)
@given(
    make=st.sampled_from([Plain, Rows, Twice]),
    leaves=st.integers(1, 11),
    bounds=st.tuples(st.integers(0, 10), st.integers(0, 10)),
    at_once=st.booleans(),
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_what_is_passed_on_as_it_comes_is_what_would_have_been_collected(
    make: Callable[[], nn.Module], leaves: int, bounds: tuple[int, int], at_once: bool
) -> None:
    """... and once it is said to be finished, it changes no more."""
    first, last = sorted(min(b, leaves - 1) for b in bounds)
    one, other = Frame(make, leaves), Frame(make, leaves)
    for step in range(3):
        tree = one.summing.tree(leaves)
        for index in range(first, last + 1):
            one.backward(step, index)
            one.summing.collect(tree, index)
        told: dict[int, list[bytes]] = {}
        streamed = other.summing.tree(leaves)
        for index in range(first, last):
            other.backward(step, index)
            other.summing.collect(streamed, index)
        final = [slot for _, slot in tree.parts]

        def finished(k: int, told: dict[int, list[bytes]] = told, final: list[int] = final) -> None:
            assert k not in told
            told[k] = [other.value(slot, k) for slot in final]

        with other.summing.streamed(streamed, last, finished, at_once=at_once):
            other.backward(step, last)
        other.summing.collect_rest(streamed, last, finished)
        assert streamed.parts == tree.parts
        assert tuple(node for node, _ in tree.parts) == subtrees(range(first, last + 1), leaves)
        assert other.values(streamed.parts) == one.values(tree.parts)
        assert sorted(told) == list(range(len(one.pieces)))
        for k, values in told.items():
            assert values == [other.value(slot, k) for slot in final]
        assert all(p.grad is None for p in (*one.parameters, *other.parameters))


def test_a_gradient_that_first_comes_once_and_then_twice_is_refused() -> None:
    """What was passed on after the first part would be wrong, and others would have it already."""
    frame = Frame(Twice, 1)
    model: Any = frame.model

    def go(step: int) -> None:
        tree = frame.summing.tree(1)
        with frame.summing.streamed(tree, 0, lambda k: None):
            frame.backward(step, 0)
        frame.summing.collect_rest(tree, 0, lambda k: None)

    forward = model.forward
    model.forward = nn.Sequential(model.before, model.shared).forward
    for step in range(2):
        go(step)
    model.forward = forward
    with pytest.raises(TaskError, match=r"'shared\.\w+' came in two parts"):
        go(2)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
