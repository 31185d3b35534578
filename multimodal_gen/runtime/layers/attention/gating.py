"""The gate of a coarse branch: output = attention + gate * coarse branch, per token and channel.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from abc import abstractmethod
from collections.abc import Iterable

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionImpl
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.layers.attention.schedule import Route
from multimodal_gen.runtime.managers.forward_context import (
    ForwardContext,
    current_forward_context,
)


class GatedImpl(AttentionImpl):
    """An implementation with a coarse branch. `forward` gives the branch no weight."""

    @abstractmethod
    def forward_gated(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor,
        context: ForwardContext | None = None,
    ) -> torch.Tensor:
        """Return what `forward` does plus `gate`, [B, S, H, D], times the coarse branch."""

    @abstractmethod
    def add_coarse(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor,
        context: ForwardContext | None = None,
    ) -> torch.Tensor:
        """Return `out`, [B, S, H, D], plus `gate` times the coarse branch; may change `out`."""


def gated_route(routes: Iterable[Route]) -> Route | None:
    """Return the first route of a schedule that has a coarse branch, or None."""
    return next((r for r in routes if isinstance(r.primary.impl, GatedImpl)), None)


def check_gate(
    route: Route,
    gated: Route | None,
    query: torch.Tensor,
    gate: torch.Tensor,
    attn_mask: torch.Tensor | None,
) -> Route:
    """Return `gated`, once the gate is known to fit; see `attend_gated`."""
    if gated is None:
        raise UsageError(
            f"the gate must be None unless the backend is video_sparse_attn, this layer runs "
            f"{route.primary.selection.backend}, which has no coarse branch to weigh"
        )
    if attn_mask is not None or gate.shape != query.shape:
        mask = "no mask" if attn_mask is None else f"a mask of shape {list(attn_mask.shape)}"
        raise UsageError(
            f"the gate must have the shape of query, {list(query.shape)}, and come without a mask, "
            f"got {list(gate.shape)} with {mask}"
        )
    return gated


def attend_gated(
    route: Route,
    gated: Route | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    attn_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention plus the weighed coarse branch.

    Dense steps of a schedule get the branch too: they are its sparse ones at sparsity 0.

    Args:
        route: what serves the step.
        gated: the route of the same schedule whose coarse branch it is.
        query: [B, S, H, D].
        key: [B, S, Hkv, D].
        value: [B, S, Hkv, D].
        gate: [B, S, H, D].
        attn_mask: must be None.

    Returns:
        [B, S, H, D].

    Raises:
        UsageError: nothing has a coarse branch, the gate does not fit, or there is a mask.
        UnsupportedBackendError: gradients are recorded and the kernel has no backward.
    """
    gated = check_gate(route, gated, query, gate, attn_mask)
    bound, coarse = route.primary, gated.primary
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, gate)):
        bound = route.honouring(Feature.BACKWARD)
        coarse = gated.honouring(Feature.BACKWARD)
    bound.calls += 1
    gate, context = gate.to(query.dtype), current_forward_context()
    if isinstance(bound.impl, GatedImpl):
        return bound.impl.forward_gated(query, key, value, gate, context)
    assert isinstance(coarse.impl, GatedImpl)
    out = bound.impl.forward(query, key, value, context)
    return coarse.impl.add_coarse(out, query, key, value, gate, context)
