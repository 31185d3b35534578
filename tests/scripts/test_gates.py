"""The gate scripts, run over stand-ins for what they call."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]


def _write_script(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def _run(script: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        [str(script), *arguments], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the scripts whose environment is a stand-in for Python.

    It fails for every command line that holds a word of the file `fails`.
    """
    shutil.copytree(REPOSITORY / "scripts", tmp_path / "scripts")
    shutil.copytree(REPOSITORY / ".ci", tmp_path / ".ci")
    (tmp_path / "fails").touch()
    python = tmp_path / "python"
    _write_script(python, f'echo "ran $*"; ! echo "$*" | grep -qwf "{tmp_path}/fails"')
    (tmp_path / "scripts" / "_environment.sh").write_text(
        '_fail() { echo "error: $1" >&2; exit 1; }\n'
        f'use_environment() {{ ARGUMENTS=("$@"); PYTHON="{python}"; cd "{tmp_path}"; }}\n'
        "install_triton() { :; }\n"
        "install_torchao() { :; }\n"
        "compile_imports() { :; }\n"
        "install_browser() { :; }\n"
    )
    return tmp_path


def test_check_runs_every_check_and_passes(checkout: Path) -> None:
    result = _run(checkout / "scripts" / "check")
    assert result.returncode == 0, result.stderr
    assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith("ok ")] == [
        "format",
        "lint",
        "imports",
        "backend-table",
        "docs",
        "types",
    ]


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("format", "format"),
        ("check .", "lint"),
        ("importlinter", "imports"),
        ("backend_table.py", "backend-table"),
        ("measured_tables.py", "docs"),
        ("mkdocs", "docs"),
        ("mypy", "types"),
    ],
)
def test_check_goes_on_after_a_failure_and_names_it(checkout: Path, word: str, name: str) -> None:
    (checkout / "fails").write_text(f"{word}\n")
    result = _run(checkout / "scripts" / "check")
    assert result.returncode == 1
    assert name in result.stderr.removeprefix("failed: ").split()
    verdicts = [line for line in result.stdout.splitlines() if line.startswith(("ok ", "FAILED "))]
    assert len(verdicts) == 6


def test_hooks_of_pre_commit_are_the_checks() -> None:
    begun = re.findall(r"^begin ([\w-]+) ", (REPOSITORY / "scripts" / "check").read_text(), re.M)
    config = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())
    (local,) = config["repos"]
    assert [hook["id"] for hook in local["hooks"]] == begun
    assert all(hook["language"] == "system" for hook in local["hooks"])


def test_hosted_runners_run_what_people_do() -> None:
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step["run"] for step in workflow["jobs"]["run"]["steps"] if "run" in step]
    assert commands == [".ci/run"]


def test_check_refuses_an_unknown_argument(checkout: Path) -> None:
    result = _run(checkout / "scripts" / "check", "--fix")
    assert result.returncode == 1
    assert "unknown argument --fix" in result.stderr


def test_docs_checks_its_tables_and_builds_without_network(checkout: Path) -> None:
    result = _run(checkout / "scripts" / "docs")
    assert result.returncode == 0, result.stderr
    tables, build, site = result.stdout.splitlines()
    assert tables == "ran scripts/measured_tables.py --check"
    assert build.startswith("ran -m mkdocs build --quiet --strict --config-file docs/mkdocs.yml ")
    assert site == "site/index.html"
    (checkout / "fails").write_text("measured_tables.py\n")
    assert _run(checkout / "scripts" / "docs").returncode == 1


def test_docs_writes_what_is_generated_first_where_it_is_asked_to(checkout: Path) -> None:
    result = _run(checkout / "scripts" / "docs", "--update")
    written = [line.split()[1] for line in result.stdout.splitlines()[:3]]
    names = ("backend_table", "measured_tables", "mask_pictures")
    assert written == [f"scripts/{name}.py" for name in names]


def test_docs_refuses_an_unknown_argument(checkout: Path) -> None:
    result = _run(checkout / "scripts" / "docs", "--fix")
    assert result.returncode == 1
    assert "unknown argument --fix; valid: --constraints FILE, --update, --serve" in result.stderr


def test_the_test_script_passes_its_arguments_to_pytest(checkout: Path) -> None:
    result = _run(checkout / "scripts" / "test", "-k", "two words", "-x")
    assert "ran -m pytest -q -m not gpu and not multi_gpu" in result.stdout
    assert result.stdout.endswith("-k two words -x\n")


