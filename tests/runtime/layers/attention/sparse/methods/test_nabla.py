"""NABLA through the layer, against its definition and against the code of its authors."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.sparse.tiles import fit_tile
from multimodal_gen.runtime.layers.attention.sparse.windows import tiles_of
from tests.helpers.methods import DEFINED, Defined, drawn_call, holding, picks, tiles
from tests.helpers.reference import reference_attention
from tests.helpers.sparse import run_sparse, text_places, tokens_of_tiles

NABLA = DEFINED["nabla"]
ALONE = {"add_sta": False, "wT": ..., "wH": ..., "wW": ...}
TEXT = text_places(NABLA.grid, 35)["text last"]


def defined(grid, tile, mass, widths) -> Defined:
    """Return the method on another grid, with other parameters; no `widths` for no neighbours."""
    cut = tiles(*fit_tile(tile, grid))
    _, *counts = tiles_of(grid, tile)
    given = {**NABLA.method.given, "P": mass, "tile_size": list(tile)}
    if widths is None:
        given |= ALONE
    else:
        given |= dict(zip(("wT", "wH", "wW"), widths, strict=True))
    return replace(
        NABLA,
        method=replace(NABLA.method, given=given),
        cut=cut,
        choose=partial(holding, mass=mass, widths=widths, counts=tuple(counts)),
        grid=grid,
        varied=cut,
    )


def drawn(seed: int) -> tuple[Defined, Mapping[str, Any]]:
    """Return a case: a grid of some tiles, parameters, text, samples, key heads and a mask."""
    pick = picks(seed)
    tile = (pick(1, 3), pick(1, 4), pick(2, 5))
    grid = (pick(2, 6), pick(3, 8), pick(4, 9))
    widths = None if pick(0, 2) == 0 else (pick(1, 4), pick(1, 4), pick(1, 4))
    case = defined(grid, tile, pick(0, 99) / 100, widths)
    return case, drawn_call(case, pick, without=slice(None))


def authors_map(query, key, sta, thr):
    """Return what the authors' `nablaT_v2` makes a mask of: bool [B, H, N, N].

    A copy of its formula for tokens [B, S, H, D] in squares of 64.
    """
    means = [x.transpose(1, 2).unflatten(2, (-1, 64)).mean(3) for x in (query, key)]
    shares = (means[0] @ means[1].mT / math.sqrt(query.shape[3])).softmax(-1)
    values, order = shares.sort(-1)
    kept = values.cumsum(-1) >= 1 - thr
    return kept.gather(-1, order.argsort(-1)) | sta


def authors_sta(counts, widths):
    """Return their neighbourhood, `fast_sta_nabla`: bool [N, N]."""
    near = [
        (torch.arange(n)[:, None] - torch.arange(n)).abs() <= w // 2
        for n, w in zip(counts, widths, strict=True)
    ]
    found = torch.einsum("tu,hi,wx->thwuix", *(x.double() for x in near)).bool()
    return found.reshape(math.prod(counts), -1)


@pytest.mark.parametrize("thr", [0.3, 0.9])
def test_it_keeps_what_the_authors_code_keeps(thr: float) -> None:
    grid, widths = (4, 16, 24), (3, 1, 3)
    case = defined(grid, (1, 8, 8), thr, widths)
    qkv = case.inputs(kv_heads=2)
    squares = tokens_of_tiles(grid, (1, 8, 8), None)
    order = [token for tokens in squares for token in tokens]
    q, k = (x[:, order] for x in qkv[:2])
    kept = authors_map(q, k, authors_sta((4, 2, 3), widths), thr)
    assert 0.1 < kept.double().mean() < 0.9
    back = torch.tensor(order).argsort()
    mask = kept.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, back][..., back]
    out = run_sparse(case.method.layer(kv_heads=2), qkv, grid)
    want, _ = reference_attention(*qkv, scale=case.scale, mask=mask)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("share", "kept"), [(0.0, 1), (0.25, 4), (0.99, 17)])
def test_a_share_of_the_tiles_may_be_kept_instead(share: float, kept: int) -> None:
    given = {"method": "topk", "P": share, **ALONE}
    layer, _, mask = replace(NABLA, choose=DEFINED["cube"].choose).check(
        TEXT, rule={"kept": kept, "own": False}, **given
    )
    (entry,) = layer.report().entries
    assert entry.density == pytest.approx(float(mask.double().mean()), abs=1e-6)


def test_the_best_tile_is_kept_at_no_mass() -> None:
    NABLA.check(TEXT, rule={"mass": 0.0, "widths": None}, P=0.0, **ALONE)


def test_nearby_tiles_are_kept_besides_a_share_of_all() -> None:
    def choose(*given: Any, token_mask: object = None, kept: int) -> torch.Tensor:
        nearby = holding(*given, mass=0.0, widths=(3, 1, 3), counts=(2, 3))
        return nearby | DEFINED["cube"].choose(*given, kept=kept, own=False)

    replace(NABLA, choose=choose).check(TEXT, rule={"kept": 3}, method="topk", P=0.2)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"wT": 6, "wH": 2, "wW": 4}, True),
        ({"wT": 6, "wH": 2, "wW": 4, "method": "topk"}, True),
        ({"wT": 5, "wH": 2, "wW": 4}, False),
        ({"wT": 6, "wH": 1, "wW": 4}, False),
        ({"wT": 6, "wH": 2, "wW": 3}, False),
        (ALONE, False),
    ],
)
def test_a_neighbourhood_of_all_tiles_is_told_to_leave_nothing_out(given, told, caplog) -> None:
    grid = (4, 4, 8)  # four tiles, two and three
    layer = NABLA.method.layer(**{"P": 0.1, "tile_size": [1, 2, 3], **given})
    run_sparse(layer, NABLA.method.inputs(grid), grid, known={"num_steps": 2})
    assert ("nabla_attn leaves nothing out in any step" in caplog.text) == told
    assert (layer.report().entries[0].density == 1) == told


@pytest.mark.parametrize("name", ["wT", "wH", "wW"])
def test_a_width_without_a_neighbourhood_is_refused(name: str) -> None:
    said = f"`{name}` of nabla_attn must not be given with add_sta false, .* got 5; remove one"
    with pytest.raises(ConfigError, match=said):
        NABLA.method.layer(**{**ALONE, name: 5})
