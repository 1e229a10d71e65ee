# SPDX-License-Identifier: Apache-2.0
"""A setting says, where it is defined, what of the result follows from it.

Whoever has to know (resume, replay, `manyhands set`, the docs) asks the field. A setting that says
nothing is refused when it is defined: see `effect_of`.

    class TrainConfig:
        batch: int = setting(128, "weights")
        overlap: bool = setting(True, "nothing")
"""

from dataclasses import Field, field
from typing import Any, Literal, get_args

Effect = Literal["weights", "saved", "end", "scores", "timing", "nothing"]
"""What follows from a setting. "weights": the bits of every step, so that a run keeps it for life.
"saved": what is saved beside the weights, over the whole run, so that it keeps this for life too.
"end": which step is the last. "scores": their last bits. "timing": whether the weights follow from
the other settings alone, or also from when things happened; a run may go on otherwise, and its
ledger keeps which of its steps were taken how. "nothing": how, where and how fast."""


def setting(default: Any, effect: Effect, *, live: bool = False) -> Any:
    """A field of a config; `live`: `manyhands set` may change it, and the ledger keeps at which
    step."""
    assert effect in get_args(Effect), effect
    return field(default=default, metadata={"effect": effect, "live": live})


def effect_of(of: "Field[Any]") -> Effect:
    if "effect" not in of.metadata:
        raise TypeError(
            f"the setting '{of.name}' does not say what follows from it: define it with "
            f"setting(default, effect), effect being one of {', '.join(get_args(Effect))}."
        )
    return of.metadata["effect"]


def is_live(of: "Field[Any]") -> bool:
    return bool(of.metadata.get("live", False))
