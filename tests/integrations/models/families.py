"""Tiny denoisers of the families that have no tiny pipeline, with the arguments of a call."""

from collections.abc import Callable
from typing import Any

import torch

from tests.integrations.parallel.models import HEADS, SIZE, Case, mask, normal, wan, wan_inputs

WIDTH = HEADS * SIZE
# 3 x 4 x 6 tokens after patching.
LATENT = (2, 4, 3, 8, 12)


def hunyuan_image() -> Any:
    from diffusers import HunyuanImageTransformer2DModel

    return HunyuanImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=SIZE,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=(2, 2),
        text_embed_dim=12,
        text_embed_2_dim=10,
        rope_axes_dim=(8, 8),
    )


def hunyuan_image_inputs(*lengths: int, glyphs: bool = True) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        inputs = {
            "hidden_states": normal(2, 4, 10, 18),
            "timestep": torch.full((2,), 700.0),
            "encoder_hidden_states": normal(2, 7, 12),
            "encoder_attention_mask": mask(*lengths, total=7),
        }
        if glyphs:
            inputs["encoder_hidden_states_2"] = normal(2, 4, 10)
            inputs["encoder_attention_mask_2"] = mask(3, 3, total=4)
        return inputs

    return make


def sd3(*dual: int) -> Any:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=20,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=SIZE,
        num_attention_heads=HEADS,
        joint_attention_dim=12,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=10,
        pos_embed_max_size=20,
        dual_attention_layers=dual,
        qk_norm="rms_norm",
    )


def sd3_inputs() -> dict[str, Any]:
    return {
        "hidden_states": normal(2, 4, 10, 18),
        "timestep": torch.full((2,), 700.0),
        "encoder_hidden_states": normal(2, 7, 12),
        "pooled_projections": normal(2, 10),
    }


def motif(decoders: int = 0) -> Any:
    from diffusers import MotifVideoTransformer3DModel

    return MotifVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=SIZE,
        num_layers=1,
        num_single_layers=1 + decoders,
        num_decoder_layers=decoders,
        mlp_ratio=2.0,
        text_embed_dim=12,
        image_embed_dim=8,
        rope_axes_dim=(4, 6, 6),
        enable_text_cross_attention_dual=True,
        enable_text_cross_attention_single=True,
    )


def motif_inputs(*lengths: int) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        return {
            "hidden_states": normal(2, 4, 3, 6, 10),
            "timestep": torch.full((2,), 700.0),
            "encoder_hidden_states": normal(2, 7, 12),
            "encoder_attention_mask": mask(*lengths, total=7),
            "image_embeds": normal(2, 5, 8),
        }

    return make


def cosmos() -> Any:
    from diffusers import CosmosTransformer3DModel

    return CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=SIZE + 2,
        num_layers=2,
        mlp_ratio=2.0,
        text_embed_dim=12,
        adaln_lora_dim=8,
        max_size=(4, 16, 16),
        concat_padding_mask=False,
    )


def cosmos_inputs() -> dict[str, Any]:
    return {
        "hidden_states": normal(2, 4, 3, 6, 10),
        "timestep": torch.full((2,), 0.7),
        "encoder_hidden_states": normal(2, 7, 12),
    }


def kandinsky() -> Any:
    from diffusers import Kandinsky5Transformer3DModel

    return Kandinsky5Transformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=12,
        in_text_dim2=10,
        time_dim=16,
        model_dim=WIDTH,
        ff_dim=24,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 6, 6),
    )


def kandinsky_inputs() -> dict[str, Any]:
    return {
        "hidden_states": normal(1, 3, 6, 10, 4),
        "timestep": torch.full((1,), 700.0),
        "encoder_hidden_states": normal(1, 7, 12),
        "pooled_projections": normal(1, 10),
        "visual_rope_pos": tuple(torch.arange(size) for size in (3, 3, 5)),
        "text_rope_pos": torch.arange(7),
    }


