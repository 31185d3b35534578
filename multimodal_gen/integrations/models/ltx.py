"""LTX-Video: packed latents, separate self and cross attention, both guidance branches batched."""

import math

from multimodal_gen.integrations.models.adapter import (
    Grid,
    ModelAdapter,
    ModelCall,
    latent_tokens,
    patch_of,
)
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan
from multimodal_gen.integrations.padding import KeyPadding
from multimodal_gen.runtime.layers.attention.request import AttentionRole


def packed_grid(call: ModelCall) -> Grid | None:
    """Return the grid that a call tells by sizes before patching."""
    sizes = [call.arguments.get(name) for name in ("num_frames", "height", "width")]
    if not all(isinstance(size, int) for size in sizes):
        return None
    patch = patch_of(call.config)
    frames, height, width = (int(size or 0) // cut for size, cut in zip(sizes, patch, strict=True))
    # Conditioning frames are appended as further tokens, which lie on no grid.
    on_grid = math.prod((frames, height, width)) == call.length("hidden_states")
    return (frames, height, width) if on_grid else None


def _padding(call: ModelCall) -> KeyPadding | None:
    mask = call.tensor("encoder_attention_mask")
    if mask is None or mask.dim() != 2:
        return None
    return KeyPadding(AttentionRole.CROSS, mask)


LTX = ModelAdapter(
    classes=("LTXVideoTransformer3DModel",),
    grid=packed_grid,
    padding=_padding,
    batches_guidance=True,
    batched=(
        "hidden_states",
        "encoder_hidden_states",
        "timestep",
        "encoder_attention_mask",
        "video_coords",
    ),
    masks_padding=("LTXVideoAttnProcessor",),
    split=SplitPlan(
        tokens=latent_tokens,
        cuts=(
            Cut(module="", argument="hidden_states", dims=3),
            # One timestep per token, where images or videos are to be continued.
            Cut(module="", argument="timestep", dims=2),
            Cut(module="rope", dims=3),
        ),
    ),
)
