"""The flags of commands that are settings, made from where the settings are declared."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from multimodal_gen.runtime.platforms.interface import AttentionBackendEnum
from multimodal_gen.runtime.server_args import Setting

__all__ = ["AsJson", "Settings", "backend_names", "takes"]

Settings: TypeAlias = Mapping[str, Any]
"""What was typed, or the defaults, by name of the setting."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

_ARGUMENT = "settings"


def takes(*settings: Setting) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each of `settings`, whose values it gets as `settings`.

    Help lists the flags where that argument stands among the command's own.

    Args:
        settings: those of `ServerArgs`, or others declared in the same way.
    """

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            typed = {setting.name: _plain(values.pop(setting.name)) for setting in settings}
            run(**{_ARGUMENT: typed}, **values)

        parameters = list(_parameters(run, settings))
        command.__name__ = run.__name__
        command.__doc__ = run.__doc__
        # Typer reads these two.
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate


def backend_names(incomplete: str = "") -> list[str]:
    """Return the names of the built-in backends that begin with what was typed, for shells."""
    typed = incomplete.strip().lower().replace("-", "_")
    return [str(backend) for backend in AttentionBackendEnum if str(backend).startswith(typed)]


def _parameters(
    run: Callable[..., None], settings: tuple[Setting, ...]
) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a command, with those of the settings in place of `settings`."""
    for name, parameter in inspect.signature(run).parameters.items():
        if name == _ARGUMENT:
            yield from map(_parameter, settings)
        else:
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)


def _parameter(setting: Setting) -> inspect.Parameter:
    default = inspect.Parameter.empty if setting.default is MISSING else setting.default
    kind = _choices(setting) if setting.choices else setting.kind
    if setting.choices:
        default = kind(default)
    if kind is Path:  # as text: of an empty one a path would make the folder one is in
        kind, default = str, None if default is None else str(default)
    option = typer.Option(
        *filter(None, (setting.flag, setting.short)),
        metavar=setting.metavar,
        min=setting.ge,
        max=setting.le,
        help=setting.help,
        autocompletion=backend_names if setting.name == "attention_backend" else None,
    )
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind | None if default is None else kind, option],
    )


def _choices(setting: Setting) -> Any:
    named: Any = Enum  # mypy wants the name spelled out
    return named(setting.name, {choice: choice for choice in setting.choices}, type=str)


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value
