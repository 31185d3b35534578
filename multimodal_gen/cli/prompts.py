"""Prompts of commands that take several: on the command line, or in a file."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

from multimodal_gen.errors import UsageError, short
from multimodal_gen.runtime.server_args import CALL_SETTINGS, SETTINGS
from multimodal_gen.settings import Setting, lines_of

OBSERVED: Final = (
    *(SETTINGS[name] for name in ("model_path", *CALL_SETTINGS, "dtype", "device", "offload")),
    replace(SETTINGS["seed"], default=0, help="Seed of the noise."),
)
"""What commands take that generate prompts to look at what their attention sees."""

Prompts = Annotated[
    list[str] | None,
    Setting(metavar="TEXT", many=True, help="What to generate; may be given repeatedly."),
]
PromptFile = Annotated[
    Path | None, Setting(metavar="FILE", help="Text file with one prompt per line.")
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
    lines = () if file is None else lines_of(file, "--prompts")
    prompts = [*(given or ()), *(line for _, line in lines)]
    if not prompts:
        got, remedy = "none", "give --prompt or --prompts"
        if file is not None:
            got, remedy = f"none in {short(str(file))}", "write one per line, or give --prompt"
        raise UsageError(f"{what} must have at least one prompt, got {got}; {remedy}")
    return prompts
