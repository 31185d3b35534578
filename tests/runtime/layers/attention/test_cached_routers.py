"""Sparse methods that choose among the blocks of a cache, against their rules in float64.

Every rule is applied to the keys that a chunk sees, joined in the order of time.
"""

import re

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.causal_cache import CacheSize, CausalCache
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.inputs import make_qkv
from tests.helpers.reference import reference_attention
from tests.helpers.sparse import SparseMethod
from tests.helpers.tile_choice import (
    TokenTiles,
    attention_with_tail,
    best_tiles,
    near_tiles,
    outstanding_tiles,
    selected_tiles,
    tile_means,
    token_blocks,
    token_tiles,
)

BATCH, HEADS, KV_HEADS, SIZE = 2, 4, 2, 8
SCALE = SIZE**-0.5
GRID, TILE = (6, 10), (4, 4)  # tiles cut short at both borders
ROWS_GRID = (10, 10)  # of methods whose blocks are rows; the last of 64 in a frame is cut short
FRAMES = (1, 2, 2, 2, 2, 2, 2, 1)
WINDOW, SINK = 3, 1


def layer_of(backend: str, options: dict, *, strict: bool = True) -> LocalAttention:
    tried = SparseMethod(
        backend=AttentionBackendEnum(backend), given=options, heads=HEADS, head_size=SIZE
    )
    return tried.layer(index=5, kv_heads=KV_HEADS, strict=strict)


def cache_of(*, tiles: bool) -> CausalCache:
    kept = {"grid": GRID, "tile": TILE} if tiles else {}
    height, width = GRID if tiles else ROWS_GRID
    size = CacheSize(
        num_layers=1,
        batch=BATCH,
        num_kv_heads=KV_HEADS,
        head_size=SIZE,
        chunk_tokens=2 * height * width,
        window=WINDOW,
        sink=SINK,
        dtype=torch.float32,
        **kept,
    )
    return CausalCache(size)


def cube(q, k, queries, keys):
    best = max(1, int(0.3 * keys.num))
    kept = best_tiles(q, k, queries, keys, best, scale=SCALE)
    own = near_tiles(queries, keys, 0)[queries.tile][:, keys.tile]
    return of_keys(kept | own, keys)


def of_keys(mask, keys):
    """Return a mask of tokens by the tiles of the keys."""
    first = torch.stack([(keys.tile == n).nonzero()[0, 0] for n in range(keys.num)])
    return mask[..., first]


def sol(exact):
    def rule(q, k, queries, keys):
        found = outstanding_tiles(q, k, queries, keys, tau=0.4, exact=exact, scale=SCALE)
        return (found | near_tiles(queries, keys, 1))[:, :, queries.tile]

    return rule


def sol_best(q, k, queries, keys):
    kept = max(1, min(round(0.4 * keys.num), keys.num - 1))
    best = best_tiles(q, k, queries, keys, kept, scale=SCALE)
    return of_keys(best, keys) | near_tiles(queries, keys, 0)[queries.tile]


