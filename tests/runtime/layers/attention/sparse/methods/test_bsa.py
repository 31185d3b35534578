"""Bidirectional Sparse Attention through the layer, against its definition and FastVideo's code."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.sparse.tiles import fit_tile
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from tests.helpers.inputs import QKV
from tests.helpers.methods import (
    DEFINED,
    Defined,
    drawn_call,
    holding_of_computed,
    picks,
    stand_ins,
    tiles,
)
from tests.helpers.sparse import run_sparse, text_places, tokens_of_tiles

BSA = DEFINED["bsa"]
TEXT = text_places(BSA.grid, 35)["text last"]


def defined(grid, tile, ratio: float, mass: float, least: int) -> Defined:
    """Return the method on another grid, with other parameters."""
    cut = tiles(*fit_tile(tile, grid))
    given = {
        "query_keep_ratio": ratio,
        "kv_cumulative_threshold": mass,
        "min_kv_blocks": least,
        "tile_size": list(tile),
    }
    return replace(
        BSA,
        method=replace(BSA.method, given={**BSA.method.given, **given}),
        cut=cut,
        choose=partial(holding_of_computed, ratio=ratio, mass=mass, least=least),
        grid=grid,
        varied=cut,
        stands_in=partial(stand_ins, ratio=ratio),
    )


def drawn(seed: int, *, every_query: bool = False) -> tuple[Defined, Mapping[str, Any]]:
    """Return a case: a grid of some tiles, parameters, text, samples, key heads and a mask."""
    pick = picks(seed)
    tile = (pick(1, 3), pick(1, 4), pick(2, 5))
    grid = (pick(2, 6), pick(3, 8), pick(4, 9))
    ratio = 1.0 if every_query else pick(0, 20) / 20
    case = defined(grid, tile, ratio, pick(0, 20) / 20, pick(1, 5))
    return case, drawn_call(case, pick, without=slice(None))


def every_query(seed: int) -> tuple[Defined, Mapping[str, Any]]:
    """Return such a case in which all queries are computed."""
    return drawn(seed, every_query=True)


def of_fastvideo(qkv: QKV, grid, ratio: float, mass: float, least: int) -> torch.Tensor:
    """Return what FastVideo's `BSAAttentionImpl` does: [B, S, H, D] in float64.

    A copy of its formulas, for tiles of 4 x 4 x 4 that divide the grid.
    """
    order = torch.tensor([t for tile in tokens_of_tiles(grid, (4, 4, 4)) for t in tile])
    q, k, v = (x[:, order].double().transpose(1, 2).unflatten(2, (-1, 64)) for x in qkv)
    size, count = q.shape[4], max(1, int(64 * ratio))
    unit = F.normalize(q, dim=-1)
    alike = (unit * unit[:, :, :, 32:33]).sum(-1)
    places = alike.topk(count, dim=-1, largest=False).indices.sort(-1).values
    sparse = q.gather(3, places.unsqueeze(-1).expand(*places.shape, size))
    shares = (sparse.mean(3) @ k.mean(3).mT / size**0.5).softmax(-1)
    values, ranked = shares.sort(-1, descending=True)
    held = torch.ones_like(values, dtype=torch.bool)
    held[..., 1:] = values.cumsum(-1)[..., :-1] < mass
    held[..., :least] = True
    kept = torch.zeros_like(held).scatter_(-1, ranked, held)
    scores = sparse.flatten(2, 3) @ k.flatten(2, 3).mT / size**0.5
    mask = kept.repeat_interleave(count, 2).repeat_interleave(64, 3)
    found = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v.flatten(2, 3)
    found = found.unflatten(2, (-1, count))
    far = (torch.arange(64)[:, None] - places.unsqueeze(-2)).abs()  # [B, H, N, 64, count]
    source = far.argmin(-1).unsqueeze(-1).expand(*far.shape[:4], size)
    return found.gather(3, source).flatten(2, 3).transpose(1, 2)[:, order.argsort()]


@pytest.mark.parametrize(("ratio", "mass", "least"), [(0.5, 0.9, 4), (0.3, 0.5, 1), (0.01, 0.0, 2)])
def test_it_computes_what_fastvideo_does(ratio: float, mass: float, least: int) -> None:
    grid = (4, 8, 16)
    case = defined(grid, (4, 4, 4), ratio, mass, least)
    qkv = case.inputs(kv_heads=2, batch=2)
    out = run_sparse(case.method.layer(), qkv, grid)
    want = of_fastvideo(qkv, grid, ratio, mass, least)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tail", ["none", "pooled"])
def test_queries_whose_keys_alone_are_masked_have_their_own_output(tail: str) -> None:
    qkv, keep = BSA.inputs(TEXT), torch.arange(math.prod(BSA.grid) + 35)[None] % 5 != 3
    keep[:, tiles(2, 4, 4)(BSA.grid, TEXT)[0][1]] = False  # a whole tile
    layer = BSA.method.layer(kv_heads=1, tail=tail)
    out = run_sparse(layer, qkv, BSA.grid, text=TEXT, attn_mask=keep[:, None, None])
    want = BSA.defined(BSA.mask(qkv, TEXT, keep), TEXT, keep, *qkv, tail=tail)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


def test_the_defaults_are_those_of_fastvideo_and_so_are_the_names() -> None:
    names = {"bsa_query_keep_ratio": 0.5, "bsa_kv_cumulative_threshold": 0.9}
    given = replace(BSA.method, given={}).config(**names, bsa_min_kv_blocks=4)
    assert given == replace(BSA.method, given={}).config()
    assert given.tile_size == (4, 4, 4)


def test_every_tile_computes_one_query_at_a_ratio_of_0() -> None:
    case = defined(BSA.grid, (2, 4, 4), 0.0, 0.8, 2)
    layer, _, mask = case.check(TEXT)
    tokens = tokens_of_tiles(case.grid, (2, 4, 4))
    assert [int(mask[0, 0, list(tile)].any(-1).sum()) for tile in tokens] == [1] * len(tokens)
    (entry,) = layer.report().entries
    assert entry.density == pytest.approx(float(mask.double().mean()), abs=1e-6)


def test_queries_that_are_not_computed_have_no_gradient_and_others_have_theirs() -> None:
    qkv = BSA.inputs()
    source = stand_ins(qkv.query, BSA.cut(BSA.grid, None)[0], ratio=0.5)
    is_computed = source == torch.arange(source.shape[1])[None, :, None]
    query = qkv.query.clone().requires_grad_()
    out = run_sparse(BSA.method.layer(kv_heads=1), QKV(query, *qkv[1:]), BSA.grid)
    (gradient,) = torch.autograd.grad(out.square().sum(), query)
    assert not gradient[~is_computed].any()
    assert (gradient[is_computed].norm(dim=-1) > 0).all()
    given = out.gather(1, source.unsqueeze(3).expand(out.shape))
    assert torch.equal(out, given)


def test_some_heads_at_a_time_compare_queries_as_all_do(monkeypatch) -> None:
    layer, qkv = BSA.method.layer(kv_heads=1), BSA.inputs(TEXT)
    whole = run_sparse(layer, qkv, BSA.grid, text=TEXT)
    monkeypatch.setattr(f"{fit_tile.__module__}._NUMBERS_AT_ONCE", 1)
    assert torch.equal(run_sparse(layer, qkv, BSA.grid, text=TEXT), whole)


@pytest.mark.parametrize("ratio", [0.5, {0: 1.0, 0.5: 0.5}], ids=str)
def test_a_ring_and_a_cache_are_refused_with_the_reason_where_queries_are_compared(ratio) -> None:
    backend = find_backend(AttentionBackendEnum.BSA_ATTN, PlatformEnum.CPU)
    limits = backend.limits(BSA.method.config(query_keep_ratio=ratio))
    assert limits.ring == (
        "`query_keep_ratio` below 1 compares all queries of a tile, which ranks may cut"
    )
    assert limits.cache == "`query_keep_ratio` below 1 compares the queries of a whole video"
    assert backend.limits(BSA.method.config(query_keep_ratio=1.0)) == type(limits)()


@pytest.mark.parametrize(
    ("grid", "given", "is_told"),
    [
        ((4, 4, 4), {}, True),
        ((4, 4, 16), {}, True),
        ((4, 4, 16), {"min_kv_blocks": 3}, False),
        ((4, 4, 4), {"kv_cumulative_threshold": 1.0}, False),
    ],
)
def test_tiles_that_are_kept_whatever_they_hold_are_told_of(grid, given, is_told, caplog) -> None:
    given = {"kv_cumulative_threshold": 0.5, "min_kv_blocks": 4, "tile_size": [4, 4, 4], **given}
    layer, qkv = BSA.method.layer(**given), BSA.method.inputs(grid)
    for _ in range(2):
        run_sparse(layer, qkv, grid)
    told = [r.getMessage() for r in caplog.records]
    want = f"bsa_attn of a layer leaves no keys out: the latent grid {grid} has no more tiles than "
    assert told == ([f"{want}`min_kv_blocks`, 4"] if is_told else [])
