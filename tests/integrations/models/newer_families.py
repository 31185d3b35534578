"""Tiny denoisers of this year's families, with the arguments of a call."""

from collections.abc import Callable
from typing import Any

import torch

from tests.integrations.parallel.models import (
    HEADS,
    RANDOM,
    SIZE,
    Case,
    cogvideox_inputs,
    mask,
    normal,
)

WIDTH = HEADS * SIZE


def minimax_h3() -> Any:
    from diffusers import MiniMaxH3Transformer3DModel

    return MiniMaxH3Transformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=SIZE,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=32,
        in_channels=4,
        audio_in_channels=6,
        text_dim=8,
        freq_dim=8,
        time_embed_hidden_dim=24,
        time_embed_dim=16,
        rope_freq_dim=2,
    )


def minimax_h3_inputs(*, keyframes: int = 0) -> Callable[[], dict[str, Any]]:
    """Return a function that packs 5 of text, keyframes of 15, 6 of sound, 3 x 3 x 5 of video."""

    def make() -> dict[str, Any]:
        frame = torch.cartesian_prod(torch.linspace(-1, 1, 3), torch.linspace(-2, 2, 5))
        text, pictures, sound, video = (
            torch.arange(n) for n in (5, 15 * keyframes, 6, 3 * len(frame))
        )
        pictures = pictures + 5
        sound = sound + 5 + len(pictures)
        video = video + 11 + len(pictures)
        positions = torch.zeros(len(video) + len(pictures) + 11, 3)
        positions[text, 0] = text.float()
        positions[sound, 0] = 5 + torch.arange(6).float()
        times = torch.tensor([5.0, 6.7, 13.3]).repeat_interleave(len(frame))
        for rows, when in ((pictures, times[: len(pictures)]), (video, times)):
            positions[rows, 0] = when
            positions[rows, 1:] = frame.repeat(len(rows) // len(frame), 1)
        tags = torch.zeros(len(positions), dtype=torch.long)
        tags[text], tags[sound] = 1, 2
        levels = torch.zeros(len(positions), dtype=torch.long)
        levels[sound], levels[pictures] = 1, 2
        return {
            "hidden_states": normal(1, len(pictures) + len(video), 16),
            "audio_hidden_states": normal(1, 6, 6),
            "encoder_hidden_states": normal(1, 5, 8),
            "timestep": torch.tensor([0.3, 0.6, 0.99]),
            "timestep_indices": levels,
            "token_tags": tags,
            "position_ids": positions,
            "video_indices": torch.cat((pictures, video)),
            "audio_indices": sound,
            "text_indices": text,
        }

    return make


def krea2() -> Any:
    from diffusers import Krea2Transformer2DModel

    return Krea2Transformer2DModel(
        in_channels=4,
        num_layers=2,
        attention_head_dim=SIZE,
        num_attention_heads=6,
        num_key_value_heads=HEADS,
        intermediate_size=32,
        timestep_embed_dim=8,
        text_hidden_dim=16,
        num_text_layers=3,
        text_num_attention_heads=2,
        text_num_key_value_heads=1,
        text_intermediate_size=16,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )


def krea2_inputs(*lengths: int) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        image = torch.cartesian_prod(*(torch.arange(float(n)) for n in (1, 5, 9)))
        return {
            "hidden_states": normal(2, len(image), 4),
            "encoder_hidden_states": normal(2, 7, 3, 16),
            "timestep": torch.full((2,), 0.7),
            "position_ids": torch.cat((torch.zeros(7, 3), image)),
            "encoder_attention_mask": mask(*lengths, total=7).bool() if lengths else None,
        }

    return make


def qwen_21() -> Any:
    from diffusers import QwenImage21Transformer2DModel

    return QwenImage21Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=SIZE,
        num_attention_heads=HEADS,
        context_in_dim=12,
        mlp_ratio=2,
        axes_dims_rope=(4, 6, 6),
    )


