import copy
import pickle
import pickletools
import threading
from collections import Counter

import pytest
import torch
from torch import nn

import multimodal_gen
from multimodal_gen.errors import (
    ComponentAttentionBackendNotAppliedError,
    ConfigError,
    NothingAppliedError,
    UnsupportedBackendError,
    UsageError,
)
from multimodal_gen.integrations.diffusers import applied, apply
from multimodal_gen.integrations.hooks import StandIn
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import BackendPreference, SelectionScope, Source
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from multimodal_gen.testing.tiny_models import FAMILIES
from tests.helpers.denoisers import DENOISERS
from tests.integrations.conftest import generate


def denoisers(pipe):
    names = ("transformer", "transformer_2")
    return {name: m for name in names if (m := pipe.components.get(name)) is not None}


def attention_modules(model):
    """The attention modules of a model of either library, by what they have in common."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__.endswith(("Attention", "SdpaAttention"))
        and any(hasattr(module, part) for part in ("to_q", "to_qkv_mlp_proj", "q_proj", "q", "qkv"))
    }


def state_of(pipe):
    """Everything `apply` may touch, by identity."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    found = {"global": _AttentionBackendRegistry.get_active_backend()}
    for name, model in pipe.components.items():
        if isinstance(model, nn.Module):
            for path, module in model.named_modules():
                hooks = (module._forward_pre_hooks, module._forward_hooks)
                found[name, path] = (
                    id(getattr(module, "processor", None)),
                    sorted(vars(module)),
                    [dict(hook) for hook in hooks],
                    getattr(getattr(module, "config", None), "_attn_implementation", None),
                )
    return found


@pytest.mark.slow_cases("flux2_klein", "flux", "hunyuan_video", "hunyuan_video_15", "wan22", "wan")
@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_attention_module_runs_on_a_layer_with_the_same_latents(family, fresh, stock_latents):
    pipe = fresh(family)
    models = {**denoisers(pipe), **{n: m for n, m in pipe.components.items() if "text_enc" in n}}
    expected = {
        (component, name)
        for component, model in models.items()
        if isinstance(model, nn.Module)
        for name in attention_modules(model)
    }
    handle = apply(pipe, attention_backend="torch_sdpa")
    latents = generate(pipe, family)
    assert (latents - stock_latents(family)).abs().max() <= 1e-5
    layers = handle.report().layers
    assert {(layer.component, layer.name) for layer in layers} == expected
    idle = {layer.name for layer in layers if not layer.calls}
    # The vision tower of Qwen2.5-VL has no image to look at here.
    assert all(".visual." in name for name in idle)
    assert {e.selection.label for layer in layers for e in layer.entries} == {"torch_sdpa"}


def test_a_lost_handle_is_found_until_it_is_removed(fresh):
    pipe = fresh("wan")
    assert multimodal_gen.applied(pipe) is None
    handle = apply(pipe, attention_backend="torch_sdpa")
    assert applied(pipe) is handle
    assert applied(pipe.transformer) is handle
    assert applied(copy.deepcopy(pipe.transformer)) is None
    with handle:
        assert applied(pipe) is handle
    assert applied(pipe) is None
    with pytest.raises(UsageError, match="must be a diffusers pipeline or model, got str"):
        applied("wan")


@pytest.mark.slow_cases("flux", "wan22")
@pytest.mark.parametrize("family", ["wan22", "flux", "cogvideox"])
def test_remove_puts_the_same_objects_back(family, fresh, stock_latents):
    pipe = fresh(family)
    generate(pipe, family)  # both libraries add attributes and hooks of their own on first use
    before = state_of(pipe)
    handle = apply(pipe, attention_backend="torch_sdpa")
    assert state_of(pipe) != before
    generate(pipe, family)
    handle.remove()
    handle.remove()
    assert state_of(pipe) == before
    assert torch.equal(generate(pipe, family), stock_latents(family))


def test_the_backend_a_module_had_in_diffusers_is_kept(fresh):
    from diffusers.models.attention_dispatch import AttentionBackendName

    pipe = fresh("wan")
    module = pipe.transformer.blocks[0].attn1
    module.set_attention_backend("_native_math")
    apply(pipe).remove()
    assert module.processor._attention_backend is AttentionBackendName._NATIVE_MATH


