"""What users may rely on: names, enum members, flags. A change here is a decision, not a slip."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from multimodal_gen.cli.main import app

SNAPSHOT = Path(__file__).with_name("cli_surface.txt")

LAYERS = "multimodal_gen.runtime.layers.attention"
STABLE_NAMES = [
    ("multimodal_gen", ("apply", "compare", "AttentionHandle", "__version__")),
    ("multimodal_gen", ("init_parallel", "leave_parallel", "DiffGenerator", "generate")),
    (LAYERS, ("LocalAttention", "UlyssesAttention", "UlyssesAttention_VSA", "USPAttention")),
    (f"{LAYERS}.layer", ("LocalAttention", "UlyssesAttention", "UlyssesAttention_VSA")),
    (f"{LAYERS}.layer", ("USPAttention",)),
    (
        f"{LAYERS}.selector",
        (
            "get_attn_backend",
            "global_force_attn_backend",
            "global_force_attn_backend_context_manager",
            "component_attn_backend_context_manager",
        ),
    ),
    ("multimodal_gen.runtime.platforms.interface", ("AttentionBackendEnum", "DeviceCapability")),
    ("multimodal_gen.runtime.server_args", ("ServerArgs",)),
    (
        "multimodal_gen.runtime.managers.forward_context",
        ("set_forward_context", "get_forward_context", "ForwardContext"),
    ),
    ("multimodal_gen.cli.main", ("app", "main")),
]
# Public names that no `__all__` lists.
UNLISTED = {"logger", "__getattr__", "__dir__"}
BACKENDS = {
    "FA",
    "TORCH_SDPA",
    "SLIDING_TILE_ATTN",
    "SAGE_ATTN",
    "SAGE_ATTN_3",
    "VIDEO_SPARSE_ATTN",
    "VMOBA_ATTN",
    "AITER",
    "AITER_SAGE",
    "SLA_ATTN",
    "SAGE_SLA_ATTN",
    "SPARSE_VIDEO_GEN_2_ATTN",
    "SOL_ATTN",
    "SUBBLOCK_SPARSE_ATTN",
    "PISA_ATTN",
}
GENERATE_FLAGS = """
    --model-path --prompt --negative-prompt --backend --attention-backend
    --attention-backend-config --component-attention-backends --num-gpus --sp-degree
    --ulysses-degree --ring-degree --height --width --num-frames --num-inference-steps
    --guidance-scale --seed --fps --output-path --enable-torch-compile --image-path
    --last-image-path --video-path --mask-path --pipeline-arg --pipeline-class-name --lora-path
    --quantize --scheduler --sigmas --offload --prompt-file --resume --config --print-config
"""


def _commands(command: Any, path: str = "sglang") -> Iterator[tuple[str, Any]]:
    """Yield (space-separated path, command) for every node of the command tree."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from _commands(child, f"{path} {name}")


def cli_surface(application: typer.Typer) -> list[str]:
    """Return one line per option and argument of every command, sorted."""
    return sorted(
        f"{path}: {'/'.join([*parameter.opts, *parameter.secondary_opts])}"
        for path, command in _commands(typer.main.get_command(application))
        for parameter in command.params
    )


def _is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


def _names_bound_by(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return {statement.target.id}
    return set()


def _is_type_variable(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Call)
        and ast.unparse(statement.value.func) in ("TypeVar", "ParamSpec")
    )


def surface_problems(path: Path) -> list[str]:
    """Compare a module's `__all__` with the public names it defines and those it re-exports.

    Only packages and modules that re-export something have one: elsewhere, names without an
    underscore are public.
    """
    text = path.read_text()
    if "__all__" not in text:
        return []
    tree = ast.parse(text)
    exported: list[str] | None = None
    public, imported = set(), set()
    for statement in tree.body:
        names = _names_bound_by(statement)
        if isinstance(statement, ast.Assign) and "__all__" in names:
            exported = ast.literal_eval(statement.value)
        elif not _is_type_variable(statement):
            public |= {name for name in names if _is_public(name)}
    if exported is None:
        return []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {alias.asname or alias.name for alias in node.names}
    listed, public = set(exported), public - UNLISTED
    problems = [f"{name} is public but not in __all__" for name in sorted(public - listed)]
    problems += [
        f"__all__ names {name}, which the module does not define"
        for name in sorted(listed - public - imported)
    ]
    if len(listed) != len(exported):
        problems.append("__all__ lists a name twice")
    if path.name != "__init__.py" and not listed & imported:
        problems.append("__all__ re-exports nothing; leave it out")
    return [f"{path}: {problem}" for problem in problems]


