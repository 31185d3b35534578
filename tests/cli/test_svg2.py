"""Sparse VideoGen 2 from the command line, with the worked example among the settings."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

NAME = "sparse_video_gen_2_attn"
EXAMPLE = Path(__file__).parents[2] / "configs" / "attention" / f"{NAME}.yaml"
STEPS = 2
SIZES = {
    "wan": ("--height", 64, "--width", 96, "--num-frames", 9),
    "hunyuan_video": ("--height", 64, "--width", 96, "--num-frames", 9),
    "flux": ("--height", 256, "--width", 256),
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
    """Return a function that generates with a tiny model and returns latents and entries."""

    def run(family: str, name: str, *arguments: object) -> tuple[torch.Tensor, list[dict]]:
        out = tmp_path / name
        outcome = sglang(
            *("generate", "--model-path", tiny_pipeline(family), "--prompt", "a fox", "--seed", 0),
            *("--num-inference-steps", STEPS, *SIZES[family]),
            *("--output-path", out, "--save-latents", *arguments),
        )
        assert outcome.code == 0, outcome.err
        (file,), (record,) = out.glob("*.safetensors"), out.glob("*.json")
        layers = json.loads(record.read_text())["attention"]["layers"]
        entries = [entry for layer in layers for entry in layer["entries"]]
        return load_file(file)["latents"], [e for e in entries if e["backend"] == NAME]

    return run


def svg2(**config: object) -> tuple[str, ...]:
    written = json.dumps({**SETTINGS, **config})
    return "--attention-backend", NAME, "--attention-backend-config", written


@pytest.mark.parametrize("family", SIZES)
def test_the_report_has_the_density_of_every_layer_and_step(family, latents) -> None:
    dense, _ = latents(family, "dense", "--attention-backend", "torch_sdpa")
    all_of_it, _ = latents(family, "all", *svg2(svg2_top_p_kmeans=1))
    torch.testing.assert_close(all_of_it, dense, rtol=0, atol=1e-3)
    some, entries = latents(family, "some", *svg2(svg2_top_p_kmeans=0.2))
    assert some.isfinite().all()
    assert not torch.allclose(some, dense, rtol=0, atol=1e-3)
    assert entries
    for by_step in (entry["density_by_step"] for entry in entries):
        assert sorted(by_step) == [str(step) for step in range(STEPS)]
        assert all(0.0 < density < 1.0 for density in by_step.values())


def test_the_worked_example_runs(latents) -> None:
    arguments = ("--attention-backend", NAME, "--attention-backend-config", EXAMPLE)
    found, entries = latents("wan", "example", *arguments)
    assert found.isfinite().all()
    (config,) = {json.dumps(entry["config"]) for entry in entries}
    assert json.loads(config)["svg2_num_k_centroids"] == 1000


def test_the_first_steps_and_layers_are_dense(latents) -> None:
    config = svg2(svg2_first_layers_fp=0.5, svg2_first_times_fp=0.5)
    _, (entry,) = latents("wan", "dense", *config)
    # One of the two layers, one of the two steps.
    assert sorted(entry["density_by_step"]) == ["1"]
