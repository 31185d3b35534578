"""Tiny Qwen-Image."""

from typing import Any, Final

from multimodal_gen.testing.tiny_models import text_encoders, tokenizers
from multimodal_gen.testing.tiny_models.family import TinyFamily, initialise, seeded


def _transformer(seed: int) -> Any:
    from diffusers import QwenImageTransformer2DModel

    with seeded(seed, "transformer"):
        model = QwenImageTransformer2DModel(
            num_layers=2,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=text_encoders.TEXT_WIDTH,
            axes_dims_rope=(8, 12, 12),
        )
        return initialise(model)


def _build(seed: int) -> Any:
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
    )

    with seeded(seed, "vae"):
        vae = initialise(AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1))
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
    )
    pipeline = QwenImagePipeline(
        tokenizer=None,
        text_encoder=None,
        transformer=_transformer(seed),
        vae=vae,
        scheduler=scheduler,
    )
    # The prompt template that the tokenizer has to know is an attribute of the pipeline.
    tokenizer = tokenizers.qwen2_tokenizer(pipeline.prompt_template_encode)
    with seeded(seed, "text_encoder"):
        text_encoder = text_encoders.qwen25_vl(tokenizer)
    pipeline.register_modules(tokenizer=tokenizer, text_encoder=text_encoder)
    return pipeline


QWEN_IMAGE: Final = TinyFamily(
    name="qwen_image",
    pipeline_class="QwenImagePipeline",
    output="image",
    build=_build,
    height=64,
    width=96,
    guidance_name="true_cfg_scale",
    guidance_scale=4.0,
    latent_grid=(1, 4, 6),
    extra_kwargs={"negative_prompt": "Blurry, low quality"},
)
