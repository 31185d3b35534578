"""The tiny families that make a video chunk by chunk."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from multimodal_gen.testing.tiny_models.families import HUNYUAN_VIDEO, WAN
from multimodal_gen.testing.tiny_models.family import TinyFamily, component, initialise
from multimodal_gen.testing.tiny_models.text_encoders import TEXT_WIDTH

_SIZES: Final[Mapping[str, Any]] = {
    "num_attention_heads": 2,
    "attention_head_dim": 24,
    "text_dim": TEXT_WIDTH,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 2,
}

# Chunks of 1, 2, 2, 2 and 1 latent frames; the last but two are compressed in the history.
ANYFLOW_FAR: Final = TinyFamily(
    name="anyflow_far",
    pipeline_class="AnyFlowFARPipeline",
    output="video",
    components={
        "transformer": component(
            "AnyFlowFARTransformer3DModel",
            **_SIZES,
            full_chunk_limit=3,
            chunk_partition=(1, 2, 2, 2, 1),
        ),
        "vae": WAN.components["vae"],
        "scheduler": component("FlowMapEulerDiscreteScheduler", shift=5.0),
    },
    text=WAN.text,
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
    components={
        "transformer": component("HeliosTransformer3DModel", **_SIZES, rope_dim=(8, 8, 8)),
        "vae": WAN.components["vae"],
        "scheduler": component("HeliosScheduler", stages=1, stage_range=[0, 1], gamma=1 / 3),
    },
    text=WAN.text,
    height=32,
    width=64,
    num_frames=18,
    num_inference_steps=2,
    latent_grid=(3, 2, 4),
    extra_kwargs={"num_latent_frames_per_chunk": 3, "history_sizes": [4, 2, 1]},
)

# The same, in two sizes one after the other.
HELIOS_PYRAMID: Final = replace(
    HELIOS,
    name="helios_pyramid",
    pipeline_class="HeliosPyramidPipeline",
    components={
        **HELIOS.components,
        # At the usual third, the covariance of its noise is singular: not every CPU factors it.
        "scheduler": component("HeliosScheduler", stages=2, stage_range=[0, 1 / 2, 1], gamma=0.3),
    },
    height=64,
    num_inference_steps=None,
    latent_grid=(3, 4, 4),
    extra_kwargs={**HELIOS.extra_kwargs, "pyramid_num_inference_steps_list": [1, 1]},
)

# Parts of three latent frames, of which the first two are the last ones of the part before.
SKYREELS: Final = TinyFamily(
    name="skyreels",
    pipeline_class="SkyReelsV2DiffusionForcingPipeline",
    output="video",
    components={
        "transformer": component("SkyReelsV2Transformer3DModel", **_SIZES, inject_sample_info=True),
        "vae": WAN.components["vae"],
        "scheduler": component("UniPCMultistepScheduler", flow_shift=8.0, use_flow_sigmas=True),
    },
    text=WAN.text,
    height=32,
    width=64,
    num_frames=17,
    num_inference_steps=2,
    latent_grid=(3, 2, 4),
    extra_kwargs={"base_num_frames": 9, "overlap_history": 5},
)


def _image_encoder() -> Any:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = SiglipVisionConfig(**sizes, num_attention_heads=2, image_size=32, patch_size=16)
    return initialise(SiglipVisionModel(config))


def _feature_extractor() -> Any:
    from transformers import SiglipImageProcessor

    return SiglipImageProcessor(size={"height": 32, "width": 32})


# Sections of two latent frames, blended over five frames; the first one has the image as well.
FRAMEPACK: Final = replace(
    HUNYUAN_VIDEO,
    name="framepack",
    pipeline_class="HunyuanVideoFramepackPipeline",
    components={
        **HUNYUAN_VIDEO.components,
        "transformer": component(
            "HunyuanVideoFramepackTransformer3DModel",
            num_attention_heads=2,
            attention_head_dim=32,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            text_embed_dim=TEXT_WIDTH,
            pooled_projection_dim=TEXT_WIDTH,
            rope_axes_dim=(8, 12, 12),
            has_image_proj=True,
            image_proj_dim=16,
            has_clean_x_embedder=True,
        ),
        "image_encoder": _image_encoder,
        "feature_extractor": _feature_extractor,
    },
    num_frames=20,
    num_inference_steps=1,
    guidance_scale=None,
    latent_grid=(2, 4, 6),
    extra_kwargs={"latent_window_size": 2, "sampling_type": "vanilla"},
    needs_image=True,
)