def ltx2(**changes: Any) -> Any:
    from diffusers import LTX2VideoTransformer3DModel

    return LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=SIZE,
        cross_attention_dim=WIDTH,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=HEADS,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=HEADS * 8,
        num_layers=2,
        caption_channels=12,
        **changes,
    )


def ltx2_inputs() -> dict[str, Any]:
    return {
        "hidden_states": normal(2, 45, 4),
        # More than the video's tokens: no grid is found among them either.
        "audio_hidden_states": normal(2, 80, 4),
        "encoder_hidden_states": normal(2, 7, 12),
        "audio_encoder_hidden_states": normal(2, 7, 12),
        "timestep": torch.full((2,), 700.0),
        "encoder_attention_mask": mask(7, 4, total=7),
        "audio_encoder_attention_mask": mask(7, 4, total=7),
        "num_frames": 3,
        "height": 3,
        "width": 5,
        "audio_num_frames": 80,
    }


def ltx2_timesteps() -> dict[str, Any]:
    """Return a call whose first frame is given: its tokens have a timestep of their own."""
    timestep = torch.full((2, 45), 700.0)
    timestep[:, :15] = 0
    return ltx2_inputs() | {"timestep": timestep, "audio_timestep": torch.full((2,), 700.0)}


def z_image() -> Any:
    from diffusers import ZImageTransformer2DModel

    return ZImageTransformer2DModel(
        in_channels=4,
        dim=WIDTH,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=HEADS,
        n_kv_heads=HEADS,
        cap_feat_dim=12,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 32, 32],
    )


def z_image_inputs(*lengths: int, width: int = 10) -> Callable[[], dict[str, Any]]:
    """Return a function that gives images of 4.5 * `width` tokens, padded to 64, with captions."""

    def make() -> dict[str, Any]:
        return {
            "x": [normal(4, 1, 18, width) for _ in lengths],
            "t": torch.full((len(lengths),), 0.3),
            "cap_feats": [normal(length, 12) for length in lengths],
        }

    return make


def sana_video() -> Any:
    from diffusers import SanaVideoTransformer3DModel

    return SanaVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=1,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=12,
        mlp_ratio=2.0,
    )


def sana_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": normal(*LATENT),
        "timestep": torch.full((2,), 700.0),
        "encoder_hidden_states": normal(2, 7, 12),
    }


SPLIT = {
    "skyreels v2": Case(lambda: wan("SkyReelsV2Transformer3DModel"), wan_inputs),
    "hunyuan image": Case(hunyuan_image, hunyuan_image_inputs(7, 7)),
    "hunyuan image with padding": Case(hunyuan_image, hunyuan_image_inputs(6, 3)),
    "hunyuan image without glyphs": Case(hunyuan_image, hunyuan_image_inputs(5, 5, glyphs=False)),
    "sd3": Case(sd3, sd3_inputs),
    "motif video": Case(motif, motif_inputs(6, 3)),
    "cosmos": Case(cosmos, cosmos_inputs),
    "kandinsky 5": Case(kandinsky, kandinsky_inputs),
    "ltx 2": Case(ltx2, ltx2_inputs),
    "ltx 2 with a timestep per token": Case(lambda: ltx2(rope_type="split"), ltx2_timesteps),
    "z image": Case(z_image, z_image_inputs(9, 9)),
    # In blocks for the image alone there are as many rows as a rank has for image and caption.
    "z image whose caption is half as long": Case(z_image, z_image_inputs(20, width=14)),
    "z image with captions of different lengths": Case(z_image, z_image_inputs(9, 40)),
}
"""Families whose tokens ranks can share."""

WHOLE = {
    "sd3 with layers over the image alone": Case(lambda: sd3(0), sd3_inputs),
    "motif video with decoder layers": Case(lambda: motif(1), motif_inputs(6, 3)),
}
"""Families, or forms of them, that run on one GPU."""
