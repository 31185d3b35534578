"""The pooled tail's definition against one that is written token by token, and what it refuses."""

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.call import PooledBlocks
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.tail import PooledTail, add_tail, kept_map, pool_blocks
from tests.helpers.block_plans import FORMS, PlanShape, random_plan
from tests.helpers.inputs import make_qkv
from tests.helpers.reference import reference_attention
from tests.helpers.tail import assert_tail_within_error_budget, naive_tail

SCALE = 0.25


def inputs(plan, *, batch=2, heads=4, kv_heads=None, dtype=torch.float64, seed=0):
    options = {"num_keys": plan.kv.total, "num_kv_heads": kv_heads, "seed": seed}
    qkv = make_qkv(batch, plan.q.total, heads, 16, **options)
    return tuple(x.to(dtype) for x in qkv)


def shape(**given):
    sizes = {"num_q": 3, "num_kv": 5, "q_size": 16, "kv_size": 16}
    return PlanShape(**{**sizes, **given})


def check_exactly(plan, q, k, v, **tail):
    """Assert that float64 inputs give what the definition does; engines give lse in fp32."""
    want = naive_tail(q, k, v, plan, scale=SCALE, num=tail.get("num_blocks"),
                      first_order=tail.get("first_order", False))  # fmt: skip
    given = {"scale": SCALE, "return_lse": True, "tail": PooledTail(**tail)}
    out, lse = block_sparse_attention(q, k, v, plan, **given)
    torch.testing.assert_close(out, want[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(lse.double(), want[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("q_form", FORMS)
@pytest.mark.parametrize("kv_form", FORMS)
@pytest.mark.parametrize("keep", [0.0, 0.4])
def test_blocks_of_every_form_count_by_the_means_of_their_tokens(q_form, kv_form, keep):
    plan = random_plan(shape(batch=2, heads=4, q_form=q_form, kv_form=kv_form, keep=keep), seed=3)
    check_exactly(plan, *inputs(plan))


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("heads", [1, 4])
def test_heads_that_share_keys_have_lists_of_their_own(heads, kv_heads):
    plan = random_plan(shape(heads=heads, kv_form="ragged"), seed=5)
    check_exactly(plan, *inputs(plan, kv_heads=kv_heads))


def test_blocks_behind_the_pooled_ones_are_kept_or_dropped():
    plan = random_plan(shape(kv_form="padded", keep=0.3), seed=1)
    check_exactly(plan, *inputs(plan), num_blocks=3)
    q, k, v = inputs(plan)
    none = block_sparse_attention(q, k, v, plan, scale=SCALE, tail=PooledTail(num_blocks=0))
    assert torch.equal(none, block_sparse_attention(q, k, v, plan, scale=SCALE))


@pytest.mark.parametrize("kv_heads", [None, 2])
def test_values_follow_keys_to_first_order(kv_heads):
    plan = random_plan(shape(kv_form="ragged", keep=0.3), seed=7)
    qkv = inputs(plan, kv_heads=kv_heads)
    check_exactly(plan, *qkv, first_order=True)
    check_exactly(plan, *qkv, first_order=True, num_blocks=4)


def test_a_plan_of_everything_is_dense_attention():
    plan = BlockPlan.dense(Blocks.regular(40, 16), Blocks.regular(70, 16), "cpu")
    q, k, v = inputs(plan)
    out = block_sparse_attention(q, k, v, plan, scale=SCALE, tail=PooledTail())
    exact, _ = reference_attention(q, k, v, scale=SCALE)
    torch.testing.assert_close(out, exact, rtol=0, atol=1e-6)


def test_blocks_of_equal_tokens_lose_nothing():
    plan = random_plan(shape(keep=0.3), seed=2)
    q, k, v = inputs(plan)
    for x in (k, v):
        for start in range(0, plan.kv.total, 16):
            x[:, start : start + 16] = x[:, start : start + 1]
    out = block_sparse_attention(q, k, v, plan, scale=SCALE, tail=PooledTail())
    exact, _ = reference_attention(q, k, v, scale=SCALE)
    torch.testing.assert_close(out, exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_means_are_rounded_to_the_tokens_dtype(dtype):
    plan = random_plan(shape(kv_form="ragged", q_form="ragged", keep=0.3), seed=4)
    q, k, v = inputs(plan, dtype=dtype)
    out, lse = block_sparse_attention(
        q, k, v, plan, scale=SCALE, return_lse=True, tail=PooledTail()
    )
    assert_tail_within_error_budget(out, lse, q, k, v, plan, scale=SCALE)
    assert pool_blocks(k, v, plan.kv, 2).keys.dtype == dtype


def test_means_that_are_given_are_taken():
    plan = random_plan(shape(keep=0.5), seed=6)
    q, k, v = inputs(plan)
    pooled = pool_blocks(k, v, plan.kv, 4)
    tail = PooledTail(num_blocks=4, pooled=PooledBlocks(
        keys=pooled.keys, values=2 * pooled.values, counts=pooled.counts))  # fmt: skip
    mine = block_sparse_attention(q, k, v, plan, scale=SCALE, tail=tail)
    other = block_sparse_attention(q, k, v, plan, scale=SCALE, tail=PooledTail(num_blocks=4))
    assert (mine - other).abs().max() > 1e-3


def test_rows_may_choose_by_bits():
    plan = random_plan(shape(num_q=1, q_size=64, num_kv=40, kv_size=2, row_bits=True), seed=8)
    q, k, v = inputs(plan)
    bits = plan.row_bits
    listed = BlockPlan.dense(plan.q, plan.kv, "cpu")
    chosen = BlockPlan(
        indices=listed.indices, counts=listed.counts, q=plan.q, kv=plan.kv, row_bits=bits
    )
    out, lse = block_sparse_attention(q, k, v, chosen, scale=SCALE, return_lse=True)
    pooled = pool_blocks(k, v, plan.kv, plan.kv.num)
    mine = add_tail(out, lse.double(), q, pooled, bits, None, scale=SCALE)[0]
    want = naive_tail(q, k, v, chosen, scale=SCALE)[0]
    torch.testing.assert_close(mine, want, rtol=0, atol=1e-6)


def test_it_has_the_gradients_of_its_definition():
    plan = random_plan(shape(kv_form="ragged", keep=0.4), seed=9)
    leaves = [x.requires_grad_() for x in inputs(plan, batch=1, kv_heads=2)]
    upstream = torch.randn(leaves[0].shape, dtype=torch.float64)
    tail = PooledTail(first_order=True)
    out = block_sparse_attention(*leaves, plan, scale=SCALE, tail=tail)
    assert isinstance(out, torch.Tensor)
    found = torch.autograd.grad(out, leaves, upstream)
    step, q = 1e-6, leaves[0].detach()
    for i, leaf in enumerate(leaves):
        moved = [x.detach() for x in leaves]
        way = torch.randn(leaf.shape, dtype=torch.float64)
        ends = []
        for sign in (1, -1):
            moved[i] = leaf.detach() + sign * step * way
            ends.append(naive_tail(*moved, plan, scale=SCALE, first_order=True)[0])
        slope = ((ends[0] - ends[1]) * upstream).sum() / (2 * step)
        assert float(slope) == pytest.approx(float((found[i] * way).sum()), rel=1e-4)
    assert q.dtype == torch.float64


@pytest.mark.filterwarnings("ignore:.*lru_cache")
@pytest.mark.parametrize("form", ["ragged", "regular"])
def test_it_compiles(form):
    plan = random_plan(shape(kv_form=form, keep=0.4), seed=10)
    q, k, v = inputs(plan, dtype=torch.float32)

    def run(q, k, v):
        return block_sparse_attention(q, k, v, plan, scale=SCALE, tail=PooledTail())

    found = torch.compile(run, backend="eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(found, run(q, k, v))


def test_the_map_is_made_once_per_plan():
    plan = random_plan(shape(keep=0.5), seed=11)
    assert kept_map(plan, 4) is kept_map(plan, 4)
    assert kept_map(plan, 3).shape[-1] == 3


def test_what_does_not_fit_is_refused():
    plan = random_plan(shape(row_bits=True), seed=12)
    q, k, v = inputs(plan)
    with pytest.raises(UsageError, match="`tail` must be given with lists of whole blocks"):
        block_sparse_attention(q, k, v, plan, tail=PooledTail())
    plan = random_plan(shape(), seed=12)
    with pytest.raises(UsageError, match=r"`num_blocks` must lie in \[0, 5\], got 9"):
        block_sparse_attention(q, k, v, plan, tail=PooledTail(num_blocks=9))
    pooled = pool_blocks(k, v, plan.kv, 4)
    with pytest.raises(UsageError, match="`pooled` must hold the means of 5 blocks, got 4"):
        block_sparse_attention(q, k, v, plan, tail=PooledTail(pooled=pooled))
    out, lse = block_sparse_attention(q, k, v, plan, return_lse=True)
    with pytest.raises(UsageError, match=r"`kept` must be torch\.bool"):
        add_tail(out, lse, q, pooled, kept_map(plan, 5), plan.q, scale=1.0)
    with pytest.raises(UsageError, match="`out` must be"):
        add_tail(out[:1], lse, q, pooled, kept_map(plan, 4), plan.q, scale=1.0)
