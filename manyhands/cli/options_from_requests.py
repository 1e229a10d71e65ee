# SPDX-License-Identifier: Apache-2.0
"""A command's options, from the fields of the request that it carries out."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, TypeVar

import typer

from manyhands.values.option_fields import CommandOption, command_option, help_texts

T = TypeVar("T")


def options_of(request: type[T]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes of a command whose first parameter is a request one that takes an option for each of
    its fields that has any; the command's own further parameters follow."""
    given = {each.name: how for each in fields(request) if (how := command_option(each))}  # type: ignore[arg-type]

    def made(command: Callable[..., None]) -> Callable[..., None]:
        def call(**values: Any) -> None:
            chosen = {name: values.pop(name) for name in given}
            for name, how in given.items():
                chosen[name] = tuple(chosen[name] or ()) if how.many else chosen[name]
            command(request(**chosen), **values)

        _, *rest = inspect.signature(command, eval_str=True).parameters.values()
        own = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in rest]
        texts = help_texts(request)
        parameters = [
            _parameter(each, given[each.name], texts[each.name])
            for each in fields(request)  # type: ignore[arg-type]
            if each.name in given
        ]
        parameters.sort(key=lambda one: one.default is not inspect.Parameter.empty)
        call.__signature__ = inspect.Signature([*parameters, *own])  # type: ignore[attr-defined]
        call.__name__, call.__doc__ = command.__name__, command.__doc__
        return call

    return made


def _parameter(of: "Field[Any]", how: CommandOption, text: str) -> inspect.Parameter:
    default = of.default
    kind = how.type
    if how.many and default is MISSING:
        kind = list[kind]
    elif how.many:
        kind, default = list[kind] | None, None
    elif default is None:
        kind = kind | None
    if how.argument:
        more: Any = typer.Argument(metavar=how.metavar, help=text)
    else:
        flags = how.flags or (f"--{of.name.replace('_', '-')}",)
        more = typer.Option(*flags, metavar=how.metavar, help=text, rich_help_panel=how.panel)
    return inspect.Parameter(
        of.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[kind, more],
    )
