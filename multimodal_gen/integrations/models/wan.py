"""Wan 2.1 and 2.2 (both experts), VACE, ChronoEdit, Animate: separate self and cross attention."""

from dataclasses import replace
from types import MappingProxyType

from torch import nn

from multimodal_gen.integrations.models.adapter import (
    ModelAdapter,
    latents_grid,
    role_by_name,
    tokens_of,
)
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan
from multimodal_gen.integrations.trained_layers import wan_projections
from multimodal_gen.runtime.layers.attention.request import AttentionRole

_CUTS = (
    # One timestep per token, as TI2V has it.
    Cut(module="", argument="timestep", dims=2),
    Cut(module="rope", dims=4),
    Cut(module="patch_embedding", dim=2, dims=5, flat=True),
)

WAN = ModelAdapter(
    classes=("WanTransformer3DModel",),
    grid=latents_grid,
    replacements=MappingProxyType(
        {"WanAttnProcessor": MappingProxyType({"_get_qkv_projections": wan_projections})}
    ),
    gated=("WanAttnProcessor",),
    split=SplitPlan(tokens=tokens_of(latents_grid), cuts=_CUTS),
)

# Split by the plan that diffusers has for it.
CHRONOEDIT = replace(WAN, classes=("ChronoEditTransformer3DModel",), split=None)

_CONTROL = Cut(module="vace_patch_embedding", dim=2, dims=5, flat=True, may_end_early=True)

WAN_VACE = replace(
    WAN,
    classes=("WanVACETransformer3DModel",),
    split=SplitPlan(tokens=tokens_of(latents_grid), cuts=(*_CUTS, _CONTROL)),
)


def _animate_role(name: str, module: nn.Module) -> AttentionRole:
    """Tell modules in which every frame attends to the face in it from those of Wan."""
    if name.startswith("face_adapter."):
        return AttentionRole.CROSS
    return role_by_name(name, module)


WAN_ANIMATE = ModelAdapter(
    classes=("WanAnimateTransformer3DModel",),
    role_of=_animate_role,
    grid=latents_grid,
    split=SplitPlan(
        tokens=tokens_of(latents_grid),
        cuts=(
            Cut(module="rope", dims=4),
            # The model adds the pose to what its embedder returns.
            Cut(module="blocks.0", argument="hidden_states", dims=3),
            Cut(module="face_adapter.*", dims=3),
        ),
        # Every rank looks at the faces of whole frames.
        gathered=(Cut(module="face_adapter.*", argument="hidden_states", dims=3),),
    ),
)
