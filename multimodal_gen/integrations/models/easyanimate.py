"""EasyAnimate: joint attention with the text, of one encoder or two, in front of the video."""

from multimodal_gen.integrations.models.adapter import (
    Grid,
    ModelAdapter,
    ModelCall,
    tokens_of,
    video_grid,
)
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan
from multimodal_gen.runtime.managers.forward_context import TextSpan


def _grid(call: ModelCall) -> Grid | None:
    return video_grid(call, (1, call.config.patch_size, call.config.patch_size))


def _text(call: ModelCall) -> TextSpan | None:
    length = call.length("encoder_hidden_states", "encoder_hidden_states_t5")
    return TextSpan(start=0, length=length) if length else None


EASYANIMATE = ModelAdapter(
    classes=("EasyAnimateTransformer3DModel",),
    grid=_grid,
    text_span=_text,
    split=SplitPlan(
        tokens=tokens_of(_grid),
        cuts=(
            Cut(module="rope_embedding", dim=0, dims=2),
            Cut(module="transformer_blocks.0", argument="hidden_states", dims=3),
        ),
    ),
)
