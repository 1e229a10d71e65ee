# SPDX-License-Identifier: Apache-2.0
"""Everything that `membership.decide` can decide; the supervisor does it."""

from dataclasses import dataclass

from manyhands.values.messages import Left
from manyhands.values.verdict import Cause
from manyhands.values.view import View


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do, or not enough known yet."""


@dataclass(frozen=True, slots=True)
class StartWorkers:
    count: int


@dataclass(frozen=True, slots=True)
class Fence:
    worker: int
    because: str
    stuck: bool = False
    """It lives, but gets nothing done."""


@dataclass(frozen=True, slots=True)
class DropHost:
    """Give up a host: it lives, but others cannot reach it, or it computes other bits."""

    at: str
    because: str


@dataclass(frozen=True, slots=True)
class BreakView:
    because: str
    cause: Cause | None


@dataclass(frozen=True, slots=True)
class HaltView:
    because: str
    speeds: tuple[float, ...] = ()
    """A better deal than the present one."""


@dataclass(frozen=True, slots=True)
class IssueView:
    view: View


@dataclass(frozen=True, slots=True)
class Finish:
    leader: Left


@dataclass(frozen=True, slots=True)
class GiveUp:
    cause: Cause


Decision = (
    Wait | StartWorkers | Fence | DropHost | BreakView | HaltView | IssueView | Finish | GiveUp
)
