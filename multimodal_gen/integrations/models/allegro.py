"""Allegro: separate self and cross attention."""

from multimodal_gen.integrations.models.adapter import ModelAdapter, latents_grid, tokens_of
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan, must_be_none

ALLEGRO = ModelAdapter(
    classes=("AllegroTransformer3DModel",),
    grid=latents_grid,
    split=SplitPlan(
        tokens=tokens_of(latents_grid),
        refuse=must_be_none("attention_mask", "one of all tokens"),
        cuts=(
            Cut(module="transformer_blocks.0", argument="hidden_states", dims=3),
            # The positions of tokens along each axis, beside tables that have all positions.
            Cut(module="transformer_blocks.*", argument="image_rotary_emb", index=1, dims=2),
        ),
    ),
)