def qwen_21_inputs(*, cached: bool = False, picture: bool = True) -> Callable[[], dict[str, Any]]:
    """Return a function that gives text, with a picture of 2 x 4 in it, and an image of 6 x 6."""

    def make() -> dict[str, Any]:
        from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

        slots = torch.zeros(2, 9, dtype=torch.bool)
        slots[:, 3:5] = picture
        shapes = [(1, 2, 4), (1, 6, 6)] if picture else [(1, 6, 6)]
        inputs = {
            "hidden_states": normal(2, sum(h * w for _, h, w in shapes), 4),
            "encoder_hidden_states": normal(2, 9, 12),
            "timestep": torch.full((2,), 0.7),
            "img_shapes": [shapes] * 2,
            "img_mask": torch.cat((slots, torch.ones(2, 9, dtype=torch.bool)), dim=1),
            "encoder_hidden_states_mask": torch.ones(2, 9, dtype=torch.bool),
        }
        if cached:
            inputs |= {"kv_cache": QwenImage21KVCache(2), "kv_cache_mode": "extract"}
        return inputs

    return make


def flux3() -> Any:
    from diffusers import Flux3Transformer2DModel

    return Flux3Transformer2DModel(
        in_channels=4,
        cond_in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=SIZE,
        num_attention_heads=HEADS,
        joint_attention_dim=12,
        timestep_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )


def flux3_inputs(*, references: bool = False) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        image = torch.cartesian_prod(*(torch.arange(float(n)) for n in (1, 5, 9, 1)))
        image[:, 1:3] *= 0.5
        inputs = {
            "hidden_states": normal(2, len(image), 4),
            "encoder_hidden_states": normal(2, 7, 12),
            "timestep": torch.full((2,), 0.7),
            "img_ids": image,
            "txt_ids": torch.cartesian_prod(*(torch.arange(float(n)) for n in (1, 1, 1, 7))),
        }
        if references:
            shifted = image[:12] - torch.tensor([0.0, 0.0, 0.0, 1.0])
            inputs |= {"image_cond_hidden_states": normal(2, 12, 4), "image_cond_ids": shifted}
        return inputs

    return make


def kandinsky6(**changes: Any) -> Any:
    from diffusers import Kandinsky6Transformer3DModel

    return Kandinsky6Transformer3DModel(
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
        visual_cond=False,
        in_audio_dim=6,
        out_audio_dim=6,
        **changes,
    )


def kandinsky6_inputs(*, sound: int = 0) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        return {
            "hidden_states": normal(2, 3, 6, 10, 4),
            "timestep": torch.full((2,), 700.0),
            "encoder_hidden_states": normal(2, 7, 12),
            "pooled_projections": normal(2, 10),
            "encoder_attention_mask": mask(6, 3, total=7).bool(),
            "audio_hidden_states": normal(2, sound, 6) if sound else None,
        }

    return make


def wan_animate() -> Any:
    from diffusers import WanAnimateTransformer3DModel

    return WanAnimateTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=SIZE,
        in_channels=12,
        latent_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=24,
        num_layers=2,
        image_dim=16,
        rope_max_seq_len=32,
        motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8},
        motion_encoder_size=16,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=16,
        face_encoder_hidden_dim=16,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )


def wan_animate_inputs() -> dict[str, Any]:
    return {
        "hidden_states": normal(1, 12, 3, 6, 10),
        "timestep": torch.full((1,), 700),
        "encoder_hidden_states": normal(1, 7, 12),
        "encoder_hidden_states_image": normal(1, 12, 16),
        "pose_hidden_states": normal(1, 4, 2, 6, 10),
        "face_pixel_values": normal(1, 3, 5, 16, 16),
    }


def anyflow() -> Any:
    from diffusers import AnyFlowTransformer3DModel

    return AnyFlowTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=SIZE,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=24,
        num_layers=2,
        rope_max_seq_len=32,
    )


def anyflow_inputs() -> dict[str, Any]:
    return {
        "hidden_states": normal(2, 3, 4, 6, 10),
        "timestep": torch.full((2, 3), 700.0),
        "r_timestep": torch.full((2, 3), 500.0),
        "encoder_hidden_states": normal(2, 7, 12),
    }


def helios() -> Any:
    from diffusers import HeliosTransformer3DModel

    return HeliosTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=SIZE,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=24,
        num_layers=2,
        rope_dim=(4, 6, 6),
        is_amplify_history=True,
    )