def test_two_pipelines_of_one_process_keep_their_own_settings(fresh, stock_latents):
    first, second, untouched = (fresh("wan") for _ in range(3))
    with (
        apply(first, attention_backend="torch_sdpa") as sdpa,
        apply(second, attention_backend="flex_attn", attention_config=None) as flex,
    ):
        results = [generate(pipe, "wan") for pipe in (first, second, untouched)]
        reports = [handle.report().layers for handle in (sdpa, flex)]
    for latents in results:
        assert (latents - stock_latents("wan")).abs().max() <= 1e-4
    backends = [{e.selection.backend for r in report for e in r.entries} for report in reports]
    assert backends[0] == {AttentionBackendEnum.TORCH_SDPA}
    assert backends[1] == {AttentionBackendEnum.FLEX_ATTN}


def test_two_threads_do_not_see_each_others_calls(fresh, stock_latents, calls):
    families = ["wan", "flux"]
    pipes = {family: fresh(family) for family in families}
    handles = {family: apply(pipe) for family, pipe in pipes.items()}
    latents = {}

    def run(family):
        latents[family] = generate(pipes[family], family)

    threads = [threading.Thread(target=run, args=(family,)) for family in families]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for family in families:
        assert (latents[family] - stock_latents(family)).abs().max() <= 1e-5
        ran = [layer for layer in handles[family].report().layers if layer.calls]
        assert len(ran) == len(handles[family].report().layers)
    grids = {
        (call.context.latent_grid, call.key[1] > 500)
        for call in calls
        if call.context is not None and call.site.role is AttentionRole.SELF
    }
    assert grids == {((3, 4, 6), False), ((1, 4, 6), True)}


def test_overrides_by_component_and_role_reach_their_layers(fresh):
    pipe = fresh("wan")
    handle = apply(
        pipe,
        attention_backend="torch_sdpa",
        component_attention_backends={"transformer.cross": "flex_attn", "text_encoder": None},
    )
    chosen = {
        (layer.component, str(layer.role)): (entry.selection.backend, entry.selection.source)
        for layer in handle.report().layers
        for entry in layer.entries
    }
    assert chosen[("transformer", "self")] == (
        AttentionBackendEnum.TORCH_SDPA,
        Source.SETTINGS,
    )
    assert chosen[("transformer", "cross")] == (AttentionBackendEnum.FLEX_ATTN, Source.COMPONENT)
    assert chosen[("text_encoder", "encoder")][1] is Source.COMPONENT


def test_rules_by_layer_and_step_hold(fresh, stock_latents):
    pipe = fresh("wan")
    rules = [{"role": "self", "layers": "1", "steps": "0-1", "backend": "flex_attn"}]
    config = {"backend": "torch_sdpa", "rules": rules}
    with apply(pipe, attention_config=config) as handle:
        latents = generate(pipe, "wan")
        report = handle.report()
    assert (latents - stock_latents("wan")).abs().max() <= 1e-4
    layers = [r for r in report.layers if r.component == "transformer" and str(r.role) == "self"]
    ran = [
        [(entry.steps, str(entry.selection.backend), entry.calls) for entry in layer.entries]
        for layer in layers
    ]
    assert ran == [
        [(None, "torch_sdpa", 6)],
        [("0-1", "flex_attn", 4), (None, "torch_sdpa", 2)],
    ]


@pytest.mark.parametrize(
    "name", ["transformer_3", "transformer.encoder", "vae", "text_encoder.self"]
)
def test_an_override_that_reaches_nothing_names_the_components(name, fresh):
    pipe = fresh("wan")
    before = state_of(pipe)
    with pytest.raises(ComponentAttentionBackendNotAppliedError, match=r"transformer\.cross"):
        apply(pipe, component_attention_backends={name: "torch_sdpa"})
    assert state_of(pipe) == before


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"component": "transfomer"}, r"rules\[1\] .*component=transfomer .*mean 'transformer'"),
        ({"layers": "100-200"}, r"layers=100-200 matches none; .*transformer\.cross layers 0-1"),
        ({"component": "text_encoder", "role": "cross"}, r"rules\[1\] .*text_encoder\.encoder"),
        ({"component": "text_encoder", "steps": "0"}, r"steps=0 .*encoders have no steps"),
    ],
)
def test_a_rule_that_reaches_nothing_is_refused(rule, message, fresh):
    pipe = fresh("wan")
    before = state_of(pipe)
    rules = [{"role": "self", "backend": "flex_attn"}, {**rule, "backend": "torch_sdpa"}]
    with pytest.raises(ComponentAttentionBackendNotAppliedError, match=message):
        apply(pipe, attention_config={"rules": rules})
    assert state_of(pipe) == before


