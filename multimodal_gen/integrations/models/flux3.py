"""FLUX.3: blocks for each kind of token, then joint attention: text, image, reference images.

The blocks over text alone and over reference images alone have the role `encoder`. Those over the
image alone run on all of its tokens on each rank.
"""

import math

from torch import nn

from multimodal_gen.integrations.models.adapter import (
    Grid,
    ModelAdapter,
    ModelCall,
    front_text,
    latent_tokens,
)
from multimodal_gen.integrations.models.positions import grid_behind
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan, must_be_none
from multimodal_gen.runtime.layers.attention.request import AttentionRole

_IMAGE = "mode_blocks.image."


def _role(name: str, module: nn.Module) -> AttentionRole:
    del module
    of_image = name.startswith(("single_transformer_blocks.", _IMAGE))
    return AttentionRole.SELF if of_image else AttentionRole.ENCODER


def _grid(call: ModelCall) -> Grid | None:
    grid = grid_behind(call, "img_ids", 0)
    on_grid = grid is not None and math.prod(grid) == call.length("hidden_states")
    return grid if on_grid else None


_refuse = must_be_none(
    "image_cond_hidden_states", "reference images, which have no output", "an image"
)


FLUX3 = ModelAdapter(
    classes=("Flux3Transformer2DModel",),
    role_of=_role,
    grid=_grid,
    text_span=front_text,
    timestep_scale=1e-3,
    split=SplitPlan(
        tokens=latent_tokens,
        refuse=_refuse,
        cuts=(
            Cut(module="single_transformer_blocks.0", argument="hidden_states", dims=3),
            Cut(module="single_transformer_blocks.*", argument="temb_mod", dims=3),
            Cut(
                module="single_transformer_blocks.*",
                argument="image_rotary_emb",
                dim=0,
                dims=2,
                with_text=True,
            ),
            Cut(module="norm_out", argument="temb", dims=3),
        ),
        whole=(_IMAGE,),
    ),
)
