"""The pooled tail's kernels against float64, under the interpreter; see test_children.py."""

from typing import Any

import pytest
import torch

from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.tail import (
    PooledTail,
    add_tail,
    kept_map,
    pool_blocks,
)
from tests.helpers.block_plans import PlanShape, plan_by_bits, random_plan
from tests.helpers.inputs import make_qkv
from tests.helpers.tail import assert_tail_within_error_budget

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1; see test_children.py"
)


def check(
    plan: BlockPlan, head_size: int, dtype: torch.dtype, *, kv_heads: int = 1, **tail: Any
) -> None:
    """Assert that the tail in Triton, on top of the reference, stays within its budget."""
    options = {"num_keys": plan.kv.total, "num_kv_heads": kv_heads, "dtype": dtype, "seed": 1}
    q, k, v = make_qkv(plan.counts.shape[0], plan.q.total, 2, head_size, **options)
    scale = head_size**-0.5
    found = block_sparse_attention(q, k, v, plan, scale=scale, return_lse=True)
    num, first_order = tail.get("num", plan.kv.num), tail.get("first_order", False)
    pooled = pool_blocks(k, v, plan.kv, num, first_order=first_order)
    kept, given = kept_map(plan, num), {"scale": scale, "kernel": "triton"}
    found = add_tail(*found, q, pooled, kept, plan.q, **given)
    budget = {"scale": scale, "num": num, "first_order": first_order}
    assert_tail_within_error_budget(*found, q, k, v, plan, **budget)


def test_both_parts_may_be_one_call() -> None:
    plan = random_plan(PlanShape(num_q=1, num_kv=5, kv_size=16, keep=0.4), seed=1)
    q, k, v = make_qkv(1, plan.q.total, 1, 32, num_keys=plan.kv.total, dtype=torch.bfloat16)
    given = {"scale": 0.2, "return_lse": True, "kernel": "triton", "tail": PooledTail()}
    found = block_sparse_attention(q, k, v, plan, **given)
    assert_tail_within_error_budget(*found, q, k, v, plan, scale=0.2)


@pytest.mark.parametrize(
    ("q_form", "q_size", "kv_form", "keep"),
    [
        ("regular", 64, "regular", 0.3),  # two blocks in a tile
        ("regular", 64, "ragged", 0.0),
        ("regular", 200, "padded", 0.5),
        ("padded", 48, "regular", 0.3),
        ("ragged", 64, "ragged", 0.4),
        ("ragged", 192, "regular", 1.0),
    ],
)
def test_blocks_of_every_form_count_by_their_means(
    q_form: str, q_size: int, kv_form: str, keep: float
) -> None:
    shape = PlanShape(heads=2, num_q=3, num_kv=70, q_size=q_size, kv_size=4, q_form=q_form,
                      kv_form=kv_form, keep=keep)  # fmt: skip
    check(random_plan(shape, seed=3), 32, torch.bfloat16)


@pytest.mark.parametrize("head_size", [40, 64, 128, 256])
def test_every_head_size_is_right(head_size: int) -> None:
    plan = random_plan(PlanShape(batch=2, num_q=2, num_kv=20, kv_size=16, keep=0.2), seed=2)
    check(plan, head_size, torch.float16, num=18)


def test_values_follow_keys_to_first_order() -> None:
    plan = random_plan(PlanShape(num_q=2, num_kv=20, kv_size=16, keep=0.2), seed=4)
    check(plan, 40, torch.bfloat16, kv_heads=2, first_order=True)


def test_means_of_blocks_of_every_head_are_those_of_the_definition() -> None:
    from multimodal_gen.kernels.block_sparse import tail_kernel
    from multimodal_gen.kernels.block_sparse.tail_reference import pool_blocks_reference

    shape = PlanShape(batch=2, heads=3, num_kv=6, kv_size=150, kv_form="ragged")
    blocks = random_plan(shape, seed=5).kv
    x = torch.randn(2, blocks.total, 3, 40)
    found = tail_kernel.pool_blocks(x, *blocks.bounds(x.device))
    torch.testing.assert_close(found, pool_blocks_reference(x, blocks, 6))


