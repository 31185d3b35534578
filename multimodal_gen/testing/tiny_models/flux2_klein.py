"""Tiny FLUX.2 [klein] (the base variant, which is guided by two branches)."""

from typing import Any, Final

from multimodal_gen.testing.tiny_models import text_encoders, tokenizers
from multimodal_gen.testing.tiny_models.family import TinyFamily, initialise, seeded

_LATENT_CHANNELS: Final = 8

# The pipeline reads the hidden states after layers 9, 18 and 27.
_TEXT_LAYERS: Final = 28
_TEXT_WIDTH: Final = 3 * text_encoders.TEXT_WIDTH // 2


def _transformer(seed: int) -> Any:
    from diffusers import Flux2Transformer2DModel

    with seeded(seed, "transformer"):
        model = Flux2Transformer2DModel(
            in_channels=4 * _LATENT_CHANNELS,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=_TEXT_WIDTH,
            timestep_guidance_channels=32,
            axes_dims_rope=(8, 8, 8, 8),
            guidance_embeds=False,
        )
        return initialise(model)


def _vae(seed: int) -> Any:
    from diffusers import AutoencoderKLFlux2

    with seeded(seed, "vae"):
        model = AutoencoderKLFlux2(
            block_out_channels=(8, 16, 16, 16),
            layers_per_block=1,
            latent_channels=_LATENT_CHANNELS,
            norm_num_groups=4,
        )
        return initialise(model)


def _build(seed: int) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline

    tokenizer = tokenizers.qwen2_tokenizer("")
    with seeded(seed, "text_encoder"):
        text_encoder = text_encoders.qwen3(tokenizer, num_layers=_TEXT_LAYERS)
    return Flux2KleinPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        transformer=_transformer(seed),
        vae=_vae(seed),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    )


FLUX2_KLEIN: Final = TinyFamily(
    name="flux2_klein",
    pipeline_class="Flux2KleinPipeline",
    output="image",
    build=_build,
    height=64,
    width=96,
    num_inference_steps=2,
    guidance_scale=4.0,
    latent_grid=(1, 4, 6),
)
