"""Sol-Attn through the layer, against its definition written down block by block."""

import math
from itertools import product
from pathlib import Path

import pytest
import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.sparse.methods.sol import SolConfig
from multimodal_gen.runtime.managers.forward_context import TextSpan
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from multimodal_gen.settings import read_mapping
from tests.helpers.reference import reference_attention
from tests.helpers.sparse import (
    SparseMethod,
    assert_same_gradients,
    block_inputs,
    joint_mask,
    pair_mask,
    run_sparse,
    text_places,
    tokens_of_tiles,
    video_tokens,
)
from tests.helpers.tail import pooled_attention

GRID = (5, 9, 13)  # 585 tokens: nine blocks of 64, and one of 9
TEXTS = text_places(GRID, 70)
METHOD = SparseMethod(
    backend=AttentionBackendEnum.SOL_ATTN,
    config_cls=SolConfig,
    given={"dense_steps": None, "dense_layers": None},
)
SCALE = METHOD.scale
layer = METHOD.layer


def cut(text, tile=None):
    """Return the tokens of every block."""
    if tile is not None:
        return tokens_of_tiles(GRID, tile, text)
    video = video_tokens(GRID, text)
    return [video[i : i + 64] for i in range(0, len(video), 64)]


def inputs(text=None, **options):
    qkv = METHOD.inputs(GRID, text=text, **options)
    return block_inputs(qkv, cut(text), values=True)


def means(x, blocks, token_mask):
    """Return the mean of every block's kept tokens, and zero where there are none."""
    found = []
    for tokens in blocks:
        kept = [t for t in tokens if token_mask is None or token_mask[t]]
        found.append(x[kept].double().mean(0) if kept else torch.zeros(x.shape[1]).double())
    return torch.stack(found).to(x.dtype).double()


