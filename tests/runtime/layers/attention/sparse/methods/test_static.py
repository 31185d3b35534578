"""Static patterns through the layer, against their definitions, one pair of tokens at a time."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
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
    """Return what Radial Attention keeps, bool [N, N], as its authors' code makes it.

    That is `radial_attn/attn_mask.py` of mit-han-lab/radial-attention at 72788d4: of every pair of
    frames a mask of tokens, a band (`get_window_width`) and whole pairs that are left out
    (`get_diagonal_split_mask`), which is laid into blocks and shrunk (`shrinkMaskStrict`). What is
    compared there is compared here in float64 or in whole numbers. Beyond that code, the diagonal
    is kept, and so are the blocks that it cuts off: the last one of the sequence, and that of a
    frame that begins inside a block.
    """
    num = -(-frames * tokens // block)
    place = torch.arange(tokens)
    apart = (place[:, None] - place).abs().double()
    kept = torch.eye(num, dtype=torch.bool)
    for i, j in product(range(frames), repeat=2):
        away = abs(i - j)
        length = 2.0 ** (tokens.bit_length() - away.bit_length())
        if sink and j == 0:
            pair = torch.ones(tokens, tokens)
        elif length < block and away % math.floor(block / length):
            continue
        else:
            far = length * decay if length * decay >= block else float(block)
            far = (float(tokens), float(following), far)[min(away, 2)]
            pair = (apart <= far).double()
        rows, columns = (divmod(n * tokens, block) for n in (i, j))  # first block, tokens before
        n, m = (-(-(before + tokens) // block) for _, before in (rows, columns))
        laid = torch.zeros(n * block, m * block, dtype=torch.float64)
        laid[rows[1] : rows[1] + tokens, columns[1] : columns[1] + tokens] = pair
        of_column = laid.unflatten(0, (n, block)).sum(1).unflatten(1, (m, block))
        high, held = (x.sum(2) for x in (3 * of_column > block, of_column > 0))
        kept[rows[0] : rows[0] + n, columns[0] : columns[0] + m] |= 5 * high > 3 * held
    return kept


@pytest.mark.parametrize(
    ("frames", "tokens", "decay", "sink", "kept", "products"),
    [
        (9, 512, 1.0, True, 1098, 344_002),
        (9, 512, 0.2, False, 960, 307_860),
        (12, 256, 0.4, True, 452, 63_881),
        (17, 128, 1.0, False, 125, 9_574),
        (6, 1280, 0.25, True, 2448, 2_186_100),
        (5, 1664, 0.1, False, 2641, 3_111_472),
    ],
)
def test_radial_keeps_as_many_blocks_as_the_authors_code(
    frames, tokens, decay, sink, kept, products
):
    # What their functions gave at 72788d4, on a CPU: how many blocks, and the sum of row x column.
    # Frames are whole blocks there, so that nothing is cut off.
    given = {"block": 128, "decay": decay, "sink": sink, "following": tokens}
    found = radial_map(frames, tokens, **given)
    places = torch.arange(len(found))
    assert (int(found.sum()), int((found * places[:, None] * places).sum())) == (kept, products)
    assert torch.equal(found, naive_radial(frames, tokens, **given))


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


def drawn_radial(seed: int) -> tuple[Defined, Mapping[str, Any]]:
    """Return a case of Radial Attention in blocks of 8 tokens, as `drawn` does."""
    pick = picks(seed)
    is_wan, is_older, decay = pick(0, 1), pick(0, 1), (0.0, 0.3, 0.5, 1.0)[pick(0, 3)]
    grid = (pick(2, 9), pick(1, 5), pick(2, 7))
    tokens = grid[1] * grid[2]
    rule = {"sink": bool(is_wan or is_older), "following": tokens}
    if is_wan and is_older:
        rule["following"] = tokens // 2
    kept = naive_radial(grid[0], tokens, 8, decay, **rule)[None, None]
    given = {
        "decay_factor": decay,
        "model_type": ("hunyuan", "wan")[is_wan],
        "radial_rule": ("2025-11", "2025-07")[is_older],
    }
    case = Defined(
        method=method("static_sparse_attn", **given),
        cut=pieces(8),
        choose=lambda *_, token_mask: kept,
        grid=grid,
    )
    return case, drawn_call(case, pick, without=slice(None))


@pytest.mark.usefixtures("radial")
@pytest.mark.parametrize("some", range(10))
def test_drawn_cases_of_radial_are_those_of_its_definition(some):
    shares = []
    for seed in range(10 * some, 10 * some + 10):
        case, given = drawn_radial(seed)
        tail = "none" if seed % 3 else "pooled"
        shares.append(float(case.check(**given, tail=tail).mask.double().mean()))
        case.check_gradients(given["text"], tail=tail)
    assert min(shares) < 0.8


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