def helios_inputs(*, history: bool = True) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        frames = {"short": 1, "mid": 2, "long": 5} if history else {}
        inputs = {
            "hidden_states": normal(1, 4, 3, 6, 10),
            "timestep": torch.full((1,), 700),
            "encoder_hidden_states": normal(1, 7, 12),
            "indices_hidden_states": torch.arange(8.0, 11.0)[None],
        }
        for name, count in frames.items():
            inputs[f"latents_history_{name}"] = normal(1, 4, count, 6, 10)
            inputs[f"indices_latents_history_{name}"] = torch.arange(float(count))[None]
        return inputs

    return make


def cosmos3() -> Any:
    from diffusers import Cosmos3OmniTransformer

    return Cosmos3OmniTransformer(
        head_dim=SIZE,
        hidden_size=24,
        intermediate_size=32,
        latent_channel=4,
        latent_patch_size=2,
        num_attention_heads=4,
        num_hidden_layers=2,
        num_key_value_heads=2,
        patch_latent_dim=16,
        rope_axes_dim=[4, 2, 2],
        vocab_size=32,
        sound_gen=True,
        sound_dim=6,
    )


def cosmos3_inputs(*, sound: int = 0) -> Callable[[], dict[str, Any]]:
    """Return a function that packs 5 of text, 3 x 3 x 5 of video and the sound."""

    def make() -> dict[str, Any]:
        video, heard = torch.arange(5, 50), torch.arange(50, 50 + sound)
        inputs = {
            "input_ids": torch.arange(1, 6),
            "text_indexes": torch.arange(5),
            "position_ids": torch.arange(50 + sound).expand(3, -1),
            "und_len": 5,
            "sequence_length": 50 + sound,
            "vision_tokens": [normal(1, 4, 3, 6, 10)],
            "vision_token_shapes": [(3, 3, 5)],
            "vision_sequence_indexes": video,
            "vision_mse_loss_indexes": video,
            "vision_timesteps": torch.full((45,), 700.0),
            "vision_noisy_frame_indexes": [torch.arange(3)],
        }
        if sound:
            inputs |= {
                "sound_tokens": [normal(6, sound)],
                "sound_token_shapes": [(sound, 1, 1)],
                "sound_sequence_indexes": heard,
                "sound_mse_loss_indexes": heard,
                "sound_timesteps": torch.full((sound,), 700.0),
                "sound_noisy_frame_indexes": [torch.arange(sound)],
            }
        return inputs

    return make


def framepack() -> Any:
    from diffusers import HunyuanVideoFramepackTransformer3DModel

    return HunyuanVideoFramepackTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=SIZE,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=12,
        pooled_projection_dim=10,
        rope_axes_dim=(4, 6, 6),
        has_image_proj=True,
        image_proj_dim=8,
        has_clean_x_embedder=True,
    )


def framepack_inputs(*lengths: int) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        batch = len(lengths)
        inputs = {
            "hidden_states": normal(batch, 4, 3, 6, 10),
            "indices_latents": torch.arange(5.0, 8.0),
            "timestep": torch.full((batch,), 700),
            "guidance": torch.full((batch,), 6000.0),
            "encoder_hidden_states": normal(batch, 7, 12),
            "encoder_attention_mask": mask(*lengths, total=7),
            "pooled_projections": normal(batch, 10),
            "image_embeds": normal(batch, 4, 8),
        }
        for name, frames in (("clean", 2), ("history_2x", 2), ("history_4x", 5)):
            inputs[f"latents_{name}"] = normal(batch, 4, frames, 6, 10)
            inputs[f"indices_latents_{name}"] = torch.arange(float(frames))
        return inputs

    return make


def allegro() -> Any:
    from diffusers import AllegroTransformer3DModel

    return AllegroTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=12,  # a third for each axis
        in_channels=4,
        out_channels=4,
        num_layers=2,
        cross_attention_dim=12 * HEADS,
        sample_width=10,
        sample_height=6,
        sample_frames=3,
        caption_channels=12,
    )


def allegro_inputs() -> dict[str, Any]:
    angles = [torch.rand(9, 2, generator=RANDOM).repeat(1, 2) for _ in range(3)]
    positions = torch.cartesian_prod(*(torch.arange(n) for n in (3, 3, 5))).T[:, None]
    return {
        "image_rotary_emb": (tuple((x.cos(), x.sin()) for x in angles), tuple(positions)),
        "hidden_states": normal(2, 4, 3, 6, 10),
        "timestep": torch.full((2,), 700),
        "encoder_hidden_states": normal(2, 7, 12),
        "encoder_attention_mask": mask(6, 3, total=7),
    }


