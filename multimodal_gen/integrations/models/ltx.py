"""LTX-Video: packed latents, separate self and cross attention, both guidance branches batched."""

import math

from multimodal_gen.integrations.models.adapter import (
    Grid,
    ModelAdapter,
    ModelCall,
    latent_tokens,
    masked_text,
    patch_of,
)
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan
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


LTX = ModelAdapter(
    classes=("LTXVideoTransformer3DModel",),
    grid=packed_grid,
    padding=masked_text("encoder_attention_mask", AttentionRole.CROSS),
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
            Cut("", "hidden_states", dims=3),
            # One timestep per token, where images or videos are to be continued.
            Cut("", "timestep", dims=2),
            Cut("rope", dims=3),
        ),
    ),
)
