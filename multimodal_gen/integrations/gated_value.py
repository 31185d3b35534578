"""The gate of a coarse branch, on its way from a processor's projections to the attention call.

Shapes: B batch, S tokens, H heads, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

GATE = "to_gate_compress"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedValue:
    """A value with the gate of its tokens; it offers only what processors do to a value.

    Attributes:
        value: [B, S, H * D], then [B, S, H, D].
        gate: the same shape, or what computes it.
    """

    value: torch.Tensor
    gate: torch.Tensor | Callable[[], torch.Tensor]

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> "GatedValue":
        """Return both with the heads split off."""

        def split(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(dim, sizes)  # type: ignore[no-untyped-call]

        gate = self.gate
        later = split(gate) if isinstance(gate, torch.Tensor) else lambda: split(gate())
        return GatedValue(value=split(self.value), gate=later)


class SpareGate(nn.Module):
    """A gate on a layer without a coarse branch: computed only where somebody asks for it.

    Args:
        linear: the gate.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden_states: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return what computes the gate of some tokens."""
        return partial(self.linear, hidden_states)


def wan_projections(
    attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, "torch.Tensor | GatedValue"]:
    """Stand in for the projections of Wan's processor: the value takes its gate along, if any."""
    from diffusers.models.transformers.transformer_wan import _get_qkv_projections

    query, key, value = _get_qkv_projections(attn, hidden_states, encoder_hidden_states)
    project = getattr(attn, GATE, None)
    if project is None:
        return query, key, value
    return query, key, GatedValue(value=value, gate=project(hidden_states))
