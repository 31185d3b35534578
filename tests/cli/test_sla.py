"""Sparse-Linear Attention from the command line, with the worked example among the settings."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

EXAMPLE = Path(__file__).parents[2] / "configs" / "attention" / "sla_attn.yaml"
STEPS = 2
# More than one block of 64 tokens, in joint sequences too.
SIZES = {
    "wan": ("--height", 64, "--width", 96, "--num-frames", 9),
    "hunyuan_video": ("--height", 64, "--width", 96, "--num-frames", 9),
    "flux": ("--height", 256, "--width", 256),
}


@pytest.fixture
def latents(sglang, tiny_pipeline, tmp_path):
    """Return a function that generates with a tiny model and returns latents and record."""

    def run(family: str, name: str, *arguments: object) -> tuple[torch.Tensor, dict]:
        out = tmp_path / name
        outcome = sglang(
            *("generate", "--model-path", tiny_pipeline(family), "--prompt", "a fox", "--seed", 0),
            *("--num-inference-steps", STEPS, *SIZES[family]),
            *("--output-path", out, "--save-latents", *arguments),
        )
        assert outcome.code == 0, outcome.err
        (file,), (record,) = out.glob("*.safetensors"), out.glob("*.json")
        return load_file(file)["latents"], json.loads(record.read_text())

    return run


def sla(**config: object) -> tuple[str, ...]:
    return (
        *("--attention-backend", "sla_attn"),
        *("--attention-backend-config", json.dumps(config)),
    )


def densities(record: dict) -> list[dict]:
    """Return the density by step of every layer that ran the method."""
    entries = [entry for layer in record["attention"]["layers"] for entry in layer["entries"]]
    return [e["density_by_step"] for e in entries if e["backend"] == "sla_attn" and e["calls"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["wan", *(pytest.param(f, marks=pytest.mark.slow) for f in ("flux", "hunyuan_video"))],
)
def test_the_report_has_the_density_of_every_layer_and_step(family, latents) -> None:
    dense, _ = latents(family, "dense", "--attention-backend", "torch_sdpa")
    all_of_it, _ = latents(family, "all", *sla(topk_ratio=1.0, BLKQ=64))
    torch.testing.assert_close(all_of_it, dense, rtol=0, atol=1e-3)
    some, record = latents(family, "some", *sla(topk_ratio=0.3, BLKQ=64))
    assert some.isfinite().all()
    assert not torch.allclose(some, dense, rtol=0, atol=1e-3)
    found = densities(record)
    assert found
    for by_step in found:
        assert sorted(by_step) == [str(step) for step in range(STEPS)]
        assert all(0.0 < density < 1.0 for density in by_step.values())


@pytest.mark.slow
def test_the_worked_example_runs(latents) -> None:
    arguments = ("--attention-backend", "sla_attn", "--attention-backend-config", EXAMPLE)
    found, record = latents("wan", "example", *arguments)
    assert found.isfinite().all()
    entries = [entry for layer in record["attention"]["layers"] for entry in layer["entries"]]
    (config,) = {json.dumps(e["config"]) for e in entries if e["backend"] == "sla_attn"}
    assert json.loads(config)["topk_ratio"] == 0.1


@pytest.mark.slow
def test_dense_steps_and_layers_are_dense(latents) -> None:
    _, record = latents("wan", "dense", *sla(topk_ratio=0.3, dense_steps="0", dense_layers="0"))
    # One of the two layers, one of the two steps.
    (by_step,) = densities(record)
    assert sorted(by_step) == ["1"]
