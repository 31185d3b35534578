"""LTX-2: a video and its sound in two streams that attend to each other.

Audio attends to itself in modules of the role `encoder`: its tokens lie on no grid.
"""

from torch import nn

from multimodal_gen.integrations.models.adapter import ModelAdapter, latent_tokens
from multimodal_gen.integrations.models.ltx import packed_grid
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan, must_be_none
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
    split=SplitPlan(
        tokens=latent_tokens,
        refuse=must_be_none("video_self_attention_mask", "one over all pairs of them"),
        cuts=(
            Cut("", "hidden_states", dims=3),
            Cut("", "video_keyframes_mask", dims=3),
            # One timestep per token, where images or videos are to be continued.
            Cut("", "timestep", dims=2),
            # Positions are [B, S, C], or [B, H, S, D].
            Cut("rope", dims=3),
            Cut("rope", dim=2, dims=4),
            *(
                Cut(
                    "transformer_blocks.*.audio_to_video_attn",
                    "query_rotary_emb",
                    dim=dim,
                    dims=dim + 2,
                )
                for dim in (1, 2)
            ),
        ),
        # Every rank has all of the sound, which attends to the whole video.
        gathered=(Cut("transformer_blocks.*.video_to_audio_attn", "encoder_hidden_states"),),
    ),
)
