"""The gates of Video Sparse Attention, which diffusers drops when it loads a checkpoint.

Checkpoints trained with the method have a linear layer `to_gate_compress` per block, from the
input of its self-attention to a weight per token and channel. diffusers knows no such layer, so
it is read again from the files the model came from, and lives on the attention module as long as
the model is attached.

Shapes: B batch, S tokens, H heads, D head size.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from multimodal_gen.errors import UsageError
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
    folder = _folder(model)
    if folder is None or not modules:
        return {}
    stored = _stored(folder)
    gates = {}
    for name, module in modules.items():
        # In the block, as the method's own models have it, or beside the other projections.
        owners = (name, name.rpartition(".")[0])
        prefix = next((f"{o}.{GATE}" for o in owners if f"{o}.{GATE}.weight" in stored), None)
        if prefix is not None:
            gates[name] = _read(prefix, stored, module, compute_dtype(module, model))
    return gates


def attach_gate(module: nn.Module, gate: nn.Linear, undo: ExitStack) -> None:
    """Make `gate` part of an attention module, on its device; `undo` takes the way back."""
    hook = next((h for m in module.children() if (h := getattr(m, "_hf_hook", None))), None)
    if hook is not None:  # offloaded layer by layer, as accelerate does it
        from accelerate import cpu_offload

        cpu_offload(gate, execution_device=hook.execution_device)
    else:
        gate.to(next(module.parameters()).device)
    module.add_module(GATE, gate)
    undo.callback(delattr, module, GATE)


def _folder(model: nn.Module) -> Path | None:
    config = getattr(model, "config", None)
    name = config.get("_name_or_path") if isinstance(config, Mapping) else None
    if not isinstance(name, str) or not name:
        return None
    folder = Path(name)
    return folder if folder.is_dir() else None


def _stored(folder: Path) -> dict[str, Path]:
    """Return the file of every gate parameter; only the heads of the files are read."""
    from safetensors import safe_open

    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in _gate_keys(file.keys()):
                found.setdefault(key, path)
    return found


def _gate_keys(keys: Iterable[str]) -> list[str]:
    return [key for key in keys if key.rpartition(".")[0].endswith(f".{GATE}")]


def _read(
    prefix: str, stored: Mapping[str, Path], module: nn.Module, dtype: torch.dtype
) -> nn.Linear:
    from safetensors import safe_open

    tensors = {}
    for part in ("weight", "bias"):
        key = f"{prefix}.{part}"
        if key in stored:
            with safe_open(stored[key], framework="pt") as file:
                tensors[part] = file.get_tensor(key).to(dtype)
    weight = tensors["weight"]
    reference = getattr(module, "to_q", None)
    wanted = (getattr(reference, "out_features", None), getattr(reference, "in_features", None))
    if tuple(weight.shape) != wanted:
        raise UsageError(
            f"{prefix}.weight in {stored[f'{prefix}.weight']} must be {list(wanted)}, as the "
            f"query's projection, got {list(weight.shape)}; the file belongs to another model"
        )
    gate = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in tensors, device="meta")
    gate.load_state_dict(tensors, assign=True)
    return gate.requires_grad_(False)
