"""Stable Diffusion 3: joint attention with the text behind the image, both branches batched."""

from multimodal_gen.integrations.models.adapter import (
    ModelAdapter,
    ModelCall,
    image_grid,
    text_behind,
)
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan
from multimodal_gen.runtime.layers.attention.request import AttentionRole


def _refuse(call: ModelCall) -> str | None:
    if not call.config.dual_attention_layers:
        return None
    return (
        f"dual_attention_layers must be empty where ranks share the tokens of an image, got "
        f"{list(call.config.dual_attention_layers)}: such layers attend to the image with and "
        f"without the text"
    )


SD3 = ModelAdapter(
    classes=("SD3Transformer2DModel",),
    # `attn2` of 3.5 is a second self-attention, over the image alone.
    role_of=lambda name, module: AttentionRole.SELF,
    grid=image_grid,
    text_span=text_behind(image_grid, "encoder_hidden_states"),
    batches_guidance=True,
    batched=("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep"),
    split=SplitPlan(
        refuse=_refuse,
        cuts=(
            Cut("pos_embed", dims=3),
            Cut("", "block_controlnet_hidden_states", dims=3),
        ),
    ),
)
