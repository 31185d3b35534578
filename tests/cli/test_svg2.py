"""Sparse VideoGen 2 from the command line, with the worked example among the settings."""

import json

import pytest
import torch
from safetensors.torch import load_file

NAME = "sparse_video_gen_2_attn"
STEPS = 2
SIZES = {
    "wan": ("--height", 64, "--width", 96, "--num-frames", 9),
    "hunyuan_video": ("--height", 64, "--width", 96, "--num-frames", 9),
    "flux": ("--height", 256, "--width", 256),
}
JOINT = [
    f"{blocks}.{i}.attn"
    for blocks in ("single_transformer_blocks", "transformer_blocks")
    for i in (0, 1)
]
LAYERS = {
    "wan": ["blocks.0.attn1", "blocks.1.attn1"],
    "hunyuan_video": JOINT,
    "flux": JOINT,
}
SETTINGS = {
    "svg2_num_q_centroids": 4,
    "svg2_num_k_centroids": 8,
    "svg2_kmeans_iter_init": 2,
    "svg2_first_layers_fp": 0,
    "svg2_first_times_fp": 0,
}


@pytest.fixture
def latents(sglang, tiny_pipeline, tmp_path):
    """Return a function that generates with a tiny model and returns latents and layers.

    The layers are the entries of the method in the report, by the layer's name.
    """

    def run(family: str, name: str, *arguments: object) -> tuple[torch.Tensor, dict[str, dict]]:
        out = tmp_path / name
        outcome = sglang(
            *("generate", "--model-path", tiny_pipeline(family), "--prompt", "a fox", "--seed", 0),
            *("--num-inference-steps", STEPS, *SIZES[family]),
            *("--output-path", out, "--save-latents", *arguments),
        )
        assert outcome.code == 0, outcome.err
        (file,), (record,) = out.glob("*.safetensors"), out.glob("*.json")
        layers = json.loads(record.read_text())["attention"]["layers"]
        entries = {
            layer["name"]: entry
            for layer in layers
            for entry in layer["entries"]
            if entry["backend"] == NAME
        }
        return load_file(file)["latents"], entries

    return run


def svg2(**config: object) -> tuple[str, ...]:
    written = json.dumps({**SETTINGS, **config})
    return "--attention-backend", NAME, "--attention-backend-config", written


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name == "wan" else [pytest.mark.slow]) for name in SIZES],
)
def test_the_report_has_the_density_of_every_layer_and_step(family, latents) -> None:
    dense, _ = latents(family, "dense", "--attention-backend", "torch_sdpa")
    all_of_it, layers = latents(family, "all", *svg2(svg2_top_p_kmeans=1))
    torch.testing.assert_close(all_of_it, dense, rtol=0, atol=1e-3)
    steps = [str(step) for step in range(STEPS)]
    assert sorted(layers) == LAYERS[family]
    for layer in layers.values():
        assert layer["density_by_step"] == dict.fromkeys(steps, pytest.approx(1))
    some, layers = latents(family, "some", *svg2(svg2_top_p_kmeans=0.2))
    assert some.isfinite().all()
    assert not torch.allclose(some, dense, rtol=0, atol=1e-3)
    assert sorted(layers) == LAYERS[family]
    for layer in layers.values():
        assert sorted(layer["density_by_step"]) == steps
        assert all(0.0 < density < 1.0 for density in layer["density_by_step"].values())
    # The data decide: two layers and steps that agree to the last bit were not measured apart.
    assert len({d for x in layers.values() for d in x["density_by_step"].values()}) > STEPS


@pytest.mark.slow
def test_the_first_steps_and_layers_are_dense(latents) -> None:
    config = svg2(svg2_first_layers_fp=0.5, svg2_first_times_fp=0.5)
    _, layers = latents("wan", "dense", *config)
    # One of the two layers, one of the two steps.
    assert {name: list(layer["density_by_step"]) for name, layer in layers.items()} == {
        "blocks.1.attn1": ["1"]
    }


def test_a_run_of_dense_steps_alone_says_so(latents, caplog) -> None:
    _, layers = latents("wan", "few", *svg2(svg2_first_times_fp=1))
    assert not any(layer["calls"] for layer in layers.values())
    assert "svg2_first_times_fp=1.0 keep all 2 steps of this run dense" in caplog.text
