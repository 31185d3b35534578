"""The command line: `sglang`, also installed as `multimodal-gen`.

This module and the ones it imports load neither torch nor diffusers, so that `--help` is instant;
each command imports what it needs when it runs.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from multimodal_gen import __version__
from multimodal_gen.cli import attention
from multimodal_gen.cli.dotted import fold_dotted
from multimodal_gen.cli.generate import generate
from multimodal_gen.errors import MultimodalGenError

__all__ = ["app", "main"]

# Plain help: with a markup mode, square brackets in help and messages would be read as styles.
app = typer.Typer(
    name="sglang",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command()(generate)
app.add_typer(attention.app, name="attention")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"multimodal_gen {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Run diffusion pipelines on the attention backend of your choice, and say which one ran."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments after the program's name; those of the process when None.

    Returns:
        Exit status: 0, 2 when the user asked for something that cannot be done (one line on
        stderr), 130 after Ctrl-C. Any other exception is a defect and keeps its traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = typer.main.get_command(app)
    try:
        command.main(args=fold_dotted(arguments), prog_name=_program_name())
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except MultimodalGenError as error:
        typer.echo(f"error: {_one_line(error)}", err=True)
        return 2
    return 0


def _program_name() -> str:
    """Return the name the user typed, so that usage lines can be copied."""
    name = os.path.basename(sys.argv[0])
    return name if name in ("sglang", "multimodal-gen") else "sglang"


def _one_line(error: MultimodalGenError) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
