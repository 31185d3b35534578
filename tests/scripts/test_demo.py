"""The demo, run for real; the README shows excerpts of what it and `attention list` print."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]

# The excerpts were taken without a GPU, where other backends are usable.
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the README shows what a machine without a GPU prints"
)


def _excerpt(name: str) -> list[str]:
    """Return the lines of the README's block of this name, "..." lines left out."""
    text = (REPOSITORY / "README.md").read_text()
    (block,) = re.findall(rf"<!-- {name} -->\n```text\n(.*?)```", text, re.DOTALL)
    return [line for line in block.splitlines() if line.strip() != "..."]


def _missing(excerpt: list[str], output: str) -> list[str]:
    """Return the lines of `excerpt` that `output` does not hold in that order."""
    printed = iter(output.splitlines())
    return [line for line in excerpt if line not in printed]


def _run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The scripts, with this test's own interpreter as their environment."""
    shutil.copytree(REPOSITORY / "scripts", tmp_path / "scripts")
    (tmp_path / "scripts" / "_environment.sh").write_text(
        f'use_environment() {{ ARGUMENTS=("$@"); PYTHON="{sys.executable}"; '
        f'ENVIRONMENT="{tmp_path}"; cd "{tmp_path}"; }}\n'
    )
    command = tmp_path / "bin" / "sglang"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m multimodal_gen "$@"\n')
    command.chmod(0o755)
    return tmp_path


def test_the_demo_prints_what_the_readme_shows_and_leaves_a_video(checkout: Path) -> None:
    for left_over in ("outputs/tiny-wan/model_index.json", "outputs/demo.mp4"):
        (checkout / left_over).parent.mkdir(parents=True, exist_ok=True)
        (checkout / left_over).write_text("from an earlier run")
    result = _run([str(checkout / "scripts" / "demo")], checkout)
    assert result.returncode == 0, result.stderr
    assert _missing(_excerpt("demo output"), result.stdout) == [], result.stdout
    assert (checkout / "outputs" / "demo.mp4").stat().st_size > 1000
    assert json.loads((checkout / "outputs" / "demo.json").read_text())


def test_attention_list_prints_what_the_readme_shows() -> None:
    result = _run([sys.executable, "-m", "multimodal_gen", "attention", "list"], REPOSITORY)
    assert result.returncode == 0, result.stderr
    assert _missing(_excerpt("list output"), result.stdout) == [], result.stdout


def test_a_line_that_is_not_printed_is_reported() -> None:
    output = "first\nsecond\nthird\n"
    assert _missing(["first", "third"], output) == []
    assert _missing(["third", "first"], output) == ["first"]
    assert _missing(["fourth"], output) == ["fourth"]
