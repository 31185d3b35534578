"""SpargeAttn through the layer, against its rule, one block at a time."""

import sys
from itertools import product
from types import ModuleType

import pytest
import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.sparse.executors import local
from multimodal_gen.runtime.layers.attention.sparse.methods import sparge
from multimodal_gen.runtime.layers.attention.sparse.methods.sparge import SpargeConfig
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.reference import reference_attention
from tests.helpers.sparse import (
    SparseMethod,
    block_inputs,
    joint_mask,
    pair_mask,
    run_sparse,
    text_places,
    video_tokens,
)
from tests.helpers.tail import pooled_attention

GRID = (5, 9, 13)  # 585 tokens: four blocks of 128 queries and one of 73, ten blocks of keys
TEXTS = text_places(GRID, 70)
METHOD = SparseMethod(
    backend=AttentionBackendEnum.SPARGE_ATTN,
    config_cls=SpargeConfig,
    given={"dense_above": 1.0},
    heads=2,
)
SCALE, layer = METHOD.scale, METHOD.layer


def cut(text, size):
    video = video_tokens(GRID, text)
    return [video[i : i + size] for i in range(0, len(video), size)]


def cosine(x):
    """Return the mean cosine of all pairs of rows."""
    unit = x / x.norm(dim=-1, keepdim=True)
    return float((unit @ unit.T).mean())


