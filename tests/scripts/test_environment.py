"""scripts/_environment.sh, run with a real interpreter and stand-ins for pip and uv."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# Records its arguments and does what an editable install leaves behind. There is no uv to install.
FAKE_PIP = """
import pathlib, sys, sysconfig
prefix = pathlib.Path(sys.prefix)
if sys.argv[-1] == "uv":
    sys.exit(1)
if "install" in sys.argv:
    with open(prefix / "pip.log", "a") as log:
        print(*sys.argv[1:], file=log)
    if "--target" in sys.argv:
        pathlib.Path(sys.argv[sys.argv.index("--target") + 1], "triton").mkdir()
        sys.exit((prefix / "pip_fails").exists())
    checkout = sys.argv[sys.argv.index("--editable") + 1].partition("[")[0]
    site = pathlib.Path(sysconfig.get_path("purelib"))
    (site / "multimodal_gen.pth").write_text(checkout)
    command = prefix / "bin" / "sglang"
    command.touch()
    command.chmod(0o755)
    sys.exit((prefix / "pip_fails").exists())
"""

# Does the same, and records where it looks.
FAKE_UV = f"""
import os, pathlib, sys
names = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS")
if "install" in sys.argv:
    (pathlib.Path(sys.prefix) / "indexes").write_text(" ".join(map(os.environ.get, names)))
{FAKE_PIP}
"""


class Checkout:
    """A copy of the scripts beside an empty package, and an active environment to run them in."""

    def __init__(self, root: Path, environment: Path) -> None:
        self.root = root
        self.environment = environment
        (root / "multimodal_gen").mkdir(parents=True)
        (root / "multimodal_gen" / "__init__.py").touch()
        shutil.copytree(REPOSITORY / "scripts", root / "scripts")
        shutil.copy(REPOSITORY / "pyproject.toml", root)

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.shell(
            'use_environment "$@"; echo "rest: ${ARGUMENTS[*]-}"', *arguments, **variables
        )

    def install_triton(self, **variables: str) -> subprocess.CompletedProcess[str]:
        releases = self.root / "scripts" / "triton.txt"
        releases.write_text("# purpose release\n\ncompile 3.6.0\ninterpret 3.9.0\n")
        # The tests need no machine that triton is built for.
        prelude = "uname() { echo ${SYSTEM:-Linux x86_64}; };"
        return self.shell(f"{prelude} _find_python; install_triton", **variables)

    def install_browser(
        self, tmp_path: Path, system: str = "debian", installs: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run it as root where only a stand-in for apt-get can be found."""
        release = tmp_path / "os-release"
        release.write_text(f"NAME=x\nID={system}\n")
        prelude = (
            "installed=; id() { echo 0; }; command() { [[ $2 == apt-get || $2 == $installed ]]; };"
            f"apt-get() {{ [[ $1 == update ]] || installed={'chromium' if installs else 'x'}; }};"
        )
        variables = {"OS_RELEASE": str(release), "CI": "", **variables}
        return self.shell(f"{prelude} install_browser; echo done", **variables)

    def shell(
        self, script: str, *arguments: str, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        helper = self.root / "scripts" / "_environment.sh"
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f'source "$0"; {script}', str(helper), *arguments],
            env={**os.environ, "VIRTUAL_ENV": str(self.environment), **variables},
            cwd=self.root.parent,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def installs(self) -> list[str]:
        log = self.environment / "pip.log"
        return log.read_text().splitlines() if log.exists() else []

    def tritons(self) -> list[str]:
        return sorted(path.name for path in self.environment.glob("kernels/*"))


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    root = tmp_path / "venv"
    venv.create(root, with_pip=False, symlinks=True)
    (site,) = root.glob("lib/python*/site-packages")
    (site / "pip").mkdir()
    (site / "pip" / "__main__.py").write_text(FAKE_PIP)
    return root


def add_uv(environment: Path, script: str) -> None:
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "uv").mkdir()
    (site / "uv" / "__main__.py").write_text(script)


@pytest.fixture
def checkout(tmp_path: Path, environment: Path) -> Checkout:
    return Checkout(tmp_path / "checkout", environment)


def test_the_second_run_installs_nothing(checkout: Checkout) -> None:
    first, second = checkout.run(), checkout.run()
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    assert "Installing multimodal_gen[video,compare,dev,docs]" in first.stdout
    assert "Installing" not in second.stdout
    assert len(checkout.installs()) == 1


