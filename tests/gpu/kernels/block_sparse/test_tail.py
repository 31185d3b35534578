"""The pooled tail and Sol-Attn on a GPU, against float64 and against the CPU."""

import math

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention, kernel_for
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.tail import PooledTail, add_tail, pool_blocks
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.config import build_config
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    LayerSite,
    SelectionScope,
    Source,
)
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from tests.helpers.block_plans import PlanShape, plan_by_bits, random_plan
from tests.helpers.inputs import make_qkv, make_video_qkv
from tests.helpers.tail import assert_tail_within_error_budget

PLANS = {
    "two blocks in a tile": PlanShape(heads=4, num_q=5, num_kv=150, q_size=64, kv_size=16),
    "blocks of 128": PlanShape(batch=2, heads=4, num_q=3, num_kv=9, q_size=128, kv_size=128),
    "tiles of 384": PlanShape(heads=1, num_q=3, num_kv=5, q_size=384, kv_size=384),
    "padded": PlanShape(
        heads=4, num_q=5, num_kv=9, q_size=64, kv_size=64, q_form="padded", kv_form="padded"
    ),
    "ragged": PlanShape(
        batch=2, heads=4, num_q=5, num_kv=90, q_size=128, kv_size=50, q_form="ragged",
        kv_form="ragged",
    ),
    "nothing kept": PlanShape(heads=4, num_q=3, num_kv=5, keep=0.0),
    "everything kept": PlanShape(heads=4, num_q=3, num_kv=5, keep=1.0),
}  # fmt: skip


@pytest.fixture(params=["triton", "gluon"])
def kernel(request: pytest.FixtureRequest) -> str:
    """Each kernel of the exact part that this machine can run."""
    q = torch.zeros(1, 64, 1, 64, device="cuda", dtype=torch.bfloat16)
    plan = BlockPlan.dense(Blocks.regular(64, 64), Blocks.regular(64, 64), "cuda")
    try:
        return kernel_for(q, q, q, plan, request.param)
    except UnsupportedBackendError as error:
        pytest.skip(str(error))


def check(
    plan: BlockPlan,
    head_size: int,
    kernel: str,
    dtype: torch.dtype,
    *,
    peak: float = 1.0,
    **tail: bool,
) -> None:
    q, k, v = make_qkv(
        2,
        plan.q.total,
        4,
        head_size,
        num_keys=plan.kv.total,
        num_kv_heads=2,
        dtype=dtype,
        device="cuda",
    )
    qkv = (q * peak, k, v)
    scale = head_size**-0.5
    given = {"scale": scale, "return_lse": True, "kernel": kernel}
    out, lse = block_sparse_attention(*qkv, plan, **given, tail=PooledTail(**tail))
    on_cpu = [x.cpu() for x in (out, lse, *qkv)]
    assert_tail_within_error_budget(*on_cpu, plan.to("cpu"), scale=scale, **tail)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_blocks_that_are_not_kept_count_by_their_means(
    name: str, kernel: str, dtype: torch.dtype
) -> None:
    check(random_plan(PLANS[name], seed=3, device="cuda"), 128, kernel, dtype)


@pytest.mark.parametrize("peak", [1.0, 40.0], ids=["even", "means outweigh what is kept"])
def test_there_may_be_more_tiles_than_programs(kernel: str, peak: float) -> None:
    shape = PlanShape(batch=2, heads=4, num_q=60, num_kv=70, q_size=64, kv_size=4, keep=0.05)
    check(random_plan(shape, seed=7, device="cuda"), 128, kernel, torch.bfloat16, peak=peak)


@pytest.mark.parametrize("head_size", [32, 40, 64, 96, 128])
def test_every_head_size_is_right(head_size: int, kernel: str) -> None:
    plan = random_plan(PlanShape(num_q=3, num_kv=80, keep=0.2), seed=2, device="cuda")
    check(plan, head_size, kernel, torch.bfloat16)


def test_heads_of_256_channels_are_right() -> None:
    plan = random_plan(PlanShape(num_q=3, num_kv=80, keep=0.2), seed=2, device="cuda")
    check(plan, 256, "triton", torch.bfloat16)


def test_values_follow_keys_to_first_order(kernel: str) -> None:
    plan = random_plan(PlanShape(num_q=3, num_kv=40, keep=0.2), seed=4, device="cuda")
    check(plan, 128, kernel, torch.bfloat16, first_order=True)


def test_rows_may_choose_by_bits() -> None:
    shape = PlanShape(heads=4, num_q=2, num_kv=70, q_size=300, kv_size=20, row_bits=True)
    plan = plan_by_bits(shape, seed=6)
    qkv = make_qkv(2, plan.q.total, 4, 128, num_keys=plan.kv.total, dtype=torch.bfloat16)
    on_gpu, moved, scale = [x.cuda() for x in qkv], plan.to("cuda"), 128**-0.5
    found = block_sparse_attention(*on_gpu, moved, scale=scale, return_lse=True)
    pooled = pool_blocks(on_gpu[1], on_gpu[2], moved.kv, moved.kv.num)
    assert moved.row_bits is not None
    found = add_tail(*found, on_gpu[0], pooled, moved.row_bits, None, scale=scale)
    on_cpu = [x.cpu() for x in found]
    assert_tail_within_error_budget(*on_cpu, *qkv, plan, scale=scale)