@pytest.mark.slow_cases("hunyuan_video")
@pytest.mark.parametrize("family", ["wan", "hunyuan_video"])
def test_a_rule_by_step_alone_leaves_encoders_to_the_default(family, fresh):
    pipe = fresh(family)
    config = {"backend": "torch_sdpa", "rules": [{"steps": "0", "backend": "flex_attn"}]}
    with apply(pipe, attention_config=config) as handle:
        generate(pipe, family)
    ran = {
        (str(layer.role), entry.steps, str(entry.selection.backend))
        for layer in handle.report().layers
        for entry in layer.entries
        if entry.calls
    }
    assert ("self", "0", "flex_attn") in ran
    assert {entry for entry in ran if entry[0] == "encoder"} == {("encoder", None, "torch_sdpa")}


def test_a_numbered_component_answers_to_its_stem(fresh):
    handle = apply(fresh("wan22"), component_attention_backends={"transformer": "flex_attn"})
    backends = {
        layer.component: str(entry.selection.backend)
        for layer in handle.report().layers
        for entry in layer.entries
    }
    assert backends["transformer"] == backends["transformer_2"] == "flex_attn"


def test_an_impossible_backend_changes_nothing(fresh):
    pipe = fresh("wan")
    before = state_of(pipe)
    with pytest.raises(UnsupportedBackendError, match=r"aiter \(component transformer\.cross\)"):
        apply(pipe, component_attention_backends={"transformer.cross": "aiter"}, strict=True)
    assert state_of(pipe) == before


def test_a_failure_half_way_takes_everything_back(fresh, monkeypatch):
    from multimodal_gen.integrations import denoiser_plan

    def fail(model, undo):
        raise RuntimeError("planted")

    monkeypatch.setattr(denoiser_plan, "note_branch_names", fail)
    pipe = fresh("wan")
    before = state_of(pipe)
    with pytest.raises(RuntimeError, match="planted"):
        apply(pipe)
    assert state_of(pipe) == before


@pytest.mark.parametrize(
    "given", [{"scope": 3}, {"strict": "x"}, {"train": "no"}, {"attention_auto_table": 3}], ids=str
)
def test_settings_of_other_types_are_refused(given):
    (name,) = given
    with pytest.raises(UsageError, match=f"{name} must be .*, got"):
        apply(torch.nn.Module(), **given)


def test_a_handle_serves_one_block(fresh):
    pipe = fresh("wan")
    found = state_of(pipe)
    with apply(pipe) as handle:
        assert state_of(pipe) != found
        with pytest.raises(UsageError, match="must be entered once") as error, handle:
            pass  # whose end would leave the rest of the outer block stock
        assert state_of(pipe) != found
    assert state_of(pipe) == found
    removed = apply(pipe)
    removed.remove()
    for gone in (handle, removed):
        with pytest.raises(UsageError, match="must be entered once"), gone:
            pytest.fail("it would run stock attention")
    assert str(error.value) == (
        "an attention handle must be entered once, before remove(), got one that was detached or "
        "entered already; call apply() again for a new one"
    )
    with apply(pipe) as again:
        assert again.report().layers


def test_a_second_apply_asks_for_remove(fresh):
    pipe = fresh("wan")
    handle = apply(pipe)
    with pytest.raises(UsageError, match=r"twice.*call remove\(\)"):
        apply(pipe)
    with pytest.raises(UsageError, match=r"twice.*call remove\(\)"):
        apply(pipe.text_encoder)
    handle.remove()
    apply(pipe).remove()


def test_scope_excludes_the_other_settings(fresh):
    scope = SelectionScope(
        default=BackendPreference(source=Source.SETTINGS, backend=AttentionBackendEnum.FLEX_ATTN)
    )
    pipe = fresh("flux")
    with pytest.raises(UsageError, match="scope must be given alone"):
        apply(pipe, scope=scope, attention_backend="torch_sdpa")
    with apply(pipe, scope=scope) as handle:
        backends = {e.selection.backend for r in handle.report().layers for e in r.entries}
    assert backends == {AttentionBackendEnum.FLEX_ATTN}


def test_unknown_names_are_config_errors(fresh):
    with pytest.raises(ConfigError, match="did you mean 'torch_sdpa'"):
        apply(fresh("flux"), attention_backend="torch_spda")


