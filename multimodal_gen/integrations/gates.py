"""The gates of Video Sparse Attention, which diffusers drops when it loads a checkpoint.

Checkpoints trained with the method have a linear layer `to_gate_compress` per block, from the
input of its self-attention to a weight per token and channel. diffusers knows no such layer, so
it is read again from the files the model came from, and lives on the attention module as long as
the model is attached.

Shapes: B batch, S tokens, H heads, D head size.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.checkpoint import (
    StoredLayers,
    attach_child,
    model_folder,
    stored_layers,
)
from multimodal_gen.integrations.components import compute_dtype

__all__ = ["GATE", "GatedValue", "attach_gate", "find_gates", "wan_projections"]

GATE = "to_gate_compress"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedValue:
    """A value with the gate of its tokens; it offers only what processors do to a value.

    Attributes:
        value: [B, S, H * D], then [B, S, H, D].
        gate: the same shape.
    """

    value: torch.Tensor
    gate: torch.Tensor

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> "GatedValue":
        """Return both with the heads split off."""
        value, gate = (x.unflatten(dim, sizes) for x in (self.value, self.gate))  # type: ignore[no-untyped-call]
        return GatedValue(value=value, gate=gate)


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


def find_gates(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, nn.Linear]:
    """Read the gates of attention modules from the files that a model was loaded from.

    Args:
        model: a model of diffusers.
        modules: its attention modules, by dotted name.

    Returns:
        The gates by the name of their attention module; empty where the model comes from no
        folder of this machine, or its files hold no gates.

    Raises:
        UsageError: a gate does not fit its module.
    """
    folder = model_folder(model)
    if folder is None or not modules:
        return {}
    stored = stored_layers(folder, GATE)
    gates = {}
    for name, module in modules.items():
        # In the block, as the method's own models have it, or beside the other projections.
        owners = (name, name.rpartition(".")[0])
        prefix = next((f"{o}.{GATE}" for o in owners if f"{o}.{GATE}" in stored), None)
        if prefix is not None:
            gates[name] = _read(prefix, stored, module, compute_dtype(module, model))
    return gates


def attach_gate(module: nn.Module, gate: nn.Linear, undo: ExitStack) -> None:
    """Make `gate` part of an attention module, on its device; `undo` takes the way back."""
    attach_child(module, GATE, gate, undo)


def _read(prefix: str, stored: StoredLayers, module: nn.Module, dtype: torch.dtype) -> nn.Linear:
    gate = stored.read(prefix, dtype)
    reference = getattr(module, "to_q", None)
    wanted = (getattr(reference, "out_features", None), getattr(reference, "in_features", None))
    if tuple(gate.weight.shape) != wanted:
        raise UsageError(
            f"{prefix}.weight in {stored.file(prefix)} must be {list(wanted)}, as the query's "
            f"projection, got {list(gate.weight.shape)}; the file belongs to another model"
        )
    return gate
