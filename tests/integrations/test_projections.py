"""Projections of Sparse-Linear Attention: found in the files, attached, used, taken away again."""

import dataclasses
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.integrations.trained_layers import find_projections, stored_parameters
from multimodal_gen.runtime.layers.attention.scope import scope_from
from tests.integrations.conftest import generate, load

FILE = "diffusion_pytorch_model.safetensors"
SLA = "sla_attn"
CONFIG = {"topk_ratio": 0.5, "BLKQ": 64}


@pytest.fixture
def folder(tiny_pipeline, tmp_path):
    """A pipeline folder of one's own."""
    return shutil.copytree(tiny_pipeline("wan"), tmp_path / "wan")


def store(folder, *, owner="blocks.{}.attn1", blocks=(0, 1), scale=1.0, size=None, bias=True):
    """Add projections to the transformer's file; returns them by block."""
    path = folder / "transformer" / FILE
    tensors = load_file(path)
    size = size or head_size(folder)
    generator = torch.Generator().manual_seed(5)
    found = {}
    for block in blocks:
        weight = scale * torch.randn(size, size, generator=generator)
        offset = scale * torch.randn(size, generator=generator)
        found[block] = (weight, offset if bias else None)
        name = f"{owner.format(block)}.proj_l"
        tensors[f"{name}.weight"] = weight
        if bias:
            tensors[f"{name}.bias"] = offset
    save_file(tensors, path, metadata={"format": "pt"})
    return found


def head_size(folder):
    attention = load(folder).transformer.blocks[0].attn1
    return attention.inner_dim // attention.heads


def latents(folder, **options):
    pipe = load(folder)
    with apply(pipe, attention_backend=SLA, attention_backend_config=CONFIG, **options) as handle:
        return generate(pipe, "wan"), handle.report()


@pytest.mark.slow_cases(
    "blocks.{}.attn1.attn_impl", "blocks.{}.attn1.attn_op.local_attn", "blocks.{}.attn1.local_attn"
)
@pytest.mark.parametrize(
    "owner",
    [
        "blocks.{}.attn1",
        "blocks.{}.attn1.attn_impl",
        "blocks.{}.attn1.local_attn",
        "blocks.{}.attn1.attn_op.local_attn",
        "blocks.{}.self_attn.attn_op.local_attn",
    ],
)
def test_projections_are_found_wherever_training_left_them(folder, owner):
    wanted = store(folder, owner=owner)
    model = load(folder).transformer
    sizes = {f"blocks.{i}.attn1": head_size(folder) for i in range(2)}
    found = find_projections(stored_parameters(model), sizes)
    assert sorted(found) == ["blocks.0.attn1", "blocks.1.attn1"]
    for block, (weight, bias) in wanted.items():
        projection = found[f"blocks.{block}.attn1"]
        assert torch.equal(projection.weight, weight)
        assert torch.equal(projection.bias, bias)
        assert not projection.weight.requires_grad


def test_the_projections_of_a_checkpoint_change_what_is_generated(folder):
    without, report = latents(folder)
    assert not any("project" in note for note in report.notes)
    store(folder)
    with_them, report = latents(folder)
    assert with_them.isfinite().all()
    assert (with_them - without).abs().max() > 1e-2
    assert any("2 layers project the linear branch as the checkpoint" in n for n in report.notes)


def test_a_projection_of_zero_is_none(folder):
    without, _ = latents(folder)
    store(folder, scale=0.0)
    with_zero, report = latents(folder)
    torch.testing.assert_close(with_zero, without)
    assert not any("project" in note for note in report.notes)


def test_each_layer_gets_the_projection_of_its_own_block(folder):
    wanted = store(folder, bias=False)
    pipe = load(folder)
    with apply(pipe, attention_backend=SLA):
        for block, (weight, _) in wanted.items():
            assert torch.equal(pipe.transformer.blocks[block].attn1.proj_l.weight, weight)
            layer = pipe.transformer.blocks[block].attn1.processor._attention_backend.layer
            assert layer.projection is pipe.transformer.blocks[block].attn1.proj_l


def test_remove_takes_the_projections_away(folder):
    store(folder)
    pipe = load(folder)
    before = list(pipe.transformer.state_dict())
    stock = generate(pipe, "wan")
    with apply(pipe, attention_backend=SLA):
        assert "blocks.0.attn1.proj_l.weight" in pipe.transformer.state_dict()
    assert list(pipe.transformer.state_dict()) == before
    assert torch.equal(generate(pipe, "wan"), stock)