def test_the_constraints_pin_the_installation(checkout: Checkout) -> None:
    checkout.run()
    (install,) = checkout.installs()
    assert install.endswith(f"--constraint {checkout.root}/scripts/constraints.txt")


@pytest.mark.parametrize("changed", ["pyproject.toml", "scripts/constraints.txt"])
def test_a_changed_requirement_installs_again(checkout: Checkout, changed: str) -> None:
    checkout.run()
    with (checkout.root / changed).open("a") as file:
        file.write("# changed\n")
    checkout.run()
    assert len(checkout.installs()) == 2


def test_another_checkout_in_the_same_environment_is_noticed(
    checkout: Checkout, tmp_path: Path
) -> None:
    other = Checkout(tmp_path / "other", checkout.environment)
    for current in (checkout, other, checkout):
        assert current.run().returncode == 0
    editable = [line.split("--editable ")[1].partition("[")[0] for line in checkout.installs()]
    assert editable == [str(checkout.root), str(other.root), str(checkout.root)]


def test_a_stamp_without_its_installation_is_stale(checkout: Checkout) -> None:
    checkout.run()
    (pth,) = checkout.environment.glob("lib/python*/site-packages/multimodal_gen.pth")
    pth.unlink()
    checkout.run()
    assert len(checkout.installs()) == 2


def test_a_failed_installation_is_an_error_and_is_tried_again(checkout: Checkout) -> None:
    (checkout.environment / "pip_fails").touch()
    result = checkout.run()
    assert result.returncode == 1
    assert "error: the installation failed" in result.stderr
    (checkout.environment / "pip_fails").unlink()
    assert checkout.run().returncode == 0
    assert len(checkout.installs()) == 2


@pytest.mark.parametrize("form", [["--constraints", "mine.txt"], ["--constraints=mine.txt"]])
def test_constraints_are_taken_out_of_the_arguments(
    checkout: Checkout, tmp_path: Path, form: list[str]
) -> None:
    (tmp_path / "mine.txt").write_text("torch==2.11.0\n")
    result = checkout.run("-k", "name", *form, "-x")
    assert "rest: -k name -x" in result.stdout
    (install,) = checkout.installs()
    assert install.endswith(f"--constraint {tmp_path}/mine.txt")


def test_a_missing_constraints_file_is_named(checkout: Checkout) -> None:
    result = checkout.run("--constraints", "absent.txt")
    assert result.returncode == 1
    assert "--constraints must name a file, got absent.txt" in result.stderr
    assert checkout.installs() == []


def test_an_old_python_is_refused_with_its_version(checkout: Checkout) -> None:
    python = checkout.environment / "bin" / "python"
    python.unlink()
    python.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.9.18" && exit 0\nexit 1\n')
    python.chmod(0o755)
    result = checkout.run()
    assert result.returncode == 1
    assert "Python 3.10 or newer is needed" in result.stderr
    assert "Python 3.9.18" in result.stderr


def test_an_active_environment_without_an_interpreter_is_named(checkout: Checkout) -> None:
    shutil.rmtree(checkout.environment / "bin")
    result = checkout.run()
    assert result.returncode == 1
    assert f"VIRTUAL_ENV is {checkout.environment}, but it has no bin/python" in result.stderr


def test_an_environment_is_made_where_none_is_active(checkout: Checkout, tmp_path: Path) -> None:
    # A python3 whose `-m venv` clones the prepared environment: making a real one with pip in it
    # takes many seconds.
    tools = tmp_path / "tools"
    tools.mkdir()
    python3 = tools / "python3"
    python3.write_text(
        f"#!/bin/sh\n"
        f'if [ "$1 $2" = "-m venv" ]; then cp -r "{checkout.environment}" "$4"; exit; fi\n'
        f'exec "{sys.executable}" "$@"\n'
    )
    python3.chmod(0o755)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    result = checkout.run(VIRTUAL_ENV="", PATH=path)
    assert result.returncode == 0, result.stderr
    assert "Making .venv" in result.stdout
    assert (checkout.root / ".venv" / "multimodal_gen.stamp").exists()
    assert "Making" not in checkout.run(VIRTUAL_ENV="", PATH=path).stdout


def test_the_tritons_of_the_kernel_tests_are_installed_once_and_apart(checkout: Checkout) -> None:
    first, second = checkout.install_triton(), checkout.install_triton()
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    assert second.stdout == ""
    assert checkout.tritons() == ["triton-3.6.0", "triton-3.9.0"]
    installs = checkout.installs()
    assert [line.split()[-1] for line in installs] == ["triton==3.6.0", "triton==3.9.0"]
    assert all("--no-deps --target" in line for line in installs)
    assert all(
        (checkout.environment / "kernels" / name / "triton").is_dir() for name in checkout.tritons()
    )


