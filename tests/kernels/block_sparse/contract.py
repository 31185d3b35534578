"""What every provider of block-sparse attention gives, against attention in float64."""

import pytest
import torch

from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from tests.helpers.block_plans import PlanShape, dense_mask, random_plan
from tests.helpers.inputs import make_qkv
from tests.helpers.reference import reference_attention
from tests.helpers.tolerance import assert_within_error_budget


def check(
    kernel: str, plan: BlockPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> None:
    """Assert that out and lse of a provider stay within their budgets."""
    batch, _, heads, _ = q.shape
    mask = dense_mask(plan, batch, heads)
    out, lse = block_sparse_attention(q, k, v, plan, scale=scale, return_lse=True, kernel=kernel)
    assert_within_error_budget(out, q, k, v, scale=scale, mask=mask)
    _, exact = reference_attention(q, k, v, scale=scale, mask=mask)
    blind = ~mask.any(-1)
    assert (lse[blind] == -torch.inf).all()
    largest = scale * q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()
    # sqrt(D) roundings of the largest score.
    budget = 4 * torch.finfo(torch.float32).eps * q.shape[3] ** 0.5 * (1.0 + largest)
    assert ((lse.double() - exact)[~blind].abs() <= budget).all()


class Contract:
    """Tests of the provider `kernel`, in half precision."""

    kernel: str

    @pytest.mark.slow_cases("dtype0-30.0", "dtype0-60.0", "dtype0-8.0", "dtype1-30.0", "dtype1-8.0")
    @pytest.mark.parametrize("deviation", [1.0, 8.0, 30.0, 60.0])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_any_spread_of_the_logits_is_finite_and_right(
        self, deviation: float, dtype: torch.dtype
    ) -> None:
        plan = random_plan(PlanShape(num_kv=5, keep=0.7), seed=11)
        q, k, v = make_qkv(1, plan.q.total, 2, 64, num_keys=plan.kv.total, dtype=dtype)
        spread = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()).std()
        check(self.kernel, plan, q, k, v, deviation / float(spread))

    def test_constant_rows_average_the_values(self) -> None:
        plan = BlockPlan.dense(Blocks.regular(70, 64), Blocks.regular(150, 64), "cpu")
        q, k, v = make_qkv(1, 70, 2, 32, num_keys=150, dtype=torch.float16)
        check(self.kernel, plan, torch.zeros_like(q), k, v, 1.0)

    def test_one_huge_key_takes_all_the_weight(self) -> None:
        plan = BlockPlan.dense(Blocks.regular(70, 64), Blocks.regular(150, 64), "cpu")
        q, k, v = make_qkv(1, 70, 2, 32, num_keys=150, dtype=torch.float16)
        q, k = q.abs() + 1.0, k.clone()
        k[:, 33] = 1e3
        check(self.kernel, plan, q, k, v, 1.0)

    def test_strided_inputs_are_read_in_place(self) -> None:
        plan = random_plan(PlanShape(num_kv=4), seed=3)
        packed = torch.randn(2, plan.kv.total, 3, 2, 32).half()
        q = torch.randn(2, 2, 32, plan.q.total).half().permute(0, 3, 1, 2)
        _, k, v = packed.unbind(2)
        assert not q.is_contiguous()
        assert not k.is_contiguous()
        check(self.kernel, plan, q, k, v, 32**-0.5)

    def test_a_given_order_changes_nothing(self) -> None:
        plan = random_plan(PlanShape(heads=2, num_q=3, num_kv=4), seed=3)
        q, k, v = make_qkv(2, plan.q.total, 2, 32, num_keys=plan.kv.total, dtype=torch.float16)
        out = block_sparse_attention(q, k, v, plan, kernel=self.kernel)
        assert torch.equal(
            out, block_sparse_attention(q, k, v, plan.longest_first(), kernel=self.kernel)
        )

    def test_padding_of_keys_may_hold_anything_and_that_of_queries_becomes_zero(self) -> None:
        lengths = torch.tensor([64, 3, 0], dtype=torch.int32)
        blocks = Blocks.padded(lengths, 64)
        plan = BlockPlan.dense(blocks, blocks, "cpu")
        q, k, v = make_qkv(1, 192, 2, 32, dtype=torch.float16)
        padding = (torch.arange(64) >= lengths.view(3, 1)).flatten()
        dirty = [t.clone() for t in (q, k, v)]
        for tensor in dirty:
            tensor[:, padding] = torch.nan
        out = block_sparse_attention(*dirty, plan, kernel=self.kernel)
        assert torch.equal(out, block_sparse_attention(q, k, v, plan, kernel=self.kernel))
        assert not out[:, padding].any()

    def test_rows_in_no_query_block_are_zero(self) -> None:
        q_blocks = Blocks.ragged(
            torch.tensor([70, 5]).int(), torch.tensor([20, 30]).int(), total=100, size=64
        )
        plan = BlockPlan.dense(q_blocks, Blocks.regular(64, 64), "cpu")
        q, k, v = make_qkv(1, 100, 1, 32, num_keys=64, dtype=torch.float16)
        out, lse = block_sparse_attention(q, k, v, plan, return_lse=True, kernel=self.kernel)
        outside = torch.ones(100, dtype=torch.bool)
        outside[5:35] = outside[70:90] = False
        assert not out[:, outside].any()
        assert (lse[..., outside] == -torch.inf).all()
        assert lse[..., ~outside].isfinite().all()

    @pytest.mark.slow_cases("130-200-128", "130-200-64", "200-130-128")
    @pytest.mark.parametrize(
        ("queries", "keys", "size"),
        [(200, 200, 64), (130, 200, 64), (130, 200, 128), (200, 130, 128), (1, 70, 64)],
    )
    def test_causality_is_aligned_to_the_last_query_and_key(
        self, queries: int, keys: int, size: int
    ) -> None:
        q_blocks, kv_blocks = Blocks.regular(queries, size), Blocks.regular(keys, size)
        plan = BlockPlan.dense(q_blocks, kv_blocks, "cpu", causal=True)
        q, k, v = make_qkv(2, queries, 4, 64, num_keys=keys, num_kv_heads=2, dtype=torch.bfloat16)
        check(self.kernel, plan, q, k, v, 0.125)
