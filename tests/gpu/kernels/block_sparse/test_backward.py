"""Gradients of the block-sparse engine and of the methods on it, on a GPU, against float64."""

import dataclasses
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention, kernel_for
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.config import build_config
from multimodal_gen.runtime.layers.attention.layer import UlyssesAttention_VSA
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    LayerSite,
    SelectionScope,
    Source,
)
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from tests.helpers.block_plans import PlanShape, dense_mask, random_plan
from tests.helpers.inputs import QKV, make_qkv
from tests.helpers.tolerance import assert_gradients_within_error_budget

PLANS = {
    "regular 64": PlanShape(heads=4, num_q=5, num_kv=9, q_size=64, kv_size=64),
    "regular 128, batch 3": PlanShape(batch=3, heads=4, num_q=3, num_kv=7, q_size=128, kv_size=128),
    "128x64": PlanShape(heads=4, num_q=3, num_kv=9, q_size=128, kv_size=64),
    "tiles of 384": PlanShape(heads=1, num_q=3, num_kv=4, q_size=384, kv_size=384, keep=0.6),
    "padded 64": PlanShape(
        heads=4, num_q=5, num_kv=9, q_size=64, kv_size=64, q_form="padded", kv_form="padded"
    ),
    "ragged": PlanShape(
        batch=3, heads=4, num_q=5, num_kv=60, q_size=128, kv_size=50, q_form="ragged",
        kv_form="ragged",
    ),
    "some empty": PlanShape(heads=4, num_q=3, num_kv=5, q_size=128, kv_size=128, keep=0.1),
    "empty": PlanShape(heads=4, num_q=3, num_kv=5, q_size=64, kv_size=64, keep=0.0),
}  # fmt: skip


