"""Motif-Video: joint attention with image and text, padded, behind the video; then a decoder.

Its decoder blocks attend to the video twice: to the tokens that they refine, and behind them to
those that the encoder blocks made. The latter are attended to by all, as text is elsewhere.
"""

import math

import torch

from multimodal_gen.integrations.models.adapter import (
    ModelAdapter,
    ModelCall,
    latents_grid,
    text_behind,
)
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan
from multimodal_gen.integrations.padding import KeyPadding
from multimodal_gen.runtime.layers.attention.request import AttentionRole


def _padding(call: ModelCall) -> KeyPadding | None:
    mask, grid = call.tensor("encoder_attention_mask"), latents_grid(call)
    if mask is None or grid is None:
        return None
    image = mask.new_ones(mask.shape[0], call.length("image_embeds"))
    text = torch.cat((image, mask), dim=1)
    return KeyPadding(AttentionRole.SELF, text, before=math.prod(grid))


def _refuse(call: ModelCall) -> str | None:
    if not call.config.num_decoder_layers:
        return None
    return (
        f"num_decoder_layers must be 0 where ranks share the tokens of a video, got "
        f"{call.config.num_decoder_layers}: such layers attend to the video twice"
    )


MOTIF_VIDEO = ModelAdapter(
    classes=("MotifVideoTransformer3DModel",),
    grid=latents_grid,
    text_span=text_behind(latents_grid, "image_embeds", "encoder_hidden_states"),
    padding=_padding,
    masks_padding=("MotifVideoAttnProcessor2_0",),
    split=SplitPlan(
        refuse=_refuse,
        cuts=(Cut("rope", dim=0, dims=2), Cut("x_embedder", dims=3)),
    ),
)
