"""Cosmos (1, 2 and 2.5): separate self and cross attention."""

import math

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.models.adapter import Grid, ModelAdapter, ModelCall, video_grid
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan


def _grid(call: ModelCall) -> Grid | None:
    frames, height, width = call.config.patch_size
    return video_grid(call, (frames, height, width))


def _tokens(call: ModelCall) -> int | None:
    timestep = call.tensor("timestep")
    if timestep is not None and timestep.dim() > 1:
        raise UsageError(
            f"timestep must be [B] where ranks share the tokens of a video, got "
            f"{list(timestep.shape)}: every token then has one of its own; run it on one GPU"
        )
    if call.arguments.get("block_controlnet_hidden_states") is not None:
        raise UsageError(
            "block_controlnet_hidden_states must be None where ranks share the tokens of a video, "
            "got some, for all of the tokens; run it on one GPU"
        )
    grid = _grid(call)
    return None if grid is None else math.prod(grid)


COSMOS = ModelAdapter(
    classes=("CosmosTransformer3DModel",),
    grid=_grid,
    split=SplitPlan(
        tokens=_tokens,
        cuts=(
            Cut(module="rope", dim=0, dims=2),
            Cut(module="learnable_pos_embed", dims=3),
            # The embedder returns [B, T, H, W, C], which the model makes tokens of itself.
            Cut(module="transformer_blocks.0", argument="hidden_states", dims=3),
        ),
    ),
)
