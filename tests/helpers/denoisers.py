"""Tiny denoisers of every family, in the forms they come in, with inputs that split unevenly."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

HEADS, SIZE = 3, 16
WIDTH = HEADS * SIZE
RANDOM = torch.Generator()
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Denoiser:
    """A model and the arguments of a call.

    Attributes:
        kind: class of diffusers.
        config: what it is made from.
        inputs: makes the arguments.
    """

    kind: str
    config: Mapping[str, Any]
    inputs: Callable[[], Inputs]

    def model(self, **changes: Any) -> Any:
        """Return the model, on any seed."""
        import diffusers

        return getattr(diffusers, self.kind)(**{**self.config, **changes})

    def make(self, **changes: Any) -> tuple[Any, Inputs]:
        """Return the same model and inputs every time, on every rank."""
        torch.manual_seed(3)
        RANDOM.manual_seed(5)
        model = self.model(**changes).eval()
        # Models are made with outputs of zero, or next to it.
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=RANDOM)
        return model, self.inputs()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=RANDOM)


def mask(*lengths: int, total: int = 7) -> torch.Tensor:
    """Return int64 [B, total] with the first `lengths` of each sample valid."""
    return (torch.arange(total) < torch.tensor(lengths)[:, None]).long()


def places(*sizes: int) -> torch.Tensor:
    """Return the coordinates of a grid's tokens, one row each."""
    return torch.cartesian_prod(*(torch.arange(float(n)) for n in sizes))


