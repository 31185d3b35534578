"""Parts over some keys, their gradients, and their merging, against attention as a whole."""

import math

import pytest
import torch

from multimodal_gen.runtime.distributed import ring as ring_module
from multimodal_gen.runtime.distributed.groups import Group, parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.distributed.ring import (
    KeyPart,
    PartMerger,
    RingCall,
    part_attention,
    part_attention_backward,
    ring_attention,
)
from tests.helpers.inputs import make_qkv
from tests.helpers.reference import reference_attention

PART_SCALE = 0.3


@pytest.fixture(params=[1 << 26, 16], ids=["whole", "tiled"])
def tiles(request, monkeypatch):
    monkeypatch.setattr(ring_module, "_MAX_SCORES", request.param)


def double(*shape, **options):
    return make_qkv(*shape, dtype=torch.float64, **options)


def mask_of(causal, token_mask, num_queries, num_keys):
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool)
    mask = mask.tril(num_keys - num_queries) if causal else mask
    return mask if token_mask is None else mask & token_mask[:, None, None]


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_part_is_attention_by_its_definition(causal, masked, kv_heads):
    q, k, v = double(2, 5, 4, 8, num_keys=7, num_kv_heads=kv_heads)
    token_mask = torch.arange(7).expand(2, 7) % 3 != 1 if masked else None
    if masked:
        k, v = (x.masked_fill(~token_mask[:, :, None, None], math.nan) for x in (k, v))
    part = KeyPart(key=k, value=v, causal=causal, mask=token_mask)
    mask = mask_of(causal, token_mask, 5, 7)
    want, want_lse = reference_attention(
        q, k.nan_to_num(), v.nan_to_num(), scale=PART_SCALE, mask=mask
    )
    out, lse = part_attention(q, part, PART_SCALE)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_the_gradients_of_a_part_are_autograds(causal, masked, kv_heads):
    leaves = double(2, 5, 4, 8, num_keys=7, num_kv_heads=kv_heads, requires_grad=True)
    token_mask = torch.arange(7).expand(2, 7) % 3 != 1 if masked else None
    out, lse = reference_attention(
        *leaves, scale=PART_SCALE, mask=mask_of(causal, token_mask, 5, 7)
    )
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(3))
    want = torch.autograd.grad(out, leaves, grad)
    q, k, v = (x.detach() for x in leaves)
    part = KeyPart(key=k, value=v, causal=causal, mask=token_mask)
    delta = (grad * out.detach()).sum(-1).transpose(1, 2)
    got = part_attention_backward(q, part, PART_SCALE, grad, delta, lse.detach())
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_merged_parts_are_the_whole():
    q, k, v = double(2, 5, 4, 8, num_keys=9)
    want, want_lse = reference_attention(q, k, v, scale=PART_SCALE)
    merger = PartMerger(q, 8)
    for columns in (slice(0, 4), slice(4, 5), slice(5, 9)):
        part = KeyPart(key=k[:, columns], value=v[:, columns])
        merger.add(slice(0, 5), *part_attention(q, part, PART_SCALE))
    out, lse = merger.result()
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


def test_rows_without_keys_stay_zero_through_any_merge():
    q, k, v = double(1, 3, 2, 8, num_keys=4)
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    merger = PartMerger(q, 8)
    empty = part_attention(q, KeyPart(key=k, value=v, mask=nothing), PART_SCALE)
    merger.add(slice(0, 3), *empty)
    merger.add(slice(0, 2), *part_attention(q[:, :2], KeyPart(key=k, value=v), PART_SCALE))
    merger.add(slice(0, 3), *empty)
    out, lse = merger.result()
    want, want_lse = reference_attention(q[:, :2], k, v, scale=PART_SCALE)
    torch.testing.assert_close(out[:, :2], want)
    torch.testing.assert_close(lse[:, :, :2], want_lse)
    assert not out[:, 2].any()
    assert (lse[:, :, 2] == -math.inf).all()


def test_large_scores_do_not_overflow():
    q, k, v = (x * 100 for x in double(1, 3, 2, 8, num_keys=6))
    merger = PartMerger(q, 8)
    for columns in (slice(0, 3), slice(3, 6)):
        part = KeyPart(key=k[:, columns], value=v[:, columns])
        merger.add(slice(0, 3), *part_attention(q, part, PART_SCALE))
    want, _ = reference_attention(q, k, v, scale=PART_SCALE)
    torch.testing.assert_close(merger.result()[0], want)


def test_parts_of_low_precision_are_merged_in_fp32():
    q, k, v = make_qkv(1, 16, 2, 16, num_keys=64, dtype=torch.bfloat16)
    merger = PartMerger(q, 16)
    merger.add(slice(0, 16), *part_attention(q, KeyPart(key=k, value=v), PART_SCALE))
    out, lse = merger.result()
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


SCALE = 0.25
# (prefix, suffix, keys in front without queries)
TEXTS = [(0, 0, 0), (3, 0, 0), (0, 2, 0), (0, 0, 4)]


def attend(query, part):
    return part_attention(query, part, SCALE)


def own(x, lengths, rank, before=0):
    start = before + sum(lengths[:rank])
    return x[:, start : start + lengths[rank]]


