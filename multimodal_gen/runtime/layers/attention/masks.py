"""What is done with masks: causality folded in, rows zeroed, padding packed away.

B batch, S tokens, H heads; q/k suffix = query/key side.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.managers.forward_context import current_forward_context

_T = TypeVar("_T")


def once_per_call(mask: torch.Tensor, use: Hashable, make: Callable[[], _T]) -> _T:
    """Return what `make` derives from a mask, which the layers of a denoiser call share."""
    context = current_forward_context()
    return make() if context is None else context.cache.get(mask, use, make)


def bottom_right_causal_mask(num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
    """Return bool [Sq, Sk]: True where the key is not after the query, both ends aligned."""
    allowed = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return allowed.tril(num_keys - num_queries)


def masks_keys(mask: torch.Tensor) -> bool:
    """Whether a mask has the shape of one of keys alone: [B, Sk] or [B, 1, 1, Sk]."""
    return mask.dim() == 2 or (mask.dim() == 4 and mask.shape[1] == mask.shape[2] == 1)


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


def zero_masked_rows(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `x` [B, S, H, D] with the rows where `mask` [B, S] is False set to zero."""
    return torch.where(mask[:, :, None, None], x, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VarlenMaskMeta:
    """How a [B, S] mask packs its tokens.

    Attributes:
        mask: bool [B, S].
        indices: int64 [B * S], flat positions in packed order; masked ones at the end.
        inv_indices: int64 [B * S], packed position of each flat position.
        cu_seqlens: int32 [B + 1], where each sample's segment starts; the last is the end.
        max_seqlen: S, an upper bound of every segment.
    """

    mask: torch.Tensor
    indices: torch.Tensor
    inv_indices: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, S, H, D] as [B * S, H, D] in packed order."""
        return x.flatten(0, 1).index_select(0, self.indices)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """Return packed [B * S, H, D] as [B, S, H, D]; rows of masked tokens are zero."""
        batch, length = self.mask.shape
        rows = x.index_select(0, self.inv_indices).view(batch, length, *x.shape[1:])
        return torch.where(self.mask[:, :, None, None], rows, 0.0)


def build_varlen_mask_meta(key_mask: torch.Tensor) -> VarlenMaskMeta:
    """Return the packing of `key_mask` [B, S]; non-zero entries are kept."""
    if key_mask.dim() != 2:
        raise UsageError(f"key_mask must be [B, S], got {list(key_mask.shape)}")
    mask = key_mask != 0 if key_mask.dtype is not torch.bool else key_mask
    flat = mask.flatten()
    indices = torch.argsort(flat.logical_not().to(torch.uint8), stable=True)
    inverse = torch.empty_like(indices)
    inverse[indices] = torch.arange(indices.numel(), device=indices.device)
    lengths = mask.sum(1, dtype=torch.int32)
    return VarlenMaskMeta(
        mask=mask,
        indices=indices,
        inv_indices=inverse,
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen=mask.shape[1],
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
    mask = torch.zeros(len(valid_ranges), max_seqlen, dtype=torch.bool)
    for sample, ranges in enumerate(valid_ranges):
        for start, end in ranges:
            if not 0 <= start <= end <= max_seqlen:
                raise UsageError(
                    f"valid_ranges must hold 0 <= start <= end <= {max_seqlen}, got "
                    f"({start}, {end}) for sample {sample}"
                )
            mask[sample, start:end] = True
    return build_varlen_mask_meta(mask.to(device))
