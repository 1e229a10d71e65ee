"""The tables of docs/options.md, and what docs/config.md says of the result, from the code itself:
`make docs` writes them anew."""

import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import manyhands as mh
from manyhands.stories.prepare import PrepareCall
from manyhands.stories.train import ResumeCall, TrainCall
from manyhands.values.config import EFFECTS
from manyhands.values.option_fields import command_option, help_texts
from manyhands.values.predict_options import PredictRequest
from manyhands.values.run_options import DoctorRequest, EvaluateRequest

PAGE = Path(mh.__file__).parent.parent / "docs" / "options.md"
SETTINGS_PAGE = PAGE.with_name("config.md")

IN_WORDS = {
    "weights": "yes",
    "saved": "beside it",
    "end": "when it ends",
    "scores": "scores",
    "timing": "by timing",
    "nothing": "no",
}
"""Of a setting's effect, in the column "result"."""

TABLES: dict[str, tuple[type, Callable[..., Any] | None]] = {
    "train": (TrainCall, mh.train),
    "resume": (ResumeCall, mh.resume),
    "evaluate": (EvaluateRequest, mh.evaluate),
    "predict": (PredictRequest, mh.predict),
    "prepare": (PrepareCall, mh.prepare),
    "doctor": (DoctorRequest, None),
}
"""Command → what it takes, and the Python function that takes the same."""


def table(request: type, *, python: bool) -> str:
    """A row for each field: how it is given to the command, how in Python, and what it means."""
    rows = ["| command | Python | default | meaning |", "|---|---|---|---|"]
    if not python:
        rows = ["| command | default | meaning |", "|---|---|---|"]
    texts = help_texts(request)
    for each in fields(request):  # type: ignore[arg-type]
        if not each.init:
            continue
        how = command_option(each)
        cells = [f"`{_flags(each.name, how)}`" if how else ""]
        cells += [f"`{each.name}`"] if python else []
        cells += [_default(each.default), texts[each.name].replace("|", "\\|")]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _flags(name: str, how: Any) -> str:
    if how.argument:
        return how.metavar
    flags = ", ".join(how.flags or (f"--{name.replace('_', '-')}",))
    return f"{flags} {how.metavar}" if how.metavar else flags


def _default(value: Any) -> str:
    if value is MISSING:
        return "needed"
    if value is None or value in ("", ()) or value is False:
        return ""
    return f"`{value}`"


def written(text: str) -> str:
    """The page with its tables made anew."""
    for name, (request, function) in TABLES.items():
        made = f"<!-- options of {name} -->\n\n{table(request, python=function is not None)}\n"
        pattern = rf"<!-- options of {name} -->\n.*?(?=\n<!-- end -->)"
        text, count = re.subn(pattern, lambda _, made=made: made, text, flags=re.DOTALL)
        assert count == 1, f"{PAGE} has no place for the options of {name}"
    return text


def with_effects(text: str) -> str:
    """The page of settings, with what each says of the result in the last column of its row."""
    section, lines = "", list[str]()
    for line in text.splitlines():
        if heading := re.fullmatch(r"## \[(\w+)\]", line):
            section = heading[1]
        elif line.startswith("#"):
            section = ""
        elif section and line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line)[1:6]
            name = cells[0].strip().strip("`")
            effect = EFFECTS.get(f"{section}.{name}")
            last = {"setting": " result ", "---": "---"}.get(name) or f" {IN_WORDS[str(effect)]} "
            line = "|" + "|".join([*cells[:4], last]) + "|"
        lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    SETTINGS_PAGE.write_text(with_effects(SETTINGS_PAGE.read_text()))