def test_rows_may_choose_by_bits() -> None:
    shape = PlanShape(heads=2, num_q=2, num_kv=40, q_size=70, kv_size=5, row_bits=True)
    plan = plan_by_bits(shape, seed=6)
    q, k, v = make_qkv(1, plan.q.total, 2, 32, num_keys=plan.kv.total, dtype=torch.bfloat16)
    scale = 32**-0.5
    found = block_sparse_attention(q, k, v, plan, scale=scale, return_lse=True)
    pooled = pool_blocks(k, v, plan.kv, plan.kv.num)
    assert plan.row_bits is not None
    found = add_tail(*found, q, pooled, plan.row_bits, None, scale=scale, kernel="triton")
    assert_tail_within_error_budget(*found, q, k, v, plan, scale=scale)


def test_maps_become_the_lists_of_their_rows() -> None:
    from multimodal_gen.kernels.block_sparse.steps_kernel import make_lists

    keep = torch.rand(2, 3, 4, 1500, generator=torch.Generator().manual_seed(7)) < 0.3
    keep[0, 0, 0] = False
    indices, counts = make_lists(keep[:, 1:])
    for b, h, i in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(4)):
        wanted = keep[b, h + 1, i].nonzero().flatten()
        assert counts[b, h, i] == len(wanted)
        assert torch.equal(indices[b, h, i, : len(wanted)].long(), wanted)


@pytest.mark.parametrize("q_form", ["regular", pytest.param("ragged", marks=pytest.mark.slow)])
def test_only_flagged_tiles_are_done_again(q_form: str) -> None:
    from multimodal_gen.kernels.block_sparse import tail_kernel
    from multimodal_gen.kernels.block_sparse.call import TailCall
    from multimodal_gen.kernels.block_sparse.tuning import TritonTile

    shape = PlanShape(heads=2, num_q=2, num_kv=40, q_size=100, kv_size=4, q_form=q_form)
    plan = random_plan(shape, seed=3)
    q, k, v = make_qkv(1, plan.q.total, 2, 32, num_keys=plan.kv.total, dtype=torch.bfloat16)
    out, lse = block_sparse_attention(q, k, v, plan, scale=0.2, return_lse=True)
    pooled, kept = pool_blocks(k, v, plan.kv, 40), kept_map(plan, 40)
    wanted = add_tail(out.clone(), lse.clone(), q, pooled, kept, plan.q, scale=0.2, kernel="triton")
    bits, sizes = tail_kernel.pack_bits(kept, 64), pooled.counts.float().log2()
    tile = TritonTile(rows=64, keys=32, warps=4, stages=2)
    # Two tiles of each of two blocks of each of two heads, behind how many are flagged.
    flags = torch.zeros(1 + 2 * 2 * 2, dtype=torch.int32)
    found = out.clone(), lse.clone()
    call = TailCall(*found, q, pooled, kept, plan.q, 0.2)
    tail_kernel.launch(call, sizes, bits, tile, flags=flags, programs=3)
    assert torch.equal(found[0], out)
    flags[:] = 1
    flags[1 + 4] = 0
    tail_kernel.launch(call, sizes, bits, tile, flags=flags, programs=3)
    begin, length = (int(bound[0, -1, 0]) for bound in plan.q.bounds(out.device))
    rows = slice(begin, begin + min(length, 64))
    assert torch.equal(found[0][0, rows, 1], out[0, rows, 1])
    wanted[0][0, rows, 1] = out[0, rows, 1]
    wanted[1][0, 1, rows] = lse[0, 1, rows]
    torch.testing.assert_close(found[0], wanted[0], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(found[1], wanted[1])


def test_bits_are_packed_into_words() -> None:
    from multimodal_gen.kernels.block_sparse.tail_kernel import pack_bits
    from multimodal_gen.kernels.select.row_reference import bits_of

    kept = torch.rand(2, 1, 3, 70, generator=torch.Generator().manual_seed(0)) < 0.4
    words = pack_bits(kept, 64)
    assert words.shape == (2, 1, 3, 4)
    assert torch.equal(bits_of(words, 70), kept)
    assert bits_of(words, 128)[..., 70:].all()
