"""Keys and values of the text are computed once, and every bit of the output is the same."""

import weakref
from contextlib import ExitStack

import diffusers
import pytest
import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.generator.cache import cached, read_cache
from multimodal_gen.runtime.generator.cross_attention_cache import layers_of_text, remember
from multimodal_gen.testing.tiny_models import FAMILIES

CACHE = read_cache("cross_attention")
SIZES = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 3}


def generated(pipe, prompt, **more):
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    arguments = {"guidance_scale": 3.0, "generator": generator, "output_type": "latent", **SIZES}
    return pipe(prompt, **arguments, **more).frames


@pytest.mark.parametrize("family", ["wan", "ltx"])
def test_the_output_is_the_same_bit_for_bit_and_the_layers_are_left_as_they_were(family):
    pipe = FAMILIES[family].build(0)
    models = {"transformer": pipe.transformer}
    layers = len(list(layers_of_text(pipe.transformer)))
    for prompt in ("a fox in the snow", ["a ship", "the sea at night"]):
        expected = generated(pipe, prompt)
        with cached(pipe, models, CACHE, 3) as skipped:
            assert torch.equal(generated(pipe, prompt), expected)
        # Wan calls its model for every branch of guidance, LTX for both at once.
        branches = 2 if family == "wan" else 1
        assert (skipped.calls, skipped.computed) == (3 * branches * layers, branches * layers)
        assert skipped.note() == (
            f"the cache cross_attention skipped 67% of {skipped.calls} calls that it watched"
        )
    assert not any("forward" in vars(module) for module in pipe.transformer.modules())


# Models that put an image in front of their text, and what makes each of them small.
WITH_IMAGE = {
    "WanTransformer3DModel": {"in_channels": 8},
    "SkyReelsV2Transformer3DModel": {"in_channels": 8},
    "ChronoEditTransformer3DModel": {"in_channels": 8},
    "WanVACETransformer3DModel": {"in_channels": 8, "vace_layers": [0], "vace_in_channels": 8},
    "WanAnimateTransformer3DModel": {
        "in_channels": 20,
        "latent_channels": 8,
        "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
        "motion_encoder_size": 16,
        "motion_style_dim": 8,
        "motion_dim": 4,
        "motion_encoder_dim": 8,
        "face_encoder_hidden_dim": 8,
        "face_encoder_num_heads": 2,
        "inject_face_latents_blocks": 2,
    },
}


def with_image(name):
    """Return a denoiser that starts from an image, and its arguments but for text and image."""
    more = WITH_IMAGE[name]
    torch.manual_seed(0)
    model = getattr(diffusers, name)(
        num_attention_heads=2, attention_head_dim=16, out_channels=8, text_dim=16, freq_dim=16,
        ffn_dim=32, num_layers=2, image_dim=16, added_kv_proj_dim=32, **more,
    ).eval()  # fmt: skip
    given = {"hidden_states": torch.randn(1, more["in_channels"], 2, 8, 8), "return_dict": False}
    if "VACE" in name:
        given["control_hidden_states"] = torch.randn(1, 8, 2, 8, 8)
    if "Animate" in name:
        given["pose_hidden_states"] = torch.randn(1, 8, 1, 8, 8)
        given["face_pixel_values"] = torch.randn(1, 3, 4, 16, 16)
    return model, given


@pytest.mark.parametrize("name", WITH_IMAGE)
def test_an_image_in_front_of_the_text_is_known_again(name):
    model, given = with_image(name)
    image, *texts = torch.randn(3, 1, 512, 16).split(1)
    image, layers = image[0, :, :257], len(list(layers_of_text(model)))
    faces = len(list(layers_of_text(getattr(model, "face_adapter", torch.nn.Module()))))

    def run(step, text):
        known = {"encoder_hidden_states": text[0], "encoder_hidden_states_image": image}
        return model(**given, timestep=torch.tensor([step]), **known)[0]

    with torch.no_grad():
        calls = [(step, text) for step in range(3) for text in texts]
        expected = [run(*call) for call in calls]
        with cached(None, {"transformer": model}, CACHE, 3) as skipped:
            assert all(map(torch.equal, [run(*call) for call in calls], expected))
            # Both branches of guidance have the image; faces are encoded anew in every call.
            computed = 2 * (layers - faces) - 1 + 6 * faces
            assert (skipped.calls, skipped.computed) == (6 * layers, computed)
            image.add_(1)
            found = run(0, texts[0])
        assert torch.equal(found, run(0, texts[0]))
        assert not torch.equal(found, expected[0])
    assert not any("forward" in vars(module) for module in model.modules())
    assert not model.condition_embedder._forward_hooks


def _half_a_weight(pipe, step):
    with torch.no_grad():
        pipe.transformer.blocks[0].attn2.to_k.weight.mul_(0.5)


