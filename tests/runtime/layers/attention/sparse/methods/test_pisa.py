"""PISA through the layer, against its definition written down token by token."""

import pytest
import torch

from multimodal_gen.runtime.layers.attention.sparse.methods.pisa import PisaConfig
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.reference import reference_attention
from tests.helpers.sparse import (
    SparseMethod,
    best_blocks,
    block_inputs,
    joint_mask,
    pair_mask,
    run_sparse,
    text_places,
    video_tokens,
)
from tests.helpers.tail import pooled_attention

GRID = (5, 9, 13)  # 585 tokens: nine blocks of 64, and one of 9
TEXTS = text_places(GRID, 70)
METHOD = SparseMethod(backend=AttentionBackendEnum.PISA_ATTN, config_cls=PisaConfig, heads=2)
SCALE = METHOD.scale
layer = METHOD.layer


def check(attention, text=None, *, kept, first_order=True, token_mask=None, batch=1):
    video = video_tokens(GRID, text)
    blocks = [video[i : i + 64] for i in range(0, len(video), 64)]
    qkv = block_inputs(METHOD.inputs(GRID, text=text, batch=batch, kv_heads=1), blocks, values=True)
    out = run_sparse(attention, qkv, GRID, text=text, attn_mask=token_mask)
    chosen = best_blocks(qkv.query, qkv.key, blocks, blocks, kept, token_mask=token_mask)
    tokens = qkv.query.shape[1]
    mask = joint_mask(pair_mask(chosen, blocks, blocks, tokens, tokens), video, token_mask)
    want = pooled_attention(
        *qkv, mask, blocks, scale=SCALE, rows=video, token_mask=token_mask, first_order=first_order
    )
    real = slice(None) if token_mask is None else token_mask[:, :, None, None].expand_as(out)
    torch.testing.assert_close(out.double()[real], want[real], rtol=1e-4, atol=1e-5)
    return qkv, out


@pytest.mark.parametrize("where", TEXTS)
def test_the_best_blocks_are_exact_and_the_others_to_first_order(where):
    attention = layer(kv_heads=1, density=0.35)
    check(attention, TEXTS[where], kept=3)
    ((_, density),) = attention.report().entries[-1].densities
    assert 0 < density < 1


def test_without_the_first_order_means_are_what_is_left():
    check(layer(kv_heads=1, first_order=False), kept=1, first_order=False)


def test_masked_tokens_are_in_no_mean_and_in_no_slope():
    token_mask = torch.arange(2 * 655).view(2, -1) % 7 != 3
    token_mask[1, 200:250] = False
    check(
        layer(kv_heads=1, density=0.3), TEXTS["text last"], kept=3, token_mask=token_mask, batch=2
    )


def test_with_every_block_it_is_dense_attention():
    qkv, out = check(layer(kv_heads=1, density=1.0, dense_above=1), kept=10)
    exact, _ = reference_attention(*qkv, scale=SCALE)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)
