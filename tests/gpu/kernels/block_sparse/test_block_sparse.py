"""The block-sparse kernels on a GPU, against float64."""

import dataclasses

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention, kernel_for
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.reference import attention_reference
from multimodal_gen.kernels.engine import BLOCK_SPARSE
from tests.helpers.block_plans import PlanShape, dense_mask, random_plan
from tests.helpers.inputs import QKV, make_qkv
from tests.helpers.reference import reference_attention
from tests.helpers.tolerance import assert_within_error_budget

KERNELS = ["triton", "gluon", "fa4", "cudnn"]
OF_REGULAR_BLOCKS = {"fa4": "tiles of 384", "cudnn": "regular 128, batch 3"}
PLANS = {
    "regular 64": PlanShape(heads=4, num_q=5, num_kv=9, q_size=64, kv_size=64),
    "regular 128, batch 3": PlanShape(
        batch=3, heads=4, num_q=3, num_kv=7, q_size=128, kv_size=128
    ),
    "128x64": PlanShape(heads=4, num_q=3, num_kv=9, q_size=128, kv_size=64),
    "tiles of 384": PlanShape(heads=1, num_q=3, num_kv=4, q_size=384, kv_size=384, keep=0.6),
    "padded 64": PlanShape(
        heads=4, num_q=5, num_kv=9, q_size=64, kv_size=64, q_form="padded", kv_form="padded"
    ),
    "padded 384": PlanShape(
        heads=1, num_q=3, num_kv=4, q_size=384, kv_size=384, q_form="padded", kv_form="padded"
    ),
    "ragged": PlanShape(
        batch=3, heads=4, num_q=5, num_kv=60, q_size=128, kv_size=50, q_form="ragged",
        kv_form="ragged",
    ),
    "empty": PlanShape(heads=4, num_q=3, num_kv=5, q_size=64, kv_size=64, keep=0.0),
}  # fmt: skip


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    """Each provider that this machine can run."""
    q = torch.zeros(1, 64, 1, 128, device="cuda", dtype=torch.bfloat16)
    plan = BlockPlan.dense(Blocks.regular(64, 64), Blocks.regular(64, 64), "cuda")
    try:
        return kernel_for(q, q, q, plan, request.param)
    except UnsupportedBackendError as error:
        pytest.skip(str(error))


def skip_if_refused(kernel: str, plan: BlockPlan, inputs: QKV) -> None:
    """Skip plans outside what `fa4` and `cudnn` are for; the others must serve all of them."""
    if kernel not in OF_REGULAR_BLOCKS:
        return
    try:
        kernel_for(*inputs, plan, kernel)
    except UnsupportedBackendError as error:
        pytest.skip(str(error))


def inputs_for(plan: BlockPlan, *, head_size: int = 128, dtype: torch.dtype, seed: int = 0) -> QKV:
    return make_qkv(
        3,
        plan.q.total,
        4,
        head_size,
        num_keys=plan.kv.total,
        num_kv_heads=2,
        dtype=dtype,
        device="cuda",
        seed=seed,
    )


def check(
    kernel: str,
    plan: BlockPlan,
    inputs: QKV,
    *,
    scale: float | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """Assert that out and lse stay within their budgets; returns out."""
    skip_if_refused(kernel, plan, inputs)
    q, k, v = inputs
    batch, _, heads, head_size = q.shape
    scale = head_size**-0.5 if scale is None else scale
    mask = dense_mask(plan, batch, heads)
    out, lse = block_sparse_attention(
        q, k, v, plan, scale=scale, return_lse=True, kernel=kernel, deterministic=deterministic
    )
    assert_within_error_budget(out, q, k, v, scale=scale, mask=mask)
    _, exact = reference_attention(q, k, v, scale=scale, mask=mask)
    blind = ~mask.any(-1)
    assert (lse[blind] == -torch.inf).all()
    largest = scale * q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()
    # sqrt(D) roundings of the largest score, and those of the exponential units.
    budget = 4 * torch.finfo(torch.float32).eps * head_size**0.5 * (1.0 + largest)
    assert ((lse.double() - exact)[~blind].abs() <= budget).all()
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", PLANS)
def test_every_form_of_plan_is_right(kernel: str, name: str, dtype: torch.dtype) -> None:
    plan = random_plan(PLANS[name], seed=1, device="cuda")
    check(kernel, plan, inputs_for(plan, dtype=dtype))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ["ragged", "padded 64"])
