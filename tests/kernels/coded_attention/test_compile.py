"""The kernel compiles for SM90 without a GPU: hardly a spill; test_children.py runs this."""

import pytest
import torch

from multimodal_gen.kernels.coded_attention.codes import OF_KEYS, OF_VALUES, quantise
from tests.kernels.compiling import Compiler, assert_clean, needs_triton

pytestmark = needs_triton

# Bytes that a thread may put aside, once for all steps.
FEW = 64


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(
    "size",
    [pytest.param(size, marks=[] if size == 128 else [pytest.mark.slow]) for size in (64, 80, 128)],
)
def test_products_are_those_of_hopper_loads_are_wide_and_little_spills(
    compiler: Compiler, size: int, bits: int
) -> None:
    from multimodal_gen.kernels.coded_attention.coded_attention_kernel import attend

    q = torch.zeros(1, 256, 4, size, dtype=torch.bfloat16)
    coded = (quantise(q[:, :128, :2], bits, grouping) for grouping in (OF_KEYS, OF_VALUES))
    attend(q, *coded, torch.zeros(1, dtype=torch.int32), bits=bits, scale=1.0)
    assert_clean(compiler.kernels, most=FEW)
    ptx = compiler.kernels[0].ptx
    assert "wgmma.mma_async" in ptx
    assert "cp.async" in ptx  # of the next step
    assert "ld.global.b16" not in ptx  # scales one by one
