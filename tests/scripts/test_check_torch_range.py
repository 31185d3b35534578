"""scripts/check_torch_range, with a stand-in for scripts/test."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# Says what it was run with, and fails with the release that a file names.
FAKE_TEST = """#!/usr/bin/env bash
echo "tests: ${VIRTUAL_ENV##*/} $(grep '^torch==' "$2") ${*:3}"
[[ $(<fails) != "${VIRTUAL_ENV##*/}" ]]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copytree(REPOSITORY / "scripts", tmp_path / "scripts")
    (tmp_path / "scripts" / "test").write_text(FAKE_TEST)
    (tmp_path / "fails").write_text("none")
    for release in ("2.9.1", "2.15.0", "2.12.0"):
        python = tmp_path / ".venv-torch" / release / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)
    return tmp_path


def run(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = checkout / "scripts" / "check_torch_range"
    return subprocess.run([script, *arguments], capture_output=True, text=True, check=False)


def test_the_oldest_and_the_newest_torch_run_the_tests(checkout: Path) -> None:
    result = run(checkout, "-k", "layer")
    assert result.returncode == 0
    assert result.stdout.splitlines() == [
        "== torch 2.9.1",
        "tests: 2.9.1 torch==2.9.1 -k layer",
        "== torch 2.15.0",
        "tests: 2.15.0 torch==2.15.0 -k layer",
        "passed with torch: 2.9.1 2.15.0",
    ]


def test_what_fails_is_named_and_the_others_run(checkout: Path) -> None:
    (checkout / "fails").write_text("2.9.1")
    result = run(checkout)
    assert result.returncode == 1
    assert "tests: 2.15.0" in result.stdout
    assert result.stderr == "failed with torch: 2.9.1\n"


def test_releases_can_be_named(checkout: Path) -> None:
    result = run(checkout, "--index", "https://wheels.example", "--release", "2.12.0")
    assert result.returncode == 0
    assert result.stdout.splitlines()[-1] == "passed with torch: 2.12.0"
    assert run(checkout, "--release").stderr == "error: --release needs a value\n"
