"""Dense attention on the package's own 8-bit engine, and what its backends declare in common.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.quantized_attention.api import quantized_attention
from multimodal_gen.runtime.layers.attention.backends._common import (
    attend_to_nothing,
    refuse_grad,
)
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    ALL_ROLES,
    HALF_DTYPES,
    AttentionImpl,
    Capability,
    HeadSizes,
    Variant,
)
from multimodal_gen.runtime.layers.attention.backends.dense_plan import dense_plan, drop_masked
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
        plan = _plan(query, key, self.causal)
        if attn_mask is not None:
            key, value, plan = drop_masked(key, value, plan, attn_mask, self.label)
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
        plan = _plan(query, key, self.causal)
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


def _plan(query: torch.Tensor, key: torch.Tensor, causal: bool) -> BlockPlan:
    q_size = 64 if query.shape[1] <= 64 else _BLOCK
    return dense_plan(query.shape[1], key.shape[1], q_size, _BLOCK, causal, query.device)
