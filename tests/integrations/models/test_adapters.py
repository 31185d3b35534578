import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.integrations.models.adapter import ModelCall, image_grid, role_by_name
from multimodal_gen.integrations.models.positions import raster_grid
from multimodal_gen.integrations.models.registry import ADAPTERS, find_adapter
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.managers.forward_context import TextSpan
from tests.helpers.denoisers import DENOISERS

ENCODER = AttentionRole.ENCODER


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


FILM, PICTURE = (3, 3, 5), (1, 5, 9)
# Grid of the latents, first row and number of rows of what is no part of it, and who is told so.
TOLD = {
    (FILM, None): (
        *("wan", "wan vace", "wan animate", "skyreels v2", "anyflow", "ltx", "ltx 2", "cosmos"),
        *("kandinsky 5", "kandinsky 6", "helios without a history", "allegro"),
    ),
    (FILM, (45, 7)): ("hunyuan", "mochi"),
    (FILM, (45, 14)): ("hunyuan 1.5 with padding",),  # prompt, glyphs and image
    (FILM, (45, 12)): ("motif video",),  # and image
    (FILM, (0, 7)): ("cogvideox", "consisid"),
    (FILM, (0, 11)): ("minimax h3", "easyanimate"),  # and sound; of two encoders
    (FILM, (0, 41)): ("minimax h3 with keyframes",),
    (FILM, (0, 25)): ("helios",),  # 15 + 6 + 4 of its history
    (FILM, (0, 40)): ("framepack",),  # 30 + 6 + 4
    (FILM, (0, 5)): ("cosmos 3",),
    (PICTURE, (0, 7)): (
        *("flux", "flux with reference tokens", "flux2", "flux2 with reference tokens"),
        *("flux 3", "krea 2", "qwen", "qwen with two images"),
    ),
    (PICTURE, (45, 7)): ("sd3", "hunyuan image without glyphs"),
    (PICTURE, (45, 11)): ("hunyuan image",),
    ((1, 6, 6), (0, 9)): ("qwen 2.1",),
    ((1, 6, 6), (0, 15)): ("qwen 2.1 with a picture",),  # of 8 tokens in the place of 2
    ((1, 9, 5), (45, 51)): ("z image",),  # both padded to 32
}


@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")
@pytest.mark.parametrize(
    ("name", "grid", "text"), [(name, *told) for told, names in TOLD.items() for name in names]
)
def test_layers_are_told_the_grid_and_where_the_text_is(name, grid, text, calls):
    model, inputs = DENOISERS[name].make()
    with torch.no_grad(), apply(model):
        model(**inputs)
    (context,) = {
        (call.context.latent_grid, call.context.text_span)
        for call in calls
        if call.site.role is AttentionRole.SELF
    }
    span = None if text is None else TextSpan(start=text[0], length=text[1])
    assert context == (grid, span)


