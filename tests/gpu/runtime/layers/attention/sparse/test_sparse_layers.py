"""Sliding Tile and Video Sparse Attention on a GPU that is busy, against masks of tokens.

The first call of a layer makes lists on the device. A GPU that still works on something else
shows whether whoever reads them waits: calls before had other inputs, or memory would hold what
is right already.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.config import SparseConfig, build_config
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    LayerSite,
    SelectionScope,
    Source,
)
from multimodal_gen.runtime.layers.attention.sparse import pattern as pattern_module
from multimodal_gen.runtime.layers.attention.sparse import tiles as tiles_module
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.router import SlidingTileConfig
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.strategy import Strategy
from multimodal_gen.runtime.layers.attention.sparse.methods.vsa import VideoSparseConfig
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from tests.helpers.inputs import make_qkv
from tests.helpers.tolerance import assert_within_error_budget

HEADS, HEAD_SIZE, SCALE = 6, 128, 128**-0.5
# Tiles of 4x4x4: 3x3x4 whole ones, and 3x3x4 of which some are cut short.
WHOLE, RAGGED = (12, 12, 16), (9, 10, 15)
TILE = (4, 4, 4)
TEXTS = {"no text": None, "text first": 0, "text last": 1}
Window = tuple[int, int, int]


@pytest.fixture(autouse=True)
def one_head_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small inputs take as many passes as large ones, with nothing left of other tests."""
    monkeypatch.setattr(tiles_module, "_BYTES_AT_ONCE", 1)
    monkeypatch.setattr(tiles_module, "_BYTES_IN_TWO", 0)
    monkeypatch.setattr(tiles_module, "_SHARE_AT_ONCE", 0.0)
    for cached in (
        pattern_module.shard_plan,
        tiles_module.shard_of,
        tiles_module.tiled_video,
    ):
        cached.cache_clear()


def span_of(name: str, grid: Window) -> TextSpan | None:
    place = TEXTS[name]
    return None if place is None else TextSpan(start=place * math.prod(grid), length=77)


def layer(backend: AttentionBackendEnum, config: SparseConfig, kv_heads: int) -> LocalAttention:
    # Whatever their density, calls are to run the method.
    config = replace(config, dense_above=1.0)
    asked = BackendPreference(source=Source.SETTINGS, backend=backend, config=config)
    return LocalAttention(
        HEADS,
        HEAD_SIZE,
        kv_heads,
        compute_dtype=torch.bfloat16,
        site=LayerSite(name="blocks.0.attn1", layer=0),
        scope=SelectionScope(default=asked, strict=True),
    )


