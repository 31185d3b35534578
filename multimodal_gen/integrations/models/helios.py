"""Helios: a chunk of a video behind tokens of its history, coarser the longer ago.

The history is attended to by all and attends to all, as text does elsewhere.
"""

import math
from types import MappingProxyType

from multimodal_gen.integrations.models.adapter import Grid, ModelAdapter, ModelCall, video_grid
from multimodal_gen.runtime.managers.forward_context import TextSpan

# How many patches of the chunk one of the history covers on each axis.
_HISTORY = MappingProxyType({"short": 1, "mid": 2, "long": 4})


def _grid(call: ModelCall) -> Grid | None:
    frames, height, width = call.config.patch_size
    return video_grid(call, (frames, height, width))


def _history(call: ModelCall) -> TextSpan | None:
    length = sum(_tokens(call, name, coarser) for name, coarser in _HISTORY.items())
    return TextSpan(start=0, length=length) if length else None


def _tokens(call: ModelCall, name: str, coarser: int) -> int:
    latent = call.tensor(f"latents_history_{name}")
    if latent is None or call.arguments.get(f"indices_latents_history_{name}") is None:
        return 0
    sizes = zip(latent.shape[2:], call.config.patch_size, strict=True)
    return math.prod(-(-size // (patch * coarser)) for size, patch in sizes)


HELIOS = ModelAdapter(classes=("HeliosTransformer3DModel",), grid=_grid, text_span=_history)
