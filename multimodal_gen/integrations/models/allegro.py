"""Allegro: separate self and cross attention."""

from multimodal_gen.integrations.models.adapter import ModelAdapter, latents_grid
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan, must_be_none

ALLEGRO = ModelAdapter(
    classes=("AllegroTransformer3DModel",),
    grid=latents_grid,
    split=SplitPlan(
        refuse=must_be_none("attention_mask", "one of all tokens"),
        cuts=(
            Cut("transformer_blocks.0", "hidden_states", dims=3),
            # The positions of tokens along each axis; the tables have all positions.
            Cut("transformer_blocks.*", "image_rotary_emb", index=1, dims=2),
        ),
    ),
)
