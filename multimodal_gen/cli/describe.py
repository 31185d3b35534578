"""`sglang attention describe`: the parameters of a backend, from where it declares them."""

import json
from dataclasses import MISSING
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multimodal_gen.cli.completion import backend_names
from multimodal_gen.cli.options import AsJson
from multimodal_gen.cli.table import Row, echo, table, wrapped
from multimodal_gen.runtime.platforms.interface import AttentionBackendEnum

if TYPE_CHECKING:
    from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionBackend
    from multimodal_gen.settings import Parameter

# For examples, in place of defaults that do nothing: a sparsity of 0 leaves nothing out.
_WHERE_IDLE = MappingProxyType({"sparsity": 0.9})

_Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Backend; `sglang attention list` names them.",
        autocompletion=backend_names,
    ),
]


def describe(name: _Name, as_json: AsJson = False) -> None:
    """List a backend's parameters: type and range, default, meaning, and an example.

    They are what `--attention-backend-config` takes.
    """
    from multimodal_gen.runtime.layers.attention.backends.registry import find_backend, load_plugins
    from multimodal_gen.runtime.layers.attention.config import parameters_of
    from multimodal_gen.runtime.platforms import current_platform

    load_plugins()  # of which it may be one
    backend = AttentionBackendEnum.parse(name)
    cls = find_backend(backend, current_platform().name)
    parameters = list(parameters_of(cls.config_cls).values())
    example = _example(cls, parameters)
    if as_json:
        document = {
            "backend": str(backend),
            "summary": cls.summary,
            "parameters": [_as_dict(parameter) for parameter in parameters],
            "example": example,
        }
        typer.echo(json.dumps(document, indent=2))
        return
    echo(wrapped(f"{backend}: {cls.summary}"))
    typer.echo("")
    if parameters:
        rows = [
            Row((p.name, "must be given" if p.required else _text(p.default)), _details(p))
            for p in parameters
        ]
        echo(table(("parameter", "default"), rows))
    else:
        typer.echo("It has no parameters.")
    typer.echo("")
    echo(wrapped(f"example: {example}"))


def _details(parameter: "Parameter") -> list[str]:
    also = f" (also written {', '.join(parameter.aliases)})" if parameter.aliases else ""
    text = f"{parameter.help}{also}"
    takes = f"takes {parameter.expected}"
    return [text, takes] if text else [takes]


def _text(value: object) -> str:
    """Return a value as `k=v` spells it."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_text, value))}]"
    if value is None or isinstance(value, bool):
        return str(json.dumps(value))
    return str(value)


def _as_dict(parameter: "Parameter") -> dict[str, Any]:
    default = parameter.default
    plain = isinstance(default, (bool, int, float, str, tuple, type(None)))
    return {
        "name": parameter.name,
        "takes": parameter.expected,
        "required": parameter.required,
        "default": None if default is MISSING else default if plain else str(default),
        "aliases": list(parameter.aliases),
        "help": parameter.help,
    }


def _example(cls: "type[AttentionBackend]", parameters: "list[Parameter]") -> str:
    """Return a command with what the backend needs, or with its first parameters."""
    given = [
        f"{p.name}={_text(p.default or _WHERE_IDLE.get(p.name, p.default))}"
        for p in parameters
        if not p.required and p.default not in (None, "") and not p.name.startswith("dense_")
    ]
    config = cls.config_cls.example or ",".join(given[:3])
    rest = f" --attention-backend-config '{config}'" if config else ""
    return f"sglang generate ... --attention-backend {cls.backend}{rest}"
