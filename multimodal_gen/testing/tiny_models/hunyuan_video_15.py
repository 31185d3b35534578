"""Tiny HunyuanVideo-1.5: dual-stream blocks over video, image, glyph and prompt tokens."""

from typing import Any, Final

from multimodal_gen.testing.tiny_models import text_encoders, tokenizers
from multimodal_gen.testing.tiny_models.family import TinyFamily, initialise, seeded

_LATENT_CHANNELS: Final = 8


def _transformer(seed: int) -> Any:
    from diffusers import HunyuanVideo15Transformer3DModel

    with seeded(seed, "transformer"):
        model = HunyuanVideo15Transformer3DModel(
            in_channels=2 * _LATENT_CHANNELS + 1,
            out_channels=_LATENT_CHANNELS,
            num_attention_heads=4,
            attention_head_dim=32,
            num_layers=2,
            num_refiner_layers=2,
            mlp_ratio=2.0,
            text_embed_dim=text_encoders.TEXT_WIDTH,
            text_embed_2_dim=text_encoders.TEXT_WIDTH,
            image_embed_dim=16,
            rope_axes_dim=(8, 12, 12),
            task_type="t2v",
        )
        # The class fixes a 2048 x 2048 layer in its glyph projection. Stored in 16 bits, as the
        # published weights are, it fits the folder; loading gives fp32 unless asked otherwise.
        return initialise(model).bfloat16()


def _vae(seed: int) -> Any:
    from diffusers import AutoencoderKLHunyuanVideo15

    with seeded(seed, "vae"):
        model = AutoencoderKLHunyuanVideo15(
            latent_channels=_LATENT_CHANNELS,
            block_out_channels=(8, 8, 8, 16, 16),
            layers_per_block=1,
        )
        return initialise(model)


def _build(seed: int) -> Any:
    from diffusers import (
        ClassifierFreeGuidance,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideo15Pipeline,
    )

    tokenizer_2 = tokenizers.byt5_tokenizer()
    with seeded(seed, "text_encoder_2"):
        text_encoder_2 = text_encoders.t5(tokenizer_2)
    pipeline = HunyuanVideo15Pipeline(
        tokenizer=None,
        text_encoder=None,
        tokenizer_2=tokenizer_2,
        text_encoder_2=text_encoder_2,
        transformer=_transformer(seed),
        vae=_vae(seed),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
    )
    # The system message that the tokenizer has to know is an attribute of the pipeline.
    tokenizer = tokenizers.qwen2_tokenizer(pipeline.system_message)
    with seeded(seed, "text_encoder"):
        text_encoder = text_encoders.qwen25_vl_text(tokenizer)
    pipeline.register_modules(tokenizer=tokenizer, text_encoder=text_encoder)
    return pipeline


HUNYUAN_VIDEO_15: Final = TinyFamily(
    name="hunyuan_video_15",
    pipeline_class="HunyuanVideo15Pipeline",
    output="video",
    build=_build,
    height=64,
    width=96,
    num_frames=9,
    num_inference_steps=2,
    guidance_name=None,
    latent_grid=(3, 4, 6),
)
