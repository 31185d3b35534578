"""Size budgets: a long function holds more than one idea, and a very long file may."""

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

# A module is as long as its idea. Above so many lines it is listed below, with that idea.
MODULE_LINES = 1000
LONG_MODULES: dict[str, str] = {}
FUNCTION_LINES = 60
KERNEL_FUNCTION_LINES = 130


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring: explaining is never over budget."""
    assert function.end_lineno is not None
    total = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        assert first.end_lineno is not None
        total -= first.end_lineno - first.lineno + 1
    return total


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function of a syntax tree, however deep; expressions hold none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child
            yield from _functions(child)


def oversized(folder: Path, long: Collection[str] = ()) -> Iterator[str]:
    """Yield every module and function under `folder` that is over its budget.

    Args:
        folder: where they are.
        long: the modules that may be long, by their paths in `folder`.
    """
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        text = path.read_text()
        kernel = path.name.endswith("_kernel.py")
        lines = len(text.splitlines())
        if lines > MODULE_LINES and str(name) not in long:
            yield f"{name}: {lines} lines, at most {MODULE_LINES}"
        budget = KERNEL_FUNCTION_LINES if kernel else FUNCTION_LINES
        for node in _functions(ast.parse(text)):
            if _length(node) > budget:
                yield f"{name}:{node.lineno} {node.name}: {_length(node)} lines, at most {budget}"


def test_modules_and_functions_stay_within_their_budgets(repository: Path) -> None:
    for folder in ("multimodal_gen", "scripts"):
        assert list(oversized(repository / folder, LONG_MODULES)) == []


def test_every_exception_for_long_modules_is_needed(repository: Path) -> None:
    folders = (repository / "multimodal_gen", repository / "scripts")
    found = [line.partition(":")[0] for folder in folders for line in oversized(folder)]
    assert sorted(found) == sorted(LONG_MODULES)


def test_an_oversized_module_is_reported(tmp_path: Path) -> None:
    (tmp_path / "fits.py").write_text("x = 1\n" * MODULE_LINES)
    for name in ("long.py", "long_kernel.py", "listed.py"):
        (tmp_path / name).write_text("x = 1\n" * (MODULE_LINES + 1))
    assert list(oversized(tmp_path, ["listed.py"])) == [
        "long.py: 1001 lines, at most 1000",
        "long_kernel.py: 1001 lines, at most 1000",
    ]


def test_an_oversized_function_is_reported_and_its_docstring_is_free(tmp_path: Path) -> None:
    docstring = '    """One.\n\n' + "    More.\n" * 30 + '    """\n'
    fits = "def fits():\n" + docstring + "    x = 1\n" * (FUNCTION_LINES - 1)
    long = "    async def long():\n" + "        x = 1\n" * FUNCTION_LINES
    (tmp_path / "code.py").write_text(f"{fits}class A:\n{long}")
    assert [line.split()[1:] for line in oversized(tmp_path)] == [
        ["long:", "61", "lines,", "at", "most", "60"]
    ]
