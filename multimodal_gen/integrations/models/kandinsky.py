"""Kandinsky 5 and 6: separate self and cross attention, and blocks of its own for the text.

NABLA variants of 5 compute a mask for FlexAttention, which stays theirs. They order tokens by 8 x 8
squares, so such calls have no grid. Kandinsky 6 makes sound with the video, in a second stream
that attends to itself in modules of the role `encoder`: its tokens lie on no grid.
"""

from torch import nn

from multimodal_gen.integrations.models.adapter import (
    Grid,
    ModelAdapter,
    ModelCall,
    grid_along,
    masked_text,
)
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan, must_be_none
from multimodal_gen.runtime.layers.attention.request import AttentionRole

_LATENTS = grid_along(1, 2, 3)  # channels come last


def _grid(call: ModelCall) -> Grid | None:
    return None if call.arguments.get("sparse_params") else _LATENTS(call)


def _role(name: str, module: nn.Module) -> AttentionRole:
    del module
    if "text_transformer_blocks." in name or name.endswith("audio_dec_block.self_attention"):
        return AttentionRole.ENCODER
    return AttentionRole.CROSS if name.endswith("cross_attention") else AttentionRole.SELF


_refuse = must_be_none("sparse_params", "some: they order the tokens of the whole video")
_BLOCKS = "visual_transformer_blocks"


KANDINSKY5 = ModelAdapter(
    classes=("Kandinsky5Transformer3DModel",),
    role_of=_role,
    grid=_grid,
    split=SplitPlan(
        refuse=_refuse,
        cuts=(
            Cut(f"{_BLOCKS}.0", "visual_embed", dims=3),
            Cut(f"{_BLOCKS}.*", "rope"),
        ),
        gather=f"{_BLOCKS}.-1",
    ),
)


KANDINSKY6 = ModelAdapter(
    classes=("Kandinsky6Transformer3DModel",),
    role_of=_role,
    grid=_grid,
    padding=masked_text("encoder_attention_mask", AttentionRole.CROSS),
    masks_padding=("Kandinsky6AttnProcessor",),
    split=SplitPlan(
        refuse=_refuse,
        cuts=(
            Cut(f"{_BLOCKS}.0", "vis", dims=3),
            Cut(f"{_BLOCKS}.*", "vis_rope", dim=0),
        ),
        gather=f"{_BLOCKS}.-1",
        # Every rank has all of the sound, which attends to the whole video.
        gathered=(
            Cut(f"{_BLOCKS}.*.av_cross_attention", "encoder_hidden_states"),
            Cut(f"{_BLOCKS}.*.av_cross_attention", "rope_kv", dim=0),
        ),
    ),
)
