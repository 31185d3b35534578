"""House rules that no linter has: configuration, module state, text."""

import ast
import io
import re
import shutil
import subprocess
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

TOP_LEVEL = {
    "LICENSE",
    "README.md",
    "configs",
    "docs",
    "multimodal_gen",
    "pyproject.toml",
    "scripts",
    "tests",
}
DOT_ENTRIES = {".ci", ".github", ".gitignore", ".pre-commit-config.yaml"}
SUFFIXES = {"", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml", ".json"}
SUFFIXES |= {".html", ".css", ".js"}

# Module-level state that is meant to change, each with its reason.
MUTABLE_GLOBALS = {
    ("multimodal_gen/integrations/processor_patch.py", "_PATCHED_CLASSES"): (
        "one derived class per processor class, so that compiled graphs are found again"
    ),
    ("multimodal_gen/runtime/distributed/groups.py", "IN_USE"): (
        "a process is one rank of a world, whichever of its threads asks"
    ),
    ("multimodal_gen/runtime/layers/attention/binding.py", "_BROKEN"): (
        "an import fails for the whole process"
    ),
    ("multimodal_gen/runtime/layers/attention/custom_ops.py", "LAYERS"): (
        "a compiled graph carries numbers, which name layers here; weak, so nothing is kept alive"
    ),
    ("multimodal_gen/runtime/layers/attention/custom_ops.py", "_RECORDS"): (
        "and what autograd recorded of a call; dropped when the graph lets go of the number"
    ),
    ("multimodal_gen/kernels/launch/self_check.py", "_FOUND"): (
        "what was checked is loaded once per process; the report and `attention list` say it"
    ),
    ("multimodal_gen/runtime/backend_names.py", "_PLUGINS"): (
        "enum members of installed plugins; written once, when entry points are read"
    ),
}

MUTABLE_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_CALLS = {
    "Counter",
    "OrderedDict",
    "WeakKeyDictionary",
    "WeakSet",
    "WeakValueDictionary",
    "bytearray",
    "defaultdict",
    "deque",
    "dict",
    "list",
    "set",
}

# mypy refuses to change what is annotated so.
READ_ONLY = re.compile(r"(?:Final\[)?(?:Mapping|Sequence|Collection|AbstractSet)\b")

PRIVATE_PATH = re.compile(r"(?<![\w.])/(?:work|tmp|home|root|Users)/\w")
REMINDER = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")


def tracked_files(repository: Path) -> list[Path]:
    """Every text file under version control, relative to `repository`."""
    if not (repository / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=repository, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    paths = (Path(name) for name in listed if name)
    return [path for path in paths if path.suffix in SUFFIXES and (repository / path).is_file()]


def environment_reads(folder: Path) -> Iterator[str]:
    """Yield each use of the process environment."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        if not any(name in text for name in names):
            continue
        for node in ast.walk(ast.parse(text)):
            attribute = isinstance(node, ast.Attribute) and node.attr in names
            imported = (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and names & {alias.name for alias in node.names}
            )
            if attribute or imported:
                yield f"{path.relative_to(folder)}:{node.lineno}"


def _module_statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run at import, those inside `if`, `try` and `with` included."""
    for statement in body:
        yield statement
        for field in ("body", "orelse", "finalbody", "handlers"):
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = getattr(statement, field, [])
                for block in inner:
                    yield from _module_statements(
                        block.body if isinstance(block, ast.ExceptHandler) else [block]
                    )


def _is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, MUTABLE_DISPLAYS):
        return True
    if not isinstance(value, ast.Call):
        return False
    function = value.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in MUTABLE_CALLS


def mutable_globals(folder: Path) -> set[tuple[str, str]]:
    """Return (file, name) of every module-level name bound to a mutable container.

    Wrap a constant in `tuple`, `frozenset` or `MappingProxyType`, or annotate it as `Mapping`;
    `__all__` is a list by custom. A `global` statement is reported under the names it rebinds.
    """
    found = set()
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder.parent).as_posix()
        text = path.read_text()
        tree = ast.parse(text)
        for statement in _module_statements(tree.body):
            targets: list[ast.expr] = []
            if isinstance(statement, ast.Assign):
                targets = statement.targets
            elif isinstance(statement, ast.AnnAssign):
                read_only = READ_ONLY.match(ast.unparse(statement.annotation))
                targets = [] if read_only else [statement.target]
            if targets and _is_mutable(getattr(statement, "value", None)):
                found |= {(name, target.id) for target in targets if isinstance(target, ast.Name)}
        for node in ast.walk(tree) if "global" in text else ():
            if isinstance(node, ast.Global):
                found |= {(name, rebound) for rebound in node.names}
    return {(name, variable) for name, variable in found if variable != "__all__"}