def rule(qkv, text, *, topk=None, cdf=None, similar=-0.1, token_mask=None):
    """Return what the authors' rule keeps, bool [B, H, Nq, Nk], in float64, row by row."""
    q_blocks, k_blocks = cut(text, 128), cut(text, 64)
    batch, heads = qkv.query.shape[0], qkv.query.shape[2]
    chosen = torch.zeros(batch, heads, len(q_blocks), len(k_blocks), dtype=torch.bool)
    for b, h in product(range(batch), range(heads)):
        query, key = qkv.query[b, :, h].double(), qkv.key[b, :, h * qkv.key.shape[2] // heads]
        key = key.double()
        sides = [
            [[t for t in tokens if token_mask is None or token_mask[b, t]] for tokens in blocks]
            for blocks in (q_blocks, k_blocks)
        ]
        key = key - key[[t for tokens in sides[1] for t in tokens]].mean(0)
        alike = [
            [cosine(x[t]) > similar for t in s] for x, s in zip((query, key), sides, strict=True)
        ]
        means = [
            torch.stack([x[t].mean(0) for t in s]) for x, s in zip((query, key), sides, strict=True)
        ]
        scores = means[0] @ means[1].T * SCALE
        scores[:, ~torch.tensor(alike[1])] = -torch.inf
        for i, row in enumerate(scores.softmax(-1)):
            order, mass, taken = row.argsort(descending=True, stable=True).tolist(), 0.0, []
            for j in order:
                mass += float(row[j])
                if (topk is not None and len(taken) < topk) or (cdf is not None and mass <= cdf):
                    taken.append(j)
            chosen[b, h, i, taken or order[:1]] = True
        chosen[b, h, :, ~torch.tensor(alike[1])] = True
        chosen[b, h, ~torch.tensor(alike[0])] = True
    return chosen


def inputs(text=None, batch=1):
    """Return inputs some of whose blocks are alike inside, and some are not."""
    qkv = block_inputs(METHOD.inputs(GRID, text=text, batch=batch, kv_heads=1), cut(text, 64))
    for tokens in cut(text, 128)[::2]:
        for x in qkv[:2]:
            x[:, tokens] = 0.2 * x[:, tokens] + x[:, tokens[:1]]
    return qkv


def check(attention, text=None, *, token_mask=None, batch=1, tail=False, **rules):
    qkv = inputs(text, batch)
    out = run_sparse(attention, qkv, GRID, text=text, attn_mask=token_mask)
    chosen, tokens = rule(qkv, text, token_mask=token_mask, **rules), qkv.query.shape[1]
    mask = pair_mask(chosen, cut(text, 128), cut(text, 64), tokens, tokens)
    mask = joint_mask(mask, video_tokens(GRID, text), token_mask)
    if tail:
        rows = video_tokens(GRID, text)
        want = pooled_attention(
            *qkv, mask, cut(text, 64), scale=SCALE, rows=rows, token_mask=token_mask
        )
    else:
        want, _ = reference_attention(*qkv, scale=SCALE, mask=mask)
    real = slice(None) if token_mask is None else token_mask[:, :, None, None].expand_as(out)
    torch.testing.assert_close(out.double()[real], want[real], rtol=1e-4, atol=1e-5)
    return chosen


@pytest.mark.parametrize("where", TEXTS)
def test_the_best_share_of_the_blocks_is_kept_and_text_is(where):
    chosen = check(layer(kv_heads=1, topk=0.35), TEXTS[where], topk=3)
    assert int(chosen.sum(-1).max()) == 3


def test_blocks_that_are_not_alike_inside_are_kept_whole():
    attention = layer(kv_heads=1, topk=0.2, simthreshd1=0.7)
    chosen = check(attention, TEXTS["text last"], topk=2, similar=0.7)
    counts = chosen.sum(-1).flatten().tolist()
    assert max(counts) == 10 > min(counts) > 2


def test_blocks_may_be_kept_by_their_mass():
    chosen = check(layer(kv_heads=1, cdfthreshd=0.7, simthreshd1=0.1), cdf=0.7, similar=0.1)
    assert len(set(chosen.sum(-1).flatten().tolist())) > 1


def test_masked_tokens_are_in_no_mean_and_in_no_cosine():
    token_mask = torch.arange(2 * 655).view(2, -1) % 7 != 3
    attention = layer(kv_heads=1, topk=0.3, simthreshd1=0.7)
    check(attention, TEXTS["text last"], topk=3, similar=0.7, token_mask=token_mask, batch=2)


def test_some_heads_at_a_time_choose_as_all_do(monkeypatch):
    attention, text = layer(kv_heads=1, topk=0.2, simthreshd1=0.7), TEXTS["text last"]
    whole = run_sparse(attention, inputs(text), GRID, text=text)
    monkeypatch.setattr(local, "_TOKENS_AT_ONCE", 1)
    monkeypatch.setattr(sparge, "_SCORES_AT_ONCE", 1)
    assert torch.equal(run_sparse(attention, inputs(text), GRID, text=text), whole)


def test_what_is_not_kept_may_count_by_its_means():
    check(layer(kv_heads=1, topk=0.3, tail="pooled"), topk=3, tail=True)


def test_no_row_is_ever_empty():
    # The authors' kernel leaves such rows as they were in memory.
    chosen = check(layer(kv_heads=1, topk=0.0), topk=1)
    assert int(chosen.sum(-1).min()) == 1


def test_a_budget_is_given_once():
    with pytest.raises(ConfigError, match="`topk` of sparge_attn must not be given with `cdfthr"):
        METHOD.config(topk=0.4, cdfthreshd=0.9)
    with pytest.raises(ConfigError, match="`tail` of sparge_attn must be none with `kernel` spas"):
        METHOD.config(tail="pooled", kernel="spas_sage_attn")


@pytest.mark.parametrize("capability", [(9, 0), (8, 9)])
def test_the_package_gets_a_map_of_the_blocks_its_kernel_has(monkeypatch, capability):
    package, masks = ModuleType("spas_sage_attn"), []

    def stand_in(q, k, v, mask_id, dropout_p=0.0, scale=None, pvthreshd=50, tensor_layout="HND"):
        assert (tensor_layout, pvthreshd) == ("HND", 1e6)
        masks.append(mask_id.bool())
        rows, columns = (capability == (9, 0) and (64, 128)) or (128, 64)
        wide = mask_id.bool().repeat_interleave(rows, 2).repeat_interleave(columns, 3)
        scores = q.double() @ k.double().mT * scale
        wide = wide[:, :, : scores.shape[2], : scores.shape[3]]
        return (scores.masked_fill(~wide, -torch.inf).softmax(-1) @ v.double()).to(q.dtype)

    package.block_sparse_sage2_attn_cuda = stand_in
    monkeypatch.setitem(sys.modules, "spas_sage_attn", package)
    monkeypatch.setattr(sparge, "place_of", lambda _: ("cuda", capability))
    attention = layer(topk=0.3)
    impl = attention.attn_impl
    monkeypatch.setattr(impl.kernel, "name", "spas_sage_attn", raising=False)
    qkv = METHOD.inputs(GRID, batch=1)
    out = run_sparse(attention, qkv, GRID)
    rows, columns = (10, 5) if capability == (9, 0) else (5, 10)
    assert masks[0].shape == (1, 2, rows, columns)
    assert set(masks[0].sum(-1).flatten().tolist()) == {max(1, int(0.3 * columns))}
    if capability != (9, 0):
        assert torch.equal(masks[0], rule(qkv, None, topk=3))
    assert out.shape == qkv.query.shape


def test_a_share_is_warned_of_in_the_blocks_that_the_package_has(monkeypatch, caplog):
    package = ModuleType("spas_sage_attn")
    package.block_sparse_sage2_attn_cuda = lambda q, *_, **__: q
    monkeypatch.setitem(sys.modules, "spas_sage_attn", package)
    monkeypatch.setattr(sparge, "place_of", lambda _: ("cuda", (9, 0)))
    attention = layer(topk=0.1)
    monkeypatch.setattr(attention.attn_impl.kernel, "name", "spas_sage_attn", raising=False)
    run_sparse(attention, METHOD.inputs(GRID, batch=1), GRID)
    assert "has 5 blocks, of which 1 is kept" in caplog.text
    assert "has 10 blocks" not in caplog.text
