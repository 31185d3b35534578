"""Runs test_triton.py and test_compile.py of every operation in a process with its own triton.

The first with the interpreter, the second with the release that kernels for GPUs are compiled with;
both without the cases marked slow.
"""

from pathlib import Path

import pytest

from tests.kernels.conftest import TIMEOUT, RunWithTriton

pytestmark = pytest.mark.timeout(TIMEOUT + 20)

HERE = Path(__file__).parent
QUICK = ("-m", "not slow")


def operations(name: str) -> list[str]:
    """Return the folders with a file of this name."""
    return sorted(path.parent.name for path in HERE.glob(f"*/{name}"))


@pytest.mark.parametrize("operation", operations("test_compile.py"))
def test_the_kernels_compile_for_gpus_that_are_not_there(
    operation: str, run_with_triton: RunWithTriton
) -> None:
    run_with_triton("compile", HERE / operation / "test_compile.py", *QUICK)


@pytest.mark.parametrize("operation", operations("test_triton.py"))
def test_the_triton_kernels_are_right_under_the_interpreter(
    operation: str, run_with_triton: RunWithTriton
) -> None:
    run_with_triton("interpret", HERE / operation / "test_triton.py", *QUICK, TRITON_INTERPRET="1")
