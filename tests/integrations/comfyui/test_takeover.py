"""The node's work on stand-ins of ComfyUI's interface."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import multimodal_gen
from multimodal_gen.errors import ConfigError, UnsupportedBackendError, UsageError
from multimodal_gen.integrations import comfyui
from multimodal_gen.integrations.comfyui.call_layout import as_mask
from multimodal_gen.integrations.comfyui.takeover import KEY, Settings, Takeover, take_over
from multimodal_gen.runtime.layers.attention.backends.flex_attn import FlexAttentionBackend
from tests.integrations.comfyui.fakes import (
    NewModel,
    Patcher,
    WanModel,
    comfy_api,
    own_attention,
    sample,
)

OVERRIDE = "optimized_attention_override"
TILES = "tile_size=[1,2,2],dense_above=1.0,skip_time_steps=0"
SPARSE = Settings(backend="sliding_tile_attn", config=f"window=[1,1,1],{TILES}")
DENSE = Settings(backend="torch_sdpa")


@pytest.fixture
def patcher() -> Patcher:
    torch.manual_seed(0)
    return Patcher(WanModel().requires_grad_(False))


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 4, 3, 8, 12, generator=generator)
    return x, torch.randn(1, 5, 32, generator=generator)


def report_of(patched: Patcher) -> Any:
    return patched.get_attachment(KEY).report()


def backends(patched: Patcher) -> set[tuple[str, str, str | None]]:
    return {
        (str(layer.role), str(entry.selection.backend), entry.steps)
        for layer in report_of(patched).layers
        for entry in layer.entries
        if entry.calls
    }


def test_a_dense_backend_serves_every_layer_with_the_stock_result(patcher, inputs):
    taken = take_over(patcher, Settings(backend="torch_sdpa", strict=True))
    torch.testing.assert_close(sample(taken, *inputs), sample(patcher, *inputs))
    report = report_of(taken)
    assert [layer.name for layer in report.layers] == [
        f"blocks.{block}.{part}" for block in (0, 1) for part in ("self_attn", "cross_attn")
    ]
    assert all(layer.calls == 3 for layer in report.layers)
    assert backends(taken) == {("self", "torch_sdpa", None), ("cross", "torch_sdpa", None)}


def test_a_sparse_backend_gets_the_grid_and_rows_in_front_of_it(patcher, inputs):
    whole = Settings(backend="sliding_tile_attn", config=f"window=[9,9,9],{TILES}", strict=True)
    stock = sample(patcher, *inputs)
    torch.testing.assert_close(sample(take_over(patcher, whole), *inputs), stock)
    taken = take_over(patcher, SPARSE)
    assert not torch.allclose(sample(taken, *inputs), stock, atol=1e-3)
    assert ("self", "sliding_tile_attn", None) in backends(taken)
    assert "density 5.6 %" in report_of(taken).summary()  # one of 18 tiles


def test_steps_outside_of_the_share_of_noise_run_dense(patcher, inputs):
    settings = Settings(
        backend="sliding_tile_attn", config=SPARSE.config, start_percent=0.2, end_percent=0.5
    )
    taken = take_over(patcher, settings)
    out, stock = sample(taken, *inputs), sample(patcher, *inputs)
    torch.testing.assert_close(out[[0, 2]], stock[[0, 2]])
    assert not torch.allclose(out[1], stock[1], atol=1e-3)
    assert ("self", "torch_sdpa", "0,2") in backends(taken)
    assert "steps outside of 20% to 50% of the noise run dense" in report_of(taken).notes


def test_a_call_with_other_rows_runs_dense_and_says_so_or_is_refused(patcher, inputs):
    extra = torch.randn(1, 2, 32)
    stock = sample(patcher, *inputs, extra=extra)
    taken = take_over(patcher, SPARSE)
    torch.testing.assert_close(sample(taken, *inputs, extra=extra), stock)
    found = "have 74 queries and 74 keys, where it is known to have 0 rows, the latent grid"
    assert found in report_of(taken).summary()
    strict = Settings(backend=SPARSE.backend, config=SPARSE.config, strict=True)
    with pytest.raises(UnsupportedBackendError, match=found):
        sample(take_over(patcher, strict), *inputs, extra=extra)
    assert not _hooked(patcher)


def test_a_model_that_is_not_known_runs_dense_and_says_so_or_is_refused(inputs):
    patcher = Patcher(NewModel().requires_grad_(False))
    taken = take_over(patcher, SPARSE)
    torch.testing.assert_close(sample(taken, *inputs), sample(patcher, *inputs))
    assert "NewModel is not known, its latent grid is unknown" in report_of(taken).summary()
    strict = take_over(patcher, Settings(backend=SPARSE.backend, config=SPARSE.config, strict=True))
    with pytest.raises(UnsupportedBackendError, match="NewModel is not known"):
        sample(strict, *inputs)
    dense = take_over(patcher, DENSE)
    torch.testing.assert_close(sample(dense, *inputs), sample(patcher, *inputs))
    assert ("cross", "torch_sdpa", None) in backends(dense)


def test_the_model_itself_stays_as_it_is(patcher, inputs):
    stock = sample(patcher, *inputs)
    taken = take_over(patcher, SPARSE)
    sample(taken, *inputs)
    assert patcher.model_options == {"transformer_options": {}}
    assert not any(found for found in patcher.wrappers.values())
    assert not patcher.callbacks
    assert not patcher.attachments
    assert not _hooked(patcher)
    torch.testing.assert_close(sample(patcher, *inputs), stock, rtol=0, atol=0)


def _hooked(patcher: Patcher) -> list[str]:
    model = patcher.model.diffusion_model
    return [n for n, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]


def test_two_models_keep_their_backends_to_themselves(patcher, inputs):
    sparse, dense = take_over(patcher, SPARSE), take_over(patcher, DENSE)
    first, second = sample(sparse, *inputs), sample(dense, *inputs)
    torch.testing.assert_close(second, sample(patcher, *inputs))
    inside: list[torch.Tensor] = []

    def beside(execute, *args, **kwargs):
        inside.append(sample(dense, *inputs))
        return execute(*args, **kwargs)

    sparse.add_wrapper_with_key("diffusion_model", "beside", beside)
    torch.testing.assert_close(sample(sparse, *inputs), first, rtol=0, atol=0)
    torch.testing.assert_close(inside[0], second, rtol=0, atol=0)
    assert ("self", "sliding_tile_attn", None) in backends(sparse)
    assert ("self", "torch_sdpa", None) in backends(dense)


def test_a_second_node_replaces_the_first_and_keeps_what_was_below(patcher):
    def below(func, *args, **kwargs):
        return func(*args, **kwargs)

    patcher.model_options["transformer_options"][OVERRIDE] = below
    taken = take_over(take_over(patcher, SPARSE), DENSE)
    override = taken.model_options["transformer_options"][OVERRIDE]
    assert isinstance(override, Takeover)
    assert override.below is below
    assert [len(x) for found in taken.wrappers.values() for x in found.values()] == [1, 1]
    assert len(taken.callbacks["on_cleanup"][KEY]) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_a_call_that_cannot_be_honoured_goes_below_or_is_refused(patcher, inputs, strict, caplog):
    served: list[dict[str, Any]] = []

    def below(func, *args, **kwargs):
        if kwargs.pop("sink", None):
            served.append(kwargs)
        return func(*args, **kwargs)

    patcher.model_options["transformer_options"][OVERRIDE] = below
    patcher.model.diffusion_model.cross = {"sink": 3, "scale": 0.5}
    taken = take_over(patcher, Settings(backend="torch_sdpa", strict=strict))
    if strict:
        with pytest.raises(UsageError, match=r"must be among .* got sink"):
            sample(taken, *inputs)
        return
    with caplog.at_level(logging.WARNING):
        out = sample(taken, *inputs)
    torch.testing.assert_close(out, sample(patcher, *inputs))
    assert {call["scale"] for call in served} == {0.5}
    said = [record.message for record in caplog.records if "got sink" in record.message]
    assert len(said) == 1
    assert "below" in said[0]
    assert "6 calls ran on" in report_of(taken).summary()


def test_a_node_that_takes_its_place_later_is_noticed(patcher, inputs):
    for strict in (False, True):
        taken = take_over(patcher, Settings(strict=strict))
        taken.model_options["transformer_options"][OVERRIDE] = lambda func, *args, **kwargs: func(
            *args, **kwargs
        )
        if strict:
            with pytest.raises(UsageError, match="none of the attention calls"):
                sample(taken, *inputs)
        else:
            sample(taken, *inputs)
            assert "none of the attention calls" in report_of(taken).summary()


def test_a_failed_run_leaves_nothing_behind(patcher, inputs):
    taken = take_over(patcher, SPARSE)
    with pytest.raises(RuntimeError, match="shapes"):
        sample(taken, inputs[0], torch.randn(1, 5, 31))
    assert not _hooked(patcher)
    assert not torch.allclose(sample(taken, *inputs), sample(patcher, *inputs), atol=1e-3)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("split_output", [False, True])
@pytest.mark.parametrize("mask_shape", [None, (6, 9), (2, 9), (2, 1, 9), (1, 1, 6, 9)])
def test_every_layout_and_mask_is_understood_as_comfyui_does(
    patcher, inputs, split, split_output, mask_shape
):
    q, k, v = (torch.randn(2, n, 32) for n in (6, 9, 9))
    if split:
        q, k, v = (x.unflatten(-1, (2, 16)).transpose(1, 2) for x in (q, k, v))
    mask = None if mask_shape is None else torch.randn(mask_shape)
    given = {"skip_reshape": split, "skip_output_reshape": split_output, "scale": 0.3}
    ours: list[torch.Tensor] = []
    taken = take_over(patcher, DENSE)

    def beside(execute, *args, **kwargs):
        override = taken.model_options["transformer_options"][OVERRIDE]
        ours.append(override(None, q, k, v, 2, mask, **given))
        return execute(*args, **kwargs)

    taken.add_wrapper_with_key("diffusion_model", "beside", beside)
    sample(taken, *inputs)
    plain = as_mask(mask, torch.empty(2, 6, 2, 16), torch.empty(2, 9, 2, 16))
    torch.testing.assert_close(ours[0], own_attention(q, k, v, 2, plain, **given))


def test_calls_that_must_not_be_rounded_are_not(patcher, inputs, monkeypatch):
    monkeypatch.setattr(FlexAttentionBackend, "operand_bits", 8)
    patcher.model.diffusion_model.cross = {"low_precision_attention": False}
    taken = take_over(patcher, Settings(backend="flex_attn"))
    torch.testing.assert_close(sample(taken, *inputs), sample(patcher, *inputs))
    assert backends(taken) == {("self", "flex_attn", None), ("cross", "torch_sdpa", None)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "fast"}, "backend must be one of"),
        ({"backend": "video_sparse_attn", "config": "sparsity=2"}, "sparsity"),
        ({"config": "sparsity=0.5"}, "config"),
        ({"start_percent": 0.7, "end_percent": 0.2}, "the end not before the start"),
        ({"start_percent": -0.1}, r"must be in \[0, 1\]"),
    ],
)
def test_wrong_settings_are_refused_before_anything_runs(given, message):
    with pytest.raises(ConfigError, match=message):
        Settings(**given)


def test_the_node_returns_a_model_and_its_plan_and_the_report_says_what_ran(patcher, inputs):
    with comfy_api():
        nodes = comfyui.NODE_CLASS_MAPPINGS
        backend = nodes["MultimodalGenAttentionBackend"]
        schema = backend.define_schema()
        names = [given.id for given in schema.inputs]
        values = dict(zip(names, (patcher, "torch_sdpa", "", 0.0, 1.0, True), strict=True))
        taken, plan = backend.execute(**values).args
        assert plan.count("torch_sdpa [settings], 0 calls each") == 2
        report = nodes["MultimodalGenAttentionReport"]
        assert "no sampling run so far" in report.execute(taken, after=None).args[0]
        sample(taken, *inputs)
        shown = report.execute(taken, after=None)
        assert shown.args[0].count("torch_sdpa [settings], 3 calls each") == 2
        assert shown.ui == {"text": shown.args}
        from server import PromptServer

        short = "torch_sdpa in 4 layers\nin full: Attention report, or the log"
        assert PromptServer.sent == [(short, "7")]
        assert "sparse attention" in schema.search_aliases
        assert "not part of this model" in report.execute(patcher, after=None).args[0]
        assert set(comfyui.NODE_DISPLAY_NAME_MAPPINGS) == set(nodes)


def test_the_package_of_nodes_has_nothing_else_to_offer():
    with pytest.raises(AttributeError, match="EXTENSION_NAME"):
        comfyui.EXTENSION_NAME  # noqa: B018


FOLDER = Path(comfyui.__file__).parent


def test_the_folder_has_what_a_registry_of_nodes_asks_for():
    tomllib = pytest.importorskip("tomllib")  # since Python 3.11
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())
    name, tool = project["project"]["name"], project["tool"]["comfy"]
    assert len(name) < 100
    assert not name[0].isdigit()
    assert "comfyui" not in name.lower()
    assert tool["PublisherId"]
    assert tool["DisplayName"] == "Attention backend"
    package = tomllib.loads((FOLDER.parents[2] / "pyproject.toml").read_text())["project"]
    assert project["project"]["version"] == multimodal_gen.__version__
    assert project["project"]["license"] == package["license"]
    assert (FOLDER / "requirements.txt").read_text().split() == [package["name"]]


def test_the_example_workflow_has_inputs_that_the_node_takes():
    graph = json.loads((FOLDER / "example_workflows" / "attention_backend.json").read_text())
    nodes = {node["type"]: node for node in graph["nodes"]}
    with comfy_api():
        for name, node in comfyui.NODE_CLASS_MAPPINGS.items():
            wanted = [given.id for given in node.define_schema().inputs]
            assert [given["name"] for given in nodes[name]["inputs"]] == wanted
    values = nodes["MultimodalGenAttentionBackend"]["widgets_values_named"]
    assert Settings(**values).scope(None).default.backend.is_sparse
