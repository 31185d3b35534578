"""CogVideoX, and ConsisID made of it: joint attention with the text in front.

Pipelines of CogVideoX batch both guidance branches. Between its blocks ConsisID attends to a face,
token by token, by modules that take no attention function.
"""

from dataclasses import replace

from multimodal_gen.integrations.models.adapter import (
    ModelAdapter,
    front_text,
    grid_along,
)
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan

_grid = grid_along(1, 3, 4)


COGVIDEOX = ModelAdapter(
    classes=("CogVideoXTransformer3DModel",),
    grid=_grid,
    text_span=front_text,
    batches_guidance=True,
    batched=("hidden_states", "encoder_hidden_states", "timestep", "timestep_cond", "ofs"),
    split=SplitPlan(
        cuts=(
            Cut("", "image_rotary_emb", dim=0, dims=2),
            Cut("patch_embed", dims=3, with_text=True),
        ),
    ),
)

CONSISID = replace(
    COGVIDEOX, classes=("ConsisIDTransformer3DModel",), batches_guidance=False, batched=()
)
