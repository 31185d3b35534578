import copy
import math
import pickle
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.integrations.forward_hooks import DenoiserHooks, notice_end
from multimodal_gen.integrations.hooks import StandIn
from multimodal_gen.runtime.layers.attention.layer import USPAttention
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.managers.forward_context import TextSpan, current_forward_context
from multimodal_gen.testing.tiny_models import FAMILIES
from tests.integrations.conftest import generate

# Family: guidance branches, and the text span that each branch sees.
JOINT = {
    "wan": (["cond", "uncond"], None),
    "wan22": (["cond", "uncond"], None),
    "hunyuan_video": (["cond"], TextSpan(start=72, length=256)),
    "hunyuan_video_15": (["cond", "uncond"], TextSpan(start=72, length=1985)),
    "ltx": (["both"], None),
    "flux": (["cond"], TextSpan(start=0, length=512)),
    "flux2_klein": (["cond", "uncond"], TextSpan(start=0, length=512)),
    "qwen_image": (["cond", "uncond"], ...),
    "cogvideox": (["both"], TextSpan(start=0, length=226)),
}
ROLES = {
    "wan": {"self": 2, "cross": 2},
    "wan22": {"self": 4, "cross": 4},
    "hunyuan_video": {"self": 4, "encoder": 2},
    "hunyuan_video_15": {"self": 2, "encoder": 2},
    "ltx": {"self": 2, "cross": 2},
    "flux": {"self": 4},
    "flux2_klein": {"self": 4},
    "qwen_image": {"self": 2},
    "cogvideox": {"self": 2},
}


def denoiser_calls(calls):
    return [call for call in calls if call.context is not None]


def joins(site):
    """Whether a module attends over the latent tokens, and over the text in joint attention."""
    return site.role is AttentionRole.SELF


def sequence(context):
    """The number of tokens that grid and text add up to."""
    text = context.text_span
    return math.prod(context.latent_grid) + (0 if text is None else text.length)


def steps_of(calls):
    return [call.context.current_timestep for call in denoiser_calls(calls)]


@pytest.mark.slow_cases("cogvideox", "flux2_klein", "flux", "hunyuan_video", "wan22", "wan")
@pytest.mark.parametrize("family", list(FAMILIES))
def test_layers_are_told_the_grid_the_text_and_their_place(family, fresh, calls):
    tiny = FAMILIES[family]
    pipe = fresh(family)
    with apply(pipe, attention_backend="torch_sdpa"):
        generate(pipe, family)
    seen = denoiser_calls(calls)
    branches, span = JOINT[family]
    assert {call.context.latent_grid for call in seen} == {tiny.latent_grid}
    assert {call.context.num_steps for call in seen} == {tiny.num_inference_steps}
    assert {call.context.cfg_branch for call in seen} == set(branches)
    assert steps_of(calls) == sorted(steps_of(calls))
    assert set(steps_of(calls)) == set(range(tiny.num_inference_steps))
    assert len({call.context.request_id for call in seen}) == 1
    if span is not ...:
        assert {call.context.text_span for call in seen} == {span}
    sites = {call.site for call in seen}
    counts = {role: sum(str(s.role) == role for s in sites) for role in ROLES[family]}
    assert counts == ROLES[family]
    for site in sites:
        assert site.layer in range(counts[str(site.role)])
    assert all(call.context.component == call.site.component for call in seen)
    assert all(call.query[1] == sequence(call.context) for call in seen if joins(call.site))


def test_timesteps_are_the_schedulers(fresh, calls):
    pipe = fresh("flux")
    with apply(pipe):
        generate(pipe, "flux")
    seen = {call.context.timestep for call in denoiser_calls(calls)}
    assert sorted(seen, reverse=True) == pytest.approx(pipe.scheduler.timesteps.tolist(), rel=1e-4)


def test_two_experts_share_the_steps(fresh, calls):
    pipe = fresh("wan22")
    with apply(pipe):
        generate(pipe, "wan22")
    seen = {
        (call.context.component, call.context.current_timestep) for call in denoiser_calls(calls)
    }
    assert seen == {
        ("transformer", 0),
        ("transformer", 1),
        ("transformer_2", 2),
        ("transformer_2", 3),
    }