ATTENTION = {"num_attention_heads": HEADS, "attention_head_dim": SIZE}
CHANNELS = {"in_channels": 4, "out_channels": 4}
WAN = {
    **ATTENTION,
    **CHANNELS,
    "text_dim": 12,
    "freq_dim": 16,
    "ffn_dim": 24,
    "num_layers": 2,
}
WITH_IMAGE = {"image_dim": 20, "added_kv_proj_dim": WIDTH}
SEVERAL_STREAMS = {**ATTENTION, **CHANNELS, "num_layers": 1, "mlp_ratio": 2.0, "text_embed_dim": 12}
HUNYUAN = {
    **SEVERAL_STREAMS,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "pooled_projection_dim": 10,
    "rope_axes_dim": (4, 6, 6),
}
HUNYUAN_IMAGE = {
    **SEVERAL_STREAMS,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "patch_size": (2, 2),
    "text_embed_2_dim": 10,
    "rope_axes_dim": (8, 8),
}
HUNYUAN_15 = {
    **SEVERAL_STREAMS,
    "in_channels": 9,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_2_dim": 10,
    "image_embed_dim": 8,
    "rope_axes_dim": (4, 6, 6),
    "task_type": "t2v",
}
FRAMEPACK = {
    **HUNYUAN,
    "has_image_proj": True,
    "image_proj_dim": 8,
    "has_clean_x_embedder": True,
}
MOTIF = {
    **SEVERAL_STREAMS,
    "num_single_layers": 1,
    "num_decoder_layers": 0,
    "image_embed_dim": 8,
    "rope_axes_dim": (4, 6, 6),
    "enable_text_cross_attention_dual": True,
    "enable_text_cross_attention_single": True,
}
LTX = {
    **ATTENTION,
    **CHANNELS,
    "cross_attention_dim": WIDTH,
    "num_layers": 2,
    "caption_channels": 12,
}
LTX_2 = {
    **LTX,
    "audio_in_channels": 4,
    "audio_out_channels": 4,
    "audio_num_attention_heads": HEADS,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": HEADS * 8,
}
SD3 = {
    **ATTENTION,
    **CHANNELS,
    "sample_size": 20,
    "patch_size": 2,
    "num_layers": 2,
    "joint_attention_dim": 12,
    "caption_projection_dim": WIDTH,
    "pooled_projection_dim": 10,
    "pos_embed_max_size": 20,
    "qk_norm": "rms_norm",
}
COSMOS = {
    **ATTENTION,
    **CHANNELS,
    "attention_head_dim": SIZE + 2,
    "num_layers": 2,
    "mlp_ratio": 2.0,
    "text_embed_dim": 12,
    "adaln_lora_dim": 8,
    "max_size": (4, 16, 16),
    "concat_padding_mask": False,
}
COSMOS_3 = {
    "head_dim": SIZE,
    "hidden_size": 24,
    "intermediate_size": 32,
    "latent_channel": 4,
    "latent_patch_size": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "patch_latent_dim": 16,
    "rope_axes_dim": [4, 2, 2],
    "vocab_size": 32,
    "sound_gen": True,
    "sound_dim": 6,
}
KANDINSKY = {
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "in_text_dim": 12,
    "in_text_dim2": 10,
    "time_dim": 16,
    "model_dim": WIDTH,
    "ff_dim": 24,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (4, 6, 6),
}
KANDINSKY_6 = {**KANDINSKY, "visual_cond": False, "in_audio_dim": 6, "out_audio_dim": 6}
FLUX = {
    **ATTENTION,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "joint_attention_dim": 12,
    "pooled_projection_dim": 10,
    "axes_dims_rope": (4, 6, 6),
}
FLUX_2 = {
    **ATTENTION,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "joint_attention_dim": 12,
    "timestep_guidance_channels": 16,
    "axes_dims_rope": (4, 4, 4, 4),
}
FLUX_3 = {
    **ATTENTION,
    "in_channels": 4,
    "cond_in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 2,
    "joint_attention_dim": 12,
    "timestep_channels": 16,
    "axes_dims_rope": (4, 4, 4, 4),
}
QWEN = {
    **ATTENTION,
    "in_channels": 4,
    "out_channels": 1,
    "num_layers": 2,
    "joint_attention_dim": 12,
    "axes_dims_rope": (4, 6, 6),
}
QWEN_21 = {
    **ATTENTION,
    **CHANNELS,
    "num_layers": 2,
    "context_in_dim": 12,
    "mlp_ratio": 2,
    "axes_dims_rope": (4, 6, 6),
}
KREA_2 = {
    "in_channels": 4,
    "num_layers": 2,
    "attention_head_dim": SIZE,
    "num_attention_heads": 6,
    "num_key_value_heads": HEADS,
    "intermediate_size": 32,
    "timestep_embed_dim": 8,
    "text_hidden_dim": 16,
    "num_text_layers": 3,
    "text_num_attention_heads": 2,
    "text_num_key_value_heads": 1,
    "text_intermediate_size": 16,
    "num_layerwise_text_blocks": 1,
    "num_refiner_text_blocks": 1,
    "axes_dims_rope": (4, 6, 6),
}
COGVIDEOX = {
    **ATTENTION,
    **CHANNELS,
    "time_embed_dim": 16,
    "text_embed_dim": 12,
    "num_layers": 2,
    "sample_width": 10,
    "sample_height": 6,
    "sample_frames": 9,
    "max_text_seq_length": 7,
    "use_rotary_positional_embeddings": True,
}
CONSISID = {
    **COGVIDEOX,
    "is_train_face": True,
    "cross_attn_interval": 1,
    "cross_attn_dim_head": 4,
    "cross_attn_num_heads": 2,
    "LFE_id_dim": 2,
    "LFE_vit_dim": 2,
    "LFE_depth": 5,
    "LFE_dim_head": 8,
    "LFE_num_heads": 2,
    "LFE_num_id_token": 1,
    "LFE_num_querie": 1,
    "LFE_output_dim": WIDTH * 2 // 3,
    "LFE_ff_mult": 1,
    "LFE_num_scale": 1,
}
Z_IMAGE = {
    "in_channels": 4,
    "dim": WIDTH,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": HEADS,
    "n_kv_heads": HEADS,
    "cap_feat_dim": 12,
    "axes_dims": [4, 6, 6],
    "axes_lens": [128, 32, 32],
}
MINIMAX_H3 = {
    **ATTENTION,
    "hidden_size": 24,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "ffn_dim": 32,
    "in_channels": 4,
    "audio_in_channels": 6,
    "text_dim": 8,
    "freq_dim": 8,
    "time_embed_hidden_dim": 24,
    "time_embed_dim": 16,
    "rope_freq_dim": 2,
}
WAN_ANIMATE = {
    **WAN,
    "in_channels": 12,
    "latent_channels": 4,
    "image_dim": 16,
    "rope_max_seq_len": 32,
    "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
    "motion_encoder_size": 16,
    "motion_style_dim": 8,
    "motion_dim": 4,
    "motion_encoder_dim": 16,
    "face_encoder_hidden_dim": 16,
    "face_encoder_num_heads": 2,
    "inject_face_latents_blocks": 2,
}
ALLEGRO = {
    **CHANNELS,
    "num_attention_heads": HEADS,
    "attention_head_dim": 12,  # a third for each axis
    "num_layers": 2,
    "cross_attention_dim": 12 * HEADS,
    "sample_width": 10,
    "sample_height": 6,
    "sample_frames": 3,
    "caption_channels": 12,
}
EASYANIMATE = {
    **ATTENTION,
    **CHANNELS,
    "num_layers": 2,
    "mmdit_layers": 1,
    "patch_size": 2,
    "text_embed_dim": 12,
    "text_embed_dim_t5": 10,
    "time_embed_dim": 16,
    "resize_inpaint_mask_directly": False,
}
MOCHI = {
    **ATTENTION,
    "num_layers": 2,
    "pooled_projection_dim": 16,
    "in_channels": 4,
    "text_embed_dim": 16,
    "time_embed_dim": 4,
    "max_sequence_length": 7,
}
SANA_VIDEO = {
    **CHANNELS,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 1,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 12,
    "cross_attention_dim": 24,
    "caption_channels": 12,
    "mlp_ratio": 2.0,
}


