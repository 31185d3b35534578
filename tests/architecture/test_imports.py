"""What importing the package costs, and which way its imports point."""

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HEAVY = ("torch", "diffusers", "transformers", "triton", "numpy", "accelerate", "imageio")
SKELETON = (
    "cli",
    "integrations/models",
    "integrations/parallel",
    "kernels/op",
    "runtime/generator",
    "runtime/layers/attention/backends",
    "runtime/platforms",
    "testing",
)


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
def skeleton(repository: Path, tmp_path: Path) -> Path:
    """The real contracts over an empty package of our layout."""
    shutil.copy(repository / "pyproject.toml", tmp_path)
    for name in SKELETON:
        folder = tmp_path / "multimodal_gen" / name
        folder.mkdir(parents=True)
        for parent in (folder, *folder.parents):
            (parent / "__init__.py").touch()
            if parent.name == "multimodal_gen":
                break
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


def test_the_layers_import_without_triton_and_without_pipeline_libraries(
    repository: Path,
) -> None:
    loaded = _loaded_by(
        """
        blocked = ("triton", "diffusers", "transformers", "accelerate", "imageio")
        sys.modules.update(dict.fromkeys(blocked))  # None: importing them raises ImportError
        from multimodal_gen.runtime.layers.attention import LocalAttention
        for name in blocked:
            del sys.modules[name]
        """,
        repository,
    )
    assert loaded <= {"torch", "numpy"}


def test_every_module_imports(repository: Path, package: Path) -> None:
    names = [
        ".".join(path.relative_to(repository).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(package.rglob("*.py"))
        # Running __main__ is its import; *_kernel.py may need a Triton this machine lacks.
        if path.name != "__main__.py" and not path.name.endswith("_kernel.py")
    ]
    assert len(names) > 20
    result = _run(
        f"""
        import importlib, traceback
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
    assert result.returncode == 0, result.stderr


def test_the_import_contracts_hold(repository: Path) -> None:
    result = _lint(repository)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    ("path", "text", "broken"),
    [
        (
            "kernels/planted.py",
            "from multimodal_gen.runtime import platforms\n",
            "The package depends downwards",
        ),
        ("planted.py", "", "The package depends downwards"),
        (
            "runtime/platforms/planted.py",
            "def late():\n    from multimodal_gen.runtime.layers import attention\n",
            "The runtime depends downwards",
        ),
        ("runtime/planted.py", "", "The runtime depends downwards"),
        (
            "runtime/layers/attention/backends/planted.py",
            "import triton.language as tl\n",
            "Triton is imported only by *_kernel.py",
        ),
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
    ],
    ids=[
        "kernels-up",
        "unplaced-module",
        "platforms-up",
        "unplaced-runtime-module",
        "triton",
        "diffusers",
        "torch-in-cli",
    ],
)
def test_a_planted_import_breaks_its_contract(
    skeleton: Path, path: str, text: str, broken: str
) -> None:
    (skeleton / "multimodal_gen" / path).write_text(text)
    result = _lint(skeleton)
    assert result.returncode == 1, result.stdout + result.stderr
    (verdict,) = [line for line in result.stdout.splitlines() if "BROKEN" in line]
    assert verdict.startswith(broken)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("integrations/diffusers.py", "import diffusers\n"),
        ("runtime/generator/save.py", "import imageio\n"),
        ("testing/tiny.py", "import transformers\n"),
        ("cli/generate.py", "from multimodal_gen.runtime.layers import attention\n"),
    ],
)
def test_an_import_in_its_place_breaks_nothing(skeleton: Path, path: str, text: str) -> None:
    (skeleton / "multimodal_gen" / path).write_text(text)
    result = _lint(skeleton)
    assert result.returncode == 0, result.stdout + result.stderr
