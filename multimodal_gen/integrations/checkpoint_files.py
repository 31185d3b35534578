"""Where the files of a loaded model are: diffusers writes down what it was asked for, not a folder.

That may be the folder of the model, the folder or hub id of a pipeline with the model in a
`subfolder`, as text or as a path.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from multimodal_gen.files import MalformedError, read_small_file
from multimodal_gen.runtime.generator.weights_file import weight_files
from multimodal_gen.settings import read_json

# Parameters of a model that tell it from others of its class.
_COMPARED = 3
_MOST_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """Where the files of a model are, as far as that is known.

    Attributes:
        folder: holds the model's safetensors files; None where it is not known.
        source: what the model was loaded from; "" where it was not loaded.
        reason: why `folder` is None; "" where it is known.
    """

    folder: Path | None = None
    source: str = ""
    reason: str = ""


def find_checkpoint(model: nn.Module) -> CheckpointFiles:
    """Find the folder of this machine that a model of diffusers was loaded from.

    Of several folders with models of its class it is the one whose parameters it has.
    """
    config = getattr(model, "config", None)
    name = config.get("_name_or_path") if isinstance(config, Mapping) else None
    if not isinstance(name, (str, os.PathLike)) or not str(name):
        return CheckpointFiles(reason="it was not loaded by from_pretrained")
    source = str(name)
    top = _top_folder(source)
    if top is None:
        return CheckpointFiles(
            source=source, reason=f"{source!r} is no folder, nor in the cache of the hub"
        )
    found = [folder for folder in (top, *_folders_in(top)) if _holds(folder, model)]
    if not found and weight_files(top):
        found = [top]  # without a config of its own
    if len(found) > 1:
        found = [folder for folder in found if _has_parameters_of(folder, model)]
    if len(found) == 1:
        return CheckpointFiles(folder=found[0], source=source)
    what = "no folder" if not found else f"{len(found)} folders"
    return CheckpointFiles(
        source=source,
        reason=f"{what} in {source!r} must be it, by class and parameters; load it from its own",
    )


def _top_folder(source: str) -> Path | None:
    folder = Path(source)
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        return None
    try:
        return Path(snapshot_download(source, local_files_only=True))
    except (OSError, ValueError, HfHubHTTPError, HFValidationError):
        return None


def _folders_in(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(inner for inner in folder.iterdir() if inner.is_dir())
    except OSError:
        return


def _holds(folder: Path, model: nn.Module) -> bool:
    """Whether a folder holds safetensors files and a config of the model's class."""
    try:
        config: Any = read_json(read_small_file(folder / "config.json"))
    except MalformedError:
        return False
    named = config.get("_class_name") if isinstance(config, dict) else None
    return any(cls.__name__ == named for cls in type(model).__mro__) and bool(weight_files(folder))


def _has_parameters_of(folder: Path, model: nn.Module) -> bool:
    """Whether some small parameters of a model are those in the files of a folder."""
    from safetensors import safe_open

    known = {
        name: p
        for name, p in model.named_parameters()
        if not p.is_meta and p.dtype.is_floating_point and p.numel() <= _MOST_ELEMENTS
    }
    compared = 0
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in sorted(known.keys() & set(file.keys())):
                own = known[name].detach().cpu()
                stored = file.get_tensor(name).to(own.dtype)
                # Parameters that training leaves as they were, such as zeros, tell nothing.
                if own.numel() < 2 or bool((own == own.flatten()[0]).all()):
                    continue
                if own.shape != stored.shape or not torch.equal(own, stored):
                    return False
                compared += 1
                if compared == _COMPARED:
                    return True
    return compared > 0
