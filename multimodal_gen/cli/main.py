"""The command line: `sglang`, also installed as `multimodal-gen`.

This module and the ones it imports load neither torch nor diffusers, so that `--help` is instant;
each command imports what it needs when it runs. What is wrong with a command line is said in one
line: what was typed, and what is valid.
"""

import errno
import io
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from types import FrameType
from typing import Annotated, Any

import typer

from multimodal_gen._version import __version__
from multimodal_gen.cli import attention, sta
from multimodal_gen.cli.bench import bench
from multimodal_gen.cli.calibrate import calibrate
from multimodal_gen.cli.compare import compare
from multimodal_gen.cli.dotted import fold_dotted
from multimodal_gen.cli.generate import generate
from multimodal_gen.cli.options import App, reader
from multimodal_gen.cli.recommend import recommend
from multimodal_gen.cli.warm import warm
from multimodal_gen.errors import MultimodalGenError, RankError, nearest, short
from multimodal_gen.settings import Setting

app = App(
    name="sglang",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command()(generate)
attention.app.command()(bench)
attention.app.command()(calibrate)
attention.app.command()(compare)
attention.app.command()(recommend)
attention.app.command()(warm)
attention.app.add_typer(sta.app, name="sta")
app.add_typer(attention.app, name="attention")


# Both may stand behind the command's name, too.
_TRACEBACK, _LOG_LEVEL = "--traceback", "--log-level"


_LEVELS = Setting(choices=("debug", "info", "warning", "error"), help="")


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
    whole_errors: Annotated[
        bool,
        typer.Option(_TRACEBACK, help="Print all of an error, also behind the command's name."),
    ] = False,
    log_level: Annotated[
        str,
        typer.Option(
            _LOG_LEVEL,
            metavar=f"<{'|'.join(_LEVELS.choices)}>",
            parser=reader(_LEVELS),
            help="How much is said on stderr; error: errors alone.",
        ),
    ] = "warning",
) -> None:
    """Run diffusion pipelines on the attention backend of your choice, and say which one ran."""
    if log_level != "warning":
        _set_log_level(log_level)


def _set_log_level(level: str) -> None:
    """Say more of what this package does, or nothing but errors, from other packages too."""
    if level == "error":
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        return
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("multimodal_gen").setLevel(level.upper())


def _global_first(arguments: Sequence[str]) -> list[str]:
    """Return arguments with the options of all commands in front of the command's name."""
    first: list[str] = []
    rest: list[str] = []
    following = iter(arguments)
    for argument in following:
        is_global = argument.partition("=")[0] in (_TRACEBACK, _LOG_LEVEL)
        (first if is_global else rest).append(argument)
        if argument == _LOG_LEVEL:
            first += islice(following, 1)
    return [*first, *rest]


# Typer brings click's exceptions from click or, in later releases, from a copy inside itself; of
# those it exports only this subclass of the one that stands for everything the user mistyped.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[1]
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments after the program's name; those of the process when None.

    Returns:
        Exit status: 0; 2 when the user asked for something that cannot be done (one line on
        stderr); 130 after Ctrl-C; 1 when a rank of several was lost, or the output is not read any
        more. Any other exception is a defect and keeps its traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    arguments = _global_first(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a prompt may have what a terminal does not
        sys.stdout.reconfigure(errors="backslashreplace")
    with _noting_interrupts() as interrupts:
        try:
            arguments = fold_dotted(arguments)
            command = typer.main.get_command(app)
            if not arguments:  # what shells ask for completions with has none
                command._main_shell_completion({}, _program_name())
            with command.make_context(_program_name(), list(arguments)) as context:
                command.invoke(context)
            if sys.stdout is not None:  # it is None where it was closed
                sys.stdout.flush()  # a full disk behind it shows only now
        except typer.Exit as exit_:
            return exit_.exit_code
        except SystemExit as exit_:  # a shell was told its completions
            return exit_.code if isinstance(exit_.code, int) else 0
        except BaseException as error:
            if interrupts or isinstance(error, KeyboardInterrupt):
                typer.echo("interrupted", err=True)
                return 130
            if _TRACEBACK in arguments:
                traceback.print_exception(error)
            return _failed(error)
    return 0


def _failed(error: BaseException) -> int:
    """Say what is wrong and return the exit status; raise `error` again where it is a defect."""
    if isinstance(error, _CommandLineError):
        text = _described(error)
        typer.echo(text if "\n" in text else f"error: {text}", err=True)
        return 2
    if isinstance(error, MultimodalGenError):
        typer.echo(f"error: {_one_line(error)}", err=True)
        return 1 if isinstance(error, RankError) else 2
    if isinstance(error, BrokenPipeError):
        _drop_output()
        return 1
    if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
        _drop_output()
        typer.echo(f"error: the output could not be printed: {error.strerror}", err=True)
        return 1
    raise error


def _drop_output() -> None:
    """Drop what is left in the buffer: it would fail again when the process ends."""
    with suppress(OSError, ValueError):  # what captures output may have no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _described(error: Any) -> str:
    """Return an error in one line; in several only where it is the help that was asked for.

    Args:
        error: a `_CommandLineError`.
    """
    context = error.ctx
    if context is None:
        return _plain(error)
    if error.message == context.get_help():  # a group without a command
        return str(error.message)
    problem = _problem(error)
    return problem if problem.endswith("?") else f"{problem}; see `{context.command_path} --help`"


def _problem(error: Any) -> str:
    if hasattr(error, "option_name") and hasattr(error, "possibilities"):
        valid = [name for parameter in error.ctx.command.params for name in parameter.opts]
        return f"no such option {short(error.option_name)}{nearest(error.option_name, valid)}"
    parameter = getattr(error, "param", None)
    if parameter is None:
        return _plain(error)
    if hasattr(error, "param_type"):
        return f"{parameter.opts[0]} must be given"
    return f"{parameter.opts[0]} {error.message}"


def _plain(error: Any) -> str:
    text = " ".join(error.format_message().split()).rstrip(".")
    return text[:1].lower() + text[1:]


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

    in_main_thread = threading.current_thread() is threading.main_thread()
    if earlier is not signal.default_int_handler or not in_main_thread:
        yield interrupts  # Ctrl-C is someone else's
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, earlier)


def _program_name() -> str:
    """Return the name the user typed, so that usage lines can be copied."""
    name = os.path.basename(sys.argv[0])
    return name if name in ("sglang", "multimodal-gen") else "sglang"


def _one_line(error: MultimodalGenError) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())


if __name__ == "__main__":
    sys.exit(main())