def easyanimate() -> Any:
    from diffusers import EasyAnimateTransformer3DModel

    return EasyAnimateTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=SIZE,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        mmdit_layers=1,
        patch_size=2,
        text_embed_dim=12,
        text_embed_dim_t5=10,
        time_embed_dim=16,
        resize_inpaint_mask_directly=False,
    )


def easyanimate_inputs() -> dict[str, Any]:
    return {
        "hidden_states": normal(2, 4, 3, 6, 10),
        "timestep": torch.full((2,), 700.0),
        "encoder_hidden_states": normal(2, 7, 12),
        "encoder_hidden_states_t5": normal(2, 4, 10),
    }


def consisid() -> Any:
    from diffusers import ConsisIDTransformer3DModel

    return ConsisIDTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=SIZE,
        in_channels=4,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=12,
        num_layers=2,
        sample_width=10,
        sample_height=6,
        sample_frames=9,
        max_text_seq_length=7,
        use_rotary_positional_embeddings=True,
        is_train_face=True,
        cross_attn_interval=1,
        cross_attn_dim_head=4,
        cross_attn_num_heads=2,
        LFE_id_dim=2,
        LFE_vit_dim=2,
        LFE_depth=5,
        LFE_dim_head=8,
        LFE_num_heads=2,
        LFE_num_id_token=1,
        LFE_num_querie=1,
        LFE_output_dim=WIDTH * 2 // 3,
        LFE_ff_mult=1,
        LFE_num_scale=1,
    )


def consisid_inputs() -> dict[str, Any]:
    return {
        **cogvideox_inputs(),
        "id_cond": torch.ones(2, 2),
        "id_vit_hidden": [torch.ones(2, 2, 2)],
    }


def mochi() -> Any:
    from diffusers import MochiTransformer3DModel

    return MochiTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=SIZE,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=16,
        time_embed_dim=4,
        max_sequence_length=7,
    )


def mochi_inputs() -> dict[str, Any]:
    return {
        "hidden_states": normal(2, 4, 3, 6, 10),
        "encoder_hidden_states": normal(2, 7, 16),
        "timestep": torch.full((2,), 700),
        "encoder_attention_mask": mask(6, 3, total=7).bool(),
    }


SPLIT = {
    "consisid": Case(consisid, consisid_inputs),
    "minimax h3": Case(minimax_h3, minimax_h3_inputs()),
    "minimax h3 with keyframes": Case(minimax_h3, minimax_h3_inputs(keyframes=2)),
    "krea 2": Case(krea2, krea2_inputs()),
    "krea 2 with padding": Case(krea2, krea2_inputs(6, 3)),
    "flux 3": Case(flux3, flux3_inputs()),
    "kandinsky 6": Case(kandinsky6, kandinsky6_inputs()),
    "kandinsky 6 with sound": Case(lambda: kandinsky6(ca_rope=True), kandinsky6_inputs(sound=11)),
    "qwen 2.1": Case(qwen_21, qwen_21_inputs(picture=False)),
    "qwen 2.1 with a picture": Case(qwen_21, qwen_21_inputs()),
    "qwen 2.1 that keeps its text's keys": Case(qwen_21, qwen_21_inputs(cached=True)),
    "wan animate": Case(wan_animate, wan_animate_inputs),
    "anyflow": Case(anyflow, anyflow_inputs),
    "helios": Case(helios, helios_inputs()),
    "helios without a history": Case(helios, helios_inputs(history=False)),
    "framepack": Case(framepack, framepack_inputs(5)),
    "framepack with different padding": Case(framepack, framepack_inputs(7, 4)),
    "allegro": Case(allegro, allegro_inputs),
    "easyanimate": Case(easyanimate, easyanimate_inputs),
    "cosmos 3": Case(cosmos3, cosmos3_inputs()),
    "cosmos 3 with sound": Case(cosmos3, cosmos3_inputs(sound=8)),
}
"""Families whose tokens ranks can share."""

WHOLE = {
    "flux 3 with references": Case(flux3, flux3_inputs(references=True)),
    "mochi": Case(mochi, mochi_inputs),
}
"""Families, or forms of them, that run on one GPU."""
