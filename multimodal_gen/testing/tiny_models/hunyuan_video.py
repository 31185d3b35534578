"""Tiny HunyuanVideo: dual-stream and single-stream blocks behind a text refiner."""

from typing import Any, Final

from multimodal_gen.testing.tiny_models import text_encoders, tokenizers
from multimodal_gen.testing.tiny_models.family import TinyFamily, initialise, seeded


def _transformer(seed: int) -> Any:
    from diffusers import HunyuanVideoTransformer3DModel

    with seeded(seed, "transformer"):
        model = HunyuanVideoTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=32,
            num_layers=2,
            num_single_layers=2,
            num_refiner_layers=2,
            mlp_ratio=2.0,
            text_embed_dim=text_encoders.TEXT_WIDTH,
            pooled_projection_dim=text_encoders.TEXT_WIDTH,
            rope_axes_dim=(8, 12, 12),
        )
        return initialise(model)


def _vae(seed: int) -> Any:
    from diffusers import AutoencoderKLHunyuanVideo

    with seeded(seed, "vae"):
        model = AutoencoderKLHunyuanVideo(
            block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4
        )
        return initialise(model)


def _build(seed: int) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideoPipeline
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

    tokenizer = tokenizers.llama_tokenizer(str(DEFAULT_PROMPT_TEMPLATE["template"]))
    tokenizer_2 = tokenizers.clip_tokenizer()
    with seeded(seed, "text_encoder"):
        text_encoder = text_encoders.llama(tokenizer)
    with seeded(seed, "text_encoder_2"):
        text_encoder_2 = text_encoders.clip_text(tokenizer_2)
    return HunyuanVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        tokenizer_2=tokenizer_2,
        text_encoder_2=text_encoder_2,
        transformer=_transformer(seed),
        vae=_vae(seed),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


HUNYUAN_VIDEO: Final = TinyFamily(
    name="hunyuan_video",
    pipeline_class="HunyuanVideoPipeline",
    output="video",
    build=_build,
    height=64,
    width=96,
    num_frames=9,
    guidance_scale=6.0,
    latent_grid=(3, 4, 6),
)
