"""Parts over some keys, their gradients, and their merging, against attention as a whole."""

import math

import pytest
import torch

from multimodal_gen.runtime.distributed import partial
from multimodal_gen.runtime.distributed.partial import (
    KeyPart,
    Merger,
    part_gradients,
    plain_part,
)
from multimodal_gen.testing.inputs import make_qkv
from multimodal_gen.testing.reference import reference_attention

SCALE = 0.3


@pytest.fixture(params=[1 << 26, 16], ids=["whole", "tiled"])
def tiles(request, monkeypatch):
    monkeypatch.setattr(partial, "_MAX_SCORES", request.param)


def double(*shape, **options):
    return make_qkv(*shape, dtype=torch.float64, **options)


def mask_of(causal, keep, num_queries, num_keys):
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool)
    mask = mask.tril(num_keys - num_queries) if causal else mask
    return mask if keep is None else mask & keep[:, None, None]


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_part_is_attention_by_its_definition(causal, masked, kv_heads):
    q, k, v = double(2, 5, 4, 8, num_keys=7, num_kv_heads=kv_heads)
    keep = torch.arange(7).expand(2, 7) % 3 != 1 if masked else None
    if masked:
        k, v = (x.masked_fill(~keep[:, :, None, None], math.nan) for x in (k, v))
    part = KeyPart(key=k, value=v, causal=causal, keep=keep)
    mask = mask_of(causal, keep, 5, 7)
    want, want_lse = reference_attention(q, k.nan_to_num(), v.nan_to_num(), scale=SCALE, mask=mask)
    out, lse = plain_part(q, part, SCALE)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_the_gradients_of_a_part_are_autograds(causal, masked, kv_heads):
    leaves = double(2, 5, 4, 8, num_keys=7, num_kv_heads=kv_heads, requires_grad=True)
    keep = torch.arange(7).expand(2, 7) % 3 != 1 if masked else None
    out, lse = reference_attention(*leaves, scale=SCALE, mask=mask_of(causal, keep, 5, 7))
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(3))
    want = torch.autograd.grad(out, leaves, grad)
    q, k, v = (x.detach() for x in leaves)
    part = KeyPart(key=k, value=v, causal=causal, keep=keep)
    delta = (grad * out.detach()).sum(-1).transpose(1, 2)
    got = part_gradients(q, part, SCALE, grad, delta, lse.detach())
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_merged_parts_are_the_whole():
    q, k, v = double(2, 5, 4, 8, num_keys=9)
    want, want_lse = reference_attention(q, k, v, scale=SCALE)
    merger = Merger(q, 8)
    for columns in (slice(0, 4), slice(4, 5), slice(5, 9)):
        part = KeyPart(key=k[:, columns], value=v[:, columns])
        merger.add(slice(0, 5), *plain_part(q, part, SCALE))
    out, lse = merger.result()
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


def test_rows_without_keys_stay_zero_through_any_merge():
    q, k, v = double(1, 3, 2, 8, num_keys=4)
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    merger = Merger(q, 8)
    empty = plain_part(q, KeyPart(key=k, value=v, keep=nothing), SCALE)
    merger.add(slice(0, 3), *empty)
    merger.add(slice(0, 2), *plain_part(q[:, :2], KeyPart(key=k, value=v), SCALE))
    merger.add(slice(0, 3), *empty)
    out, lse = merger.result()
    want, want_lse = reference_attention(q[:, :2], k, v, scale=SCALE)
    torch.testing.assert_close(out[:, :2], want)
    torch.testing.assert_close(lse[:, :, :2], want_lse)
    assert not out[:, 2].any()
    assert (lse[:, :, 2] == -math.inf).all()


def test_large_scores_do_not_overflow():
    q, k, v = (x * 100 for x in double(1, 3, 2, 8, num_keys=6))
    merger = Merger(q, 8)
    for columns in (slice(0, 3), slice(3, 6)):
        part = KeyPart(key=k[:, columns], value=v[:, columns])
        merger.add(slice(0, 3), *plain_part(q, part, SCALE))
    want, _ = reference_attention(q, k, v, scale=SCALE)
    torch.testing.assert_close(merger.result()[0], want)


def test_parts_of_low_precision_are_merged_in_fp32():
    q, k, v = make_qkv(1, 16, 2, 16, num_keys=64, dtype=torch.bfloat16)
    merger = Merger(q, 16)
    merger.add(slice(0, 16), *plain_part(q, KeyPart(key=k, value=v), SCALE))
    out, lse = merger.result()
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
