"""SANA-Video: linear self-attention, which is left alone, and cross attention.

Ranks cannot share its tokens: of its blocks only the cross attention, a small part, takes tokens
one by one.
"""

from multimodal_gen.integrations.models.adapter import ModelAdapter, latents_grid

SANA_VIDEO = ModelAdapter(
    classes=("SanaVideoTransformer3DModel",),
    grid=latents_grid,
    split="has linear attention and convolutions over frames, which need all tokens on each rank",
)
