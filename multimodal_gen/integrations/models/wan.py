"""Wan 2.1 and 2.2 (both experts), VACE, ChronoEdit, Animate: separate self and cross attention."""

from dataclasses import replace
from types import MappingProxyType

from multimodal_gen.integrations.gated_value import wan_projections
from multimodal_gen.integrations.models.adapter import (
    ModelAdapter,
    latents_grid,
    role_by_prefix,
)
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan
from multimodal_gen.runtime.layers.attention.request import AttentionRole

_CUTS = (
    # One timestep per token, as TI2V has it.
    Cut("", "timestep", dims=2),
    Cut("rope", dims=4),
    Cut("patch_embedding", dim=2, dims=5, flat=True),
)

WAN = ModelAdapter(
    classes=("WanTransformer3DModel",),
    grid=latents_grid,
    replacements=MappingProxyType(
        {"WanAttnProcessor": MappingProxyType({"_get_qkv_projections": wan_projections})}
    ),
    gated=("WanAttnProcessor",),
    split=SplitPlan(cuts=_CUTS),
)

# Split by the plan that diffusers has for it.
CHRONOEDIT = replace(WAN, classes=("ChronoEditTransformer3DModel",), split=None)

_CONTROL = Cut("vace_patch_embedding", dim=2, dims=5, flat=True, may_end_early=True)

WAN_VACE = replace(
    WAN,
    classes=("WanVACETransformer3DModel",),
    split=SplitPlan(cuts=(*_CUTS, _CONTROL)),
)


WAN_ANIMATE = ModelAdapter(
    classes=("WanAnimateTransformer3DModel",),
    # Every frame attends to the face in it.
    role_of=role_by_prefix(("face_adapter.",), AttentionRole.CROSS),
    grid=latents_grid,
    split=SplitPlan(
        cuts=(
            Cut("rope", dims=4),
            # The model adds the pose to what its embedder returns.
            Cut("blocks.0", "hidden_states", dims=3),
            Cut("face_adapter.*", dims=3),
        ),
        # Every rank looks at the faces of whole frames.
        gathered=(Cut("face_adapter.*", "hidden_states", dims=3),),
    ),
)
