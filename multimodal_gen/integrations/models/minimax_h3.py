"""MiniMax-H3: text, pictures, sound and video in one packed sequence, the video's tokens last.

All tokens in front of the video's are attended to by all and attend to all, as text is elsewhere:
the text, keyframes and references, and the sound.
"""

import torch

from multimodal_gen.integrations.models.adapter import (
    Grid,
    ModelAdapter,
    ModelCall,
    role_by_prefix,
)
from multimodal_gen.integrations.models.positions import raster_grid
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.managers.forward_context import TextSpan


def _layout(call: ModelCall) -> tuple[int, Grid | None]:
    """Return the number of tokens before the video's and the grid, looked at once per packing."""
    positions = call.tensor("position_ids")
    if positions is None:
        return 0, None

    def read() -> tuple[int, Grid | None]:
        # The sound of the video comes right before it, behind keyframes and references.
        leading = (call.tensor("text_indices"), call.tensor("audio_indices"))
        lasts = [int(x.max()) for x in leading if x is not None and x.numel()]
        before = max(lasts, default=-1) + 1
        return before, raster_grid(positions[before:])

    return call.once(positions, read)


def _grid(call: ModelCall) -> Grid | None:
    return _layout(call)[1]


def _front(call: ModelCall) -> TextSpan | None:
    before, grid = _layout(call)
    return TextSpan(start=0, length=before) if grid is not None and before else None


def _timestep(call: ModelCall) -> torch.Tensor | None:
    """Return the timestep of the video: sound, keyframes and references have others."""
    timesteps, indices = call.tensor("timestep"), call.tensor("timestep_indices")
    if timesteps is None or indices is None or not indices.numel():
        return timesteps
    return timesteps[indices[-1:]]


MINIMAX_H3 = ModelAdapter(
    classes=("MiniMaxH3Transformer3DModel",),
    role_of=role_by_prefix(("token_refiner.",), AttentionRole.ENCODER, AttentionRole.SELF),
    grid=_grid,
    text_span=_front,
    timestep=_timestep,
    split=SplitPlan(
        cuts=(
            Cut("rope", dim=0, dims=2, with_text=True),
            Cut("transformer_blocks.0", "hidden_states", dims=3, with_text=True),
            Cut("transformer_blocks.*", "adaln_indices", dim=0, dims=1, with_text=True),
            Cut("norm_out", "timestep_indices", dim=0, dims=1, with_text=True),
        ),
        gather="norm_out",
        with_text=True,
    ),
)
