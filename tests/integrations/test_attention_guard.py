"""Pipelines with a guard: the layers that 8 bits cannot serve run in 16, and the video is saved."""

from typing import Any

import pytest
import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.integrations import diffusers, generator
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.integrations.generator import DiffGenerator
from multimodal_gen.integrations.module_attention import AttentionParams, ModuleAttention
from multimodal_gen.runtime.generator.attention_guard import AttentionGuard
from multimodal_gen.runtime.guard_bounds import GuardBounds
from multimodal_gen.runtime.layers.attention.scope import LayerSite, scope_from
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from tests.integrations.conftest import generate
from tests.integrations.test_sparse import METHODS

FEW_TILES = {"window": [1, 1, 1], "tile_size": [1, 2, 2], "skip_time_steps": 0}
STEPS = 6


def spoil(pipe: Any) -> None:
    """Let a pair of channels of the queries of every layer be a thousand times the rest.

    Those of the keys are as much less, so that exact attention stays what it was.
    """
    pipe.transformer.to(torch.bfloat16)
    with torch.no_grad():
        for block in pipe.transformer.blocks:
            block.attn1.norm_q.weight[:2] *= 1000
            block.attn1.norm_k.weight[:2] /= 1000


def test_the_video_of_a_model_that_8_bits_cannot_serve_is_saved(eight_bits: None, fresh) -> None:
    pipe = fresh("wan")
    spoil(pipe)
    found = {}
    for name, asked in (
        ("exact", {"attention_backend": "torch_sdpa"}),
        ("8 bits", {"attention_backend": "sage_attn"}),
        ("guarded", {"attention_backend": "sage_attn", "attention_guard": 0.05}),
    ):
        with apply(pipe, component_attention_backends={"text_encoder": None}, **asked) as handle:
            found[name] = generate(pipe, "wan", num_inference_steps=STEPS).double()
            report = handle.report()
    off = {name: float((x - found["exact"]).norm()) for name, x in found.items()}
    assert report.guard is not None
    layers = len(pipe.transformer.blocks)
    assert {miss.layer for miss in report.guard.missed} == set(range(layers))
    assert all(miss.error is not None and miss.error > 0.05 for miss in report.guard.missed)
    assert off["guarded"] < off["8 bits"] / 2
    assert len(report.as_dict()["guard"]["missed"]) == layers


@pytest.mark.parametrize("backend", METHODS)
def test_layers_of_every_sparse_method_are_dense_once_they_missed(
    backend: str, fresh, stock_latents
) -> None:
    method = METHODS[backend]
    family, config = method.quick[0], {**method.given, **method.some}
    pipe = fresh(family)
    with apply(
        pipe,
        attention_backend=backend,
        attention_backend_config=config,
        attention_guard={"sparse": 1e-6},
    ) as handle:
        generate(pipe, family, num_inference_steps=4)
        report = handle.report()
        assert report.guard is not None
        assert len(report.guard.missed) == report.guard.calls == 2
        again = generate(pipe, family)
    assert (again - stock_latents(family)).abs().max() <= 1e-3


def test_sparse_layers_run_dense_once_they_miss_until_remove(fresh, stock_latents) -> None:
    pipe = fresh("wan")
    before = [*pipe.transformer._forward_pre_hooks]
    asked = {"attention_backend": "sliding_tile_attn", "attention_backend_config": FEW_TILES}
    with apply(pipe, **asked, attention_guard={"sparse": 1e-6}) as handle:
        generate(pipe, "wan", num_inference_steps=STEPS)
        report = handle.report()
        assert report.guard is not None
        assert report.guard.missed
        assert all(miss.dense for miss in report.guard.missed)
        again = generate(pipe, "wan")
        layers = [each.layer for plan in handle._plans for each in plan.layers]
    assert (again - stock_latents("wan")).abs().max() <= 1e-3
    assert all(layer.guard is None for layer in layers)
    assert [*pipe.transformer._forward_pre_hooks] == before


def test_layers_of_processors_that_come_later_are_guarded_too(fresh) -> None:
    from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor

    class Mine(LTXVideoAttnProcessor):
        """Not one of diffusers, so its masks may mean more, and its layers are others."""

    pipe = fresh("ltx")
    asked = {"attention_backend": "sliding_tile_attn", "attention_backend_config": FEW_TILES}
    with apply(pipe, **asked, attention_guard={"sparse": 1e-6}) as handle:
        for block in pipe.transformer.transformer_blocks:
            block.attn1.processor = Mine()
        generate(pipe, "ltx", num_inference_steps=4)
        report = handle.report()
    assert report.guard is not None
    assert {miss.layer for miss in report.guard.missed} == {0, 1}


