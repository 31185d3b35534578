"""The kernel compiles for SM90 without a GPU: no spills; test_children.py runs this."""

import re

import pytest
import torch

from tests.kernels.compiling import Compiler, needs_triton

pytestmark = needs_triton


DTYPES = [
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
]


@pytest.mark.parametrize(
    ("first", "result", "size"),
    [
        pytest.param(*dtypes, size, marks=[] if i == j == 0 else [pytest.mark.slow])
        for i, dtypes in enumerate(DTYPES)
        for j, size in enumerate((64, 128))
    ],
)
def test_the_merge_reads_16_bytes_at_a_time_and_does_not_spill(
    compiler: Compiler, first: torch.dtype, result: torch.dtype, size: int
) -> None:
    from multimodal_gen.kernels.part_merge.part_merge_kernel import merge_two

    out, more = (torch.empty(1, 64, 4, size, dtype=x) for x in (first, torch.bfloat16))
    lse = torch.empty(1, 4, 64)
    merge_two(out, lse, more, lse, result)
    compiler.assert_clean()
    loads = re.findall(r"ld\.global\S*evict_first\S*", compiler.kernels[0].ptx)
    assert loads
    assert all(".v4." in load for load in loads)
