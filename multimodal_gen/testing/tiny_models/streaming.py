"""Tiny pipelines that make a video chunk by chunk: AnyFlow-FAR and Helios."""

from typing import Any, Final

from multimodal_gen.testing.tiny_models import text_encoders, tokenizers
from multimodal_gen.testing.tiny_models.family import TinyFamily, initialise, seeded

__all__ = ["ANYFLOW_FAR", "HELIOS"]


def _text_and_vae(seed: int) -> dict[str, Any]:
    from diffusers import AutoencoderKLWan

    tokenizer = tokenizers.t5_tokenizer()
    with seeded(seed, "text_encoder"):
        text_encoder = text_encoders.umt5(tokenizer)
    with seeded(seed, "vae"):
        vae = initialise(AutoencoderKLWan(base_dim=8, num_res_blocks=1))
    return {"tokenizer": tokenizer, "text_encoder": text_encoder, "vae": vae}


def _build_anyflow_far(seed: int) -> Any:
    from diffusers import (
        AnyFlowFARPipeline,
        AnyFlowFARTransformer3DModel,
        FlowMapEulerDiscreteScheduler,
    )

    with seeded(seed, "transformer"):
        transformer = initialise(
            AnyFlowFARTransformer3DModel(
                num_attention_heads=2,
                attention_head_dim=24,
                text_dim=text_encoders.TEXT_WIDTH,
                freq_dim=32,
                ffn_dim=64,
                num_layers=2,
                full_chunk_limit=3,
                chunk_partition=(1, 2, 2, 2, 1),
            )
        )
    return AnyFlowFARPipeline(
        **_text_and_vae(seed),
        transformer=transformer,
        scheduler=FlowMapEulerDiscreteScheduler(shift=5.0),
    )


def _build_helios(seed: int) -> Any:
    from diffusers import HeliosPipeline, HeliosScheduler, HeliosTransformer3DModel

    with seeded(seed, "transformer"):
        transformer = initialise(
            HeliosTransformer3DModel(
                num_attention_heads=2,
                attention_head_dim=24,
                rope_dim=(8, 8, 8),
                text_dim=text_encoders.TEXT_WIDTH,
                freq_dim=32,
                ffn_dim=64,
                num_layers=2,
            )
        )
    return HeliosPipeline(
        **_text_and_vae(seed),
        transformer=transformer,
        scheduler=HeliosScheduler(stages=1, stage_range=[0, 1], gamma=1 / 3),
    )


# Chunks of 1, 2, 2, 2 and 1 latent frames; the last but two are compressed in the history.
ANYFLOW_FAR: Final = TinyFamily(
    name="anyflow_far",
    pipeline_class="AnyFlowFARPipeline",
    output="video",
    build=_build_anyflow_far,
    height=32,
    width=64,
    num_frames=29,
    num_inference_steps=2,
    latent_grid=(8, 2, 4),
)

# Two chunks of three latent frames each.
HELIOS: Final = TinyFamily(
    name="helios",
    pipeline_class="HeliosPipeline",
    output="video",
    build=_build_helios,
    height=32,
    width=64,
    num_frames=18,
    num_inference_steps=2,
    latent_grid=(3, 2, 4),
    extra_kwargs={"num_latent_frames_per_chunk": 3, "history_sizes": [4, 2, 1]},
)
