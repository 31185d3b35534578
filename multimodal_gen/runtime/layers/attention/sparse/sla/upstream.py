"""The authors' own operator, of the package sparse_linear_attention, where a call fits it.

It wants tensors heads first, no text and no mask, and does everything itself: the selection, with
keys centred in the precision of the inputs, and the linear branch over all tokens.

Shapes: B batch, L tokens, H heads, D head size.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from multimodal_gen.errors import UnsupportedBackendError

__all__ = ["UPSTREAM", "UpstreamCall", "attend_upstream", "upstream_module"]

UPSTREAM = "sparse_linear_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamCall:
    """What decides whether the operator can serve a call.

    Attributes:
        text: number of tokens beyond the video's.
        masked: whether keys are masked out.
        unselected: whether the linear branch covers unselected blocks only.
        scale: factor of the scores.
        head_size: D.
        heads: query heads.
        kv_heads: key and value heads.
        blocks: number of key blocks.
        topk_ratio: share of them to keep.
    """

    text: int
    masked: bool
    unselected: bool
    scale: float
    head_size: int
    heads: int
    kv_heads: int
    blocks: int
    topk_ratio: float

    def reasons(self) -> tuple[str, ...]:
        """Return every reason the operator cannot serve the call, requirement then actual."""
        found = []
        if self.text:
            found.append(f"needs sequences without text, got {self.text} text tokens")
        if self.masked:
            found.append("has no key mask, and keys are masked")
        if self.unselected:
            found.append("needs linear_branch=all, got unselected")
        if abs(self.scale * self.head_size**0.5 - 1) > 1e-6:
            found.append(
                f"needs the inverse root of the head size as scale, got {self.scale:.6g} for "
                f"{self.head_size}"
            )
        if self.kv_heads != self.heads:
            found.append(f"needs as many key heads as the {self.heads}, got {self.kv_heads}")
        if int(self.topk_ratio * self.blocks) < 1:
            found.append(
                f"needs a topk_ratio that keeps a block of {self.blocks}, got {self.topk_ratio}"
            )
        return tuple(found)


def upstream_module(head_size: int, projection: nn.Linear | None, **options: Any) -> nn.Module:
    """Return the package's module, with the given projection in place of its own.

    Args:
        head_size: D.
        projection: [D, D], or None for zero.
        **options: topk, feature_map, BLKQ, BLKK and use_bf16, as the package takes them.
    """
    module: nn.Module = importlib.import_module(UPSTREAM).SparseLinearAttention(
        head_size, **options
    )
    if projection is not None:
        module.proj_l = projection
    return module


def attend_upstream(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: UpstreamCall,
) -> torch.Tensor:
    """Return the operator's output, [B, L, H, D].

    Args:
        module: what `upstream_module` returned.
        query: [B, L, H, D].
        key: as `query`.
        value: as `query`.
        call: what the call is.

    Raises:
        UnsupportedBackendError: the operator cannot serve the call; lists the reasons.
    """
    reasons = call.reasons()
    if reasons:
        raise UnsupportedBackendError(
            f"kernel {UPSTREAM} of sla_attn cannot serve this call: {'; '.join(reasons)}; use "
            f"kernel=auto"
        )
    heads_first = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    out: torch.Tensor = module.to(query.device)(*heads_first)
    return out.transpose(1, 2)