def test_every_generation_is_a_request_of_its_own(fresh, calls):
    pipe = fresh("wan")
    with apply(pipe):
        generate(pipe, "wan")
        first = {call.context.request_id for call in denoiser_calls(calls)}
        calls.clear()
        generate(pipe, "wan")
    second = {call.context.request_id for call in denoiser_calls(calls)}
    assert len(first) == len(second) == 1
    assert first != second
    assert set(steps_of(calls)) == {0, 1, 2}


def test_without_guidance_a_batching_family_runs_the_conditional_branch(fresh, calls):
    pipe = fresh("ltx")
    with apply(pipe):
        generate(pipe, "ltx", guidance_scale=1.0)
    assert {call.context.cfg_branch for call in denoiser_calls(calls)} == {"cond"}


def test_steps_are_right_where_a_cache_skips_blocks(fresh, calls):
    from diffusers.hooks import FirstBlockCacheConfig

    pipe = fresh("wan")
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e6))
    with apply(pipe):
        generate(pipe, "wan")
    last = [call for call in denoiser_calls(calls) if call.site.name == "blocks.1.attn1"]
    first = [call for call in denoiser_calls(calls) if call.site.name == "blocks.0.attn1"]
    assert [call.context.current_timestep for call in last] == [0, 0]
    assert [call.context.current_timestep for call in first] == [0, 0, 1, 1, 2, 2]


def test_a_cache_enabled_after_apply_does_no_harm(fresh, calls):
    from diffusers.hooks import FirstBlockCacheConfig

    stock, pipe = fresh("wan"), fresh("wan")
    stock.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e6))
    with apply(pipe):
        pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e6))
        latents = generate(pipe, "wan")
    assert (latents - generate(stock, "wan")).abs().max() <= 1e-5
    assert steps_of(calls)[-1] == 2


def test_diffusers_finds_the_taken_over_processors_where_it_looks_stock_ones_up(fresh):
    from diffusers.hooks._helpers import AttentionProcessorRegistry

    model = fresh("flux").transformer
    module = model.transformer_blocks[0].attn
    stock = AttentionProcessorRegistry.get(type(module.processor))
    with apply(model):
        assert AttentionProcessorRegistry.get(type(module.processor)) is stock
        assert type(module.processor).__name__ == "FluxAttnProcessor"


def test_a_heun_schedule_counts_each_of_its_half_steps(fresh, calls):
    from diffusers import FlowMatchHeunDiscreteScheduler

    pipe = fresh("wan")
    pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    with apply(pipe):
        generate(pipe, "wan")
    assert sorted(set(steps_of(calls))) == list(range(len(pipe.scheduler.timesteps)))
    assert len(pipe.scheduler.timesteps) == 5


def wan_inputs(**overrides):
    return {
        "hidden_states": torch.randn(1, 16, 3, 8, 12),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 7, 64),
        **overrides,
    }


def test_tokens_of_a_given_frame_do_not_hide_the_step(fresh, calls):
    model = fresh("wan").transformer
    per_token = torch.full((1, 72), 500.0)
    per_token[:, :24] = 0.0
    with torch.no_grad(), apply(model):
        model(**wan_inputs(timestep=per_token))
        model(**wan_inputs(timestep=per_token / 2))
    assert [(c.context.current_timestep, c.context.timestep) for c in calls][::4] == [
        (0, 500.0),
        (1, 250.0),
    ]
    assert {(c.context.num_steps, c.context.cfg_branch) for c in calls} == {(None, None)}


def test_the_context_ends_with_the_call(fresh, calls):
    model = fresh("wan").transformer
    with torch.no_grad(), apply(model):
        model(**wan_inputs())
        assert current_forward_context() is None
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
            model(**wan_inputs(encoder_hidden_states=torch.randn(1, 7, 3)))
        assert current_forward_context() is None
        model(**wan_inputs())
    assert len(calls) == 8


def test_an_outer_context_is_there_again_afterwards(fresh):
    from multimodal_gen.runtime.managers.forward_context import set_forward_context

    model = fresh("wan").transformer
    with torch.no_grad(), apply(model), set_forward_context(17) as outer:
        model(**wan_inputs())
        assert current_forward_context() is outer


