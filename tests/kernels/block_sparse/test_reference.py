"""The reference against dense attention in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal_gen.kernels.block_sparse import reference
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from tests.helpers.block_plans import PlanShape, dense_mask, random_plan
from tests.helpers.drawn import plan_shapes
from tests.helpers.inputs import QKV, make_qkv
from tests.helpers.reference import reference_attention
from tests.helpers.tolerance import assert_within_error_budget
from tests.kernels.block_sparse.contract import Contract

SHAPES = plan_shapes(
    batch=(1, 3),
    heads=(1, 4),
    num_q=4,
    num_kv=35,
    q_size=(1, 16, 40),
    kv_size=(1, 16, 40),
    row_bits=True,
)


def inputs_for(plan: BlockPlan, *, dtype: torch.dtype, kv_heads: int = 2, seed: int = 0) -> QKV:
    return make_qkv(
        3,
        plan.q.total,
        4,
        8,
        num_keys=plan.kv.total,
        num_kv_heads=kv_heads,
        dtype=dtype,
        seed=seed,
    )


@given(
    SHAPES, st.integers(0, 2**16), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2**14, 2**18])
)
@settings(max_examples=40, deadline=None)
def test_the_reference_is_dense_attention_under_the_plans_mask(
    shape: PlanShape, seed: int, kv_heads: int, at_once: int
) -> None:
    plan = random_plan(shape, seed=seed)
    q, k, v = inputs_for(plan, dtype=torch.float64, kv_heads=kv_heads, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_SCORES_AT_ONCE", at_once)
        out, lse = block_sparse_attention(
            q, k, v, plan, scale=0.3, return_lse=True, kernel="reference"
        )
    mask = dense_mask(plan, 3, 4)
    exact, exact_lse = reference_attention(q, k, v, scale=0.3, mask=mask)
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, exact_lse.float())
    assert torch.equal(lse == -torch.inf, ~mask.any(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_inputs_stay_within_the_error_budget(dtype: torch.dtype) -> None:
    plan = random_plan(PlanShape(heads=4, num_kv=5, kv_form="ragged"), seed=3)
    q, k, v = inputs_for(plan, dtype=dtype)
    out = block_sparse_attention(q, k, v, plan, kernel="reference")
    assert out.dtype == dtype
    assert_within_error_budget(out, q, k, v, scale=8**-0.5, mask=dense_mask(plan, 3, 4))


@pytest.mark.parametrize(("tokens", "tiles"), [(96, [6]), (256, [4, 4, 4, 4]), (1024, [1] * 64)])
def test_query_blocks_share_a_tile_where_their_scores_are_few(
    tokens: int, tiles: list[int]
) -> None:
    blocks = Blocks.regular(tokens, 16)
    found = reference._tiles(BlockPlan.dense(blocks, blocks, "cpu"), 2, 8)
    assert [tile.rows.shape[2] for tile in found] == tiles


@pytest.mark.parametrize("at_once", [1, 2**18])
@pytest.mark.parametrize("row_bits", [False, True])
def test_gradients_equal_those_of_dense_attention(
    monkeypatch: pytest.MonkeyPatch, row_bits: bool, at_once: int
) -> None:
    monkeypatch.setattr(reference, "_SCORES_AT_ONCE", at_once)
    shape = PlanShape(
        batch=3, heads=4, num_q=3, num_kv=4, q_size=8, kv_size=8, keep=0.4, row_bits=row_bits
    )
    plan = random_plan(shape, seed=5)
    assert (plan.counts == 0).any(), "an empty row belongs to the case"
    mask = dense_mask(plan, 3, 4)
    wanted = [t.requires_grad_() for t in inputs_for(plan, dtype=torch.float64)]
    out, lse = reference_attention(*wanted, scale=0.3, mask=mask)
    seen = lse[mask.any(-1)]
    grads = torch.autograd.grad(out.square().sum() + seen.sin().sum(), wanted)

    given_ = [t.requires_grad_() for t in inputs_for(plan, dtype=torch.float64)]
    out, lse = block_sparse_attention(*given_, plan, scale=0.3, return_lse=True)
    seen = lse[mask.any(-1)]
    found = torch.autograd.grad(out.square().sum() + seen.sin().sum(), given_)
    for one, other in zip(found, grads, strict=True):
        # lse is float32 by contract, and so is its gradient.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_gradients_without_lse_are_exact_to_float64() -> None:
    plan = random_plan(PlanShape(num_q=3, num_kv=4, q_size=8, kv_size=8, q_form="ragged"), seed=7)
    inputs = tuple(t.requires_grad_() for t in inputs_for(plan, dtype=torch.float64))
    assert torch.autograd.gradcheck(
        lambda q, k, v: block_sparse_attention(q, k, v, plan), inputs, fast_mode=True
    )


class TestReference(Contract):
    kernel = "reference"