def _another_scale(pipe, step):
    pipe._attention_kwargs["scale"] = 0.5 - step / 10


def _weaker(pipe, step):
    pipe.transformer.set_adapters(["default"], [0.5 - step / 10])


def _off_and_on(pipe, step):
    (pipe.transformer.enable_adapters, pipe.transformer.disable_adapters)[step == 0]()


def _fused(pipe, step):
    if step == 0:
        pipe.transformer.fuse_lora()


def _second(pipe, step):
    if step == 0:
        _add_adapter(pipe, "second")


def _removed(pipe, step):
    if step == 0:
        pipe.transformer.unload_lora()


def _add_adapter(pipe, name):
    from peft import LoraConfig

    torch.manual_seed(len(name))
    config = LoraConfig(r=2, init_lora_weights=False, target_modules=["to_k", "to_v"])
    pipe.transformer.add_adapter(config, name)
    pipe.transformer.eval()


@pytest.mark.filterwarnings("ignore")  # of peft, on layers with more than one adapter
@pytest.mark.parametrize(
    "change", [_half_a_weight, _another_scale, _weaker, _off_and_on, _fused, _second, _removed]
)
def test_weights_and_adapters_that_change_between_steps_are_seen(change):
    found = []
    for cache in (None, CACHE):
        pipe = FAMILIES["wan"].build(0)
        _add_adapter(pipe, "default")

        def ended(pipe, step, *rest):
            change(pipe, step)
            return {}

        with cached(pipe, {"transformer": pipe.transformer}, cache, 3):
            more = {"attention_kwargs": {"scale": 1.0}, "callback_on_step_end": ended}
            found.append(generated(pipe, "a fox", **more))
    assert torch.equal(*found)


def test_offloading_layer_by_layer_is_refused():
    from diffusers.hooks import apply_group_offloading

    pipe, cpu = FAMILIES["wan"].build(0), torch.device("cpu")
    apply_group_offloading(pipe.transformer, cpu, cpu, offload_type="leaf_level")
    with (
        pytest.raises(UsageError, match="cross_attention must not be given with --offload leaf"),
        cached(pipe, {"transformer": pipe.transformer}, CACHE, 3),
    ):
        pass


def test_a_model_without_cross_attention_is_refused():
    pipe = FAMILIES["flux"].build(0)
    with (
        pytest.raises(UsageError, match=r"cross-attention to its text, got transformer \(Flux"),
        cached(pipe, {"transformer": pipe.transformer}, CACHE, 3),
    ):
        pass


def test_it_has_no_parameters():
    with pytest.raises(ConfigError, match="--cache cross_attention must have no keys, got 'n'"):
        read_cache("cross_attention:n=1")


@pytest.fixture
def layer():
    """A layer, and the calls of it that were computed."""
    computed = []
    with ExitStack() as undo:
        layer = torch.nn.Linear(3, 2)
        remember(layer, undo, computed.append)
        yield layer, computed


def test_a_tensor_is_known_again_through_a_view_and_not_after_it_was_written_to(layer):
    layer, computed = layer
    x = torch.randn(2, 3)
    with torch.no_grad():
        first = layer(x)
        assert layer(x.view(2, 3)) is first
        assert torch.equal(layer(x.clone()), first)
        assert computed == [True, False, True]
        x.add_(1)
        assert not torch.equal(layer(x), first)
        found = layer(x)
        found.zero_()  # by who asked for it: not to be given again
        assert torch.equal(layer(x), layer(x.clone()))
    assert computed[3:] == [True, False, True, True]


def test_another_part_of_the_same_memory_is_another_tensor(layer):
    layer, computed = layer
    x = torch.randn(4, 3)
    with torch.no_grad():
        for part in (x[:2], x[2:], x[::2], x[:1], x[:2]):
            assert torch.equal(layer(part), torch.nn.functional.linear(part, *layer.parameters()))
    assert computed == [True, True, True, True, False]


def test_only_the_last_inputs_are_held(layer):
    layer, computed = layer
    inputs = [torch.randn(2, 3) for _ in range(5)]
    with torch.no_grad():
        for x in (*inputs, inputs[0]):
            layer(x)
    assert computed == [True] * 6


def test_nothing_is_held_of_inputs_that_never_come_again(layer):
    layer, computed = layer
    held = []
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(2, 3)
            held.append(weakref.ref(x))
            layer(x)
            del x
    assert computed == [True] * 6
    assert [each() for each in held] == [None] * 6


def test_calls_with_gradients_and_of_inference_tensors_are_computed(layer):
    layer, computed = layer
    x = torch.randn(2, 3)
    layer(x).sum().backward()
    layer(x)
    with torch.inference_mode():
        y = x + 1
        layer(y)
        layer(y)
    assert computed == [True] * 4
    assert layer.weight.grad is not None
