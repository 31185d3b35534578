"""Linear layers that diffusers drops when it loads a checkpoint, read again from its files."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["StoredLayers", "attach_child", "model_folder", "offload_hook", "stored_layers"]


class StoredLayers:
    """The linear layers of one name in a folder of safetensors files.

    Args:
        files: the file of every parameter, by its key.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def __contains__(self, prefix: object) -> bool:
        return f"{prefix}.weight" in self._files

    def prefixes(self) -> tuple[str, ...]:
        """Return what the keys of each layer begin with."""
        return tuple(k.removesuffix(".weight") for k in self._files if k.endswith(".weight"))

    def file(self, prefix: str) -> Path:
        """Return the file of a layer's weight."""
        return self._files[f"{prefix}.weight"]

    def read(self, prefix: str, dtype: torch.dtype) -> nn.Linear:
        """Return a layer, on the CPU and without gradients.

        Args:
            prefix: what its keys begin with.
            dtype: dtype of the result.
        """
        from safetensors import safe_open

        tensors = {}
        for part in ("weight", "bias"):
            key = f"{prefix}.{part}"
            if key in self._files:
                with safe_open(self._files[key], framework="pt") as file:
                    tensors[part] = file.get_tensor(key).to(dtype)
        inputs, outputs = tensors["weight"].shape[1], tensors["weight"].shape[0]
        layer = nn.Linear(inputs, outputs, bias="bias" in tensors, device="meta")
        layer.load_state_dict(tensors, assign=True)
        return layer.requires_grad_(False)


def stored_layers(folder: Path, name: str) -> StoredLayers:
    """Find the layers called `name`; only the heads of the files are read."""
    from safetensors import safe_open

    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                if f".{key.rpartition('.')[0]}".endswith(f".{name}"):
                    found.setdefault(key, path)
    return StoredLayers(found)


def model_folder(model: nn.Module) -> Path | None:
    """Return the folder of this machine that a model of diffusers was loaded from, or None."""
    config = getattr(model, "config", None)
    name = config.get("_name_or_path") if isinstance(config, Mapping) else None
    if not isinstance(name, str) or not name:
        return None
    folder = Path(name)
    return folder if folder.is_dir() else None


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
