# SPDX-License-Identifier: Apache-2.0
"""Everything that `membership.decide` can decide; the supervisor does it."""

from dataclasses import dataclass

from manyhands.values.messages import Left, View
from manyhands.values.verdict import Cause


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do, or not enough known yet."""


@dataclass(frozen=True, slots=True)
class Start:
    count: int


@dataclass(frozen=True, slots=True)
class Fence:
    worker: int
    because: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Give up a host: it lives, but others cannot reach it."""

    at: str
    because: str


@dataclass(frozen=True, slots=True)
class Break:
    because: str
    cause: Cause | None


@dataclass(frozen=True, slots=True)
class Halt:
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


Decision = Wait | Start | Fence | Drop | Break | Halt | IssueView | Finish | GiveUp
