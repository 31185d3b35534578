"""Tiny pipelines that make a video chunk by chunk."""

from typing import Any, Final

from multimodal_gen.testing.tiny_models import text_encoders, tokenizers
from multimodal_gen.testing.tiny_models.family import TinyFamily, initialise, seeded
from multimodal_gen.testing.tiny_models.hunyuan_video import HUNYUAN_VIDEO


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
    from diffusers import HeliosPipeline, HeliosScheduler

    return HeliosPipeline(
        **_text_and_vae(seed),
        transformer=_helios_transformer(seed),
        scheduler=HeliosScheduler(stages=1, stage_range=[0, 1], gamma=1 / 3),
    )


def _build_helios_pyramid(seed: int) -> Any:
    from diffusers import HeliosPyramidPipeline, HeliosScheduler

    return HeliosPyramidPipeline(
        **_text_and_vae(seed),
        transformer=_helios_transformer(seed),
        # At the usual third, the covariance of its noise is singular: not every CPU factors it.
        scheduler=HeliosScheduler(stages=2, stage_range=[0, 1 / 2, 1], gamma=0.3),
    )


def _build_skyreels(seed: int) -> Any:
    from diffusers import (
        SkyReelsV2DiffusionForcingPipeline,
        SkyReelsV2Transformer3DModel,
        UniPCMultistepScheduler,
    )

    with seeded(seed, "transformer"):
        transformer = initialise(
            SkyReelsV2Transformer3DModel(
                num_attention_heads=2,
                attention_head_dim=24,
                text_dim=text_encoders.TEXT_WIDTH,
                freq_dim=32,
                ffn_dim=64,
                num_layers=2,
                inject_sample_info=True,
            )
        )
    return SkyReelsV2DiffusionForcingPipeline(
        **_text_and_vae(seed),
        transformer=transformer,
        scheduler=UniPCMultistepScheduler(flow_shift=8.0, use_flow_sigmas=True),
    )


def _build_framepack(seed: int) -> Any:
    from diffusers import (
        HunyuanVideoFramepackPipeline,
        HunyuanVideoFramepackTransformer3DModel,
    )
    from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    with seeded(seed, "transformer"):
        transformer = initialise(
            HunyuanVideoFramepackTransformer3DModel(
                num_attention_heads=2,
                attention_head_dim=32,
                num_layers=1,
                num_single_layers=1,
                num_refiner_layers=1,
                text_embed_dim=text_encoders.TEXT_WIDTH,
                pooled_projection_dim=text_encoders.TEXT_WIDTH,
                rope_axes_dim=(8, 12, 12),
                has_image_proj=True,
                image_proj_dim=16,
                has_clean_x_embedder=True,
            )
        )
    with seeded(seed, "image_encoder"):
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        config = SiglipVisionConfig(**sizes, num_attention_heads=2, image_size=32, patch_size=16)
        image_encoder = initialise(SiglipVisionModel(config))
    parts = HUNYUAN_VIDEO.build(seed).components
    return HunyuanVideoFramepackPipeline(
        **{**parts, "transformer": transformer},
        image_encoder=image_encoder,
        feature_extractor=SiglipImageProcessor(size={"height": 32, "width": 32}),
    )


def _helios_transformer(seed: int) -> Any:
    from diffusers import HeliosTransformer3DModel

    with seeded(seed, "transformer"):
        return initialise(
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

# The same, in two sizes one after the other.
HELIOS_PYRAMID: Final = TinyFamily(
    name="helios_pyramid",
    pipeline_class="HeliosPyramidPipeline",
    output="video",
    build=_build_helios_pyramid,
    height=64,
    width=64,
    num_frames=18,
    num_inference_steps=None,
    latent_grid=(3, 4, 4),
    extra_kwargs={
        "num_latent_frames_per_chunk": 3,
        "history_sizes": [4, 2, 1],
        "pyramid_num_inference_steps_list": [1, 1],
    },
)

# Parts of three latent frames, of which the first two are the last ones of the part before.
SKYREELS: Final = TinyFamily(
    name="skyreels",
    pipeline_class="SkyReelsV2DiffusionForcingPipeline",
    output="video",
    build=_build_skyreels,
    height=32,
    width=64,
    num_frames=17,
    num_inference_steps=2,
    latent_grid=(3, 2, 4),
    extra_kwargs={"base_num_frames": 9, "overlap_history": 5},
)

# Sections of two latent frames, blended over five frames; the first one has the image as well.
FRAMEPACK: Final = TinyFamily(
    name="framepack",
    pipeline_class="HunyuanVideoFramepackPipeline",
    output="video",
    build=_build_framepack,
    height=64,
    width=96,
    num_frames=20,
    num_inference_steps=1,
    latent_grid=(2, 4, 6),
    extra_kwargs={"latent_window_size": 2, "sampling_type": "vanilla"},
    needs_image=True,
)