def video_inputs(*, batch: int = 2, time: float = 700.0) -> Inputs:
    """Return latents of 3 x 3 x 5 tokens after patching, their timestep, and text."""
    return {
        "hidden_states": normal(batch, 4, 3, 6, 10),
        "timestep": torch.full((batch,), time),
        "encoder_hidden_states": normal(batch, 7, 12),
    }


def tokens_inputs(tokens: int, *, time: float = 0.7) -> Inputs:
    """Return patched latents, their timestep, and text."""
    return {**video_inputs(time=time), "hidden_states": normal(2, tokens, 4)}


def wan_timesteps() -> Inputs:
    steps = torch.full((2, 45), 700.0)
    steps[:, :15] = 0.0  # the first frame is given
    return {**video_inputs(), "timestep": steps}


def wan_image() -> Inputs:
    return {
        **video_inputs(),
        "encoder_hidden_states": normal(2, 512, 12),
        "encoder_hidden_states_image": normal(2, 257, 20),
    }


def vace_inputs() -> Inputs:
    # The control is a frame shorter than the video.
    return {**video_inputs(), "control_hidden_states": normal(2, 8, 2, 6, 10)}


def hunyuan_inputs(*lengths: int) -> Inputs:
    return {
        **video_inputs(),
        "encoder_attention_mask": mask(*lengths),
        "pooled_projections": normal(2, 10),
    }