@pytest.fixture(params=["gluon", "triton"])
def kernel(request: pytest.FixtureRequest) -> str:
    """Each provider that this machine can run, and that has a backward pass."""
    q = torch.zeros(1, 64, 1, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    plan = BlockPlan.dense(Blocks.regular(64, 64), Blocks.regular(64, 64), "cuda")
    try:
        return kernel_for(q, q, q, plan, request.param)
    except UnsupportedBackendError as error:
        pytest.skip(str(error))


def inputs_for(
    plan: BlockPlan, *, head_size: int = 128, dtype: torch.dtype = torch.bfloat16, kv_heads: int = 2
) -> QKV:
    return make_qkv(
        3,
        plan.q.total,
        4,
        head_size,
        num_keys=plan.kv.total,
        num_kv_heads=kv_heads,
        dtype=dtype,
        device="cuda",
    )


def check(kernel: str, plan: BlockPlan, inputs: QKV, *, deterministic: bool = False) -> None:
    """Assert that the gradients, those of lse among them, stay within their budgets."""
    batch, _, heads, head_size = inputs.query.shape
    scale = head_size**-0.5
    assert_gradients_within_error_budget(
        lambda *x: block_sparse_attention(
            *x, plan, scale=scale, return_lse=True, kernel=kernel, deterministic=deterministic
        ),
        *inputs,
        scale=scale,
        mask=dense_mask(plan, batch, heads),
    )


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("row_bits", [False, True], ids=["blocks", "rows choose"])
@pytest.mark.parametrize("name", PLANS)
def test_gradients_of_every_form_of_plan_are_right(
    kernel: str, name: str, row_bits: bool, kv_heads: int
) -> None:
    shape = dataclasses.replace(PLANS[name], row_bits=row_bits)
    plan = random_plan(shape, seed=1, device="cuda")
    check(kernel, plan, inputs_for(plan, kv_heads=kv_heads))


def spy(original: Callable[..., Any], note: Callable[[], None], *given: Any, **options: Any) -> Any:
    note()
    return original(*given, **options)


@pytest.mark.parametrize(("name", "kv_heads", "deterministic", "taken"), [
    ("regular 64", 4, False, "gluon_backward_kernel"),
    ("tiles of 384", 4, False, "gluon_fused_kernel"),
    ("regular 128, batch 3", 4, False, "gluon_fused_kernel"),
    ("regular 128, batch 3", 4, True, "gluon_backward_kernel"),
    ("all tiles of 384", 4, False, "gluon_fused_kernel"),
    ("all tiles of 384", 4, True, "gluon_backward_kernel"),
    ("128x64", 4, False, "gluon_backward_kernel"),
    ("ragged", 4, False, "gluon_backward_kernel"),
    ("ragged", 2, False, "backward_kernel"),
    ("padded 64", 4, False, "backward_kernel"),
])  # fmt: skip
def test_the_kernels_for_sm90_compute_gradients_where_they_can(
    name: str, kv_heads: int, deterministic: bool, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = random_plan(PLANS[name.removeprefix("all ")], seed=1, device="cuda")
    if name.startswith("all "):
        plan = BlockPlan.dense(plan.q, plan.kv, "cuda")
    q, k, v = (x.requires_grad_() for x in inputs_for(plan, kv_heads=kv_heads))
    if kernel_for(q, k, v, plan) != "gluon":
        pytest.skip("needs compute capability 9.0")
    # A release of triton that nobody has tried is checked once, by gradients that would be noted.
    block_sparse_attention(q, k, v, plan, deterministic=deterministic).sum().backward()
    calls = []
    for place in ("backward_kernel", "gluon_backward_kernel", "gluon_fused_kernel"):
        module = importlib.import_module(f"multimodal_gen.kernels.block_sparse.{place}")
        noted = partial(spy, module.attend_backward, partial(calls.append, place))
        monkeypatch.setattr(module, "attend_backward", noted)
    out = block_sparse_attention(q, k, v, plan, deterministic=deterministic)
    out.sum().backward()
    assert calls == [taken]


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("head_size", [96, 128])
@pytest.mark.parametrize("tokens", [1000, 1152, 100])
def test_dense_gradients_are_right(
    kernel: str, tokens: int, head_size: int, deterministic: bool
) -> None:
    """Whose last query and key blocks may be short, as of the dense backend."""
    blocks = Blocks.regular(tokens, 384)
    plan = BlockPlan.dense(blocks, blocks, "cuda")
    inputs = inputs_for(plan, head_size=head_size, kv_heads=4)
    check(kernel, plan, inputs, deterministic=deterministic)


@pytest.mark.parametrize("head_size", [96, 128])
@pytest.mark.parametrize("tokens", [1000, 1152, 900])
def test_gradients_of_lists_with_short_last_blocks_are_right(
    kernel: str, tokens: int, head_size: int
) -> None:
    blocks = Blocks.regular(tokens, 128)
    generator = torch.Generator("cuda").manual_seed(tokens)
    keep = torch.rand(1, 4, blocks.num, blocks.num, device="cuda", generator=generator) < 0.4
    keep[..., 0, -1] = keep[..., -1, 0] = True
    keep[:, 1, 3], keep[:, 2, :, 3] = (
        False,
        False,
    )  # queries without keys, keys without queries
    plan = BlockPlan.from_map(keep, blocks, blocks)
    check(kernel, plan, inputs_for(plan, head_size=head_size, kv_heads=4))


@pytest.mark.parametrize("name", ["regular 128, batch 3", "tiles of 384", "some empty", "128x256"])
def test_one_kernel_computes_what_two_do_over_lists(name: str) -> None:
    """Rows of every count, among them none, in blocks of 128 keys and of several times as many."""
    from multimodal_gen.kernels.block_sparse import gluon_backward_kernel, gluon_fused_kernel
    from multimodal_gen.kernels.block_sparse.call import Backward

    shape = PlanShape(heads=4, num_q=5, num_kv=3, q_size=128, kv_size=256)
    plan = random_plan(PLANS.get(name, shape), seed=1, device="cuda")
    inputs = inputs_for(plan, kv_heads=4)
    if kernel_for(*inputs, plan) != "gluon":
        pytest.skip("needs compute capability 9.0")
    out, lse = block_sparse_attention(*inputs, plan, return_lse=True)
    call = Backward(*inputs, plan, out, lse, torch.randn_like(out), None, 0.1)
    two = gluon_backward_kernel.attend_backward(call)
    one = gluon_fused_kernel.attend_backward(call)
    for mine, other in zip(one, two, strict=True):
        norm = max(float(other.double().norm()), 1e-9)
        assert float((mine.double() - other.double()).norm()) <= 1e-2 * norm


def test_keys_behind_the_last_one_give_nothing() -> None:
    """Whatever log-sum-exps are: of rows that lie far below 0, exp(-lse) is infinite."""
    blocks = Blocks.regular(200, 128)
    plan = BlockPlan.dense(blocks, blocks, "cuda")
    q, k, v = (x.requires_grad_() for x in inputs_for(plan, kv_heads=4))
    with torch.no_grad():
        q[:] = 8.0
        k[:] = -8.0 + 0.1 * k
    out = block_sparse_attention(q, k, v, plan)
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["ragged", "padded 64"])
def test_gradients_of_many_draws_are_right(kernel: str, name: str, seed: int) -> None:
    shape = dataclasses.replace(PLANS[name], keep=(0.1, 0.5, 1.0)[seed % 3])
    plan = random_plan(shape, seed=seed, device="cuda")
    check(kernel, plan, inputs_for(plan, dtype=torch.float16, kv_heads=4))


@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 256])
@pytest.mark.parametrize("name", ["regular 64", "regular 128, batch 3"])
def test_gradients_of_head_sizes_are_right(kernel: str, head_size: int, name: str) -> None:
    if kernel == "gluon" and head_size > 128:
        pytest.skip("gluon serves head sizes up to 128")
    plan = random_plan(PLANS[name], seed=2, device="cuda")
    check(kernel, plan, inputs_for(plan, head_size=head_size, kv_heads=4))


