"""The projections of Sparse-Linear Attention, which diffusers drops when it loads a checkpoint.

Checkpoints trained with the method have a linear layer `proj_l` per self-attention, from the
channels of a head to themselves. Where it hangs depends on who trained it: on the attention module
or on parts of it (`attn1.proj_l`, `attn1.attn_impl.proj_l`, `attn1.local_attn.proj_l`,
`attn1.attn_op.local_attn.proj_l`), which may carry the name of the original Wan (`self_attn`).
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack

import torch
from torch import nn

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.checkpoint import (
    StoredLayers,
    attach_child,
    model_folder,
    offload_hook,
    stored_layers,
)

__all__ = ["PROJECTION", "attach_projection", "find_projections"]

PROJECTION = "proj_l"

# What other code calls the self-attention of a block.
_ALIASES = ("self_attn",)


def find_projections(model: nn.Module, sizes: Mapping[str, int]) -> dict[str, nn.Linear]:
    """Read the projections of attention modules from the files that a model was loaded from.

    Args:
        model: a model of diffusers.
        sizes: channels per head of its attention modules, by dotted name.

    Returns:
        The projections that are not zero, in fp32, by the name of their attention module; empty
        where the model comes from no folder of this machine, or its files hold none.

    Raises:
        UsageError: a projection does not fit its module.
    """
    folder = model_folder(model)
    if folder is None or not sizes:
        return {}
    stored = stored_layers(folder, PROJECTION)
    found: dict[str, nn.Linear] = {}
    for prefix in stored.prefixes():
        name = _owner(prefix, sizes)
        if name is None:
            continue
        projection = _read(prefix, stored, sizes[name])
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


def _owner(prefix: str, names: Iterable[str]) -> str | None:
    """Return the attention module that a stored projection belongs to, or None."""
    for name in names:
        block = name.rpartition(".")[0]
        owners = (name, *(f"{block}.{alias}" for alias in _ALIASES))
        if any(prefix.startswith(f"{owner}.") for owner in owners):
            return name
    return None


def _read(prefix: str, stored: StoredLayers, head_size: int) -> nn.Linear:
    projection = stored.read(prefix, torch.float32)
    if tuple(projection.weight.shape) != (head_size, head_size):
        raise UsageError(
            f"{prefix}.weight in {stored.file(prefix)} must be {[head_size, head_size]}, channels "
            f"of a head to channels of a head, got {list(projection.weight.shape)}; the file "
            f"belongs to another model"
        )
    return projection