def tile_numbers(grid: Window) -> tuple[torch.Tensor, Window]:
    """Return the place of every token's tile, [S, 3], and the number of tiles per axis."""
    places = torch.tensor(list(product(*map(range, grid))), device="cuda")
    tiles = tuple(-(-n // edge) for n, edge in zip(grid, TILE, strict=True))
    return places // torch.tensor(TILE, device="cuda"), (tiles[0], tiles[1], tiles[2])


def window_mask(grid: Window, window: Window) -> torch.Tensor:
    """Return which video token attends to which, [S, S]."""
    tile, tiles = tile_numbers(grid)
    keep = torch.ones(len(tile), len(tile), dtype=torch.bool, device="cuda")
    for axis, (count, width) in enumerate(zip(tiles, window, strict=True)):
        if width < count:
            centre = tile[:, axis].clamp(width // 2, count - 1 - width // 2)
            keep &= (centre[:, None] - tile[None, :, axis]).abs() <= width // 2
    return keep


def with_text(video: torch.Tensor, text: TextSpan | None) -> torch.Tensor:
    """Return a mask [..., S, S] of the joint sequence: text sees, and is seen by, everything."""
    if text is None:
        return video
    first = text.length if text.start == 0 else 0
    size = video.shape[-1] + text.length
    mask = video.new_ones((*video.shape[:-2], size, size))
    last = first + video.shape[-1]
    mask[..., first:last, first:last] = video
    return mask


def run_behind_other_work(
    attend: LocalAttention,
    qkv: Sequence[torch.Tensor],
    grid: Window,
    text: TextSpan | None,
    step: int = 0,
) -> torch.Tensor:
    torch.cuda.synchronize()
    torch.cuda._sleep(int(4e8))
    with set_forward_context(step, latent_grid=grid, text_span=text):
        return attend(*qkv)


def draw(grid: Window, text: TextSpan | None, kv_heads: int) -> tuple[torch.Tensor, ...]:
    tokens = math.prod(grid) + (text.length if text else 0)
    return make_qkv(
        2, tokens, HEADS, HEAD_SIZE, num_kv_heads=kv_heads, dtype=torch.bfloat16, device="cuda"
    )


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("grid", [WHOLE, RAGGED], ids=["whole tiles", "cut tiles"])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_new_windows_are_right_at_once(tmp_path, grid: Window, name: str, kv_heads: int) -> None:
    text = span_of(name, grid)
    qkv = draw(grid, text, kv_heads)
    built = {"tile_size": TILE, "skip_time_steps": 0}
    path = tmp_path / "mask_strategy.json"
    # Kernels are compiled by other windows, or the compiler would keep the GPU waiting.
    two, four = ((3, 3, 3), (1, 3, 3)), ((1, 1, 3), (3, 1, 1), (1, 3, 1), (3, 3, 1))
    for given, windows in (([x.flip(1) for x in qkv], two), (qkv, four)):
        heads = tuple(windows[h * len(windows) // HEADS] for h in range(HEADS))
        Strategy(windows=((heads,),)).write(path)
        config = build_config(
            SlidingTileConfig,
            {**built, "mask_strategy_file_path": str(path)},
            backend="sliding_tile_attn",
        )
        attend = layer(AttentionBackendEnum.SLIDING_TILE_ATTN, config, kv_heads)
        out = run_behind_other_work(attend, given, grid, text)
    mask = with_text(torch.stack([window_mask(grid, window) for window in heads]), text)
    assert_within_error_budget(out, *qkv, scale=SCALE, mask=mask[None])


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("grid", [WHOLE, RAGGED], ids=["whole tiles", "cut tiles"])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_the_best_tiles_are_right_at_once(grid: Window, name: str, kv_heads: int) -> None:
    kept = 9
    text = span_of(name, grid)
    config = build_config(VideoSparseConfig, {"topk": kept}, backend="video_sparse_attn")
    attend = layer(AttentionBackendEnum.VIDEO_SPARSE_ATTN, config, kv_heads)
    tile, tiles = tile_numbers(grid)
    number = (tile[:, 0] * tiles[1] + tile[:, 1]) * tiles[2] + tile[:, 2]
    member = torch.nn.functional.one_hot(number).double()
    q, k, v = draw(grid, text, kv_heads)
    first = text.length if text is not None and text.start == 0 else 0
    video = slice(first, first + math.prod(grid))
    # Tiles with means of their own, whose scores differ by more than rounding.
    generator = torch.Generator("cuda").manual_seed(1)
    for x in (q, k):
        shape = (2, member.shape[1], *x.shape[2:])
        mean = torch.randn(shape, device="cuda", generator=generator).to(x.dtype)
        x[:, video] += mean[:, number]
    means = [
        torch.einsum("bshd,sn->bhnd", x[:, video].double(), member / member.sum(0)).to(x).double()
        for x in (q, k.repeat_interleave(HEADS // kv_heads, 2))
    ]
    scores = means[0] @ means[1].transpose(2, 3)
    best = torch.zeros_like(scores, dtype=torch.bool)
    best.scatter_(3, scores.topk(kept, dim=3).indices, True)
    mask = with_text(best[:, :, number][:, :, :, number], text)
    # The first call compiles, and leaves the means of other tiles in memory.
    for query in (q.flip(1), q):
        tiles_module.shard_of.cache_clear()
        tiles_module.tiled_video.cache_clear()
        out = run_behind_other_work(attend, (query, k, v), grid, text)
    assert_within_error_budget(out, q, k, v, scale=SCALE, mask=mask)


def test_a_layer_is_right_whatever_windows_it_had_before() -> None:
    qkv = draw(WHOLE, None, HEADS)
    for window in product((1, 3), repeat=3):
        config = build_config(
            SlidingTileConfig,
            {"tile_size": TILE, "skip_time_steps": 0, "window": window},
            backend="sliding_tile_attn",
        )
        attend = layer(AttentionBackendEnum.SLIDING_TILE_ATTN, config, HEADS)
        others = [x.flip(1) for x in qkv]
        first, _, again = (
            run_behind_other_work(attend, x, WHOLE, None) for x in (qkv, others, qkv)
        )
        torch.testing.assert_close(first, again, rtol=0, atol=2e-2)


def config_of(method: AttentionBackendEnum, **parameters: object) -> SparseConfig:
    cls = find_backend(method, PlatformEnum.CUDA)
    return build_config(cls.config_cls, parameters, backend=str(method))


@pytest.mark.parametrize(
    ("method", "parameters", "known"),
    [
        ("video_sparse_attn", {"sparsity": 0.1}, True),
        ("sla_attn", {"topk_ratio": 0.95}, True),
        (
            "vmoba_attn",
            {"temporal_chunk_size": 3, "spatial_layer": 0, "st_layer": 0, "first_full_step": 0},
            False,
        ),
        (
            "sparse_video_gen_2_attn",
            {"svg2_num_q_centroids": 20, "svg2_num_k_centroids": 60},
            False,
        ),
    ],
)
def test_a_call_that_would_keep_too_much_is_dense_without_waiting(
    method: str, parameters: dict[str, object], known: bool
) -> None:
    if method == "vmoba_attn":
        parameters = {**parameters, "moba_select_mode": "threshold", "moba_threshold": 0.9}
    if method == "sparse_video_gen_2_attn":
        parameters = {**parameters, "svg2_first_layers_fp": 0, "svg2_first_times_fp": 0}
    backend = AttentionBackendEnum(method)
    asked = BackendPreference(
        source=Source.SETTINGS, backend=backend, config=config_of(backend, **parameters)
    )
    attend = LocalAttention(
        HEADS,
        HEAD_SIZE,
        compute_dtype=torch.bfloat16,
        site=LayerSite(name="blocks.0.attn1", layer=0, num_layers=1),
        scope=SelectionScope(default=asked, strict=True),
    )
    q, k, v = draw(WHOLE, None, HEADS)
    for step, query in enumerate((q, q.flip(1), q.flip(0))):  # the first call compiles
        out = run_behind_other_work(attend, (query, k, v), WHOLE, None, step=step)
    assert_within_error_budget(out, query, k, v, scale=SCALE)
    dense = sum(detour.calls for detour in attend.report().detours)
    assert dense == (3 if known else 2)  # what the data decide is known one step later
