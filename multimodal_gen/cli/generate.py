"""`sglang generate`: a prompt in, an image or a video out."""

from dataclasses import fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import typer

from multimodal_gen import __version__
from multimodal_gen.cli.options import AttentionOptions, GenerateOptions, takes

if TYPE_CHECKING:
    from multimodal_gen.runtime.generator import Attach, Generated
    from multimodal_gen.runtime.server_args import ServerArgs

__all__ = ["generate", "server_args"]


@takes(GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Generate an image or a video with a diffusers pipeline.

    Writes a PNG or an MP4, with a JSON file beside it: versions, arguments, timings, and the
    backend of every attention layer with the reason for it. Nothing is overwritten unless asked
    for, and an interrupted run leaves no file.
    """
    from multimodal_gen.runtime import generator

    args, reason = _settle_backend(options)
    try:
        generated = generator.generate(
            args,
            attach=_attach(args, explicit=options.backend.value != "auto"),
            facts={
                "multimodal_gen": __version__,
                "backend": args.backend,
                "backend_reason": reason,
            },
        )
    except KeyboardInterrupt:
        typer.echo("interrupted; no file was written", err=True)
        raise typer.Exit(130) from None
    _print(generated, args.backend, reason)


def server_args(options: AttentionOptions, **changes: Any) -> "ServerArgs":
    """Return the checked arguments of a run.

    Args:
        options: the parsed flags; their names are those of `ServerArgs`.
        **changes: fields that differ from the flags.

    Raises:
        ConfigError: a value is wrong, or contradicts another.
    """
    from multimodal_gen.runtime.server_args import ServerArgs

    names = {field.name for field in fields(ServerArgs)} & {field.name for field in fields(options)}
    values = {name: getattr(options, name) for name in names}
    plain = {k: v.value if isinstance(v, Enum) else v for k, v in values.items()}
    return ServerArgs(**{**plain, **changes})


def _settle_backend(options: GenerateOptions) -> tuple["ServerArgs", str]:
    """Return the arguments with `backend` decided, and why it was decided so."""
    from multimodal_gen.runtime.generator import choose_backend

    name = options.attention_backend
    if name is not None and name.strip().lower() in ("", "auto"):
        options = replace(options, attention_backend=None)
    backend, reason = choose_backend(options.backend.value, options.attention_backend)
    return server_args(options, backend=backend), reason


def _attach(args: "ServerArgs", *, explicit: bool) -> "Attach":
    """Return what attaches attention to the loaded pipeline."""
    from multimodal_gen.errors import NothingAppliedError
    from multimodal_gen.runtime.generator import AttentionSession, DiffusersAttention

    if args.backend == "diffusers":
        name = None if args.attention_backend is None else str(args.attention_backend)
        return lambda pipe: DiffusersAttention(pipe, name)

    from multimodal_gen.integrations.diffusers import apply
    from multimodal_gen.runtime.layers.attention.attention_config import (
        refuse_not_in_this_build,
        scope_from_args,
    )

    scope = scope_from_args(args)
    refuse_not_in_this_build(scope)
    nothing_asked = not (explicit or scope.default or scope.components or scope.rules)

    def attach(pipe: Any) -> AttentionSession:
        try:
            return apply(pipe, scope=scope)
        except NothingAppliedError as error:
            if not nothing_asked:
                raise
            return DiffusersAttention(pipe, notes=(f"runs as diffusers ships it: {error}",))

    return attach


def _print(generated: "Generated", backend: str, reason: str) -> None:
    for path in generated.media:
        typer.echo(path)
    typer.echo(f"record: {generated.record}")
    if generated.latents:
        typer.echo(f"latents: {generated.latents}")
    typer.echo(f"seed: {generated.seed}")
    typer.echo(f"attention: {backend} ({reason})")
    for line in generated.report.summary().splitlines():
        typer.echo(f"  {line}")
    for note in generated.notes:
        typer.echo(f"note: {note}", err=True)
