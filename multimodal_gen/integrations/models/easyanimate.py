"""EasyAnimate: joint attention with the text, of one encoder or two, in front of the video."""

from multimodal_gen.integrations.models.adapter import (
    ModelAdapter,
    ModelCall,
    front,
    latents_grid,
)
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan
from multimodal_gen.runtime.managers.forward_context import TextSpan


def _text(call: ModelCall) -> TextSpan | None:
    return front(call.length("encoder_hidden_states", "encoder_hidden_states_t5"))


EASYANIMATE = ModelAdapter(
    classes=("EasyAnimateTransformer3DModel",),
    grid=latents_grid,
    text_span=_text,
    split=SplitPlan(
        cuts=(
            Cut("rope_embedding", dim=0, dims=2),
            Cut("transformer_blocks.0", "hidden_states", dims=3),
        ),
    ),
)
