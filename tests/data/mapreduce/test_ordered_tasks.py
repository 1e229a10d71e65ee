"""Calls by processes, their results in order; a call that kills its process is named."""

import os
from pathlib import Path

import pytest

from manyhands.data.mapreduce.ordered_tasks import in_order
from manyhands.values.errors import DataError, DataTaskFailed


def test_results_come_in_the_order_of_calls() -> None:
    calls = [(7 + k, 2) for k in range(9)]
    assert list(in_order(divmod, calls, 2, what="part")) == [divmod(*c) for c in calls]
    assert list(in_order(divmod, [], 2, what="part")) == []


def test_a_call_whose_process_dies_is_made_again_and_named_if_it_always_does(
    tmp_path: Path,
) -> None:
    calls = [(str(tmp_path / "mark"), k) for k in range(5)]
    assert list(in_order(dies_once, calls, 2, what="part")) == [0, 1, 2, 3, 4]
    with pytest.raises(DataTaskFailed, match="part 2 died twice"):
        list(in_order(dies_at, [(1,), (0,), (2,)], 2, what="part"))
    with pytest.raises(DataError, match="no 1"):
        list(in_order(refuses, [(0,), (1,), (2,)], 2, what="part"))


def dies_once(mark: str, number: int) -> int:
    if number == 2:
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return number
        os._exit(1)
    return number


def dies_at(number: int) -> int:
    if number == 0:
        os._exit(1)
    return number


def refuses(number: int) -> int:
    if number == 1:
        raise DataError("no 1")
    return number