def test_many_draws_of_irregular_plans_are_right(kernel: str, name: str, seed: int) -> None:
    shape = dataclasses.replace(PLANS[name], keep=(0.1, 0.5, 1.0)[seed % 3])
    plan = random_plan(shape, seed=seed, device="cuda")
    check(kernel, plan, inputs_for(plan, dtype=torch.bfloat16, seed=seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", PLANS)
def test_rows_may_choose_among_the_blocks(kernel: str, name: str, dtype: torch.dtype) -> None:
    shape = dataclasses.replace(PLANS[name], row_bits=True)
    plan = random_plan(shape, seed=3, device="cuda")
    check(kernel, plan, inputs_for(plan, dtype=dtype))


@pytest.mark.parametrize("deviation", [8, 60])
@pytest.mark.parametrize("words", [0, 1, 2], ids=["no block", "one block", "another block"])
@pytest.mark.parametrize(("q_size", "num_q"), [(128, 3), (192, 40)])
def test_rows_that_choose_need_no_reference_among_their_keys(
    kernel: str, q_size: int, num_q: int, words: int, deviation: float
) -> None:
    """The keys that a kernel looks at first are not those that half of the rows attend to.

    There are more blocks of 192 rows than programs that run at once, and they work on several.
    """
    shape = PlanShape(
        heads=4, num_q=num_q, num_kv=7, q_size=q_size, kv_size=150, keep=1.0, row_bits=True
    )
    plan = random_plan(shape, seed=4, device="cuda")
    assert plan.row_bits is not None
    plan.row_bits[..., ::2, :] = words << 4
    q, k, v = inputs_for(plan, dtype=torch.bfloat16)
    check(kernel, plan, (q * deviation, k, v))


@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 256])
def test_head_sizes_are_right(kernel: str, head_size: int) -> None:
    if kernel == "gluon" and head_size > 128:
        pytest.skip("gluon serves head sizes up to 128")
    plan = random_plan(PLANS["128x64"], seed=2, device="cuda")
    check(kernel, plan, inputs_for(plan, head_size=head_size, dtype=torch.bfloat16))


@pytest.mark.parametrize("deviation", [1.0, 8.0, 30.0, 60.0])
@pytest.mark.parametrize("name", ["regular 64", "128x64", "tiles of 384"])
def test_any_spread_of_the_logits_is_finite_and_right(
    kernel: str, name: str, deviation: float
) -> None:
    plan = random_plan(dataclasses.replace(PLANS[name], keep=0.8), seed=4, device="cuda")
    inputs = inputs_for(plan, dtype=torch.bfloat16)
    q, k, _ = inputs
    spread = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(2, 2)).std()
    check(kernel, plan, inputs, scale=deviation / float(spread))


@pytest.mark.parametrize("position", [0, 100, -1])
def test_one_huge_key_anywhere_takes_all_the_weight(kernel: str, position: int) -> None:
    plan = BlockPlan.dense(Blocks.regular(500, 128), Blocks.regular(900, 128), "cuda")
    q, k, v = inputs_for(plan, dtype=torch.bfloat16)
    q, k = q.abs() + 1.0, k.clone()
    k[:, position] = 1e3
    check(kernel, plan, QKV(q, k, v), scale=1.0)


def test_constant_rows_average_the_values(kernel: str) -> None:
    plan = BlockPlan.dense(Blocks.regular(500, 384), Blocks.regular(900, 384), "cuda")
    q, k, v = inputs_for(plan, dtype=torch.bfloat16)
    check(kernel, plan, QKV(torch.zeros_like(q), k, v))


def test_strided_inputs_are_read_in_place(kernel: str) -> None:
    plan = random_plan(PLANS["128x64"], seed=5, device="cuda")
    packed = torch.randn(3, plan.kv.total, 3, 2, 128, device="cuda").bfloat16()
    q = torch.randn(3, 4, plan.q.total, 128, device="cuda").bfloat16().transpose(1, 2)
    _, k, v = packed.unbind(2)
    check(kernel, plan, QKV(q, k, v))


@pytest.mark.parametrize("name", ["regular 64", "ragged"])
def test_one_plan_serves_tensors_of_any_form(kernel: str, name: str) -> None:
    plan = random_plan(PLANS[name], seed=6, device="cuda")
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        inputs = inputs_for(plan, dtype=dtype)
        check(kernel, plan, inputs)
        strided = (torch.cat([x, x], -1)[..., x.shape[-1] :] for x in inputs)
        check(kernel, plan, QKV(*strided))


