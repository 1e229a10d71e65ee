# SPDX-License-Identifier: Apache-2.0
"""Options, written once: a group is a frozen dataclass whose fields have their help underneath.

From a group come the parameters of the Python function that takes it (`taking`), the command line's
options (`cli/options_from_requests.py`) and the tables in the docs (`make docs`). A request
inherits the groups that it needs, and is final.

    @dataclass(frozen=True, kw_only=True)
    class Pace:
        workers: int | str | None = option(None, cli=str, metavar="N or MIN:MAX")
        \"\"\"How many workers.\"\"\"
"""

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import cache
from typing import Any, ParamSpec, TypeVar

from manyhands.values.config import EFFECTS
from manyhands.values.errors import WrongArguments
from manyhands.values.other_words import meant, of_the_optimizer, setting_called

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CommandOption:
    """How a field is given on the command line."""

    type: Any
    """Of one value there: str, int, float, bool, Path."""
    many: bool = False
    """May be given several times."""
    flags: tuple[str, ...] = ()
    """Left out: the field's own name."""
    metavar: str | None = None
    argument: bool = False
    """By its place, not by its name."""
    panel: str | None = None
    """Under which heading --help lists it."""


def option(
    default: Any,
    *,
    cli: Any,
    many: bool = False,
    flags: tuple[str, ...] = (),
    metavar: str | None = None,
    panel: str | None = None,
) -> Any:
    """A field that the command line has too. A plain field is for Python alone."""
    how = CommandOption(cli, many, flags, metavar, panel=panel)
    return field(default=default, metadata={"cli": how})


def argument(cli: Any, metavar: str, *, many: bool = False) -> Mapping[str, CommandOption]:
    """The metadata of a field that both Python and the command line know by its place."""
    return {"cli": CommandOption(cli, many, (), metavar, argument=True)}


def command_option(of: "Field[Any]") -> CommandOption | None:
    return of.metadata.get("cli")


def help_texts(group: type) -> Mapping[str, str]:
    """Field → the text underneath it, also of the groups that it inherits."""
    found: dict[str, str] = {}
    for kind in reversed(group.__mro__[:-1]):
        found |= _texts_in(kind.__module__).get(kind.__qualname__, {})
    return {each.name: found.get(each.name, "") for each in fields(group)}


@cache
def _texts_in(module: str) -> Mapping[str, Mapping[str, str]]:
    """By class. Nothing where the source is not at hand: options then have no help, and still
    work. A module is parsed once: that is a good part of what `--help` takes."""
    try:
        body = ast.parse(inspect.getsource(sys.modules[module])).body
    except (KeyError, OSError, TypeError):
        return {}
    return {kind.name: _texts_of(kind) for kind in body if isinstance(kind, ast.ClassDef)}


def _texts_of(kind: ast.ClassDef) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for line, following in zip(kind.body, kind.body[1:], strict=False):
        match line, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
            case _:
                pass
    return found


def taking(request: Callable[P, T]) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """Makes of a function of a request one that takes the request's fields as parameters."""

    def made(function: Callable[[T], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                known = list(signature.parameters)
                unknown = next((name for name in kwargs if name not in known), None)
                more = "" if unknown is None else _where_to_put(unknown, known)
                raise WrongArguments(f"{function.__name__}(): {error}{more}") from None
            return function(request(*args, **kwargs))

        result = inspect.signature(function).return_annotation
        signature = inspect.signature(request).replace(return_annotation=result)
        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return made


def _where_to_put(name: str, known: list[str]) -> str:
    """The end of a sentence about a keyword that is not known."""
    if "settings" in known and (setting := setting_called(name, EFFECTS)) is not None:
        return f'; that is a setting: settings=["{setting}=..."]'
    if "params" in known and of_the_optimizer(name) is not None:
        return f'; that is the task\'s: params={{"{name}": ...}}, where a function makes it'
    return meant(name, known)
