"""Sparse methods from the command line, with their worked examples among the settings."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parents[2] / "configs" / "attention"
STEPS = 2
# More than one block of 64 tokens, in joint sequences too.
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
LAYERS = {"wan": ["blocks.0.attn1", "blocks.1.attn1"], "hunyuan_video": JOINT, "flux": JOINT}
SLA, VMOBA, SVG2 = "sla_attn", "vmoba_attn", "sparse_video_gen_2_attn"
# By method: what it is given always, to keep all, and to keep less.
METHODS = {
    SLA: ({"BLKQ": 64}, {"topk_ratio": 1.0}, {"topk_ratio": 0.3}),
    "sage_sla_attn": ({"BLKQ": 64}, {"topk_ratio": 1.0}, {"topk_ratio": 0.3}),
    VMOBA: (
        {
            "temporal_layer": 0,  # images have one frame
            "spatial_chunk_size": [2, 3],
            "st_chunk_size": [1, 2, 3],
            "moba_select_mode": "topk",
            "first_full_step": 0,
        },
        {"spatial_topk": 999, "st_topk": 999},
        {"spatial_topk": 2, "st_topk": 3},
    ),
    SVG2: (
        {
            "svg2_num_q_centroids": 4,
            "svg2_num_k_centroids": 8,
            "svg2_kmeans_iter_init": 2,
            "svg2_first_layers_fp": 0,
            "svg2_first_times_fp": 0,
        },
        {"svg2_top_p_kmeans": 1},
        {"svg2_top_p_kmeans": 0.2},
    ),
}
QUICK = [(SVG2, "wan")]


@pytest.fixture
def generate(sglang, tiny_pipeline, tmp_path):
    """Return a function that generates with a tiny model and returns outcome and folder."""

    def run(family: str, name: str, backend: str, config: object, *more: str):
        out = tmp_path / name
        written = config if isinstance(config, Path) else json.dumps(config)
        outcome = sglang(
            *("generate", "--model-path", tiny_pipeline(family), "--prompt", "a fox", "--seed", 0),
            *("--num-inference-steps", STEPS, *SIZES[family]),
            *("--output-path", out, "--save-latents", "--attention-backend", backend),
            *(("--attention-backend-config", written) if config else ()),
            *more,
        )
        return outcome, out

    return run


@pytest.fixture
def latents(generate, black_frames):
    """Return a function that generates, and returns latents and what the record says of layers.

    These are the entries of the method that ran, by the layer's name.
    """

    def run(
        family: str, name: str, backend: str, config: object = None
    ) -> tuple[torch.Tensor, dict[str, dict]]:
        outcome, out = generate(family, name, backend, config)
        assert outcome.code == 0, outcome.err
        (file,), (record,) = out.glob("*.safetensors"), out.glob("*.json")
        entries = {
            layer["name"]: entry
            for layer in json.loads(record.read_text())["attention"]["layers"]
            for entry in layer["entries"]
            if entry["backend"] == backend and entry["calls"]
        }
        return load_file(file)["latents"], entries

    return run


@pytest.mark.parametrize(
    ("backend", "family"),
    [
        pytest.param(name, family, marks=[] if (name, family) in QUICK else [pytest.mark.slow])
        for name in METHODS
        for family in SIZES
    ],
)
def test_the_report_has_the_density_of_every_layer_and_step(backend, family, latents) -> None:
    given, whole, less = METHODS[backend]
    dense, _ = latents(family, "dense", "torch_sdpa")
    all_of_it, layers = latents(family, "all", backend, {**given, **whole})
    if backend == "sage_sla_attn":
        # A score errs by a hundredth of the scores' spread, and the latents by about as much.
        assert 0 < (all_of_it - dense).norm() / dense.norm() <= 0.05
    else:
        torch.testing.assert_close(all_of_it, dense, rtol=0, atol=1e-3)
    steps = [str(step) for step in range(STEPS)]
    assert sorted(layers) == LAYERS[family]
    for layer in layers.values():
        assert layer["density_by_step"] == dict.fromkeys(steps, pytest.approx(1))
    some, layers = latents(family, "some", backend, {**given, **less})
    assert some.isfinite().all()
    assert not torch.allclose(some, dense, rtol=0, atol=1e-3)
    assert sorted(layers) == LAYERS[family]
    for layer in layers.values():
        assert sorted(layer["density_by_step"]) == steps
        assert all(0.0 < density < 1.0 for density in layer["density_by_step"].values())
    if backend == SVG2:
        # The data decide: two layers and steps that agree to the last bit were not measured apart.
        assert len({d for x in layers.values() for d in x["density_by_step"].values()}) > STEPS


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "ratio"), [(SLA, 0.1), ("sage_sla_attn", 0.5)])
def test_the_worked_example_runs(backend, ratio, latents) -> None:
    found, layers = latents("wan", "example", backend, EXAMPLES / f"{backend}.yaml")
    assert found.isfinite().all()
    assert {entry["config"]["topk_ratio"] for entry in layers.values()} == {ratio}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "config"),
    [
        (SLA, {"dense_steps": "0", "dense_layers": "0"}),
        (VMOBA, {"first_full_step": 1, "first_full_layer": 1, "patch_resolution": [3, 4, 6]}),
        (SVG2, {"svg2_first_layers_fp": 0.5, "svg2_first_times_fp": 0.5}),
    ],
)
def test_the_first_steps_and_layers_are_dense(backend, config, latents) -> None:
    given, _, less = METHODS[backend]
    _, layers = latents("wan", "dense", backend, {**given, **less, **config})
    # One of the two layers, one of the two steps.
    found = {name: list(layer["density_by_step"]) for name, layer in layers.items()}
    assert found == {"blocks.1.attn1": ["1"]}


@pytest.mark.parametrize(
    ("backend", "config", "told"),
    [
        (SVG2, {**METHODS[SVG2][0], "svg2_first_times_fp": 1}, "svg2_first_times_fp=1.0 keep all"),
        pytest.param(
            *(VMOBA, EXAMPLES / f"{VMOBA}.yaml", "first_full_step=12 keep all 2 steps"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_of_dense_steps_alone_says_so(backend, config, told, latents, caplog) -> None:
    found, layers = latents("wan", "few", backend, config)
    assert found.isfinite().all()
    assert layers == {}
    assert f"{backend} is sparse in no step: {told}" in caplog.text


@pytest.mark.slow_cases("gluon")
@pytest.mark.parametrize("kernel", ["gluon", "triton", "spas_sage_attn"])
def test_a_kernel_that_this_machine_cannot_run_is_refused_in_one_line(kernel, generate) -> None:
    config = {"kernel": kernel}
    outcome, _ = generate("wan", "refused", "sage_sla_attn", config, "--strict-attention")
    assert outcome.code == 2
    (line,) = [line for line in outcome.err.splitlines() if "sage_sla_attn" in line]
    assert "needs platform cuda, this is cpu" in line


def test_settings_for_another_resolution_are_one_line(generate) -> None:
    given, _, less = METHODS[VMOBA]
    config = {**given, **less, "patch_resolution": [21, 30, 52]}
    outcome, _ = generate("wan", "out", VMOBA, config)
    assert outcome.code == 2
    assert "`patch_resolution` of vmoba_attn must be the run's, [3, 4, 6]" in outcome.err
