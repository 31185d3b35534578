"""Dense attention on the package's own 8-bit engine, and what its backends declare in common.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.quantized_attention.api import quantized_attention
from multimodal_gen.kernels.tile_order.api import gather_tokens
from multimodal_gen.runtime.layers.attention.backends._common import (
    attend_to_nothing,
    refuse_grad,
    refuse_mask,
    settle,
)
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    ALL_ROLES,
    HALF_DTYPES,
    AttentionImpl,
    Capability,
    HeadSizes,
    Variant,
)
from multimodal_gen.runtime.layers.attention.backends.engine_variants import (
    CUDA_ONLY,
    TRITON,
    TRITON_WITH_GLUON,
)
from multimodal_gen.runtime.layers.attention.request import AttentionRole, Feature

if TYPE_CHECKING:
    from multimodal_gen.runtime.managers.forward_context import ForwardContext

__all__ = ["ENGINE_KERNELS", "QuantizedAttentionImpl", "quantized_variants"]

ENGINE_KERNELS = ("gluon", "triton", "reference")
"""Kernels of the 8-bit engine, fastest first."""

_HEAD_SIZES = HeadSizes(minimum=16, maximum=128, multiple_of=8)
_BLOCK = 128


def quantized_variants(
    features: Iterable[Feature], roles: frozenset[AttentionRole] = ALL_ROLES
) -> tuple[Variant, ...]:
    """Return the engine's GPU kernels, fastest first, each with `features`.

    Args:
        features: what the method can honour on every kernel.
        roles: layer roles it serves.
    """
    portable = Variant(
        name="triton",
        platforms=CUDA_ONLY,
        dtypes=HALF_DTYPES,
        head_sizes=_HEAD_SIZES,
        features=frozenset(features),
        packages=(TRITON,),
        capability=Capability(minimum=(8, 0)),
        roles=roles,
    )
    hopper = replace(
        portable,
        name="gluon",
        packages=(TRITON_WITH_GLUON,),
        capability=Capability(exact=((9, 0),)),
    )
    return hopper, portable


class QuantizedAttentionImpl(AttentionImpl):
    """Attention over a plan of every block; see `AttentionImpl` for the arguments.

    Attributes:
        label: the backend's name in errors.
    """

    label = "sage_attn"

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: "ForwardContext | None" = None,
        *,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionImpl.forward`; the mask is bool [B, 1, 1, Sk]."""
        del context
        refuse_grad(self.label, query, key, value)
        if not (query.numel() and key.numel()):
            return attend_to_nothing(query, value)[0]
        plan = _plan(query.shape[1], key.shape[1], self.causal, query.device)
        if attn_mask is not None:
            if self.causal:
                refuse_mask(attn_mask, f"causal {self.label}")
            keep = attn_mask[:, 0, 0, :].expand(key.shape[0], -1)
            key, value, kv = _kept_first(key, value, keep, plan.kv)
            plan = replace(plan, kv=kv)
        out = quantized_attention(
            query, key, value, plan, scale=self.softmax_scale, kernel=self.variant or "auto"
        )
        assert isinstance(out, torch.Tensor)
        return out

    def forward_lse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionImpl.forward_lse`."""
        refuse_grad(self.label, query, key, value)
        if not (query.numel() and key.numel()):
            return attend_to_nothing(query, value)
        plan = _plan(query.shape[1], key.shape[1], self.causal, query.device)
        out, lse = quantized_attention(
            query,
            key,
            value,
            plan,
            scale=self.softmax_scale,
            kernel=self.variant or "auto",
            return_lse=True,
        )
        return out, lse


@lru_cache(maxsize=64)
def _plan(num_queries: int, num_keys: int, causal: bool, device: torch.device) -> BlockPlan:
    """Return the plan of dense attention; the last 64 are cached."""
    with torch.inference_mode(False):
        plan = BlockPlan.dense(
            Blocks.regular(num_queries, 64 if num_queries <= 64 else _BLOCK),
            Blocks.regular(num_keys, _BLOCK),
            device,
            causal=causal,
        )
    settle(device)
    return plan


def _kept_first(
    key: torch.Tensor, value: torch.Tensor, keep: torch.Tensor, blocks: Blocks
) -> tuple[torch.Tensor, torch.Tensor, Blocks]:
    """Move the kept keys of every sample to its front; does not wait for the device.

    Args:
        key: [B, Sk, Hkv, D].
        value: [B, Sk, Hkv, D].
        keep: bool [B, Sk].
        blocks: regular blocks of Sk keys.

    Returns:
        Keys and values in the new order, and blocks that end with each sample's kept keys.
    """
    index = torch.argsort(~keep, dim=1, stable=True).int()
    key, value = gather_tokens((key, value), index)
    starts = torch.arange(blocks.num, dtype=torch.int32, device=keep.device) * blocks.size
    lengths = (keep.sum(1, dtype=torch.int32).view(-1, 1, 1) - starts).clamp(0, blocks.size)
    ragged = Blocks.ragged(starts.view(1, 1, -1), lengths, total=blocks.total, size=blocks.size)
    return key, value, ragged
