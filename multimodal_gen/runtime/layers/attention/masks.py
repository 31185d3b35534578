"""Attention masks as a layer accepts them, brought to two kinds: key padding and dense.

B batch, S tokens, H heads; q/k suffix = query/key side.
"""

from dataclasses import dataclass

import torch

from multimodal_gen.errors import UsageError


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
