"""Mochi: joint attention with the text, its padding left out, behind the video."""

from multimodal_gen.integrations.models.adapter import (
    Grid,
    ModelAdapter,
    ModelCall,
    rear_text,
    video_grid,
)
from multimodal_gen.runtime.managers.forward_context import TextSpan


def _grid(call: ModelCall) -> Grid | None:
    return video_grid(call, (1, call.config.patch_size, call.config.patch_size))


def _text(call: ModelCall) -> TextSpan | None:
    return rear_text(_grid(call), call.length("encoder_hidden_states"))


MOCHI = ModelAdapter(
    classes=("MochiTransformer3DModel",),
    grid=_grid,
    text_span=_text,
    split="makes a call for each sample, with as many tokens of text as that has",
)
