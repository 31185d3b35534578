"""What importing the package costs, and which way its imports point."""

import ast
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

HEAVY = ("torch", "diffusers", "transformers", "triton", "numpy", "accelerate", "imageio")


def _run(script: str, root: Path) -> subprocess.CompletedProcess[str]:
    """Run `script` in a fresh interpreter that finds the package in `root`."""
    prelude = f"import sys; sys.path.insert(0, {str(root)!r})\n"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", prelude + textwrap.dedent(script)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )


def _loaded_by(script: str, root: Path) -> set[str]:
    """Which heavy packages a fresh interpreter has loaded after `script`."""
    result = _run(f"{textwrap.dedent(script)}\nprint('loaded', *sys.modules)", root)
    assert result.returncode == 0, result.stderr
    last = result.stdout.splitlines()[-1].split()
    assert last[0] == "loaded"
    return set(HEAVY) & set(last)


@pytest.fixture
def skeleton(repository: Path, package: Path, tmp_path: Path) -> Path:
    """The real contracts over the folders of our package, without its modules."""
    shutil.copy(repository / "pyproject.toml", tmp_path)
    for marker in package.rglob("__init__.py"):
        copy = tmp_path / marker.relative_to(repository)
        copy.parent.mkdir(parents=True)
        copy.touch()
    (tmp_path / "multimodal_gen" / "cli" / "main.py").touch()
    return tmp_path


