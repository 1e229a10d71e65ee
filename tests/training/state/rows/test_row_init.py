"""A row's first values depend on (seed, table, id) and on nothing else."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.training.state.rows.row_hash import hashes_of, ids_of
from manyhands.training.state.rows.row_init import (
    ConstantInit,
    FirstRows,
    NormalInit,
    RowInit,
    UniformInit,
)
from manyhands.values.errors import ConfigError

IDS = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(IDS, min_size=1, max_size=30, unique=True), st.data())
def test_the_same_row_in_whatever_company(ids: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(1, 40))
    init = data.draw(st.sampled_from([NormalInit(0.1), UniformInit(-1, 2), ConstantInit(3)]))
    first = FirstRows(init, dim, seed=3, table="user")
    whole = dict(zip(ids, first(np.array(ids)), strict=True))
    for row in whole.values():
        assert row.shape == (dim,) and row.dtype == np.float32
    others = data.draw(st.permutations(ids))[: data.draw(st.integers(1, len(ids)))]
    again = FirstRows(init, dim, seed=3, table="user")
    for id_, row in zip(others, again(np.array(others)), strict=True):
        assert row.tobytes() == whole[id_].tobytes()


def test_a_wider_row_begins_alike() -> None:
    """Columns are chosen one by one."""
    ids = np.arange(100)
    narrow, wide = (FirstRows(NormalInit(), n, seed=0, table="t")(ids) for n in (5, 64))
    assert (wide[:, :5] == narrow).all()


def test_seed_and_table_are_part_of_it() -> None:
    ids = np.arange(1000)
    made = [
        FirstRows(NormalInit(), 4, seed=s, table=t)(ids) for s, t in [(0, "a"), (1, "a"), (0, "b")]
    ]
    for k in range(3):
        assert abs(np.corrcoef(made[k].ravel(), made[k - 1].ravel())[0, 1]) < 0.06


def test_the_distributions_are_those_asked_for() -> None:
    ids = np.arange(40_000) * 7 - 3
    normal = FirstRows(NormalInit(0.5), 16, seed=0, table="t")(ids).astype(np.float64)
    assert abs(normal.mean()) < 2e-3 and abs(normal.std() - 0.5) < 2e-3
    kurtosis = (normal**4).mean() / normal.var() ** 2
    assert abs(kurtosis - 3) < 0.05
    columns = np.corrcoef(normal.T) - np.eye(16)
    assert abs(columns).max() < 0.03
    uniform = FirstRows(UniformInit(-2, 4), 16, seed=0, table="t")(ids)
    assert uniform.min() >= -2 and uniform.max() < 4 and abs(uniform.mean() - 1) < 0.02
    assert (FirstRows(ConstantInit(0.25), 3, seed=0, table="t")(ids[:5]) == 0.25).all()


def test_the_bits_stay_what_they_are() -> None:
    """Runs that were begun with another version go on with the same rows."""
    ids = np.array([0, 1, -1, 2**63 - 1, -(2**63), 12345])
    rows = FirstRows(NormalInit(0.01), 16, seed=7, table="user")(ids)
    assert hashlib.sha256(rows.tobytes()).hexdigest()[:16] == "a48a504c42dd90e1"
    quantiles = NormalInit(1.0).quantiles()
    assert hashlib.sha256(quantiles.tobytes()).hexdigest()[:16] == "8babbcaf96568f10"


@given(st.lists(IDS, max_size=50))
def test_a_hash_can_be_taken_back(ids: list[int]) -> None:
    array = np.array(ids, np.int64)
    assert (ids_of(hashes_of(array)) == array).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: NormalInit(0.0),
        lambda: NormalInit(float("nan")),
        lambda: UniformInit(1, 1),
        lambda: UniformInit(0, float("inf")),
        lambda: ConstantInit(float("nan")),
    ],
)
def test_distributions_that_make_no_sense_are_refused(make: "type[RowInit]") -> None:
    with pytest.raises(ConfigError, match="rows cannot begin as"):
        make()
