"""SANA-Video: linear self-attention, which is left alone, and cross attention."""

from multimodal_gen.integrations.models.adapter import Grid, ModelAdapter, ModelCall, video_grid


def _grid(call: ModelCall) -> Grid | None:
    frames, height, width = call.config.patch_size
    return video_grid(call, (frames, height, width))


SANA_VIDEO = ModelAdapter(classes=("SanaVideoTransformer3DModel",), grid=_grid)
