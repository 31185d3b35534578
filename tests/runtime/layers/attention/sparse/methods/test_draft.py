"""Draft attention through the layer, against its definition and against the code of its authors."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from multimodal_gen.runtime.layers.attention.sparse.tiles import fit_tile
from tests.helpers.inputs import QKV
from tests.helpers.methods import DEFINED, Defined, drawn_call, largest, picks, tiles
from tests.helpers.reference import reference_attention
from tests.helpers.sparse import run_sparse, text_places, tokens_of_tiles

DRAFT = DEFINED["draft"]
TEXT = text_places(DRAFT.grid, 35)["text last"]


def defined(grid, pool: tuple[int, int], sparsity: float) -> Defined:
    """Return the method on another grid, with other parameters."""
    cut = tiles(*fit_tile((1, *pool), grid))
    given = {**DRAFT.method.given, "sparsity_ratio": sparsity, "pool_h": pool[0], "pool_w": pool[1]}
    return replace(
        DRAFT,
        method=replace(DRAFT.method, given=given),
        cut=cut,
        choose=partial(largest, sparsity=sparsity),
        grid=grid,
        varied=cut,
    )


def drawn(seed: int) -> tuple[Defined, Mapping[str, Any]]:
    """Return a case: a grid of some patches, parameters, text, samples, key heads and a mask."""
    pick = picks(seed)
    pool, grid = (pick(1, 4), pick(2, 5)), (pick(1, 5), pick(3, 8), pick(4, 9))
    case = defined(grid, pool, pick(0, 20) / 20)
    return case, drawn_call(case, pick, without=slice(-1, None))


def authors_map(qkv: QKV, grid, pool: tuple[int, int], sparsity: float) -> torch.Tensor:
    """Return what the authors' `Draft_Attention` gives its kernel, bool [H, S, S], in float64."""
    sides = []
    for x in qkv[:2]:
        frames = x[0].double().unflatten(0, grid).permute(0, 3, 4, 1, 2).flatten(1, 2)
        pooled = F.avg_pool2d(frames, pool, pool, ceil_mode=True)
        sides.append(pooled.unflatten(1, x.shape[2:]).permute(1, 0, 3, 4, 2).flatten(1, 3))
    shares = (sides[0] @ sides[1].mT / math.sqrt(qkv.query.shape[3])).softmax(-1)
    flat = shares.flatten(1)
    count = int(sparsity * flat.shape[1])
    bound = flat.topk(count, largest=False).values.amax(1)
    return shares >= bound[:, None, None]


@pytest.mark.parametrize("sparsity", [0.75, 0.9])
def test_it_keeps_what_the_authors_code_keeps(sparsity: float) -> None:
    grid, pool = (3, 16, 32), (8, 16)
    case = defined(grid, pool, sparsity)
    qkv = case.inputs(kv_heads=2)
    kept = authors_map(qkv, grid, pool, sparsity)
    assert (kept.sum((1, 2)) == 144 - int(sparsity * 144) + 1).all()
    # Rows that are left with nothing keep one here.
    means = [
        torch.stack([x[0, tokens].double().mean(0) for tokens in tokens_of_tiles(grid, (1, *pool))])
        for x in qkv[:2]
    ]
    best = torch.einsum("ihd,jhd->hij", *means).argmax(-1, keepdim=True)
    kept = kept.scatter(-1, best, True)
    block = torch.empty(math.prod(grid), dtype=torch.long)
    for i, tokens in enumerate(tokens_of_tiles(grid, (1, *pool))):
        block[tokens] = i
    mask = kept[None][:, :, block][..., block]
    out = run_sparse(case.method.layer(kv_heads=2), qkv, grid)
    want, _ = reference_attention(*qkv, scale=case.scale, mask=mask)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_no_row_is_ever_empty() -> None:
    checked = DRAFT.check(TEXT, rule={"sparsity": 1.0}, sparsity_ratio=1.0)
    assert checked.mask.any(-1).all()


def test_rows_of_a_head_keep_different_numbers() -> None:
    qkv = DRAFT.inputs()
    kept = DRAFT.choose(qkv, *DRAFT.cut(DRAFT.grid, None)).sum(-1)
    assert len(set(kept.flatten().tolist())) > 3


@pytest.mark.parametrize(("pool_w", "told"), [(16, True), (4, False)])
def test_a_video_of_one_patch_is_told_that_it_is_kept(pool_w, told, caplog) -> None:
    grid = (1, 4, 8)
    layer = DRAFT.method.layer(sparsity_ratio=0.9, pool_h=4, pool_w=pool_w)
    run_sparse(layer, DRAFT.method.inputs(grid), grid)
    said = (
        "draft_attn of a layer attends to 100% of the pairs, not to the 10% that were asked for: "
        "the latent grid (1, 4, 8) has 1 block, which is kept"
    )
    assert (said in caplog.text) == told
