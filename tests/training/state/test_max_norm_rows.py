"""Rows that are too long are shortened as plain PyTorch does it, and no weight is written."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from manyhands.training.state.max_norm_rows import find_max_norms, shorten
from manyhands.values.errors import TaskError

KINDS: dict[str, tuple[type[nn.Embedding | nn.EmbeddingBag], dict[str, Any]]] = {
    "embedding": (nn.Embedding, {}),
    "sparse": (nn.Embedding, {"sparse": True, "padding_idx": 2}),
    "by frequency": (nn.Embedding, {"scale_grad_by_freq": True}),
    "bag": (nn.EmbeddingBag, {"mode": "sum"}),
    "longest of a bag": (nn.EmbeddingBag, {"mode": "max"}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("norm", [(0.7, 2.0), (1.0, 1.0), (0.5, float("inf")), (1e9, 2.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_as_plain_torch(kind: str, norm: tuple[float, float], dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and kind == "longest of a bag":
        pytest.skip("torch has none")
    torch.manual_seed(0)
    build, how = KINDS[kind]
    plain, ours = (
        build(9, 5, max_norm=norm[0], norm_type=norm[1], dtype=dtype, **how) for _ in range(2)
    )
    ours.load_state_dict(plain.state_dict())
    (rows,) = find_max_norms(ours)
    before, rows.recording = ours.weight.detach().clone(), True
    indices = torch.tensor([[0, 3, 3], [2, 8, 5]])
    for module in (plain, ours):
        module(indices).float().pow(2).sum().backward()
    gradients = [m.weight.grad for m in (plain, ours)]
    assert torch.equal(*(g.to_dense() for g in gradients if g is not None))
    assert torch.equal(ours.weight, before) and ours.max_norm == norm[0]
    assert [n for n, _ in ours.named_parameters()] == ["weight"]
    table = ours.weight.detach().clone()
    shorten(table.view(-1), 0, 5, rows.factors)
    assert torch.equal(table, plain.weight)


@given(st.data())
def test_any_cut_of_a_table_is_shortened_alike(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 7))
    factors = torch.tensor(
        data.draw(st.lists(st.sampled_from([1.0, 0.3, 0.9]), min_size=rows, max_size=rows)),
        dtype=torch.float64,
    )
    table = torch.randn(rows, width)
    whole, parts = table.clone().view(-1), table.clone().view(-1)
    shorten(whole, 0, width, factors)
    cuts = sorted(data.draw(st.sets(st.integers(0, rows * width))) | {0, rows * width})
    for a, b in pairwise(cuts):
        shorten(parts[a:b], a, width, factors)
    assert torch.equal(whole, parts)


def test_it_is_restored_when_forward_fails() -> None:
    module = nn.Embedding(3, 2, max_norm=0.1)
    find_max_norms(module)
    with pytest.raises(IndexError):
        module(torch.tensor([7]))
    assert module.max_norm == 0.1 and list(module.state_dict()) == ["weight"]


def test_what_cannot_be_done_is_refused_by_name() -> None:
    tied = nn.Sequential(nn.Embedding(4, 3, max_norm=1.0), nn.Linear(3, 4, bias=False))
    tied[1].weight = tied[0].weight
    frozen = nn.Sequential(nn.Embedding.from_pretrained(torch.ones(4, 3), max_norm=1.0))
    for model, says in ((tied, "'0.weight' and '1.weight'"), (frozen, "frozen")):
        with pytest.raises(TaskError, match=says):
            find_max_norms(model)
