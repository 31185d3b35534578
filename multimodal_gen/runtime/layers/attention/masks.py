"""Attention masks as a layer accepts them, brought to two kinds: key padding and dense.

B batch, S tokens, H heads; q/k suffix = query/key side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from multimodal_gen.errors import UsageError

# Added to a score, it leaves a weight of 0 in every dtype. Models use -9000 and less; -10000 is
# -9984 in bfloat16.
_LEFT_OUT = -9000.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyMask:
    """Keys that may be attended to.

    Attributes:
        keep: bool [B, Sk], True for keys that are attended to.
        covers_queries: the same positions are the queries; rows of masked queries become zero.
    """

    keep: torch.Tensor
    covers_queries: bool

    def broadcastable(self) -> torch.Tensor:
        """Return the mask as bool [B, 1, 1, Sk]."""
        return self.keep[:, None, None, :]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseMask:
    """Any other mask.

    Attributes:
        mask: bool (True attends) or additive in the query's dtype, broadcastable to
            [B, H, Sq, Sk].
    """

    mask: torch.Tensor


def as_key_mask(mask: torch.Tensor, *, self_attention: bool) -> KeyMask | None:
    """Return the key mask that a dense mask spells out, or None where it says more than that.

    Waits for the device. An additive mask spells one out where it holds nothing but zeros and, for
    keys that are left out, -inf or a number so low that exp() of it is 0, such as the -10000 of
    many models. All rows have to leave out the same keys; in self-attention rows of keys that are
    left out may leave out everything.

    Args:
        mask: [B, H | 1, Sq | 1, Sk], as `DenseMask` has it.
        self_attention: a mask over as many keys as queries may mask the queries too.
    """
    if mask.requires_grad or not mask.numel():
        return None
    allowed, additive = mask, mask.dtype is not torch.bool
    if additive:
        allowed = mask == 0
    seen = allowed.any(-1)  # [B, H, Sq]
    common = allowed.any(2).any(1)  # [B, Sk]
    same = (allowed == (common[:, None, None, :] & seen[..., None])).all()
    square = self_attention and mask.shape[2] == mask.shape[3]
    queries_too = (seen == common[:, None, :]).all() if square else same.new_zeros(())
    known, finite = same, same.new_zeros(())
    if additive:
        known = same & (allowed | (mask <= _LEFT_OUT)).all()
        finite = (~allowed & (mask > -torch.inf)).any()
    known, every, queries_too, finite = torch.stack(
        (known, seen.all(), queries_too, finite)
    ).tolist()
    # A row of low numbers is one of equal weights, unlike a row of -inf.
    if not known or not (every or (queries_too and not finite)):
        return None
    return KeyMask(keep=common, covers_queries=not every)


def normalise_mask(
    mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *, self_attention: bool
) -> KeyMask | DenseMask:
    """Bring a mask to one of the two kinds; never synchronises with the device.

    Args:
        mask: [B, Sk] key padding, [B, Sq, Sk], or 4-D broadcastable to [B, H, Sq, Sk]. Bool and
            integer masks keep where non-zero; floating ones are added to the scores.
        query: [B, Sq, H, D].
        key: [B, Sk, Hkv, D].
        self_attention: a 2-D mask over as many keys as queries masks the queries too.

    Raises:
        UsageError: the mask's shape does not fit.
    """
    batch, num_queries, num_heads = query.shape[:3]
    num_keys = key.shape[1]
    given = list(mask.shape)
    if len(given) not in (2, 3, 4):
        raise _misfit(given, batch, num_heads, num_queries, num_keys)
    additive = mask.dtype.is_floating_point
    if not additive and mask.dtype is not torch.bool:
        mask = mask != 0
    two_dimensional = mask.dim() == 2
    if two_dimensional:
        mask = mask[:, None, None, :]
    elif mask.dim() == 3:
        mask = mask[:, None]
    wanted = (batch, num_heads, num_queries, num_keys)
    fits = all(have in (1, want) for have, want in zip(mask.shape, wanted, strict=True))
    if not fits or mask.shape[-1] != num_keys:
        raise _misfit(given, batch, num_heads, num_queries, num_keys)
    if additive:
        return DenseMask(mask=mask.to(query.dtype))
    if mask.shape[1] != 1 or mask.shape[2] != 1:
        return DenseMask(mask=mask)
    return KeyMask(
        keep=mask[:, 0, 0, :].expand(batch, num_keys),
        covers_queries=two_dimensional and self_attention and num_queries == num_keys,
    )


def bottom_right_causal_mask(num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
    """Return bool [Sq, Sk]: True where the key is not after the query, both ends aligned."""
    allowed = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return allowed.tril(num_keys - num_queries)


def with_causal(mask: torch.Tensor, num_queries: int, num_keys: int | None = None) -> torch.Tensor:
    """Fold bottom-right aligned causality into a mask.

    Args:
        mask: bool or additive, broadcastable to [B, H, Sq, Sk].
        num_queries: Sq.
        num_keys: Sk; None for the last size of `mask`.

    Returns:
        A mask of the same kind with Sq rows and Sk columns.
    """
    num_keys = mask.shape[-1] if num_keys is None else num_keys
    allowed = bottom_right_causal_mask(num_queries, num_keys, mask.device)
    if mask.dtype is torch.bool:
        return mask & allowed
    # -inf, not the lowest number: that is what masked keys may hold already.
    return torch.where(allowed, mask, -torch.inf)


def zero_masked_rows(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Return `x` [B, S, H, D] with the rows where `keep` [B, S] is False set to zero."""
    return torch.where(keep[:, :, None, None], x, 0.0)


