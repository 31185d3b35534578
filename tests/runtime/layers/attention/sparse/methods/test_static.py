"""Static patterns through the layer, against their definitions, one pair of tokens at a time."""

import pytest
import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.sparse.methods import static as backend
from multimodal_gen.runtime.layers.attention.sparse.methods.static import (
    StaticConfig,
    key_frame_interval,
    lvsa_map,
    radial_map,
)
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.reference import reference_attention
from tests.helpers.sparse import (
    SparseMethod,
    joint_mask,
    pair_mask,
    run_sparse,
    text_places,
    tokens_of_tiles,
    video_tokens,
)
from tests.helpers.tail import pooled_attention

METHOD = SparseMethod(
    backend=AttentionBackendEnum.STATIC_SPARSE_ATTN,
    config_cls=StaticConfig,
    given={"dense_above": 1.0},
    heads=2,
)
SCALE, layer = METHOD.scale, METHOD.layer
LVSA = {"pattern": "lvsa", "window_size": 1, "reference_latent_frames": 5}


def naive_radial(frames, tokens, block, decay, model):
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
                    if j == 0 or d == 0:
                        inside = True
                    elif length < block and d % int(block / length):
                        inside = False
                    elif d == 1:
                        inside = model == "hunyuan" or abs(r - c) <= tokens // 2
                    else:
                        inside = abs(r - c) <= max(length * decay, block)
                    pair[i * tokens + r, j * tokens + c] = inside
            rows = pair.view(num, block, num, block).sum(1)  # [N, N, columns]
            high, held = (rows > block / 3).sum(-1), (rows > 0).sum(-1)
            kept |= (held > 0) & (high > 0.6 * held)
    return kept


@pytest.mark.parametrize("model", ["wan", "hunyuan"])
@pytest.mark.parametrize(
    ("frames", "tokens", "block", "decay"),
    [(5, 16, 8, 1.0), (6, 21, 8, 0.4), (9, 10, 4, 0.5), (4, 3, 8, 1.0), (3, 40, 8, 0.2)],
)
def test_radial_keeps_what_its_mask_of_tokens_says(frames, tokens, block, decay, model):
    found = radial_map(frames, tokens, block=block, decay=decay, model=model)
    assert torch.equal(found, naive_radial(frames, tokens, block, decay, model))
    assert found.any(1).all(), "no row is empty"
    assert len(found) * block >= frames * tokens, "no token is left out"