@pytest.mark.parametrize(("queries", "keys"), [(500, 900), (900, 500), (512, 512)])
def test_causal_gradients_are_right(queries: int, keys: int) -> None:
    q, kv = Blocks.regular(queries, 128), Blocks.regular(keys, 128)
    plan = BlockPlan.dense(q, kv, "cuda", causal=True)
    check("triton", plan, inputs_for(plan))


def test_inputs_in_odd_places_have_the_same_gradients() -> None:
    """Neither tensors that the copy engine cannot read nor an expanded gradient are wrong."""
    plan = random_plan(PLANS["regular 64"], seed=4, device="cuda")
    q, k, v = inputs_for(plan, head_size=100)
    check("triton", plan, QKV(q, k, v))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = block_sparse_attention(*leaves, plan)
    found = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    wanted = torch.autograd.grad(out, leaves, torch.ones_like(out))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def leaves_of(plan: BlockPlan) -> list[torch.Tensor]:
    return [x.requires_grad_() for x in inputs_for(plan, kv_heads=4)]


def test_two_runs_agree_bit_by_bit_and_wait_for_nothing() -> None:
    shape = dataclasses.replace(PLANS["ragged"], row_bits=True)
    plan = random_plan(shape, seed=1, device="cuda")
    leaves = leaves_of(plan)

    def run() -> tuple[torch.Tensor, ...]:
        fresh = dataclasses.replace(plan)  # without what was derived from it
        out = block_sparse_attention(*leaves, fresh, deterministic=True)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    first = run()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)


def test_compiled_and_checkpointed_calls_have_the_same_gradients() -> None:
    plan = random_plan(PLANS["regular 64"], seed=3, device="cuda")
    leaves = leaves_of(plan)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return block_sparse_attention(q * 2, k, v, plan, deterministic=True)

    compiled = torch.compile(attend, fullgraph=True)
    found = [
        torch.autograd.grad(out.square().sum(), leaves)
        for out in (
            attend(*leaves),
            compiled(*leaves),
            checkpoint(attend, *leaves, use_reentrant=False),
        )
    ]
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


GRID, TEXT, HEADS = (6, 12, 16), 77, 4
METHODS: dict[str, dict[str, object]] = {
    "sliding_tile_attn": {"window": (1, 3, 3), "tile_size": (2, 4, 4), "skip_time_steps": 0},
    "video_sparse_attn": {"sparsity": 0.7},
    "sla_attn": {"topk_ratio": 0.3},
    "vmoba_attn": {
        "temporal_chunk_size": 2,
        "spatial_layer": 0,
        "st_layer": 0,
        "first_full_step": 0,
        "moba_select_mode": "topk",
        "temporal_topk": 2,
    },
    "triton_attn": {},
}


def method_layer(method: str, kernel: str) -> LocalAttention | UlyssesAttention_VSA:
    backend, config = AttentionBackendEnum(method), None
    if backend.is_sparse:
        cls = find_backend(backend, PlatformEnum.CUDA)
        given = {**METHODS[method], "kernel": kernel, "dense_above": 1.0}
        config = build_config(cls.config_cls, given, backend=method)
    asked = BackendPreference(source=Source.SETTINGS, backend=backend, config=config)
    cls = UlyssesAttention_VSA if method == "video_sparse_attn" else LocalAttention
    return cls(
        HEADS,
        128,
        compute_dtype=torch.bfloat16,
        site=LayerSite(name="blocks.0.attn1", layer=0),
        scope=SelectionScope(default=asked, strict=True),
    )


