"""Static patterns through the layer, against their definitions, one pair of tokens at a time."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.sparse.methods import static as backend
from multimodal_gen.runtime.layers.attention.sparse.methods.static import (
    chunks_map,
    key_frame_interval,
    lvsa_map,
    radial_map,
)
from tests.helpers.methods import (
    DEFINED,
    Defined,
    chunks,
    drawn_call,
    lvsa_frames,
    method,
    picks,
    pieces,
)
from tests.helpers.reference import reference_attention
from tests.helpers.sparse import run_sparse, text_places

LVSA, RADIAL = DEFINED["static, lvsa"], method("static_sparse_attn")
CHUNKS = DEFINED["static, chunks"]


def naive_radial(frames, tokens, block, decay, sink, following):
    """Return what Radial Attention keeps, from its mask of tokens, pair of frames by pair."""
    total = frames * tokens
    num = -(-total // block)
    kept = torch.eye(num, dtype=torch.bool)
    for i in range(frames):
        for j in range(frames):
            d = abs(i - j)
            length = 2 ** tokens.bit_length() / 2 ** d.bit_length()
            pair = torch.zeros(num * block, num * block, dtype=torch.bool)
            for r in range(tokens):
                for c in range(tokens):
                    if d == 0 or (sink and j == 0):
                        inside = True
                    elif length < block and d % int(block / length):
                        inside = False
                    elif d == 1:
                        inside = abs(r - c) <= following
                    else:
                        inside = abs(r - c) <= max(length * decay, block)
                    pair[i * tokens + r, j * tokens + c] = inside
            rows = pair.view(num, block, num, block).sum(1)  # [N, N, columns]
            high, held = (rows > block / 3).sum(-1), (rows > 0).sum(-1)
            kept |= (held > 0) & (high > 0.6 * held)
    return kept


@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize(
    ("frames", "tokens", "block", "decay"),
    [(5, 16, 8, 1.0), (6, 21, 8, 0.4), (9, 10, 4, 0.5), (4, 3, 8, 1.0), (3, 40, 8, 0.2)],
)
def test_radial_keeps_what_its_mask_of_tokens_says(frames, tokens, block, decay, sink):
    for following in (tokens, tokens // 2):
        given = {"block": block, "decay": decay, "sink": sink, "following": following}
        found = radial_map(frames, tokens, **given)
        assert torch.equal(found, naive_radial(frames, tokens, **given))
        assert found.any(1).all(), "no row is empty"
        assert len(found) * block >= frames * tokens, "no token is left out"


@pytest.mark.parametrize(
    ("given", "sink", "following"),
    [
        ({}, True, 20),
        ({"model_type": "hunyuan"}, False, 20),
        ({"radial_rule": "2025-07"}, True, 10),
        ({"radial_rule": "2025-07", "model_type": "hunyuan"}, True, 20),
    ],
)
def test_rules_differ_by_model_and_month(radial, given, sink, following):
    rule = {"grid": radial.grid, "sink": sink, "following": following}
    found = radial.check(rule=rule, layer=radial.method.layer(kv_heads=1, **given))
    assert not found.mask.all()


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize(
    ("frames", "window", "first", "interval"), [(9, 1, 1, 4), (13, 2, 2, 5), (6, 2, 0, 3)]
)
def test_lvsa_keeps_global_frames_and_a_window_of_others(frames, window, first, interval, offset):
    given = {"window": window, "first": first, "interval": interval, "offset": offset}
    found = lvsa_map(frames, **given)
    assert torch.equal(found, lvsa_frames(frames, **given))
    assert len(set(found.sum(1).tolist())) == 1, "every frame sees as many"


def test_the_interval_follows_from_the_frames_that_the_model_was_trained_on():
    # Shares that the authors' documentation has for a window of 4 and one leading frame.
    for frames, budget, sparsity in (
        (21, 21, 0.0), (33, 21, 0.21), (81, 21, 0.74), (121, 21, 0.82),
        (33, 33, 0.0), (49, 33, 0.31), (81, 33, 0.56),
    ):  # fmt: skip
        interval = key_frame_interval(frames, window=4, first=1, budget=budget)
        kept = lvsa_map(frames, window=4, first=1, interval=interval, offset=0)
        assert 1 - float(kept.double().mean()) == pytest.approx(sparsity, abs=0.006)


@pytest.fixture
def radial(monkeypatch):
    """Radial attention in blocks of 8 tokens."""
    monkeypatch.setattr(backend, "_BLOCK", 8)
    backend._radial.cache_clear()
    yield Defined(
        method=method("static_sparse_attn", decay_factor=0.5),
        cut=pieces(8),
        choose=lambda *_, token_mask, grid, sink=True, following=None: naive_radial(
            grid[0], grid[1] * grid[2], 8, 0.5, sink, following or grid[1] * grid[2]
        )[None, None],
        grid=(5, 4, 5),
    )
    backend._radial.cache_clear()


@pytest.mark.parametrize("where", ["no text", "text first", "text last"])
def test_layers_attend_by_radial_blocks_and_text_is_kept(radial, where):
    text, rule = text_places(radial.grid, 10)[where], {"grid": radial.grid}
    assert not radial.check(text, rule=rule).mask.all()
    token_mask = (torch.arange(100 + (text.length if text else 0)) % 7 != 3)[None]
    radial.check(text, rule=rule, token_mask=token_mask, tail="pooled")


def test_a_layer_that_sees_another_grid_has_another_pattern(radial):
    layer = radial.method.layer(kv_heads=1)
    for grid in ((5, 4, 5), (4, 5, 7), (5, 4, 5)):
        replace(radial, grid=grid).check(layer=layer, rule={"grid": grid})


def test_layers_attend_by_frames_that_rotate_from_step_to_step():
    interval = key_frame_interval(9, window=1, first=1, budget=5)
    given = {"reference_latent_frames": 5, "key_frame_interval": None}
    layer = LVSA.method.layer(kv_heads=1, **given)
    assert interval > 1
    masks = []
    for step in (0, 1, interval, 1):
        rule = {"interval": interval, "offset": step % interval}
        masks.append(LVSA.check(layer=layer, step=step, rule=rule).mask)
    assert not torch.equal(masks[0], masks[1])
    assert len(layer.report().entries[-1].densities) == 3


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            {"reference_latent_frames": 9, "key_frame_interval": None},
            "keeps all of 9 frames (`reference_latent_frames`)",
        ),
        ({"dense_above": 0.3}, "would keep more than 0.3 of the pairs (`dense_above`)"),
    ],
)
def test_what_would_keep_all_or_too_much_is_dense_and_the_report_says_so(given, reason):
    layer, qkv = LVSA.method.layer(kv_heads=1, **given), LVSA.inputs()
    out = run_sparse(layer, qkv, LVSA.grid)
    want, _ = reference_attention(*qkv, scale=LVSA.scale)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    (detour,) = layer.report().detours
    assert reason in detour.selection.reason


def test_parameters_of_the_other_pattern_are_refused():
    with pytest.raises(ConfigError, match="`window_size` of static_sparse_attn must be given wit"):
        RADIAL.config(window_size=2)
    with pytest.raises(ConfigError, match="`decay_factor` of static_sparse_attn must be given wi"):
        LVSA.method.config(decay_factor=0.5)


def drawn(seed: int) -> tuple[Defined, Mapping[str, Any]]:
    """Return a case of chunks: a grid, parameters, text, samples, key heads and a mask."""
    pick = picks(seed)
    chunk, radius = pick(0, 4), pick(0, 2)
    anchors = ("none", "columns", "rows", "both")[pick(0, 3)]
    given = {"pattern": "chunks", "chunk": chunk, "radius": radius, "anchor_frames": anchors}
    case = replace(
        CHUNKS,
        method=method("static_sparse_attn", **given),
        choose=partial(chunks, chunk=chunk, radius=radius, anchors=anchors),
        grid=(pick(2, 12), pick(2, 5), pick(2, 6)),
    )
    return case, drawn_call(case, pick, without=slice(None))


def test_windows_of_chunks_that_see_all_frames_are_dense_with_the_reason():
    grid = (10, 2, 3)
    case = replace(CHUNKS, grid=grid, choose=partial(chunks, chunk=5, radius=1, anchors="none"))
    layer = case.method.layer(kv_heads=1, chunk=5, radius=1, anchor_frames="none")
    assert case.check(layer=layer).mask.all()
    (entry,) = layer.report().detours
    assert "keeps all of 10 frames (`radius`)" in entry.selection.reason


def test_the_defaults_are_the_windows_of_vdn_h3():
    kept = chunks_map(37, chunk=5, radius=1, anchors="both")  # frames of 124 pixel frames
    assert torch.equal(kept, chunks(None, range(37), (), chunk=5, radius=1, anchors="both")[0, 0])
    config = RADIAL.config(pattern="chunks")
    assert (config.chunk, config.radius, config.anchor_frames) == (5, 1, "both")
    with pytest.raises(
        ConfigError, match="`chunk` of static_sparse_attn must be given with patter"
    ):
        RADIAL.config(chunk=4)
