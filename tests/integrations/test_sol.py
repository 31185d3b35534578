"""Sol-Attn in whole pipelines: dense far below every score, and near to it at any threshold."""

import pytest

from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.testing.tiny_models import FAMILIES
from tests.integrations.conftest import generate

SOL = "sol_attn"
QUICK = ("wan", "hunyuan_video", "flux", "qwen_image")
CONFIG = {"dense_steps": None, "dense_layers": None, "tile_size": [1, 2, 2], "neighbours": 0}
EVERY = [
    family if family in QUICK else pytest.param(family, marks=pytest.mark.slow)
    for family in FAMILIES
]


def run(pipe, family, **config):
    given = {**CONFIG, **config}
    with apply(pipe, attention_backend=SOL, attention_backend_config=given) as handle:
        latents = generate(pipe, family)
        entries = [
            entry
            for layer in handle.report().layers
            for entry in layer.entries
            if str(entry.selection.backend) == SOL and entry.calls
        ]
    return latents, {density for entry in entries for _, density in entry.densities}


@pytest.mark.slow_cases("flux", "hunyuan_video", "wan")
@pytest.mark.parametrize("family", EVERY)
def test_every_family_runs_and_far_below_every_score_it_is_dense(family, fresh, stock_latents):
    pipe, dense = fresh(family), stock_latents(family)
    latents, densities = run(pipe, family, tau=-1000.0, dense_above=1)
    assert (latents - dense).abs().max() <= 1e-3
    assert densities == {1.0}
    pooled, densities = run(pipe, family, tau=0.0)
    assert pooled.isfinite().all()
    assert (pooled - dense).abs().max() > 1e-5
    assert all(0.0 < density < 1.0 for density in densities)


def test_means_bring_the_latents_nearer_to_dense_ones(fresh, stock_latents):
    pipe, dense = fresh("wan"), stock_latents("wan")
    errors = [
        (run(pipe, "wan", tau=1.0, tail=tail)[0] - dense).norm() for tail in ("pooled", "none")
    ]
    assert errors[0] < errors[1]


OTHERS = {
    "subblock_sparse_attn": {"skip_first_steps": 0, "min_seq_len": 0, "tail": "pooled"},
    "pisa_attn": {"density": 0.1},
    "cube_sparse_attn": {"topk_ratio": 0.2, "local_cube_size": [1, 2, 2]},
    "sparge_attn": {"topk": 0.3},
    "static_sparse_attn": {"pattern": "lvsa", "window_size": 1, "key_frame_interval": 3},
}


IN_THE_GATE = ("subblock_sparse_attn", "static_sparse_attn")


@pytest.mark.slow_cases("hunyuan_video-pisa_attn")
@pytest.mark.parametrize(
    "backend",
    [b if b in IN_THE_GATE else pytest.param(b, marks=pytest.mark.slow) for b in OTHERS],
)
@pytest.mark.parametrize(
    "family",
    [f if f == "hunyuan_video" else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES],
)
def test_methods_with_such_blocks_run_in_every_family(backend, family, fresh, stock_latents):
    pipe = fresh(family)
    given = {**OTHERS[backend], "dense_above": 1}
    with apply(pipe, attention_backend=backend, attention_backend_config=given) as handle:
        latents = generate(pipe, family)
        ran = [e for r in handle.report().layers for e in r.entries if e.calls and e.densities]
    assert latents.isfinite().all()
    assert {str(entry.selection.backend) for entry in ran} == {backend}
    assert latents.shape == stock_latents(family).shape