def interrupted(model, at="blocks.1"):
    """Run a call that the user interrupts, after which torch calls no hook."""

    def interrupt(*args):
        raise KeyboardInterrupt("by the user")

    hook = model.get_submodule(at).register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt, match="by the user"):
        model(**wan_inputs())
    hook.remove()


def test_what_an_interrupted_call_leaves_ends_with_the_next_call(fresh, calls):
    model = fresh("wan").transformer
    with torch.no_grad(), apply(model):
        interrupted(model)
        calls.clear()
        model(**wan_inputs())
        assert current_forward_context() is None
    assert len({id(call.context) for call in calls}) == 1


def test_what_an_interrupted_call_leaves_ends_with_the_hooks(fresh):
    model = fresh("wan").transformer
    handle = apply(model)
    with torch.no_grad():
        interrupted(model)
        interrupted(model)
        handle.remove()
        assert current_forward_context() is None


def test_interrupted_calls_of_several_models_leave_nothing(fresh):
    pipe = fresh("wan22")
    handle = apply(pipe)
    with torch.no_grad():
        for model in (pipe.transformer, pipe.transformer_2, pipe.transformer):
            interrupted(model)
    handle.remove()
    assert current_forward_context() is None


def test_a_call_of_another_model_inside_a_call_gives_the_context_back(fresh, calls):
    pipe = fresh("wan22")

    def call_the_other(*args):
        pipe.transformer_2(**wan_inputs())

    with torch.no_grad(), apply(pipe):
        hook = pipe.transformer.blocks[1].register_forward_pre_hook(call_the_other)
        pipe.transformer(**wan_inputs())
        hook.remove()
        assert current_forward_context() is None
    components = [call.context.component for call in calls]
    assert components == ["transformer"] * 2 + ["transformer_2"] * 4 + ["transformer"] * 2
    assert all(call.context.component == call.site.component for call in calls)


def test_the_name_of_a_call_ends_with_it(fresh, calls):
    model = fresh("wan").transformer
    with torch.no_grad(), apply(model):
        with model.cache_context("uncond"):
            model(**wan_inputs())
        model(**wan_inputs())
    assert [call.context.cfg_branch for call in calls] == ["uncond"] * 4 + [None] * 4


def looks_inside(monkeypatch, owner, method):
    """Record what brings values of tensors to the host while a method runs."""
    inside, looks = [], []
    for name in ("tolist", "item", "__bool__", "__int__", "__float__"):
        stock = getattr(torch.Tensor, name)

        def look(tensor, stock=stock, name=name):
            if inside:
                looks.append(name)
            return stock(tensor)

        monkeypatch.setattr(torch.Tensor, name, look)
    wrapped = getattr(owner, method)

    def run(*args, **kwargs):
        inside.append(method)
        try:
            return wrapped(*args, **kwargs)
        finally:
            inside.pop()

    monkeypatch.setattr(owner, method, run)
    return looks


@pytest.mark.slow_cases("hunyuan_video_15")
@pytest.mark.parametrize("family", ["hunyuan_video", "hunyuan_video_15", "ltx", "qwen_image"])
def test_a_denoiser_call_looks_at_the_device_once_and_its_layers_never(family, fresh, monkeypatch):
    hook_looks = looks_inside(monkeypatch, DenoiserHooks, "_before")
    layer_looks = looks_inside(monkeypatch, USPAttention, "attend")
    pipe = fresh(family)
    with apply(pipe) as handle:
        generate(pipe, family, num_inference_steps=2)
    calls = {r.calls for r in handle.report().layers if r.component == "transformer"}
    # One more for the schedule, which is read when it is new.
    assert hook_looks == ["tolist"] * (calls.pop() + 1)
    assert layer_looks == []


@pytest.mark.parametrize("padded", [0, 2])
def test_the_mask_of_a_users_own_processor_is_kept(padded, fresh):
    from tests.integrations.processors import Regional

    model = fresh("qwen_image").transformer
    model.set_attn_processor(Regional())
    torch.manual_seed(0)
    mask = torch.ones(1, 8, dtype=torch.long)
    mask[:, 8 - padded :] = 0
    inputs = {
        "hidden_states": torch.randn(1, 24, model.config.in_channels),
        "encoder_hidden_states": torch.randn(1, 8, model.config.joint_attention_dim),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 4, 6)]],
    }
    with torch.no_grad():
        expected = model(**inputs)[0]
        with apply(model, attention_backend="torch_sdpa") as handle:
            out = model(**inputs)[0]
    assert {layer.calls for layer in handle.report().layers} == {1}
    assert (out - expected).abs().max() <= 1e-5


