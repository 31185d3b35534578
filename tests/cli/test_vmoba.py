"""V-MoBA from the command line, with the worked example among the settings."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from multimodal_gen.runtime.layers.attention import warn_once

NAME = "vmoba_attn"
EXAMPLE = Path(__file__).parents[2] / "configs" / "attention" / f"{NAME}.yaml"
STEPS = 2
SIZES = {
    "wan": ("--height", 64, "--width", 96, "--num-frames", 9),
    "hunyuan_video": ("--height", 64, "--width", 96, "--num-frames", 9),
    "flux": ("--height", 256, "--width", 256),
}
# Chunks that divide the latent grids, 3x4x6 and 1x16x16, and the share of them that is kept.
VIDEO = {"spatial_chunk_size": [2, 3], "st_chunk_size": [1, 2, 3]}
IMAGE = {"spatial_chunk_size": [4, 8], "st_chunk_size": [1, 4, 4]}
CHUNKS = {
    "wan": (VIDEO, (2 / 3, 2 / 4, 3 / 12)),
    "hunyuan_video": (VIDEO, (2 / 3, 2 / 4, 3 / 12)),
    "flux": (IMAGE, (1, 2 / 8, 3 / 16)),
}
SETTINGS = {
    "temporal_chunk_size": 1,
    "moba_select_mode": "topk",
    "temporal_topk": 2,
    "spatial_topk": 2,
    "st_topk": 3,
    "first_full_step": 0,
}


@pytest.fixture
def latents(sglang, tiny_pipeline, tmp_path):
    """Return a function that generates with a tiny model and returns latents and layers."""

    def run(family: str, name: str, *arguments: object) -> tuple[torch.Tensor, list[dict]]:
        out = tmp_path / name
        outcome = sglang(
            *("generate", "--model-path", tiny_pipeline(family), "--prompt", "a fox", "--seed", 0),
            *("--num-inference-steps", STEPS, *SIZES[family]),
            *("--output-path", out, "--save-latents", *arguments),
        )
        assert outcome.code == 0, outcome.err
        (file,), (record,) = out.glob("*.safetensors"), out.glob("*.json")
        return load_file(file)["latents"], json.loads(record.read_text())["attention"]["layers"]

    return run


def vmoba(family: str, **config: object) -> tuple[str, ...]:
    written = json.dumps({**SETTINGS, **CHUNKS[family][0], **config})
    return "--attention-backend", NAME, "--attention-backend-config", written


def densities(layers: list[dict]) -> dict[int, dict[str, float]]:
    """Return the density by step of every layer that ran the method, by index."""
    return {
        layer["layer"]: entry["density_by_step"]
        for layer in layers
        for entry in layer["entries"]
        if entry["backend"] == NAME and entry["calls"]
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name == "wan" else [pytest.mark.slow]) for name in SIZES],
)
def test_the_report_has_the_density_of_every_layer_and_step(family, latents) -> None:
    dense, _ = latents(family, "dense", "--attention-backend", "torch_sdpa")
    every = dict.fromkeys(("temporal_topk", "spatial_topk", "st_topk"), 99)
    all_of_it, layers = latents(family, "all", *vmoba(family, **every))
    torch.testing.assert_close(all_of_it, dense, rtol=0, atol=1e-3)
    assert all(set(by_step.values()) == {1.0} for by_step in densities(layers).values())
    some, layers = latents(family, "some", *vmoba(family))
    assert some.isfinite().all()
    assert not torch.allclose(some, dense, rtol=0, atol=1e-3)
    found, shares = densities(layers), CHUNKS[family][1]
    assert sorted(found) == list(range(2 if family == "wan" else 4))
    # What is skipped are pairs of the video, or image: a part of all pairs, in joint models.
    of_all = (1 - found[1]["0"]) / (1 - shares[1])
    assert of_all == pytest.approx(1) if family == "wan" else 0 < of_all < 1
    for layer, by_step in found.items():
        skipped = pytest.approx(of_all * (1 - shares[layer % 3]), abs=1e-6)
        assert {step: 1 - density for step, density in by_step.items()} == {
            str(step): skipped for step in range(STEPS)
        }


@pytest.mark.slow
def test_a_threshold_takes_what_it_needs_in_every_layer_and_step(latents) -> None:
    config = {"moba_select_mode": "threshold", "moba_threshold_type": "head_global"}
    less, more = (
        densities(latents("wan", str(share), *vmoba("wan", moba_threshold=share, **config))[1])
        for share in (0.3, 0.8)
    )
    assert sorted(less) == sorted(more) == [0, 1]
    for layer, by_step in less.items():
        assert sorted(by_step) == [str(step) for step in range(STEPS)]
        assert all(0 < by_step[step] < more[layer][step] < 1 for step in by_step)


@pytest.mark.slow
def test_the_first_steps_and_layers_are_dense(latents) -> None:
    config = vmoba("wan", first_full_step=1, first_full_layer=1, patch_resolution=[3, 4, 6])
    _, layers = latents("wan", "dense", *config)
    # One of the two layers, one of the two steps; kinds take turns from that layer on.
    assert densities(layers) == {1: {"1": pytest.approx(2 / 3)}}


@pytest.mark.slow
def test_the_worked_example_runs_and_says_that_no_step_is_sparse(latents, caplog) -> None:
    arguments = ("--attention-backend", NAME, "--attention-backend-config", EXAMPLE)
    found, layers = latents("wan", "example", *arguments)
    assert found.isfinite().all()
    assert densities(layers) == {}
    (message,) = (r.getMessage() for r in caplog.records if r.name == warn_once.__name__)
    assert message.startswith(f"{NAME} is sparse in no step: first_full_step=12 keep all 2 steps")


def test_settings_for_another_resolution_are_one_line(sglang, tiny_pipeline, tmp_path) -> None:
    outcome = sglang(
        *("generate", "--model-path", tiny_pipeline("wan"), "--prompt", "a fox"),
        *("--num-inference-steps", STEPS, *SIZES["wan"], "--output-path", tmp_path / "out"),
        *vmoba("wan", patch_resolution=[21, 30, 52]),
    )
    assert outcome.code == 2
    assert "`patch_resolution` of vmoba_attn must be the run's, [3, 4, 6]" in outcome.err
