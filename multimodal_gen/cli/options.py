"""The flags of commands that are settings, made from where the settings are declared."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from multimodal_gen.cli.completion import COMPLETIONS
from multimodal_gen.errors import ConfigError, short
from multimodal_gen.files import MalformedError
from multimodal_gen.settings import Setting, expanded, read_scalar

Settings: TypeAlias = Mapping[str, Any]
"""What was typed, or the defaults, by name of the setting."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

_ARGUMENT = "settings"
_CONTEXT = "context"


def takes(
    *settings: Setting, given_only: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each of `settings`, whose values it gets as `settings`.

    Help lists the flags where that argument stands among the command's own.

    Args:
        settings: those of `ServerArgs`, or others declared in the same way.
        given_only: pass those alone that were typed, and require none.
    """

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            context: typer.Context = values.pop(_CONTEXT)
            typed = {setting.name: _plain(values.pop(setting.name)) for setting in settings}
            if given_only:
                typed = {name: it for name, it in typed.items() if _was_given(context, name)}
            run(**{_ARGUMENT: typed}, **values)

        parameters = list(_parameters(run, settings, required=not given_only))
        context = inspect.Parameter(
            _CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context
        )
        parameters.append(context)
        command.__name__ = run.__name__
        command.__doc__ = run.__doc__
        # Typer reads these two.
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate


def _parameters(
    run: Callable[..., None], settings: tuple[Setting, ...], *, required: bool
) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a command, with those of the settings in place of `settings`."""
    for name, parameter in inspect.signature(run).parameters.items():
        if name == _ARGUMENT:
            yield from (_parameter(setting, required=required) for setting in settings)
        else:
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)


def _was_given(context: typer.Context, name: str) -> bool:
    """Tell whether a flag was typed; its value may be the default all the same."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _parameter(setting: Setting, *, required: bool) -> inspect.Parameter:
    default, text = setting.default, setting.help + _range(setting)
    if default is MISSING:
        default = inspect.Parameter.empty if required else None
        text += "" if required else " [required, here or in --config]"
    kind: Any = setting.kind
    if kind is Path:  # as text: of an empty one a path would make the folder one is in
        kind, default = str, None if default is None else str(default)
    if setting.many:
        kind = list[kind]
    # What a configuration file switches on, the command line can switch off.
    flag = f"{setting.flag}/--no-{setting.flag[2:]}" if kind is bool else setting.flag
    option = typer.Option(
        *filter(None, (flag, setting.short)),
        metavar=setting.metavar or (f"<{'|'.join(setting.choices)}>" if setting.choices else None),
        parser=reader(setting) if setting.choices or setting.kind in (int, float) else None,
        help=text,
        show_default=kind is not bool,
        autocompletion=COMPLETIONS.get(setting.name) or _completion(setting),
    )
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind | None if default is None else kind, option],
    )


def _range(setting: Setting) -> str:
    if setting.ge is None:
        return ""
    return f" [>= {setting.ge}]" if setting.le is None else f" [{setting.ge} to {setting.le}]"


def reader(setting: Setting) -> Callable[[Any], Any]:
    """Return what reads one value of a flag, with this package's words for what is wrong."""
    one = replace(setting, many=False)

    def read(given: Any) -> Any:
        value = given
        if isinstance(given, str) and one.kind in (int, float):
            with suppress(MalformedError):
                value = read_scalar(given)
        try:
            return one.normalised(given if isinstance(value, bool) or value is None else value)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from None

    return read


def number_of(flag: str, kind: type, ge: float | None = None, le: float | None = None) -> Any:
    """Return what reads a number of a flag that is no setting."""
    return reader(Setting(help="", name=flag.removeprefix("--"), kind=kind, ge=ge, le=le))


def path_of(flag: str) -> Callable[[Any], Path]:
    """Return what reads a path, with `~` expanded."""

    def read(given: Any) -> Path:
        try:
            if str(given).strip():
                return expanded(given, flag)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from None
        raise typer.BadParameter(f"{flag} must be a file or folder, got {short(given)}")

    return read


def _completion(setting: Setting) -> Callable[[str], list[str]] | None:
    if not setting.choices:
        return None
    return lambda incomplete: [each for each in setting.choices if each.startswith(incomplete)]


def _plain(value: object) -> object:
    return None if value == [] else value  # how some releases say that a flag was not given
