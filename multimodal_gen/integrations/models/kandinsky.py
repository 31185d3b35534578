"""Kandinsky 5 and 6: separate self and cross attention, and blocks of its own for the text.

NABLA variants of 5 compute a mask for FlexAttention, which stays theirs. They order tokens by 8 x 8
squares, so such calls have no grid. Kandinsky 6 makes sound beside the video, in a second stream
that attends to itself in modules of the role `encoder`: its tokens lie on no grid.
"""

import math

from torch import nn

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.models.adapter import Grid, ModelAdapter, ModelCall
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan
from multimodal_gen.integrations.padding import KeyPadding
from multimodal_gen.runtime.layers.attention.request import AttentionRole


def _grid(call: ModelCall) -> Grid | None:
    latent = call.tensor("hidden_states")
    if latent is None or latent.dim() != 5 or call.arguments.get("sparse_params"):
        return None
    sizes, patch = latent.shape[1:4], call.config.patch_size  # channels come last
    return (sizes[0] // patch[0], sizes[1] // patch[1], sizes[2] // patch[2])


def _role(name: str, module: nn.Module) -> AttentionRole:
    del module
    if "text_transformer_blocks." in name or name.endswith("audio_dec_block.self_attention"):
        return AttentionRole.ENCODER
    return AttentionRole.CROSS if name.endswith("cross_attention") else AttentionRole.SELF


def _tokens(call: ModelCall) -> int | None:
    for name, why in (
        ("sparse_params", "they order the tokens of the whole video"),
        ("audio_hidden_states", "the sound attends to the whole video"),
    ):
        if call.arguments.get(name) is not None:
            raise UsageError(
                f"{name} must be None where ranks share the tokens of a video, got some: {why}; "
                f"run it on one GPU"
            )
    grid = _grid(call)
    return None if grid is None else math.prod(grid)


def _split(video: str, rope: str, rope_dim: int) -> SplitPlan:
    """Return the plan of a model whose blocks have such names for the video and its positions."""
    blocks = "visual_transformer_blocks"
    return SplitPlan(
        tokens=_tokens,
        cuts=(
            Cut(module=f"{blocks}.0", argument=video, dims=3),
            Cut(module=f"{blocks}.*", argument=rope, dim=rope_dim),
        ),
        gather=f"{blocks}.-1",
    )


KANDINSKY5 = ModelAdapter(
    classes=("Kandinsky5Transformer3DModel",),
    role_of=_role,
    grid=_grid,
    split=_split("visual_embed", "rope", 1),
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
    split=_split("vis", "vis_rope", 0),
)
