"""Prompts of commands that take several: on the command line, or in a file."""

from pathlib import Path
from typing import Annotated

import typer

from multimodal_gen.errors import UsageError
from multimodal_gen.files import read_lines

Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompt", metavar="TEXT", help="What to generate; may be given repeatedly."),
]
PromptFile = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="FILE", help="Text file with one prompt per line."),
]


def read_prompts(given: list[str] | None, file: Path | None, what: str) -> list[str]:
    """Return the prompts that were given, those of the file last.

    Args:
        given: those of the command line.
        file: a text file with one per line, or None.
        what: what they are for, in messages, e.g. "a search".

    Raises:
        ConfigError: the file cannot be read.
        UsageError: there are none.
    """
    prompts = [*(given or [])]
    if file is not None:
        lines = read_lines(file, flag="--prompts")
        prompts += [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UsageError(
            f"{what} must have at least one prompt, got none; give --prompt or --prompts"
        )
    return prompts
