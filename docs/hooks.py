"""What mkdocs does besides: writes the reference of the command line from the program itself."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# A checkout works without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer

from multimodal_gen.cli.main import app

MARK = "<!-- every command -->"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put the commands where a page has a place for them."""
    if MARK not in markdown:
        return markdown
    return markdown.replace(MARK, "\n".join(lines_of(typer.main.get_command(app), "sglang")))


def lines_of(command: Any, path: str) -> Iterator[str]:
    """Yield the section of a command, and those of the commands below it."""
    context = command.make_context(path, [], resilient_parsing=True)
    children = getattr(command, "commands", {})
    yield f"## {path}\n"
    yield f"{command.help}\n"
    if not children:
        yield f"```text\n{' '.join([path, *command.collect_usage_pieces(context)])}\n```\n"
    parameters = [found for x in command.params if (found := x.get_help_record(context))]
    if parameters:
        yield "| option | |"
        yield "|---|---|"
        for names, text in parameters:
            yield f"| {cell(f'`{names}`')} | {cell(text)} |"
        yield ""
    for name, child in children.items():
        yield from lines_of(child, f"{path} {name}")


def cell(text: str) -> str:
    """Return a text for the cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
