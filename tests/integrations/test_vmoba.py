"""V-MoBA in whole pipelines: dense with all chunks, and to the end with fewer."""

import pytest

from multimodal_gen.integrations.diffusers import apply
from tests.integrations.conftest import generate

FAMILIES = [
    "wan",
    pytest.param("wan22", marks=pytest.mark.slow),
    "hunyuan_video",
    pytest.param("flux", marks=pytest.mark.slow),
    "qwen_image",
]
VMOBA = "vmoba_attn"
CHUNKS = {
    "temporal_chunk_size": 1,
    "spatial_chunk_size": [2, 3],
    "st_chunk_size": [1, 2, 3],
    "moba_select_mode": "topk",
    "first_full_step": 0,
}


def topk(count):
    return {f"{kind}_topk": count for kind in ("temporal", "spatial", "st")}


@pytest.mark.slow_cases("hunyuan_video", "wan")
@pytest.mark.parametrize("family", FAMILIES)
def test_with_all_chunks_the_latents_are_those_of_dense_attention(family, fresh, stock_latents):
    pipe = fresh(family)
    config = {**CHUNKS, **topk(10_000)}
    with apply(pipe, attention_backend=VMOBA, attention_backend_config=config) as handle:
        latents = generate(pipe, family)
        entries = [
            entry
            for layer in handle.report().layers
            for entry in layer.entries
            if str(entry.selection.backend) == VMOBA and entry.calls
        ]
    assert (latents - stock_latents(family)).abs().max() <= 1e-3
    assert entries
    assert {density for entry in entries for _, density in entry.densities} == {1.0}


@pytest.mark.slow_cases("hunyuan_video", "wan")
@pytest.mark.parametrize("family", FAMILIES)
def test_with_fewer_chunks_the_latents_change_and_the_report_tells_the_density(
    family, fresh, stock_latents
):
    pipe = fresh(family)
    config = {**CHUNKS, **topk(2), "temporal_layer": 0}  # images have one frame
    with apply(pipe, attention_backend=VMOBA, attention_backend_config=config) as handle:
        latents = generate(pipe, family)
        entries = [e for layer in handle.report().layers for e in layer.entries if e.densities]
    assert latents.isfinite().all()
    assert (latents - stock_latents(family)).abs().max() > 1e-3
    assert entries
    assert all(0.0 < density < 1.0 for entry in entries for _, density in entry.densities)


def test_the_first_steps_and_layers_run_on_the_dense_backend(fresh, stock_latents):
    pipe = fresh("wan")
    config = {**CHUNKS, **topk(2), "first_full_step": 1000, "first_full_layer": 1}
    with apply(pipe, attention_backend=VMOBA, attention_backend_config=config):
        latents = generate(pipe, "wan")
    assert (latents - stock_latents("wan")).abs().max() <= 1e-3
