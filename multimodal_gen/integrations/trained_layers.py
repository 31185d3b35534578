"""Trained layers of sparse methods, which diffusers drops when it loads a checkpoint.

They are read again from the files the model came from, or taken from the model itself where it came
from `--transformer-weights-path`, and live on the attention modules as long as the model is
attached. Video Sparse Attention has a linear layer `to_gate_compress` per block, from the input of
its self-attention to a weight per token and channel. Sparse-Linear Attention has a linear layer
`proj_l` per self-attention, from the channels of a head to themselves; where it hangs depends on
who trained it: on the attention module or on parts of it (`attn1.proj_l`, `attn1.attn_impl.proj_l`,
`attn1.local_attn.proj_l`, `attn1.attn_op.local_attn.proj_l`), which may carry the name of the
original Wan (`self_attn`).

Shapes: B batch, S tokens, H heads, D head size.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.checkpoint_files import find_checkpoint
from multimodal_gen.integrations.components import compute_dtype
from multimodal_gen.runtime.generator.weights_file import TRAINED, weight_files

Stored: TypeAlias = Mapping[str, Path | torch.Tensor]
"""Parameters by their keys: the file of each, or itself."""


def stored_parameters(model: nn.Module) -> Stored:
    """Return the parameters of gates and projections that came with a model.

    Only heads of files are read. Nothing is found where the model comes from no folder of this
    machine.
    """
    from safetensors import safe_open

    held = getattr(model, TRAINED, None)
    if held is not None:
        return {key: value for key, value in held.items() if _is_of(key, GATE, PROJECTION)}
    found: dict[str, Path] = {}
    folder = find_checkpoint(model).folder
    for path in () if folder is None else weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                if _is_of(key, GATE, PROJECTION):
                    found.setdefault(key, path)
    return found


def _is_of(key: str, *names: str) -> bool:
    return f".{key.rpartition('.')[0]}".endswith(tuple(f".{name}" for name in names))


def stored_layers(stored: Stored, name: str) -> list[str]:
    """Return the dotted names of the layers called `name`, in order."""
    return [*dict.fromkeys(key.rpartition(".")[0] for key in stored if _is_of(key, name))]


def read_linear(
    stored: Stored,
    prefix: str,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    meaning: str,
) -> nn.Linear:
    """Return a stored linear layer, on the CPU and without gradients.

    Args:
        stored: where every parameter is.
        prefix: what its keys begin with.
        dtype: dtype of the result.
        shape: that its weight must have.
        meaning: why, for messages.

    Raises:
        UsageError: it has another shape.
    """
    from safetensors import safe_open

    tensors = {}
    for part in ("weight", "bias"):
        key = f"{prefix}.{part}"
        place = stored.get(key)
        if isinstance(place, torch.Tensor):
            tensors[part] = place.to(dtype)
        elif place is not None:
            with safe_open(place, framework="pt") as file:
                tensors[part] = file.get_tensor(key).to(dtype)
    found = tuple(tensors["weight"].shape)
    place = stored[f"{prefix}.weight"]
    origin = place if isinstance(place, Path) else "the file of its weights"
    if found != shape:
        raise UsageError(
            f"{prefix}.weight in {origin} must be {list(shape)}, {meaning}, got {list(found)}; the "
            f"file belongs to another model"
        )
    outputs, inputs = found
    layer = nn.Linear(inputs, outputs, bias="bias" in tensors, device="meta")
    layer.load_state_dict(tensors, assign=True)
    return layer.requires_grad_(False)


def offload_hook(module: nn.Module) -> Any:
    """Return the hook by which accelerate offloads the layers of `module`, or None."""
    return next((h for m in module.children() if (h := getattr(m, "_hf_hook", None))), None)


def attach_child(module: nn.Module, name: str, child: nn.Module, undo: ExitStack) -> None:
    """Make `child` part of `module`, on its device; `undo` takes the way back."""
    hook = offload_hook(module)
    if hook is not None:
        from accelerate import cpu_offload

        cpu_offload(child, execution_device=hook.execution_device)
    else:
        child.to(next(module.parameters()).device)
    module.add_module(name, child)
    undo.callback(delattr, module, name)


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


def find_gates(
    model: nn.Module, modules: Mapping[str, nn.Module], stored: Stored
) -> dict[str, nn.Linear]:
    """Read the gates of attention modules from the files that a model was loaded from.

    Args:
        model: a model of diffusers.
        modules: its attention modules, by dotted name.
        stored: what came with it.

    Returns:
        The gates by the name of their attention module; empty where the model comes from no
        folder of this machine, or its files hold no gates.

    Raises:
        UsageError: a gate does not fit its module.
    """
    gates = {}
    for name, module in modules.items():
        prefix = next((each for each in _gate_names(name) if f"{each}.weight" in stored), None)
        if prefix is not None:
            query = getattr(module, "to_q", None)
            shape = tuple(getattr(query, size, None) for size in ("out_features", "in_features"))
            dtype = compute_dtype(module, model)
            gates[name] = read_linear(stored, prefix, dtype, shape, "as the query's projection")
    return gates


def _gate_names(module: str) -> tuple[str, str]:
    """Return what the gate of an attention module may be called."""
    # With the other projections, or in the block, as the method's own models have it.
    return f"{module}.{GATE}", f"{module.rpartition('.')[0]}.{GATE}"


def new_gate(module: nn.Module, dtype: torch.dtype) -> nn.Linear:
    """Return a gate for an attention module, zero as training begins with it, on the CPU.

    Raises:
        UsageError: the module has no projection of queries to take the sizes from.
    """
    reference = getattr(module, "to_q", None)
    if not isinstance(reference, nn.Linear):
        raise UsageError(
            f"a gate must have the sizes of the query's projection, and {type(module).__name__} "
            f"has no linear layer `to_q`; fuse its projections after apply(), not before"
        )
    return _zero(reference.in_features, reference.out_features, dtype)


def new_projection(head_size: int) -> nn.Linear:
    """Return a projection for heads of a size, zero as training begins with it, on the CPU."""
    return _zero(head_size, head_size, torch.float32)


def _zero(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, dtype=dtype)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


PROJECTION = "proj_l"


def find_projections(stored: Stored, sizes: Mapping[str, int]) -> dict[str, nn.Linear]:
    """Read the projections of attention modules from the files that a model was loaded from.

    Args:
        stored: what came with the model.
        sizes: channels per head of its attention modules, by dotted name.

    Returns:
        The projections that are not zero, in fp32, by the name of their attention module; empty
        where the model comes from no folder of this machine, or its files hold none.

    Raises:
        UsageError: a projection does not fit its module.
    """
    found: dict[str, nn.Linear] = {}
    for prefix in stored_layers(stored, PROJECTION):
        name = owner_of(prefix, sizes)
        if name is None or f"{prefix}.weight" not in stored:
            continue
        shape, meaning = (sizes[name],) * 2, "channels of a head to channels of a head"
        projection = read_linear(stored, prefix, torch.float32, shape, meaning)
        # Zero is what training starts from: then there is nothing to add.
        if any(bool(p.any()) for p in projection.parameters()):
            found[name] = projection
    return found


def attach_projection(module: nn.Module, projection: nn.Linear, undo: ExitStack) -> None:
    """Make `projection` part of an attention module, on its device; `undo` takes the way back.

    Where accelerate offloads layer by layer it stays on the GPU instead: it is small, and its
    weights are used without a call that would fetch them.
    """
    hook = offload_hook(module)
    if hook is None:
        attach_child(module, PROJECTION, projection, undo)
    else:
        projection.to(hook.execution_device)


def owner_of(part: str, names: Iterable[str]) -> str | None:
    """Return which attention module a stored gate or projection belongs to, or None."""
    for name in names:
        original = f"{name.rpartition('.')[0]}.self_attn"  # what other code calls it
        if part.endswith(GATE):
            if part in _gate_names(name):
                return name
        elif part.startswith((f"{name}.", f"{original}.")):
            return name
    return None
