"""Write the tables of measurements in README.md and docs/pages from scripts/bench/results.

    python scripts/measured_tables.py [--check]

A page says in a comment which rows a table is made of; the table follows the comment, with a line
that names GPU, versions and commits:

    <!-- measured
    file: sparse.csv
    where: {commit: 56740c3, case: wan 14B 21x45x80}
    rows:
      - {title: FlashAttention 3, contender: fa3 dense}
      - {title: "`sliding_tile_attn`", contender: sta layer}
    columns:
      - {title: time, cell: "{median_ms:.1f} ms"}
      - {title: speed-up, cell: "{over:.1f}x", over: {contender: fa3 dense}}
    -->

In addition to `title`, rows and columns may have `file`, and values of its columns. Together with
`where` they must name one row of the file; of several, `pick` takes one (0 the first, -1 the last).
A cell is a format string over the row's values; `{median_s}`, `{median_us}` and `{percent}`, of the
density, are there too. `{over}` is the time of the row that `over` leads to over the cell's time,
and `{share}` its inverse. `without` leaves columns of a row empty; `titled` heads the first one.

`study: BLOCK` in place of all that is a block of `study_page.py`.
"""

import argparse
import csv
import difflib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import study_page
import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "scripts" / "bench" / "results"
BLOCK = re.compile(
    r"(?P<head><!-- measured\n(?P<spec>.*?)-->\n)(?P<table>.*?)<!-- measured: end -->", re.DOTALL
)
NOT_FILTERS = ("title", "cell", "over", "pick", "file")


class TableError(ValueError):
    """A table's description names no row, or several."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status (1: `--check` found differences)."""
    parser = argparse.ArgumentParser(description="Write the tables of measurements.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    args = parser.parse_args(argv)
    return update(measured_pages(), filled_in, check=args.check, script=Path(__file__).name)


def measured_pages() -> Iterator[Path]:
    """Yield the pages that may hold such tables."""
    yield REPOSITORY / "README.md"
    yield from sorted((REPOSITORY / "docs" / "pages").rglob("*.md"))


def update(
    pages: Iterator[Path],
    fill: Callable[[str, str], str],
    *,
    check: bool,
    script: str,
    base: Path | None = None,
) -> int:
    """Write what `fill` makes of each page's text and name, or say that it differs; 1 if it does.

    Args:
        pages: the files.
        fill: from text and name to the new text; raises `TableError`.
        check: whether to compare instead of writing.
        script: what to run, for the message.
        base: the folder that names are relative to; the repository by default.
    """
    stale = 0
    for page in pages:
        name, old = page.relative_to(base or REPOSITORY).as_posix(), page.read_text()
        try:
            new = fill(old, name)
        except TableError as error:
            print(f"error: {name}: {error}", file=sys.stderr)
            return 1
        if new == old:
            continue
        if not check:
            page.write_text(new)
            continue
        stale = 1
        lines = (text.splitlines(keepends=True) for text in (old, new))
        sys.stdout.writelines(difflib.unified_diff(*lines, name, "now"))
    if stale:
        print(f"run scripts/{script} and commit the result", file=sys.stderr)
    return stale


def filled_in(text: str, name: str = "") -> str:
    """Return a page with every table between its markers replaced."""

    def table(found: re.Match[str]) -> str:
        spec = yaml.safe_load(found["spec"])
        lines = study_page.lines_of(spec["study"], rows_of) if "study" in spec else lines_of(spec)
        made = "".join(f"{line}\n" for line in lines)
        return f"{found['head']}\n{made}\n<!-- measured: end -->"

    new, number = BLOCK.subn(table, text)
    if number != text.count("<!-- measured\n"):
        raise TableError("every `<!-- measured` must have its `<!-- measured: end -->`")
    return new


def lines_of(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table, and what it was measured on."""
    columns, used = spec["columns"], []
    head = [spec.get("titled", ""), *(column["title"] for column in columns)]
    yield from (joined(head), joined(["---"] * len(head)))
    for row in spec["rows"]:
        cells = [row["title"]]
        for column in columns:
            if column["title"] in row.get("without", ()):
                cells.append("")
                continue
            found = only(spec, row, column)
            used.append(found)
            cells.append(column["cell"].format_map(values(found, spec, row, column)))
        yield joined(cells)
    yield ""
    yield f"<small>{source(used)}</small>"


def joined(cells: Sequence[str]) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def only(*parts: Mapping[str, Any]) -> dict[str, str]:
    """Return the one row that the filters of a table, a row and a column name together."""
    wanted: dict[str, Any] = {}
    for part in parts:
        wanted |= part.get("where", {})
        wanted |= {
            name: value
            for name, value in part.items()
            if name not in (*NOT_FILTERS, "where", "rows", "columns", "titled", "without")
        }
    file = next(part["file"] for part in reversed(parts) if "file" in part)
    picks = [part["pick"] for part in parts if "pick" in part]
    found = [
        row
        for row in rows_of(file)
        if all(row.get(name) == str(value) for name, value in wanted.items())
    ]
    if not found or (len(found) > 1 and not picks):
        raise TableError(f"{len(found)} rows of {file} have {wanted}; one must")
    return found[picks[-1] if picks else 0]


@cache
def rows_of(file: str) -> tuple[dict[str, str], ...]:
    """Return the rows of a file of results; each knows the file's name."""
    with (RESULTS / file).open(newline="") as opened:
        return tuple({**row, "file": file} for row in csv.DictReader(opened))


def values(found: Mapping[str, str], *parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a cell may show: the row's values, numbers as such, and times over another's."""
    known: dict[str, Any] = {name: number(value) for name, value in found.items()}
    others = [part["over"] for part in parts if "over" in part]
    if others:
        base = only(*parts, others[-1])
        known["over"] = float(base["median_ms"]) / float(found["median_ms"])
        known["share"] = 1 / known["over"]
    known["median_s"], known["median_us"] = known["median_ms"] / 1e3, known["median_ms"] * 1e3
    if "density" in known:
        known["percent"] = 100 * known["density"]
    return known


def number(text: str) -> float | str:
    """Return a number where a text is one."""
    try:
        return float(text)
    except ValueError:
        return text


def source(rows: Sequence[Mapping[str, str]]) -> str:
    """Return what rows were measured on, and where they are."""
    places = ", ".join(
        dict.fromkeys(f"{row['gpu']}, torch {row['torch'].partition('+')[0]}" for row in rows)
    )
    tritons = " and ".join(dict.fromkeys(row["triton"].removeprefix("triton ") for row in rows))
    files: dict[str, dict[str, None]] = {}
    for row in rows:
        files.setdefault(row["file"], {})[row["commit"]] = None
    where = "; ".join(f"`{file}` at {', '.join(commits)}" for file, commits in files.items())
    return f"{places}, triton {tritons}. Rows: {where}."


if __name__ == "__main__":
    sys.exit(main())