def hunyuan_15_inputs(*lengths: int, image: float = 0.0) -> Inputs:
    return {
        **video_inputs(),
        "hidden_states": normal(2, 9, 3, 3, 5),
        "encoder_attention_mask": mask(*lengths),
        "encoder_hidden_states_2": normal(2, 4, 10),
        "encoder_attention_mask_2": mask(*(n // 2 for n in lengths), total=4),
        "image_embeds": normal(2, 3, 8) * image,
    }


def hunyuan_image_inputs(*lengths: int, glyphs: bool = True) -> Inputs:
    inputs = {
        **video_inputs(),
        "hidden_states": normal(2, 4, 10, 18),
        "encoder_attention_mask": mask(*lengths),
    }
    if glyphs:
        inputs["encoder_hidden_states_2"] = normal(2, 4, 10)
        inputs["encoder_attention_mask_2"] = mask(3, 3, total=4)
    return inputs


def framepack_inputs(*lengths: int) -> Inputs:
    batch = len(lengths)
    inputs = {
        **video_inputs(batch=batch, time=700),
        "indices_latents": torch.arange(5.0, 8.0),
        "guidance": torch.full((batch,), 6000.0),
        "encoder_attention_mask": mask(*lengths),
        "pooled_projections": normal(batch, 10),
        "image_embeds": normal(batch, 4, 8),
    }
    for name, frames in (("clean", 2), ("history_2x", 2), ("history_4x", 5)):
        inputs[f"latents_{name}"] = normal(batch, 4, frames, 6, 10)
        inputs[f"indices_latents_{name}"] = torch.arange(float(frames))
    return inputs


def motif_inputs(*lengths: int) -> Inputs:
    return {
        **video_inputs(),
        "encoder_attention_mask": mask(*lengths),
        "image_embeds": normal(2, 5, 8),
    }


def ltx_inputs(*, per_token: bool = False) -> Inputs:
    timestep = torch.full((2, 45) if per_token else (2,), 700.0)
    timestep[..., :1] = 300.0 if per_token else 700.0
    return {
        **tokens_inputs(45),
        "timestep": timestep,
        "encoder_attention_mask": mask(7, 4),
        "num_frames": 3,
        "height": 3,
        "width": 5,
    }


def ltx_2_inputs() -> Inputs:
    return {
        **ltx_inputs(),
        # More than the video's tokens: no grid is found among them either.
        "audio_hidden_states": normal(2, 80, 4),
        "audio_encoder_hidden_states": normal(2, 7, 12),
        "audio_encoder_attention_mask": mask(7, 4),
        "audio_num_frames": 80,
    }


def ltx_2_timesteps() -> Inputs:
    """Return a call whose first frame is given: its tokens have a timestep of their own."""
    timestep = torch.full((2, 45), 700.0)
    timestep[:, :15] = 0
    return {**ltx_2_inputs(), "timestep": timestep, "audio_timestep": torch.full((2,), 700.0)}


def sd3_inputs() -> Inputs:
    latents = normal(2, 4, 10, 18)
    return {**video_inputs(), "hidden_states": latents, "pooled_projections": normal(2, 10)}


def cosmos_3_inputs(*, sound: int = 0) -> Inputs:
    """Return what packs 5 of text, 3 x 3 x 5 of video and the sound."""
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


def kandinsky_inputs(*, batch: int = 1) -> Inputs:
    return {
        **video_inputs(batch=batch),
        "hidden_states": normal(batch, 3, 6, 10, 4),
        "pooled_projections": normal(batch, 10),
        "visual_rope_pos": tuple(torch.arange(size) for size in (3, 3, 5)),
        "text_rope_pos": torch.arange(7),
    }


def kandinsky_6_inputs(*, sound: int = 0) -> Inputs:
    inputs = {
        **kandinsky_inputs(batch=2),
        "encoder_attention_mask": mask(6, 3).bool(),
        "audio_hidden_states": normal(2, sound, 6) if sound else None,
    }
    return {name: value for name, value in inputs.items() if not name.endswith("rope_pos")}


def flux_inputs(*, references: int = 0) -> Inputs:
    image = places(1, 5, 9)
    ids = torch.cat((image, image[:references] + torch.tensor([1.0, 0.0, 0.0])))
    return {
        **tokens_inputs(len(ids)),
        "pooled_projections": normal(2, 10),
        "img_ids": ids,
        "txt_ids": torch.zeros(7, 3),
        "controlnet_block_samples": [normal(2, len(ids), WIDTH)],
    }


def flux_2_inputs(*, references: int = 0) -> Inputs:
    image = places(1, 5, 9, 1).long()
    ids = torch.cat((image, image[:references] + torch.tensor([10, 0, 0, 0])))
    return {
        **tokens_inputs(len(ids)),
        "guidance": torch.full((2,), 4.0),
        "img_ids": ids.expand(2, -1, -1),
        "txt_ids": places(1, 1, 1, 7).long().expand(2, -1, -1),
    }


def flux_3_inputs(*, references: bool = False) -> Inputs:
    image = places(1, 5, 9, 1)
    image[:, 1:3] *= 0.5
    inputs = {**tokens_inputs(45), "img_ids": image, "txt_ids": places(1, 1, 1, 7)}
    if references:
        shifted = image[:12] - torch.tensor([0.0, 0.0, 0.0, 1.0])
        inputs |= {"image_cond_hidden_states": normal(2, 12, 4), "image_cond_ids": shifted}
    return inputs


def qwen_inputs(*lengths: int, images: int = 1) -> Inputs:
    shapes = [(1, 5, 9), (1, 4, 3)][:images]
    return {
        **tokens_inputs(sum(height * width for _, height, width in shapes)),
        "encoder_hidden_states_mask": mask(*lengths) if lengths else None,
        "img_shapes": [shapes] * 2,
    }


def qwen_21_inputs(*, cached: bool = False, picture: bool = True) -> Inputs:
    """Return text, with a picture of 2 x 4 in it, and an image of 6 x 6."""
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

    slots = torch.zeros(2, 9, dtype=torch.bool)
    slots[:, 3:5] = picture
    shapes = [(1, 2, 4), (1, 6, 6)] if picture else [(1, 6, 6)]
    inputs = {
        **tokens_inputs(sum(h * w for _, h, w in shapes)),
        "encoder_hidden_states": normal(2, 9, 12),
        "img_shapes": [shapes] * 2,
        "img_mask": torch.cat((slots, torch.ones(2, 9, dtype=torch.bool)), dim=1),
        "encoder_hidden_states_mask": torch.ones(2, 9, dtype=torch.bool),
    }
    if cached:
        inputs |= {"kv_cache": QwenImage21KVCache(2), "kv_cache_mode": "extract"}
    return inputs


def krea_2_inputs(*lengths: int) -> Inputs:
    return {
        **tokens_inputs(45),
        "encoder_hidden_states": normal(2, 7, 3, 16),
        "position_ids": torch.cat((torch.zeros(7, 3), places(1, 5, 9))),
        "encoder_attention_mask": mask(*lengths).bool() if lengths else None,
    }


def cogvideox_inputs() -> Inputs:
    return {
        **video_inputs(time=700),
        "hidden_states": normal(2, 3, 4, 6, 10),
        "image_rotary_emb": (normal(45, SIZE), normal(45, SIZE)),
    }


def consisid_inputs() -> Inputs:
    given = {"id_cond": torch.ones(2, 2), "id_vit_hidden": [torch.ones(2, 2, 2)]}
    return {**cogvideox_inputs(), **given}


def z_image_inputs(*lengths: int, width: int = 10) -> Inputs:
    """Return images of 4.5 * `width` tokens, padded to 64, with captions."""
    return {
        "x": [normal(4, 1, 18, width) for _ in lengths],
        "t": torch.full((len(lengths),), 0.3),
        "cap_feats": [normal(length, 12) for length in lengths],
    }


def minimax_h3_inputs(*, keyframes: int = 0) -> Inputs:
    """Return what packs 5 of text, keyframes of 15, 6 of sound, 3 x 3 x 5 of video."""
    frame = torch.cartesian_prod(torch.linspace(-1, 1, 3), torch.linspace(-2, 2, 5))
    text, pictures, sound, video = (torch.arange(n) for n in (5, 15 * keyframes, 6, 3 * len(frame)))
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


def wan_animate_inputs() -> Inputs:
    return {
        **video_inputs(batch=1, time=700),
        "hidden_states": normal(1, 12, 3, 6, 10),
        "encoder_hidden_states_image": normal(1, 12, 16),
        "pose_hidden_states": normal(1, 4, 2, 6, 10),
        "face_pixel_values": normal(1, 3, 5, 16, 16),
    }


def anyflow_inputs() -> Inputs:
    times = {"timestep": torch.full((2, 3), 700.0), "r_timestep": torch.full((2, 3), 500.0)}
    return {**video_inputs(), "hidden_states": normal(2, 3, 4, 6, 10), **times}


def helios_inputs(*, history: bool = True) -> Inputs:
    frames = {"short": 1, "mid": 2, "long": 5} if history else {}
    inputs = video_inputs(batch=1, time=700)
    inputs["indices_hidden_states"] = torch.arange(8.0, 11.0)[None]
    for name, count in frames.items():
        inputs[f"latents_history_{name}"] = normal(1, 4, count, 6, 10)
        inputs[f"indices_latents_history_{name}"] = torch.arange(float(count))[None]
    return inputs


def allegro_inputs() -> Inputs:
    angles = [torch.rand(9, 2, generator=RANDOM).repeat(1, 2) for _ in range(3)]
    positions = places(3, 3, 5).long().T[:, None]
    return {
        **video_inputs(time=700),
        "image_rotary_emb": (tuple((x.cos(), x.sin()) for x in angles), tuple(positions)),
        "encoder_attention_mask": mask(6, 3),
    }


def easyanimate_inputs() -> Inputs:
    return {**video_inputs(), "encoder_hidden_states_t5": normal(2, 4, 10)}


def mochi_inputs() -> Inputs:
    text = {"encoder_hidden_states": normal(2, 7, 16), "encoder_attention_mask": mask(6, 3).bool()}
    return {**video_inputs(time=700), **text}


def sana_video_inputs() -> Inputs:
    return {**video_inputs(), "hidden_states": normal(2, 4, 3, 8, 12)}


wan = partial(Denoiser, "WanTransformer3DModel", WAN)
hunyuan = partial(Denoiser, "HunyuanVideoTransformer3DModel", {**HUNYUAN, "guidance_embeds": False})
hunyuan_15 = partial(Denoiser, "HunyuanVideo15Transformer3DModel", HUNYUAN_15)
hunyuan_image = partial(Denoiser, "HunyuanImageTransformer2DModel", HUNYUAN_IMAGE)
framepack = partial(Denoiser, "HunyuanVideoFramepackTransformer3DModel", FRAMEPACK)
motif = partial(Denoiser, "MotifVideoTransformer3DModel")
sd3 = partial(Denoiser, "SD3Transformer2DModel")
ltx = partial(Denoiser, "LTXVideoTransformer3DModel", LTX)
ltx_2 = partial(Denoiser, "LTX2VideoTransformer3DModel")
flux = partial(Denoiser, "FluxTransformer2DModel", FLUX)
flux_2 = partial(Denoiser, "Flux2Transformer2DModel", FLUX_2)
flux_3 = partial(Denoiser, "Flux3Transformer2DModel", FLUX_3)
qwen = partial(Denoiser, "QwenImageTransformer2DModel")
qwen_21 = partial(Denoiser, "QwenImage21Transformer2DModel", QWEN_21)
krea_2 = partial(Denoiser, "Krea2Transformer2DModel", KREA_2)
kandinsky_6 = partial(Denoiser, "Kandinsky6Transformer3DModel")
cosmos_3 = partial(Denoiser, "Cosmos3OmniTransformer", COSMOS_3)
helios = partial(
    Denoiser,
    "HeliosTransformer3DModel",
    {**WAN, "rope_dim": (4, 6, 6), "is_amplify_history": True},
)
minimax_h3 = partial(Denoiser, "MiniMaxH3Transformer3DModel", MINIMAX_H3)
z_image = partial(Denoiser, "ZImageTransformer2DModel", Z_IMAGE)

COMMON = {
    "wan": wan(video_inputs),
    "wan with a timestep per token": wan(wan_timesteps),
    "wan with an image": Denoiser("WanTransformer3DModel", {**WAN, **WITH_IMAGE}, wan_image),
    "hunyuan": hunyuan(partial(hunyuan_inputs, 7, 7)),
    "hunyuan with padding": hunyuan(partial(hunyuan_inputs, 4, 4)),
    "hunyuan with different padding": hunyuan(partial(hunyuan_inputs, 7, 2)),
    "hunyuan with a first frame": Denoiser(
        "HunyuanVideoTransformer3DModel",
        {**HUNYUAN, "guidance_embeds": False, "image_condition_type": "token_replace"},
        partial(hunyuan_inputs, 7, 4),
    ),
    "hunyuan 1.5 with padding": hunyuan_15(partial(hunyuan_15_inputs, 5, 5)),
    "hunyuan 1.5 with an image": hunyuan_15(partial(hunyuan_15_inputs, 7, 3, image=1.0)),
    "ltx": ltx(ltx_inputs),
    "ltx with a timestep per token": ltx(partial(ltx_inputs, per_token=True)),
    "flux": flux(flux_inputs),
    "flux2": flux_2(flux_2_inputs),
    "qwen": qwen(QWEN, qwen_inputs),
    "qwen with padding": qwen(QWEN, partial(qwen_inputs, 6, 3)),
    "cogvideox": Denoiser("CogVideoXTransformer3DModel", COGVIDEOX, cogvideox_inputs),
}
"""Families, and forms of them, of which there are tiny pipelines; ranks can share their tokens."""

SPLIT = {
    "wan vace": Denoiser(
        "WanVACETransformer3DModel",
        {**WAN, "vace_layers": [0, 1], "vace_in_channels": 8},
        vace_inputs,
    ),
    # No family of ours: it is split by its own plan.
    "chronoedit": Denoiser("ChronoEditTransformer3DModel", WAN, video_inputs),
    "flux with reference tokens": flux(partial(flux_inputs, references=12)),
    "flux2 with reference tokens": flux_2(partial(flux_2_inputs, references=12)),
    "qwen with two images": qwen({**QWEN, "zero_cond_t": True}, partial(qwen_inputs, images=2)),
    "skyreels v2": Denoiser("SkyReelsV2Transformer3DModel", WAN, video_inputs),
    "hunyuan image": hunyuan_image(partial(hunyuan_image_inputs, 7, 7)),
    "hunyuan image with padding": hunyuan_image(partial(hunyuan_image_inputs, 6, 3)),
    "hunyuan image without glyphs": hunyuan_image(
        partial(hunyuan_image_inputs, 5, 5, glyphs=False)
    ),
    "sd3": sd3({**SD3, "dual_attention_layers": ()}, sd3_inputs),
    "motif video": motif(MOTIF, partial(motif_inputs, 6, 3)),
    "cosmos": Denoiser("CosmosTransformer3DModel", COSMOS, video_inputs),
    "kandinsky 5": Denoiser("Kandinsky5Transformer3DModel", KANDINSKY, kandinsky_inputs),
    "ltx 2": ltx_2(LTX_2, ltx_2_inputs),
    "ltx 2 with a timestep per token": ltx_2({**LTX_2, "rope_type": "split"}, ltx_2_timesteps),
    "z image": z_image(partial(z_image_inputs, 9, 9)),
    # In blocks for the image alone there are as many rows as a rank has for image and caption.
    "z image whose caption is half as long": z_image(partial(z_image_inputs, 20, width=14)),
    "z image with captions of different lengths": z_image(partial(z_image_inputs, 9, 40)),
    "consisid": Denoiser("ConsisIDTransformer3DModel", CONSISID, consisid_inputs),
    "minimax h3": minimax_h3(minimax_h3_inputs),
    "minimax h3 with keyframes": minimax_h3(partial(minimax_h3_inputs, keyframes=2)),
    "krea 2": krea_2(krea_2_inputs),
    "krea 2 with padding": krea_2(partial(krea_2_inputs, 6, 3)),
    "flux 3": flux_3(flux_3_inputs),
    "kandinsky 6": kandinsky_6(KANDINSKY_6, kandinsky_6_inputs),
    "kandinsky 6 with sound": kandinsky_6(
        {**KANDINSKY_6, "ca_rope": True}, partial(kandinsky_6_inputs, sound=11)
    ),
    "qwen 2.1": qwen_21(partial(qwen_21_inputs, picture=False)),
    "qwen 2.1 with a picture": qwen_21(qwen_21_inputs),
    "qwen 2.1 that keeps its text's keys": qwen_21(partial(qwen_21_inputs, cached=True)),
    "wan animate": Denoiser("WanAnimateTransformer3DModel", WAN_ANIMATE, wan_animate_inputs),
    "anyflow": Denoiser(
        "AnyFlowTransformer3DModel", {**WAN, "rope_max_seq_len": 32}, anyflow_inputs
    ),
    "helios": helios(helios_inputs),
    "helios without a history": helios(partial(helios_inputs, history=False)),
    "framepack": framepack(partial(framepack_inputs, 5)),
    "framepack with different padding": framepack(partial(framepack_inputs, 7, 4)),
    "allegro": Denoiser("AllegroTransformer3DModel", ALLEGRO, allegro_inputs),
    "easyanimate": Denoiser("EasyAnimateTransformer3DModel", EASYANIMATE, easyanimate_inputs),
    "cosmos 3": cosmos_3(cosmos_3_inputs),
    "cosmos 3 with sound": cosmos_3(partial(cosmos_3_inputs, sound=8)),
}
"""Other families, and forms of them, whose tokens ranks can share."""

WHOLE = {
    "sd3 with layers over the image alone": sd3({**SD3, "dual_attention_layers": (0,)}, sd3_inputs),
    "motif video with decoder layers": motif(
        {**MOTIF, "num_single_layers": 2, "num_decoder_layers": 1}, partial(motif_inputs, 6, 3)
    ),
    "flux 3 with references": flux_3(partial(flux_3_inputs, references=True)),
    "mochi": Denoiser("MochiTransformer3DModel", MOCHI, mochi_inputs),
}
"""Families, or forms of them, that run on one GPU."""

LINEAR = Denoiser("SanaVideoTransformer3DModel", SANA_VIDEO, sana_video_inputs)
"""One whose self-attention is linear."""
DENOISERS = {**COMMON, **SPLIT, **WHOLE}
