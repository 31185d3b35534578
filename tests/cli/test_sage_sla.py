"""8-bit attention from the command line, with the worked examples among the settings."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

EXAMPLE = Path(__file__).parents[2] / "configs" / "attention" / "sage_sla_attn.yaml"
STEPS = 2
SIZES = {
    "wan": ("--height", 64, "--width", 96, "--num-frames", 9),
    "hunyuan_video": ("--height", 64, "--width", 96, "--num-frames", 9),
    "flux": ("--height", 256, "--width", 256),
}


@pytest.fixture
def generate(sglang, tiny_pipeline, tmp_path):
    """Return a function that generates with a tiny model and returns the outcome and its folder."""

    def run(family: str, name: str, *arguments: object):
        out = tmp_path / name
        outcome = sglang(
            *("generate", "--model-path", tiny_pipeline(family), "--prompt", "a fox", "--seed", 0),
            *("--num-inference-steps", STEPS, *SIZES[family]),
            *("--output-path", out, "--save-latents", *arguments),
        )
        return outcome, out

    return run


@pytest.fixture
def latents(generate):
    """Return a function that generates and returns latents and record."""

    def run(family: str, name: str, *arguments: object) -> tuple[torch.Tensor, dict]:
        outcome, out = generate(family, name, *arguments)
        assert outcome.code == 0, outcome.err
        (file,), (record,) = out.glob("*.safetensors"), out.glob("*.json")
        return load_file(file)["latents"], json.loads(record.read_text())

    return run


def sage_sla(config: object) -> tuple[object, ...]:
    config = config if isinstance(config, Path) else json.dumps(config)
    return ("--attention-backend", "sage_sla_attn", "--attention-backend-config", config)


def entries_of(record: dict) -> list[dict]:
    entries = [entry for layer in record["attention"]["layers"] for entry in layer["entries"]]
    return [e for e in entries if e["backend"] == "sage_sla_attn" and e["calls"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name == "wan" else [pytest.mark.slow]) for name in SIZES],
)
def test_the_report_has_the_density_of_every_layer_and_step(family, latents) -> None:
    dense, _ = latents(family, "dense", "--attention-backend", "torch_sdpa")
    all_of_it, _ = latents(family, "all", *sage_sla({"topk_ratio": 1.0, "BLKQ": 64}))
    # A score errs by a hundredth of the scores' spread, and the latents by about as much.
    assert 0 < (all_of_it - dense).norm() / dense.norm() <= 0.05
    some, record = latents(family, "some", *sage_sla({"topk_ratio": 0.3, "BLKQ": 64}))
    assert some.isfinite().all()
    found = [entry["density_by_step"] for entry in entries_of(record)]
    assert found
    for by_step in found:
        assert sorted(by_step) == [str(step) for step in range(STEPS)]
        assert all(0.0 < density < 1.0 for density in by_step.values())


@pytest.mark.slow
def test_the_worked_example_runs(latents) -> None:
    found, record = latents("wan", "example", *sage_sla(EXAMPLE))
    assert found.isfinite().all()
    (config,) = {json.dumps(entry["config"]) for entry in entries_of(record)}
    assert json.loads(config)["topk_ratio"] == 0.5


@pytest.mark.slow_cases("gluon")
@pytest.mark.parametrize("kernel", ["gluon", "triton", "spas_sage_attn"])
def test_a_kernel_that_this_machine_cannot_run_is_refused_in_one_line(kernel, generate) -> None:
    outcome, _ = generate("wan", "refused", *sage_sla({"kernel": kernel}), "--strict-attention")
    assert outcome.code == 2
    (line,) = [line for line in outcome.err.splitlines() if "sage_sla_attn" in line]
    assert "needs platform cuda, this is cpu" in line
