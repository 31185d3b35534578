"""Runs test_compile.py in a process with the triton that the GPU kernels are compiled with."""

from pathlib import Path

import pytest

from tests.kernels.conftest import TIMEOUT, RunWithTriton

pytestmark = pytest.mark.timeout(TIMEOUT + 20)


def test_the_kernels_compile_for_gpus_that_are_not_there(run_with_triton: RunWithTriton) -> None:
    tests = Path(__file__).with_name("test_compile.py")
    run_with_triton("compile", tests, "-m", "not slow")
