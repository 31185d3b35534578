"""Allegro: separate self and cross attention."""

from multimodal_gen.integrations.models.adapter import Grid, ModelAdapter, ModelCall, video_grid


def _grid(call: ModelCall) -> Grid | None:
    patch = call.config.patch_size
    return video_grid(call, (call.config.patch_size_t, patch, patch))


ALLEGRO = ModelAdapter(classes=("AllegroTransformer3DModel",), grid=_grid)
