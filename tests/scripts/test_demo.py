"""The demo, its commands run in this process; the README shows an excerpt of what it prints."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from multimodal_gen.cli.main import main
from tests.architecture.test_examples import missing

REPOSITORY = Path(__file__).resolve().parents[2]

# The excerpts were taken without a GPU, where other backends are usable.
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the README shows what a machine without a GPU prints"
)


def _excerpt(name: str) -> str:
    """Return the README's block of this name."""
    text = (REPOSITORY / "README.md").read_text()
    (block,) = re.findall(rf"<!-- {name} -->\n```text\n(.*?)```", text, re.DOTALL)
    return block


@pytest.fixture(scope="module")
def libraries() -> None:
    """Import them before output is captured: their log handlers keep the stderr they find."""
    import diffusers  # noqa: F401
    import transformers  # noqa: F401


@pytest.fixture
def output(
    libraries: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run a command in this process, on a terminal of 100 columns; return what it prints."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(main: Callable[[Sequence[str]], int], *words: str) -> str:
        capfd.readouterr()
        code = main(words)
        out, err = capfd.readouterr()
        assert code == 0, err
        return out

    return run


@pytest.fixture
def make_model(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[str]], int]:
    """The script that makes the model; the libraries of this process stay as loud as they are."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = REPOSITORY / "scripts" / "make_tiny_model.py"
    spec = importlib.util.spec_from_file_location("make_tiny_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_quieten_libraries", lambda: None)
    return module.main


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The scripts, with an environment that notes the arguments its commands get, one per line."""
    shutil.copytree(REPOSITORY / "scripts", tmp_path / "scripts")
    (tmp_path / "scripts" / "_environment.sh").write_text(
        f'use_environment() {{ ARGUMENTS=("$@"); PYTHON="{tmp_path}/bin/python"; '
        f'ENVIRONMENT="{tmp_path}"; cd "{tmp_path}"; }}\n'
    )
    (tmp_path / "bin").mkdir()
    for name in ("python", "sglang"):
        command = tmp_path / "bin" / name
        command.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > '{tmp_path}/{name}'\n")
        command.chmod(0o755)
    return tmp_path


def test_the_demo_prints_what_the_readme_shows_and_leaves_a_video(
    checkout: Path,
    make_model: Callable[[Sequence[str]], int],
    output: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for left_over in ("outputs/tiny-wan/model_index.json", "outputs/demo.mp4"):
        (checkout / left_over).parent.mkdir(parents=True, exist_ok=True)
        (checkout / left_over).write_text("from an earlier run")
    demo = [str(checkout / "scripts" / "demo")]
    subprocess.run(demo, cwd=checkout, check=True, timeout=60)
    script, *model = (checkout / "python").read_text().splitlines()
    assert script == "scripts/make_tiny_model.py"
    monkeypatch.chdir(checkout)
    printed = output(make_model, *model)
    printed += output(main, *(checkout / "sglang").read_text().splitlines())
    assert missing(_excerpt("demo output"), printed) == [], printed
    assert (checkout / "outputs" / "demo.mp4").stat().st_size > 1000
    assert json.loads((checkout / "outputs" / "demo.json").read_text())
