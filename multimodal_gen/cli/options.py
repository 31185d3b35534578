"""The flags of commands that are settings, made from where the settings are declared."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from multimodal_gen.cli.completion import COMPLETIONS
from multimodal_gen.errors import ConfigError
from multimodal_gen.files import MalformedError
from multimodal_gen.settings import Setting, declared, expanded, read_scalar

Settings: TypeAlias = Mapping[str, Any]
"""What was typed, or the defaults, by name of the setting."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_ARGUMENT = "settings"
_CONTEXT = "context"


class _GivenOnce:
    """What refuses a flag given twice, of which the parser would drop the first without a word.

    Flags that may be repeated make lists of their values, and --help acts whatever else is there.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # a shell asks for completions
            parser = self.make_parser(ctx)  # type: ignore[attr-defined]
            *_, order = parser.parse_args(args=list(args))  # which the parser empties
            at_once = any(parameter.is_eager for parameter in order)
            for parameter, count in Counter(order).items():
                if count > 1 and not (parameter.multiple or at_once):
                    raise typer.BadParameter(
                        f"must be given once, got it {count} times", ctx=ctx, param=parameter
                    )
        rest: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        return rest


class _Command(_GivenOnce, TyperCommand):
    pass


class _Group(_GivenOnce, TyperGroup):
    pass


class App(typer.Typer):
    """Commands, each of which takes a flag once, and so does what stands in front of them.

    Help is plain: with a markup mode, square brackets in it and in messages would be styles.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=_Group, no_args_is_help=True, rich_markup_mode=None, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[_Function], _Function]:
        """Return a decorator that makes a function a command."""
        return super().command(name, cls=_Command, **options)


def takes(
    *settings: Setting, given_only: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command its flags.

    A parameter that is annotated with a `Setting`, as fields of `ServerArgs` are, is a flag of its
    name. The values of `settings` it gets as one argument, `settings`; help lists them where that
    stands.

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
            run(**({_ARGUMENT: typed} if settings else {}), **values)

        parameters = [
            *_parameters(run, settings, required=not given_only),
            inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
        ]
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
    """Yield the parameters of a command as typer takes them."""
    for name, parameter in inspect.signature(run).parameters.items():
        default = MISSING if parameter.default is parameter.empty else parameter.default
        if name == _ARGUMENT:
            yield from (_parameter(setting, required=required) for setting in settings)
        elif any(isinstance(it, Setting) for it in get_args(parameter.annotation)):
            setting = declared(name, parameter.annotation, default)
            yield _parameter(setting, paths=setting.kind is Path)
        else:
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)


def _was_given(context: typer.Context, name: str) -> bool:
    """Tell whether a flag was typed; its value may be the default all the same."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _parameter(
    setting: Setting, *, required: bool = True, paths: bool = False
) -> inspect.Parameter:
    default, text = setting.default, setting.help + _range(setting)
    if default is MISSING:
        default = inspect.Parameter.empty if required else None
        text += "" if required else " [required, here or in --config]"
    kind: Any = setting.kind
    if kind is Path:  # as text: of an empty one a path would make the folder one is in
        kind, default = str, str(default) if isinstance(default, Path) else default
    # What a configuration file switches on, the command line can switch off.
    flag = f"{setting.flag}/--no-{setting.flag[2:]}" if kind is bool else setting.flag
    listed: Any = list[kind] if setting.many else kind
    option = typer.Option(
        *filter(None, (flag, setting.short)),
        metavar=setting.metavar or (f"<{'|'.join(setting.choices)}>" if setting.choices else None),
        parser=reader(setting) if setting.choices or paths or kind in (int, float) else None,
        help=text,
        show_default=kind is not bool,
        autocompletion=COMPLETIONS.get(setting.name) or _completion(setting),
    )
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[listed | None if default is None else listed, option],
    )


def _range(setting: Setting) -> str:
    if setting.ge is None:
        return ""
    return f" [>= {setting.ge}]" if setting.le is None else f" [{setting.ge} to {setting.le}]"


def reader(setting: Setting) -> Callable[[Any], Any]:
    """Return what reads one value of a flag.

    What is wrong it says in this package's words, in front of which `main` puts the flag.
    """
    one = replace(setting, many=False)

    def read(given: Any) -> Any:
        value = given
        if isinstance(given, str) and one.kind in (int, float):
            with suppress(MalformedError):
                value = read_scalar(given)
        try:
            found = one.normalised(given if isinstance(value, bool) or value is None else value)
            return expanded(found, one.flag) if isinstance(found, Path) else found
        except ConfigError as error:
            raise typer.BadParameter(str(error).removeprefix(f"{one.flag} ")) from None

    return read


def _completion(setting: Setting) -> Callable[[str], list[str]] | None:
    if not setting.choices:
        return None
    return lambda incomplete: [each for each in setting.choices if each.startswith(incomplete)]


def _plain(value: object) -> object:
    return None if value == [] else value  # how some releases say that a flag was not given
