"""The kernels compile for SM90 and SM80 without a GPU: no spills; test_children.py runs this."""

import pytest
import torch

from multimodal_gen.kernels.block_sparse.call import PooledBlocks, TailCall
from multimodal_gen.kernels.block_sparse.plan import Blocks
from multimodal_gen.kernels.block_sparse.tuning import tail_tile
from tests.kernels.cases import with_slow
from tests.kernels.compiling import Compiler, needs_triton

pytestmark = needs_triton

# Key blocks of 64, rows of a query block, head size, and what is special.
EVERY = [
    (size, rows, form)
    for size in (64, 128, 256)
    for rows, form in ((64, "pair"), (64, "ragged"), (384, "regular"), (128, "bits"))
]
QUICK = [(128, 64, "pair"), (128, 128, "bits")]


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("size", "rows", "form"), with_slow(EVERY, QUICK))
def test_the_tail_does_not_spill(
    compiler: Compiler, size: int, rows: int, form: str, capability: int
) -> None:
    from multimodal_gen.kernels.block_sparse import tail_kernel

    compiler.driver.capability = capability
    queries: Blocks | None = Blocks.regular(768, rows)
    if form == "ragged":
        starts = torch.arange(0, 768, rows).int()
        queries = Blocks.ragged(starts, torch.full_like(starts, rows - 3), total=768, size=rows)
    num = 12 if queries is None else queries.num
    kept = torch.zeros(1, 4, num, 300, dtype=torch.bool)
    if form == "bits":
        queries, kept = None, torch.zeros(1, 4, 768, 10, dtype=torch.int32)
    q = torch.zeros(1, 768, 4, size, dtype=torch.bfloat16)
    means = torch.zeros(1, 2, 300, size, dtype=torch.bfloat16)
    counts = torch.ones(1, 1, 300, dtype=torch.int32)
    tile = tail_tile(
        head_size=size,
        q_size=1 if form == "bits" else rows,
        regular=form in ("pair", "regular"),
        capability=(capability // 10, capability % 10),
    )
    lse = torch.zeros(1, 4, 768)
    pooled = PooledBlocks(keys=means, values=means, counts=counts)
    call = TailCall(q.clone(), lse, q, pooled, kept, queries, 0.1)
    tail_kernel.add_tail(call, tile=tile, copy_engine=capability >= 90)
    assert compiler.names == {"tail_kernel"}
    compiler.assert_clean()


def test_listing_does_not_spill(compiler: Compiler) -> None:
    from multimodal_gen.kernels.block_sparse.steps_kernel import make_lists

    make_lists(torch.zeros(1, 4, 100, 1182, dtype=torch.bool))
    compiler.assert_clean()


def test_pooling_does_not_spill(compiler: Compiler) -> None:
    from multimodal_gen.kernels.block_sparse import tail_kernel

    bounds = torch.zeros(1, 4, 100, dtype=torch.int32)
    tail_kernel.pool_blocks(torch.zeros(1, 768, 4, 128, dtype=torch.bfloat16), bounds, bounds)
    compiler.assert_clean()
