"""Cosmos (1, 2 and 2.5): separate self and cross attention."""

from multimodal_gen.integrations.models.adapter import (
    ModelAdapter,
    ModelCall,
    latents_grid,
)
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan, must_be_none

_refuse_control = must_be_none("block_controlnet_hidden_states", "some, for all of the tokens")


def _refuse(call: ModelCall) -> str | None:
    timestep = call.tensor("timestep")
    if timestep is not None and timestep.dim() > 1:
        return (
            f"timestep must be [B] where ranks share the tokens of a video, got "
            f"{list(timestep.shape)}: every token then has one of its own"
        )
    return _refuse_control(call)


COSMOS = ModelAdapter(
    classes=("CosmosTransformer3DModel",),
    grid=latents_grid,
    split=SplitPlan(
        refuse=_refuse,
        cuts=(
            Cut("rope", dim=0, dims=2),
            Cut("learnable_pos_embed", dims=3),
            # The embedder returns [B, T, H, W, C], which the model makes tokens of itself.
            Cut("transformer_blocks.0", "hidden_states", dims=3),
        ),
    ),
)
