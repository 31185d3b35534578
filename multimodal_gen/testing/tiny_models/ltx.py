"""Tiny LTX-Video."""

from typing import Any, Final

from multimodal_gen.testing.tiny_models import text_encoders, tokenizers
from multimodal_gen.testing.tiny_models.family import TinyFamily, initialise, seeded

_LATENT_CHANNELS: Final = 16


def _transformer(seed: int) -> Any:
    from diffusers import LTXVideoTransformer3DModel

    with seeded(seed, "transformer"):
        model = LTXVideoTransformer3DModel(
            in_channels=_LATENT_CHANNELS,
            out_channels=_LATENT_CHANNELS,
            num_attention_heads=4,
            attention_head_dim=32,
            cross_attention_dim=128,
            num_layers=2,
            caption_channels=text_encoders.TEXT_WIDTH,
        )
        return initialise(model)


def _vae(seed: int) -> Any:
    from diffusers import AutoencoderKLLTXVideo

    with seeded(seed, "vae"):
        model = AutoencoderKLLTXVideo(
            latent_channels=_LATENT_CHANNELS,
            block_out_channels=(8, 16, 16, 16),
            decoder_block_out_channels=(8, 16, 16, 16),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
        )
        return initialise(model)


def _build(seed: int) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, LTXPipeline

    tokenizer = tokenizers.t5_tokenizer(model_max_length=128)
    with seeded(seed, "text_encoder"):
        text_encoder = text_encoders.t5(tokenizer)
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )
    return LTXPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        transformer=_transformer(seed),
        vae=_vae(seed),
        scheduler=scheduler,
    )


LTX: Final = TinyFamily(
    name="ltx",
    pipeline_class="LTXPipeline",
    output="video",
    build=_build,
    height=128,
    width=192,
    num_frames=17,
    guidance_scale=3.0,
    latent_grid=(3, 4, 6),
    extra_kwargs={"negative_prompt": "Blurry, low quality, static"},
)
