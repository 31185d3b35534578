"""A benchmark on two checkouts of this repository by turns, on one machine.

    git worktree add ../68f50eb 68f50eb
    python3 scripts/bench/run.py by_triton --commit HASH --against ../68f50eb [--turns 2]

A turn runs the benchmark of either checkout, by `run.py` or where there is none by a script of its
own, each in a process that imports the package of that checkout; all other options go to both. Rows
are appended as ever; those of the other checkout name its folder as their commit. The other
checkout begins the first turn and this one the next, so that a GPU that warms up favours neither. A
row is slower where its time is larger by more than 2 % and four fifths of its rounds lie above four
fifths of the other's.
"""

import argparse
import csv
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from _harness import positive

ROOT = Path(__file__).resolve().parents[2]
SLOWER = 1.02
# Runs a command that finds the package in the folder given first, before what is found else.
WITH_PACKAGE = 'PYTHONPATH="$0${PYTHONPATH:+:$PYTHONPATH}" exec "$@"'

Row = dict[str, str]
Key = tuple[str, str, str]
Rows = dict[Key, Row]


def add_turns(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that ask for another checkout; returns the parser."""
    parser.add_argument(
        "--against", type=Path, help="another checkout to run by turns, in a folder named by commit"
    )
    parser.add_argument("--turns", type=positive, default=2, help="how often each of both runs (2)")
    return parser


def run_by_turns(name: str, words: Sequence[str], options: argparse.Namespace) -> int:
    """Run a benchmark of two checkouts by turns and print how their times relate.

    Args:
        name: the benchmark; it writes a CSV file of its own name.
        words: the command line behind the name.
        options: `against` and `turns`, in addition to what every benchmark takes.

    Returns:
        The exit status: 1 where a row was slower in two turns or more, or a run failed.
    """
    other = options.against.resolve()
    command_of(other, name)
    stripped = add_turns(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    _, rest = stripped.parse_known_args(words)
    table = (options.out / f"{name}.csv").resolve()
    sides = [(other, other.name), (ROOT, options.commit)]
    turns = []
    for turn in range(options.turns):
        found: dict[Path, Rows] = {}
        for root, commit in sides[:: -1 if turn % 2 else 1]:
            print(f"== turn {turn + 1} of {options.turns}: {commit}", flush=True)
            command = [*rest, "--commit", commit, "--out", str(table.parent)]
            known = len(rows_in(table))
            if not run(root, name, command):
                print(f"FAILED: {commit}, see above", flush=True)
                return 1
            found[root] = {key_of(row): row for row in rows_in(table)[known:]}
        turns.append((found[other], found[ROOT]))
    return 1 if compare(turns) else 0


def command_of(root: Path, name: str) -> list[str]:
    """Return what runs a benchmark of a checkout: `run.py`, or the script of before there was one.

    Raises:
        SystemExit: the folder has neither.
    """
    folder = root / "scripts" / "bench"
    runner, script = folder / "run.py", folder / f"{name}.py"
    if not runner.is_file() and not script.is_file():
        raise SystemExit(f"--against must be a checkout with scripts/bench/{name}.py, got {root}")
    return [str(runner), name] if runner.is_file() else [str(script)]


def run(root: Path, name: str, arguments: Sequence[str]) -> bool:
    """Run a benchmark of a checkout on its own package; returns whether it succeeded."""
    command = [sys.executable, *command_of(root, name), *arguments]
    return subprocess.run(["sh", "-c", WITH_PACKAGE, str(root), *command]).returncode == 0


def rows_in(table: Path) -> list[Row]:
    """Return the rows of a results file; none where there is no such file."""
    if not table.exists():
        return []
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def key_of(row: Row) -> Key:
    """Return what a row has in common with that of the other checkout."""
    return row["benchmark"], row["case"], row["contender"]


def ratio(before: Row, after: Row) -> float:
    """Return the time of a row over that of the other."""
    return float(after["median_ms"]) / float(before["median_ms"])


def is_slower(before: Row, after: Row) -> bool:
    """Return whether a row is slower than the other, as the module says."""
    apart = float(after["p20_ms"]) > float(before["p80_ms"])
    return apart and ratio(before, after) > SLOWER


def compare(turns: Sequence[tuple[Rows, Rows]]) -> list[Key]:
    """Print how the times of all turns relate; returns what was slower in two turns or more."""
    print("== time over that of the other checkout: the middle, and turn by turn")
    slow = []
    for key in dict.fromkeys(key for sides in turns for rows in sides for key in rows):
        name = f"{', '.join(key):70}"
        pairs = [(old[key], new[key]) for old, new in turns if key in old and key in new]
        if not pairs:
            print(f"{name} in one checkout only")
            continue
        ratios = [ratio(*pair) for pair in pairs]
        times = sum(is_slower(*pair) for pair in pairs)
        said = f"  SLOWER in {times} of {len(pairs)}" if times else ""
        all_of_them = " ".join(f"{x:.3f}" for x in ratios)
        print(f"{name} {statistics.median(ratios):.3f}: {all_of_them}{said}", flush=True)
        if times > 1:
            slow.append(key)
    return slow
