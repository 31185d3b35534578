"""FlexAttention's block masks, and plans of blocks, as masks of a layer."""

import pytest
import torch
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    noop_mask,
)

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.layouts import chunk_causal_plan
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.runtime.layers.attention import LocalAttention, USPAttention
from multimodal_gen.runtime.layers.attention.backends import block_masks
from multimodal_gen.runtime.layers.attention.backends.block_masks import forget_plans, plans_of
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.kinds import blocks
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    SelectionScope,
    Source,
)
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.inputs import make_qkv
from tests.helpers.reference import reference_attention

BATCH, TOKENS, HEADS, SIZE, BLOCK = 2, 187, 4, 8, 32
SCALE = SIZE**-0.5
DOCUMENTS = torch.tensor([0] * 50 + [1] * 17 + [2] * 120)
CHUNKS = torch.arange(TOKENS) // 40

# Name -> function of the mask, whether samples and heads differ, number of plans.
MASKS = {
    "chunks": (lambda b, h, q, k: CHUNKS[q] >= CHUNKS[k], False, False, 1),
    "documents": (lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k], False, False, 1),
    "heads": (lambda b, h, q, k: q // (40 + 8 * h) >= k // (40 + 8 * h), False, True, 1),
    "everything": (noop_mask, False, False, 1),
    "nothing": (lambda b, h, q, k: q < 0, False, False, 1),
    "tokens": (lambda b, h, q, k: q >= k, False, False, 2),
    "window": (lambda b, h, q, k: (q - k).abs() < 7, False, False, 1),
    "lengths": (lambda b, h, q, k: (k <= q) & (k < 90 + 50 * b), True, False, 2),
}


def block_mask(name: str) -> BlockMask:
    function, by_sample, by_head, _ = MASKS[name]
    sizes = (BATCH if by_sample else None, HEADS if by_head else None, TOKENS, TOKENS)
    return create_block_mask(function, *sizes, device="cpu", BLOCK_SIZE=BLOCK)


@pytest.fixture
def qkv():
    return make_qkv(BATCH, TOKENS, HEADS, SIZE, num_kv_heads=2, dtype=torch.float64)


@pytest.mark.parametrize("name", MASKS)
def test_a_block_mask_keeps_what_its_function_says(name, qkv):
    mask = block_mask(name)
    plans = plans_of(mask, TOKENS, TOKENS)
    assert len(plans) == MASKS[name][3]
    for plan in plans:
        plan.check()
    layer = LocalAttention(HEADS, SIZE, 2)
    out = layer(*qkv, mask)
    dense = create_mask(MASKS[name][0], BATCH, HEADS, TOKENS, TOKENS, device="cpu")
    want, _ = reference_attention(*qkv, scale=SCALE, mask=dense)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-13 if len(plans) == 1 else 2e-6)
    (detour,) = layer.report().detours
    assert detour.selection.label == "triton_attn (reference)"
    assert detour.selection.reason.endswith(
        "takes no lists of blocks, and the mask is one of blocks"
    )


def test_every_kernel_that_serves_a_mask_is_reported(qkv, monkeypatch):
    kernels, ran = iter(("gluon", "triton")), []
    engine = blocks.block_sparse_attention

    def runs(*args, kernel, **options):
        ran.append(kernel)
        return engine(*args, kernel="reference", **options)

    monkeypatch.setattr(blocks, "kernel_for", lambda *_: next(kernels))
    monkeypatch.setattr(blocks, "block_sparse_attention", runs)
    layer = LocalAttention(HEADS, SIZE, 2)
    layer(*qkv, block_mask("tokens"))
    assert ran == ["gluon", "triton"]
    (detour,) = layer.report().detours
    assert detour.selection.label == "triton_attn (gluon and triton)"


def test_whole_blocks_have_no_bits_and_are_never_evaluated():
    asked = []

    def function(b, h, q, k):
        asked.append(torch.broadcast_shapes(q.shape, k.shape))
        return q >= k

    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, "cpu", BLOCK)
    mask.mask_mod = function
    whole, partial = plans_of(mask, 256, 256)
    assert whole.row_bits is None
    assert int(whole.counts.sum()) == 8 * 7 // 2
    assert partial.row_bits is not None
    # The 8 blocks of the diagonal, once to find where they are cut and once for the bits.
    pairs = [shape.numel() for shape in asked]
    assert sum(pairs) == 2 * 8 * BLOCK**2


def test_chunks_become_lists_of_whole_chunks():
    (plan,) = plans_of(block_mask("chunks"), TOKENS, TOKENS)
    assert plan.row_bits is None
    assert plan.kv.lengths.flatten().tolist() == [40, 40, 40, 40, 27]
    assert plan.counts.flatten().tolist() == [1, 2, 3, 4, 5]


def test_plans_are_kept_with_the_mask_until_they_are_forgotten(qkv):
    lengths = torch.tensor([50, 120])
    mask = create_block_mask(
        lambda b, h, q, k: k < lengths[b], BATCH, None, TOKENS, TOKENS, device="cpu"
    )
    layer = LocalAttention(HEADS, SIZE, 2)
    first = layer(*qkv, mask)
    plans = plans_of(mask, TOKENS, TOKENS)
    assert plans_of(mask, TOKENS, TOKENS) is plans
    lengths[0] = 60
    assert torch.equal(layer(*qkv, mask), first)
    forget_plans(mask)
    mask = mask.to("cpu")
    out = layer(*qkv, mask)
    keep = (torch.arange(TOKENS) < lengths[:, None])[:, None, None]
    torch.testing.assert_close(out, reference_attention(*qkv, scale=SCALE, mask=keep)[0])


