"""Size budgets: a long file or function holds more than one idea, a small file part of one."""

import ast
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from pathlib import Path

import grimp
import pytest

MODULE_LINES = 700
FUNCTION_LINES = 60
KERNEL_FUNCTION_LINES = 130

# A module under so many lines has more than one importer, or is one of those below.
SMALL_MODULE_LINES = 60
SMALL_MODULES = {
    "multimodal_gen.__main__": "what `python -m` runs",
    "multimodal_gen.integrations.models.*": "a record of data per family of transformers",
    "multimodal_gen.kernels.*.reference": "the definition of an operation, apart from its kernels",
}


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


def oversized(folder: Path) -> Iterator[str]:
    """Yield every module and function under `folder` that is over its budget."""
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        text = path.read_text()
        kernel = path.name.endswith("_kernel.py")
        lines = len(text.splitlines())
        if lines > MODULE_LINES:
            yield f"{name}: {lines} lines, at most {MODULE_LINES}"
        budget = KERNEL_FUNCTION_LINES if kernel else FUNCTION_LINES
        for node in _functions(ast.parse(text)):
            if _length(node) > budget:
                yield f"{name}:{node.lineno} {node.name}: {_length(node)} lines, at most {budget}"


def too_small(root: Path, graph: grimp.ImportGraph, excepted: Collection[str]) -> Iterator[str]:
    """Yield every module under `root` that is a part of the only one that imports it."""
    for module in sorted(graph.modules):
        path = root.joinpath(*module.split(".")).with_suffix(".py")
        if not path.exists() or any(fnmatch(module, pattern) for pattern in excepted):
            continue
        lines = len(path.read_text().splitlines())
        importers = graph.find_modules_that_directly_import(module)
        if lines < SMALL_MODULE_LINES and len(importers) < 2:
            yield f"{module}: {lines} lines, imported by {', '.join(importers) or 'nobody'}"


@pytest.fixture(scope="session")
def imports() -> grimp.ImportGraph:
    """Every import of the package, those for type checking included."""
    return grimp.build_graph("multimodal_gen", cache_dir=None)


def test_no_module_is_a_small_part_of_another(repository: Path, imports: grimp.ImportGraph) -> None:
    assert list(too_small(repository, imports, SMALL_MODULES)) == []


def test_every_exception_for_small_modules_is_needed(
    repository: Path, imports: grimp.ImportGraph
) -> None:
    small = [line.partition(":")[0] for line in too_small(repository, imports, ())]
    needed = {pattern for pattern in SMALL_MODULES for name in small if fnmatch(name, pattern)}
    assert needed == set(SMALL_MODULES)


def test_a_small_module_with_one_importer_is_reported(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    long = "x = 1\n" * SMALL_MODULE_LINES
    (package / "__init__.py").touch()
    for name in ("a", "b"):
        (package / f"{name}.py").write_text(f"import package.shared\nimport package.long\n{long}")
    (package / "c.py").write_text(f"import package.part\n{long}")
    for name, text in (("shared", ""), ("long", long), ("part", "x = 1\n")):
        (package / f"{name}.py").write_text(text)
    graph = grimp.ImportGraph()
    for path in package.glob("*.py"):
        graph.add_module(f"package.{path.stem}")
        for line in path.read_text().splitlines():
            if line.startswith("import "):
                graph.add_import(importer=f"package.{path.stem}", imported=line.split()[1])
    assert list(too_small(tmp_path, graph, ())) == [
        "package.__init__: 0 lines, imported by nobody",
        "package.part: 1 lines, imported by package.c",
    ]
    assert list(too_small(tmp_path, graph, ["package.[_p]*"])) == []


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
