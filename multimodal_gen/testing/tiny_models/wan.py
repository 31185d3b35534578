"""Tiny Wan 2.1 (one transformer) and Wan 2.2 (a transformer for each noise range)."""

from typing import Any, Final

from multimodal_gen.testing.tiny_models import text_encoders, tokenizers
from multimodal_gen.testing.tiny_models.family import TinyFamily, initialise, seeded

_NEGATIVE_PROMPT: Final = "Blurry, low quality, static"


def _transformer(seed: int, component: str) -> Any:
    from diffusers import WanTransformer3DModel

    with seeded(seed, component):
        model = WanTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=32,
            text_dim=text_encoders.TEXT_WIDTH,
            freq_dim=64,
            ffn_dim=256,
            num_layers=2,
        )
        return initialise(model)


def _components(seed: int, flow_shift: float) -> dict[str, Any]:
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler

    tokenizer = tokenizers.t5_tokenizer()
    with seeded(seed, "text_encoder"):
        text_encoder = text_encoders.umt5(tokenizer)
    with seeded(seed, "vae"):
        vae = initialise(AutoencoderKLWan(base_dim=8, num_res_blocks=1))
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift
    )
    return {
        "tokenizer": tokenizer,
        "text_encoder": text_encoder,
        "vae": vae,
        "scheduler": scheduler,
        "transformer": _transformer(seed, "transformer"),
    }


def _build_wan(seed: int) -> Any:
    from diffusers import WanPipeline

    return WanPipeline(**_components(seed, flow_shift=3.0))


def _build_wan22(seed: int) -> Any:
    from diffusers import WanPipeline

    return WanPipeline(
        **_components(seed, flow_shift=3.0),
        transformer_2=_transformer(seed, "transformer_2"),
        boundary_ratio=0.875,
    )


WAN: Final = TinyFamily(
    name="wan",
    pipeline_class="WanPipeline",
    output="video",
    build=_build_wan,
    height=64,
    width=96,
    num_frames=9,
    guidance_scale=3.0,
    latent_grid=(3, 4, 6),
    extra_kwargs={"negative_prompt": _NEGATIVE_PROMPT},
)

# Four steps at this shift fall on both sides of the boundary: two for each transformer.
WAN22: Final = TinyFamily(
    name="wan22",
    pipeline_class="WanPipeline",
    output="video",
    build=_build_wan22,
    height=64,
    width=96,
    num_frames=9,
    num_inference_steps=4,
    guidance_scale=3.0,
    latent_grid=(3, 4, 6),
    extra_kwargs={"negative_prompt": _NEGATIVE_PROMPT},
)
