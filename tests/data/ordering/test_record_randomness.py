"""Random numbers that belong to a record, and are spread as they should be."""

from statistics import NormalDist

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.ordering.record_randomness import Draw, _normal_quantile


@given(
    ids=st.lists(st.integers(0, 2**62), min_size=1, max_size=20),
    seed=st.integers(0, 2**62),
    epoch=st.integers(0, 10**6),
    count=st.integers(1, 5),
)
@settings(max_examples=50)
def test_numbers_belong_to_their_record(ids: list[int], seed: int, epoch: int, count: int) -> None:
    together = Draw(seed, epoch, np.asarray(ids))
    for i, one in enumerate(ids):
        alone = Draw(seed, epoch, np.asarray([one]))
        for kind in ("uniform", "normal"):
            ours = getattr(together, kind)("name", (count,))
            assert torch.equal(ours[i], getattr(alone, kind)("name", (count,))[0])
            assert torch.equal(ours, getattr(together, kind)("name", (count + 2,))[:, :count])


def test_numbers_are_spread_as_they_should() -> None:
    draw = Draw(7, 1, np.arange(20_000))
    u = draw.uniform("u", (5,)).double()
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.005 and abs(u.var() - 1 / 12) < 0.001
    n = draw.normal("n", (5,)).double()
    assert abs(n.mean()) < 0.01 and abs(n.std() - 1) < 0.01 and abs((n**4).mean() - 3) < 0.1
    assert n.abs().max() < 7
    counts = torch.bincount(draw.below("b", 7, (5,)).flatten())
    assert len(counts) == 7 and (counts / 100_000 - 1 / 7).abs().max() < 0.01
    assert abs(draw.chance("c", 0.3, (5,)).double().mean() - 0.3) < 0.01
    across = torch.corrcoef(torch.cat([u.T, draw.uniform("v", (5,)).double().T]))
    assert (across - torch.eye(10)).abs().max() < 0.03


def test_the_normal_quantile_is_right() -> None:
    p = np.concatenate([np.linspace(0.001, 0.999, 99), [1e-12, 1e-6, 1 - 1e-6]])
    wanted = [NormalDist().inv_cdf(x) for x in p.tolist()]
    assert np.allclose(_normal_quantile(p), wanted, atol=1e-7)