def _misfit(
    given: list[int], batch: int, num_heads: int, num_queries: int, num_keys: int
) -> UsageError:
    return UsageError(
        f"attn_mask must be [B, Sk] = {[batch, num_keys]}, [B, Sq, Sk] = "
        f"{[batch, num_queries, num_keys]} or broadcastable to [B, H, Sq, Sk] = "
        f"{[batch, num_heads, num_queries, num_keys]}, got {given}"
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VarlenMaskMeta:
    """How a [B, S] mask packs its tokens.

    Attributes:
        keep: bool [B, S].
        indices: int64 [B * S], flat positions in packed order; masked ones at the end.
        inv_indices: int64 [B * S], packed position of each flat position.
        cu_seqlens: int32 [B + 1], where each sample's segment starts; the last is the end.
        max_seqlen: S, an upper bound of every segment.
    """

    keep: torch.Tensor
    indices: torch.Tensor
    inv_indices: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, S, H, D] as [B * S, H, D] in packed order."""
        return x.flatten(0, 1).index_select(0, self.indices)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """Return packed [B * S, H, D] as [B, S, H, D]; rows of masked tokens are zero."""
        batch, length = self.keep.shape
        rows = x.index_select(0, self.inv_indices).view(batch, length, *x.shape[1:])
        return torch.where(self.keep[:, :, None, None], rows, 0.0)


def build_varlen_mask_meta(key_mask: torch.Tensor) -> VarlenMaskMeta:
    """Return the packing of `key_mask` [B, S]; non-zero entries are kept."""
    if key_mask.dim() != 2:
        raise UsageError(f"key_mask must be [B, S], got {list(key_mask.shape)}")
    keep = key_mask != 0 if key_mask.dtype is not torch.bool else key_mask
    flat = keep.flatten()
    indices = torch.argsort(flat.logical_not().to(torch.uint8), stable=True)
    inverse = torch.empty_like(indices)
    inverse[indices] = torch.arange(indices.numel(), device=indices.device)
    lengths = keep.sum(1, dtype=torch.int32)
    return VarlenMaskMeta(
        keep=keep,
        indices=indices,
        inv_indices=inverse,
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen=keep.shape[1],
    )


def build_varlen_mask_meta_from_lengths(
    lengths: Sequence[int], max_seqlen: int, device: torch.device | str
) -> VarlenMaskMeta:
    """Return the packing of samples that keep their first `lengths[b]` of `max_seqlen` tokens."""
    ranges = [[(0, int(length))] for length in lengths]
    return build_varlen_mask_meta_from_ranges(ranges, max_seqlen, device)


def build_varlen_mask_meta_from_ranges(
    valid_ranges: Sequence[Sequence[tuple[int, int]]],
    max_seqlen: int,
    device: torch.device | str,
) -> VarlenMaskMeta:
    """Return the packing of samples that keep the given half-open ranges of their tokens.

    Args:
        valid_ranges: per sample, (start, end) pairs within [0, max_seqlen].
        max_seqlen: S.
        device: where the packing is used.

    Raises:
        UsageError: a range runs backwards or leaves [0, max_seqlen].
    """
    keep = torch.zeros(len(valid_ranges), max_seqlen, dtype=torch.bool)
    for sample, ranges in enumerate(valid_ranges):
        for start, end in ranges:
            if not 0 <= start <= end <= max_seqlen:
                raise UsageError(
                    f"valid_ranges must hold 0 <= start <= end <= {max_seqlen}, got "
                    f"({start}, {end}) for sample {sample}"
                )
            keep[sample, start:end] = True
    return build_varlen_mask_meta(keep.to(device))
