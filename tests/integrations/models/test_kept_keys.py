"""Stock models that keep keys for later calls: what they give on our layers is what they gave.

The guide to streaming has a table of them, which is held to what is installed.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.transformers import transformer_wan_animate_2
from torch.nn.attention.flex_attention import create_block_mask

from multimodal_gen.integrations.diffusers import apply
from tests.helpers.denoisers import COMMON, HEADS, LTX_2, RANDOM, SIZE, SPLIT, normal

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning"),
]

GUIDE = Path(__file__).parents[3] / "docs/pages/guides/streaming.md"


def flux2() -> tuple[Any, Callable[[Any], list[torch.Tensor]]]:
    """Reference images, whose keys the first call leaves for the others."""
    from diffusers.models.transformers.transformer_flux2 import (
        Flux2KVAttnProcessor,
        Flux2KVParallelSelfAttnProcessor,
    )

    model = COMMON["flux2"].model(guidance_embeds=False)
    for block in model.transformer_blocks:
        block.attn.set_processor(Flux2KVAttnProcessor())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(Flux2KVParallelSelfAttnProcessor())
    text, references, image = normal(1, 5, 12), normal(1, 6, 4), normal(1, 9, 4)
    ids = torch.randint(0, 9, (20, 4)).float()

    def run(model: Any) -> list[torch.Tensor]:
        same = {"encoder_hidden_states": text, "timestep": torch.tensor([0.7]), "txt_ids": ids[:5]}
        first, cache = model(
            hidden_states=torch.cat((references, image), dim=1),
            img_ids=ids[5:20],
            kv_cache_mode="extract",
            num_ref_tokens=6,
            return_dict=False,
            **same,
        )
        later = model(
            hidden_states=2 * image,
            img_ids=ids[11:20],
            kv_cache=cache,
            kv_cache_mode="cached",
            return_dict=False,
            **same,
        )[0]
        return [first, later]

    return model, run


def glm_image() -> tuple[Any, Callable[[Any], list[torch.Tensor]]]:
    """Condition images, whose keys go in front of all others."""
    from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache

    model = diffusers.GlmImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=SIZE,
        num_attention_heads=HEADS,
        text_embed_dim=12,
        time_embed_dim=16,
        condition_dim=8,
        prior_vq_quantizer_codebook_size=10,
    )

    def inputs(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        RANDOM.manual_seed(seed)
        return {
            "hidden_states": normal(1, 4, 6, 8),
            "encoder_hidden_states": normal(1, 5, 12),
            "prior_token_id": torch.randint(0, 10, (1, 12)),
            "prior_token_drop": torch.zeros(1, 12, dtype=torch.bool),
            "timestep": torch.tensor([500]),
            "target_size": torch.tensor([[48.0, 64.0]]),
            "crop_coords": torch.zeros(1, 2),
            "return_dict": False,
        }

    def run(model: Any) -> list[torch.Tensor]:
        caches = GlmImageKVCache(num_layers=2)
        caches.set_mode("write")
        outs = [model(**inputs(seed), kv_caches=caches)[0] for seed in (1, 2)]
        caches.set_mode("read")
        return [*outs, *(model(**inputs(seed), kv_caches=caches)[0] for seed in (3, 4))]

    return model, run


def qwen_image_21() -> tuple[Any, Callable[[Any], list[torch.Tensor]]]:
    """Text and condition images, whose keys go in front of those of the image."""
    case = SPLIT["qwen 2.1 that keeps its text's keys"]
    model, inputs = case.model(), case.inputs()

    def run(model: Any) -> list[torch.Tensor]:
        from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

        given = {**inputs, "kv_cache": QwenImage21KVCache(2), "return_dict": False}
        (first,) = model(**given)
        (later,) = model(**{**given, "kv_cache_mode": "cached", "timestep": torch.full((2,), 0.3)})
        return [first, later]

    return model, run


def wan_animate_2() -> tuple[Any, Callable[[Any], list[torch.Tensor]]]:
    """A video to follow, frame by frame; a mask of blocks says which frame sees which."""
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    model = diffusers.WanAnimate2Transformer3DModel(
        text_len=6,
        in_dim=8,
        dim=HEADS * SIZE,
        ffn_dim=24,
        freq_dim=16,
        text_dim=12,
        out_dim=4,
        num_heads=HEADS,
        num_layers=2,
        use_img_emb=False,
    )
    text, condition = normal(5, 12), normal(4, 3, 4, 6)
    reference, video = normal(4, 2, 4, 6), normal(4, 3, 4, 6)

    def run(model: Any) -> list[torch.Tensor]:
        cache = WanAnimate2KVCache(2)
        grid = torch.tensor([[2, 2, 3]])
        same = {"encoder_hidden_states": [text], "kv_cache": cache, "return_dict": False}
        model(
            [reference],
            torch.tensor([700.0]),
            condition_latents=[condition[:, :2]],
            kv_cache_mode="extract",
            seq_len=12,
            offset_grid_sizes=grid,
            **same,
        )
        outs = []
        for timestep in (700.0, 300.0):
            (out,) = model(
                [video],
                torch.tensor([timestep]),
                condition_latents=[condition],
                kv_cache_mode="cached",
                seq_len=18,
                reference_grid_sizes=grid,
                origin_len=5,
                origin_area=[32, 48],
                **same,
            )
            outs.append(out[0])
        return outs

    return model, run


def sana_wm_refiner() -> tuple[Any, Callable[[Any], list[torch.Tensor]]]:
    """A sink before its rotary embedding, and the blocks before after theirs."""
    from diffusers.models.transformers.transformer_sana_wm_refiner import (
        SanaWMLTX2RefinerTransformer3DModel,
        SanaWMRefinerKVCache,
    )

    model = SanaWMLTX2RefinerTransformer3DModel(**LTX_2)
    text, noise = normal(1, 5, 12), normal(3, 1, 6, 4)

    def run(model: Any) -> list[torch.Tensor]:
        cache, outs = SanaWMRefinerKVCache(2), []

        def places(*frames: int) -> Any:
            return model.build_rotary_emb_for_absolute_positions(
                batch_size=1,
                frame_positions=list(frames),
                height=2,
                width=3,
                device=torch.device("cpu"),
                fps=24.0,
            )

        def call(block: torch.Tensor, frame: int, mode: str) -> torch.Tensor:
            (out,) = model(
                hidden_states=block,
                encoder_hidden_states=text,
                timestep=torch.full((1, 6), 700.0),
                video_rotary_emb=places(frame),
                kv_cache=cache,
                kv_cache_mode=mode,
                return_dict=False,
            )
            return out

        call(noise[0], 0, "capture_pre_rope")
        for layer in cache.layer_caches:
            layer.store_sink(*layer.get_captured_pre_rope())
        for frame in (1, 2):
            cache.sink_pe = places(0)
            outs += [call(noise[frame], frame, "inject")]
            outs += [call(noise[frame] / 2, frame, "inject_and_capture_post_rope")]
            for layer in cache.layer_caches:
                layer.store_history(*layer.get_captured_post_rope())
        return outs

    return model, run


MODELS = {
    "Flux2Transformer2DModel": flux2,
    "GlmImageTransformer2DModel": glm_image,
    "QwenImage21Transformer2DModel": qwen_image_21,
    "WanAnimate2Transformer3DModel": wan_animate_2,
    "SanaWMLTX2RefinerTransformer3DModel": sana_wm_refiner,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_keys_of_earlier_calls_give_what_the_stock_model_gives(name: str, monkeypatch) -> None:
    def uncompiled(*args: Any, _compile: bool = False, **kwargs: Any) -> Any:
        return create_block_mask(*args, **kwargs)

    monkeypatch.setattr(transformer_wan_animate_2, "create_block_mask", uncompiled)
    torch.manual_seed(0)
    model, run = MODELS[name]()
    model.eval()
    stock = run(model)
    with apply(model) as handle:
        ours = run(model)
        report = handle.report()
    for out, want in zip(ours, stock, strict=True):
        torch.testing.assert_close(out, want, rtol=0, atol=1e-5)
    assert sum(entry.calls for layer in report.layers for entry in layer.entries) > 0


KEEPS = re.compile(r"KVCache\b|kv_caches?\b|BlockMask\b|_set_ar_attention|latents_history")


def test_the_page_knows_every_stock_model_that_keeps_keys_or_has_masks_of_blocks() -> None:
    folder = Path(diffusers.__file__).parent / "models" / "transformers"
    found = set()
    for file in folder.glob("transformer_*.py"):
        source = file.read_text()
        if KEEPS.search(source):
            found |= set(re.findall(r"^class (\w+)\(\s*ModelMixin", source, flags=re.MULTILINE))
    table = GUIDE.read_text().partition("| class of diffusers")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row)}
    assert found <= named
    assert all(hasattr(diffusers, name) for name in found)
