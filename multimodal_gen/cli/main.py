"""The command line: `sglang`, also installed as `multimodal-gen`.

This module and the ones it imports load neither torch nor diffusers, so that `--help` is instant;
each command imports what it needs when it runs.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer

from multimodal_gen import __version__
from multimodal_gen.cli import attention, sta
from multimodal_gen.cli.dotted import fold_dotted
from multimodal_gen.cli.generate import generate
from multimodal_gen.cli.usage import CommandLineError, describe
from multimodal_gen.errors import MultimodalGenError, RankError

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
attention.app.add_typer(sta.app, name="sta")
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
        Exit status: 0; 2 when the user asked for something that cannot be done (one line on
        stderr); 130 after Ctrl-C; 1 when a rank of several was lost, or nobody reads the output any
        more. Any other exception is a defect and keeps its traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    with _noting_interrupts() as interrupts:
        try:
            arguments = fold_dotted(arguments)
            command = typer.main.get_command(app)
            with command.make_context(_program_name(), arguments) as context:
                command.invoke(context)
        except typer.Exit as exit_:
            return exit_.exit_code
        except BaseException as error:
            if interrupts or isinstance(error, KeyboardInterrupt):
                typer.echo("interrupted", err=True)
                return 130
            return _failed(error, arguments)
    return 0


def _failed(error: BaseException, arguments: Sequence[str]) -> int:
    """Say what is wrong and return the exit status; raise `error` again where it is a defect."""
    if isinstance(error, CommandLineError):
        text = describe(error, arguments)
        typer.echo(text if "\n" in text else f"error: {text}", err=True)
        return 2
    if isinstance(error, MultimodalGenError):
        typer.echo(f"error: {_one_line(error)}", err=True)
        return 1 if isinstance(error, RankError) else 2
    if isinstance(error, BrokenPipeError):
        # What is left in the buffer would fail again, with a message, when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    raise error


@contextmanager
def _noting_interrupts() -> Iterator[list[int]]:
    """Yield a list that Ctrl-C adds to.

    An import that Ctrl-C breaks off often ends in another exception than `KeyboardInterrupt`.
    """
    interrupts: list[int] = []
    earlier = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    if earlier is not signal.default_int_handler or not _in_main_thread():
        yield interrupts  # Ctrl-C is someone else's
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, earlier)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _program_name() -> str:
    """Return the name the user typed, so that usage lines can be copied."""
    name = os.path.basename(sys.argv[0])
    return name if name in ("sglang", "multimodal-gen") else "sglang"


def _one_line(error: MultimodalGenError) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
