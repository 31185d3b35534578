"""The kernels compile for SM90 without a GPU, through their launchers: no spills, no warnings.

A stand-in driver answers for the GPU, so what is compiled is what a launch would compile.
test_children.py runs these tests in a process of their own.
"""

import pytest
import torch

from tests.kernels.compiling import Compiler, needs_triton

pytestmark = needs_triton


@pytest.mark.parametrize(
    ("head_size", "dtype"),
    [
        pytest.param(64, torch.float32, marks=pytest.mark.slow),
        (128, torch.float16),
        pytest.param(256, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(128, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(256, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_nothing_spills(compiler: Compiler, head_size: int, dtype: torch.dtype) -> None:
    from multimodal_gen.kernels.kmeans.kmeans_kernel import kmeans_triton

    x, start = torch.empty(1, 640, 4, head_size, dtype=dtype), torch.zeros(1, 4, 1000, head_size)
    kmeans_triton(x, start, torch.ones(1, 640).bool(), iterations=1, tolerance=1e-4)
    assert len(compiler.kernels) == 6
    compiler.assert_clean()
