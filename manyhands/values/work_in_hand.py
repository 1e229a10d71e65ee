# SPDX-License-Identifier: Apache-2.0
"""What a worker is at: said in its heartbeats, and left behind when it dies (`WorkMark`)."""

from typing import Annotated, Literal, get_args

import msgspec

from manyhands.values.bounded_types import Natural

Kind = Literal["build", "join", "compute", "update", "rest", "evaluate", "score", "batch_loss"]
"""Building the task; taking a place in a view; a micro-batch; what follows the last one in a step;
what is done between steps; a batch of held-out records; putting their results together; the loss of
a whole batch."""
KINDS: tuple[Kind, ...] = get_args(Kind)


class WorkInHand(msgspec.Struct, frozen=True):
    kind: Kind = "build"
    step: Natural = 0
    """So many steps were done before it."""
    index: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 53)] = -1
    """Which micro-batch, or which batch of held-out records."""

    @property
    def of_user(self) -> bool:
        """The user's code runs in it, and would run again wherever it is done again."""
        return self.kind in ("compute", "update", "evaluate", "score", "batch_loss")

    @property
    def has_records(self) -> bool:
        return self.kind in ("compute", "evaluate")

    def __str__(self) -> str:
        match self.kind:
            case "build":
                return "building the task"
            case "join":
                return "taking its place"
            case "compute":
                return f"micro-batch {self.index} of step {self.step}"
            case "update":
                return f"the update of step {self.step}"
            case "rest":
                return f"what follows step {self.step - 1}"
            case "evaluate":
                return f"held-out batch {self.index} after step {self.step}"
            case "score":
                return f"the scores after step {self.step}"
            case "batch_loss":
                return f"the batch loss of step {self.step}"
