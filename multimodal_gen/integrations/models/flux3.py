"""FLUX.3: blocks for each kind of token, then joint attention: text, image, reference images.

The blocks over text alone and over reference images alone have the role `encoder`. Those over the
image alone run on all of its tokens on each rank.
"""

import math

from multimodal_gen.integrations.models.adapter import (
    Grid,
    ModelAdapter,
    ModelCall,
    front_text,
    latent_tokens,
    role_by_prefix,
)
from multimodal_gen.integrations.models.positions import grid_behind
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan, must_be_none
from multimodal_gen.runtime.layers.attention.request import AttentionRole

_IMAGE = "mode_blocks.image."


def _grid(call: ModelCall) -> Grid | None:
    grid = grid_behind(call, "img_ids", 0)
    on_grid = grid is not None and math.prod(grid) == call.length("hidden_states")
    return grid if on_grid else None


FLUX3 = ModelAdapter(
    classes=("Flux3Transformer2DModel",),
    role_of=role_by_prefix(
        ("single_transformer_blocks.", _IMAGE), AttentionRole.SELF, AttentionRole.ENCODER
    ),
    grid=_grid,
    text_span=front_text,
    timestep_scale=1e-3,
    split=SplitPlan(
        tokens=latent_tokens,
        refuse=must_be_none(
            "image_cond_hidden_states", "reference images, which have no output", "an image"
        ),
        cuts=(
            Cut("single_transformer_blocks.0", "hidden_states", dims=3),
            Cut("single_transformer_blocks.*", "temb_mod", dims=3),
            Cut("single_transformer_blocks.*", "image_rotary_emb", dim=0, dims=2, with_text=True),
            Cut("norm_out", "temb", dims=3),
        ),
        whole=(_IMAGE,),
    ),
)
