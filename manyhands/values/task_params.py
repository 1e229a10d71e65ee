# SPDX-License-Identifier: Apache-2.0
"""Parameters of a task: `def task(lr=1e-3, width=64)`, and what was given for them.

A value has the type of its default; so what `--param` gives as text, TOML as a value and Python as
an object comes to the same, and a run's record of it to what it was. Settling what is settled
changes nothing.
"""

import difflib
import inspect
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import Any

from manyhands.values.errors import ConfigError, TaskError
from manyhands.values.toml_values import read_value, written_value

Params = Mapping[str, Any]
GivenParams = Mapping[str, Any] | Sequence[str]
"""Name → value, or texts name=value."""

PLAIN = {"int": int, "float": float, "bool": bool, "str": str, "Path": Path}
IN_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    tuple: "a list",
    list: "a list",
}
EMPTY = inspect.Parameter.empty
THESE = "Numbers, text, true, false, lists of these (and None, if that is the default) can be."


@dataclass(frozen=True, slots=True)
class GivenText:
    """Text from a command line, which is of no type yet."""

    text: str


def given_params(given: GivenParams) -> dict[str, Any]:
    """By name. What a command line gives stays text until its type is known."""
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, str):
        raise ConfigError(f'params is the text {given!r}; write params={{"lr": 3e-4}}.')
    found: dict[str, Any] = {}
    for one in given:
        name, sign, text = one.partition("=")
        if not sign or not name.strip():
            raise ConfigError(f"--param {one}: write it as name=value, as in --param lr=3e-4.")
        if "." in name:
            raise ConfigError(
                f"--param {one}: that is no parameter of a task. Settings of the run are given by "
                f"--set {one}"
            )
        found[name.strip().replace("-", "_")] = GivenText(text.strip())
    return found


def read_params(path: Path) -> dict[str, Any]:
    """The [params] of a TOML file, which is sound otherwise."""
    found = tomllib.loads(path.read_text()).get("params", {})
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: write [params] and the task's parameters below it.")
    return found  # pyright: ignore[reportUnknownVariableType]


