"""Linear attention and Sparse-Linear Attention on a GPU, against the definitions."""

import math

import pytest
import torch
from torch import nn

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.reference import attention_reference
from multimodal_gen.kernels.linear_attention.api import (
    add_linear,
    add_unselected,
    key_means,
    key_state,
)
from multimodal_gen.kernels.linear_attention.reference import (
    FEATURE_MAPS,
    KeyState,
    Projection,
    Target,
    add_linear_reference,
    add_unselected_reference,
    key_means_reference,
    key_state_reference,
)
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    LayerSite,
    SelectionScope,
    Source,
)
from multimodal_gen.runtime.layers.attention.sparse.executors.linear import block_stats
from multimodal_gen.runtime.layers.attention.sparse.methods.sla import (
    SLAConfig,
    SLARouter,
)
from multimodal_gen.runtime.layers.attention.sparse.raster import raster_blocks
from multimodal_gen.runtime.layers.attention.sparse.router import Budget
from multimodal_gen.runtime.layers.attention.sparse.tiles import SequenceLayout, uniform_plan
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.kernels.linear_attention.naive import UNSELECTED_ROUNDINGS

DTYPES = [torch.bfloat16, torch.float16]
TOKENS, HEADS, KV_HEADS = 1500, 4, 2


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def qkv(
    head_size: int, dtype: torch.dtype, tokens: int = TOKENS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query = random(2, tokens, HEADS, head_size, dtype=dtype, seed=1)
    key, value = (random(2, tokens, KV_HEADS, head_size, dtype=dtype, seed=s) for s in (2, 3))
    return query, key, value


def projection(head_size: int) -> Projection:
    weight = random(head_size, head_size, seed=4) * head_size**-0.5
    return Projection(weight=weight, bias=random(head_size, seed=5))


def ragged() -> Blocks:
    """Blocks that leave tokens out and differ between samples; one is empty."""
    starts = torch.tensor([0, 64, 130, 700, 764], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([[64, 64, 0, 64, 33], [1, 64, 50, 64, 64]], dtype=torch.int32)
    return Blocks.ragged(
        starts.view(1, 1, -1), lengths.view(2, 1, -1).cuda(), total=TOKENS, size=64
    )


def assert_near(
    found: torch.Tensor, exact: torch.Tensor, size: torch.Tensor, roundings: int = 5
) -> None:
    """Assert that only so many roundings to the dtype lie between; see `naive.assert_added`."""
    eps = torch.finfo(found.dtype).eps
    budget = eps * exact.abs() + roundings * eps * size.abs().amax(-1, keepdim=True)
    assert ((found.double() - exact).abs() <= budget).all()


@pytest.mark.parametrize(
    ("dtype", "head_size", "feature_map", "blocks"),
    [
        *((dtype, 128, name, "regular") for dtype in DTYPES for name in FEATURE_MAPS),
        *((torch.bfloat16, size, "softmax", "regular") for size in (64, 80, 256)),
        *((torch.bfloat16, 128, name, "ragged") for name in FEATURE_MAPS),
        (torch.bfloat16, 128, "softmax", "of 128"),
    ],
)
def test_the_branch_over_all_tokens_is_the_definition(
    dtype: torch.dtype, head_size: int, feature_map: str, blocks: str
) -> None:
    query, key, value = qkv(head_size, dtype)
    cut = (
        ragged()
        if blocks == "ragged"
        else Blocks.regular(TOKENS, 64 if blocks != "of 128" else 128)
    )
    means, state = key_state(key, value, cut, feature_map=feature_map)
    wanted = key_means_reference(key, cut)
    torch.testing.assert_close(means, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(key_means(key, cut), wanted, rtol=1e-5, atol=1e-5)
    out, weights, rows = (
        random(*query.shape, dtype=dtype, seed=6),
        projection(head_size),
        slice(3, 1490),
    )
    found = add_linear(out.clone(), query, state, weights, rows=rows, feature_map=feature_map)
    # Features are rounded to the dtype by definition, all else is in float64.
    exact_state = key_state_reference(key, value, cut, feature_map)
    absolute = key_state_reference(key, value.abs(), cut, feature_map)
    double = KeyState(moments=exact_state.moments.double(), sums=exact_state.sums.double())
    exact = add_linear_reference(Target(out.double(), query, weights, feature_map), double, rows)
    positive = Projection(weight=weights.weight.abs(), bias=weights.bias.abs())
    zero = torch.zeros_like(out, dtype=torch.float32)
    size = add_linear_reference(Target(zero, query, positive, feature_map), absolute, rows)
    assert_near(found, exact, size)


@pytest.mark.parametrize(
    ("dtype", "head_size", "feature_map", "blocks"),
    [
        *((torch.bfloat16, 128, name, "regular") for name in FEATURE_MAPS),
        (torch.float16, 128, "elu", "regular"),
        (torch.bfloat16, 64, "softmax", "regular"),
        (torch.bfloat16, 128, "elu", "ragged"),
    ],
)
def test_the_branch_over_unselected_blocks_is_the_definition(
    dtype: torch.dtype, head_size: int, feature_map: str, blocks: str
) -> None:
    query, key, value = qkv(head_size, dtype)
    cut = ragged() if blocks == "ragged" else Blocks.regular(TOKENS, 64)
    rows = Blocks.regular(TOKENS, 128)
    generator = torch.Generator("cuda").manual_seed(7)
    keep = torch.rand(2, HEADS, rows.num, cut.num, device="cuda", generator=generator) < 0.3
    plan, weights = BlockPlan.from_map(keep, rows, cut), projection(head_size)
    out = random(*query.shape, dtype=dtype, seed=6)
    found = add_unselected(out.clone(), query, key, value, plan, weights, feature_map=feature_map)
    exact = add_unselected_reference(
        Target(out.float(), query, weights, feature_map), key, value, plan
    )
    positive = Projection(weight=weights.weight.abs(), bias=weights.bias.abs())
    zero = torch.zeros_like(out, dtype=torch.float32)
    size = add_unselected_reference(
        Target(zero, query, positive, feature_map), key, value.abs(), plan
    )
    assert_near(found, exact.double(), size, UNSELECTED_ROUNDINGS)


def layer(head_size: int, **parameters: object) -> tuple[LocalAttention, nn.Linear]:
    asked = BackendPreference(
        source=Source.SETTINGS,
        backend=AttentionBackendEnum.SLA_ATTN,
        config=SLAConfig(**parameters),
    )
    attention = LocalAttention(
        HEADS,
        head_size,
        KV_HEADS,
        compute_dtype=torch.bfloat16,
        site=LayerSite(name="blocks.0.attn1", layer=0),
        scope=SelectionScope(default=asked, strict=True),
    )
    linear = nn.Linear(head_size, head_size).cuda().requires_grad_(False)
    attention.set_projection(linear)
    return attention, linear


@pytest.mark.parametrize("branch", ["all", "unselected"])
@pytest.mark.parametrize(
    ("where", "sizes"),
    [
        ("no text", (128, 64)),
        ("text first", (128, 64)),
        ("text last", (128, 64)),
        ("no text", (64, 64)),
        ("text last", (128, 128)),
    ],
)
def test_a_layer_is_the_definition(branch: str, where: str, sizes: tuple[int, int]) -> None:
    grid, ratio, head_size = (5, 18, 23), 0.2, 128
    video, text = math.prod(grid), 0 if where == "no text" else 77
    start = text if where == "text first" else 0
    query, key, value = qkv(head_size, torch.bfloat16, video + text)
    q_size, kv_size = sizes
    attention, linear = layer(
        head_size, topk_ratio=ratio, linear_branch=branch, BLKQ=q_size, BLKK=kv_size
    )
    span = None if not text else TextSpan(start=0 if start else video, length=text)
    with set_forward_context(0, latent_grid=grid, text_span=span), torch.inference_mode():
        attention(query, key, value)  # the blocks of a grid are made once
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = attention(query, key, value)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    total = video + text
    layout = SequenceLayout(grid=grid, start=start, num_queries=total, num_keys=total)
    blocks = raster_blocks(layout, q_size, kv_size, query.device)
    kept = Budget.of_share(ratio, blocks.num_video).kept
    # The choice of blocks has tests of its own; here only what is made of it counts.
    budget = Budget(kept, blocks.num_video)
    stats = block_stats(query, key_means(key, blocks.keys), blocks.keys, blocks)
    lists = SLARouter().choose(SLAConfig(), stats, budget)
    plan = uniform_plan(lists, blocks.queries, blocks.keys)
    q, k, v = (x.float() for x in (query, key, value))
    exact, _ = attention_reference(q, k, v, plan, scale=head_size**-0.5)
    weights = Projection(weight=linear.weight, bias=linear.bias)
    target = Target(exact, q, weights, "softmax")
    if branch == "all":
        state = key_state_reference(k, v, blocks.keys, "softmax")
        exact = add_linear_reference(target, state, layout.video)
    else:
        exact = add_unselected_reference(target, k, v, plan)
    found, wanted = out[:, layout.video].double(), exact[:, layout.video].double()
    assert (found - wanted).norm() / wanted.norm() < torch.finfo(torch.bfloat16).eps
    for rest in layout.text:
        dense = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q[:, rest], k, v)), enable_gqa=True
        )
        torch.testing.assert_close(
            out[:, rest].float(), dense.transpose(1, 2), rtol=2e-2, atol=2e-2
        )


def test_a_layer_takes_little_memory() -> None:
    grid, head_size = (16, 32, 64), 128
    inputs = [random(1, math.prod(grid), h, head_size, dtype=torch.bfloat16) for h in (4, 2, 2)]
    for branch in ("all", "unselected"):
        attention, _ = layer(head_size, linear_branch=branch)
        with set_forward_context(0, latent_grid=grid), torch.inference_mode():
            out = attention(*inputs)
            del out
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = attention(*inputs)
            torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before - out.nbytes
        # Scores wait in a buffer of 64 MiB at most, states of blocks in one of 32 MiB and a share.
        assert extra <= 0.1 * (out.nbytes + sum(x.nbytes for x in inputs)) + 96 * 2**20
