"""LTX-2: a video and its sound in two streams that attend to each other.

Audio attends to itself in modules of the role `encoder`: its tokens lie on no grid.
"""

from torch import nn

from multimodal_gen.integrations.models.adapter import ModelAdapter
from multimodal_gen.integrations.models.ltx import packed_grid
from multimodal_gen.runtime.layers.attention.request import AttentionRole


def _role(name: str, module: nn.Module) -> AttentionRole:
    del module
    last = name.rpartition(".")[2]
    if last == "audio_attn1":
        return AttentionRole.ENCODER
    return AttentionRole.SELF if last == "attn1" else AttentionRole.CROSS


LTX2 = ModelAdapter(
    classes=("LTX2VideoTransformer3DModel",),
    role_of=_role,
    grid=packed_grid,
)
