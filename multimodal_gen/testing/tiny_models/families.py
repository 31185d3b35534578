"""The tiny families that make an image, or a video as a whole."""

from dataclasses import replace
from functools import partial
from typing import Any, Final

from multimodal_gen.testing.tiny_models import text_encoders, tokenizers
from multimodal_gen.testing.tiny_models.family import TinyFamily, component
from multimodal_gen.testing.tiny_models.text_encoders import TEXT_WIDTH

# Wan 2.1 (one transformer) and Wan 2.2 (a transformer for each noise range).

_WAN_TRANSFORMER: Final = component(
    "WanTransformer3DModel",
    num_attention_heads=4,
    attention_head_dim=32,
    text_dim=TEXT_WIDTH,
    freq_dim=64,
    ffn_dim=256,
    num_layers=2,
)

WAN: Final = TinyFamily(
    name="wan",
    pipeline_class="WanPipeline",
    output="video",
    components={
        "transformer": _WAN_TRANSFORMER,
        "vae": component("AutoencoderKLWan", base_dim=4, num_res_blocks=1),
        "scheduler": component(
            "UniPCMultistepScheduler",
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=3.0,
        ),
    },
    text={"": (tokenizers.t5_tokenizer, text_encoders.umt5)},
    height=64,
    width=96,
    num_frames=9,
    guidance_scale=3.0,
    latent_grid=(3, 4, 6),
    extra_kwargs={"negative_prompt": "Blurry, low quality, static"},
)

# Four steps at this shift fall on both sides of the boundary: two for each transformer.
WAN22: Final = replace(
    WAN,
    name="wan22",
    components={**WAN.components, "transformer_2": _WAN_TRANSFORMER},
    pipeline_config={"boundary_ratio": 0.875},
    num_inference_steps=4,
)


def _hunyuan_tokenizer() -> Any:
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

    return tokenizers.llama_tokenizer(str(DEFAULT_PROMPT_TEMPLATE["template"]))


# Dual-stream and single-stream blocks behind a text refiner.
HUNYUAN_VIDEO: Final = TinyFamily(
    name="hunyuan_video",
    pipeline_class="HunyuanVideoPipeline",
    output="video",
    components={
        "transformer": component(
            "HunyuanVideoTransformer3DModel",
            num_attention_heads=4,
            attention_head_dim=32,
            num_layers=2,
            num_single_layers=2,
            num_refiner_layers=2,
            mlp_ratio=2.0,
            text_embed_dim=TEXT_WIDTH,
            pooled_projection_dim=TEXT_WIDTH,
            rope_axes_dim=(8, 12, 12),
        ),
        "vae": component(
            "AutoencoderKLHunyuanVideo",
            block_out_channels=(4, 4, 8, 8),
            layers_per_block=1,
            norm_num_groups=4,
        ),
        "scheduler": component("FlowMatchEulerDiscreteScheduler", shift=7.0),
    },
    text={
        "": (_hunyuan_tokenizer, text_encoders.llama),
        "_2": (tokenizers.clip_tokenizer, text_encoders.clip_text),
    },
    height=64,
    width=96,
    num_frames=9,
    guidance_scale=6.0,
    latent_grid=(3, 4, 6),
)


def _hunyuan_15_transformer() -> Any:
    make = component(
        "HunyuanVideo15Transformer3DModel",
        in_channels=17,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=32,
        num_layers=2,
        num_refiner_layers=2,
        mlp_ratio=2.0,
        text_embed_dim=TEXT_WIDTH,
        text_embed_2_dim=TEXT_WIDTH,
        image_embed_dim=16,
        rope_axes_dim=(8, 12, 12),
        task_type="t2v",
    )
    # The class fixes a 2048 x 2048 layer in its glyph projection. Stored in 16 bits, as the
    # published weights are, it fits the folder; loading gives fp32 unless asked otherwise.
    return make().bfloat16()


# Dual-stream blocks over video, image, glyph and prompt tokens.
HUNYUAN_VIDEO_15: Final = TinyFamily(
    name="hunyuan_video_15",
    pipeline_class="HunyuanVideo15Pipeline",
    output="video",
    components={
        "transformer": _hunyuan_15_transformer,
        "vae": component(
            "AutoencoderKLHunyuanVideo15",
            latent_channels=8,
            block_out_channels=(4, 4, 4, 8, 8),
            layers_per_block=1,
        ),
        "scheduler": component("FlowMatchEulerDiscreteScheduler", shift=5.0),
        "guider": component("ClassifierFreeGuidance", guidance_scale=6.0),
    },
    text={
        "": (tokenizers.qwen2_tokenizer, text_encoders.qwen25_vl_text),
        "_2": (tokenizers.byt5_tokenizer, text_encoders.t5),
    },
    template="system_message",
    height=64,
    width=96,
    num_frames=9,
    num_inference_steps=2,
    guidance_name=None,
    latent_grid=(3, 4, 6),
)