def _comments(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of what a reader is told; strings of Python code are not comments."""
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
        return
    yield from enumerate(text.splitlines(), 1)


def text_problems(repository: Path, files: Iterable[Path]) -> Iterator[str]:
    """Yield non-ASCII characters, reminders, and paths of somebody's machine."""
    for path in files:
        text = (repository / path).read_text(encoding="utf-8")
        if text.isascii() and not PRIVATE_PATH.search(text) and not REMINDER.search(text):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if not line.isascii():
                yield f"{path}:{number}: not ASCII: {line.strip()!a}"
            if PRIVATE_PATH.search(line):
                yield f"{path}:{number}: a path of one machine: {line.strip()}"
        for number, comment in _comments(path, text):
            if REMINDER.search(comment):
                yield f"{path}:{number}: open an issue instead: {comment.strip()}"


def unexpected_entries(files: Iterable[Path]) -> set[str]:
    """Return top-level entries outside the agreed layout."""
    return {path.parts[0] for path in files} - TOP_LEVEL - DOT_ENTRIES


def test_the_package_reads_no_environment_variable(package: Path) -> None:
    assert list(environment_reads(package)) == []


def test_module_state_is_immutable_or_documented(package: Path) -> None:
    assert mutable_globals(package) == set(MUTABLE_GLOBALS)


def test_texts_are_ascii_finished_and_free_of_private_paths(repository: Path) -> None:
    assert list(text_problems(repository, tracked_files(repository))) == []


def test_the_top_level_holds_only_the_agreed_entries(repository: Path) -> None:
    files = tracked_files(repository)
    assert unexpected_entries(files) == set()
    assert {path.parts[0] for path in files} >= TOP_LEVEL - {"configs"}


@pytest.mark.parametrize(
    "code", ["import os\nx = os.environ['A']\n", "from os import getenv\n", "import os\nos.getenv"]
)
def test_a_planted_environment_read_is_reported(tmp_path: Path, code: str) -> None:
    (tmp_path / "module.py").write_text(code)
    assert len(list(environment_reads(tmp_path))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "_CACHE = {}",
        "_CACHE: dict[str, int] = dict()",
        "_CACHE: MutableMapping[str, int] = {}",
        "if True:\n    _CACHE = [1]",
        "try:\n    x = 1\nexcept ValueError:\n    _CACHE = {1}",
        "_CACHE = collections.defaultdict(list)",
        "_CACHE = None\ndef f():\n    global _CACHE\n    _CACHE = 1",
    ],
)
def test_a_planted_mutable_global_is_reported(tmp_path: Path, code: str) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "module.py").write_text(code + "\n")
    assert mutable_globals(tmp_path / "pkg") == {("pkg/module.py", "_CACHE")}


@pytest.mark.parametrize(
    "code",
    [
        "A = (1, 2)",
        "A = MappingProxyType({})",
        "A: Mapping[str, int] = {}",
        "A: Final[Mapping[str, int]] = {}",
        "A = frozenset({1})",
        "__all__ = ['A']",
        "def f():\n    x = []",
        "class C:\n    x = {}",
    ],
)
def test_constants_and_local_state_are_not_reported(tmp_path: Path, code: str) -> None:
    (tmp_path / "module.py").write_text(code + "\n")
    assert mutable_globals(tmp_path) == set()


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.py", "x = '\u00e9'\n", "not ASCII"),
        ("a.md", "see /wo" + "rk/main\n", "a path of one machine"),
        ("a.py", "ROOT = '/ho" + "me/me'\n", "a path of one machine"),
        ("a.py", "x = 1  # TO" + "DO later\n", "open an issue instead"),
        ("a.md", "FIX" + "ME: write this\n", "open an issue instead"),
    ],
)
def test_a_planted_text_problem_is_reported(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    (reported,) = text_problems(tmp_path, [Path(name)])
    assert problem in reported


def test_a_planted_top_level_entry_is_reported() -> None:
    files = [Path("tests/test_a.py"), Path("notes/a.md"), Path("setup.py"), Path(".ci/run")]
    assert unexpected_entries(files) == {"notes", "setup.py"}