def _lint(root: Path) -> subprocess.CompletedProcess[str]:
    command = "from importlinter.cli import lint_imports_command as run; run()"
    return subprocess.run(
        [sys.executable, "-c", command, "--no-cache"],
        cwd=root,
        env={"PATH": "", "PYTHONPATH": str(root), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
    )


HELP = """
    import contextlib, io
    from multimodal_gen.cli.main import main
    sys.argv = ["sglang", "--help"]
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main()
    assert "generate" in text.getvalue(), text.getvalue()
"""


@pytest.mark.parametrize(
    "script",
    [
        "import multimodal_gen",
        "import multimodal_gen.errors",
        "import multimodal_gen.cli.main",
        HELP,
    ],
    ids=["package", "errors", "cli", "help"],
)
def test_starting_up_loads_no_heavy_package(script: str, repository: Path) -> None:
    assert _loaded_by(script, repository) == set()


def test_a_heavy_import_at_start_up_is_seen(tmp_path: Path) -> None:
    (tmp_path / "light.py").write_text("import json\n")
    (tmp_path / "heavy.py").write_text("import numpy\n")
    assert _loaded_by("import light", tmp_path) == set()
    assert "numpy" in _loaded_by("import heavy", tmp_path)


@pytest.fixture(scope="module")
def imported(repository: Path, package: Path) -> subprocess.CompletedProcess[str]:
    """A process that imports the layers alone, says what that loaded, and imports the rest."""
    names = [
        ".".join(path.relative_to(repository).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(package.rglob("*.py"))
        # Running __main__ is its import, and nodes are made of what ComfyUI has; the others may
        # need a Triton this machine lacks.
        if not path.as_posix().endswith(
            ("__main__.py", "_kernel.py", "launch/compat.py", "launch/descriptors.py", "node.py")
        )
    ]
    assert len(names) > 20
    return _run(
        f"""
        import importlib, traceback
        blocked = ("triton", "diffusers", "transformers", "accelerate", "imageio")
        sys.modules.update(dict.fromkeys(blocked))  # None: importing them raises ImportError
        from multimodal_gen.runtime.layers.attention import LocalAttention
        for name in blocked:
            del sys.modules[name]
        print("loaded", *sys.modules)
        failed = []
        for name in {names!r}:
            try:
                importlib.import_module(name)
            except Exception:
                failed.append(name)
                traceback.print_exc()
        sys.exit(f"cannot import {{failed}}" if failed else 0)
        """,
        repository,
    )


def test_the_layers_import_without_triton_and_without_pipeline_libraries(
    imported: subprocess.CompletedProcess[str],
) -> None:
    loaded = imported.stdout.partition("\n")[0].split()
    assert loaded[:1] == ["loaded"], imported.stderr
    assert set(HEAVY) & set(loaded) <= {"torch", "numpy"}


@pytest.fixture(scope="module")
def dense(repository: Path) -> list[list[str]]:
    """What a process has loaded once it has the layers, and once one served a dense call."""
    result = _run(
        """
        from multimodal_gen.runtime.layers.attention import LocalAttention
        print(*sys.modules)
        import torch
        layer, x = LocalAttention(2, 64), torch.randn(1, 8, 2, 64)
        layer(x, x, x)
        layer.report()
        print(*sys.modules)
        """,
        repository,
    )
    assert result.returncode == 0, result.stderr
    return [line.split() for line in result.stdout.splitlines()]


def test_neither_the_layers_nor_a_dense_call_load_the_compiler(dense: list[list[str]]) -> None:
    assert len(dense) == 2
    assert all("torch._dynamo" not in loaded for loaded in dense)


def test_a_dense_call_loads_no_more_than_it_needs(dense: list[list[str]]) -> None:
    ours = [name for name in dense[1] if name.split(".")[0] == "multimodal_gen"]
    assert len(ours) <= 60, ours
    folder = "multimodal_gen.runtime.layers.attention"
    methods = (f"{folder}.sparse", f"{folder}.sequence_parallel", f"{folder}.causal_cache")
    assert not [name for name in ours if name.startswith(methods)]


def test_every_module_imports(imported: subprocess.CompletedProcess[str]) -> None:
    assert imported.returncode == 0, imported.stderr


def test_the_import_contracts_hold(repository: Path) -> None:
    result = _lint(repository)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


# A path, what is written there, and the contract that it breaks.
PLANTED = [
    (
        "kernels/engine.py",
        "from multimodal_gen.runtime import platforms\n",
        "The package depends downwards",
    ),
    ("unplaced.py", "", "The package depends downwards"),
    ("kernels/unplaced.py", "", "The kernels depend downwards"),
    (
        "runtime/platforms/interface.py",
        "def late():\n    from multimodal_gen.runtime.layers import attention\n",
        "The runtime depends downwards",
    ),
    ("runtime/unplaced.py", "", "The runtime depends downwards"),
    (
        "runtime/distributed/mesh.py",
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n"
        "    from multimodal_gen.runtime.distributed import launch\n",
        "The exchanges between ranks depend downwards",
    ),
    ("runtime/distributed/launch.py", "", ""),
    (
        "runtime/layers/planted.py",
        "from diffusers import DiffusionPipeline\n",
        "Pipeline libraries are imported only by",
    ),
    (
        "cli/main.py",
        "def command():\n    import torch\n",
        "The command line's entry point imports no heavy package",
    ),
    (
        "kernels/tile_order/api.py",
        "from multimodal_gen.kernels.select import plan\n",
        "No modules, and no folders, import each other in a circle",
    ),
    (
        "kernels/select/api.py",
        "from multimodal_gen.kernels.tile_order import reference\n",
        "No modules, and no folders, import each other in a circle",
    ),
    ("kernels/select/plan.py", "", ""),
    ("kernels/tile_order/reference.py", "", ""),
]


def test_planted_imports_break_their_contracts(skeleton: Path) -> None:
    for path, text, _ in PLANTED:
        (skeleton / "multimodal_gen" / path).write_text(text)
    result = _lint(skeleton)
    assert result.returncode == 1, result.stdout + result.stderr
    broken = [line for line in result.stdout.splitlines() if line.endswith("BROKEN")]
    contracts = {contract for _, _, contract in PLANTED if contract}
    assert len(broken) == len(contracts)
    assert [name for name in contracts if not any(line.startswith(name) for line in broken)] == []
    for path, _, contract in PLANTED:
        module = path.removesuffix(".py").replace("/", ".")
        circle = re.search(r"tile_\w+", module)
        assert not contract or (circle[0] if circle else module) in result.stdout, path


def test_imports_in_their_places_break_nothing(skeleton: Path) -> None:
    for path, text in [
        ("integrations/diffusers.py", "import diffusers\n"),
        ("runtime/generator/output.py", "import imageio\n"),
        ("testing/tiny.py", "import transformers\n"),
        ("cli/generate.py", "from multimodal_gen.runtime.layers import attention\n"),
    ]:
        (skeleton / "multimodal_gen" / path).write_text(text)
    result = _lint(skeleton)
    assert result.returncode == 0, result.stdout + result.stderr


def triton_imports(package: Path) -> Iterator[str]:
    """Yield every import of triton but those of `*_kernel.py` and of what kernels share."""
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        launches = name.parts[:2] == ("kernels", "launch")
        if launches or (name.parts[0] == "kernels" and path.stem.endswith("_kernel")):
            continue
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "triton" in text else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [node.module]
            if any(imported.partition(".")[0] == "triton" for imported in names):
                yield f"{name}:{node.lineno}"


def test_triton_is_imported_by_kernels_alone(package: Path) -> None:
    assert list(triton_imports(package)) == []


def test_a_planted_import_of_triton_is_reported(tmp_path: Path) -> None:
    (tmp_path / "kernels" / "op").mkdir(parents=True)
    (tmp_path / "kernels" / "op" / "op_kernel.py").write_text("import triton\n")
    (tmp_path / "kernels" / "op" / "api.py").write_text("import triton_like, triton.language\n")
    (tmp_path / "late_kernel.py").write_text("def f():\n    from triton import jit\n")
    assert list(triton_imports(tmp_path)) == ["kernels/op/api.py:1", "late_kernel.py:2"]


def test_the_kernels_that_mypy_takes_untyped_are_those_there_are(
    repository: Path, package: Path
) -> None:
    """Its patterns know no part of a name, so they are listed."""
    kernels = {
        ".".join(path.relative_to(repository).with_suffix("").parts)
        for path in (package / "kernels").rglob("*_kernel.py")
    }
    text = (repository / "pyproject.toml").read_text()
    listed = re.findall(r'"(multimodal_gen\.kernels\.[\w.]+_kernel)"', text)
    assert listed == sorted(kernels)


def test_everything_exported_is_listed_before_it_is_loaded(repository: Path) -> None:
    script = "import multimodal_gen as m\nassert {*m.__all__} <= {*dir(m)}"
    assert _loaded_by(script, repository) == set()
