"""Runs test_triton.py in a process whose Triton is the interpreter."""

from pathlib import Path

import pytest

from tests.kernels.conftest import TIMEOUT, RunWithTriton

pytestmark = pytest.mark.timeout(TIMEOUT + 20)


def test_the_triton_kernels_are_right_under_the_interpreter(run_with_triton: RunWithTriton) -> None:
    tests = Path(__file__).with_name("test_triton.py")
    run_with_triton("interpret", tests, TRITON_INTERPRET="1")
