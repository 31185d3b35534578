"""Z-Image: the caption behind the image in one sequence, each padded to 32 tokens.

Rows that pad the image lie between it and the caption: all attend to them, as the model does. The
pipeline gives the model other numbers than the scheduler's timesteps, so its steps are counted.
"""

import math
from typing import Any

import torch

from multimodal_gen.integrations.models.adapter import (
    Grid,
    ModelAdapter,
    ModelCall,
    role_by_prefix,
)
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan, must_be_none
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.managers.forward_context import TextSpan

_MULTIPLE = 32


def _grid(call: ModelCall) -> Grid | None:
    images: Any = call.arguments.get("x")
    if not images or not all(isinstance(image, torch.Tensor) for image in images):
        return None  # lists of images, which lie on no one grid
    if len({image.shape for image in images}) > 1:
        return None
    _, frames, height, width = images[0].shape
    patch = int(call.arguments.get("patch_size") or 2)
    return (frames // int(call.arguments.get("f_patch_size") or 1), height // patch, width // patch)


def _text(call: ModelCall) -> TextSpan | None:
    grid, captions = _grid(call), call.arguments.get("cap_feats")
    if grid is None or not captions:
        return None
    image = math.prod(grid)
    longest = _padded(max(len(caption) for caption in captions))
    return TextSpan(start=image, length=_padded(image) - image + longest)


def _padded(length: int) -> int:
    return length + -length % _MULTIPLE


Z_IMAGE = ModelAdapter(
    classes=("ZImageTransformer2DModel",),
    # What refines the caption, or a picture's embedding.
    role_of=role_by_prefix(
        ("context_refiner.", "siglip_refiner."), AttentionRole.ENCODER, AttentionRole.SELF
    ),
    grid=_grid,
    text_span=_text,
    split=SplitPlan(
        refuse=must_be_none("controlnet_block_samples", "some, for all of the tokens", "an image"),
        cuts=(
            Cut("layers.0", "x", dims=3, with_text=True),
            Cut("layers.*", "attn_mask", dims=2, with_text=True),
            Cut("layers.*", "freqs_cis", dims=3, with_text=True),
        ),
        gather="layers.-1",
        with_text=True,
        whole=("noise_refiner.",),
    ),
)
