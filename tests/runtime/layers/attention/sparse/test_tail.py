"""`tail: pooled` of every method, against its definition written down token by token."""

from itertools import product

import pytest
import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.layers.attention import warn_once
from multimodal_gen.runtime.layers.attention.sparse.methods.sla import SLAConfig
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.router import SlidingTileConfig
from multimodal_gen.runtime.layers.attention.sparse.methods.svg2 import SVG2Config, SVG2Router
from multimodal_gen.runtime.layers.attention.sparse.methods.vmoba import VMoBAConfig
from multimodal_gen.runtime.layers.attention.sparse.methods.vsa import VideoSparseConfig
from multimodal_gen.runtime.layers.attention.sparse.windows import kept_map
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.sparse import (
    SparseMethod,
    assert_same_gradients,
    best_blocks,
    block_inputs,
    joint_mask,
    pair_mask,
    run_sparse,
    text_places,
    tokens_of_tiles,
    video_tokens,
)
from tests.helpers.tail import pooled_attention

GRID, TILE, KEPT = (5, 6, 9), (4, 4, 4), 3
WINDOW, TILES = (1, 1, 1), (2, 2, 3)
TEXTS = text_places(GRID, 30)
STA = SparseMethod(
    backend=AttentionBackendEnum.SLIDING_TILE_ATTN,
    config_cls=SlidingTileConfig,
    given={"window": WINDOW, "tile_size": TILE, "skip_time_steps": 0, "tail": "pooled"},
)
VSA = SparseMethod(
    backend=AttentionBackendEnum.VIDEO_SPARSE_ATTN,
    config_cls=VideoSparseConfig,
    given={"topk": KEPT, "tail": "pooled"},
)
SLA = SparseMethod(
    backend=AttentionBackendEnum.SLA_ATTN,
    config_cls=SLAConfig,
    given={"topk_ratio": 0.6, "BLKQ": 128, "BLKK": 64, "tail": "pooled"},
)
VMOBA = SparseMethod(
    backend=AttentionBackendEnum.VMOBA_ATTN,
    config_cls=VMoBAConfig,
    given={
        "st_chunk_size": TILE,
        "st_topk": KEPT,
        "temporal_layer": 0,
        "spatial_layer": 0,
        "moba_select_mode": "topk",
        "first_full_step": 0,
        "tail": "pooled",
    },
)
SVG2 = SparseMethod(
    backend=AttentionBackendEnum.SPARSE_VIDEO_GEN_2_ATTN,
    config_cls=SVG2Config,
    given={
        "svg2_num_q_centroids": 6,
        "svg2_num_k_centroids": 11,
        "svg2_top_p_kmeans": 0.4,
        "svg2_first_layers_fp": 0,
        "svg2_first_times_fp": 0,
        "svg2_kmeans_iter_init": 3,
        "tail": "pooled",
    },
)
METHODS = {"sta": STA, "vsa": VSA, "sla": SLA, "vmoba": VMOBA}
SCALE = STA.scale


def cuts(name, text):
    """Return the blocks of queries and of keys of a method."""
    if name == "sla":
        video = video_tokens(GRID, text)
        return tuple([video[i : i + n] for i in range(0, len(video), n)] for n in (128, 64))
    tiles = tokens_of_tiles(GRID, TILE, text)
    return tiles, tiles


def chosen_pairs(name, qkv, text, token_mask):
    """Return which token of the video attends to which, bool [B, H, S, S]."""
    queries, keys = cuts(name, text)
    tokens = qkv.query.shape[1]
    if name == "sta":
        chosen = kept_map(WINDOW, TILES).expand(2, 4, -1, -1)
        return pair_mask(chosen, queries, keys, tokens, tokens)
    if name == "vmoba":
        return own_choice(qkv, keys, text)
    kept = KEPT if name == "vsa" else int(0.6 * len(keys))
    best = best_blocks(
        qkv.query, qkv.key, queries, keys, kept, token_mask=token_mask, centred=name == "sla"
    )
    return pair_mask(best, queries, keys, tokens, tokens)


