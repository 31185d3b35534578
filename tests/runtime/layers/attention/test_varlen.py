import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention.masks import (
    build_varlen_mask_meta,
    build_varlen_mask_meta_from_lengths,
    build_varlen_mask_meta_from_ranges,
)

MASK = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]])


def test_kept_tokens_come_first_sample_by_sample():
    meta = build_varlen_mask_meta(MASK)
    assert meta.cu_seqlens.tolist() == [0, 3, 3, 5]
    assert meta.cu_seqlens.dtype is torch.int32
    assert meta.indices[:5].tolist() == [0, 2, 3, 9, 11]
    assert sorted(meta.indices.tolist()) == list(range(12))
    assert meta.inv_indices[meta.indices].tolist() == list(range(12))
    assert meta.max_seqlen == 4


def test_unpacking_restores_kept_tokens_and_zeroes_the_others():
    x = torch.randn(3, 4, 2, 5)
    meta = build_varlen_mask_meta(MASK)
    packed = meta.pack(x)
    assert torch.equal(packed[:3], x[0, [0, 2, 3]])
    packed[5:] = torch.nan
    expected = x * MASK[:, :, None, None]
    assert torch.equal(meta.unpack(packed), expected)


def test_lengths_and_ranges_describe_the_same_packing():
    by_length = build_varlen_mask_meta_from_lengths([2, 0, 4], 4, "cpu")
    by_range = build_varlen_mask_meta_from_ranges([[(0, 1), (1, 2)], [], [(0, 4)]], 4, "cpu")
    for name in ("mask", "indices", "inv_indices", "cu_seqlens"):
        assert torch.equal(getattr(by_length, name), getattr(by_range, name))
    assert by_length.cu_seqlens.tolist() == [0, 2, 2, 6]


@pytest.mark.parametrize("bad", [(-1, 2), (3, 2), (0, 5)])
def test_a_range_outside_the_sequence_is_refused(bad):
    start, end = bad
    message = rf"0 <= start <= end <= 4, got \({start}, {end}\) for sample 1"
    with pytest.raises(UsageError, match=message):
        build_varlen_mask_meta_from_ranges([[(0, 4)], [bad]], 4, "cpu")


def test_a_mask_that_is_not_two_dimensional_is_refused():
    with pytest.raises(UsageError, match=r"key_mask must be \[B, S\], got \[2, 1, 4\]"):
        build_varlen_mask_meta(torch.ones(2, 1, 4))


def test_packing_never_waits_for_the_device():
    # A tensor on "meta" has no values: whatever needs one on the host raises.
    meta = build_varlen_mask_meta(torch.ones(3, 4, dtype=torch.bool, device="meta"))
    x = torch.empty(3, 4, 2, 5, device="meta")
    assert meta.unpack(meta.pack(x)).shape == x.shape
