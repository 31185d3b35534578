"""The Triton provider against float64: under the interpreter, or on a GPU.

Triton reads TRITON_INTERPRET when it is imported, so these tests need a process of their own:
test_children.py starts it.
"""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from multimodal_gen.kernels.block_sparse.api import block_sparse_attention, refresh_plan
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.skip import Skip
from tests.helpers.block_plans import FORMS, PlanShape, dense_mask, random_plan
from tests.helpers.drawn import plan_shapes
from tests.helpers.inputs import make_qkv
from tests.helpers.skipping import peaked_inputs
from tests.helpers.tolerance import (
    assert_gradients_within_error_budget,
)
from tests.kernels.block_sparse.contract import Contract, check
from tests.kernels.cases import with_slow

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1; see test_children.py"
)

SHAPES = plan_shapes(
    batch=(1, 3),
    heads=(1, 4),
    num_kv=4,
    q_size=(16, 64, 128),
    kv_size=(16, 64, 128, 200),
    row_bits=True,
)


class TestTriton(Contract):
    kernel = "triton"


@given(
    SHAPES,
    st.integers(0, 2**16),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([torch.float16, torch.bfloat16]),
)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_it_is_dense_attention_under_the_plans_mask(
    shape: PlanShape, seed: int, kv_heads: int, dtype: torch.dtype
) -> None:
    plan = random_plan(shape, seed=seed)
    q, k, v = make_qkv(
        shape.batch,
        plan.q.total,
        4,
        32,
        num_keys=plan.kv.total,
        num_kv_heads=kv_heads,
        dtype=dtype,
        seed=seed,
    )
    check("triton", plan, q, k, v, 32**-0.5)