def test_a_bare_model_is_attached_too(fresh):
    model = fresh("wan").transformer
    inputs = {
        "hidden_states": torch.randn(1, 16, 3, 8, 12),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 7, 64),
    }
    with torch.no_grad():
        expected = model(**inputs)[0]
        with multimodal_gen.apply(model, attention_backend="torch_sdpa") as handle:
            out = model(**inputs)[0]
            positional = model(*inputs.values())[0]
    assert torch.equal(out, expected)
    assert torch.equal(positional, expected)
    assert {layer.component for layer in handle.report().layers} == {"transformer"}
    assert {layer.calls for layer in handle.report().layers} == {2}


def wan(cls="WanTransformer3DModel", **config):
    import diffusers

    torch.manual_seed(0)
    sizes = {
        "num_attention_heads": 2, "attention_head_dim": 16, "text_dim": 32, "freq_dim": 32,
        "ffn_dim": 32, "num_layers": 2,
    }  # fmt: skip
    return getattr(diffusers, cls)(**sizes, **config).eval()


def compare(model, inputs, **settings):
    """Return the report of one call under `apply`, and by how much its output differs."""
    with torch.no_grad():
        expected = model(**inputs)[0]
        with apply(model, **settings) as handle:
            out = model(**inputs)[0]
    return handle.report(), (out - expected).abs().max()


def test_the_second_cross_attention_call_on_image_tokens_is_served():
    model = wan(image_dim=24, added_kv_proj_dim=32)
    inputs = {
        "hidden_states": torch.randn(1, 16, 3, 4, 4),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 512, 32),
        "encoder_hidden_states_image": torch.randn(1, 257, 24),
    }
    report, difference = compare(model, inputs, attention_backend="torch_sdpa")
    assert difference <= 1e-5
    assert {(str(layer.role), layer.calls) for layer in report.layers} == {
        ("self", 1),
        ("cross", 2),
    }


def test_vace_runs_its_control_blocks_on_layers_too():
    model = wan("WanVACETransformer3DModel", vace_layers=[0], vace_in_channels=8)
    inputs = {
        "hidden_states": torch.randn(1, 16, 3, 4, 4),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 7, 32),
        "control_hidden_states": torch.randn(1, 8, 3, 4, 4),
    }
    report, difference = compare(model, inputs, attention_backend="torch_sdpa")
    assert difference <= 1e-5
    assert report.notes == ()
    assert Counter((str(layer.role), layer.calls) for layer in report.layers) == {
        ("self", 1): 3,
        ("cross", 1): 3,
    }


def test_an_ip_adapter_of_flux_keeps_its_image_tokens(fresh):
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    model = fresh("flux").transformer
    torch.manual_seed(0)
    for block in model.transformer_blocks:
        block.attn.processor = FluxIPAdapterAttnProcessor(128, 16, num_tokens=(4,), scale=0.7)
    ids = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(6.0))
    inputs = {
        "hidden_states": torch.randn(1, 24, 64),
        "encoder_hidden_states": torch.randn(1, 5, model.config.joint_attention_dim),
        "pooled_projections": torch.randn(1, model.config.pooled_projection_dim),
        "timestep": torch.tensor([0.5]),
        "img_ids": ids,
        "txt_ids": torch.zeros(5, 3),
        "guidance": torch.tensor([3.5]),
        "joint_attention_kwargs": {"ip_hidden_states": [torch.randn(1, 1, 4, 16)]},
    }
    weights = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    report, difference = compare(model, inputs, attention_backend="torch_sdpa")
    assert difference <= 1e-5
    assert Counter(layer.calls for layer in report.layers) == {2: 2, 1: 2}
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == weights


def test_flux2_attends_to_the_keys_it_keeps_of_reference_images():
    from diffusers.models.transformers.transformer_flux2 import (
        Flux2KVAttnProcessor,
        Flux2KVParallelSelfAttnProcessor,
    )

    model, inputs = DENOISERS["flux2 with reference tokens"].make()
    model.transformer_blocks[0].attn.processor = Flux2KVAttnProcessor()
    model.single_transformer_blocks[0].attn.processor = Flux2KVParallelSelfAttnProcessor()
    own = {name: inputs[name][:, 12:] for name in ("hidden_states", "img_ids")}

    def run():
        with torch.no_grad():
            first = model(**inputs, kv_cache_mode="extract", num_ref_tokens=12)
            kept = model(**{**inputs, **own}, kv_cache_mode="cached", kv_cache=first.kv_cache)
        return torch.cat((first.sample, kept.sample))

    expected = run()
    with apply(model, attention_backend="torch_sdpa") as handle:
        found = run()
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    # The first step attends twice: the images to be made to all tokens, the others to their own.
    assert [layer.calls for layer in handle.report().layers] == [3, 3]