@pytest.mark.parametrize("name", ["chunks", "tokens"])
def test_gradients_flow_through_block_masks(name):
    qkv = make_qkv(1, 64, 2, SIZE, dtype=torch.float64, requires_grad=True)
    function = MASKS[name][0]
    mask = create_block_mask(function, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    out = LocalAttention(2, SIZE)(*qkv, mask)
    dense = create_mask(function, 1, 1, 64, 64, device="cpu")
    want, _ = reference_attention(*qkv, scale=SCALE, mask=dense)
    upstream = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(0))
    for mine, theirs in zip(
        torch.autograd.grad(out, qkv, upstream),
        torch.autograd.grad(want, qkv, upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_a_plan_is_a_mask_too(qkv):
    plan = chunk_causal_plan([40, 40, 40, 40, 27], window=2, sink=1)
    k, q = CHUNKS[None, :], CHUNKS[:, None]
    keep = (k <= q) & ((k > q - 2) | (k < 1))
    layer = USPAttention(HEADS, SIZE, 2)
    want, _ = reference_attention(*qkv, scale=SCALE, mask=keep)
    torch.testing.assert_close(layer(*qkv, plan), want, rtol=0, atol=1e-13)
    logits = torch.zeros(HEADS)
    _, lse = reference_attention(*qkv, scale=SCALE, mask=keep)
    weighed = want * torch.sigmoid(lse).transpose(1, 2).unsqueeze(-1)
    torch.testing.assert_close(layer(*qkv, plan, sink_logits=logits), weighed, rtol=0, atol=1e-6)


def test_masks_of_other_lengths_and_too_many_bits_are_refused(qkv, monkeypatch):
    layer = LocalAttention(HEADS, SIZE, 2)
    mask = block_mask("tokens")
    with pytest.raises(
        UsageError, match=r"BlockMask for \[B\|1, Sq, Sk\] = \[2, 187, 186\], got one for"
    ):
        layer(qkv.query, qkv.key[:, 1:], qkv.value[:, 1:], mask)
    monkeypatch.setattr(block_masks, "_MOST_BITS", 1 << 10)
    with pytest.raises(UsageError, match="attn_mask must tell apart fewer runs of keys: 1 x 1 x"):
        layer(*qkv, mask)
    with pytest.raises(UsageError, match="a call with a mask of blocks must come without causal"):
        LocalAttention(HEADS, SIZE, 2, causal=True)(*qkv, mask)


def test_a_plan_is_cut_to_the_heads_of_a_call(qkv):
    (plan,) = plans_of(block_mask("heads"), TOKENS, TOKENS)
    assert isinstance(plan, BlockPlan)
    dense = create_mask(MASKS["heads"][0], BATCH, HEADS, TOKENS, TOKENS, device="cpu")
    from multimodal_gen.runtime.layers.attention.kinds.blocks import _of_heads

    some = qkv.query[:, :, 2:], qkv.key[:, :, 1:], qkv.value[:, :, 1:]
    half = _of_heads(plan, AttentionCall(*some, first_head=2)).check()
    out = LocalAttention(2, SIZE, 1)(*some, half)
    want, _ = reference_attention(*qkv, scale=SCALE, mask=dense)
    torch.testing.assert_close(out, want[:, :, 2:], rtol=0, atol=1e-13)
    assert _of_heads(plan, AttentionCall(*qkv)) is plan


def test_flex_attention_runs_its_own_masks_where_it_is_asked_for(qkv):
    asked = BackendPreference(source=Source.SETTINGS, backend=AttentionBackendEnum.FLEX_ATTN)
    scope = SelectionScope(default=asked, strict=True)
    layer = LocalAttention(HEADS, SIZE, 2, scope=scope, compute_dtype=torch.float32)
    qkv = [x.float() for x in qkv]
    logits = torch.zeros(HEADS)
    outs = [layer(*qkv, block_mask("tokens"), sink_logits=sink) for sink in (None, logits)]
    dense = create_mask(MASKS["tokens"][0], 1, 1, TOKENS, TOKENS, device="cpu")
    want, lse = reference_attention(*qkv, scale=SCALE, mask=dense)
    weighed = want * torch.sigmoid(lse).transpose(1, 2).unsqueeze(-1)
    for out, expected in zip(outs, (want, weighed), strict=True):
        torch.testing.assert_close(out, expected.float(), rtol=0, atol=1e-5)
    report = layer.report()
    assert [(e.selection.label, e.calls) for e in report.entries] == [("flex_attn (unfused)", 2)]
    assert report.detours == ()


@pytest.mark.parametrize("heads", [2, 2 * HEADS])
def test_masks_of_other_heads_are_refused(qkv, heads):
    mask = create_block_mask(
        lambda b, h, q, k: q >= k + h, None, heads, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=BLOCK
    )
    layer = LocalAttention(HEADS, SIZE, 2)
    with pytest.raises(UsageError, match=f"of one head or of all {HEADS}, got one of {heads}"):
        layer(*qkv, mask)


@pytest.mark.parametrize("backend", ["flex_attn", "torch_sdpa"])
@pytest.mark.parametrize(
    "sizes", [(None, TOKENS + 5, TOKENS), (None, TOKENS, 64), (3, *[TOKENS] * 2)]
)
def test_a_mask_for_other_samples_or_lengths_is_refused(backend, sizes, qkv):
    batch, *lengths = sizes
    mask = create_block_mask(noop_mask, batch, None, *lengths, device="cpu", BLOCK_SIZE=BLOCK)
    layer = LocalAttention(HEADS, SIZE, num_kv_heads=2, default_attention_backend=backend)
    with pytest.raises(UsageError, match=r"attn_mask must be a BlockMask for \[B\|1, Sq, Sk\] = "):
        layer(*qkv, mask)
