#!/usr/bin/env python3
"""Print how much code there is, by a measure that prose and layout do not change.

    python3 scripts/code_size.py [--check]

Counted are lines of code, without docstrings, comments, blank lines and imports: of
`layers/attention` and `kernels`, of both together, of the package by folder, of tests and of
scripts. Printed are also

- files that exist for the ring, and for Sliding Tile Attention, wherever they lie in the package: a
  word of their path is `ring` or `sta`, or more than half of them is about it, which is said below
  by name (a file without code, such as an empty `__init__.py`, does not count);
- the longest modules, with all of their lines;
- how many public names the modules of the package have at their top level.

How many files a call passes is what `call_chains.py` counts.

`--check` exits with status 1 where a figure is above its ceiling. Ceilings go down, and up by what
a new method takes.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "multimodal_gen"
ATTENTION = f"{PACKAGE}/runtime/layers/attention"
KERNELS = f"{PACKAGE}/kernels"
METHODS = f"{ATTENTION}/sparse/methods"

CEILINGS = {
    "attention and kernels": 23_519,
    "files for the ring": 4,
    "files for STA": 8,
    "longest file of a method": 250,
}
"""Figure -> the most it may be."""

MORE_FILES: dict[str, dict[str, str]] = {
    "ring": {},
    "sta": {"runtime/generator/window_search.py": "searches its windows, and nothing else"},
}
"""Word -> files that no word of their path tells, and what more than half of them does."""

LONGEST = 10


@cache  # a module counts in several figures
def code_lines(text: str) -> int:
    """Return the lines of code of a module, without docstrings, comments, blanks and imports."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        parts = [node] if isinstance(node, ast.Import | ast.ImportFrom) else []
        parts += [part for part in body if _is_text(part)] if isinstance(body, list) else []
        for part in parts:
            left_out.update(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in left_out
        for number, line in enumerate(text.splitlines(), 1)
    )


def _is_text(node: ast.AST) -> bool:
    """Whether a statement is a text alone, as docstrings are."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def modules(folder: Path) -> Iterator[Path]:
    """Yield the modules under a folder, in order."""
    yield from sorted(folder.rglob("*.py"))


def size_of(folder: Path) -> int:
    """Return the lines of code under a folder."""
    return sum(code_lines(path.read_text("utf-8")) for path in modules(folder))


def files_for(word: str, package: Path) -> list[str]:
    """Return the files of the package that exist for something, by a word of their path."""
    found = []
    for path in sorted(package.rglob("*")):
        name = path.relative_to(package).as_posix()
        told = word in re.split(r"[/_.-]", name) or name in MORE_FILES[word]
        if not told or not path.is_file() or "__pycache__" in name:
            continue
        if path.suffix != ".py" or code_lines(path.read_text("utf-8")):
            found.append(name)
    return found


def public_names(text: str) -> list[str]:
    """Return the names that a module defines at its top level and that have no underscore."""
    names = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [name.id for each in targets for name in _names_in(each)]
    return [name for name in names if not name.startswith("_")]


def _names_in(target: ast.expr) -> Iterator[ast.Name]:
    return (node for node in ast.walk(target) if isinstance(node, ast.Name))


def figures(root: Path) -> dict[str, int]:
    """Return the figures of a checkout that need nothing to run."""
    package = root / PACKAGE
    attention, kernels = size_of(root / ATTENTION), size_of(root / KERNELS)
    return {
        "layers/attention": attention,
        "kernels": kernels,
        "attention and kernels": attention + kernels,
        "package": size_of(package),
        "tests": size_of(root / "tests"),
        "scripts": size_of(root / "scripts"),
        "files for the ring": len(files_for("ring", package)),
        "files for STA": len(files_for("sta", package)),
        "longest file of a method": max(
            code_lines(path.read_text("utf-8")) for path in modules(root / METHODS)
        ),
        "public names": sum(
            len(public_names(path.read_text("utf-8"))) for path in modules(package)
        ),
    }


def by_folder(package: Path) -> dict[str, int]:
    """Return the lines of code of every folder of the package, and of `runtime`."""
    folders = [folder for folder in package.iterdir() if folder.is_dir()]
    folders += [folder for folder in (package / "runtime").iterdir() if folder.is_dir()]
    sizes = {folder.relative_to(package).as_posix(): size_of(folder) for folder in folders}
    return dict(sorted((name, size) for name, size in sizes.items() if size))


def longest(package: Path) -> list[tuple[int, str]]:
    """Return the longest modules, with all of their lines."""
    lengths = [
        (len(path.read_text("utf-8").splitlines()), path.relative_to(package).as_posix())
        for path in modules(package)
    ]
    return sorted(lengths, reverse=True)[:LONGEST]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; return 1 where `--check` is given and one is above its ceiling."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail where a ceiling is passed")
    options = parser.parse_args(arguments)
    package = ROOT / PACKAGE
    found = figures(ROOT)
    for name, figure in found.items():
        ceiling = f"  (at most {CEILINGS[name]:,})" if name in CEILINGS else ""
        print(f"{name:26}{figure:8,}{ceiling}")
    for word in MORE_FILES:
        print(f"\nfiles for {word}:")
        print("\n".join(f"  {name}" for name in files_for(word, package)))
    print("\npackage by folder:")
    print("\n".join(f"  {name:24}{size:8,}" for name, size in by_folder(package).items()))
    print("\nlongest modules, all lines:")
    print("\n".join(f"  {lines:4}  {name}" for lines, name in longest(package)))
    over = [name for name, figure in found.items() if figure > CEILINGS.get(name, figure)]
    for name in over:
        print(f"{name} must be at most {CEILINGS[name]:,}, got {found[name]:,}", file=sys.stderr)
    return 1 if options.check and over else 0


if __name__ == "__main__":
    sys.exit(main())
