"""Sub-block sparse attention through the layer, against its definition, one row at a time."""

from itertools import product

import pytest
import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.sparse.methods.sol import SolConfig
from multimodal_gen.runtime.layers.attention.sparse.methods.subblock import (
    SubblockConfig,
    kept_blocks,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.vsa import VideoSparseConfig
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.reference import reference_attention
from tests.helpers.sparse import (
    SparseMethod,
    block_inputs,
    joint_mask,
    pair_mask,
    run_sparse,
    text_places,
    tokens_of_tiles,
    video_tokens,
)
from tests.helpers.tail import pooled_attention

GRID = (8, 9, 13)  # 936 tokens: 14 blocks of 64, and one of 40
TEXTS = text_places(GRID, 70)
METHOD = SparseMethod(
    backend=AttentionBackendEnum.SUBBLOCK_SPARSE_ATTN,
    config_cls=SubblockConfig,
    given={"skip_first_steps": 0, "min_seq_len": 0, "dense_above": 1.0},
    heads=2,
)
SCALE, KEPT = METHOD.scale, 8
layer = METHOD.layer


def blocks_of(text):
    video = video_tokens(GRID, text)
    return [video[i : i + 64] for i in range(0, len(video), 64)]


def inputs(text=None, **options):
    qkv = METHOD.inputs(GRID, text=text, **options)
    video = video_tokens(GRID, text)
    return block_inputs(qkv, [video[i : i + 16] for i in range(0, len(video), 16)], values=True)


def cell_means(x, blocks, cells, kept):
    """Return the means of each block's cells that hold tokens."""
    found = []
    for tokens in blocks:
        parts = [tokens[i : i + 64 // cells] for i in range(0, 64, 64 // cells)]
        parts = [[t for t in part if kept is None or kept[t]] for part in parts]
        found.append([x[part].double().mean(0).to(x.dtype).double() for part in parts if part])
    return found


def best(qkv, blocks, n_q=4, n_k=4, token_mask=None):
    """Return which block keeps which, bool [B, H, N, N]."""
    batch, _, heads, _ = qkv.query.shape
    chosen = torch.zeros(batch, heads, len(blocks), len(blocks), dtype=torch.bool)
    for b, h in product(range(batch), range(heads)):
        kept = None if token_mask is None else token_mask[b]
        query = cell_means(qkv.query[b, :, h], blocks, n_q, kept)
        key = cell_means(qkv.key[b, :, h * qkv.key.shape[2] // heads], blocks, n_k, kept)
        for i, rows in enumerate(query):
            scores = [
                torch.logsumexp(torch.stack([SCALE * (q @ k) for q in rows for k in columns]), 0)
                if rows and columns
                else -torch.inf
                for columns in key
            ]
            order = sorted(range(len(scores)), key=lambda j, s=scores: -float(s[j]))
            chosen[b, h, i, order[:KEPT]] = True
    return chosen


def check(attention, qkv, text=None, *, chosen, token_mask=None, tail=False):
    out = run_sparse(attention, qkv, GRID, text=text, attn_mask=token_mask)
    video, tokens, blocks = video_tokens(GRID, text), qkv.query.shape[1], blocks_of(text)
    mask = joint_mask(pair_mask(chosen, blocks, blocks, tokens, tokens), video, token_mask)
    if tail:
        want = pooled_attention(*qkv, mask, blocks, scale=SCALE, rows=video, token_mask=token_mask)
    else:
        want, _ = reference_attention(*qkv, scale=SCALE, mask=mask)
    real = slice(None) if token_mask is None else token_mask[:, :, None, None].expand_as(out)
    torch.testing.assert_close(out.double()[real], want[real], rtol=1e-4, atol=1e-5)


@pytest.mark.slow_cases("text last")
@pytest.mark.parametrize("where", TEXTS)
def test_blocks_with_the_best_cells_are_kept_and_text_is(where):
    text = TEXTS[where]
    qkv = inputs(text, batch=1, kv_heads=1)
    attention = layer(kv_heads=1, sparsity=0.5)
    check(attention, qkv, text, chosen=best(qkv, blocks_of(text)))
    ((_, density),) = attention.report().entries[-1].densities
    assert density < 1


@pytest.mark.slow_cases("cells1")
@pytest.mark.parametrize("cells", [(1, 1), (8, 2), (2, 8)])
def test_cells_may_be_of_any_number(cells):
    qkv = inputs(batch=1)
    chosen = best(qkv, blocks_of(None), *cells)
    check(layer(sparsity=0.5, n_q=cells[0], n_k=cells[1]), qkv, chosen=chosen)


def test_masked_tokens_are_in_no_cell():
    text = TEXTS["text last"]
    qkv = inputs(text)
    token_mask = torch.arange(2 * qkv.key.shape[1]).view(2, -1) % 7 != 3
    token_mask[1, 200:420] = False
    chosen = best(qkv, blocks_of(text), token_mask=token_mask)
    check(layer(sparsity=0.5), qkv, text, chosen=chosen, token_mask=token_mask)


def test_what_is_not_kept_may_count_by_its_means():
    qkv = inputs(batch=1)
    check(layer(sparsity=0.5, tail="pooled"), qkv, chosen=best(qkv, blocks_of(None)), tail=True)


def test_the_number_of_blocks_is_rounded_up_to_eight():
    assert kept_blocks(0.75, 590) == 152
    assert kept_blocks(0.5, 15) == 8
    assert kept_blocks(0.0, 15) == 15
    assert kept_blocks(1.0, 590) == 8


def test_short_sequences_are_dense_and_the_report_says_so():
    attention, qkv = layer(min_seq_len=937), inputs(batch=1)
    out = run_sparse(attention, qkv, GRID)
    want, _ = reference_attention(*qkv, scale=SCALE)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    (detour,) = attention.report().detours
    assert "(`min_seq_len`)" in detour.selection.reason
    query = qkv[0].clone().requires_grad_()  # and so they are in training
    trained = run_sparse(attention, (query, *qkv[1:]), GRID)
    torch.testing.assert_close(trained.detach(), out)


def method(name, config_cls, **given):
    return SparseMethod(
        backend=name,
        config_cls=config_cls,
        given={"router": "subblock", "dense_above": 1.0, **given},
        heads=2,
    )


VSA = method(AttentionBackendEnum.VIDEO_SPARSE_ATTN, VideoSparseConfig, topk=KEPT)
SOL = method(
    AttentionBackendEnum.SOL_ATTN,
    SolConfig,
    topk_ratio=KEPT / 15,
    neighbours=0,
    dense_steps=None,
    dense_layers=None,
)


@pytest.mark.parametrize("where", ["no text", "text first"])
@pytest.mark.parametrize("router_of", [VSA, SOL], ids=lambda m: str(m.backend))
def test_cells_rank_the_tiles_of_vsa_and_the_blocks_of_sol(router_of, where):
    text = TEXTS[where]
    qkv, tokens = inputs(text, batch=1), 936 + (text.length if text else 0)
    blocks = tokens_of_tiles(GRID, (4, 4, 4), text) if router_of is VSA else blocks_of(text)
    chosen = best(qkv, blocks)
    if router_of is SOL:
        chosen |= torch.eye(len(blocks), dtype=torch.bool)
    tail = "pooled" if router_of is SOL else "none"
    attention = router_of.layer(tail=tail)
    out = run_sparse(attention, qkv, GRID, text=text)
    video = video_tokens(GRID, text)
    mask = joint_mask(pair_mask(chosen, blocks, blocks, tokens, tokens), video)
    if tail == "pooled":
        want = pooled_attention(*qkv, mask, blocks, scale=SCALE, rows=video)
    else:
        want, _ = reference_attention(*qkv, scale=SCALE, mask=mask)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    assert attention.attn_impl.limits.ring is None


def test_cells_rank_nothing_where_nothing_is_ranked():
    with pytest.raises(ConfigError, match="`router` of sol_attn must be mean where no `topk_ratio"):
        SOL.config(topk_ratio=None)
    with pytest.raises(
        ConfigError, match="`router` of video_sparse_attn must be mean with kernel v"
    ):
        VSA.config(kernel="vsa")