def sparge(q, k, queries, keys):
    """Blocks of 128 queries: two of 64 of the chunk, by the mean of all their tokens."""
    kept = max(1, int(0.4 * keys.num))
    pairs = TokenTiles(tile=queries.tile // 2, cell=queries.tile // 2, cells=1)
    return of_keys(best_tiles(q, k, pairs, keys, kept, scale=SCALE), keys)


def sparge_mass(q, k, queries, keys):
    """As many blocks as hold 0.6 of the mass of the softmax together, one at least."""
    pairs = TokenTiles(tile=queries.tile // 2, cell=queries.tile // 2, cells=1)
    means = tile_means(k, keys).repeat_interleave(HEADS // KV_HEADS, dim=1)
    scores = tile_means(q, pairs) @ means.mT * SCALE
    order = scores.argsort(dim=-1, descending=True, stable=True)
    held = scores.softmax(-1).gather(-1, order).cumsum(-1) <= 0.6
    held[..., 0] = True
    return torch.zeros_like(held).scatter_(-1, order, held)[:, :, pairs.tile]


def subblock(q, k, queries, keys):
    kept = min(-(-keys.num // 16) * 8, keys.num)  # half of them, in eights
    return of_keys(best_tiles(q, k, queries, keys, kept, scale=SCALE), keys)


def pisa(q, k, queries, keys):
    kept = max(1, int(0.4 * keys.num))
    return of_keys(best_tiles(q, k, queries, keys, kept, scale=SCALE), keys)


def by_place(q, k, queries, keys):
    """Two of the places of tiles, in all chunks; the queries' own is one of them."""
    places = TokenTiles(tile=keys.tile % queries.num, cell=keys.tile, cells=1)
    kept = selected_tiles(q, k, queries.tile, places, topk=2)
    return kept[..., torch.arange(keys.num) % queries.num]


def vmoba(topk, threshold=0.0):
    def rule(q, k, queries, keys):
        own = queries.tile + keys.num - queries.num
        if keys.num == 1 or (topk is not None and topk >= keys.num):
            return torch.ones(BATCH, HEADS, q.shape[1], keys.num, dtype=torch.bool)
        return selected_tiles(q, k, own, keys, topk=topk, threshold=threshold)

    return rule


SOL = {"dense_steps": 0, "dense_layers": None}
MOBA = {"first_full_step": 0, "spatial_layer": 0}
BY_FRAME = {**MOBA, "temporal_chunk_size": 1, "st_layer": 0}
BY_TILE = {**MOBA, "temporal_layer": 0, "st_chunk_size": [2, *TILE]}
# By name: the backend, its parameters, rows of a block (None: the cache's tiles), and the rule.
CASES = {
    "cube": ("cube_sparse_attn", {"local_cube_size": [2, *TILE], "topk_ratio": 0.3}, None, cube),
    "sol in tiles": (
        "sol_attn",
        {**SOL, "tile_size": [2, *TILE], "tau": 0.4, "thresh_type": "exact", "tail": "none"},
        None,
        sol(exact=True),
    ),
    "sol in tiles, with its tail": (
        "sol_attn",
        {**SOL, "tile_size": [2, *TILE], "tau": 0.4},
        None,
        sol(exact=False),
    ),
    "sol in rows, with its tail": (
        "sol_attn",
        {**SOL, "topk_ratio": 0.4, "neighbours": 0},
        64,
        sol_best,
    ),
    "cube, with a tail": (
        "cube_sparse_attn",
        {"local_cube_size": [2, *TILE], "topk_ratio": 0.3, "tail": "pooled"},
        None,
        cube,
    ),
    "sparge": ("sparge_attn", {"topk": 0.4}, 64, sparge),
    "sparge, with a tail": ("sparge_attn", {"topk": 0.4, "tail": "pooled"}, 64, sparge),
    "sparge by mass": ("sparge_attn", {"cdfthreshd": 0.6}, 64, sparge_mass),
    "pisa without first order, with its tail": (
        "pisa_attn",
        {"density": 0.4, "first_order": False},
        64,
        pisa,
    ),
    "subblock": (
        "subblock_sparse_attn",
        {"sparsity": 0.5, "skip_first_steps": 0, "min_seq_len": 600},
        64,
        subblock,
    ),
    "vmoba by chunk": (
        "vmoba_attn",
        {**BY_FRAME, "temporal_chunk_size": 2, "moba_select_mode": "topk", "temporal_topk": 2},
        200,
        vmoba(2),
    ),
    "vmoba by frame": ("vmoba_attn", BY_FRAME | {"moba_threshold": 0.6}, 100, vmoba(None, 0.6)),
    "vmoba by tile": (
        "vmoba_attn",
        {**BY_TILE, "moba_select_mode": "topk", "st_topk": 5},
        None,
        vmoba(5),
    ),
    "vmoba by place": (
        "vmoba_attn",
        {
            "first_full_step": 0,
            "temporal_layer": 0,
            "st_layer": 0,
            "spatial_chunk_size": [*TILE],
            "moba_select_mode": "topk",
            "spatial_topk": 2,
        },
        None,
        by_place,
    ),
    "vmoba by tile, with a tail": (
        "vmoba_attn",
        {**BY_TILE, "moba_select_mode": "topk", "st_topk": 5, "tail": "pooled"},
        None,
        vmoba(5),
    ),
}


QUICK = (
    "cube",
    "sol in tiles, with its tail",
    "sol in rows, with its tail",
    "pisa without first order, with its tail",
    "vmoba by chunk",
)


@pytest.mark.parametrize(
    "name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in CASES]
)
def test_a_method_chooses_among_the_blocks_of_a_cache_by_its_own_rule(name):
    backend, options, rows, rule = CASES[name]
    layer, cache = layer_of(backend, options), cache_of(tiles=rows is None)
    cells = 4 if name == "subblock" else 1
    grid = GRID if rows is None else ROWS_GRID
    past, start, shares = [], 0, []
    for number, frames in enumerate(FRAMES):
        tokens = frames * grid[0] * grid[1]
        q, k, v = make_qkv(BATCH, tokens, HEADS, SIZE, num_kv_heads=KV_HEADS, seed=number)
        cache.begin(start, tokens)
        with set_forward_context(3, num_steps=9, latent_grid=(frames, *grid)):
            out = layer(q, k, v, cache=cache.layers[0])
        past.append((tokens, k, v))
        cache.commit()
        start += tokens
        seen = [x for i, x in enumerate(past) if i < SINK or i > number - WINDOW]
        keys, values = (torch.cat([x[i] for x in seen], dim=1) for i in (1, 2))
        sides = [tokens], [x[0] for x in seen]
        if rows is None:
            area = grid[0] * grid[1]
            queries, tiles = (token_tiles([n // area for n in side], GRID, TILE) for side in sides)
        else:
            queries, tiles = (token_blocks(side, rows, cells=cells) for side in sides)
        kept = rule(q, keys, queries, tiles)
        if name == "subblock" and keys.shape[1] < options["min_seq_len"]:
            kept = torch.ones_like(kept)
        mask = kept[..., tiles.tile]
        shares.append(float(mask.double().mean()))
        if "tail" in name:
            want = attention_with_tail(q, keys, values, tiles, kept, scale=SCALE)
        else:
            want, _ = reference_attention(q, keys, values, scale=SCALE, mask=mask)
        torch.testing.assert_close(out, want.float(), rtol=0, atol=2e-5)
    (entry,) = layer.report().entries
    assert (entry.selection.backend, entry.calls) == (AttentionBackendEnum(backend), len(FRAMES))
    assert entry.density == pytest.approx(sum(shares) / len(shares), abs=1e-6)
    assert min(shares[2:]) < 0.8
    assert layer.report().detours == ()


# What cannot be done over a cache: the backend, its parameters, whether it is kept in tiles, why.
REFUSED = [
    ("sol_attn", {**SOL, "sink_tokens": 5}, True, "`sink_tokens` are places in one sequence"),
    ("sol_attn", SOL, True, "its blocks are 64 tokens as they came, and the cache keeps tiles"),
    (
        "sol_attn",
        {**SOL, "router": "subblock", "topk_ratio": 0.5},
        False,
        "router subblock ranks the blocks of one call",
    ),
    (
        "cube_sparse_attn",
        {},
        False,
        r"its tiles have \[4, 4, 4\] tokens, and the cache keeps tokens as they came",
    ),
    (
        "video_sparse_attn",
        {"tile_size": [4, 8, 8]},
        True,
        r"its tiles have \[4, 8, 8\] tokens, and the cache keeps tiles of \[2, 4, 4\]",
    ),
    ("video_sparse_attn", {"skip_below": 30.0}, True, "`skip_below` is for keys of one call"),
    ("vmoba_attn", BY_FRAME, True, "its blocks are 60 tokens as they came, and the cache keeps"),
    ("sla_attn", {}, True, "its linear branch sums over all keys of one call"),
    ("sage_sla_attn", {}, True, "its linear branch sums over all keys of one call"),
    (
        "sparse_video_gen_2_attn",
        {"svg2_first_times_fp": 0, "svg2_first_layers_fp": 0},
        True,
        "it clusters the keys of one call",
    ),
    ("static_sparse_attn", {}, True, "its patterns are places in one latent grid"),
    ("sparge_attn", {}, True, "its blocks are 64 tokens as they came, and the cache keeps tiles"),
    (
        "sparge_attn",
        {"simthreshd1": 0.0},
        False,
        "simthreshd1 from 0 on compares the tokens of blocks of one call",
    ),
    ("pisa_attn", {}, True, "its first-order term is a sum over all keys of one call"),
    (
        "sliding_tile_attn",
        {"window": [1, 3, 3], "tile_size": [2, 4, 4], "skip_time_steps": 0, "tail": "pooled"},
        True,
        "its windows are lists that change in place, which a tail is not made from",
    ),
]


@pytest.mark.parametrize(("backend", "options", "tiles", "why"), REFUSED)
def test_what_a_method_cannot_do_over_a_cache_is_dense_with_the_reason(
    backend, options, tiles, why
):
    cache, grid = cache_of(tiles=tiles), GRID if tiles else ROWS_GRID
    tokens = 2 * grid[0] * grid[1]
    q, k, v = make_qkv(BATCH, tokens, HEADS, SIZE, num_kv_heads=KV_HEADS)
    cache.begin(0, tokens)
    layer = layer_of(backend, options, strict=False)
    with set_forward_context(15, num_steps=30, latent_grid=(2, *grid)):
        out = layer(q, k, v, cache=cache.layers[0])
    want, _ = reference_attention(q, k, v, scale=SCALE)
    torch.testing.assert_close(out, want.float())
    (detour,) = layer.report().detours
    assert detour.selection.label == "torch_sdpa"
    assert re.search(f"keys in a cache are those of several calls: {why}", detour.selection.reason)
    with (
        set_forward_context(15, num_steps=30, latent_grid=(2, *grid)),
        pytest.raises(UnsupportedBackendError, match=why),
    ):
        layer_of(backend, options)(q, k, v, cache=cache.layers[0])
