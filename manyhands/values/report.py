# SPDX-License-Identifier: Apache-2.0
"""What a run came to: returned by `mh.train` and `mh.report`, kept as report.json.

The numbers are the report's own. What is longer (history, config, verdict) is read from the run's
folder when it is asked for.
"""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

import msgspec

from manyhands.values import events
from manyhands.values.byte_sizes import shown_bytes
from manyhands.values.config import RunConfig, read_toml
from manyhands.values.errors import RunDirError
from manyhands.values.plain_names import plain_name
from manyhands.values.run_folder import RunDir
from manyhands.values.verdict import Verdict

if TYPE_CHECKING:
    from torch.nn import Module


class LoadsModel(Protocol):
    """What a report's maker gives it: how its model is loaded."""

    def __call__(self, *, step: int | None, weights: str) -> "Module": ...


class Report(msgspec.Struct, frozen=True, kw_only=True, dict=True):
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
    best_step: int | None = None
    """The one that checkpoint.keep_best keeps: `report.load(step=report.best_step)`."""
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
    def path(self) -> Path:
        """The run folder."""
        return Path(self.run)

    @property
    def weights(self) -> Path:
        """The safetensors file of the last step."""
        return RunDir(self.path).step(self.step) / "model.safetensors"

    @property
    def config(self) -> RunConfig:
        """What it was trained with."""
        return read_toml(RunDir(self.path).config)[0]

    @property
    def verdict(self) -> Verdict | None:
        """Of the last failure, recovered from or not; None where there was none."""
        try:
            return msgspec.json.decode(RunDir(self.path).verdict.read_bytes(), type=Verdict)
        except FileNotFoundError:
            return None

    def history(self) -> list[dict[str, float]]:
        """A row for each step: `step`, its `loss`, and where they were logged or scored `epoch`,
        `lr`, the numbers beside the loss, and `held_out/NAME`. `pandas.DataFrame(...)` takes it."""
        rows: dict[int, dict[str, float]] = {}
        for step, loss in events.read_losses(RunDir(self.path).losses).items():
            rows[step] = {"step": step, "loss": loss}
        for event in events.read_events(RunDir(self.path).events):
            match event:
                case events.Stepped():
                    row = rows.setdefault(event.step, {"step": event.step, "loss": event.loss})
                    row |= {"epoch": event.epoch, "lr": event.lr, **event.numbers}
                case events.Evaluated():
                    row = rows.setdefault(event.step, {"step": event.step})
                    found = events.numbers_of(event.scores)
                    row |= {f"held_out/{name}": value for name, value in found.items()}
                case _:
                    pass
        return [rows[step] for step in sorted(rows) if step <= self.step]

    def load(self, *, step: int | None = None, weights: str = "trained") -> "Module":
        """The model with its weights, in eval mode, as `mh.load` gives it."""
        how: LoadsModel | None = vars(self).get("how")
        if how is None:
            raise RunDirError(f"this report was made by hand; use mh.load({self.run!r}, task).")
        return how(step=step, weights=weights)

    def loaded_by(self, how: LoadsModel) -> Self:
        vars(self)["how"] = how  # not a field: it is not written down, and compares as nothing
        return self

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

    def __repr__(self) -> str:
        lines = self._lines()
        width = max(map(len, lines))
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())

    def _repr_html_(self) -> str:
        """For notebooks."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th>"
            f"<td style='text-align:left'>{escape(text)}</td></tr>"
            for name, text in self._lines().items()
        )
        return f"<table>{rows}</table>"

    def _lines(self) -> Mapping[str, str]:
        speed = f"{self.seconds:.1f} s, {self.samples_per_s:,.0f} records/s"
        lost = f", workers lost {self.recoveries} times" if self.recoveries else ""
        return {
            "run": self.run,
            "ended": f"{self.because} (step {self.step:,}, {self.epochs:.4g} epochs)",
            "loss": f"{self.loss:.6g}",
            **{f"held-out {name}": f"{value:.6g}" for name, value in self.scores.items()},
            **({} if self.best_step is None else {"best step": f"{self.best_step:,}"}),
            "took": f"{speed}, {_workers(self.workers)}{lost}",
            "memory": shown_bytes(self.peak_memory_bytes),
            "fingerprint": self.fingerprint,
        }


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count != 1)}"
