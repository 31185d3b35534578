"""Plain tables whose rows carry explanations; no colours, so that they pipe well."""

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Row", "table", "wrapped"]

_INDENT = " " * 4
_MINIMUM_WIDTH = 80


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
    """Yield the lines of a table."""
    widths = [
        max(len(cells[column]) for cells in (headings, *(row.cells for row in rows)))
        for column in range(len(headings))
    ]
    yield _line(headings, widths)
    yield _line(["-" * size for size in widths], widths)
    for row in rows:
        yield _line(row.cells, widths)
        for detail in row.details:
            yield from wrapped(detail, indent=_INDENT)


def wrapped(text: str, *, indent: str = "") -> list[str]:
    """Return `text` wrapped to the terminal, which counts as 80 columns wide at least.

    Words are never broken: install commands are copied from here.
    """
    width = max(_MINIMUM_WIDTH, shutil.get_terminal_size((100, 24)).columns)
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    pairs = zip(cells, widths, strict=True)
    return "  ".join(cell.ljust(size) for cell, size in pairs).rstrip()
