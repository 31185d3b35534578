from typing import Any

import pytest
import torch
from torch import nn

from multimodal_gen.kernels.block_sparse.layouts import chunk_causal_plan
from multimodal_gen.runtime.comparison.layers import (
    Replay,
    averaged,
    grid_cells,
    kept_mass,
    sampled_steps,
)
from multimodal_gen.runtime.comparison.record import LayerErrors
from multimodal_gen.runtime.generator.attention_check import sample_rows
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.call import watching
from multimodal_gen.runtime.layers.attention.scope import LayerSite, scope_from
from multimodal_gen.runtime.layers.attention.sparse import tiles
from multimodal_gen.runtime.managers.forward_context import set_forward_context

GRID, TEXT, HEADS, SIZE = (2, 6, 8), 5, 3, 64
TOKENS = GRID[0] * GRID[1] * GRID[2] + TEXT
SPARSE = scope_from(
    attention_backend="sliding_tile_attn",
    attention_backend_config="window=[1,1,3],skip_time_steps=0,tile_size=[1,2,2]",
)
DENSE = scope_from(attention_backend="torch_sdpa")


def layer_of(scope: object) -> LocalAttention:
    site = LayerSite(name="blocks.0", component="transformer", layer=0, num_layers=1)
    return LocalAttention(HEADS, SIZE, site=site, scope=scope)


def qkv() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, TOKENS, HEADS, SIZE, generator=generator) for _ in range(3)]