@pytest.mark.parametrize(
    ("cls", "model_call", "grid"),
    [
        (
            "QwenImageTransformer2DModel",
            call(hidden_states=latents(1, 6072, 64), img_shapes=[(1, 66, 92)]),
            (1, 66, 92),
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
    assert flux2.split.refuse(call(**arguments)) is None
    keeps = call(**arguments, kv_cache_mode=mode)
    assert re.match(rf"kv_cache_mode must be None .* got '{mode}'", flux2.split.refuse(keeps))
    assert flux2.grid(keeps) is None


def test_flux_ids_are_read_once_while_they_live(monkeypatch):
    ids, looks = flux_ids(4, 6), []
    model_call = call(img_ids=ids)
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (looks.append(1), tolist(t))[1])
    for _ in range(3):
        assert adapter("FluxTransformer2DModel").grid(model_call) == (1, 4, 6)
    assert looks == [1]


def lattice(*axes):
    return torch.cartesian_prod(*(torch.tensor(axis, dtype=torch.float32) for axis in axes))


def test_positions_of_any_distances_tell_a_grid():
    assert raster_grid(lattice([5.0, 6.7, 13.3], [-1, 0, 2], [-2, -1, 0, 4])) == (3, 3, 4)
    assert raster_grid(lattice([0], [0], [0.5, 1])) == (1, 1, 2)
    assert raster_grid(lattice([0, 1], [3], [0])) == (2, 1, 1)


@pytest.mark.parametrize(
    "positions",
    [
        torch.zeros(0, 3),
        torch.zeros(4, 3),  # all in one place
        lattice([0, 1], [0, 1], [0, 1])[:-1],
        lattice([0, 1], [0, 1], [0, 1]).flip(0),
        lattice([0, 0], [0, 1], [0, 1]),  # a keyframe at the time of the first frame
        torch.cat((lattice([0], [0, 1], [0, 1]), lattice([1], [0, 1], [0, 2]))),
    ],
    ids=["none", "one place", "one is missing", "backwards", "twice", "frames unlike"],
)
def test_tokens_that_lie_on_no_grid_in_order_get_none(positions):
    assert raster_grid(positions) is None


def packed(*, text=5, pictures=0, sound=6):
    """Return a call of MiniMax-H3 over 3 x 2 x 4 tokens of video behind all others."""
    video = lattice([5, 6, 8], [0, 1], [0, 1, 2, 3])
    front = [torch.zeros(n, 3) for n in (text, sound)]
    keyframes = video[:8].repeat(pictures, 1)
    rows = (front[0], keyframes, front[1], video)
    starts = [sum(map(len, rows[:n])) for n in range(5)]
    return call(
        position_ids=torch.cat(rows),
        text_indices=torch.arange(text),
        audio_indices=torch.arange(starts[2], starts[3]),
        timestep=torch.tensor([0.2, 0.4, 0.9]),
        timestep_indices=torch.tensor([2] * starts[3] + [1] * 24),
    )


def test_minimax_h3_gets_no_guess_where_keyframes_and_video_are_not_told_apart():
    h3 = adapter("MiniMaxH3Transformer3DModel")
    assert h3.grid(packed(pictures=1, sound=0)) is None
    assert h3.grid(packed(sound=0)) == (3, 2, 4)
    assert h3.timestep(packed()).tolist() == pytest.approx([0.4])
    assert h3.text_span(packed(pictures=1, sound=0)) is None


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
        ("MiniMaxH3Transformer3DModel", "token_refiner.refiner_blocks.0.attn", ENCODER),
        ("MiniMaxH3Transformer3DModel", "transformer_blocks.0.attn", AttentionRole.SELF),
        ("Krea2Transformer2DModel", "text_fusion.refiner_blocks.0.attn", ENCODER),
        ("Flux3Transformer2DModel", "mode_blocks.image.0.attn", AttentionRole.SELF),
        ("Flux3Transformer2DModel", "mode_blocks.image_cond.0.attn", ENCODER),
        ("Flux3Transformer2DModel", "txt_mode_blocks.0.attn", ENCODER),
        ("Flux3Transformer2DModel", "single_transformer_blocks.0.attn", AttentionRole.SELF),
        ("WanAnimateTransformer3DModel", "face_adapter.0", AttentionRole.CROSS),
        ("WanAnimateTransformer3DModel", "blocks.0.attn1", AttentionRole.SELF),
        ("Kandinsky6Transformer3DModel", "audio_text_transformer_blocks.0.attn", ENCODER),
        *(
            ("Kandinsky6Transformer3DModel", f"visual_transformer_blocks.0.{name}", role)
            for name, role in (
                ("video_dec_block.self_attention", AttentionRole.SELF),
                ("audio_dec_block.self_attention", ENCODER),
                ("video_dec_block.cross_attention", AttentionRole.CROSS),
                ("va_cross_attention", AttentionRole.CROSS),
            )
        ),
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


@pytest.mark.parametrize(
    ("name", "role"),
    [("layers.0.self_attn", AttentionRole.SELF), ("layers.0.attn", AttentionRole.CROSS)],
)
def test_the_name_of_self_attention_counts_for_more_than_the_flag_of_diffusers(name, role):
    module = nn.Identity()
    module.is_cross_attention = True  # as of any attention that was given the width of its keys
    assert role_by_name(name, module) is role


def test_position_ids_that_were_written_to_are_read_again():
    ids = torch.zeros(45, 3)
    model_call = call(img_ids=ids)
    for rows, columns in ((5, 9), (9, 5)):
        ids[:, 1:] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        assert adapter("FluxTransformer2DModel").grid(model_call) == (1, rows, columns)


def test_an_adapter_of_its_own_says_the_patches_of_an_image():
    call = ModelCall(
        config=SimpleNamespace(patch_size=4),
        arguments={"hidden_states": torch.zeros(1, 16, 8, 12)},
        memo=WeakTensorKeyDictionary(),
    )
    assert image_grid(call) == (1, 2, 3)
    assert image_grid(call, (2, 2)) == (1, 4, 6)
