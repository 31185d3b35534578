"""HunyuanImage 2.1: joint attention with the text, padded, behind the image."""

import math

import torch

from multimodal_gen.integrations.models.adapter import (
    Grid,
    ModelAdapter,
    ModelCall,
    image_grid,
    latents_grid,
    rear_text,
    refiner_role,
)
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan
from multimodal_gen.integrations.padding import KeyPadding
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.managers.forward_context import TextSpan


def _grid(call: ModelCall) -> Grid | None:
    return image_grid(call) if len(call.config.patch_size) == 2 else latents_grid(call)


def _has_glyphs(call: ModelCall) -> bool:
    """Whether words to be drawn are embedded letter by letter, too."""
    embedded = call.config.text_embed_2_dim is not None
    return embedded and call.tensor("encoder_hidden_states_2") is not None


def _text(call: ModelCall) -> TextSpan | None:
    names = ("encoder_hidden_states", "encoder_hidden_states_2")
    return rear_text(_grid(call), call.length(*names[: 1 + _has_glyphs(call)]))


def _padding(call: ModelCall) -> KeyPadding | None:
    mask, grid = call.tensor("encoder_attention_mask"), _grid(call)
    if mask is None or grid is None:
        return None
    before = math.prod(grid)
    if not _has_glyphs(call):
        return KeyPadding(AttentionRole.SELF, mask, before=before)
    glyphs = call.tensor("encoder_attention_mask_2")
    if glyphs is None:
        return None
    text = torch.cat((glyphs != 0, mask != 0), dim=1)
    return KeyPadding(AttentionRole.SELF, text, before=before, valid_first=True)


HUNYUAN_IMAGE = ModelAdapter(
    classes=("HunyuanImageTransformer2DModel",),
    role_of=refiner_role,
    grid=_grid,
    text_span=_text,
    padding=_padding,
    masks_padding=("HunyuanImageAttnProcessor",),
    split=SplitPlan(
        cuts=(Cut("rope", dim=0, dims=2), Cut("x_embedder", dims=3)),
    ),
)
