"""Runs test_*triton.py and test_*compile.py of every operation in processes with their own triton.

The first with the interpreter, the second with the oldest release that the kernels for GPUs are
compiled with, and those in Gluon with the newest one; all without the cases marked slow. Compiling
kernels that are in Triton alone is slow itself.
"""

from pathlib import Path

import pytest

from tests.kernels.compiling import pinned_release
from tests.kernels.conftest import TIMEOUT, RunWithTriton

pytestmark = pytest.mark.timeout(TIMEOUT + 20)

HERE = Path(__file__).parent
QUICK = ("-m", "not slow")
# The operations with kernels in Gluon, whose language differs between releases.
GLUON = ("block_sparse", "cluster_attention", "launch", "quantized_attention")
# scripts/triton.txt says how to get them.
BETWEEN = ("3.7.1", "3.8.0")


def files(kind: str) -> list[str]:
    """Return the files of a kind, "triton" or "compile", by their paths without the suffix."""
    found = HERE.glob(f"*/test_*{kind}.py")
    return sorted(path.relative_to(HERE).with_suffix("").as_posix() for path in found)


@pytest.mark.parametrize(
    "file",
    [
        # In Triton alone, which releases hardly change; the interpreter runs them in every gate.
        pytest.param(name, marks=[] if name.startswith(GLUON) else pytest.mark.slow)
        for name in files("compile")
    ],
)
def test_the_kernels_compile_for_gpus_that_are_not_there(
    file: str, run_with_triton: RunWithTriton
) -> None:
    run_with_triton(pinned_release("compile"), [HERE / f"{file}.py"], *QUICK)


@pytest.mark.parametrize("operation", GLUON)
def test_the_gluon_kernels_compile_with_the_newest_triton(
    operation: str, run_with_triton: RunWithTriton
) -> None:
    run_with_triton(pinned_release("newest"), [HERE / operation / "test_compile.py"], *QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("release", BETWEEN)
@pytest.mark.parametrize("operation", GLUON)
def test_the_gluon_kernels_compile_with_the_releases_between(
    operation: str, release: str, run_with_triton: RunWithTriton
) -> None:
    run_with_triton(release, [HERE / operation / "test_compile.py"], *QUICK)


def test_the_triton_kernels_are_right_under_the_interpreter(run_with_triton: RunWithTriton) -> None:
    """All in one process: to start it takes as long as the tests of many an operation."""
    tests = [HERE / f"{name}.py" for name in files("triton")]
    run_with_triton(pinned_release("interpret"), tests, *QUICK, TRITON_INTERPRET="1")
