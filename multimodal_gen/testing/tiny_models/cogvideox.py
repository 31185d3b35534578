"""Tiny CogVideoX (1.0, with rotary position embeddings as in the 5B model)."""

from typing import Any, Final

from multimodal_gen.testing.tiny_models import text_encoders, tokenizers
from multimodal_gen.testing.tiny_models.family import TinyFamily, initialise, seeded

_HEIGHT: Final = 64
_WIDTH: Final = 96
_NUM_FRAMES: Final = 9
_VAE_STRIDE: Final = 8
_PROMPT_TOKENS: Final = 226


def _transformer(seed: int) -> Any:
    from diffusers import CogVideoXTransformer3DModel

    with seeded(seed, "transformer"):
        model = CogVideoXTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=32,
            time_embed_dim=64,
            text_embed_dim=text_encoders.TEXT_WIDTH,
            num_layers=2,
            sample_width=_WIDTH // _VAE_STRIDE,
            sample_height=_HEIGHT // _VAE_STRIDE,
            sample_frames=_NUM_FRAMES,
            max_text_seq_length=_PROMPT_TOKENS,
            use_rotary_positional_embeddings=True,
        )
        return initialise(model)


def _vae(seed: int) -> Any:
    from diffusers import AutoencoderKLCogVideoX

    with seeded(seed, "vae"):
        model = AutoencoderKLCogVideoX(
            block_out_channels=(8, 8, 16, 16),
            layers_per_block=1,
            norm_num_groups=4,
            sample_height=_HEIGHT,
            sample_width=_WIDTH,
            scaling_factor=0.7,
        )
        return initialise(model)


def _build(seed: int) -> Any:
    from diffusers import CogVideoXDDIMScheduler, CogVideoXPipeline

    tokenizer = tokenizers.t5_tokenizer(model_max_length=_PROMPT_TOKENS)
    with seeded(seed, "text_encoder"):
        text_encoder = text_encoders.t5(tokenizer)
    scheduler = CogVideoXDDIMScheduler(
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        snr_shift_scale=1.0,
    )
    return CogVideoXPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        transformer=_transformer(seed),
        vae=_vae(seed),
        scheduler=scheduler,
    )


COGVIDEOX: Final = TinyFamily(
    name="cogvideox",
    pipeline_class="CogVideoXPipeline",
    output="video",
    build=_build,
    height=_HEIGHT,
    width=_WIDTH,
    num_frames=_NUM_FRAMES,
    guidance_scale=6.0,
    latent_grid=(3, 4, 6),
    extra_kwargs={"negative_prompt": "Blurry, low quality, static"},
)