def test_rows_of_extreme_scores_stay_finite(kernel: str) -> None:
    plan = random_plan(PlanShape(heads=4, num_q=3, num_kv=50, keep=0.3), seed=5, device="cuda")
    q, k, v = make_qkv(
        2, plan.q.total, 4, 128, num_keys=plan.kv.total, dtype=torch.bfloat16, device="cuda"
    )
    out = block_sparse_attention(30 * q, k, v, plan, kernel=kernel, tail=PooledTail())
    assert isinstance(out, torch.Tensor)
    assert out.isfinite().all()


def test_nothing_waits_for_the_device(kernel: str) -> None:
    plan = random_plan(PlanShape(heads=4, num_q=3, num_kv=50, keep=0.3), seed=5, device="cuda")
    q, k, v = make_qkv(
        2, plan.q.total, 4, 128, num_keys=plan.kv.total, dtype=torch.bfloat16, device="cuda"
    )
    expected = block_sparse_attention(q, k, v, plan, kernel=kernel, tail=PooledTail())
    torch.cuda.synchronize()
    plan.cache.clear()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = block_sparse_attention(q, k, v, plan, kernel=kernel, tail=PooledTail())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


GRID = (6, 13, 20)
TEXTS = {"no text": None, "text first": 0, "text last": 1}
METHODS = {
    "sol_attn": {"dense_steps": None, "dense_layers": None},
    "sol_attn, tiles": {"dense_steps": None, "dense_layers": None, "tile_size": [4, 4, 4]},
    "sol_attn, top-k": {"dense_steps": None, "dense_layers": None, "topk_ratio": 0.2},
    "sliding_tile_attn": {"window": [1, 1, 3], "tile_size": [4, 4, 4], "skip_time_steps": 0},
    "video_sparse_attn": {"sparsity": 0.8},
    "sla_attn": {"topk_ratio": 0.2},
    "subblock_sparse_attn": {"sparsity": 0.7, "skip_first_steps": 0, "min_seq_len": 0},
    "pisa_attn": {"density": 0.2},
    "cube_sparse_attn": {"topk_ratio": 0.2},
    "nabla_attn": {"P": 0.5},
    "draft_attn": {"sparsity_ratio": 0.7},
    "video_sparse_attn_h3": {"sparsity": 0.8},
    "bsa_attn": {"kv_cumulative_threshold": 0.5},
    "bsa_attn, large": {"kv_cumulative_threshold": 0.5, "tile_size": [4, 8, 8]},
    "sparge_attn": {"topk": 0.3},
    "sparge_attn, alike": {"topk": 0.3, "simthreshd1": 0.6},
    "static_sparse_attn": {"decay_factor": 0.5},
    "static_sparse_attn, chunks": {"pattern": "chunks", "chunk": 1},
    "static_sparse_attn, lvsa": {"pattern": "lvsa", "window_size": 1, "key_frame_interval": 4},
    "video_sparse_attn, cells": {"sparsity": 0.8, "router": "subblock"},
    "vmoba_attn": {
        "st_chunk_size": [2, 5, 5],
        "st_topk": 4,
        "temporal_layer": 0,
        "spatial_layer": 0,
        "moba_select_mode": "topk",
        "first_full_step": 0,
    },
}


def run(name: str, device: str, qkv: tuple[torch.Tensor, ...], text: TextSpan | None):
    """Run a method's layer."""
    backend = AttentionBackendEnum(name.split(",")[0])
    cls = find_backend(backend, PlatformEnum.CUDA)
    given = {**METHODS[name], "tail": "pooled", "dense_above": 1.0}
    config = build_config(cls.config_cls, given, backend=str(backend))
    asked = BackendPreference(source=Source.SETTINGS, backend=backend, config=config)
    layer = LocalAttention(
        4,
        128,
        2,
        compute_dtype=torch.bfloat16,
        site=LayerSite(name="blocks.2.attn1", layer=2),
        scope=SelectionScope(default=asked, strict=True),
    )
    inputs = [x.to(device) for x in qkv]
    with torch.no_grad(), set_forward_context(0, latent_grid=GRID, text_span=text):
        return layer(*inputs)


@pytest.mark.parametrize("where", TEXTS)
@pytest.mark.parametrize("name", METHODS)
def test_layers_are_those_of_the_cpu(name: str, where: str) -> None:
    place = TEXTS[where]
    text = None if place is None else TextSpan(start=place * math.prod(GRID), length=77)
    video = make_video_qkv(GRID, 4, 128, dtype=torch.bfloat16)
    qkv = (video.query, video.key[:, :, ::2], video.value[:, :, ::2])
    if text is not None:
        words = make_qkv(1, 77, 4, 128, num_kv_heads=2, dtype=torch.bfloat16)
        pairs = zip(words, qkv, strict=True) if place == 0 else zip(qkv, words, strict=True)
        qkv = tuple(torch.cat(pair, dim=1) for pair in pairs)
    exact = run(name, "cpu", qkv, text).float()
    found = run(name, "cuda", qkv, text).cpu().float()
    # Of blocks that score alike, another may be chosen: few rows may be others.
    error = (found - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert error.median() <= 8e-3
    assert (error > 5e-2).float().mean() <= 2e-2