@pytest.mark.slow_cases(
    "128-128", "128-32", "128-40", "128-64", "128-96", "64-128", "64-40", "64-64", "64-96"
)
@pytest.mark.parametrize("head_size", [32, 40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("q_size", [64, 128])
def test_every_head_size_is_right(head_size: int, q_size: int) -> None:
    plan = random_plan(PlanShape(q_size=q_size, kv_size=128, heads=2), seed=2)
    q, k, v = make_qkv(
        1, plan.q.total, 2, head_size, num_keys=plan.kv.total, dtype=torch.float16, seed=head_size
    )
    check("triton", plan, q, k, v, head_size**-0.5)


def test_many_blocks_per_row_are_cut_into_steps_across_chunks() -> None:
    shape = PlanShape(num_q=1, num_kv=300, kv_size=9, kv_form="ragged", keep=0.9)
    plan = random_plan(shape, seed=4)
    assert int(plan.counts.max()) > 256
    q, k, v = make_qkv(1, plan.q.total, 1, 32, num_keys=plan.kv.total, dtype=torch.float16)
    check("triton", plan, q, k, v, 32**-0.5)


@pytest.mark.slow_cases("384")
@pytest.mark.parametrize("kv_size", [64, 384])
def test_large_blocks_are_cut_and_only_the_last_has_a_tail(kv_size: int) -> None:
    q_blocks, kv_blocks = Blocks.regular(300, 192), Blocks.regular(2 * kv_size + 100, kv_size)
    plan = BlockPlan.dense(q_blocks, kv_blocks, "cpu")
    q, k, v = make_qkv(2, 300, 2, 64, num_keys=kv_blocks.total, dtype=torch.bfloat16)
    check("triton", plan, q, k, v, 64**-0.5)


def test_steps_cover_exactly_the_listed_keys_and_partial_ones_come_last() -> None:
    from multimodal_gen.kernels.block_sparse.steps_kernel import make_steps

    shape = PlanShape(heads=2, num_q=2, num_kv=9, q_size=8, kv_size=50, kv_form="ragged", keep=0.7)
    plan = random_plan(shape, seed=9)
    mask = dense_mask(plan, 1, 2)
    steps = make_steps(plan, 32)
    q_starts, q_lengths = (t.expand(1, 2, -1) for t in plan.q.bounds(plan.device))
    for h in range(2):
        for i in range(2):
            assert q_lengths[0, h, i] > 0
            covered = torch.zeros(plan.kv.total, dtype=torch.int32)
            for s in range(int(steps.num_full[0, h, i])):
                first = int(steps.starts[0, h, i, s])
                covered[first : first + 32] += 1
            for s in range(int(steps.num_tail[0, h, i])):
                first = int(steps.starts[0, h, i, -1 - s])
                length = int(steps.tail_lengths[0, h, i, s])
                assert 0 < length < 32
                covered[first : first + length] += 1
            assert torch.equal(covered, mask[0, h, int(q_starts[0, h, i])].int())


def test_neighbouring_blocks_are_merged_into_whole_steps() -> None:
    from multimodal_gen.kernels.block_sparse.steps_kernel import make_steps

    plan = BlockPlan.dense(Blocks.regular(16, 16), Blocks.regular(150, 10), "cpu")
    steps = make_steps(plan, 64)
    assert steps.num_full.item() == 2
    assert steps.starts[0, 0, 0, :2].tolist() == [0, 64]
    assert steps.num_tail.item() == 1
    assert steps.starts[0, 0, 0, -1].item() == 128
    assert steps.tail_lengths[0, 0, 0, 0].item() == 22


def check_gradients(plan: BlockPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Assert that the gradients of the Triton provider, lse's among them, are within budget."""
    batch, _, heads, head_size = q.shape
    scale = head_size**-0.5
    assert_gradients_within_error_budget(
        lambda *x: block_sparse_attention(*x, plan, scale=scale, return_lse=True, kernel="triton"),
        q,
        k,
        v,
        scale=scale,
        mask=dense_mask(plan, batch, heads),
    )


GRADIENTS = [
    (form, row_bits, kv_heads)
    for form in FORMS
    for row_bits in (False, True)
    for kv_heads in (1, 2)
]


@pytest.mark.parametrize(
    ("form", "row_bits", "kv_heads"), with_slow(GRADIENTS, [("ragged", True, 1)])
)
def test_gradients_of_every_form_of_plan_are_right(
    form: str, row_bits: bool, kv_heads: int
) -> None:
    shape = PlanShape(
        heads=2, num_kv=3, q_size=50, kv_size=80, q_form=form, kv_form=form, row_bits=row_bits
    )
    plan = random_plan(shape, seed=3)
    sizes = {"num_keys": plan.kv.total, "num_kv_heads": kv_heads}
    check_gradients(plan, *make_qkv(1, plan.q.total, 2, 32, dtype=torch.float16, **sizes))


@pytest.mark.slow
@given(SHAPES, st.integers(0, 2**16), st.sampled_from([1, 2, 4]))
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_gradients_of_drawn_plans_are_right(shape: PlanShape, seed: int, kv_heads: int) -> None:
    plan = random_plan(shape, seed=seed)
    sizes = {"num_keys": plan.kv.total, "num_kv_heads": kv_heads, "seed": seed}
    qkv = make_qkv(shape.batch, plan.q.total, 4, 32, dtype=torch.bfloat16, **sizes)
    check_gradients(plan, *qkv)


@pytest.mark.slow
@pytest.mark.parametrize("head_size", [40, 64, 96, 128, 256])
@pytest.mark.parametrize("size", [64, 128])
def test_gradients_of_every_head_size_are_right(head_size: int, size: int) -> None:
    plan = random_plan(PlanShape(q_size=size, kv_size=size), seed=2)
    sizes = {"num_keys": plan.kv.total, "dtype": torch.float16}
    check_gradients(plan, *make_qkv(1, plan.q.total, 1, head_size, **sizes))


@pytest.mark.parametrize(("queries", "keys"), [(130, 200), (130, 30)])
def test_causality_leaves_empty_lists_empty(queries: int, keys: int) -> None:
    q_blocks, kv_blocks = Blocks.regular(queries, 64), Blocks.regular(keys, 64)
    plan = BlockPlan.dense(q_blocks, kv_blocks, "cpu", causal=True)
    plan = dataclasses.replace(plan, counts=torch.zeros_like(plan.counts)).check()
    qkv = make_qkv(1, queries, 2, 32, num_keys=keys, dtype=torch.bfloat16)
    out, lse = block_sparse_attention(*qkv, plan, return_lse=True, kernel="triton")
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("queries", "keys"), with_slow([(130, 200), (200, 70), (128, 128)], [(130, 200)])
)
def test_causal_gradients_are_right(queries: int, keys: int) -> None:
    q_blocks, kv_blocks = Blocks.regular(queries, 64), Blocks.regular(keys, 64)
    plan = BlockPlan.dense(q_blocks, kv_blocks, "cpu", causal=True)
    check_gradients(plan, *make_qkv(1, queries, 1, 32, num_keys=keys, dtype=torch.bfloat16))


def test_a_plan_is_transposed_once() -> None:
    from multimodal_gen.kernels.block_sparse.backward_kernel import transposed

    plan = random_plan(PlanShape(heads=2, num_q=150, num_kv=3, q_size=1, kv_size=1), seed=6)
    turned = transposed(plan)
    assert transposed(plan) is turned
    assert (turned.q, turned.kv) == (plan.kv, plan.q)
    wanted = dense_mask(plan, 1, 2).transpose(2, 3)
    assert torch.equal(dense_mask(turned.check(), 1, 2), wanted)


def test_gradients_of_padding_are_zero_whatever_it_holds() -> None:
    lengths = torch.tensor([64, 3, 0], dtype=torch.int32)
    blocks = Blocks.padded(lengths, 64)
    plan = BlockPlan.dense(blocks, blocks, "cpu")
    padding = (torch.arange(64) >= lengths.view(3, 1)).flatten()
    found = []
    for filler in (0.0, torch.nan):
        upstream = torch.ones(1, 192, 1, 32).half()
        tensors = [x.clone() for x in (*make_qkv(1, 192, 1, 32, dtype=torch.float16), upstream)]
        for tensor in tensors:
            tensor[:, padding] = filler
        q, k, v, upstream = tensors
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = block_sparse_attention(*leaves, plan, kernel="triton")
        found.append(torch.autograd.grad(out, leaves, upstream))
    for clean, dirty in zip(*found, strict=True):
        assert torch.equal(clean, dirty)
        assert not dirty[:, padding].any()
        assert dirty[:, ~padding].any()


@pytest.mark.slow_cases(
    "last one short-128", "last one short-64", "regular-128", "row bits-128", "row bits-64"
)
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("form", ["regular", "last one short", "row bits"])
def test_steps_far_below_are_left_out_as_the_reference_leaves_blocks_out(
    rows: int, form: str
) -> None:
    size, num = 64 if rows == 64 else 128, 5  # blocks are the kernel's steps
    total = num * size - (17 if form == "last one short" else 0)
    sizes = Blocks(num=-(-total // rows), size=rows, total=total)
    indices = torch.arange(num, dtype=torch.int32).expand(1, 1, sizes.num, num).contiguous()
    plan = BlockPlan(
        indices=indices,
        counts=torch.full((1, 1, sizes.num), num, dtype=torch.int32),
        q=sizes,
        kv=Blocks(num=num, size=size, total=total),
        row_bits=None if form != "row bits" else torch.full((1, 1, total, 1), 0b11101).int(),
    )
    q, k, v = peaked_inputs(total, 2, 32, size, dtype=torch.float16)
    found = {}
    for kernel in ("triton", "reference"):
        skip = Skip(below=15.0, counts=torch.zeros(2, dtype=torch.int64))
        found[kernel] = (
            *block_sparse_attention(q, k, v, plan, return_lse=True, kernel=kernel, skip=skip),
            skip.counts.tolist(),
        )
    (out, lse, counts), (expected, expected_lse, steps) = found["triton"], found["reference"]
    assert (out - expected).abs().max() <= 5e-3
    assert (lse - expected_lse).abs().max() <= 5e-3  # nothing lies at the limit
    assert counts[0] == steps[0] > 0
    assert counts[1] == 2 * sizes.num * num
    exact = block_sparse_attention(q, k, v, plan, kernel="triton")
    none = block_sparse_attention(q, k, v, plan, kernel="triton", skip=Skip(below=1e4))
    assert torch.equal(exact, none)


def test_lists_that_change_in_place_are_cut_into_the_steps_there_are() -> None:
    """As slots of a cache are: lists and lengths change, their tensors and what graphs read not."""
    slots, tokens = 4, 72
    starts = torch.arange(slots, dtype=torch.int32) * tokens
    lengths = torch.full((slots,), tokens, dtype=torch.int32)
    lists, counts = torch.zeros(1, 1, 1, slots, dtype=torch.int32), torch.zeros(1, 1, 1).int()
    q = Blocks.regular(40, 384)
    kv = Blocks.ragged(starts, lengths, total=slots * tokens, size=tokens)
    plan = BlockPlan(indices=lists, counts=counts, q=q, kv=kv, uniform=True)
    qkv = make_qkv(1, 40, 2, 32, num_keys=slots * tokens, dtype=torch.bfloat16)
    steps = set()
    for seen, last in (([0], tokens), ([0, 1, 2], tokens), ([1, 3], 10), ([0, 1, 2, 3], tokens)):
        lists[..., : len(seen)] = torch.tensor(seen)
        counts.fill_(len(seen))
        lengths[seen[-1]] = last
        refresh_plan(plan)
        check("triton", plan, *qkv, scale=0.2)
        steps |= {known.starts.data_ptr() for key, known in plan.cache.items() if key[0] == "steps"}
        lengths.fill_(tokens)
    assert len(steps) == 1
