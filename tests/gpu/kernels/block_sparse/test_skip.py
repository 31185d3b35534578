"""Steps that kernels leave out on a GPU, against the reference that leaves the same blocks out."""

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention, kernel_for
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.skip import Skip

HEADS, BELOW = 2, 30.0  # decibels: a weight of a thousandth, 6.9 in the exponent
# Scores of the blocks. The highest comes first: what is far below it counts for e^-9.
LEVELS = (9.0, 0.0, 9.0, 4.0, 0.0, 0.0, 8.0)
SHARE_SKIPPED = 3 / 7


@pytest.fixture(params=["triton", "gluon"])
def kernel(request):
    q = torch.zeros(1, 64, 1, 64, device="cuda", dtype=torch.bfloat16)
    plan = BlockPlan.dense(Blocks.regular(64, 64), Blocks.regular(64, 64), "cuda")
    try:
        return kernel_for(q, q, q, plan, request.param)
    except UnsupportedBackendError as error:
        pytest.skip(str(error))


def inputs(size, head_size, last, dtype):
    """Return q, k and v: values of blocks that hardly count are large enough to be missed."""
    total = (len(LEVELS) - 1) * size + last
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = 0.05 * torch.randn(3, 1, total, HEADS, head_size, generator=generator, device="cuda")
    level = torch.tensor(LEVELS, device="cuda").repeat_interleave(size)[:total]
    q[..., 0] = head_size**0.5
    k[..., 0] = level[:, None]
    v += torch.where(level == 0, 500.0, 1.0)[:, None, None]
    return [x.to(dtype) for x in (q, k, v)]


def plan_of_all(size, total, *, bits=False, ragged=False):
    blocks = Blocks.regular(total, size)
    if ragged:
        starts, lengths = (x.contiguous() for x in blocks.bounds(torch.device("cuda")))
        blocks = Blocks.ragged(starts, lengths, total=total, size=size)
    indices = torch.arange(blocks.num, dtype=torch.int32, device="cuda")
    return BlockPlan(
        indices=indices.expand(1, 1, blocks.num, -1).contiguous(),
        counts=torch.full((1, 1, blocks.num), blocks.num, dtype=torch.int32, device="cuda"),
        q=blocks,
        kv=blocks,
        row_bits=torch.full((1, 1, total, 1), -1, dtype=torch.int32, device="cuda")
        if bits
        else None,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize(
    ("size", "last", "form"),
    [
        (64, 64, {}),
        (128, 128, {}),
        (384, 384, {}),
        (64, 31, {}),
        (128, 100, {"ragged": True}),
        (128, 128, {"bits": True}),
    ],
    ids=str,
)
def test_a_kernel_leaves_out_what_the_reference_does(kernel, size, last, form, head_size, dtype):
    qkv = inputs(size, head_size, last, dtype)
    plan = plan_of_all(size, qkv[0].shape[1], **form)
    skip = Skip(below=BELOW, counts=torch.zeros(2, dtype=torch.int64, device="cuda"))
    out, lse = block_sparse_attention(
        *qkv, plan, return_lse=True, kernel=kernel, deterministic=True, skip=skip
    )
    wanted, wanted_lse = block_sparse_attention(
        *qkv, plan, return_lse=True, kernel="reference", skip=Skip(below=BELOW)
    )
    torch.testing.assert_close(out.float(), wanted.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-2)
    exact = block_sparse_attention(*qkv, plan, kernel=kernel)
    assert (out.float() - exact.float()).abs().min() > 2e-2, "what is left out would be seen"
    skipped, steps = skip.counts.tolist()
    if last == size:
        assert skipped / steps == pytest.approx(SHARE_SKIPPED)
    assert 0 < skipped < steps


def test_what_is_nowhere_far_below_is_all_kept(kernel):
    qkv = inputs(128, 128, 128, torch.bfloat16)
    plan = plan_of_all(128, qkv[0].shape[1])
    skip = Skip(below=1e4, counts=torch.zeros(2, dtype=torch.int64, device="cuda"))
    found = block_sparse_attention(*qkv, plan, kernel=kernel, skip=skip)
    exact = block_sparse_attention(*qkv, plan, kernel=kernel)
    torch.testing.assert_close(found, exact, rtol=2e-2, atol=2e-2)
    assert skip.counts[0] == 0 < skip.counts[1]