LTX: Final = TinyFamily(
    name="ltx",
    pipeline_class="LTXPipeline",
    output="video",
    components={
        "transformer": component(
            "LTXVideoTransformer3DModel",
            in_channels=16,
            out_channels=16,
            num_attention_heads=4,
            attention_head_dim=32,
            cross_attention_dim=128,
            num_layers=2,
            caption_channels=TEXT_WIDTH,
        ),
        "vae": component(
            "AutoencoderKLLTXVideo",
            latent_channels=16,
            block_out_channels=(8, 16, 16, 16),
            decoder_block_out_channels=(8, 16, 16, 16),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
        ),
        "scheduler": component(
            "FlowMatchEulerDiscreteScheduler",
            use_dynamic_shifting=True,
            base_shift=0.95,
            max_shift=2.05,
            base_image_seq_len=1024,
            max_image_seq_len=4096,
            shift_terminal=0.1,
        ),
    },
    text={"": (partial(tokenizers.t5_tokenizer, model_max_length=128), text_encoders.t5)},
    height=128,
    width=192,
    num_frames=17,
    guidance_scale=3.0,
    latent_grid=(3, 4, 6),
    extra_kwargs={"negative_prompt": "Blurry, low quality, static"},
)

# Flux.1, the guidance-distilled variant.
FLUX: Final = TinyFamily(
    name="flux",
    pipeline_class="FluxPipeline",
    output="image",
    components={
        "transformer": component(
            "FluxTransformer2DModel",
            in_channels=64,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=TEXT_WIDTH,
            guidance_embeds=True,
            axes_dims_rope=(8, 12, 12),
        ),
        "vae": component(
            "AutoencoderKL",
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8, 16, 16, 16),
            layers_per_block=1,
            latent_channels=16,
            norm_num_groups=4,
            scaling_factor=0.3611,
            shift_factor=0.1159,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        "scheduler": component(
            "FlowMatchEulerDiscreteScheduler",
            shift=3.0,
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=1.15,
            base_image_seq_len=256,
            max_image_seq_len=4096,
        ),
    },
    text={
        "": (tokenizers.clip_tokenizer, text_encoders.clip_text),
        "_2": (tokenizers.t5_tokenizer, text_encoders.t5),
    },
    height=64,
    width=96,
    guidance_scale=3.5,
    latent_grid=(1, 4, 6),
)

# FLUX.2 [klein], the base variant, which is guided by two branches. Its pipeline reads the hidden
# states after layers 9, 18 and 27 of a text encoder that is half as wide as the others.
FLUX2_KLEIN: Final = TinyFamily(
    name="flux2_klein",
    pipeline_class="Flux2KleinPipeline",
    output="image",
    components={
        "transformer": component(
            "Flux2Transformer2DModel",
            in_channels=32,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=3 * TEXT_WIDTH // 2,
            timestep_guidance_channels=32,
            axes_dims_rope=(8, 8, 8, 8),
            guidance_embeds=False,
        ),
        "vae": component(
            "AutoencoderKLFlux2",
            block_out_channels=(8, 16, 16, 16),
            layers_per_block=1,
            latent_channels=8,
            norm_num_groups=4,
        ),
        "scheduler": component(
            "FlowMatchEulerDiscreteScheduler", shift=3.0, use_dynamic_shifting=True
        ),
    },
    text={
        "": (partial(tokenizers.qwen2_tokenizer, ""), partial(text_encoders.qwen3, num_layers=28))
    },
    height=64,
    width=96,
    num_inference_steps=2,
    guidance_scale=4.0,
    latent_grid=(1, 4, 6),
)

QWEN_IMAGE: Final = TinyFamily(
    name="qwen_image",
    pipeline_class="QwenImagePipeline",
    output="image",
    components={
        "transformer": component(
            "QwenImageTransformer2DModel",
            num_layers=2,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=TEXT_WIDTH,
            axes_dims_rope=(8, 12, 12),
        ),
        "vae": component("AutoencoderKLQwenImage", base_dim=8, num_res_blocks=1),
        "scheduler": component(
            "FlowMatchEulerDiscreteScheduler",
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            shift_terminal=0.02,
        ),
    },
    text={"": (tokenizers.qwen2_tokenizer, text_encoders.qwen25_vl)},
    template="prompt_template_encode",
    height=64,
    width=96,
    guidance_name="true_cfg_scale",
    guidance_scale=4.0,
    latent_grid=(1, 4, 6),
    extra_kwargs={"negative_prompt": "Blurry, low quality"},
)

# CogVideoX 1.0, with rotary position embeddings as in the 5B model.
COGVIDEOX: Final = TinyFamily(
    name="cogvideox",
    pipeline_class="CogVideoXPipeline",
    output="video",
    components={
        "transformer": component(
            "CogVideoXTransformer3DModel",
            num_attention_heads=4,
            attention_head_dim=32,
            time_embed_dim=64,
            text_embed_dim=TEXT_WIDTH,
            num_layers=2,
            sample_width=12,
            sample_height=8,
            sample_frames=9,
            max_text_seq_length=226,
            use_rotary_positional_embeddings=True,
        ),
        "vae": component(
            "AutoencoderKLCogVideoX",
            block_out_channels=(4, 4, 8, 8),
            layers_per_block=1,
            norm_num_groups=4,
            sample_height=64,
            sample_width=96,
            scaling_factor=0.7,
        ),
        "scheduler": component(
            "CogVideoXDDIMScheduler",
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
            snr_shift_scale=1.0,
        ),
    },
    text={"": (partial(tokenizers.t5_tokenizer, model_max_length=226), text_encoders.t5)},
    height=64,
    width=96,
    num_frames=9,
    guidance_scale=6.0,
    latent_grid=(3, 4, 6),
    extra_kwargs={"negative_prompt": "Blurry, low quality, static"},
)
