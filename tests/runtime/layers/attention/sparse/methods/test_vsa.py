"""Video Sparse Attention through the layer, against its definition written down with loops."""

import math
from dataclasses import replace

import pytest
import torch

from multimodal_gen.runtime.layers.attention import UlyssesAttention_VSA
from multimodal_gen.runtime.layers.attention.sparse import tiles as pooling
from multimodal_gen.runtime.layers.attention.sparse.methods.vsa import (
    kept_tiles,
)
from multimodal_gen.runtime.managers.forward_context import (
    ForwardContext,
)
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.inputs import QKV
from tests.helpers.methods import DEFINED, tiles
from tests.helpers.reference import reference_attention
from tests.helpers.sparse import (
    SparseMethod,
    assert_same_gradients,
    block_inputs,
    run_sparse,
    text_places,
    tokens_of_tiles,
)

METHOD = SparseMethod(
    backend=AttentionBackendEnum.VIDEO_SPARSE_ATTN,
    layer_cls=UlyssesAttention_VSA,
)
HEADS, HEAD_SIZE, SCALE = METHOD.heads, METHOD.head_size, METHOD.scale
WHOLE, RAGGED = (4, 8, 12), (5, 6, 9)  # in tiles of 4: 1x2x3; 2x2x3 with edges of 1, 2 and 1
TILE = (4, 4, 4)
TEXTS = text_places(RAGGED, 70)
layer = METHOD.layer
VSA = DEFINED["vsa"]


def inputs(grid, *, text=None, dtype=torch.float32, seed=0, **options):
    """Return inputs whose tiles have means of their own, so that scores differ by much."""
    qkv = METHOD.inputs(grid, text=text, seed=seed, **options)
    block_inputs(qkv, tokens_of_tiles(grid, TILE, text), values=True, seed=seed + 1)
    return QKV(*(x.to(dtype) for x in qkv))


def mask_of(qkv, grid, kept, text=None):
    """Return which token attends to which, bool [B, H, S, S]."""
    return replace(VSA, grid=grid).mask(qkv, text, kept=kept)


def coarse_of(qkv, grid, text=None):
    """Return the coarse stage, [B, S, H, D], one query tile at a time."""
    query, key, _ = qkv
    tiles = tokens_of_tiles(grid, TILE, text)
    coarse = torch.zeros_like(query, dtype=torch.float64)
    group = query.shape[2] // key.shape[2]
    # Means are rounded to the inputs' dtype before they are compared.
    means = [
        torch.stack([x[:, t].double().mean(1).to(x.dtype).double() for t in tiles], 1) for x in qkv
    ]
    q, k, v = means[0], *(x.repeat_interleave(group, 2) for x in means[1:])
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE).softmax(-1)
    for i, rows in enumerate(torch.einsum("bhqk,bkhd->qbhd", weights, v)):
        coarse[:, tiles[i]] = rows[:, None]
    return coarse


def run(attention, qkv, grid, *, gate=None, **options):
    return run_sparse(attention, qkv, grid, gate_compress=gate, **options)


def check(qkv, out, grid, kept, gate, text=None):
    """Assert that `out` is both stages, within a budget of roundings of each."""
    query, key, value = qkv
    coarse = coarse_of(qkv, grid, text)
    # Coarse values are a softmax over few means: a handful of roundings of each.
    slack = 16 * torch.finfo(query.dtype).eps * (gate.abs() * coarse.abs().amax())
    mask = mask_of(qkv, grid, kept, text)
    exact, _ = reference_attention(query, key, value, scale=SCALE, mask=mask)
    budget = slack + 16 * torch.finfo(query.dtype).eps * (exact.abs() + value.abs().amax())
    assert ((out.double() - exact - gate.double() * coarse).abs() <= budget).all()


@pytest.mark.parametrize(
    ("grid", "tile", "kept"),
    [
        (WHOLE, TILE, 1),
        (WHOLE, TILE, 3),
        ((5, 13, 9), (4, 8, 4), 2),
        pytest.param((5, 13, 9), TILE, 2, marks=pytest.mark.slow),
        pytest.param((5, 13, 9), (4, 8, 8), 2, marks=pytest.mark.slow),
    ],
)
def test_tiles_of_every_size_are_pooled_and_attended_to(grid, tile, kept):
    cut = tiles(*tile)
    replace(VSA, grid=grid, cut=cut, varied=cut).check(
        rule={"kept": kept}, topk=kept, tile_size=tile
    )


@pytest.mark.parametrize("grid", [WHOLE, RAGGED], ids=["whole", "ragged"])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("parameters", [{"topk": 2}, {"sparsity": 0.0}])
def test_the_gate_weighs_the_coarse_stage(grid, kv_heads, parameters):
    qkv = inputs(grid, kv_heads=kv_heads)
    gate = torch.randn(qkv.query.shape, generator=torch.Generator().manual_seed(3))
    kept = parameters.get("topk", len(tokens_of_tiles(grid, TILE)))
    out = run(layer(kv_heads=kv_heads, **parameters), qkv, grid, gate=gate)
    check(qkv, out, grid, kept, gate)


def test_dense_steps_have_the_coarse_stage_too():
    qkv = inputs(RAGGED)
    gate = torch.randn(qkv.query.shape, generator=torch.Generator().manual_seed(3))
    attention = layer(topk=2, dense_steps="0-2")
    for step, kept in ((1, 12), (3, 2)):
        out = run(attention, qkv, RAGGED, gate=gate, step=step)
        check(qkv, out, RAGGED, kept, gate)
    dense, sparse = attention.report().entries
    assert (dense.calls, sparse.calls) == (1, 1)
    assert not dense.selection.backend.is_sparse


