"""Qwen-Image: joint attention with the text, perhaps padded, in front of packed image tokens."""

import math

from multimodal_gen.integrations.models.adapter import (
    Grid,
    ModelAdapter,
    ModelCall,
    front_text,
    latent_tokens,
    masked_text,
)
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan
from multimodal_gen.runtime.managers.forward_context import TextSpan


def _grid(call: ModelCall) -> Grid | None:
    shapes = call.arguments.get("img_shapes")
    if not shapes:
        return None
    images = shapes[0] if isinstance(shapes[0], list) else shapes
    # Edit models put their reference images behind the image: all attend to them, as to text.
    frames, height, width = images[0]
    return (int(frames), int(height), int(width))


QWEN_IMAGE = ModelAdapter(
    classes=("QwenImageTransformer2DModel",),
    grid=_grid,
    text_span=front_text,
    padding=masked_text("encoder_hidden_states_mask", after=("hidden_states",)),
    masks_padding=("QwenDoubleStreamAttnProcessor2_0",),
    timestep_scale=1e-3,
    split=SplitPlan(
        tokens=latent_tokens,
        cuts=(
            Cut("img_in", dims=3),
            Cut("pos_embed", index=0, dim=0, dims=2),
            Cut("transformer_blocks.*", "modulate_index", only_if="zero_cond_t", dims=2),
            Cut("", "controlnet_block_samples", dims=3),
        ),
    ),
)


def _grid_21(call: ModelCall) -> Grid | None:
    shapes = call.arguments.get("img_shapes")
    if not shapes or not shapes[0]:
        return None
    frames, height, width = shapes[0][-1]  # behind those of the pictures to go by
    return (int(frames), int(height), int(width))


def _front_21(call: ModelCall) -> TextSpan | None:
    """Return the span of the text and of the pictures in it, 4 tokens to each of their slots."""
    shapes = call.arguments.get("img_shapes")
    if not shapes or not shapes[0]:
        return None
    pictures = sum(math.prod(shape) for shape in shapes[0][:-1])
    return TextSpan(start=0, length=call.length("encoder_hidden_states") - pictures // 4 + pictures)


_BLOCKS_21 = "transformer_blocks.*"

# The text and the pictures to go by attend to what is before them; the image attends to them all.
QWEN_IMAGE_21 = ModelAdapter(
    classes=("QwenImage21Transformer2DModel",),
    grid=_grid_21,
    text_span=_front_21,
    timestep_scale=1e-3,
    split=SplitPlan(
        cuts=(
            # Without the text in calls that have its keys from an earlier step.
            Cut("transformer_blocks.0", "hidden_states", dims=3, with_text=True),
            Cut(_BLOCKS_21, "rotary_emb", dim=0, dims=2, with_text=True),
            Cut(_BLOCKS_21, "target_token_mask", dim=0, dims=1, with_text=True),
            Cut(_BLOCKS_21, "key_valid", dims=2, with_text=True),
            Cut(_BLOCKS_21, "attention_mask", dim=3, dims=4, with_text=True),
            Cut("norm_out", "target_token_mask", dim=0, dims=1, with_text=True),
        ),
        keys_alone=True,
        with_text=True,
    ),
)
