from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.models.adapter import ModelCall
from multimodal_gen.integrations.models.registry import ADAPTERS, find_adapter
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.managers.forward_context import TextSpan


def call(config=None, **arguments):
    return ModelCall(
        config=SimpleNamespace(**(config or {})),
        arguments=arguments,
        memo=WeakTensorKeyDictionary(),
    )


def adapter(name):
    return ADAPTERS[name]


def latents(*shape):
    return torch.empty(shape, device="meta")


def text(length):
    return latents(1, length, 8)


@pytest.mark.parametrize(
    ("cls", "model_call", "grid"),
    [
        (
            "WanTransformer3DModel",
            call({"patch_size": (1, 2, 2)}, hidden_states=latents(1, 16, 21, 90, 160)),
            (21, 45, 80),
        ),
        (
            "WanVACETransformer3DModel",
            call({"patch_size": (1, 2, 2)}, hidden_states=latents(2, 16, 5, 60, 104)),
            (5, 30, 52),
        ),
        (
            "HunyuanVideoTransformer3DModel",
            call({"patch_size": 2, "patch_size_t": 1}, hidden_states=latents(1, 16, 33, 90, 160)),
            (33, 45, 80),
        ),
        (
            "HunyuanVideo15Transformer3DModel",
            call({"patch_size": 1, "patch_size_t": 1}, hidden_states=latents(1, 65, 31, 30, 53)),
            (31, 30, 53),
        ),
        (
            "LTXVideoTransformer3DModel",
            call(
                {"patch_size": 1, "patch_size_t": 1},
                hidden_states=latents(2, 13 * 16 * 24, 128),
                num_frames=13,
                height=16,
                width=24,
            ),
            (13, 16, 24),
        ),
        (
            "QwenImageTransformer2DModel",
            call(hidden_states=latents(1, 6072, 64), img_shapes=[[(1, 66, 92)]]),
            (1, 66, 92),
        ),
        (
            "QwenImageTransformer2DModel",
            call(hidden_states=latents(1, 6072, 64), img_shapes=[(1, 66, 92)]),
            (1, 66, 92),
        ),
        (
            "CogVideoXTransformer3DModel",
            call(
                {"patch_size": 2, "patch_size_t": None},
                hidden_states=latents(2, 13, 16, 60, 90),
            ),
            (13, 30, 45),
        ),
        (
            "CogVideoXTransformer3DModel",
            call({"patch_size": 2, "patch_size_t": 2}, hidden_states=latents(2, 22, 16, 96, 170)),
            (11, 48, 85),
        ),
    ],
)
def test_the_grid_is_read_off_the_call(cls, model_call, grid):
    assert adapter(cls).grid(model_call) == grid


def flux_ids(height, width, reference=0):
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    ids = torch.stack((torch.full_like(rows, reference), rows, columns), dim=-1)
    return ids.reshape(-1, 3).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flux_has_its_grid_in_the_position_ids(dtype):
    ids = flux_ids(64, 96).to(dtype)
    assert adapter("FluxTransformer2DModel").grid(call(img_ids=ids)) == (1, 64, 96)
    assert adapter("FluxTransformer2DModel").grid(call(img_ids=ids[None])) == (1, 64, 96)


def flux2_ids(height, width, *, reference=0, layer=0):
    sizes = (torch.tensor([reference]), torch.arange(height), torch.arange(width))
    return torch.cartesian_prod(*sizes, torch.tensor([layer]))


def test_flux2_has_its_grid_in_position_ids_of_four_numbers():
    ids = flux2_ids(64, 96)
    flux2 = adapter("Flux2Transformer2DModel")
    assert flux2.grid(call(img_ids=ids)) == (1, 64, 96)
    assert flux2.grid(call(img_ids=ids.expand(2, -1, -1), kv_cache_mode=None)) == (1, 64, 96)


@pytest.mark.parametrize("mode", ["extract", "cached"])
def test_flux2_is_split_only_where_it_keeps_no_keys_of_reference_images(mode):
    flux2 = adapter("Flux2Transformer2DModel")
    arguments = {"hidden_states": latents(1, 24, 8), "img_ids": flux2_ids(4, 6)}
    assert flux2.split.tokens(call(**arguments)) == 24
    keeps = call(**arguments, kv_cache_mode=mode)
    with pytest.raises(UsageError, match=rf"kv_cache_mode must be None .* got '{mode}'.* one GPU"):
        flux2.split.tokens(keeps)
    assert flux2.grid(keeps) is None


def test_reference_images_come_behind_the_grid_of_the_image():
    flux, flux2, qwen = (
        adapter(f"{name}Transformer2DModel") for name in ("Flux", "Flux2", "QwenImage")
    )
    ids = torch.cat((flux_ids(4, 6), flux_ids(8, 8, 1)))
    assert flux.grid(call(img_ids=ids)) == (1, 4, 6)
    ids = torch.cat((flux2_ids(4, 6), flux2_ids(4, 6, reference=10)))
    assert flux2.grid(call(img_ids=ids)) == (1, 4, 6)
    assert qwen.grid(call(img_shapes=[[(1, 4, 6), (1, 8, 8)]])) == (1, 4, 6)


def test_flux_ids_are_read_once_while_they_live(monkeypatch):
    ids, looks = flux_ids(4, 6), []
    model_call = call(img_ids=ids)
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (looks.append(1), tolist(t))[1])
    for _ in range(3):
        assert adapter("FluxTransformer2DModel").grid(model_call) == (1, 4, 6)
    assert looks == [1]


