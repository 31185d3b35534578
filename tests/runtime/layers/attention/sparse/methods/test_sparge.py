"""SpargeAttn through the layer, against its rule, one block at a time."""

import sys
from dataclasses import replace
from itertools import product
from types import ModuleType

import pytest
import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.sparse import tiles
from multimodal_gen.runtime.layers.attention.sparse.methods import sparge
from tests.helpers.methods import DEFINED
from tests.helpers.sparse import run_sparse, text_places

SPARGE = DEFINED["sparge"]
TEXT = text_places(SPARGE.grid, 70)["text last"]


def cosine(x):
    """Return the mean cosine of all pairs of rows."""
    unit = x / x.norm(dim=-1, keepdim=True)
    return float((unit @ unit.T).mean())


def rule(qkv, q_blocks, k_blocks, *, kept=None, cdf=None, similar=-0.1, token_mask=None):
    """Return what the authors' rule keeps, bool [B, H, Nq, Nk], in float64, row by row."""
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
        scores = means[0] @ means[1].T * SPARGE.scale
        scores[:, ~torch.tensor(alike[1])] = -torch.inf
        for i, row in enumerate(scores.softmax(-1)):
            order, mass, taken = row.argsort(descending=True, stable=True).tolist(), 0.0, []
            for j in order:
                mass += float(row[j])
                if (kept is not None and len(taken) < kept) or (cdf is not None and mass <= cdf):
                    taken.append(j)
            chosen[b, h, i, taken or order[:1]] = True
        chosen[b, h, :, ~torch.tensor(alike[1])] = True
        chosen[b, h, ~torch.tensor(alike[0])] = True
    return chosen


def inputs(text=None, batch=1):
    """Return inputs some of whose blocks are alike inside, and some are not."""
    qkv = SPARGE.inputs(text, batch=batch)
    for tokens in SPARGE.cut(SPARGE.grid, text)[0][::2]:
        for x in qkv[:2]:
            x[:, tokens] = 0.2 * x[:, tokens] + x[:, tokens[:1]]
    return qkv


def check(text=None, *, rules, batch=1, **options):
    """Return how many blocks each block of queries keeps, where a layer keeps what it has to."""
    qkv, defined = inputs(text, batch), replace(SPARGE, choose=rule)
    defined.check(text, qkv=qkv, rule=rules, **options)
    chosen = rule(qkv, *SPARGE.cut(SPARGE.grid, text), **rules)
    return chosen.sum(-1).flatten().tolist()


def test_blocks_that_are_not_alike_inside_are_kept_whole():
    counts = check(TEXT, topk=0.2, simthreshd1=0.7, rules={"kept": 2, "similar": 0.7})
    assert max(counts) == 10 > min(counts) > 2


def test_blocks_may_be_kept_by_their_mass():
    counts = check(topk=..., cdfthreshd=0.7, simthreshd1=0.1, rules={"cdf": 0.7, "similar": 0.1})
    assert len(set(counts)) > 1


def test_masked_tokens_are_in_no_cosine():
    token_mask = torch.arange(2 * 655).view(2, -1) % 7 != 3
    rules, given = {"kept": 3, "similar": 0.7}, {"topk": 0.3, "simthreshd1": 0.7}
    check(TEXT, token_mask=token_mask, batch=2, rules=rules, **given)


def test_some_heads_at_a_time_choose_as_all_do(monkeypatch):
    layer = SPARGE.method.layer(kv_heads=1, topk=0.2, simthreshd1=0.7)
    whole = run_sparse(layer, inputs(TEXT), SPARGE.grid, text=TEXT)
    monkeypatch.setattr(tiles, "_NUMBERS_AT_ONCE", 1)
    assert torch.equal(run_sparse(layer, inputs(TEXT), SPARGE.grid, text=TEXT), whole)


def test_no_row_is_ever_empty():
    # The authors' kernel leaves such rows as they were in memory.
    assert min(check(topk=0.0, rules={"kept": 1})) == 1


def test_a_budget_is_given_once():
    with pytest.raises(ConfigError, match="`topk` of sparge_attn must not be given with `cdfthr"):
        SPARGE.method.config(topk=0.4, cdfthreshd=0.9)
    with pytest.raises(ConfigError, match="`tail` of sparge_attn must be none with `kernel` spas"):
        SPARGE.method.config(tail="pooled", kernel="spas_sage_attn")


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
    attention = SPARGE.method.layer(topk=0.3)
    impl = attention.attn_impl
    monkeypatch.setattr(impl.kernel, "name", "spas_sage_attn", raising=False)
    qkv = SPARGE.method.inputs(SPARGE.grid, batch=1)
    out = run_sparse(attention, qkv, SPARGE.grid)
    rows, columns = (10, 5) if capability == (9, 0) else (5, 10)
    assert masks[0].shape == (1, 2, rows, columns)
    assert set(masks[0].sum(-1).flatten().tolist()) == {max(1, int(0.3 * columns))}
    if capability != (9, 0):
        assert torch.equal(masks[0], rule(qkv, *SPARGE.cut(SPARGE.grid, None), kept=3))
    assert out.shape == qkv.query.shape


def test_a_share_is_warned_of_in_the_blocks_that_the_package_has(monkeypatch, caplog):
    package = ModuleType("spas_sage_attn")
    package.block_sparse_sage2_attn_cuda = lambda q, *_, **__: q
    monkeypatch.setitem(sys.modules, "spas_sage_attn", package)
    monkeypatch.setattr(sparge, "place_of", lambda _: ("cuda", (9, 0)))
    attention = SPARGE.method.layer(topk=0.1)
    monkeypatch.setattr(attention.attn_impl.kernel, "name", "spas_sage_attn", raising=False)
    run_sparse(attention, SPARGE.method.inputs(SPARGE.grid, batch=1), SPARGE.grid)
    assert "has 5 blocks, of which 1 is kept" in caplog.text
    assert "has 10 blocks" not in caplog.text
