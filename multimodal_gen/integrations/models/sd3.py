"""Stable Diffusion 3: joint attention with the text behind the image, both branches batched."""

from torch import nn

from multimodal_gen.integrations.models.adapter import (
    ModelAdapter,
    ModelCall,
    image_grid,
    text_behind,
    tokens_of,
)
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan
from multimodal_gen.runtime.layers.attention.request import AttentionRole


def _role(name: str, module: nn.Module) -> AttentionRole:
    """Return self-attention: `attn2` of 3.5 is a second one, over the image alone."""
    del name, module
    return AttentionRole.SELF


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
    role_of=_role,
    grid=image_grid,
    text_span=text_behind(image_grid, "encoder_hidden_states"),
    batches_guidance=True,
    batched=("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep"),
    split=SplitPlan(
        tokens=tokens_of(image_grid),
        refuse=_refuse,
        cuts=(
            Cut(module="pos_embed", dims=3),
            Cut(module="", argument="block_controlnet_hidden_states", dims=3),
        ),
    ),
)
