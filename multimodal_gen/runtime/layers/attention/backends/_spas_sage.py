"""SpargeAttn's 8-bit block-sparse kernel, of the package spas_sage_attn, where a call fits it.

Shapes: B batch, L tokens, H heads, D head size, Nq and Nk blocks.
"""

import importlib
from dataclasses import dataclass

import torch

from multimodal_gen.errors import UnsupportedBackendError

__all__ = ["SPAS_SAGE", "SpasCall", "attend_spas_sage", "mask_blocks"]

SPAS_SAGE = "spas_sage_attn"
# Above every score, so that no product of weights and values is skipped.
_SKIP_NOTHING = 1e6


def mask_blocks(capability: tuple[int, int] | None) -> tuple[int, int]:
    """Return queries and keys of the blocks that the kernel's mask is made of on a GPU."""
    return (64, 128) if capability == (9, 0) else (128, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpasCall:
    """What decides whether the kernel can serve a call.

    Attributes:
        label: the backend's name in errors.
        queries: query tokens.
        keys: key tokens.
        heads: query heads.
        kv_heads: key and value heads.
        masked: whether keys are masked out or there is text, which the mask's blocks cannot tell.
        causal: whether keys after the query are masked out.
    """

    label: str
    queries: int
    keys: int
    heads: int
    kv_heads: int
    masked: bool = False
    causal: bool = False

    def reasons(self) -> tuple[str, ...]:
        """Return every reason the kernel cannot serve the call, requirement then actual."""
        found = []
        if self.masked:
            found.append("needs sequences of video alone without masked keys, got others")
        if self.causal:
            found.append("has no causal variant of a mask")
        if self.kv_heads != self.heads:
            found.append(f"needs as many key heads as the {self.heads}, got {self.kv_heads}")
        if min(self.queries, self.keys) < 128:
            found.append(f"needs at least 128 tokens, got {min(self.queries, self.keys)}")
        return tuple(found)


def attend_spas_sage(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keep: torch.Tensor,
    *,
    scale: float,
    call: SpasCall,
) -> torch.Tensor:
    """Return attention over the blocks of a mask, [B, L, H, D].

    Args:
        query: [B, L, H, D].
        key: as `query`.
        value: as `query`.
        keep: bool [B, H, Nq, Nk] in blocks as `mask_blocks` tells, at least one in every row.
        scale: factor of the scores.
        call: what the call is.

    Raises:
        UnsupportedBackendError: the kernel cannot serve the call; lists the reasons.
    """
    reasons = call.reasons()
    if reasons:
        raise UnsupportedBackendError(
            f"kernel {SPAS_SAGE} of {call.label} cannot serve this call: {'; '.join(reasons)}; "
            f"use kernel=auto"
        )
    heads_first = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    out: torch.Tensor = importlib.import_module(SPAS_SAGE).block_sparse_sage2_attn_cuda(
        *heads_first,
        mask_id=keep.to(torch.int8).contiguous(),
        scale=scale,
        pvthreshd=_SKIP_NOTHING,
        tensor_layout="HND",
    )
    return out.transpose(1, 2).to(query.dtype)
