# SPDX-License-Identifier: Apache-2.0
"""Settings that are changed while training (`manyhands set RUN lr=3e-4`): which can be, and which
are in force.

Names with a dot are config, others belong to the optimizer's groups. A change takes effect between
two steps, on every worker, and is in the ledger before any of them may use it.
"""

from typing import Any

from manyhands.values.config import RunConfig, live_settings
from manyhands.values.errors import ConfigError
from manyhands.values.view import Settings


class LiveSettings:
    def __init__(self, config: RunConfig) -> None:
        self.config = config
        """With the changes that were made."""
        self.groups: list[dict[str, Any]] = []
        """Hyper-parameters of the optimizer; empty until training has begun."""
        self.schedule: list[str] = []
        """Kinds of schedules that act on them."""

    def change(self, changes: Settings) -> None:
        self.config = self.config.with_settings(live_settings(changes))

    def objection(self, changes: Settings) -> str | None:
        """Why these settings cannot be changed, if so."""
        if not self.groups:
            return "training has not begun yet; try again in a moment"
        known = {key: value for group in self.groups for key, value in group.items()}
        for name, value in changes.items():
            if "." not in name:
                if name not in known or name == "initial_lr":
                    return f"the optimizer has no '{name}'; it has {', '.join(sorted(known))}."
                if not isinstance(value, bool | int | float | list):
                    return f"{name} = {value!r} is not a number."
                odd = [kind for kind in self.schedule if kind in ("OneCycleLR", "CyclicLR")]
                if name == "lr" and odd:
                    return f"{odd[0]} has no base rate that could be changed while it goes on."
        try:
            config = self.config.with_settings(live_settings(changes))
        except ConfigError as error:
            return str(error)
        if config.evaluate is not None and self.config.evaluate is None:
            return "this run does not evaluate while it trains; there is no interval to change."
        return None

    def rates(self) -> list[float | None]:
        return [group.get("lr") for group in self.groups]
