"""Allegro: separate self and cross attention."""

from multimodal_gen.integrations.models.adapter import (
    Grid,
    ModelAdapter,
    ModelCall,
    tokens_of,
    video_grid,
)
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan


def _grid(call: ModelCall) -> Grid | None:
    patch = call.config.patch_size
    return video_grid(call, (call.config.patch_size_t, patch, patch))


def _refuse(call: ModelCall) -> str | None:
    if call.arguments.get("attention_mask") is None:
        return None
    return (
        "attention_mask must be None where ranks share the tokens of a video, got one of all tokens"
    )


ALLEGRO = ModelAdapter(
    classes=("AllegroTransformer3DModel",),
    grid=_grid,
    split=SplitPlan(
        tokens=tokens_of(_grid),
        refuse=_refuse,
        cuts=(
            Cut(module="transformer_blocks.0", argument="hidden_states", dims=3),
            # The positions of tokens along each axis, beside tables that have all positions.
            Cut(module="transformer_blocks.*", argument="image_rotary_emb", index=1, dims=2),
        ),
    ),
)
