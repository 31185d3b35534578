"""Krea 2: the text, padded, in front of packed image tokens; keys repeated for all query heads."""

from torch import nn

from multimodal_gen.integrations.models.adapter import (
    Grid,
    ModelAdapter,
    ModelCall,
    front_text,
    latent_tokens,
)
from multimodal_gen.integrations.models.positions import grid_behind
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan
from multimodal_gen.integrations.padding import KeyPadding
from multimodal_gen.runtime.layers.attention.request import AttentionRole


def _role(name: str, module: nn.Module) -> AttentionRole:
    del module
    fuses = name.startswith("text_fusion.")
    return AttentionRole.ENCODER if fuses else AttentionRole.SELF


def _grid(call: ModelCall) -> Grid | None:
    return grid_behind(call, "position_ids", call.length("encoder_hidden_states"))


def _padding(call: ModelCall) -> KeyPadding | None:
    mask = call.tensor("encoder_attention_mask")
    if mask is None:
        return None
    return KeyPadding(AttentionRole.SELF, mask, after=call.length("hidden_states"))


KREA2 = ModelAdapter(
    classes=("Krea2Transformer2DModel",),
    role_of=_role,
    grid=_grid,
    text_span=front_text,
    padding=_padding,
    masks_padding=("Krea2AttnProcessor",),
    timestep_scale=1e-3,
    repeats_keys=True,
    split=SplitPlan(
        tokens=latent_tokens,
        cuts=(
            Cut(module="img_in", dims=3),
            Cut(module="rotary_emb", dim=0, dims=2, with_text=True),
            Cut(
                module="transformer_blocks.*",
                argument="attention_mask",
                dim=3,
                dims=4,
                with_text=True,
            ),
        ),
        gather="final_layer",
    ),
)
