"""Video Sparse Attention with gates in whole pipelines."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from multimodal_gen.integrations.diffusers import apply
from tests.integrations.conftest import generate, load

VSA = "video_sparse_attn"


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
