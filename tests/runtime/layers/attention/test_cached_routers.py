"""Sparse methods that choose among the blocks of a cache, against their rules in float64.

Every rule is applied to the keys that a chunk sees, joined in the order of time.
"""

import math
import re
from fractions import Fraction
from functools import partial
from itertools import chain, product

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.select.row_reference import Rule
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.causal_cache import CacheSize, CausalCache
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.inputs import QKV, make_qkv
from tests.helpers.methods import (
    above,
    best,
    by_cells,
    holding,
    holding_of_computed,
    largest,
    picks,
    pieces,
    rows_and_chunks,
    rows_choose,
    tiles,
)
from tests.helpers.reference import reference_attention
from tests.helpers.sparse import SparseMethod, pair_mask
from tests.helpers.tail import pooled_attention

BATCH, HEADS, KV_HEADS, SIZE = 2, 4, 2, 8
SCALE = SIZE**-0.5
GRID, TILE = (6, 10), (4, 4)  # tiles cut short at both borders
ROWS_GRID = (10, 10)  # of methods whose blocks are rows; the last of 64 in a frame is cut short
FRAMES = (1, 2, 2, 2, 2, 2, 2, 1)
WINDOW, SINK = 3, 1


def layer_of(
    backend: str, options: dict, *, kv_heads: int = KV_HEADS, strict: bool = True
) -> LocalAttention:
    tried = SparseMethod(
        backend=AttentionBackendEnum(backend), given=options, heads=HEADS, head_size=SIZE
    )
    return tried.layer(index=5, kv_heads=kv_heads, strict=strict)


def cache_of(*, tiles: bool, frames: int = 2, grid: tuple[int, int] = GRID) -> CausalCache:
    kept = {"grid": grid, "tile": TILE} if tiles else {}
    height, width = grid if tiles else ROWS_GRID
    size = CacheSize(
        num_layers=1,
        batch=BATCH,
        num_kv_heads=KV_HEADS,
        head_size=SIZE,
        chunk_tokens=frames * height * width,
        window=WINDOW,
        sink=SINK,
        dtype=torch.float32,
        **kept,
    )
    return CausalCache(size)


