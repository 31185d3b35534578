"""Step caches of diffusers by name: what is read, where they fit, and what is left behind."""

from types import SimpleNamespace

import pytest
import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.generator import cache as cache_module
from multimodal_gen.runtime.generator.cache import CACHES, cached, read_cache
from multimodal_gen.runtime.server_args import ServerArgs
from multimodal_gen.testing.tiny_models import FAMILIES


@pytest.fixture(scope="module")
def wan():
    return FAMILIES["wan"].build(0)


def hooks_of(model):
    modules = model.named_modules()
    hooked = (m._diffusers_hook.hooks for _, m in modules if hasattr(m, "_diffusers_hook"))
    return [name for hooks in hooked for name in hooks]


@pytest.mark.parametrize(
    ("text", "name", "parameters"),
    [
        ("first_block", "first_block", {}),
        ("First-Block: threshold=0.1", "first_block", {"threshold": 0.1}),
        ("mag:mag_ratios=[1, 1.5],calibrate=false", "mag", {"mag_ratios": [1.0, 1.5]}),
        ('faster:{"spatial_attention_timestep_skip_range": [-1, 681]}', "faster", {}),
        ("taylorseer:taylor_factors_dtype=float32,cache_identifiers=[a]", "taylorseer", {}),
        ("taylorseer:disable_cache_after_step=null", "taylorseer", {}),
    ],
)
def test_a_cache_is_named_with_the_fields_of_its_configuration(text, name, parameters):
    cache = read_cache(text)
    assert (cache.name, cache.text) == (name, text)
    assert parameters.items() <= dict(cache.parameters).items()
    assert cache.parameters.get("spatial_attention_timestep_skip_range") in (None, (-1, 681))
    assert cache.parameters.get("taylor_factors_dtype") in (None, torch.float32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("first_blok", r"--cache must be one of first_block, .*, got 'first_blok'.*first_block"),
        (
            "first_block:treshold=0.1",
            "--cache first_block must have keys among threshold, got 'tre",
        ),
        ("text_kv:threshold=1", "--cache text_kv must have no keys, got 'threshold'"),
        ("first_block:0.1", "--cache first_block must have parameters as k=v,k=v"),
        ("first_block:threshold=much", "`threshold` of --cache first_block must be a number, got"),
        ("first_block:threshold=-1", "`threshold` of --cache first_block must be 0 or more, got"),
        ("first_block:threshold=true", "`threshold` of --cache first_block must be a number, got"),
        (
            "mag:mag_ratios=1",
            "`mag_ratios` of --cache mag must be a list of numbers or null, got 1",
        ),
        ("pyramid:spatial_attention_timestep_skip_range=[1]", "must be a list of 2 integers, got"),
        ("pyramid:current_timestep_callback=1", "must have keys among spatial_attention_block_ski"),
    ],
)
def test_what_names_no_cache_is_refused_with_what_there_is(text, message):
    with pytest.raises(ConfigError, match=message):
        read_cache(text)


def test_every_cache_that_diffusers_enables_has_a_name():
    from diffusers import hooks

    classes = {name for name in dir(hooks) if name.endswith("CacheConfig")}
    assert set(CACHES.values()) == classes | {"PyramidAttentionBroadcastConfig"}
    for name in CACHES:
        assert read_cache(name).parameters == {}


def test_a_cache_is_there_in_its_block_alone(wan):
    cache = read_cache("mag:mag_ratios=[1, 1],max_skip_steps=1")
    before = hooks_of(wan.transformer)
    with cached(wan, {"transformer": wan.transformer}, cache, 7):
        assert wan.transformer._cache_config.num_inference_steps == 7
        assert len(hooks_of(wan.transformer)) == len(before) + 2
        with (
            pytest.raises(UsageError, match=r"got transformer .*: Caching has already"),
            cached(wan, {"transformer": wan.transformer}, cache, 7),
        ):
            pass
    assert not wan.transformer.is_cache_enabled
    assert hooks_of(wan.transformer) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "text_kv",
            r"a place for it, got transformer \(WanTransformer3DModel\): none of its modul",
        ),
        ("taylorseer", "none of its modules is one that this cache looks for"),
        ("mag", "cache mag is refused by diffusers: `mag_ratios` must be provided"),
    ],
)
def test_a_cache_that_has_no_place_in_a_model_is_refused_and_leaves_nothing(wan, text, message):
    before = hooks_of(wan.transformer)
    with (
        pytest.raises(UsageError, match=message),
        cached(wan, {"transformer": wan.transformer}, read_cache(text), 4),
    ):
        pass
    assert not wan.transformer.is_cache_enabled
    assert hooks_of(wan.transformer) == before


def test_blocks_that_diffusers_does_not_know_are_refused_and_left_clean(wan):
    from diffusers.models.cache_utils import CacheMixin

    class Odd(CacheMixin, torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])

    for model, message in (
        (Odd(), r"got odd \(Odd\): Model class .*Linear.* not registered"),
        (torch.nn.Linear(1, 1), r"got odd \(Linear\), which has none for any cache of diffusers"),
    ):
        with (
            pytest.raises(UsageError, match=message),
            cached(wan, {"odd": model}, read_cache("first_block"), 4),
        ):
            pass
        assert hooks_of(model) == []
    with (
        pytest.raises(UsageError, match="must be used with a pipeline that tells its timestep"),
        cached(SimpleNamespace(), {"wan": wan.transformer}, read_cache("pyramid"), 4),
    ):
        pass


def test_a_pipeline_that_names_no_calls_gets_one_clear_error(wan):
    model = wan.transformer
    with (
        pytest.raises(UsageError, match="a pipeline that names its calls of the denoiser, got Wan"),
        cached(wan, {"transformer": model}, read_cache("first_block"), 4),
        torch.no_grad(),
    ):
        model(torch.zeros(1, 16, 1, 4, 4), torch.ones(1), torch.zeros(1, 4, 64))


def test_a_pipeline_that_makes_guidance_branches_apart_gets_one_clear_error(wan):
    model = wan.transformer
    wan._current_timestep = 1
    with (
        pytest.raises(UsageError, match="both branches of guidance in one batch, got WanPipeline"),
        cached(wan, {"transformer": model}, read_cache("faster"), 4),
        torch.no_grad(),
    ):
        model(torch.zeros(1, 16, 1, 4, 4), torch.ones(1), torch.zeros(1, 4, 64))


def test_guidance_branches_on_other_gpus_cannot_be_dropped(wan, monkeypatch):
    groups = SimpleNamespace(mesh=SimpleNamespace(cfg=2))
    monkeypatch.setattr(cache_module, "parallel_groups", lambda: groups)
    with (
        pytest.raises(UsageError, match="cache faster must not be used under --cfg-parallel"),
        cached(wan, {"transformer": wan.transformer}, read_cache("faster"), 4),
    ):
        pass


def test_compiled_blocks_have_no_place_for_a_cache():
    with pytest.raises(ConfigError, match="--cache must not be given with --enable-torch-compile"):
        ServerArgs(model_path="m", prompt="", cache="first_block", enable_torch_compile=True)
