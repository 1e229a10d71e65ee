# SPDX-License-Identifier: Apache-2.0
"""Which evaluation was best, and whether to go on. Pure functions of the scores so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manyhands.values.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Criterion:
    """A score and its good direction, from "accuracy", "loss" or "error:min"."""

    score: str
    smallest: bool

    def value(self, scores: Mapping[str, float], setting: str) -> float:
        if self.score not in scores:
            raise ConfigError(
                f"{setting} names the score '{self.score}'; the task has: {', '.join(scores)}."
            )
        value = scores[self.score]
        return -value if self.smallest else value


def criterion(text: str) -> Criterion:
    name, _, direction = text.partition(":")
    if direction not in ("", "min", "max"):
        raise ConfigError(f"'{text}': write the direction as {name}:min or {name}:max.")
    return Criterion(name, direction == "min" or (name == "loss" and direction != "max"))


def see_that_it_was_scored(scores: Mapping[str, float], setting: str, by: str | None) -> None:
    """A score that decides something is there. What some scores are called (those of a function
    that gives several) is known when they were computed, and not before."""
    if by is not None and criterion(by).score not in scores:
        raise ConfigError(f"{setting} = {by}: the task's scores are {', '.join(scores)}.")


def best_step(history: Sequence[tuple[int, Mapping[str, float]]], by: str) -> int | None:
    """The step with the best score; the earlier one when equal; None without history."""
    if not history:
        return None
    chosen = criterion(by)
    # NaN is never best: max would keep it if it came first.
    ranked = [(chosen.value(s, "checkpoint.keep_best"), -step) for step, s in history]
    ranked = [r for r in ranked if r[0] == r[0]]
    return -max(ranked)[1] if ranked else None


def should_stop(
    history: Sequence[tuple[int, Mapping[str, float]]], *, by: str, patience: int | None
) -> str | None:
    """The reason to stop early, or None."""
    if patience is None:
        return None
    chosen = criterion(by)
    values = [chosen.value(scores, "evaluate.by") for _, scores in history]
    best, since = float("-inf"), 0
    for value in values:
        best, since = (value, 0) if value > best else (best, since + 1)
    if since < patience:
        return None
    return (
        f"{chosen.score} has not improved in {since} evaluations (evaluate.stop_early = {patience})"
    )
