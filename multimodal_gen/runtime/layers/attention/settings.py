"""What a backend was told, in few words, so that ranks can compare it."""

import dataclasses
import hashlib
from functools import lru_cache
from pathlib import Path

from multimodal_gen.runtime.layers.attention.config import BackendConfig

__all__ = ["settings_text"]

_MOST = 240


@lru_cache(maxsize=256)
def settings_text(config: BackendConfig | None) -> str:
    """Return the parameters that are not at their defaults; of files they name, the content.

    A file may lie elsewhere on another host: its digest stands for it, as it was when it was first
    asked for.

    Args:
        config: a backend's parameters, or None for its defaults.

    Returns:
        Text of at most 240 characters; different for different parameters.
    """
    if config is None:
        return "defaults"
    told = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == field.default:
            continue
        if field.name.endswith("_path") and Path(str(value)).is_file():
            value = f"file {_digest(Path(str(value)).read_bytes())}"
        told.append(f"{field.name}={value}")
    text = ", ".join(told) or "defaults"
    if len(text) <= _MOST:
        return text
    ending = f"... {_digest(text.encode())}"
    return text[: _MOST - len(ending)] + ending


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