def test_all_lists_exactly_the_public_names(package: Path) -> None:
    assert [problem for path in package.rglob("*.py") for problem in surface_problems(path)] == []


@pytest.mark.parametrize("package_name", ["multimodal_gen", LAYERS])
def test_every_exported_name_is_importable(package_name: str) -> None:
    module = importlib.import_module(package_name)
    assert module.__all__
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_an_unknown_attribute_of_the_package_is_an_attribute_error() -> None:
    package = importlib.import_module("multimodal_gen")
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        _ = package.absent


@pytest.mark.parametrize(("module", "names"), STABLE_NAMES)
def test_the_stable_names_exist(module: str, names: tuple[str, ...]) -> None:
    loaded = importlib.import_module(module)
    assert [name for name in names if not hasattr(loaded, name)] == []


def test_the_version_is_the_packaged_one(repository: Path) -> None:
    project = (repository / "pyproject.toml").read_text()
    assert '\ndynamic = ["version"]\n' in project
    (path,) = re.findall(r'\n\[tool\.hatch\.version\]\npath = "(.*)"\n', project)
    (version,) = re.findall(r'^__version__ = "(.*)"$', (repository / path).read_text(), re.M)
    assert importlib.import_module("multimodal_gen").__version__ == version


def test_no_module_imports_from_the_package_above_it(package: Path) -> None:
    importers = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "from multimodal_gen import" in path.read_text()
    ]
    assert importers == []


def test_the_backend_names_of_the_documentation_are_enum_members() -> None:
    from multimodal_gen.runtime.platforms.interface import AttentionBackendEnum

    assert BACKENDS - set(AttentionBackendEnum.__members__) == set()


def test_generate_takes_the_documented_flags() -> None:
    commands = dict(_commands(typer.main.get_command(app)))
    flags = {name for parameter in commands["sglang generate"].params for name in parameter.opts}
    assert set(GENERATE_FLAGS.split()) - flags == set()


def test_the_command_line_is_the_frozen_one() -> None:
    """A wanted change is made in cli_surface.txt too, in the same commit."""
    assert cli_surface(app) == SNAPSHOT.read_text().splitlines()


def test_a_new_option_changes_the_surface() -> None:
    application = typer.Typer(add_completion=False)

    @application.command()
    def first(size: int = 1) -> None: ...

    @application.command()
    def second() -> None: ...

    before = cli_surface(application)

    @application.command(name="second")
    def second_with_option(wide: bool = False) -> None: ...

    assert before == ["sglang first: --size"]
    assert cli_surface(application) == [
        "sglang first: --size",
        "sglang second: --wide/--no-wide",
    ]


@pytest.mark.parametrize(
    ("name", "code", "problem"),
    [
        ("__init__.py", "__all__ = ['f']\ndef f(): ...\ndef g(): ...\n", "g is public but not in"),
        ("__init__.py", "__all__ = ['f']\n", "names f, which the module does not define"),
        ("__init__.py", "__all__ = ['A', 'A']\nA = 1\n", "lists a name twice"),
        ("a.py", "__all__ = ['A']\nA = 1\n", "re-exports nothing"),
    ],
)
def test_a_planted_surface_problem_is_reported(
    tmp_path: Path, name: str, code: str, problem: str
) -> None:
    (tmp_path / name).write_text(code)
    (reported,) = surface_problems(tmp_path / name)
    assert problem in reported


def test_a_package_may_re_export(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("from a.b import C\n__all__ = ['C', 'd']\nd = 1\n")
    assert surface_problems(tmp_path / "__init__.py") == []