def exact_blocks(qkv, blocks, *, tau=1.0, thresh_type="diag", topk=None, token_mask=None):
    """Return which block attends to which, bool [B, H, N, N], one row at a time."""
    batch, _, heads, _ = qkv.query.shape
    num = len(blocks)
    chosen = torch.zeros(batch, heads, num, num, dtype=torch.bool)
    for b, h in product(range(batch), range(heads)):
        kept = None if token_mask is None else token_mask[b]
        query = means(qkv.query[b, :, h], blocks, kept)
        key = means(qkv.key[b, :, h * qkv.key.shape[2] // heads], blocks, kept)
        real = [n for n in range(num) if token_mask is None or kept[list(blocks[n])].any()]
        for i in range(num):
            scores = {j: float(query[i] @ key[j]) * SCALE for j in real}
            if topk is not None:
                count = min(max(round(topk * num), 1), num - 1)
                bound = sorted(scores.values(), reverse=True)[count]
            else:
                mean = sum(scores.values()) / len(real)
                variance = sum((s - mean) ** 2 for s in scores.values()) / len(real)
                if thresh_type == "diag":
                    spread = key[real].var(0, unbiased=False)
                    variance = float((query[i] ** 2) @ spread) * SCALE**2
                bound = mean + tau * math.sqrt(variance + 1e-6)
            for j in range(num):
                chosen[b, h, i, j] = abs(i - j) <= 1 or (j in scores and scores[j] > bound)
    return chosen


def check(attention, qkv, text=None, *, chosen, blocks, token_mask=None, **options):
    """Assert that a layer attends to chosen blocks exactly and to the others by their means."""
    out = run_sparse(attention, qkv, GRID, text=text, attn_mask=token_mask, **options)
    video, tokens = video_tokens(GRID, text), qkv.query.shape[1]
    mask = joint_mask(pair_mask(chosen, blocks, blocks, tokens, tokens), video, token_mask)
    want = pooled_attention(*qkv, mask, blocks, scale=SCALE, rows=video, token_mask=token_mask)
    real = slice(None) if token_mask is None else token_mask[:, :, None, None].expand_as(out)
    torch.testing.assert_close(out.double()[real], want[real], rtol=1e-4, atol=1e-5)
    assert 0 < chosen.float().mean() < 1
    return out


@pytest.mark.slow_cases("diag-text first", "diag-text last", "exact-text first", "exact-text last")
@pytest.mark.parametrize("where", TEXTS)
@pytest.mark.parametrize("thresh_type", ["diag", "exact"])
def test_blocks_above_the_threshold_are_exact_and_nothing_is_dropped(where, thresh_type):
    text = TEXTS[where]
    qkv, blocks = inputs(text, kv_heads=2), cut(text)
    chosen = exact_blocks(qkv, blocks, tau=0.5, thresh_type=thresh_type)
    attention = layer(kv_heads=2, tau=0.5, thresh_type=thresh_type)
    check(attention, qkv, text, chosen=chosen, blocks=blocks)


@pytest.mark.slow_cases("tile0")
@pytest.mark.parametrize("tile", [(4, 4, 4), (2, 8, 8)])
def test_blocks_may_be_tiles_of_the_grid(tile):
    text = TEXTS["text last"]
    qkv, blocks = inputs(text, batch=1), cut(text, tile)
    chosen = exact_blocks(qkv, blocks)
    check(layer(tile_size=tile), qkv, text, chosen=chosen, blocks=blocks)


def test_the_best_blocks_may_be_exact_instead():
    qkv, blocks = inputs(), cut(None)
    chosen = exact_blocks(qkv, blocks, topk=0.3)
    check(layer(topk_ratio=0.3), qkv, chosen=chosen, blocks=blocks)


@pytest.mark.slow_cases("diag")
@pytest.mark.parametrize("thresh_type", ["diag", "exact"])
def test_masked_keys_are_in_no_mean_and_in_no_threshold(thresh_type):
    qkv, blocks = inputs(TEXTS["text first"]), cut(TEXTS["text first"])
    token_mask = torch.arange(2 * 655).view(2, -1) % 7 != 3
    token_mask[1, 200:400] = False
    chosen = exact_blocks(qkv, blocks, thresh_type=thresh_type, token_mask=token_mask)
    attention = layer(thresh_type=thresh_type)
    text = TEXTS["text first"]
    check(attention, qkv, text, chosen=chosen, blocks=blocks, token_mask=token_mask)


def test_far_below_every_score_it_is_dense_attention():
    qkv = inputs()
    out = run_sparse(layer(tau=-1000.0), qkv, GRID)
    exact, _ = reference_attention(*qkv, scale=SCALE)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.slow_cases("0-inside0", "130-inside1")
@pytest.mark.parametrize(("start", "inside"), [(0, [0, 1]), (130, [2, 3]), (None, [8, 9])])
def test_the_sink_is_exact_for_all_and_attends_to_all_where_asked(start, inside):
    text = None
    qkv, blocks = inputs(text, batch=1), cut(text)
    chosen = exact_blocks(qkv, blocks)
    chosen[..., inside] = True
    config = {"sink_tokens": 70, "sink_start": start}
    check(layer(**config), qkv, chosen=chosen, blocks=blocks)
    chosen[:, :, inside] = True
    check(layer(**config, sink_rows=True), qkv, chosen=chosen, blocks=blocks)


def test_positions_of_the_sink_are_those_of_the_sequence():
    text = TEXTS["text first"]  # 70 tokens, then the video
    qkv, blocks = inputs(text, batch=1), cut(text)
    chosen = exact_blocks(qkv, blocks)
    chosen[..., 0] = True
    config = {"sink_tokens": 100, "sink_start": 0}
    check(layer(**config), qkv, text, chosen=chosen, blocks=blocks)


def test_without_the_tail_what_is_not_exact_is_dropped():
    qkv, blocks = inputs(), cut(None)
    chosen = exact_blocks(qkv, blocks)
    out = run_sparse(layer(tail="none"), qkv, GRID)
    tokens = qkv.query.shape[1]
    exact, _ = reference_attention(
        *qkv, scale=SCALE, mask=pair_mask(chosen, blocks, blocks, tokens, tokens)
    )
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)


def test_the_report_tells_the_share_of_exact_blocks():
    qkv, attention = inputs(), layer()
    run_sparse(attention, qkv, GRID)
    ((step, density),) = attention.report().entries[-1].densities
    blocks, tokens = cut(None), qkv.query.shape[1]
    share = pair_mask(exact_blocks(qkv, blocks), blocks, blocks, tokens, tokens).double().mean()
    assert (step, density) == (0, pytest.approx(float(share)))


def test_gradients_are_those_of_the_definition():
    qkv, blocks = inputs(batch=1), cut(None)
    chosen, tokens = exact_blocks(qkv, blocks), qkv.query.shape[1]
    mask, attention = pair_mask(chosen, blocks, blocks, tokens, tokens), layer()

    def definition(q, k, v):
        return pooled_attention(q, k, v, mask, blocks, scale=SCALE)

    assert_same_gradients(lambda *x: run_sparse(attention, x, GRID), definition, *qkv)


def test_a_number_of_dense_steps_means_the_first_ones():
    assert METHOD.config(dense_steps=10).dense_parts("steps")[0].given == "dense_steps=10"
    for given, dense in ((2, {0, 1}), ("1", {1}), ("0-1,3", {0, 1, 3}), (0, set())):
        parts = METHOD.config(dense_steps=given).dense_parts("steps")
        steps = {i for i in range(5) if any(part.indices.holds(i, 5) for part in parts)}
        assert steps == dense, given
    defaults = SolConfig()
    assert {i for part in defaults.dense_parts("steps") for i in range(50)
            if part.indices.holds(i, 50)} == set(range(10))  # fmt: skip
    assert [str(part.indices) for part in defaults.dense_parts("layers")] == ["0-1"]


def test_settings_of_the_sources_are_taken():
    folder = Path(__file__).parents[6] / "configs" / "attention"
    files = [folder / "sol_attn.yaml", *sorted((folder / "sol_attn").glob("*.yaml"))]
    assert len(files) == 4
    for file in files:
        METHOD.config(**read_mapping(str(file)))
    for splits in ("auto", 1, 2, 4):
        assert METHOD.config(kv_splits=splits).kv_splits == splits


def test_blocks_are_cut_in_one_way():
    with pytest.raises(ConfigError, match="`tile_size` of sol_attn must not be given with"):
        METHOD.config(block_size=128, tile_size=[4, 4, 4])


def test_text_inside_the_video_is_refused():
    from multimodal_gen.errors import UsageError

    with pytest.raises(UsageError, match="sol_attn must have text in front"):
        run_sparse(layer(), inputs(TEXTS["text last"]), GRID, text=TextSpan(start=5, length=70))