@pytest.mark.parametrize("target", [None, "folder", nn.Linear(2, 2)])
def test_a_target_that_is_no_pipeline_is_named(target):
    with pytest.raises(UsageError, match=type(target).__name__):
        apply(target)


def unknown_model():
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=2,
        layers_per_block=1,
    ).eval()


SPARSE_REQUESTS = pytest.mark.parametrize(
    "settings",
    [
        {"attention_backend": "video_sparse_attn"},
        {"component_attention_backends": {"unet": "video_sparse_attn"}},
        {"attention_config": {"rules": [{"layers": "0", "backend": "video_sparse_attn"}]}},
    ],
    ids=lambda settings: next(iter(settings)),
)


@SPARSE_REQUESTS
def test_an_unknown_model_is_taken_over_and_says_that_its_grid_is_unknown(settings):
    model = unknown_model()
    inputs = (torch.randn(2, 4, 8, 8), torch.tensor(10), torch.randn(2, 5, 8))
    with torch.no_grad():
        expected = model(*inputs)[0]
        with apply(model, **settings) as handle:
            out = model(*inputs)[0]
    report = handle.report()
    assert (out - expected).abs().max() <= 1e-5
    assert Counter(str(layer.role) for layer in report.layers) == {"self": 4, "cross": 4}
    assert all(not e.selection.backend.is_sparse for r in report.layers for e in r.entries)
    assert report.notes == (
        "unet: UNet2DConditionModel has no adapter, its latent grid is unknown, so what asked for "
        "a sparse backend runs dense",
    )


def test_a_sparse_request_that_no_denoiser_can_meet_is_warned_of_and_refused_under_strict(caplog):
    with apply(unknown_model(), attention_backend="video_sparse_attn"):
        pass
    assert sum("its latent grid is unknown" in message for message in caplog.messages) == 1
    model = unknown_model()
    with pytest.raises(UnsupportedBackendError, match=r"is unknown.*give latent_grid"):
        apply(model, attention_backend="video_sparse_attn", strict=True)
    with apply(model, attention_backend="torch_sdpa", strict=True):  # nothing of it was attached
        pass