def check_ring(lengths, text, causal, masked, kv_heads):
    """Compare this rank's rows and gradients with those of the whole sequence."""
    prefix, suffix, in_front = text
    group = parallel_groups().ring
    rank, total = group.index, sum(lengths)
    shared = prefix + suffix + in_front
    options = {"num_kv_heads": kv_heads, "dtype": torch.float64}
    q, k, v = make_qkv(2, prefix + total + suffix, 4, 8, num_keys=total + shared, **options)
    token_mask = torch.ones(2, total + shared, dtype=torch.bool)
    if masked:
        token_mask = torch.arange(2 * (total + shared)).view(2, -1) % 4 != 2
        token_mask[1, -total // 2 :] = False
    weight = torch.randn(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(5))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want, _ = reference_attention(
        *leaves, scale=SCALE, causal=causal, mask=token_mask[:, None, None] if masked else None
    )
    mine_first = prefix or in_front

    def rows(x):
        image = own(x, lengths, rank, prefix)
        return torch.cat((x[:, :prefix], image, x[:, x.shape[1] - suffix :]), dim=1)

    def keys_of_all(x):
        return x[:, total:] if suffix else x[:, :shared]

    local = [rows(q), *(own(x, lengths, rank, mine_first) for x in (k, v))]
    shares = [keys_of_all(x) if shared else None for x in (k, v)]
    inputs = [None if x is None else x.clone().requires_grad_() for x in (*local, *shares)]
    call = RingCall(
        group=group,
        lengths=tuple(lengths),
        scale=SCALE,
        causal=causal,
        prefix=prefix,
        suffix=suffix,
        mask=token_mask[:, mine_first : mine_first + total] if masked else None,
        shared_mask=keys_of_all(token_mask) if masked and shared else None,
    )
    out = ring_attention(*inputs, attend, call)
    torch.testing.assert_close(out, rows(want))
    # Every copy of a text row is weighed by 1 / ranks, so that the copies add up to the whole.
    share = torch.full((1, out.shape[1], 1, 1), 1.0 / group.size, dtype=q.dtype)
    share[:, prefix : prefix + lengths[rank]] = 1.0
    given = [x for x in inputs if x is not None]
    grads = torch.autograd.grad(out, given, rows(weight) * share)
    whole = torch.autograd.grad(want, leaves, weight)
    image = slice(prefix, prefix + lengths[rank])
    torch.testing.assert_close(grads[0][:, image], rows(whole[0])[:, image])
    for got, theirs in zip(grads[1:3], whole[1:], strict=True):
        torch.testing.assert_close(got, own(theirs, lengths, rank, mine_first))
    for got, theirs in zip(grads[3:], whole[1:] if shared else (), strict=True):
        torch.testing.assert_close(summed(got, group), keys_of_all(theirs))
    text_rows = torch.cat((grads[0][:, : image.start], grads[0][:, image.stop :]), dim=1)
    theirs = torch.cat((whole[0][:, :prefix], whole[0][:, prefix + total :]), dim=1)
    torch.testing.assert_close(summed(text_rows, group), theirs)


def summed(x, group):
    total = x.clone()
    if group.handle is not None:
        torch.distributed.all_reduce(total, group=group.handle)
    return total


def check_dtype(dtype):
    group = parallel_groups().ring
    q, k, v = make_qkv(1, 8, 2, 8, dtype=dtype)
    lengths = (4,) * (8 // 4)
    call = RingCall(group=group, lengths=lengths, scale=SCALE)
    local = [own(x, lengths, group.index) for x in (q, k, v)]
    with torch.inference_mode():
        out = ring_attention(*local, None, None, attend, call)
    want, _ = reference_attention(q, k, v, scale=SCALE)
    assert out.dtype is dtype
    limit = 2 * torch.finfo(dtype).eps * v.abs().max()
    assert (out.double() - own(want, lengths, group.index)).abs().max() <= limit


@pytest.mark.parametrize("masked", [False, True], ids=["all-valid", "padded"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("text", TEXTS, ids=str)
def test_two_ranks_in_a_ring_are_one(two_ranks, text, causal, masked):
    two_ranks.run(Mesh(ring=2), check_ring, (3, 5), text, causal, masked, 2)


@pytest.mark.parametrize("text", TEXTS, ids=str)
@pytest.mark.parametrize("lengths", [(2, 2, 2, 2), (3, 0, 1, 2)], ids=str)
def test_four_ranks_in_a_ring_are_one(four_ranks, lengths, text):
    four_ranks.run(Mesh(ring=4), check_ring, lengths, text, False, True, 4)
    four_ranks.run(Mesh(ring=4), check_ring, lengths, text, True, False, 1)


def test_two_rings_of_two_do_not_disturb_each_other(four_ranks):
    four_ranks.run(Mesh(ulysses=2, ring=2), check_ring, (3, 2), (1, 0, 0), False, True, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_output_has_the_dtype_of_the_query(two_ranks, dtype):
    two_ranks.run(Mesh(ring=2), check_dtype, dtype)


@pytest.mark.parametrize("causal", [False, True])
def test_a_ring_of_one_is_attention(causal):
    group = Group(ranks=(0,), index=0, handle=None)
    q, k, v = make_qkv(2, 5, 2, 8, dtype=torch.float64, requires_grad=True)
    call = RingCall(group=group, lengths=(5,), scale=SCALE, causal=causal)
    out = ring_attention(q, k, v, None, None, attend, call)
    want, _ = reference_attention(q, k, v, scale=SCALE, causal=causal)
    torch.testing.assert_close(out, want)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    for got, theirs in zip(grads, torch.autograd.grad(want.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(got, theirs)