@pytest.mark.parametrize(
    ("cls", "model_call"),
    [
        ("FluxTransformer2DModel", call(img_ids=torch.cat((flux_ids(4, 6, 1), flux_ids(4, 6))))),
        ("FluxTransformer2DModel", call(img_ids=flux_ids(4, 6)[:-1])),
        ("FluxTransformer2DModel", call(img_ids=torch.zeros(0, 3))),
        ("FluxTransformer2DModel", call()),
        (
            "Flux2Transformer2DModel",
            call(img_ids=torch.cat((flux2_ids(4, 6, reference=10), flux2_ids(4, 6)))),
        ),
        ("Flux2Transformer2DModel", call(img_ids=flux2_ids(4, 6, layer=1))),
        ("Flux2Transformer2DModel", call()),
        ("QwenImageTransformer2DModel", call(img_shapes=None)),
        ("LTXVideoTransformer3DModel", call({"patch_size": 1, "patch_size_t": 1})),
        (
            "LTXVideoTransformer3DModel",
            call(
                {"patch_size": 1, "patch_size_t": 1},
                hidden_states=latents(1, 30, 8),
                num_frames=1,
                height=4,
                width=6,
            ),
        ),
        ("WanTransformer3DModel", call({"patch_size": (1, 2, 2)})),
        ("CogVideoXTransformer3DModel", call({"patch_size": 2, "patch_size_t": None})),
    ],
)
def test_a_call_that_does_not_tell_its_grid_gets_no_guess(cls, model_call):
    assert adapter(cls).grid(model_call) is None


def test_the_text_is_where_each_family_puts_it():
    hunyuan = {"patch_size": 2, "patch_size_t": 1}
    video = latents(1, 16, 3, 8, 12)
    spans = {
        "WanTransformer3DModel": None,
        "FluxTransformer2DModel": TextSpan(start=0, length=512),
        "Flux2Transformer2DModel": TextSpan(start=0, length=512),
        "QwenImageTransformer2DModel": TextSpan(start=0, length=512),
        "CogVideoXTransformer3DModel": TextSpan(start=0, length=512),
        "LTXVideoTransformer3DModel": None,
        "HunyuanVideoTransformer3DModel": TextSpan(start=72, length=512),
    }
    for cls, span in spans.items():
        model_call = call(hunyuan, hidden_states=video, encoder_hidden_states=text(512))
        assert adapter(cls).text_span(model_call) == span


def test_hunyuan_video_15_counts_image_glyph_and_prompt_tokens():
    model_call = call(
        {"patch_size": 2, "patch_size_t": 1},
        hidden_states=latents(1, 16, 3, 8, 12),
        encoder_hidden_states=text(1000),
        encoder_hidden_states_2=text(256),
        image_embeds=text(729),
    )
    span = adapter("HunyuanVideo15Transformer3DModel").text_span(model_call)
    assert span == TextSpan(start=72, length=1985)


@pytest.mark.parametrize("image", [0.0, 1.0])
def test_hunyuan_video_15_masks_an_image_that_is_not_there(image):
    model_call = call(
        {"patch_size": 2, "patch_size_t": 1},
        hidden_states=torch.zeros(1, 16, 1, 4, 4),
        image_embeds=torch.full((1, 3, 8), image),
        encoder_attention_mask=torch.tensor([[0, 1, 1]]),
        encoder_attention_mask_2=torch.tensor([[1, 0]]),
    )
    padding = adapter("HunyuanVideo15Transformer3DModel").padding(model_call)
    padding.resolve(padding.facts().tolist())
    assert padding.shape == (1, 4 + 3 + 2 + 3)
    assert padding.valid == 4 + 3 + (3 if image else 0)


def test_hunyuan_video_15_spreads_one_image_over_several_videos():
    model_call = call(
        {"patch_size": 2, "patch_size_t": 1},
        hidden_states=torch.zeros(2, 16, 1, 4, 4),
        image_embeds=torch.ones(1, 3, 8),
        encoder_attention_mask=torch.tensor([[0, 1, 1], [0, 1, 1]]),
        encoder_attention_mask_2=torch.tensor([[1, 0], [1, 0]]),
    )
    padding = adapter("HunyuanVideo15Transformer3DModel").padding(model_call)
    padding.resolve(padding.facts().tolist())
    assert padding.shape == (2, 4 + 3 + 2 + 3)
    assert padding.valid == 4 + 3 + 1 + 2


@pytest.mark.parametrize(
    ("cls", "name", "role"),
    [
        ("WanTransformer3DModel", "blocks.0.attn1", AttentionRole.SELF),
        ("WanTransformer3DModel", "blocks.0.attn2", AttentionRole.CROSS),
        ("WanVACETransformer3DModel", "vace_blocks.1.attn2", AttentionRole.CROSS),
        ("LTXVideoTransformer3DModel", "transformer_blocks.0.attn2", AttentionRole.CROSS),
        (
            "HunyuanVideoTransformer3DModel",
            "context_embedder.token_refiner.refiner_blocks.0.attn",
            AttentionRole.ENCODER,
        ),
        ("HunyuanVideoTransformer3DModel", "transformer_blocks.0.attn", AttentionRole.SELF),
        ("FluxTransformer2DModel", "single_transformer_blocks.3.attn", AttentionRole.SELF),
    ],
)
def test_roles_follow_the_module_names(cls, name, role):
    assert adapter(cls).role_of(name, nn.Identity()) is role


def test_a_derived_model_class_is_found_by_what_it_derives_from():
    from diffusers import WanTransformer3DModel

    class Mine(WanTransformer3DModel):
        pass

    assert find_adapter(object.__new__(Mine)) is ADAPTERS["WanTransformer3DModel"]
    assert find_adapter(nn.Identity()) is None


def test_every_adapter_names_a_class_that_diffusers_has():
    import diffusers

    for name in ADAPTERS:
        assert hasattr(diffusers, name)
