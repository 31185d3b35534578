"""Puts what is wrong with a command line into one line: what was typed, and what is valid."""

from collections.abc import Iterator, Sequence
from typing import Any

import typer

from multimodal_gen.errors import nearest

__all__ = ["CommandLineError", "describe"]

# Typer brings click's exceptions from click or, in later releases, from a copy inside itself; of
# those it exports only this subclass of the one that stands for everything the user mistyped.
CommandLineError: type[Exception] = typer.BadParameter.__mro__[1]


def describe(error: Any, arguments: Sequence[str]) -> str:
    """Return an error in one line; in several only where it is the help that was asked for.

    Args:
        error: a `CommandLineError`.
        arguments: the arguments it is about.
    """
    context = error.ctx
    if context is None:
        return _plain(error)
    if error.message == context.get_help():  # a group without a command
        return str(error.message)
    problem = _problem(error, arguments)
    return problem if problem.endswith("?") else f"{problem}; see `{context.command_path} --help`"


def _problem(error: Any, arguments: Sequence[str]) -> str:
    if hasattr(error, "option_name") and hasattr(error, "possibilities"):
        valid = [name for parameter in error.ctx.command.params for name in parameter.opts]
        return f"no such option {error.option_name!r}{nearest(error.option_name, valid)}"
    parameter = getattr(error, "param", None)
    if parameter is None:
        return _plain(error)
    name = parameter.opts[0]
    if hasattr(error, "param_type"):
        return f"{name} must be given"
    return _invalid(name, _last_value(parameter.opts, arguments), error.message)


def _invalid(name: str, value: str | None, message: str) -> str:
    """Return what a value must be, from the message of the library that checked it."""
    text = " ".join(message.split()).removeprefix("Value error, ").rstrip(".")
    _, one_of, choices = text.partition(" is not one of ")
    if one_of:
        return f"{name} must be one of {choices}, got {value!r}"
    if text.startswith("Input should be "):
        rule = text.removeprefix("Input should be ").partition(", ")[0]
        return f"{name} must be {rule}, got {value!r}"
    return f"{name} must be valid, got {value!r}: {text}"


def _last_value(names: Sequence[str], arguments: Sequence[str]) -> str | None:
    found = list(_values(names, arguments))
    return found[-1] if found else None


def _values(names: Sequence[str], arguments: Sequence[str]) -> Iterator[str]:
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name not in names:
            continue
        if equals:
            yield value
        elif index + 1 < len(arguments):
            yield arguments[index + 1]


def _plain(error: Any) -> str:
    text = " ".join(error.format_message().split()).rstrip(".")
    return text[:1].lower() + text[1:]