def test_another_backend_reads_no_projections(folder):
    store(folder)
    pipe = load(folder)
    with apply(pipe, attention_backend="torch_sdpa"):
        assert not any("proj_l" in name for name in pipe.transformer.state_dict())


def test_only_layers_that_run_the_method_get_a_projection(folder):
    store(folder)
    pipe = load(folder)
    rules = {"rules": [{"backend": SLA, "component": "transformer", "layers": "1"}]}
    with apply(pipe, attention_config=rules):
        names = [n for n, _ in pipe.transformer.named_modules() if n.endswith("proj_l")]
    assert names == ["blocks.1.attn1.proj_l"]


@pytest.mark.parametrize(
    ("rule", "unread", "count"),
    [
        ({"backend": "torch_sdpa"}, "blocks.0.attn1.proj_l and 1 more", 0),
        ({"backend": "video_sparse_attn"}, "blocks.0.attn1.proj_l and 1 more", 0),
        ({"backend": SLA, "layers": "1"}, "blocks.0.attn1.proj_l", 1),
        ({"backend": SLA}, None, 2),
    ],
)
def test_projections_of_layers_without_a_linear_branch_are_noted(folder, rule, unread, count):
    store(folder)
    rules = {"rules": [{"component": "transformer", **rule}]}
    with apply(load(folder), attention_config=rules) as handle:
        notes = handle.report().notes
    found = [n for n in notes if "are not used" in n]
    projecting = f"transformer: {count} layers project the linear branch as the checkpoint does"
    assert [n for n in notes if "layers project" in n] == [projecting] * (count > 0)
    # Layers that have one to spare, for a replay with another backend, do not run with it.
    scope = dataclasses.replace(scope_from(attention_config=rules), spare=frozenset({"projection"}))
    with apply(load(folder), scope=scope) as handle:
        notes = handle.report().notes
    assert [n for n in notes if "layers project" in n] == [projecting] * (count > 0)
    wanted = (
        f"transformer: trained layers of its checkpoint ({unread}) are not used, those layers run "
        f"no method with a linear branch: the linear branch that they were trained for is missing"
    )
    assert found == ([] if unread is None else [wanted])


def test_projections_that_belong_to_no_layer_are_warned_of(folder, caplog):
    store(folder, owner="others.{}")
    with caplog.at_level(logging.WARNING):
        _, report = latents(folder)
    (note,) = [n for n in report.notes if "are not used" in n]
    assert "(others.0.proj_l and 1 more) are not used, no layer of Wan" in note
    assert note in [r.getMessage() for r in caplog.records]


def test_a_model_from_nowhere_has_no_projections():
    assert find_projections(stored_parameters(nn.Linear(2, 2)), {"blocks.0.attn1": 2}) == {}


def test_projections_of_another_size_are_refused_before_anything_changes(folder):
    store(folder, size=8)
    pipe = load(folder)
    with pytest.raises(UsageError, match=r"proj_l.weight in .* must be \[\d+, \d+\], .*\[8, 8\]"):
        apply(pipe, attention_backend=SLA)
    assert not any("proj_l" in name for name in pipe.transformer.state_dict())


def test_a_checkpoint_without_projections_is_warned_of_once_per_pipeline(folder, caplog):
    for count in (1, 2):
        with caplog.at_level(logging.WARNING):
            _, report = latents(folder)
        said = [m for r in caplog.records if "linear branch is zero" in (m := r.getMessage())]
        assert len(said) == count
        assert said[-1] in report.notes
    assert "sla_attn of transformer was given no trained proj_l" in said[0]
    assert "fine-tuned" in said[0]


def test_a_checkpoint_with_projections_is_not_warned_of(folder, caplog):
    store(folder)
    with caplog.at_level(logging.WARNING):
        latents(folder)
    assert not any("linear branch is zero" in r.getMessage() for r in caplog.records)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_blocks_with_projections_compile_into_one_graph(folder):
    store(folder)
    expected, _ = latents(folder)
    pipe = load(folder)
    torch._dynamo.reset()
    with apply(pipe, attention_backend=SLA, attention_backend_config=CONFIG):
        generate(pipe, "wan")
        pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="eager")
        torch.testing.assert_close(generate(pipe, "wan"), expected)