def own_choice(qkv, chunks, text):
    """Return what rows choose: their own chunk, and the best of the others."""
    batch, tokens, heads, _ = qkv.query.shape
    mask = torch.zeros(batch, heads, tokens, tokens, dtype=torch.bool)
    own = {t: n for n, chunk in enumerate(chunks) for t in chunk}
    for b, h in product(range(batch), range(heads)):
        key = qkv.key[b, :, h * qkv.key.shape[2] // heads]
        means = torch.stack([key[list(chunk)].mean(0) for chunk in chunks])
        scores = qkv.query[b, :, h] @ means.T
        for t in video_tokens(GRID, text):
            scores[t, own[t]] = torch.inf
            for n in scores[t].topk(KEPT).indices.tolist():
                mask[b, h, t, list(chunks[n])] = True
    return mask


def inputs(method, text, **options):
    qkv = method.inputs(GRID, text=text, **options)
    return block_inputs(qkv, tokens_of_tiles(GRID, TILE, text), values=True)


def mask_of(tokens):
    token_mask = torch.arange(2 * tokens).view(2, -1) % 5 != 1
    token_mask[1, 100:130] = False
    return token_mask


@pytest.mark.slow_cases("vmoba-no text", "vmoba-text first", "vmoba-text last")
@pytest.mark.parametrize("where", TEXTS)
@pytest.mark.parametrize("name", METHODS)
def test_what_is_not_kept_counts_by_its_means(name, where):
    method, text = METHODS[name], TEXTS[where]
    qkv = inputs(method, text, kv_heads=2)
    out = run_sparse(method.layer(kv_heads=2), qkv, GRID, text=text)
    video = video_tokens(GRID, text)
    mask = joint_mask(chosen_pairs(name, qkv, text, None), video)
    blocks = cuts(name, text)[1]
    want = pooled_attention(*qkv, mask, blocks, scale=SCALE, rows=video)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sta", "vsa", "sla"])
def test_masked_keys_are_in_no_mean(name):
    method, text = METHODS[name], TEXTS["text last"]
    qkv = inputs(method, text)
    token_mask = mask_of(qkv.key.shape[1])
    out = run_sparse(method.layer(), qkv, GRID, text=text, attn_mask=token_mask)
    video = video_tokens(GRID, text)
    mask = joint_mask(chosen_pairs(name, qkv, text, token_mask), video, token_mask)
    blocks = cuts(name, text)[1]
    want = pooled_attention(*qkv, mask, blocks, scale=SCALE, rows=video, token_mask=token_mask)
    real = token_mask[:, :, None, None].expand_as(out)  # of masked queries nobody reads
    torch.testing.assert_close(out.double()[real], want[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", ["no text", "text first"])
def test_clusters_that_are_not_kept_count_by_their_means(where, monkeypatch):
    text, found = TEXTS[where], []
    group = SVG2Router.group
    monkeypatch.setattr(SVG2Router, "group", lambda *x: found.append(group(*x)) or found[-1])
    choose = SVG2Router.choose
    monkeypatch.setattr(SVG2Router, "choose", lambda *x: found.append(choose(*x)) or found[-1])
    qkv = inputs(SVG2, text, kv_heads=2)
    out = run_sparse(SVG2.layer(kv_heads=2), qkv, GRID, text=text)
    (queries, keys), token_mask = found
    assert 0 < token_mask.float().mean() < 1
    video = video_tokens(GRID, text)

    def positions(clusters, b, h):
        order = clusters.order[b, h].tolist()
        ends = zip(clusters.starts[b, h].tolist(), clusters.counts[b, h].tolist(), strict=True)
        return [[video[t] for t in order[first : first + count]] for first, count in ends]

    tokens = qkv.query.shape[1]
    mask = torch.zeros(2, 4, tokens, tokens, dtype=torch.bool)
    for b, h in product(range(2), range(4)):
        sides = positions(queries, b, h), positions(keys, b, h // 2)
        mask[b, h] = pair_mask(token_mask[b, h], *sides, tokens, tokens)
    mask = joint_mask(mask, video)
    want = pooled_attention(
        *qkv, mask, lambda b, h: positions(keys, b, h // 2), scale=SCALE, rows=video
    )
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["vsa", "vmoba"])
def test_gradients_go_through_the_means(name):
    method = METHODS[name]
    qkv = inputs(method, None, batch=1)
    mask = joint_mask(chosen_pairs(name, qkv, None, None), video_tokens(GRID))
    blocks = cuts(name, None)[1]
    layer = method.layer()

    def definition(q, k, v):
        return pooled_attention(q, k, v, mask, blocks, scale=SCALE)

    assert_same_gradients(lambda *x: run_sparse(layer, x, GRID), definition, *qkv)


def test_by_default_the_rest_is_dropped_and_sla_names_the_remedy():
    for name, method in {**METHODS, "svg2": SVG2}.items():
        assert method.config(tail="none").tail == "none", name
        assert type(method.config()).__dataclass_fields__["tail"].default == "none"
    warned = []
    layer = SLA.layer(tail="none")
    layer_warn = warn_once.WarnOnce.warn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warn_once.WarnOnce, "warn", lambda self, text: warned.append(text))
        run_sparse(layer, inputs(SLA, None), GRID)
        assert any("`tail: pooled` counts the other blocks by their means" in x for x in warned)
        warned.clear()
        run_sparse(SLA.layer(), inputs(SLA, None), GRID)
    assert not any("proj_l" in text for text in warned)
    assert layer_warn is warn_once.WarnOnce.warn


def test_a_trained_branch_leaves_no_room_for_a_tail():
    layer = SLA.layer()
    layer.set_projection(torch.nn.Linear(32, 32).requires_grad_(False))
    with pytest.raises(UsageError, match="`tail` of sla_attn must be none where a checkpoint"):
        run_sparse(layer, inputs(SLA, None), GRID)


@pytest.mark.parametrize(
    ("method", "kernel"),
    [
        (STA, "st_attn"),
        (VSA, "vsa"),
        (SLA, "sparse_linear_attention"),
        (VMOBA, "fastvideo_kernel"),
        (SVG2, "svg"),
    ],
)
def test_packages_of_others_have_no_tail(method, kernel):
    with pytest.raises(ConfigError, match="must be none with `kernel`"):
        method.config(kernel=kernel)