def test_the_demo_generates_twice_and_compares(checkout: Path) -> None:
    _write_script(checkout / "bin" / "sglang", 'echo "sglang $*"')
    helper = checkout / "scripts" / "_environment.sh"
    helper.write_text(helper.read_text() + f'ENVIRONMENT="{checkout}"\n')
    result = _run(checkout / "scripts" / "demo", "--fps", "8")
    assert result.returncode == 0, result.stderr
    dense, sparse, compared = result.stdout.splitlines()
    for line in (dense, sparse):
        assert line.startswith("sglang generate --model-path scripts/shapes/small ")
        assert " --fps 8 " in line
    assert dense.endswith(" --output-path outputs/dense.mp4 --attention-backend torch_sdpa")
    assert " --output-path outputs/sparse.mp4 --attention-backend video_sparse_attn " in sparse
    assert compared.startswith("ran scripts/shapes/score.py a red ball moves right ")
    assert compared.endswith(" outputs/dense.mp4 outputs/sparse.mp4")


@pytest.mark.parametrize(("test", "check", "status"), [(0, 0, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1)])
def test_ci_runs_both_gates_and_fails_when_either_does(
    checkout: Path, test: int, check: int, status: int
) -> None:
    _write_script(checkout / "scripts" / "test", f"exit {test}")
    _write_script(checkout / "scripts" / "check", f"exit {check}")
    result = _run(checkout / ".ci" / "run")
    assert result.returncode == status
    words = ["FAILED" if failed else "passed" for failed in (test, check)]
    summary = [line.split()[:2] for line in result.stdout.splitlines()[-2:]]
    assert summary == [["scripts/test", words[0]], ["scripts/check", words[1]]]


def test_ci_runs_the_command_the_readme_gives() -> None:
    assert "\n```bash\nscripts/test\n```\n" in (REPOSITORY / "README.md").read_text()
    assert "for step in scripts/test scripts/check;" in (REPOSITORY / ".ci" / "run").read_text()


@pytest.fixture
def gpu_checkout(checkout: Path) -> Path:
    """A checkout with one gpu test, one other test, and one that cannot even be imported."""
    shutil.copy(REPOSITORY / "pyproject.toml", checkout)
    tests = checkout / "tests"
    tests.mkdir()
    (tests / "test_kernel.py").write_text(
        "import pytest\n\n\n@pytest.mark.gpu\ndef test_kernel(): pass\n\n\ndef test_other(): pass\n"
    )
    (tests / "test_tool.py").write_text("import a_tool_this_machine_lacks\n")
    return checkout


# What the script asks before anything else.
_HAS_GPU = "[[ $1 == -c ]] && exit 0\n"


def test_gpu_check_without_a_gpu_says_that_it_needs_one(gpu_checkout: Path) -> None:
    _write_script(gpu_checkout / "bin" / "python3", '[[ $1 == -c ]] && exit 1\necho "$@"')
    result = _run(gpu_checkout / "scripts" / "gpu_check", path=str(gpu_checkout / "bin"))
    assert result.returncode == 1
    assert result.stderr == "error: these tests need a GPU, and torch finds none on this machine\n"
    assert not result.stdout


def test_gpu_check_runs_only_gpu_tests(gpu_checkout: Path) -> None:
    script = gpu_checkout / "scripts" / "gpu_check"
    _write_script(gpu_checkout / "bin" / "python3", f'{_HAS_GPU}exec "{sys.executable}" "$@"')
    result = _run(script, "-v", path=str(gpu_checkout / "bin"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed, 1 deselected" in result.stdout


def test_gpu_check_takes_a_path_instead(gpu_checkout: Path) -> None:
    _write_script(gpu_checkout / "bin" / "python3", f'{_HAS_GPU}echo "$@"')
    script = gpu_checkout / "scripts" / "gpu_check"
    result = _run(script, "tests/test_kernel.py::test_kernel", path=str(gpu_checkout / "bin"))
    assert result.stdout == "-m pytest -m gpu tests/test_kernel.py::test_kernel\n"


def test_gpu_check_without_gpu_tests_is_an_error(gpu_checkout: Path) -> None:
    (gpu_checkout / "tests" / "test_kernel.py").unlink()
    result = _run(gpu_checkout / "scripts" / "gpu_check")
    assert result.returncode == 1
    assert "error: no test is marked gpu" in result.stderr