@pytest.mark.parametrize("gated", [False, True], ids=["", "gate or projection"])
@pytest.mark.parametrize("text", [0, TEXT])
@pytest.mark.parametrize("method", METHODS)
def test_methods_have_the_gradients_of_the_reference(method: str, text: int, gated: bool) -> None:
    if gated and method not in ("video_sparse_attn", "sla_attn"):
        pytest.skip("has no trained part")
    tokens = GRID[0] * GRID[1] * GRID[2]
    leaves = list(make_qkv(1, tokens + text, HEADS, 128, dtype=torch.bfloat16, device="cuda"))
    if gated and method == "video_sparse_attn":
        leaves.append(torch.randn_like(leaves[0]))
    span = TextSpan(start=tokens, length=text) if text else None
    torch.manual_seed(0)
    upstream = torch.randn_like(leaves[0])
    found = {}
    for kernel in ("auto", "reference"):
        if kernel == "reference" and method == "triton_attn":
            continue
        layer = method_layer(method, kernel)
        inputs = [x.detach().requires_grad_() for x in leaves]
        if gated and method == "sla_attn":
            torch.manual_seed(1)
            projection = torch.nn.Linear(128, 128, device="cuda")
            layer.set_projection(projection)
            inputs += list(projection.parameters())
        with set_forward_context(0, latent_grid=GRID, text_span=span, num_steps=1):
            given = {"gate_compress": inputs[3]} if "video" in method and gated else {}
            out = layer(*inputs[:3], **given)
        found[kernel] = torch.autograd.grad(out, inputs, upstream)
        assert not layer.report().detours
    if method == "triton_attn":
        q, k, v = (x.detach().double().transpose(1, 2).requires_grad_() for x in leaves)
        exact = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        wanted = torch.autograd.grad(exact, (q, k, v), upstream.double())
        found["reference"] = tuple(x.transpose(1, 2) for x in wanted)
    for mine, other in zip(found["auto"], found["reference"], strict=True):
        error = float((mine.double() - other.double()).norm() / other.double().norm())
        assert error < 2e-2, f"relative error {error:.2e}"


@pytest.mark.parametrize("method", METHODS)
def test_compiled_layers_have_the_gradients_of_eager_ones(method: str) -> None:
    tokens = GRID[0] * GRID[1] * GRID[2]
    leaves = list(make_qkv(1, tokens, HEADS, 128, dtype=torch.bfloat16, device="cuda"))
    if method == "video_sparse_attn":
        leaves.append(torch.randn_like(leaves[0]))
    inputs = [x.requires_grad_() for x in leaves]
    layer = method_layer(method, "auto")
    if method == "sla_attn":
        projection = torch.nn.Linear(128, 128, device="cuda")
        layer.set_projection(projection)
        inputs += list(projection.parameters())
    upstream = torch.randn_like(inputs[0])
    torch._dynamo.reset()
    found = []
    for attend in (layer, torch.compile(layer, fullgraph=True)):
        with set_forward_context(0, latent_grid=GRID, num_steps=1):
            gate = {"gate_compress": leaves[3]} if len(leaves) == 4 else {}
            out = attend(*leaves[:3], **gate)
        found.append(torch.autograd.grad(out, inputs, upstream))
    for eager, compiled in zip(*found, strict=True):
        error = float((eager.double() - compiled.double()).norm() / eager.double().norm())
        assert error < 1e-2, f"relative error {error:.2e}"


@pytest.mark.parametrize("method", ["sparse_video_gen_2_attn", "sage_sla_attn"])
def test_methods_without_a_backward_pass_say_so(method: str) -> None:
    backend = AttentionBackendEnum(method)
    asked = BackendPreference(source=Source.SETTINGS, backend=backend)
    layer = LocalAttention(
        HEADS, 128, compute_dtype=torch.bfloat16, scope=SelectionScope(default=asked)
    )
    q, k, v = make_qkv(1, 64, HEADS, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with (
        set_forward_context(30, latent_grid=(1, 8, 8), num_steps=50),
        pytest.raises(UnsupportedBackendError, match="it has no backward; call it under"),
    ):
        layer(q, k, v)