def test_layers_for_calls_that_look_different_are_guarded_too(eight_bits: None) -> None:
    guard = AttentionGuard(GuardBounds())
    site = LayerSite(name="a", component="transformer", layer=0, num_layers=1)
    scope = scope_from(attention_backend="sage_attn")
    params = AttentionParams(num_heads=2, head_size=64, num_kv_heads=2)
    module = ModuleAttention(site, params, torch.bfloat16, scope)
    module.guard_by(guard)
    for heads in (2, 4):
        x = torch.randn(1, 64, heads, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        with set_forward_context(0):
            module.attend(x, x, x)
    assert guard.report().tested == 2


@pytest.mark.parametrize(
    ("backend", "bounds", "warned"),
    [
        ("sage_sla_attn", 0.05, True),
        ("sage_sla_attn", {"quantized": 1e-4}, True),
        ("sage_sla_attn", "sparse=0.3", False),
        ("sage_sla_attn", None, False),
        ("sla_attn", 0.05, False),
        ("video_sparse_attn", 0.05, False),
        ("video_sparse_attn:compute_mode=sage_bf16", 0.05, True),
    ],
)
def test_a_sparse_method_that_rounds_is_warned_of_where_no_bound_is_its_own(
    backend: str, bounds: Any, warned: bool, fresh, caplog
) -> None:
    backend, _, given = backend.partition(":")
    asked = {"attention_backend": backend, "attention_backend_config": given or None}
    with apply(fresh("wan"), **asked, attention_guard=bounds):
        pass
    told = [text for text in caplog.messages if "does not bound" in text]
    assert len(told) == warned
    assert all("of transformer (WanTransformer3DModel)" in each for each in told)
    assert all("only tested to be finite; sparse=B, e.g. sparse=0.3," in each for each in told)


@pytest.mark.parametrize(
    ("rule", "warned"),
    [
        ({"backend": "auto"}, True),
        ({"backend": "sliding_tile_attn", "config": FEW_TILES, "steps": "5-"}, False),
        ({"backend": "sage_attn"}, False),
        ({"backend": "sage_attn", "role": "cross"}, True),
    ],
    ids=str,
)
def test_a_guard_of_layers_that_are_all_exact_is_warned_of(
    rule, warned, eight_bits: None, fresh, caplog
) -> None:
    pipe = fresh("wan")
    pipe.transformer.to(torch.bfloat16)  # sage_attn runs in 16 bits alone
    with apply(pipe, attention_config={"rules": [rule]}, attention_guard=0.05):
        pass
    nothing = "0.05 guards nothing: no self-attention layer of transformer (WanTransformer3DModel)"
    assert sum(nothing in text for text in caplog.messages) == warned


def test_a_guard_changes_nothing_where_all_is_well(fresh) -> None:
    pipe = fresh("wan")
    asked = {"attention_backend": "sliding_tile_attn", "attention_backend_config": FEW_TILES}
    with apply(pipe, **asked):
        plain = generate(pipe, "wan")
    with apply(pipe, **asked, attention_guard=0.05) as handle:
        assert torch.equal(generate(pipe, "wan"), plain)
        report = handle.report()
    assert report.guard is not None
    assert report.guard.tested > report.guard.calls == 0
    assert report.guard.missed == ()


def test_a_compiled_model_is_guarded_too(fresh) -> None:
    pipe = fresh("wan")
    asked = {"attention_backend": "sliding_tile_attn", "attention_backend_config": FEW_TILES}
    with apply(pipe, **asked, attention_guard={"sparse": 1e-6}) as handle:
        pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="eager")
        generate(pipe, "wan", num_inference_steps=STEPS)
        report = handle.report()
    assert report.guard is not None
    assert {miss.layer for miss in report.guard.missed} == set(range(len(pipe.transformer.blocks)))


def test_what_is_no_bound_is_refused_before_anything_changes(fresh) -> None:
    pipe = fresh("wan")
    with pytest.raises(ConfigError, match="attention_guard must be a finite number above 0"):
        apply(pipe, attention_guard="much")
    assert diffusers.applied(pipe) is None


def test_models_that_do_not_tell_their_step_are_refused(fresh, monkeypatch) -> None:
    pipe = fresh("wan")
    hooks = "multimodal_gen.integrations.denoiser_plan.DenoiserHooks.tells_steps"
    monkeypatch.setattr(hooks, False)
    with pytest.raises(UsageError, match="must check models that tell their denoising step"):
        apply(pipe, attention_guard=0.05)


@pytest.mark.parametrize(("most", "remembered"), [(2, True), (1, False)])
def test_generations_go_on_with_what_the_last_one_of_the_same_attention_found(
    most: int, remembered: bool, tiny_pipeline, monkeypatch
) -> None:
    monkeypatch.setattr(generator, "MOST_GUARDS", most)
    call = {"height": 32, "width": 48, "num_frames": 5, "seed": 0}
    guard = {"attention_backend": "sliding_tile_attn", "attention_guard": "sparse=1e-6"}
    few = {"attention_backend_config": FEW_TILES}
    many = {"attention_backend_config": {**FEW_TILES, "window": [1, 1, 2]}}
    found = []
    with DiffGenerator.from_pretrained(tiny_pipeline("wan")) as model:
        for config in (few, few, many, few):
            made = model.generate(prompt="a", num_inference_steps=4, **call, **guard, **config)
            found.append(made.report.guard)
    assert [len(each.missed) for each in found] == [2, 2, 2, 2]
    assert found[0].calls > 0
    assert (found[1].calls, found[1].tested) == (0, 0), "all layers ran dense from the start"
    assert found[2].calls > 0, "of another method nothing was known"
    assert (found[3].tested == 0) == remembered, "of the last settings, in whatever order"
