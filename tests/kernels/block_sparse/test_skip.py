"""Steps whose scores lie far below what was seen: by definition, naively, in fp64."""

import math

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError, UsageError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention, kernel_for
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.skip import Skip
from tests.helpers.skipping import attend_naively, peaked_inputs

HEADS, SIZE, BLOCK, NUM = 2, 16, 8, 6


def plan_of_all(last: int = BLOCK) -> BlockPlan:
    total = (NUM - 1) * BLOCK + last
    blocks = Blocks(num=NUM, size=BLOCK, total=total)
    indices = torch.arange(NUM, dtype=torch.int32).expand(1, 1, NUM, NUM).contiguous()
    counts = torch.full((1, 1, NUM), NUM, dtype=torch.int32)
    return BlockPlan(indices=indices, counts=counts, q=blocks, kv=blocks)


@pytest.mark.parametrize("below", [3.0, 20.0, 60.0])
@pytest.mark.parametrize("last", [BLOCK, 3])
def test_what_is_left_out_is_what_a_loop_over_blocks_leaves_out(below, last):
    plan = plan_of_all(last)
    q, k, v = peaked_inputs(plan.q.total, HEADS, SIZE, BLOCK)
    skip = Skip(below=below, counts=torch.zeros(2, dtype=torch.int64))
    out, lse = block_sparse_attention(q, k, v, plan, return_lse=True, skip=skip)
    naive, naive_lse, skipped = attend_naively(q, k, v, BLOCK, below)
    assert (out.double() - naive).abs().max() <= 1e-5
    assert (lse.double() - naive_lse).abs().max() <= 1e-5
    assert skip.counts.tolist() == [skipped, HEADS * NUM * NUM]
    assert 0 < skipped < HEADS * NUM * NUM or below == 60.0


def test_the_error_is_at_most_the_weight_that_was_left_out():
    plan = plan_of_all()
    q, k, v = peaked_inputs(plan.q.total, HEADS, SIZE, BLOCK)
    exact = block_sparse_attention(q, k, v, plan)
    for below in (10.0, 30.0):
        out = block_sparse_attention(q, k, v, plan, skip=Skip(below=below))
        lost = plan.kv.total * 10 ** (-below / 10)
        assert (out - exact).abs().max() <= 2 * lost * v.abs().max()
    assert torch.equal(exact, block_sparse_attention(q, k, v, plan, skip=Skip(below=1e4)))


def test_counts_add_up_over_calls():
    plan = plan_of_all()
    qkv = peaked_inputs(plan.q.total, HEADS, SIZE, BLOCK)
    skip = Skip(below=20.0, counts=torch.zeros(2, dtype=torch.int64))
    for _ in range(2):
        block_sparse_attention(*qkv, plan, skip=skip)
    assert skip.counts[1] == 2 * HEADS * NUM * NUM


@pytest.mark.parametrize("below", [0.0, -1.0, math.nan, math.inf])
def test_a_distance_that_is_none_is_refused(below):
    with pytest.raises(UsageError, match="`below` must be a positive number of decibels, got"):
        Skip(below=below)


def test_kernels_that_leave_nothing_out_are_refused_and_never_chosen():
    plan = plan_of_all()
    q, k, v = peaked_inputs(plan.q.total, HEADS, SIZE, BLOCK)
    reason = "leaves no products out, and `skip_below` asks for it"
    with pytest.raises(UnsupportedBackendError, match=reason):
        block_sparse_attention(q, k, v, plan, kernel="fa4", skip=Skip(below=20.0))
    assert kernel_for(q, k, v, plan) == "reference"
    q.requires_grad_()
    with pytest.raises(UsageError, match="`skip` must be None where a gradient is asked for"):
        block_sparse_attention(q, k, v, plan, skip=Skip(below=20.0))
    k = k.as_subclass(type("Tagged", (torch.Tensor,), {}))
    with pytest.raises(UsageError, match="or a tensor is of a subclass"):
        block_sparse_attention(q.detach(), k, v, plan, skip=Skip(below=20.0))
