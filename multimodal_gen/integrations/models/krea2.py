"""Krea 2: the text, padded, in front of packed image tokens; keys repeated for all query heads."""

from multimodal_gen.integrations.models.adapter import (
    Grid,
    ModelAdapter,
    ModelCall,
    front_text,
    latent_tokens,
    masked_text,
    role_by_prefix,
)
from multimodal_gen.integrations.models.positions import grid_behind
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan
from multimodal_gen.runtime.layers.attention.request import AttentionRole


def _grid(call: ModelCall) -> Grid | None:
    return grid_behind(call, "position_ids", call.length("encoder_hidden_states"))


KREA2 = ModelAdapter(
    classes=("Krea2Transformer2DModel",),
    role_of=role_by_prefix(("text_fusion.",), AttentionRole.ENCODER, AttentionRole.SELF),
    grid=_grid,
    text_span=front_text,
    padding=masked_text("encoder_attention_mask", after=("hidden_states",)),
    masks_padding=("Krea2AttnProcessor",),
    timestep_scale=1e-3,
    repeats_keys=True,
    split=SplitPlan(
        tokens=latent_tokens,
        cuts=(
            Cut("img_in", dims=3),
            Cut("rotary_emb", dim=0, dims=2, with_text=True),
            Cut("transformer_blocks.*", "attention_mask", dim=3, dims=4, with_text=True),
        ),
        gather="final_layer",
    ),
)