def z_image(renamed=False):
    from diffusers import ZImageTransformer2DModel

    class Renamed(ZImageTransformer2DModel):
        def forward(self, x, moment, cap_feats):
            return super().forward(x, moment, cap_feats)

    sizes = {"dim": 64, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}
    axes = {"axes_dims": [8, 12, 12], "axes_lens": [256, 64, 64]}
    torch.manual_seed(0)
    cls = Renamed if renamed else ZImageTransformer2DModel
    return cls(**sizes, **axes, cap_feat_dim=16, in_channels=4).eval()


@pytest.mark.slow_cases("named t")
@pytest.mark.parametrize("renamed", [False, True], ids=["named t", "named otherwise"])
def test_the_step_moves_whatever_the_timestep_is_called(renamed, calls):
    from diffusers import FlowMatchEulerDiscreteScheduler

    model, scheduler = z_image(renamed), FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(3)
    pipe = SimpleNamespace(scheduler=scheduler, components={"transformer": model})
    rules = [{"steps": "0-1", "backend": "flex_attn"}]
    with apply(pipe, attention_config={"backend": "torch_sdpa", "rules": rules}):
        for timestep in scheduler.timesteps:
            moment = ((1000 - timestep) / 1000).expand(1)
            with torch.no_grad():
                model([torch.randn(4, 1, 8, 8)], moment, [torch.randn(6, 16)])
            scheduler.step(torch.zeros(1), timestep, torch.zeros(1))
    assert list(dict.fromkeys(steps_of(calls))) == [0, 1, 2]


def test_rules_by_step_are_refused_where_nothing_tells_the_step():
    model = z_image(renamed=True)
    with pytest.raises(UsageError, match=r"rules\[0\] must have no steps, got 0-1 for transformer"):
        apply(model, attention_config={"rules": [{"steps": "0-1", "backend": "flex_attn"}]})
    with apply(model) as handle:
        assert any("does not tell its denoising step" in note for note in handle.report().notes)


class Pipeline:
    """A pipeline that ends its calls as those of diffusers do."""

    def __init__(self):
        self.freed = 0

    def __call__(self):
        self.maybe_free_model_hooks()

    def maybe_free_model_hooks(self):
        self.freed += 1


class OtherPipeline:
    """A pipeline of another library."""


def test_the_end_of_a_call_is_noticed_until_that_is_taken_back():
    pipe, ended = Pipeline(), []
    with ExitStack() as undo:
        notice_end(pipe, lambda: ended.append(pipe.freed), undo)
        pipe()
        pipe()
    assert vars(pipe) == {"freed": 2}
    pipe()
    assert (ended, pipe.freed) == ([0, 1], 3)


def ended_in_vain():
    raise AssertionError("a copy said that its call ended")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_a_pipeline_does_what_its_class_does_and_can_be_waited_for(copied):
    with ExitStack() as undo:
        pipe = Pipeline()
        notice_end(pipe, ended_in_vain, undo)
        twin = copied(pipe)
    twin()
    assert (twin.freed, pipe.freed) == (1, 0)
    ended = []
    with ExitStack() as undo:
        notice_end(twin, lambda: ended.append(True), undo)
        twin()
    assert ended == [True]


def test_what_somebody_else_put_there_stays():
    pipe = Pipeline()
    pipe.maybe_free_model_hooks = own = list
    with ExitStack() as undo:
        notice_end(pipe, ended_in_vain, undo)
        assert pipe.maybe_free_model_hooks is own
    assert pipe.maybe_free_model_hooks is own


@pytest.mark.parametrize("pipe", [None, OtherPipeline()])
def test_pipelines_that_do_not_tell_are_left_alone(pipe):
    with ExitStack() as undo:
        notice_end(pipe, ended_in_vain, undo)
        assert not any(isinstance(x, StandIn) for x in getattr(pipe, "__dict__", {}).values())
