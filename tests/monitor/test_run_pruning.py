"""Which runs may go."""

import pytest

from manyhands.monitor.run_pruning import PrunableRun, to_prune


def run(name: str, state: str, saved: int, *, in_use: bool = False) -> PrunableRun:
    return PrunableRun(name, state, in_use, saved)


RUNS = [
    run("a", "finished", 1),
    run("b", "failed", 0),
    run("c", "failed", 2),
    run("d", "running", 0, in_use=True),
    run("e", "stopped", 3),
    run("f", "died", 0),
    run("g", "running", 0),
    run("h", "starting", 0, in_use=True),
]


@pytest.mark.parametrize(
    "keep, gone",
    [(None, "bf"), (5, "bf"), (3, "bf"), (2, "abf"), (1, "abcf"), (0, "abcef")],
)
def test_what_is_empty_goes_and_what_is_old(keep: int | None, gone: str) -> None:
    assert "".join(sorted(to_prune(RUNS, keep))) == gone


def test_each_goes_for_a_reason() -> None:
    reasons = to_prune(RUNS, 2)
    assert reasons["b"] == "failed, and nothing was saved"
    assert reasons["a"] == "older than the newest 2"
