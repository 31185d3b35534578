"""Plain tables whose rows carry explanations; no colours, so that they pipe well."""

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import typer

_INDENT = " " * 4
_PIPED_WIDTH = 100
_MINIMUM_WIDTH = 20


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        cells: one text per column.
        details: sentences below the row, wrapped to the width of the terminal.
    """

    cells: Sequence[str]
    details: Sequence[str] = ()


def table(headings: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table, or of a list where the terminal is too narrow for the table.

    No cell is ever cut off: names are copied from here.
    """
    lines = [headings, *(row.cells for row in rows)]
    widths = [max(len(cells[column]) for cells in lines) for column in range(len(headings))]
    if max(len(_line(cells, widths)) for cells in lines) > _width():
        yield from _listed(headings, rows)
        return
    yield _line(headings, widths)
    yield _line(["-" * size for size in widths], widths)
    for row in rows:
        yield _line(row.cells, widths)
        yield from _details(row)


def echo(lines: Iterable[str]) -> None:
    """Print lines."""
    for line in lines:
        typer.echo(line)


def wrapped(text: str, *, indent: str = "") -> list[str]:
    """Return `text` wrapped to the terminal, or to 100 columns where the output is no terminal.

    Words are never broken: install commands are copied from here.
    """
    return textwrap.wrap(
        text,
        max(_width(), _MINIMUM_WIDTH),
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _listed(headings: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        named = zip(headings, row.cells, strict=True)
        yield from wrapped("; ".join(f"{heading}: {cell}" for heading, cell in named))
        yield from _details(row)


def _details(row: Row) -> Iterator[str]:
    for detail in row.details:
        yield from wrapped(detail, indent=_INDENT)


def _width() -> int:
    return shutil.get_terminal_size((_PIPED_WIDTH, 24)).columns


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    pairs = zip(cells, widths, strict=True)
    return "  ".join(cell.ljust(size) for cell, size in pairs).rstrip()
