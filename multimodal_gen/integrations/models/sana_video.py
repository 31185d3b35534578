"""SANA-Video: linear self-attention, which is left alone, and cross attention.

Ranks cannot share its tokens: of its blocks only the cross attention, a small part, takes tokens
one by one.
"""

from multimodal_gen.integrations.models.adapter import Grid, ModelAdapter, ModelCall, video_grid


def _grid(call: ModelCall) -> Grid | None:
    frames, height, width = call.config.patch_size
    return video_grid(call, (frames, height, width))


SANA_VIDEO = ModelAdapter(
    classes=("SanaVideoTransformer3DModel",),
    grid=_grid,
    split="has linear attention and convolutions over frames, which need all tokens on each rank",
)