@pytest.mark.parametrize("by_torch", [False, True], ids=["asked", "by torch"])
def test_a_deterministic_run_repeats_bit_by_bit(kernel: str, by_torch: bool) -> None:
    shape = PlanShape(heads=4, num_q=40, num_kv=40, q_size=64, kv_size=64, keep=0.3)
    plan = random_plan(shape, seed=6, device="cuda")
    q, k, v = inputs = inputs_for(plan, dtype=torch.bfloat16)
    skip_if_refused(kernel, plan, inputs)
    torch.use_deterministic_algorithms(by_torch, warn_only=True)
    try:
        runs = [
            block_sparse_attention(q, k, v, plan, kernel=kernel, deterministic=not by_torch)
            for _ in range(5)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(runs[0], run) for run in runs[1:])


def test_padding_of_queries_becomes_zero_whatever_memory_held(kernel: str) -> None:
    lengths = torch.tensor([64, 3, 0], dtype=torch.int32, device="cuda")
    blocks = Blocks.padded(lengths, 64)
    plan = BlockPlan.dense(blocks, blocks, "cuda")
    q, k, v = inputs = inputs_for(plan, dtype=torch.bfloat16)
    skip_if_refused(kernel, plan, inputs)
    poison = torch.full_like(q, torch.nan)
    del poison  # its memory is likely to become the output's
    out = block_sparse_attention(q, k, v, plan, kernel=kernel)
    padding = (torch.arange(64, device="cuda") >= lengths.view(3, 1)).flatten()
    assert not out[:, padding].any()
    assert out.isfinite().all()


def test_more_than_two_to_the_31_elements(kernel: str) -> None:
    heads, size = 40, 384
    tokens = 2**31 // (heads * 128) // size * size + 4 * size
    blocks = Blocks.regular(tokens, size)
    assert tokens * heads * 128 > 2**31
    generator = torch.Generator("cuda").manual_seed(0)
    indices = torch.randint(0, blocks.num - 4, (1, 1, blocks.num, 4), device="cuda",
                            generator=generator)  # fmt: skip
    indices = indices.sort(-1).values + torch.arange(4, device="cuda")
    counts = torch.full((1, 1, blocks.num), 4, device="cuda", dtype=torch.int32)
    plan = BlockPlan(indices=indices.int(), counts=counts, q=blocks, kv=blocks, uniform=True)
    q, k, v = (
        torch.randn(1, tokens, heads, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(3)
    )
    skip_if_refused(kernel, plan, QKV(q, k, v))
    out = block_sparse_attention(q, k, v, plan, kernel=kernel)
    last = slice(tokens - size, tokens)
    part = BlockPlan(
        indices=plan.indices[:, :, -1:],
        counts=counts[:, :, -1:],
        q=Blocks.regular(size, size),
        kv=blocks,
    )
    expected, _ = attention_reference(q[:, last], k, v, part, scale=128**-0.5)
    error = (out[:, last].float() - expected.float()).norm() / expected.float().norm()
    assert error < 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("return_lse", [False, True])
def test_it_compiles_without_a_graph_break(kernel: str, return_lse: bool) -> None:
    plan = random_plan(PLANS["128x64"], seed=7, device="cuda").longest_first()
    q, k, v = inputs = inputs_for(plan, dtype=torch.bfloat16)
    skip_if_refused(kernel, plan, inputs)

    def run(q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = block_sparse_attention(
            q * 2, k, v, plan, return_lse=return_lse, kernel=kernel, deterministic=True
        )
        return tuple(x + 1 for x in (result if return_lse else (result,)))

    compiled = torch.compile(run, fullgraph=True)
    for found, wanted in zip(compiled(q), run(q), strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_plan_is_used_without_waiting_for_the_device(kernel: str) -> None:
    plan = random_plan(PLANS[OF_REGULAR_BLOCKS.get(kernel, "padded 64")], seed=8, device="cuda")
    q, k, v = inputs_for(plan, dtype=torch.bfloat16)
    block_sparse_attention(q, k, v, plan, kernel=kernel)  # compiles
    plan.density()  # makes what every plan of these sizes shares, and waits for that
    plan.cache.clear()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = block_sparse_attention(q, k, v, plan, kernel=kernel)
        density = plan.density()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.isfinite().all()
    assert 0.0 < float(density) < 1.0


def test_auto_is_the_fastest_that_can_serve(kernel: str) -> None:
    plan = random_plan(PLANS["regular 64"], seed=9, device="cuda")
    q, k, v = inputs = inputs_for(plan, dtype=torch.bfloat16)
    skip_if_refused(kernel, plan, inputs)
    chosen = kernel_for(q, k, v, plan)
    names = BLOCK_SPARSE.names
    assert names.index(chosen) <= names.index(kernel), f"{kernel} can run here, but {chosen} does"
    assert kernel_for(q.float(), k.float(), v.float(), plan) == "reference"