def test_no_gate_is_weight_zero_and_not_one():
    qkv = inputs(WHOLE)
    attention = layer(topk=2)
    none = run(attention, qkv, WHOLE)
    assert torch.equal(none, run(attention, qkv, WHOLE, gate=torch.zeros_like(qkv.query)))
    one = run(attention, qkv, WHOLE, gate=torch.ones_like(qkv.query))
    assert (none - one).abs().max() > 0.1


def test_without_a_gate_no_value_is_pooled(monkeypatch):
    pooled = []
    pool = pooling.pool_tiles

    def spy(tensors, *args, **options):
        pooled.append(len(tensors))
        return pool(tensors, *args, **options)

    monkeypatch.setattr(pooling, "pool_tiles", spy)
    qkv = inputs(WHOLE)
    run(layer(topk=2), qkv, WHOLE)
    assert pooled == [2]
    run(layer(topk=2), qkv, WHOLE, gate=qkv.query)
    assert pooled == [2, 2, 1]


def test_text_has_no_coarse_stage():
    text = TEXTS["text first"]
    qkv = inputs(RAGGED, text=text)
    gate = torch.randn(qkv.query.shape, generator=torch.Generator().manual_seed(3))
    attention = layer(topk=2)
    plain, gated = (run(attention, qkv, RAGGED, text=text, gate=g) for g in (None, gate))
    assert torch.equal(plain[:, : text.length], gated[:, : text.length])
    check(qkv, gated, RAGGED, 2, gate, text)


def test_equal_scores_keep_the_first_tiles():
    query, key, value = inputs(WHOLE)
    qkv = QKV(torch.zeros_like(query), key, value)
    out = run(layer(topk=2), qkv, WHOLE)
    first = sorted(t for tile in tokens_of_tiles(WHOLE, TILE)[:2] for t in tile)
    expected = value[:, first].mean(dim=1, keepdim=True).expand_as(out)
    torch.testing.assert_close(out, expected)


def test_gradients_flow_through_both_stages():
    grid = (4, 4, 8)
    qkv = inputs(grid, batch=1)
    gate = torch.randn(qkv.query.shape, generator=torch.Generator().manual_seed(3))
    mask, blocks = mask_of(qkv, grid, 1), tokens_of_tiles(grid, TILE)
    attention = layer(topk=1, kernel="reference")

    def definition(q, k, v, g):
        fine, _ = reference_attention(q, k, v, scale=SCALE, mask=mask)
        means = [torch.stack([x[:, t].mean(1) for t in blocks], dim=1) for x in (q, k, v)]
        coarse, _ = reference_attention(*means, scale=SCALE)
        spread = torch.zeros_like(q)
        for i, tokens in enumerate(blocks):
            rows = coarse[:, i : i + 1].expand(-1, len(tokens), -1, -1)
            spread = spread.index_add(1, torch.tensor(tokens), rows)
        return fine + g * spread

    assert_same_gradients(
        lambda q, k, v, g: run(attention, QKV(q, k, v), grid, gate=g), definition, *qkv, gate
    )


@pytest.mark.parametrize("heads", [(), (2, 1)], ids=["calls", "groups of heads"])
def test_the_density_of_a_step_is_the_mean_over_its_calls_and_heads(heads):
    attention = layer(topk=3)
    shares = []
    for grid in (WHOLE, RAGGED):
        alone = layer(topk=3)
        run(alone, inputs(grid), grid)
        shares.append(alone.attn_impl.facts().densities[0])
        if not heads:
            run(attention, inputs(grid), grid)
    for num, share in zip(heads, shares, strict=False):
        attention.attn_impl.layer.note(ForwardContext(current_timestep=0), share, num)
    assert shares[0] != shares[1]
    wanted = sum(n * share for n, share in zip(heads or (1, 1), shares, strict=True))
    assert attention.attn_impl.facts().densities[0] == pytest.approx(wanted / sum(heads or (1, 1)))


@pytest.mark.parametrize(
    ("parameters", "grid", "expected"),
    [
        # Two conventions in use, on the grids of Wan at 480p and 720p.
        ({"sparsity": 0.9}, (21, 30, 52), 63),
        ({"sparsity": 0.8}, (21, 30, 52), 125),
        ({"sparsity": 0.9}, (21, 45, 80), 144),
        ({"sparsity": 0.9, "topk_convention": "tokens"}, (21, 30, 52), 52),
        ({"sparsity": 0.8, "topk_convention": "tokens"}, (21, 30, 52), 103),
        ({"sparsity": 0.9, "topk_convention": "tokens"}, (21, 45, 80), 119),
        # 1 - 0.7 is more than 0.3 in binary.
        ({"sparsity": 0.7}, (4, 4, 40), 3),
        ({"sparsity": 1.0}, (21, 30, 52), 1),
        ({"sparsity": 0.9999}, TILE, 1),
        ({"sparsity": 0.0, "topk_convention": "tokens"}, (21, 30, 52), 624),
        ({}, (21, 30, 52), 624),
        ({"topk": 32}, (16, 28, 52), 32),
        ({"topk": 5000}, (21, 30, 52), 624),
    ],
)
def test_the_number_of_kept_tiles(parameters, grid, expected):
    num_tiles = math.prod(-(-n // 4) for n in grid)
    assert kept_tiles(METHOD.config(**parameters), num_tiles, math.prod(grid)) == expected
