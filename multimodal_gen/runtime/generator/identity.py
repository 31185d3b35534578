"""Which model a pipeline is, as far as results that outlive a run depend on it."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.generator.loading import PipelineIndex, first_line, import_diffusers

__all__ = ["denoiser_configs", "model_identity"]


def model_identity(index: PipelineIndex) -> dict[str, str]:
    """Return what tells a model from others, read without its weights.

    Args:
        index: the pipeline.

    Returns:
        "model": the hub id or the folder, absolute and without links; "denoisers": a digest of the
        classes and configurations of its denoisers.

    Raises:
        UsageError: the configuration of a denoiser cannot be read.
    """
    folder = Path(index.model_path)
    model = str(folder.resolve()) if folder.is_dir() else index.model_path
    configs = json.dumps(dict(denoiser_configs(index)), sort_keys=True, default=str)
    return {"model": model, "denoisers": hashlib.sha256(configs.encode()).hexdigest()[:16]}


def denoiser_configs(index: PipelineIndex) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and configuration of every denoiser, read without its weights.

    Raises:
        UsageError: the configuration of a denoiser cannot be read.
    """
    diffusers = import_diffusers()
    for name, (library, class_name) in index.components.items():
        cls: Any = getattr(diffusers, class_name, None) if library == "diffusers" else None
        if not hasattr(cls, "set_attention_backend") or hasattr(cls, "decode"):
            continue
        try:
            config = cls.load_config(index.model_path, subfolder=name)
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(
                f"component {name} of {index.model_path!r} must have a config for {class_name}, "
                f"reading it failed: {first_line(error)}"
            ) from error
        # The other keys tell who wrote the file, and when.
        kept = {key: value for key, value in config.items() if not key.startswith("_")}
        yield name, {**kept, "_class_name": class_name}