def settled(function: Callable[..., Any], given: Params, where: object) -> dict[str, Any]:
    """A value for every parameter of `function` that has one which can be written down.

    Complains about names that it has not, values of another type, and what is missing.
    """
    parameters = inspect.signature(function).parameters
    named = [p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for name in given:
            if name not in {p.name for p in named}:
                raise ConfigError(_unknown(name, named, where))
    found: dict[str, Any] = {}
    for parameter in named:
        name, default = parameter.name, parameter.default
        if name in given:
            found[name] = _typed(name, given[name], default, parameter.annotation)
        elif default is EMPTY:
            raise ConfigError(
                f"task({_listed(named)}) of {where} needs a value: --param {name}=... (in Python "
                f'params={{"{name}": ...}})'
            )
        elif _can_be_written(default):
            found[name] = default
    others = [name for name in given if name not in {p.name for p in named}]
    return found | {name: _free(name, given[name], none=False) for name in others}


def called(function: Callable[..., Any], params: Params) -> Any:
    """`function` with these values, whichever way it takes them."""
    before, by_name = list[Any](), dict(params)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.name in by_name:
            before.append(by_name.pop(parameter.name))
    return function(*before, **by_name)


def recorded(params: Params) -> dict[str, Any]:
    """As it is written down and sent: what is None by default is left out, a path is text."""
    kept = {name: value for name, value in params.items() if value is not None}
    return {n: str(value) if isinstance(value, PurePath) else value for n, value in kept.items()}


def params_text(params: Params) -> str:
    """`lr=0.0003 width=128`"""
    return " ".join(f"{name}={_shown(value)}" for name, value in params.items())


def refuse_other_params(run: object, before: Params, after: Params, again: str) -> None:
    """The steps already taken followed from them. `again`: the command that begins a new run."""
    for name in [*after, *(n for n in before if n not in after)]:
        was, now = before.get(name), after.get(name)
        if written_value(was) != written_value(now):
            raise ConfigError(
                f"--param {name}={_shown(now)}: {name} is part of the result, and the steps that "
                f"{run} has taken were taken with {name}={_shown(was)}. A run keeps it for life; "
                f"start a new one: {again} --param {name}={_shown(now)} (from these weights: "
                f"--set {shlex.quote(f'train.start_from={run}')}). What a parameter does is not "
                "known here: if it only says how many rows a table may have (mh.Embedding), which "
                "is no part of the result, write the number into the task's file and resume."
            )


def _typed(name: str, value: Any, default: Any, annotation: Any) -> Any:
    kind = _kind(default, annotation)
    if kind is None:
        if default is None or default is EMPTY:
            return _free(name, value, none=default is None)
        raise ConfigError(
            f"--param {name}: its default is of type {type(default).__name__}, which cannot be "
            f"written down. {THESE}"
        )
    try:
        return _as(kind, value, default)
    except ValueError:
        said = value.text if isinstance(value, GivenText) else _shown(value)
        usual = "" if default is EMPTY else f" (by default {_shown(default)})"
        what = IN_WORDS[kind]
        items: Any = default
        if kind in (tuple, list) and (of := _kind_of_items(items)) is not None:
            what = f"a list, each of it {IN_WORDS[of]}"
        raise ConfigError(f"--param {name}={said}: {name} is {what}{usual}.") from None


def _kind(default: Any, annotation: Any) -> type | None:
    """The type that a value must have; None: any, or one that cannot be given."""
    if default is EMPTY:
        named = getattr(annotation, "__name__", annotation)
        return PLAIN.get(named) if isinstance(named, str) else None
    if isinstance(default, PurePath):
        return Path
    return type(default) if type(default) in IN_WORDS else None


def _as(kind: type, value: Any, default: Any) -> Any:
    """Raises ValueError where it cannot be one."""
    if kind in (tuple, list):
        return kind(_items(value, default))
    written = isinstance(value, GivenText)
    if kind is str or kind is Path:
        text = _unquoted(value.text) if written else value
        if not isinstance(text, str | PurePath):
            raise ValueError
        return kind(text)
    if kind is bool:
        found = {"true": True, "false": False}.get(value.text.lower()) if written else value
        if not isinstance(found, bool):
            raise ValueError
        return found
    if written:
        return kind(value.text)
    number: Any = value
    if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
        raise ValueError
    return kind(number)


def _items(value: Any, default: Any) -> list[Any]:
    of = None if default is EMPTY else _kind_of_items(default)
    if isinstance(value, GivenText):
        inner = value.text.strip()
        if inner[:1] + inner[-1:] in ("()", "[]"):
            inner = inner[1:-1]
        parsed = read_value(f"[{inner}]")
        if of is None or of is str:
            parts = parsed if isinstance(parsed, list) else inner.split(",")
            return [_as(str, p.strip(), EMPTY) if isinstance(p, str) else p for p in parts]
        return [_as(of, GivenText(one.strip()), EMPTY) for one in inner.split(",") if one.strip()]
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError
    items: Sequence[Any] = value
    return [item if of is None else _as(of, item, EMPTY) for item in items]


def _kind_of_items(default: Sequence[Any]) -> type | None:
    """That of all of them; None: they differ, or there is none."""
    kinds = {type(item) for item in default}
    if kinds == {int, float}:
        return float
    return kinds.pop() if len(kinds) == 1 and kinds <= {int, float, bool, str} else None


def _free(name: str, value: Any, *, none: bool) -> Any:
    """As TOML reads it; and None, where leaving it out means that too."""
    if isinstance(value, GivenText):
        value = None if none and value.text.lower() == "none" else read_value(value.text)
    if _can_be_written(value) and (none or value is not None):
        return value
    what = "None, which" if value is None else f"of type {type(value).__name__}, which"
    raise ConfigError(f"--param {name} is {what} cannot be written down for it. {THESE}")


def _unquoted(text: str) -> str:
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    found = read_value(text) if quoted else text
    return found if isinstance(found, str) else text


def _can_be_written(default: Any) -> bool:
    if isinstance(default, tuple | list):
        items: Iterable[Any] = default
        return all(item is not None and _can_be_written(item) for item in items)
    return default is None or _kind(default, EMPTY) is not None


def _shown(value: Any) -> str:
    if isinstance(value, GivenText | str):
        return value if isinstance(value, str) else value.text
    return "None" if value is None else written_value(value)


def _listed(named: Sequence[inspect.Parameter]) -> str:
    return ", ".join(
        p.name if p.default is EMPTY else f"{p.name}={_shown(p.default)}" for p in named
    )


def _unknown(name: str, named: Sequence[inspect.Parameter], where: object) -> str:
    if not named:
        return (
            f"--param {name}: task() of {where} has no parameters. Give it one: "
            f"def task({name}=...): return mh.Task(...)"
        )
    close = difflib.get_close_matches(name, [p.name for p in named], n=1, cutoff=0.5)
    meant = f"; did you mean '{close[0]}'?" if close else "."
    return f"--param {name}: the task has no such parameter{meant} It is task({_listed(named)})."


def no_params(given: Params, where: object) -> TaskError:
    """For a task that was made without any."""
    name = next(iter(given))
    return TaskError(
        f"--param {name}: {where} makes its task without parameters. Make it by a function: "
        f"def task({name}=...): return mh.Task(...)"
    )
