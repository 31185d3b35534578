"""SkyReels-V2: separate self and cross attention, with a timestep per frame if asked for."""

from multimodal_gen.integrations.models.adapter import (
    ModelAdapter,
    ModelCall,
    latents_grid,
)
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan


def _refuse(call: ModelCall) -> str | None:
    if call.arguments.get("enable_diffusion_forcing"):
        return (
            "enable_diffusion_forcing must be False where ranks share the tokens of a video, got "
            "True: every token then has a timestep of its own"
        )
    if call.config.num_frame_per_block > 1:
        return (
            f"num_frame_per_block must be 1 where ranks share the tokens of a video, got "
            f"{call.config.num_frame_per_block}: a mask over all tokens makes its blocks causal"
        )
    return None


SKYREELS_V2 = ModelAdapter(
    classes=("SkyReelsV2Transformer3DModel",),
    grid=latents_grid,
    causal_blocks="num_frame_per_block",
    split=SplitPlan(
        refuse=_refuse,
        cuts=(
            Cut("rope", dims=4),
            Cut("patch_embedding", dim=2, dims=5, flat=True),
        ),
    ),
)
