"""Flux.1: joint attention with the text in front of packed image tokens."""

import torch

from multimodal_gen.integrations.models.adapter import (
    Grid,
    ModelAdapter,
    ModelCall,
    front_text,
    latent_tokens,
)
from multimodal_gen.integrations.parallel.plan import Cut, SplitPlan


def grid_of_ids(call: ModelCall) -> Grid | None:
    """Return the grid of the position ids of a call, which are looked at once while they live."""
    ids = call.tensor("img_ids")
    if ids is None:
        return None
    if ids not in call.memo:
        call.memo[ids] = _read(ids)
    grid: Grid | None = call.memo[ids]
    return grid


def _read(ids: torch.Tensor) -> Grid | None:
    """Read the grid off ids [S, 3 or 4]; the tokens of reference images lie on no one grid."""
    positions = ids[0] if ids.dim() == 3 else ids
    if not len(positions):
        return None
    is_reference, rows, columns, *further = (int(top) for top in positions.amax(0).tolist())
    if is_reference or any(further) or (rows + 1) * (columns + 1) != positions.shape[0]:
        return None
    return (1, rows + 1, columns + 1)


FLUX = ModelAdapter(
    classes=("FluxTransformer2DModel",),
    grid=grid_of_ids,
    text_span=front_text,
    timestep_scale=1e-3,
    split=SplitPlan(
        tokens=latent_tokens,
        cuts=(
            Cut(module="", argument="hidden_states", dims=3),
            Cut(module="", argument="img_ids", dim=0, dims=2),
            Cut(module="", argument="img_ids", dims=3),
            Cut(module="", argument="controlnet_block_samples", dims=3),
            Cut(module="", argument="controlnet_single_block_samples", dims=3),
        ),
    ),
)