def by_mass(qkv, q_blocks, k_blocks):
    """Keep as many blocks as hold 0.6 of the mass of the softmax together, one at least."""
    chosen = torch.zeros(BATCH, HEADS, len(q_blocks), len(k_blocks), dtype=torch.bool)
    for b, h in product(range(BATCH), range(HEADS)):
        query, key = (
            torch.stack([x[b, tokens, head].double().mean(0) for tokens in blocks])
            for x, head, blocks in ((qkv.query, h, q_blocks), (qkv.key, h // 2, k_blocks))
        )
        for i, shares in enumerate((query @ key.T * SCALE).softmax(-1).tolist()):
            order, mass = sorted(range(len(shares)), key=lambda j, s=shares: -s[j]), 0.0
            chosen[b, h, i, order[0]] = True
            for j in order:
                mass += shares[j]
                chosen[b, h, i, j] |= mass <= 0.6
    return chosen


def share(choose, of, **rule):
    """Keep a number of blocks that depends on how many there are."""
    return lambda *x: choose(*x, kept=of(len(x[2])), **rule)


def rows(**rule):
    """Let rows choose, whose own chunk is among the last keys."""

    def choose(qkv, q_blocks, k_blocks):
        before = qkv.key.shape[1] - qkv.query.shape[1]
        return rows_choose(qkv, q_blocks, k_blocks, rule=Rule(**rule), before=before)

    return choose


SOL = {"dense_steps": 0, "dense_layers": None}
MOBA = {"first_full_step": 0, "spatial_layer": 0}
BY_FRAME = {**MOBA, "temporal_chunk_size": 1, "st_layer": 0}
BY_TILE = {**MOBA, "temporal_layer": 0, "st_chunk_size": [2, *TILE]}
CUBE = {"local_cube_size": [2, *TILE], "topk_ratio": 0.3}
NABLA = {"P": 0.5, "wT": 3, "wH": 1, "wW": 3, "tile_size": [2, *TILE]}
BEST_CUBES = share(best, lambda num: max(1, int(0.3 * num)), own=True)
BEST = share(best, lambda num: max(1, int(0.4 * num)))
IN_TILES = tiles(2, *TILE)
IN_CHUNKS = rows_and_chunks(lambda grid: (2, *TILE))
TOPK = {"moba_select_mode": "topk"}
# By name: the backend, its parameters, how a chunk is cut (in a cache of tiles or of rows), and
# what it keeps.
CASES = {
    "cube": ("cube_sparse_attn", CUBE, IN_TILES, BEST_CUBES),
    "sol in tiles": (
        "sol_attn",
        {**SOL, "tile_size": [2, *TILE], "tau": 0.4, "thresh_type": "exact", "tail": "none"},
        IN_TILES,
        partial(above, tau=0.4, thresh_type="exact"),
    ),
    "sol in tiles, with its tail": (
        "sol_attn",
        {**SOL, "tile_size": [2, *TILE], "tau": 0.4},
        IN_TILES,
        partial(above, tau=0.4),
    ),
    "sol in rows, with its tail": (
        "sol_attn",
        {**SOL, "topk_ratio": 0.4, "neighbours": 0},
        pieces(64),
        partial(above, topk=0.4, neighbours=0),
    ),
    "sol in tiles by cells": (
        "sol_attn",
        {
            **SOL, "tile_size": [2, *TILE], "router": "subblock", "topk_ratio": 0.4,
            "neighbours": 0, "tail": "none",
        },
        IN_TILES,
        share(by_cells, lambda num: max(1, round(0.4 * num)), own=True, block=32),
    ),
    "cube, with a tail": ("cube_sparse_attn", {**CUBE, "tail": "pooled"}, IN_TILES, BEST_CUBES),
    "nabla": (
        "nabla_attn",
        NABLA,
        IN_TILES,
        partial(holding, mass=0.5, widths=(3, 1, 3), counts=(2, 3)),
    ),
    "draft": (
        "draft_attn",
        {"sparsity_ratio": 0.6, "pool_h": TILE[0], "pool_w": TILE[1]},
        tiles(1, *TILE),
        partial(largest, sparsity=0.6),
    ),
    "vsa h3": (
        "video_sparse_attn_h3",
        {"sparsity": 0.6},
        IN_TILES,
        share(best, lambda num: -(-num * 2 // 5)),
    ),
    "vsa h3, competing": (
        "video_sparse_attn_h3",
        {"sparsity": 0.6, "vsa_mode": "compete"},
        IN_TILES,
        share(best, lambda num: -(-num * 2 // 5)),
    ),
    "bsa": (
        "bsa_attn",
        {
            "query_keep_ratio": 1.0, "kv_cumulative_threshold": 0.6, "min_kv_blocks": 2,
            "tile_size": [2, *TILE],
        },
        IN_TILES,
        partial(holding_of_computed, ratio=1.0, mass=0.6, least=2),
    ),
    "sparge": ("sparge_attn", {"topk": 0.4}, pieces(128, 64), BEST),
    "sparge, with a tail": (
        "sparge_attn", {"topk": 0.4, "tail": "pooled"}, pieces(128, 64), BEST,
    ),
    "sparge by mass": ("sparge_attn", {"cdfthreshd": 0.6}, pieces(128, 64), by_mass),
    "pisa without first order, with its tail": (
        "pisa_attn", {"density": 0.4, "first_order": False}, pieces(64), BEST,
    ),
    "subblock": (
        "subblock_sparse_attn",
        {"sparsity": 0.5, "skip_first_steps": 0, "min_seq_len": 600},
        pieces(64),
        share(by_cells, lambda num: min(-(-num // 16) * 8, num)),  # half of them, in eights
    ),
    "vmoba by chunk": (
        "vmoba_attn",
        {**BY_FRAME, **TOPK, "temporal_chunk_size": 2, "temporal_topk": 2},
        rows_and_chunks(lambda grid: (2, *grid[1:])),
        rows(topk=2),
    ),
    "vmoba by frame": (
        "vmoba_attn",
        {**BY_FRAME, "moba_threshold": 0.6},
        rows_and_chunks(lambda grid: (1, *grid[1:])),
        rows(threshold=0.6),
    ),
    "vmoba by tile": ("vmoba_attn", {**BY_TILE, **TOPK, "st_topk": 5}, IN_CHUNKS, rows(topk=5)),
    # Two of the places of tiles, in all chunks; the queries' own is one of them.
    "vmoba by place": (
        "vmoba_attn",
        {
            **TOPK, "first_full_step": 0, "temporal_layer": 0, "st_layer": 0,
            "spatial_chunk_size": [*TILE], "spatial_topk": 2,
        },
        IN_CHUNKS,
        rows(topk=2),
    ),
    "vmoba by tile, with a tail": (
        "vmoba_attn",
        {**BY_TILE, **TOPK, "st_topk": 5, "tail": "pooled"},
        IN_CHUNKS,
        rows(topk=5),
    ),
}  # fmt: skip
KEPT_IN_ROWS = ("sol in rows", "sparge", "pisa", "subblock", "vmoba by chunk", "vmoba by frame")


QUICK = (
    "cube",
    "sol in tiles, with its tail",
    "sol in tiles by cells",
    "sol in rows, with its tail",
    "nabla",
    "pisa without first order, with its tail",
    "vmoba by chunk",
)


@pytest.mark.parametrize(
    "name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in CASES]
)
def test_a_method_chooses_among_the_blocks_of_a_cache_by_its_own_rule(name):
    backend, options, cut, choose = CASES[name]
    of_rows = name.startswith(KEPT_IN_ROWS)
    lengths = (1,) * len(FRAMES) if name == "draft" else FRAMES  # its patches are of one frame
    layer, cache = layer_of(backend, options), cache_of(tiles=not of_rows, frames=max(lengths))

    def chosen_of(qkv, *blocks):
        chosen = choose(qkv, *blocks)
        is_short = name == "subblock" and qkv.key.shape[1] < options["min_seq_len"]
        return torch.ones_like(chosen) if is_short else chosen

    shares = check_chunks(
        layer,
        cache,
        lengths,
        ROWS_GRID if of_rows else GRID,
        cut,
        chosen_of,
        pooled="tail" in name,
        by_place=name == "vmoba by place",
    )
    (entry,) = layer.report().entries
    assert (entry.selection.backend, entry.calls) == (AttentionBackendEnum(backend), len(FRAMES))
    assert entry.density == pytest.approx(sum(shares) / len(shares), abs=1e-6)
    assert min(shares[2:]) < 0.8
    assert layer.report().detours == ()


def check_chunks(
    layer, cache, lengths, grid, cut, choose, *, pooled=False, by_place=False, seed=0
) -> list[float]:
    """Compare every chunk of a video with the rule; returns the shares of pairs that it keeps.

    Args:
        layer: what attends.
        cache: what it attends to.
        lengths: frames of each chunk.
        grid: height and width.
        cut: makes the blocks of a chunk.
        choose: the rule.
        pooled: whether other keys count by their means.
        by_place: whether a block is the same place in all chunks.
        seed: of the first chunk.
    """
    size, past, start, shares = cache.size, [], 0, []
    for number, frames in enumerate(lengths):
        tokens = frames * math.prod(grid)
        q, k, v = make_qkv(
            size.batch,
            tokens,
            HEADS,
            SIZE,
            num_kv_heads=size.num_kv_heads,
            seed=seed + number,
        )
        cache.begin(start, tokens)
        with set_forward_context(3, num_steps=9, latent_grid=(frames, *grid)):
            out = layer(q, k, v, cache=cache.layers[0])
        past.append((frames, k, v))
        cache.commit()
        start += tokens
        seen = [x for i, x in enumerate(past) if i < size.sink or i > number - size.window]
        keys, values = (torch.cat([x[i] for x in seen], dim=1) for i in (1, 2))
        q_blocks, _ = cut((frames, *grid), None)
        chunks, before = [], 0
        for count, key, _ in seen:
            blocks = cut((count, *grid), None)[1]
            chunks.append([[before + t for t in block] for block in blocks])
            before += key.shape[1]
        if by_place:
            k_blocks = [list(chain(*blocks)) for blocks in zip(*chunks, strict=True)]
        else:
            k_blocks = list(chain(*chunks))
        chosen = choose(QKV(q, keys, values), q_blocks, k_blocks)
        mask = pair_mask(chosen, q_blocks, k_blocks, tokens, keys.shape[1])
        shares.append(float(mask.double().mean()))
        if pooled:
            want = pooled_attention(q, keys, values, mask, k_blocks, scale=SCALE)
        else:
            want, _ = reference_attention(q, keys, values, scale=SCALE, mask=mask)
        torch.testing.assert_close(out, want.float(), rtol=0, atol=2e-5)
    return shares


def seen_last(frames: tuple[int, ...], grid: tuple[int, int]) -> tuple[object, float]:
    """Return what a graph of the last of some chunks depends on, and the share that it keeps."""
    cache = cache_of(tiles=True, frames=3, grid=grid)
    options = {"sparsity": 0.7, "tile_size": [4, *TILE], "topk_convention": "tokens"}
    layer, start = layer_of("video_sparse_attn", options), 0
    for number, count in enumerate(frames):
        tokens, step = count * math.prod(grid), int(number == len(frames) - 1)
        qkv = make_qkv(BATCH, tokens, HEADS, SIZE, num_kv_heads=KV_HEADS, seed=number)
        cache.begin(start, tokens)
        with set_forward_context(step, num_steps=2, latent_grid=(count, *grid)):
            layer(*qkv, cache=cache.layers[0])
        kind = cache.kind
        cache.commit()
        start += tokens
    (entry,) = layer.report().entries
    return kind, dict(entry.densities)[1]


@pytest.mark.parametrize("grid", [GRID, (8, 8)])
def test_a_graph_serves_no_chunk_whose_past_has_another_length(grid):
    long, short, uneven, even = (
        seen_last(frames, grid) for frames in [(3, 3, 2), (1, 1, 2), (3, 1, 2), (2, 2, 2)]
    )
    assert len({long[0], short[0], uneven[0]}) == 3
    assert long[1] > short[1]  # by as many tiles as their tokens make
    # Lengths alone are data, unless tiles of one size make the share a number.
    assert (uneven[0] == even[0]) == (grid == GRID)
    assert seen_last((1, 3, 2), grid)[0] == uneven[0]


def drawn_cube(pick, grid):
    tile, ratio = drawn_tile(pick), pick(1, 19) / 20
    kept = share(best, lambda num: max(1, math.floor(Fraction(str(ratio)) * num)), own=True)
    return {"local_cube_size": tile, "topk_ratio": ratio}, tile, kept


def drawn_nabla(pick, grid):
    tile, mass, given = drawn_tile(pick), pick(0, 99) / 100, {"add_sta": False}
    widths = None if pick(0, 2) == 0 else (pick(1, 4), pick(1, 4), pick(1, 4))
    if widths is not None:
        given = dict(zip(("wT", "wH", "wW"), widths, strict=True))
    counts = tuple(-(-n // m) for n, m in zip(grid, tile[1:], strict=True))
    kept = partial(holding, mass=mass, widths=widths, counts=counts)
    return {**given, "P": mass, "tile_size": tile}, tile, kept


def drawn_draft(pick, grid):
    tile, sparsity = [1, *drawn_tile(pick)[1:]], pick(0, 20) / 20
    given = {"sparsity_ratio": sparsity, "pool_h": tile[1], "pool_w": tile[2]}
    return given, tile, partial(largest, sparsity=sparsity)


def drawn_bsa(pick, grid):
    tile, mass, least = drawn_tile(pick), pick(0, 20) / 20, pick(1, 5)
    given = {"kv_cumulative_threshold": mass, "min_kv_blocks": least, "tile_size": tile}
    kept = partial(holding_of_computed, ratio=1.0, mass=mass, least=least)
    return {**given, "query_keep_ratio": 1.0}, tile, kept


def drawn_vsa_h3(pick, grid):
    parts, mode = pick(1, 19), ("exempt", "compete")[pick(0, 1)]
    given = {"sparsity": round(1 - parts / 20, 3), "vsa_mode": mode}
    return given, [4, 4, 4], share(best, lambda num: -(-num * parts // 20))


def drawn_tile(pick) -> list[int]:
    return [pick(1, 3), pick(1, 4), pick(2, 5)]


# By backend: draws parameters, the tile that they have, and the rule.
DRAWN = {
    "cube_sparse_attn": drawn_cube,
    "nabla_attn": drawn_nabla,
    "draft_attn": drawn_draft,
    "bsa_attn": drawn_bsa,
    "video_sparse_attn_h3": drawn_vsa_h3,
}


@pytest.mark.parametrize(
    # Of seed 20, the chunks that are seen differ in length, and have the mean of the newest one's.
    "some",
    [n if n == 2 else pytest.param(n, marks=pytest.mark.slow) for n in range(10)],
)
@pytest.mark.parametrize("backend", DRAWN)
def test_drawn_chunks_attend_to_a_cache_by_the_methods_rule(backend, some):
    shares = []
    for seed in range(10 * some, 10 * some + 10):
        pick = picks(seed)
        grid = (pick(3, 8), pick(4, 9))
        given, tile, choose = DRAWN[backend](pick, grid)
        lengths = [pick(1, tile[0]) for _ in range(4)]
        size = CacheSize(
            num_layers=1,
            batch=pick(1, 2),
            num_kv_heads=(1, 2, 4)[pick(0, 2)],
            head_size=SIZE,
            chunk_tokens=max(lengths) * math.prod(grid),
            window=pick(1, 4),
            sink=pick(0, 2),
            dtype=torch.float32,
            grid=grid,
            tile=tuple(tile[1:]),
        )
        # Pieces of text that compete have no tail.
        tail = "pooled" if seed % 3 == 0 and given.get("vsa_mode") != "compete" else "none"
        layer = layer_of(backend, {**given, "tail": tail}, kv_heads=size.num_kv_heads)
        cache, pooled = CausalCache(size), tail == "pooled"
        kept = check_chunks(
            layer, cache, lengths, grid, tiles(*tile), choose, pooled=pooled, seed=4 * seed
        )
        (entry,) = layer.report().entries
        assert (entry.selection.backend, entry.calls) == (AttentionBackendEnum(backend), 4)
        assert entry.density == pytest.approx(sum(kept) / 4, abs=1e-6)
        shares += kept
    assert min(shares) < 0.5


# What cannot be done over a cache: the backend, its parameters, whether it is kept in tiles, why.
REFUSED = [
    ("sol_attn", {**SOL, "sink_tokens": 5}, True, "`sink_tokens` are places in one sequence"),
    ("sol_attn", SOL, True, "its blocks are 64 tokens as they came, and the cache keeps tiles"),
    (
        "cube_sparse_attn",
        {},
        False,
        r"its tiles have \[4, 4, 4\] tokens, and the cache keeps tokens as they came",
    ),
    (
        "nabla_attn",
        {},
        True,
        r"its tiles have \[1, 8, 8\] tokens, and the cache keeps tiles of \[2, 4, 4\]",
    ),
    (
        "draft_attn",
        {"pool_h": 4, "pool_w": 4},
        True,
        r"its tiles have \[1, 4, 4\] tokens, and the cache keeps tiles of \[2, 4, 4\]",
    ),
    (
        "bsa_attn",
        {"tile_size": [2, 4, 4]},
        True,
        "`query_keep_ratio` below 1 compares the queries of a whole video",
    ),
    (
        "video_sparse_attn",
        {"tile_size": [4, 8, 8]},
        True,
        r"its tiles have \[4, 8, 8\] tokens, and the cache keeps tiles of \[2, 4, 4\]",
    ),
    ("video_sparse_attn", {"skip_below": 30.0}, True, "`skip_below` is for keys of one call"),
    (
        "video_sparse_attn",
        {"compute_mode": "sage_bf16", "tile_size": [4, 4, 4]},
        True,
        "8 bits are made of the keys of one call",
    ),
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
    ("skip_softmax", {"threshold": 0.1}, True, "`threshold` is for keys of one call"),
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


def refused_static(pick):
    given = (
        {
            "pattern": "radial",
            "decay_factor": pick(0, 4) / 4,
            "model_type": ("wan", "hunyuan")[pick(0, 1)],
        },
        {"pattern": "lvsa", "window_size": pick(1, 3), "key_frame_interval": pick(1, 5)},
        {"pattern": "chunks", "chunk": pick(0, 4), "radius": pick(0, 2)},
    )[pick(0, 2)]
    return given, "its patterns are places in one latent grid"


def refused_skip_softmax(pick):
    name, value = (
        ("threshold", pick(1, 99) / 100),
        ("threshold_scale_factor", pick(1, 900)),
        ("skip_below", float(pick(1, 40))),
    )[pick(0, 2)]
    return {name: value}, f"`{name}` is for keys of one call"


def refused_bsa(pick):
    given = drawn_bsa(pick, GRID)[0] | {"query_keep_ratio": pick(0, 19) / 20}
    return given, "`query_keep_ratio` below 1 compares the queries of a whole video"


@pytest.mark.parametrize(
    ("backend", "draw"),
    [
        ("static_sparse_attn", refused_static),
        ("skip_softmax", refused_skip_softmax),
        ("bsa_attn", refused_bsa),
    ],
)
def test_drawn_parameters_that_no_cache_serves_are_refused_with_the_reason(backend, draw):
    cache = cache_of(tiles=False)
    q, k, v = make_qkv(BATCH, 200, HEADS, SIZE, num_kv_heads=KV_HEADS)
    cache.begin(0, 200)
    for seed in range(100):
        given, why = draw(picks(seed))
        with (
            set_forward_context(15, num_steps=30, latent_grid=(2, *ROWS_GRID)),
            pytest.raises(UnsupportedBackendError, match=why),
        ):
            layer_of(backend, given)(q, k, v, cache=cache.layers[0])
