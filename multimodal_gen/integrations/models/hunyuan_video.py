"""HunyuanVideo and HunyuanVideo-1.5: joint attention with the text, padded, behind the video.

FramePack has tokens of earlier frames in front of the video's, coarser the longer ago. They, and an
image and the text behind the video, are attended to by all.
"""

import math
from types import MappingProxyType

import torch

from multimodal_gen.integrations.models.adapter import (
    ModelAdapter,
    ModelCall,
    front,
    history_tokens,
    latents_grid,
    masked_text,
    refiner_role,
    text_behind,
)
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan
from multimodal_gen.integrations.padding import FunctionalWithPairMask, KeyPadding
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.managers.forward_context import TextSpan


def _padding_15(call: ModelCall) -> KeyPadding | None:
    masks = [call.tensor(f"encoder_attention_mask{suffix}") for suffix in ("_2", "")]
    image, grid = call.tensor("image_embeds"), latents_grid(call)
    if image is None or masks[0] is None or masks[1] is None or grid is None:
        return None
    # Without an image its embeddings are all zero, and the model masks them out.
    # The pipeline embeds it once for all videos of a prompt.
    has_image = (image != 0).any().expand(masks[0].shape[0], image.shape[1])
    text = torch.cat((has_image, *(mask != 0 for mask in masks if mask is not None)), dim=1)
    return KeyPadding(AttentionRole.SELF, text, before=math.prod(grid), valid_first=True)


# The masks of both models are as long as the tokens that leave the embedder, and the text.
_CUTS = (Cut("rope", dim=0, dims=2), Cut("x_embedder", dims=3))

# Tokens of the image to continue, modulated by a timestep of their own.
_FIRST_FRAME = tuple(
    Cut(f"{blocks}.*", "num_tokens", is_count=True)
    for blocks in ("transformer_blocks", "single_transformer_blocks")
)

HUNYUAN_VIDEO = ModelAdapter(
    classes=("HunyuanVideoTransformer3DModel",),
    role_of=refiner_role,
    grid=latents_grid,
    text_span=text_behind(latents_grid, "encoder_hidden_states"),
    padding=masked_text("encoder_attention_mask", grid=latents_grid, valid_first=True),
    masks_padding=("HunyuanVideoAttnProcessor2_0",),
    split=SplitPlan(cuts=(*_CUTS, *_FIRST_FRAME)),
)

HUNYUAN_VIDEO_15 = ModelAdapter(
    classes=("HunyuanVideo15Transformer3DModel",),
    role_of=refiner_role,
    grid=latents_grid,
    text_span=text_behind(
        latents_grid, "image_embeds", "encoder_hidden_states_2", "encoder_hidden_states"
    ),
    padding=_padding_15,
    masks_padding=("HunyuanVideo15AttnProcessor2_0",),
    split=SplitPlan(cuts=_CUTS),
    replacements=MappingProxyType(
        {
            "HunyuanVideo15AttnProcessor2_0": MappingProxyType({"F": FunctionalWithPairMask}),
        }
    ),
)

# How many patches of the video one of the earlier frames covers on each axis.
_EARLIER = MappingProxyType({"clean": 1, "history_2x": 2, "history_4x": 4})


def _earlier(call: ModelCall) -> TextSpan | None:
    return front(sum(history_tokens(call, name, cut) for name, cut in _EARLIER.items()))


def _behind(call: ModelCall) -> int:
    """Return the number of tokens of the image and the text, without padding in one sample."""
    mask = call.tensor("encoder_attention_mask")
    if mask is None:
        return 0
    tokens = call.once(mask, lambda: int(mask.sum()) if len(mask) == 1 else mask.shape[1])
    return call.length("image_embeds") + tokens


FRAMEPACK = ModelAdapter(
    classes=("HunyuanVideoFramepackTransformer3DModel",),
    role_of=refiner_role,
    grid=latents_grid,
    text_span=_earlier,
    split=SplitPlan(
        cuts=(
            Cut("transformer_blocks.0", "hidden_states", dims=3, with_text="front"),
            Cut("transformer_blocks.*", "freqs_cis", dim=0, dims=2, with_text="front"),
            Cut(
                "single_transformer_blocks.*", "image_rotary_emb", dim=0, dims=2, with_text="front"
            ),
            *(
                Cut(f"{blocks}.*", "attention_mask", dim=3, dims=4, with_text=True)
                for blocks in ("transformer_blocks", "single_transformer_blocks")
            ),
        ),
        behind=_behind,
        # What follows counts the video's tokens from the end.
        gather="single_transformer_blocks.-1",
        with_text="front",
    ),
)
