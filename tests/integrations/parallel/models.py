"""Tiny denoisers in all the forms their families come in, with inputs that split unevenly."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

HEADS, SIZE = 3, 16
RANDOM = torch.Generator()


@dataclass(frozen=True)
class Case:
    """A model and the arguments of a call.

    Attributes:
        model: makes the model, on any seed.
        inputs: makes the arguments.
    """

    model: Callable[[], Any]
    inputs: Callable[[], dict[str, Any]]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=RANDOM)


def wan(kind: str = "WanTransformer3DModel", **changes: Any) -> Any:
    """Return a model of Wan, or of a family built like it."""
    import diffusers

    return getattr(diffusers, kind)(
        num_attention_heads=HEADS,
        attention_head_dim=SIZE,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=24,
        num_layers=2,
        **changes,
    )


def wan_inputs() -> dict[str, Any]:
    return {
        "hidden_states": normal(2, 4, 3, 6, 10),  # 3 x 3 x 5 tokens
        "timestep": torch.full((2,), 700.0),
        "encoder_hidden_states": normal(2, 7, 12),
    }


def wan_timesteps() -> dict[str, Any]:
    steps = torch.full((2, 45), 700.0)
    steps[:, :15] = 0.0  # the first frame is given
    return {**wan_inputs(), "timestep": steps}


def wan_image() -> dict[str, Any]:
    return {
        **wan_inputs(),
        "encoder_hidden_states": normal(2, 512, 12),
        "encoder_hidden_states_image": normal(2, 257, 20),
    }


def vace() -> Any:
    return wan("WanVACETransformer3DModel", vace_layers=[0, 1], vace_in_channels=8)


def vace_inputs() -> dict[str, Any]:
    # The control is a frame shorter than the video.
    return {**wan_inputs(), "control_hidden_states": normal(2, 8, 2, 6, 10)}


def hunyuan(**changes: Any) -> Any:
    from diffusers import HunyuanVideoTransformer3DModel

    return HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=SIZE,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=12,
        pooled_projection_dim=10,
        rope_axes_dim=(4, 6, 6),
        guidance_embeds=False,
        **changes,
    )


def mask(*lengths: int, total: int) -> torch.Tensor:
    """Return int64 [B, total] with the first `lengths` of each sample valid."""
    return (torch.arange(total) < torch.tensor(lengths)[:, None]).long()


def hunyuan_inputs(*lengths: int) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        return {
            "hidden_states": normal(2, 4, 3, 6, 10),
            "timestep": torch.full((2,), 700.0),
            "encoder_hidden_states": normal(2, 7, 12),
            "encoder_attention_mask": mask(*lengths, total=7),
            "pooled_projections": normal(2, 10),
        }

    return make


def hunyuan_15() -> Any:
    from diffusers import HunyuanVideo15Transformer3DModel

    return HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=SIZE,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=12,
        text_embed_2_dim=10,
        image_embed_dim=8,
        rope_axes_dim=(4, 6, 6),
        task_type="t2v",
    )


def hunyuan_15_inputs(*lengths: int, image: float = 0.0) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        return {
            "hidden_states": normal(2, 9, 3, 3, 5),
            "timestep": torch.full((2,), 700.0),
            "encoder_hidden_states": normal(2, 7, 12),
            "encoder_attention_mask": mask(*lengths, total=7),
            "encoder_hidden_states_2": normal(2, 4, 10),
            "encoder_attention_mask_2": mask(*(n // 2 for n in lengths), total=4),
            "image_embeds": normal(2, 3, 8) * image,
        }

    return make


def ltx() -> Any:
    from diffusers import LTXVideoTransformer3DModel

    return LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=SIZE,
        cross_attention_dim=HEADS * SIZE,
        num_layers=2,
        caption_channels=12,
    )


def ltx_inputs(*, per_token: bool = False) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        timestep = torch.full((2, 45) if per_token else (2,), 700.0)
        timestep[..., :1] = 300.0 if per_token else 700.0
        return {
            "hidden_states": normal(2, 45, 4),
            "timestep": timestep,
            "encoder_hidden_states": normal(2, 7, 12),
            "encoder_attention_mask": mask(7, 4, total=7),
            "num_frames": 3,
            "height": 3,
            "width": 5,
        }

    return make


def flux() -> Any:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=SIZE,
        num_attention_heads=HEADS,
        joint_attention_dim=12,
        pooled_projection_dim=10,
        axes_dims_rope=(4, 6, 6),
    )


def flux_inputs(*, references: int = 0) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        image = torch.cartesian_prod(torch.arange(1.0), torch.arange(5.0), torch.arange(9.0))
        reference = image[:references] + torch.tensor([1.0, 0.0, 0.0])
        ids = torch.cat((image, reference))
        return {
            "hidden_states": normal(2, len(ids), 4),
            "timestep": torch.full((2,), 0.7),
            "encoder_hidden_states": normal(2, 7, 12),
            "pooled_projections": normal(2, 10),
            "img_ids": ids,
            "txt_ids": torch.zeros(7, 3),
            "controlnet_block_samples": [normal(2, len(ids), HEADS * SIZE)],
        }

    return make


def flux2() -> Any:
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=SIZE,
        num_attention_heads=HEADS,
        joint_attention_dim=12,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )


def flux2_inputs(*, references: int = 0) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        image = torch.cartesian_prod(*(torch.arange(n) for n in (1, 5, 9, 1)))
        reference = image[:references] + torch.tensor([10, 0, 0, 0])
        ids = torch.cat((image, reference)).expand(2, -1, -1)
        text = torch.cartesian_prod(*(torch.arange(n) for n in (1, 1, 1, 7)))
        return {
            "hidden_states": normal(2, ids.shape[1], 4),
            "timestep": torch.full((2,), 0.7),
            "guidance": torch.full((2,), 4.0),
            "encoder_hidden_states": normal(2, 7, 12),
            "img_ids": ids,
            "txt_ids": text.expand(2, -1, -1),
        }

    return make


def qwen(**changes: Any) -> Any:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        in_channels=4,
        out_channels=1,
        num_layers=2,
        attention_head_dim=SIZE,
        num_attention_heads=HEADS,
        joint_attention_dim=12,
        axes_dims_rope=(4, 6, 6),
        **changes,
    )


def qwen_inputs(*lengths: int, images: int = 1) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        shapes = [(1, 5, 9), (1, 4, 3)][:images]
        tokens = sum(height * width for _, height, width in shapes)
        return {
            "hidden_states": normal(2, tokens, 4),
            "timestep": torch.full((2,), 0.7),
            "encoder_hidden_states": normal(2, 7, 12),
            "encoder_hidden_states_mask": mask(*lengths, total=7) if lengths else None,
            "img_shapes": [shapes] * 2,
        }

    return make


def cogvideox() -> Any:
    from diffusers import CogVideoXTransformer3DModel

    return CogVideoXTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=SIZE,
        in_channels=4,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=12,
        num_layers=2,
        sample_width=10,
        sample_height=6,
        sample_frames=9,
        max_text_seq_length=7,
        use_rotary_positional_embeddings=True,
    )


def cogvideox_inputs() -> dict[str, Any]:
    return {
        "hidden_states": normal(2, 3, 4, 6, 10),
        "timestep": torch.full((2,), 700),
        "encoder_hidden_states": normal(2, 7, 12),
        "image_rotary_emb": (normal(45, SIZE), normal(45, SIZE)),
    }


IMAGE = {"image_dim": 20, "added_kv_proj_dim": HEADS * SIZE}

CASES = {
    "wan": Case(wan, wan_inputs),
    "wan with a timestep per token": Case(wan, wan_timesteps),
    "wan with an image": Case(lambda: wan(**IMAGE), wan_image),
    "wan vace": Case(vace, vace_inputs),
    # No family of ours: it is split by its own plan.
    "chronoedit": Case(lambda: wan("ChronoEditTransformer3DModel"), wan_inputs),
    "hunyuan": Case(hunyuan, hunyuan_inputs(7, 7)),
    "hunyuan with padding": Case(hunyuan, hunyuan_inputs(4, 4)),
    "hunyuan with different padding": Case(hunyuan, hunyuan_inputs(7, 2)),
    "hunyuan with a first frame": Case(
        lambda: hunyuan(image_condition_type="token_replace"), hunyuan_inputs(7, 4)
    ),
    "hunyuan 1.5 with padding": Case(hunyuan_15, hunyuan_15_inputs(5, 5)),
    "hunyuan 1.5 with an image": Case(hunyuan_15, hunyuan_15_inputs(7, 3, image=1.0)),
    "ltx": Case(ltx, ltx_inputs()),
    "ltx with a timestep per token": Case(ltx, ltx_inputs(per_token=True)),
    "flux": Case(flux, flux_inputs()),
    "flux with reference tokens": Case(flux, flux_inputs(references=12)),
    "flux2": Case(flux2, flux2_inputs()),
    "flux2 with reference tokens": Case(flux2, flux2_inputs(references=12)),
    "qwen": Case(qwen, qwen_inputs()),
    "qwen with padding": Case(qwen, qwen_inputs(6, 3)),
    "qwen with two images": Case(lambda: qwen(zero_cond_t=True), qwen_inputs(images=2)),
    "cogvideox": Case(cogvideox, cogvideox_inputs),
}
