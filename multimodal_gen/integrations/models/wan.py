"""Wan 2.1 and 2.2 (both experts), and VACE: separate self and cross attention."""

from types import MappingProxyType

from multimodal_gen.integrations.gates import wan_projections
from multimodal_gen.integrations.models.adapter import Grid, ModelAdapter, ModelCall, video_grid


def _grid(call: ModelCall) -> Grid | None:
    frames, height, width = call.config.patch_size
    return video_grid(call, (frames, height, width))


WAN = ModelAdapter(
    classes=("WanTransformer3DModel", "WanVACETransformer3DModel"),
    grid=_grid,
    replacements=MappingProxyType(
        {"WanAttnProcessor": MappingProxyType({"_get_qkv_projections": wan_projections})}
    ),
    gated=("WanAttnProcessor",),
)
