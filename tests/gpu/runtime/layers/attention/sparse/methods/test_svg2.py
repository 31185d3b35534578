"""Sparse VideoGen 2 on a GPU: k-means, the kernel for clusters, and the layer, without waiting."""

import math

import pytest
import torch

from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.cluster_attention.api import cluster_attention, query_pieces
from multimodal_gen.kernels.cluster_attention.plan import (
    Groups,
    cluster_plan,
    cluster_weights,
    kept_clusters,
)
from multimodal_gen.kernels.kmeans.api import initial_centroids, kmeans
from multimodal_gen.kernels.kmeans.reference import sort_reference
from multimodal_gen.kernels.tile_order.api import gather_tokens
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    LayerSite,
    SelectionScope,
    Source,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.svg2 import SVG2Config
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.inputs import QKV, make_video_qkv
from tests.helpers.tolerance import assert_within_error_budget

GRID = (5, 18, 23)  # 2,070 tokens
TOKENS = math.prod(GRID)


def on_sm90() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def whole_numbers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-3, 4, shape, device="cuda", generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_size", [40, 64, 128, 256])
@pytest.mark.parametrize("masked", [False, True])
def test_one_iteration_is_the_definition(dtype: torch.dtype, head_size: int, masked: bool) -> None:
    x = whole_numbers(2, 3001, 3, head_size, dtype=dtype, seed=0)
    token_mask = torch.rand(2, 3001, device="cuda") > 0.1 if masked else None
    start = initial_centroids(x, 300)
    wanted = kmeans(x, start, iterations=1, mask=token_mask, kernel="reference")
    found = kmeans(x, start, iterations=1, mask=token_mask, kernel="triton")
    for name in ("order", "starts", "counts", "centroids"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_token_is_with_its_nearest_centroid(dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x = (3 * torch.randn(1, 3001, 2, 128, device="cuda", generator=generator)).to(dtype)
    centroids = 2 * torch.randn(1, 2, 77, 128, device="cuda", generator=generator)
    found = kmeans(x, centroids, iterations=0, kernel="triton")
    rounded = centroids.to(dtype).double()
    for h in range(2):
        distances = torch.cdist(x[0, :, h].double(), rounded[0, h]).square()
        sizes = found.counts[0, h]
        label = torch.repeat_interleave(torch.arange(77, device="cuda"), sizes)
        own = distances[found.order[0, h].long(), label]
        best = distances.amin(1)[found.order[0, h].long()]
        # Sums of 128 products in fp32.
        assert bool((own - best <= 128 * torch.finfo(torch.float32).eps * best).all())


def test_two_runs_of_k_means_agree_bit_by_bit() -> None:
    x, _, _ = make_video_qkv(GRID, 4, 128, dtype=torch.bfloat16, device="cuda")
    start = initial_centroids(x, 100)
    first, second = (kmeans(x, start, iterations=20) for _ in range(2))
    assert torch.equal(first.centroids, second.centroids)
    assert torch.equal(first.order, second.order)


@pytest.mark.parametrize("num", [1, 300, 1000, 5000])
@pytest.mark.parametrize("tokens", [1, 512, 70_001])
def test_the_sort_is_stable(num: int, tokens: int) -> None:
    from multimodal_gen.kernels.kmeans.kmeans_kernel import sort_labels

    labels = torch.randint(0, num + 1, (3, tokens), device="cuda", dtype=torch.int32)
    for found, wanted in zip(sort_labels(labels, num), sort_reference(labels, num), strict=True):
        assert torch.equal(found, wanted)


def clustered(dtype: torch.dtype, head_size: int, kv_heads: int) -> tuple[QKV, Groups, Groups]:
    q, k, v = make_video_qkv(GRID, 4, head_size, batch=2, dtype=dtype, device="cuda")
    k, v = k[:, :, :kv_heads], v[:, :, :kv_heads]
    sides = []
    for x, num in ((q, 20), (k, 60)):
        found = kmeans(x, initial_centroids(x, num), iterations=3)
        sides.append(Groups(order=found.order, starts=found.starts, counts=found.counts))
    return QKV(q, k, v), sides[0], sides[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 128])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_the_kernel_for_clusters_errs_as_the_engine_does(
    dtype: torch.dtype, head_size: int, kv_heads: int, share: float, scale: float
) -> None:
    if not on_sm90():
        pytest.skip("needs compute capability 9.0")
    qkv, queries, keys = clustered(dtype, head_size, kv_heads)
    generator = torch.Generator("cuda").manual_seed(1)
    token_mask = torch.rand(2, 4, 20, 60, device="cuda", generator=generator) < share
    out = torch.full_like(qkv.query, float("nan"))
    cluster_attention(*qkv, queries, keys, token_mask, out, scale=scale, kernel="gluon")
    again = torch.empty_like(out)
    cluster_attention(*qkv, queries, keys, token_mask, again, scale=scale, kernel="gluon")
    assert torch.equal(out, again)
    mask = torch.zeros(2, 4, TOKENS, TOKENS, dtype=torch.bool, device="cuda")
    group = 4 // kv_heads
    for b in range(2):
        for h in range(4):
            of_q, of_k = (
                torch.empty(TOKENS, dtype=torch.long, device="cuda").scatter_(
                    0,
                    side.order[b, head].long(),
                    torch.repeat_interleave(
                        torch.arange(side.counts.shape[2], device="cuda"), side.counts[b, head]
                    ),
                )
                for side, head in ((queries, h), (keys, h // group))
            )
            mask[b, h] = token_mask[b, h][of_q][:, of_k]
    assert_within_error_budget(out, *qkv, scale=scale, mask=mask)


def test_scores_that_grow_are_done_again_exactly() -> None:
    if not on_sm90():
        pytest.skip("needs compute capability 9.0")
    from multimodal_gen.kernels.cluster_attention.cluster_attention_kernel import attend

    qkv, queries, keys = clustered(torch.bfloat16, 128, 4)
    (q,) = gather_tokens((qkv.query,), queries.order)
    k, v = gather_tokens((qkv.key, qkv.value), keys.order)
    # The last keys score far above those that the first steps see.
    k[:, -40:] = q[:, :1] * 40
    token_mask = torch.ones(2, 4, 20, 60, dtype=torch.bool, device="cuda")
    found, found_lse = attend(
        q, k, v, query_pieces(queries), keys, token_mask, scale=1.0, return_lse=True
    )
    plan = cluster_plan(queries, keys, token_mask)
    wanted, lse = block_sparse_attention(q, k, v, plan, scale=1.0, kernel="triton", return_lse=True)
    assert found.isfinite().all()
    torch.testing.assert_close(found_lse, lse, rtol=1e-3, atol=2e-2)
    assert_within_error_budget(found, q, k, v, scale=1.0)
    assert (found - wanted).abs().max() < 0.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 128])
def test_clusters_that_are_not_kept_count_by_their_means(dtype, head_size) -> None:
    if not on_sm90():
        pytest.skip("needs compute capability 9.0")
    qkv, queries, keys = clustered(dtype, head_size, 2)
    generator = torch.Generator("cuda").manual_seed(2)
    token_mask = torch.rand(2, 4, 20, 60, generator=generator, device="cuda") < 0.3
    token_mask[:, :, 3] = False
    found = {}
    for kernel in ("gluon", "reference"):
        found[kernel] = torch.zeros_like(qkv.query)
        cluster_attention(
            *qkv, queries, keys, token_mask, found[kernel], scale=0.1, kernel=kernel, num_pooled=60
        )
    torch.testing.assert_close(found["gluon"], found["reference"], rtol=3e-2, atol=3e-2)


def layer(heads: int, **parameters: object) -> LocalAttention:
    config = SVG2Config(
        svg2_num_q_centroids=20,
        svg2_num_k_centroids=60,
        svg2_first_layers_fp=0,
        svg2_first_times_fp=0,
        **{"dense_above": 1.0, **parameters},
    )
    backend = AttentionBackendEnum.SPARSE_VIDEO_GEN_2_ATTN
    asked = BackendPreference(source=Source.SETTINGS, backend=backend, config=config)
    return LocalAttention(
        heads,
        128,
        compute_dtype=torch.bfloat16,
        site=LayerSite(name="blocks.0.attn1", layer=0, num_layers=1),
        scope=SelectionScope(default=asked, strict=True),
    )


@pytest.mark.parametrize("text", [None, "first", "last"])
def test_kernels_agree_on_whole_layers_without_waiting(text: str | None) -> None:
    length = 77 if text else 0
    span = TextSpan(start=0 if text == "first" else TOKENS, length=77) if text else None
    qkv = make_video_qkv(GRID, 4, 128, batch=2, dtype=torch.bfloat16, device="cuda")
    qkv = QKV(*(torch.cat((x, x[:, :length]), 1) for x in qkv))
    outs, densities = {}, set()
    for kernel in ("auto", "triton"):
        attention = layer(4, kernel=kernel)
        for step in range(3):
            known = {"num_steps": 9, "request_id": "a", "cfg_branch": "cond"}
            with set_forward_context(step, latent_grid=GRID, text_span=span, **known):
                if step == 2:
                    torch.cuda.set_sync_debug_mode("error")
                try:
                    outs[kernel] = attention(*qkv)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        densities.add(attention.report().entries[0].density)
    difference = (outs["auto"].double() - outs["triton"].double()).norm()
    assert difference <= 4e-3 * outs["triton"].double().norm()
    (density,) = densities
    assert density is not None
    assert 0.0 < density < 1.0


def test_all_the_mass_is_dense_attention() -> None:
    qkv = make_video_qkv(GRID, 4, 128, dtype=torch.bfloat16, device="cuda")
    with set_forward_context(0, latent_grid=GRID):
        out = layer(4, svg2_top_p_kmeans=1.0)(*qkv)
    assert_within_error_budget(out, *qkv, scale=128**-0.5)


def test_weights_and_the_map_have_a_place_for_every_cluster() -> None:
    qkv, _, _ = clustered(torch.bfloat16, 128, 4)
    found = [kmeans(x, initial_centroids(x, 50), iterations=1) for x in qkv[:2]]
    weights = cluster_weights(
        found[0].centroids, found[1].centroids, found[1].counts, scale=128**-0.5
    )
    assert torch.allclose(weights.sum(3), torch.ones_like(weights[..., 0]))
    kept = kept_clusters(weights, top_p=0.7, min_count=5)
    assert bool(((weights * kept).sum(3) >= 0.7 - 1e-5).all())
    assert int(kept.sum(3).min()) >= 5
