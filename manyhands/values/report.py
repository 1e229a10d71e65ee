# SPDX-License-Identifier: Apache-2.0
"""What a run came to: returned by `mh.train`, kept as report.json."""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from manyhands.values.plain_names import plain_name

if TYPE_CHECKING:
    from torch.nn import Module


class Report(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    """The run folder."""
    step: int
    epochs: float
    because: str
    """Why it ended: all steps done, or stopped early and why."""
    loss: float
    """Of the last step."""
    scores: dict[str, float]
    """On the held-out records; empty when there are none."""
    fingerprint: str
    """SHA-256 of the weights."""
    workers: int
    """At the end."""
    recoveries: int = 0
    """How often workers were lost and training went on."""
    seconds: float
    samples_per_s: float
    first_step_s: float
    """From the command to the end of the first step."""
    peak_memory_bytes: int
    """Of all processes of the run together (each at its own peak)."""

    @property
    def weights(self) -> Path:
        """The safetensors file of the last step."""
        return Path(self.run) / "checkpoints" / f"step-{self.step:08d}" / "model.safetensors"

    def load_into(self, model: "Module") -> "Module":
        """Give `model` the trained weights. It, or parts of it, may be compiled."""
        from safetensors.torch import load_file

        saved, here = load_file(self.weights), model.state_dict(keep_vars=True)
        names = {plain_name(name): name for name in here}
        given = {names.get(name, name): tensor for name, tensor in saved.items()}
        known = {id(here[name]) for name in given if name in here}
        for name, tensor in here.items():  # tied ones are stored once
            if name not in given and id(tensor) in known:
                given[name] = tensor
        model.load_state_dict(given)
        return model
