"""The kernels compile for SM90 without a GPU, through their launchers: no spills, no warnings.

A stand-in driver answers for the GPU, so what is compiled is what a launch would compile.
test_children.py runs these tests in a process of their own.
"""

import pytest
import torch

from multimodal_gen.kernels.select.row_reference import ChunkGroups
from tests.kernels.cases import with_slow
from tests.kernels.compiling import Compiler, needs_triton

pytestmark = needs_triton


@pytest.mark.parametrize(
    ("head_size", "size"), with_slow([(64, 4), (128, 6), (128, 8)], [(128, 8)])
)
def test_the_sort_and_the_merge_do_not_spill(compiler: Compiler, head_size: int, size: int) -> None:
    from multimodal_gen.kernels.select.row_kernel import (
        merge_parts,
        move_rows,
        sort_rows,
    )

    query = torch.empty(1, 640, 4, head_size, dtype=torch.bfloat16)
    groups = ChunkGroups(num_chunks=72, size=size)
    rows = sort_rows(torch.zeros(1, 4, 640, 3).int(), groups, block=128, extra=True)
    parts = move_rows(query, rows)
    lse = torch.empty(parts.shape[:3])
    merge_parts(parts, lse.transpose(1, 2), rows, query)
    assert len(compiler.kernels) == 7
    compiler.assert_clean()
