"""Kandinsky 5 and 6: separate self and cross attention, and blocks of its own for the text.

NABLA variants of 5 compute a mask for FlexAttention, which stays theirs. They order tokens by 8 x 8
squares, so such calls have no grid. Kandinsky 6 makes sound beside the video, in a second stream
that attends to itself in modules of the role `encoder`: its tokens lie on no grid.
"""

from torch import nn

from multimodal_gen.integrations.models.adapter import (
    Grid,
    ModelAdapter,
    ModelCall,
    grid_along,
    tokens_of,
)
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan, must_be_none
from multimodal_gen.integrations.padding import KeyPadding
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
        tokens=tokens_of(_grid),
        refuse=_refuse,
        cuts=(
            Cut(module=f"{_BLOCKS}.0", argument="visual_embed", dims=3),
            Cut(module=f"{_BLOCKS}.*", argument="rope"),
        ),
        gather=f"{_BLOCKS}.-1",
    ),
)


def _padding(call: ModelCall) -> KeyPadding | None:
    mask = call.tensor("encoder_attention_mask")
    return None if mask is None else KeyPadding(AttentionRole.CROSS, mask)


KANDINSKY6 = ModelAdapter(
    classes=("Kandinsky6Transformer3DModel",),
    role_of=_role,
    grid=_grid,
    padding=_padding,
    masks_padding=("Kandinsky6AttnProcessor",),
    split=SplitPlan(
        tokens=tokens_of(_grid),
        refuse=_refuse,
        cuts=(
            Cut(module=f"{_BLOCKS}.0", argument="vis", dims=3),
            Cut(module=f"{_BLOCKS}.*", argument="vis_rope", dim=0),
        ),
        gather=f"{_BLOCKS}.-1",
        # Every rank has all of the sound, which attends to the whole video.
        gathered=(
            Cut(module=f"{_BLOCKS}.*.av_cross_attention", argument="encoder_hidden_states"),
            Cut(module=f"{_BLOCKS}.*.av_cross_attention", argument="rope_kv", dim=0),
        ),
    ),
)
