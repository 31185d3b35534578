"""Size budgets: a file or a function past them holds more than one idea."""

import ast
from collections.abc import Iterator
from pathlib import Path

MODULE_LINES = 700
KERNEL_MODULE_LINES = 700
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


def oversized(folder: Path) -> Iterator[str]:
    """Yield every module and function under `folder` that is over its budget."""
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        text = path.read_text()
        kernel = path.name.endswith("_kernel.py")
        lines, budget = len(text.splitlines()), KERNEL_MODULE_LINES if kernel else MODULE_LINES
        if lines > budget:
            yield f"{name}: {lines} lines, at most {budget}"
        budget = KERNEL_FUNCTION_LINES if kernel else FUNCTION_LINES
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _length(node) > budget:
                yield f"{name}:{node.lineno} {node.name}: {_length(node)} lines, at most {budget}"


def test_modules_and_functions_stay_within_their_budgets(repository: Path) -> None:
    for folder in ("multimodal_gen", "scripts"):
        assert list(oversized(repository / folder)) == []


def test_an_oversized_module_is_reported(tmp_path: Path) -> None:
    (tmp_path / "fits.py").write_text("x = 1\n" * MODULE_LINES)
    (tmp_path / "long.py").write_text("x = 1\n" * (MODULE_LINES + 1))
    (tmp_path / "long_kernel.py").write_text("x = 1\n" * (MODULE_LINES + 1))
    assert list(oversized(tmp_path)) == [
        "long.py: 701 lines, at most 700",
        "long_kernel.py: 701 lines, at most 700",
    ]


def test_an_oversized_function_is_reported_and_its_docstring_is_free(tmp_path: Path) -> None:
    docstring = '    """One.\n\n' + "    More.\n" * 30 + '    """\n'
    fits = "def fits():\n" + docstring + "    x = 1\n" * (FUNCTION_LINES - 1)
    long = "    async def long():\n" + "        x = 1\n" * FUNCTION_LINES
    (tmp_path / "code.py").write_text(f"{fits}class A:\n{long}")
    assert [line.split()[1:] for line in oversized(tmp_path)] == [
        ["long:", "61", "lines,", "at", "most", "60"]
    ]