def sparse_weights(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the weights of the sparse layer, [S, H, S], from values that name their key."""
    layer, parts = layer_of(SPARSE), []
    for first in range(0, TOKENS, SIZE):
        count = min(SIZE, TOKENS - first)
        v = torch.zeros(1, TOKENS, HEADS, SIZE)
        v[0, first : first + count, :, :count] = torch.eye(count).unsqueeze(1)
        parts.append(layer(q, k, v)[0, :, :, :count])
    return torch.cat(parts, dim=2)


def test_replayed_errors_and_masses_are_those_of_a_dense_recomputation() -> None:
    q, k, v = qkv()
    dense, replay = layer_of(DENSE), Replay("torch_sdpa", {"sparse": SPARSE}, num_steps=2)
    with set_forward_context(0, num_steps=2, latent_grid=GRID):
        with watching(replay):
            out = dense(q, k, v)
        seen = layer_of(SPARSE)(q, k, v)
        weights = sparse_weights(q, k)
    assert torch.equal(out, layer_of(DENSE)(q, k, v))
    (found,) = replay.found["sparse"].layers
    (own,) = replay.found["torch_sdpa"].layers
    scores = torch.einsum("shd,thd->sht", q[0].double(), k[0].double()) * SIZE**-0.5
    exact = scores.softmax(-1)
    truth = torch.einsum("sht,thd->shd", exact, v[0].double())
    rows = sample_rows(TOKENS, seed=0)
    error = (seen[0].double() - truth)[rows].square().sum((0, 2)).sqrt()
    whole = truth[rows].square().sum((0, 2)).sqrt()
    assert found.relative_l2 == pytest.approx((error / whole).tolist(), rel=1e-4)
    mass = (exact * (weights > 0)).sum(-1)[rows].mean(0)
    assert found.kept_mass == pytest.approx(mass.tolist(), abs=1e-4)
    assert (found.kept_mass_source, own.kept_mass_source) == ("plan", "dense")
    assert max(own.relative_l2) < 1e-6
    assert (own.density, own.kept_mass) == (1.0, (1.0,) * HEADS)
    assert found.density == pytest.approx(float((weights > 0).double().mean()), abs=1e-6)
    assert found.backend == "sliding_tile_attn (reference)"


def test_calls_with_a_mask_of_blocks_are_not_measured() -> None:
    replay, blocks = Replay("torch_sdpa", {"sparse": SPARSE}, num_steps=2), [TOKENS - 9, 9]
    with set_forward_context(0, num_steps=2, latent_grid=GRID), watching(replay):
        layer_of(DENSE)(*qkv(), chunk_causal_plan(blocks, device="cpu"))
    assert not any(found.layers for found in replay.found.values())


def test_what_a_trained_projection_adds_is_not_measured() -> None:
    sla = scope_from(attention_backend="sla_attn", attention_backend_config={"topk_ratio": 0.3})
    scopes = {"sla": sla, "other": SPARSE}
    dense, replay = layer_of(DENSE), Replay("torch_sdpa", scopes, num_steps=2)
    dense.set_projection(nn.Linear(SIZE, SIZE).requires_grad_(False))
    with set_forward_context(1, num_steps=2, latent_grid=GRID), watching(replay):
        dense(*qkv())
    assert [len(x.layers) for x in replay.found.values()] == [1, 0, 1]
    assert [x.projected for x in replay.found.values()] == [0, 1, 0]
    assert len(replay.found["sla"].masks) == len(replay.found["other"].masks) > 0
    assert not any(x.failure for x in replay.found.values())


def test_the_mass_is_estimated_where_no_plan_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for told in (True, False):
        if not told:
            monkeypatch.setattr(tiles, "record_plan", lambda *args, **kwargs: None)
        replay = Replay("torch_sdpa", {"sparse": SPARSE}, num_steps=1)
        with set_forward_context(0, num_steps=1, latent_grid=GRID), watching(replay):
            layer_of(DENSE)(*qkv())
        (found[told],) = replay.found["sparse"].layers
    assert found[False].kept_mass_source == "estimate"
    assert found[False].kept_mass == pytest.approx(found[True].kept_mass, abs=0.03)
    assert found[False].relative_l2 == found[True].relative_l2


def of_layer(*figures: float, **changes: Any) -> LayerErrors:
    """Return the errors of a layer with a head for each figure."""
    given: dict[str, Any] = {
        "component": "transformer",
        "name": "blocks.0",
        "layer": 0,
        "step": 0,
        "branch": "cond",
        "backend": "b",
        "kept_mass": figures,
        "kept_mass_source": "plan",
        **changes,
    }
    return LayerErrors(relative_l1=figures, relative_l2=figures, cosine=figures, **given)


def test_prompts_and_seeds_are_averaged_with_their_spread() -> None:
    other = of_layer(9.0, 9.0, step=1)
    first, second = averaged([[of_layer(1.0, 2.0)], [of_layer(3.0, 2.0), other]])
    assert (first.relative_l2, first.clips) == ((2.0, 2.0), 2)
    assert first.spread is not None
    assert first.spread.relative_l2 == pytest.approx((2**0.5, 0.0), rel=1e-4)
    assert first.spread.kept_mass == first.spread.relative_l1
    assert (second.step, second.clips, second.spread) == (1, 1, None)


def test_the_mass_that_is_kept_is_that_of_random_signs_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.rand(32, 200, generator=generator, dtype=torch.float64).softmax(-1)
    keep = torch.rand(200, generator=generator) < 0.4
    mass = exact[:, keep].sum(-1, keepdim=True)
    signs = torch.randint(0, 2, (200, 512), generator=generator).double() * 2 - 1
    seen = (exact * keep / mass) @ signs
    found = kept_mass(seen.view(1, 32, 1, 512), (exact @ signs).view(1, 32, 1, 512))
    assert float(found) == pytest.approx(float(mass.mean()), abs=0.02)
    nothing = torch.zeros(1, 2, 1, 4)
    assert kept_mass(nothing, torch.ones(1, 2, 1, 4)).tolist() == [0.0]


def test_pictures_show_which_cells_are_kept() -> None:
    q, k, v = qkv()
    replay = Replay("torch_sdpa", {"sparse": SPARSE}, num_steps=1)
    with set_forward_context(0, num_steps=1, latent_grid=GRID):
        with watching(replay):
            layer_of(DENSE)(q, k, v)
        weights = sparse_weights(q, k)
    assert [mask.head for mask in replay.found["sparse"].masks] == [0, 1, 2]
    for mask in replay.found["sparse"].masks:
        assert (mask.grid, mask.cell, mask.query) == (GRID, (1, 1, 1), (1, 3, 4))
        row = (1 * GRID[1] + 3) * GRID[2] + 4
        shown = torch.tensor(mask.kept).flatten()
        assert torch.allclose(shown, weights[row, mask.head, : len(shown)], rtol=1e-2, atol=1e-6)
        scores = k[0, :, mask.head].double() @ q[0, row, mask.head].double() * SIZE**-0.5
        exact = scores.softmax(-1)[: len(shown)]
        found = torch.tensor(mask.exact, dtype=torch.float64).flatten()
        assert torch.allclose(found, exact, rtol=1e-2, atol=1e-6)


def test_a_backend_that_fails_is_left_out_and_the_others_go_on() -> None:
    replay = Replay("torch_sdpa", {"sparse": SPARSE, "dense": DENSE}, num_steps=1)
    with set_forward_context(0, num_steps=1), watching(replay):  # without a latent grid
        layer_of(DENSE)(*qkv())
        layer_of(DENSE)(*qkv())
    assert "must know the latent grid" in replay.found["sparse"].failure
    assert replay.found["sparse"].layers == ()
    assert len(replay.found["dense"].layers) == 2


@pytest.mark.parametrize(
    ("num_steps", "count", "expected"),
    [(50, 3, (0, 24, 49)), (50, 1, (25,)), (2, 3, (0, 1)), (3, 3, (0, 1, 2)), (10, 2, (0, 9))],
)
def test_steps_are_sampled_over_the_whole_generation(
    num_steps: int, count: int, expected: tuple[int, ...]
) -> None:
    assert sampled_steps(num_steps, count) == expected


def test_grids_are_cut_into_few_cells_of_equal_size() -> None:
    cell, cells = grid_cells((21, 30, 52), most=512)
    assert cell == (4, 4, 8)
    assert cells.shape == (21, 30, 52)
    assert cells.unique().tolist() == list(range(6 * 8 * 7))
    assert int(cells[4, 4, 8]) == 1 * 8 * 7 + 1 * 7 + 1
    assert grid_cells((1, 2, 3))[0] == (1, 1, 1)