class Eager:
    """A processor that spells its attention out."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **kwargs):
        del attn, encoder_hidden_states, kwargs
        return hidden_states


def test_a_model_whose_processors_cannot_be_rebound_is_refused():
    model = unknown_model()
    model.set_attn_processor(Eager())
    with pytest.raises(NothingAppliedError, match=r"of 8 attention modules: Eager calls neither"):
        apply(model)


def test_a_processor_that_cannot_be_rebound_is_left_alone_and_noted():
    model = unknown_model()
    module = model.mid_block.attentions[0].transformer_blocks[0].attn1
    module.processor = eager = Eager()
    with apply(model) as handle:
        assert module.processor is eager
        assert len(handle.report().layers) == 7
        assert handle.report().notes[-1].startswith("unet: 1 modules left alone, Eager calls")


def test_a_target_without_attention_is_refused(fresh):
    from diffusers import AutoencoderKL

    with pytest.raises(NothingAppliedError, match=r"vae \(AutoencoderKL\)"):
        apply(AutoencoderKL(block_out_channels=(8,), norm_num_groups=4))


def test_a_pipeline_whose_denoiser_has_no_attention_is_refused(fresh):
    pipe = fresh("wan")
    before = state_of(pipe)
    for block in pipe.transformer.blocks:
        del block.attn1, block.attn2
    with pytest.raises(NothingAppliedError, match=r"transformer \(WanTransformer3DModel\)"):
        apply(pipe)
    assert state_of(pipe)["text_encoder", ""] == before["text_encoder", ""]


def test_a_deep_copy_is_a_stock_pipeline(fresh, stock_latents):
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    pipe = fresh("wan")
    with apply(pipe) as handle:
        model = copy.deepcopy(pipe.transformer)
        encoder = copy.deepcopy(pipe.text_encoder)
        assert type(model.blocks[0].attn1.processor) is WanAttnProcessor
        other = fresh("wan")
        other.register_modules(transformer=model, text_encoder=encoder)
        latents = generate(other, "wan")
        assert {layer.calls for layer in handle.report().layers} == {0}
    assert (latents - stock_latents("wan")).abs().max() <= 1e-5


def test_a_pickled_model_is_a_stock_model(fresh):
    model = fresh("wan").transformer
    model.blocks[0].attn1.set_attention_backend("_native_math")
    with apply(model):
        restored = pickle.loads(pickle.dumps(model))
    processor = restored.blocks[0].attn1.processor
    assert type(processor) is type(model.blocks[0].attn1.processor)
    assert str(processor._attention_backend) == "AttentionBackendName._NATIVE_MATH"
    apply(restored).remove()


def test_a_copy_keeps_nothing_of_ours(fresh):
    pipe = fresh("wan")
    with apply(pipe):
        for copied in (copy.deepcopy(pipe.transformer), pickle.dumps(pipe.transformer)):
            model = pickle.loads(copied) if isinstance(copied, bytes) else copied
            assert not isinstance(vars(model)["cache_context"], StandIn)
            assert vars(model)["cache_context"].__self__ is model
            with model.cache_context("cond"), apply(model):
                assert isinstance(vars(model)["cache_context"], StandIn)
            assert "cache_context" not in vars(model)
        config = pipe.text_encoder.config
        assert config._attn_implementation == "multimodal_gen"
        for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
            assert copied._attn_implementation == "sdpa"


def test_a_pickle_names_nothing_of_ours_but_a_hook_that_does_nothing(fresh):
    pipe = fresh("wan")
    with apply(pipe):
        for model in (pipe.transformer, pipe.text_encoder):
            words = [str(argument) for _, argument, _ in pickletools.genops(pickle.dumps(model))]
            ours = {word for word in words if "multimodal_gen." in word}
            assert ours <= {"multimodal_gen.integrations.hooks"}


def test_what_users_set_on_processors_stays_after_remove(fresh):
    pipe = fresh("wan")
    modules = [block.attn1 for block in pipe.transformer.blocks]
    found = modules[0].processor
    found.kept, found.counter, found.dropped = ["list"], 1, True
    with apply(pipe):
        processor = modules[0].processor
        processor.counter += 1
        processor.scale = 0.5
        del processor.dropped
        found.aside = "set on the object held from before"
    assert modules[0].processor is found
    assert {name: v for name, v in vars(found).items() if not name.startswith("_")} == {
        "kept": ["list"],
        "counter": 2,
        "scale": 0.5,
        "aside": "set on the object held from before",
    }
    assert not [name for name in vars(found) if "multimodal_gen" in name]


def test_a_later_set_attention_backend_goes_to_diffusers_and_is_noted(fresh):
    from diffusers import attention_backend
    from diffusers.models.attention_dispatch import AttentionBackendName

    pipe = fresh("wan")
    module = pipe.transformer.blocks[0].attn1
    with apply(pipe, component_attention_backends={"transformer": "torch_sdpa"}) as handle:
        module.set_attention_backend("_native_math")
        with attention_backend("native"):
            generate(pipe, "wan")
        report = handle.report()
    calls = {r.name: r.calls for r in report.layers if r.component == "transformer"}
    assert calls.pop("blocks.0.attn1") == 0
    assert set(calls.values()) == {6}
    assert [n for n in report.notes if "handed to diffusers" in n] == [
        "transformer: blocks.0.attn1 was handed to diffusers, its backend is "
        f"{AttentionBackendName._NATIVE_MATH}"
    ]
    assert module.processor._attention_backend is None


def test_a_processor_set_after_apply_stays(fresh):
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    pipe = fresh("wan")
    handle = apply(pipe)
    mine = WanAttnProcessor()
    pipe.transformer.blocks[1].attn2.set_processor(mine)
    assert "blocks.1.attn2 got another processor" in " ".join(handle.report().notes)
    handle.remove()
    assert pipe.transformer.blocks[1].attn2.processor is mine


@pytest.mark.slow_cases("flux")
@pytest.mark.parametrize("family", ["wan", "flux"])
def test_fused_projections_keep_working(family, fresh):
    pipe = fresh(family)
    with apply(pipe) as handle:
        expected = generate(pipe, family)
        pipe.transformer.fuse_qkv_projections()
        fused = generate(pipe, family)
        pipe.transformer.unfuse_qkv_projections()
    assert (fused - expected).abs().max() <= 1e-4
    assert {r.calls % 2 for r in handle.report().layers} == {0}


def test_context_parallelism_of_diffusers_is_refused(fresh):
    pipe = fresh("wan")
    pipe.transformer.blocks[0].attn1.processor._parallel_config = object()
    with pytest.raises(UsageError, match=r"context parallelism.*blocks\.0\.attn1"):
        apply(pipe)
