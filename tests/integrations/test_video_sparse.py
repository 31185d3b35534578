"""Video Sparse Attention in whole pipelines: dense at sparsity 0, and to the end at any other."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from multimodal_gen.integrations.diffusers import apply
from tests.integrations.conftest import generate, load

FAMILIES = [
    "wan",
    pytest.param("wan22", marks=pytest.mark.slow),
    "hunyuan_video",
    pytest.param("flux", marks=pytest.mark.slow),
    "qwen_image",
]
VSA = "video_sparse_attn"


@pytest.mark.slow_cases("hunyuan_video", "qwen_image")
@pytest.mark.parametrize("family", FAMILIES)
def test_at_sparsity_zero_the_latents_are_those_of_dense_attention(family, fresh, stock_latents):
    pipe = fresh(family)
    with apply(pipe, attention_backend=VSA) as handle:
        latents = generate(pipe, family)
        entries = [
            entry
            for layer in handle.report().layers
            for entry in layer.entries
            if str(entry.selection.backend) == VSA and entry.calls
        ]
    assert (latents - stock_latents(family)).abs().max() <= 1e-3
    assert entries
    assert {density for entry in entries for _, density in entry.densities} == {1.0}


@pytest.mark.slow_cases("flux2_klein", "hunyuan_video")
@pytest.mark.parametrize("family", [*FAMILIES, "flux2_klein"])
def test_with_fewer_tiles_the_latents_change_and_the_report_tells_the_density(
    family, fresh, stock_latents
):
    pipe = fresh(family)
    with apply(pipe, attention_backend=VSA, attention_backend_config={"topk": 1}) as handle:
        latents = generate(pipe, family)
        entries = [e for layer in handle.report().layers for e in layer.entries if e.densities]
    assert latents.isfinite().all()
    assert (latents - stock_latents(family)).abs().max() > 1e-3
    assert entries
    assert all(0.0 < density < 1.0 for entry in entries for _, density in entry.densities)


def test_dense_steps_and_layers_run_on_the_dense_backend(fresh, stock_latents):
    pipe = fresh("wan")
    config = {"topk": 1, "dense_steps": "0-", "dense_layers": "0"}
    with apply(pipe, attention_backend=VSA, attention_backend_config=config):
        latents = generate(pipe, "wan")
    assert (latents - stock_latents("wan")).abs().max() <= 1e-3


@pytest.fixture
def gated(tiny_pipeline, tmp_path):
    """A function that makes a pipeline folder whose gates have a constant bias and no weight."""

    def make(bias):
        folder = shutil.copytree(tiny_pipeline("wan"), tmp_path / f"wan {bias}")
        path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
        tensors = load_file(path)
        for block in range(2):
            tensors[f"blocks.{block}.to_gate_compress.weight"] = torch.zeros(128, 128)
            tensors[f"blocks.{block}.to_gate_compress.bias"] = torch.full((128,), bias)
        save_file(tensors, path, metadata={"format": "pt"})
        return load(folder)

    return make


def test_a_gate_of_zero_is_no_gate_and_another_one_counts(gated, fresh):
    latents = {}
    for name, pipe in (("none", fresh("wan")), ("zero", gated(0.0)), ("some", gated(0.5))):
        with apply(pipe, attention_backend=VSA, attention_backend_config={"topk": 1}):
            latents[name] = generate(pipe, "wan")
    torch.testing.assert_close(latents["zero"], latents["none"])
    assert latents["some"].isfinite().all()
    assert (latents["some"] - latents["none"]).abs().max() > 1e-2


def test_the_gate_counts_in_dense_steps_and_not_in_dense_layers(gated, stock_latents):
    pipe = gated(0.5)
    latents = {}
    for name, config in (
        ("sparsity zero", {}),
        ("dense steps", {"topk": 1, "dense_steps": "0-"}),
        ("dense layers", {"topk": 1, "dense_layers": "0-"}),
    ):
        with apply(pipe, attention_backend=VSA, attention_backend_config=config):
            latents[name] = generate(pipe, "wan")
    torch.testing.assert_close(latents["dense steps"], latents["sparsity zero"])
    assert (latents["dense layers"] - stock_latents("wan")).abs().max() <= 1e-3
    assert (latents["sparsity zero"] - stock_latents("wan")).abs().max() > 1e-2
