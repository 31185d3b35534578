"""Tiny Flux.1 (the guidance-distilled variant)."""

from typing import Any, Final

from multimodal_gen.testing.tiny_models import text_encoders, tokenizers
from multimodal_gen.testing.tiny_models.family import TinyFamily, initialise, seeded

_LATENT_CHANNELS: Final = 16


def _transformer(seed: int) -> Any:
    from diffusers import FluxTransformer2DModel

    with seeded(seed, "transformer"):
        model = FluxTransformer2DModel(
            in_channels=4 * _LATENT_CHANNELS,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=text_encoders.TEXT_WIDTH,
            pooled_projection_dim=text_encoders.TEXT_WIDTH,
            guidance_embeds=True,
            axes_dims_rope=(8, 12, 12),
        )
        return initialise(model)


def _vae(seed: int) -> Any:
    from diffusers import AutoencoderKL

    with seeded(seed, "vae"):
        model = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8, 16, 16, 16),
            layers_per_block=1,
            latent_channels=_LATENT_CHANNELS,
            norm_num_groups=4,
            scaling_factor=0.3611,
            shift_factor=0.1159,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
        return initialise(model)


def _build(seed: int) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    tokenizer = tokenizers.clip_tokenizer()
    tokenizer_2 = tokenizers.t5_tokenizer()
    with seeded(seed, "text_encoder"):
        text_encoder = text_encoders.clip_text(tokenizer)
    with seeded(seed, "text_encoder_2"):
        text_encoder_2 = text_encoders.t5(tokenizer_2)
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
    return FluxPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        tokenizer_2=tokenizer_2,
        text_encoder_2=text_encoder_2,
        transformer=_transformer(seed),
        vae=_vae(seed),
        scheduler=scheduler,
    )


FLUX: Final = TinyFamily(
    name="flux",
    pipeline_class="FluxPipeline",
    output="image",
    build=_build,
    height=64,
    width=96,
    guidance_scale=3.5,
    latent_grid=(1, 4, 6),
)