def test_a_triton_that_the_environment_has_is_not_installed_again(checkout: Checkout) -> None:
    (site,) = checkout.environment.glob("lib/python*/site-packages")
    (site / "triton-3.9.0.dist-info").mkdir()
    (site / "triton-3.9.0.dist-info" / "METADATA").write_text("Name: triton\nVersion: 3.9.0\n")
    checkout.install_triton()
    assert checkout.tritons() == ["triton-3.6.0"]


def test_kernel_tests_are_skipped_where_no_triton_can_be_installed(checkout: Checkout) -> None:
    (checkout.environment / "pip_fails").touch()
    result = checkout.install_triton(CI="")
    assert result.returncode == 0, result.stderr
    assert "kernel tests that need triton 3.6.0 (compile) are skipped" in result.stdout
    assert "kernel tests that need triton 3.9.0 (interpret) are skipped" in result.stdout
    assert checkout.tritons() == []


def test_in_ci_a_triton_that_cannot_be_installed_is_an_error(checkout: Checkout) -> None:
    (checkout.environment / "pip_fails").touch()
    result = checkout.install_triton(CI="true")
    assert result.returncode == 1
    assert "error: the installation of triton 3.6.0 failed" in result.stderr
    assert checkout.tritons() == []


def test_torchao_is_installed_once_and_apart(checkout: Checkout) -> None:
    first = checkout.shell("_find_python; install_torchao; install_torchao")
    assert first.returncode == 0, first.stderr
    (folder,) = (checkout.environment / "apart").iterdir()
    assert [line.split()[-1] for line in checkout.installs()] == [folder.name.replace("-", "==")]
    assert f"Installing {folder.name.replace('-', ' ')} into {folder}" in first.stdout


def test_tests_of_eight_bits_are_skipped_where_torchao_cannot_be_installed(
    checkout: Checkout,
) -> None:
    (checkout.environment / "pip_fails").touch()
    result = checkout.shell("_find_python; install_torchao", CI="")
    assert result.returncode == 0, result.stderr
    assert "That failed: the tests of 8-bit weights are skipped" in result.stdout
    assert not list((checkout.environment / "apart").iterdir())
    result = checkout.shell("_find_python; install_torchao", CI="true")
    assert result.returncode == 1
    assert "error: the installation of torchao" in result.stderr


def test_no_triton_is_installed_on_other_systems(checkout: Checkout) -> None:
    result = checkout.install_triton(SYSTEM="Darwin arm64", CI="true")
    assert result.returncode == 0, result.stderr
    assert "No triton is installed on Darwin arm64" in result.stdout
    assert checkout.installs() == []


def test_uv_installs_where_it_can_be_had_from_where_pip_would(checkout: Checkout) -> None:
    add_uv(checkout.environment, FAKE_UV)
    variables = {"PIP_EXTRA_INDEX_URL": "https://b", "PIP_FIND_LINKS": "/c /d"}
    result = checkout.run(PIP_INDEX_URL="https://a", **variables)
    assert result.returncode == 0, result.stderr
    (install,) = checkout.installs()
    assert install.startswith("pip install --python ")
    assert install.endswith(f"--constraint {checkout.root}/scripts/constraints.txt")
    assert (checkout.environment / "indexes").read_text() == "https://a https://b /c,/d"


def test_pip_installs_where_uv_fails(checkout: Checkout) -> None:
    add_uv(checkout.environment, "import sys; sys.exit('pip' in sys.argv)")
    assert checkout.run().returncode == 0
    (install,) = checkout.installs()
    assert install.startswith("install --quiet ")


def test_a_missing_browser_is_installed_on_debian(checkout: Checkout, tmp_path: Path) -> None:
    result = checkout.install_browser(tmp_path)
    assert result.stdout.splitlines() == ["Installing chromium, for the tests of reports", "done"]


@pytest.mark.parametrize(("system", "installs"), [("ubuntu", True), ("debian", False)])
def test_a_browser_that_cannot_be_had_is_an_error_in_ci_only(
    checkout: Checkout, tmp_path: Path, system: str, installs: bool
) -> None:
    result = checkout.install_browser(tmp_path, system, installs)
    assert "are skipped\ndone" in result.stdout
    result = checkout.install_browser(tmp_path, system, installs, CI="true")
    assert result.returncode == 1
    assert "error: the tests of reports need a browser" in result.stderr