def naive_lvsa(frames, window, first, interval, offset):
    """Return which frames each frame sees, by widening its window frame by frame."""
    shared = set(range(first)) | {
        (offset + i * interval) % frames for i in range(-(-frames // interval))
    }
    rows = []
    for f in range(frames):
        low, high = f - window, f + window
        if low < 0:
            low, high = 0, 2 * window
        if high >= frames:
            low, high = frames - 1 - 2 * window, frames - 1
        seen = set(range(max(low, 0), min(high, frames - 1) + 1))
        turn = -1
        while len(seen - shared) < min(2 * window + 1, frames - len(shared)):
            beyond = min(seen) - 1 if turn < 0 else max(seen) + 1
            seen |= {beyond} & set(range(frames))
            turn = -turn
        rows.append([g in seen | shared for g in range(frames)])
    return torch.tensor(rows)


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize(
    ("frames", "window", "first", "interval"), [(9, 1, 1, 4), (13, 2, 2, 5), (6, 2, 0, 3)]
)
def test_lvsa_keeps_global_frames_and_a_window_of_others(frames, window, first, interval, offset):
    given = {"window": window, "first": first, "interval": interval, "offset": offset}
    found = lvsa_map(frames, **given)
    assert torch.equal(found, naive_lvsa(frames, **given))
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


def run_and_check(attention, grid, text, kept, tile, *, step=0, tail=False, token_mask=None):
    qkv = METHOD.inputs(grid, text=text, batch=1, kv_heads=1)
    out = run_sparse(attention, qkv, grid, text=text, step=step, attn_mask=token_mask)
    video, tokens = video_tokens(grid, text), qkv.query.shape[1]
    if tile is None:
        blocks = tokens_of_tiles(grid, (1, *grid[1:]), text)
    else:
        blocks = [video[i : i + tile] for i in range(0, len(video), tile)]
    mask = pair_mask(kept.expand(1, 2, -1, -1), blocks, blocks, tokens, tokens)
    mask = joint_mask(mask, video, token_mask)
    if tail:
        want = pooled_attention(*qkv, mask, blocks, scale=SCALE, rows=video, token_mask=token_mask)
    else:
        want, _ = reference_attention(*qkv, scale=SCALE, mask=mask)
    real = slice(None) if token_mask is None else token_mask[:, :, None, None].expand_as(out)
    torch.testing.assert_close(out.double()[real], want[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", ["no text", "text first", "text last"])
def test_layers_attend_by_radial_blocks_and_text_is_kept(monkeypatch, where):
    grid = (5, 4, 5)
    monkeypatch.setattr(backend, "_BLOCK", 8)
    backend._radial.cache_clear()
    text = text_places(grid, 10)[where]
    kept = naive_radial(5, 20, 8, 0.5, "wan")
    assert not kept.all()
    run_and_check(layer(kv_heads=1, decay_factor=0.5), grid, text, kept, 8)
    pooling = layer(kv_heads=1, decay_factor=0.5, tail="pooled")
    token_mask = (torch.arange(100 + (text.length if text else 0)) % 7 != 3)[None]
    run_and_check(pooling, grid, text, kept, 8, tail=True, token_mask=token_mask)
    backend._radial.cache_clear()


def test_a_layer_that_sees_another_grid_has_another_pattern(monkeypatch):
    monkeypatch.setattr(backend, "_BLOCK", 8)
    backend._radial.cache_clear()
    attention = layer(kv_heads=1, decay_factor=0.5)
    for grid in ((5, 4, 5), (4, 5, 7), (5, 4, 5)):
        kept = naive_radial(grid[0], grid[1] * grid[2], 8, 0.5, "wan")
        run_and_check(attention, grid, None, kept, 8)
    backend._radial.cache_clear()


@pytest.mark.parametrize("where", ["no text", "text last"])
def test_layers_attend_by_frames_that_rotate_from_step_to_step(where):
    grid = (9, 2, 3)
    text = text_places(grid, 10)[where]
    interval = key_frame_interval(9, window=1, first=1, budget=5)
    attention = layer(kv_heads=1, **LVSA)
    assert interval > 1
    seen = []
    for step in (0, 1, interval, 1):
        kept = naive_lvsa(9, 1, 1, interval, step % interval)
        run_and_check(attention, grid, text, kept, None, step=step)
        seen.append(kept)
    assert not torch.equal(seen[0], seen[1])
    assert len(attention.report().entries[-1].densities) == 3


def test_a_video_no_longer_than_those_of_training_is_dense_and_the_report_says_so():
    grid = (5, 2, 3)
    attention, qkv = layer(**LVSA), METHOD.inputs(grid, batch=1)
    out = run_sparse(attention, qkv, grid)
    want, _ = reference_attention(*qkv, scale=SCALE)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    (detour,) = attention.report().detours
    assert "keeps all of 5 frames (`reference_latent_frames`)" in detour.selection.reason


def test_a_call_that_would_keep_too_much_is_dense():
    grid = (9, 2, 3)
    attention, qkv = layer(**LVSA, dense_above=0.3), METHOD.inputs(grid, batch=1)
    out = run_sparse(attention, qkv, grid)
    want, _ = reference_attention(*qkv, scale=SCALE)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    (detour,) = attention.report().detours
    assert "would keep more than 0.3 of the pairs (`dense_above`)" in detour.selection.reason


def test_parameters_of_the_other_pattern_are_refused():
    with pytest.raises(ConfigError, match="`window_size` of static_sparse_attn must be given wit"):
        METHOD.config(window_size=2)
    with pytest.raises(ConfigError, match="`decay_factor` of static_sparse_attn must be given wi"):
        METHOD.config(pattern="lvsa", decay_factor=0.5)
