"""Sparse VideoGen 2 in whole pipelines: dense where all the mass is kept, sparse otherwise."""

import pytest

from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.runtime.layers.attention.backends import svg2_attn
from multimodal_gen.runtime.layers.attention.svg2.centroids import CentroidCache
from tests.integrations.conftest import generate

FAMILIES = ["wan", "wan22", "hunyuan_video", "flux", "qwen_image"]
SVG2 = "sparse_video_gen_2_attn"
NO_DENSE_PART = {
    "svg2_first_layers_fp": 0,
    "svg2_first_times_fp": 0,
    "svg2_kmeans_iter_init": 2,
}
FEW = {"svg2_num_q_centroids": 3, "svg2_num_k_centroids": 6, "svg2_top_p_kmeans": 0.2}


def sparse_entries(handle):
    layers = handle.report().layers
    return [e for layer in layers for e in layer.entries if str(e.selection.backend) == SVG2]


@pytest.mark.parametrize("family", FAMILIES)
def test_with_all_the_mass_the_latents_are_those_of_dense_attention(family, fresh, stock_latents):
    pipe = fresh(family)
    config = {**FEW, "svg2_top_p_kmeans": 1, **NO_DENSE_PART}
    with apply(pipe, attention_backend=SVG2, attention_backend_config=config) as handle:
        latents = generate(pipe, family)
        entries = [entry for entry in sparse_entries(handle) if entry.calls]
    assert (latents - stock_latents(family)).abs().max() <= 1e-3
    assert entries
    assert all(abs(density - 1) < 1e-9 for entry in entries for _, density in entry.densities)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_less_of_it_the_latents_change_and_the_report_tells_the_density(
    family, fresh, stock_latents
):
    pipe = fresh(family)
    config = {**FEW, **NO_DENSE_PART}
    with apply(pipe, attention_backend=SVG2, attention_backend_config=config) as handle:
        latents = generate(pipe, family)
        entries = [entry for entry in sparse_entries(handle) if entry.densities]
    assert latents.isfinite().all()
    assert (latents - stock_latents(family)).abs().max() > 1e-3
    assert entries
    assert all(0.0 < density < 1.0 for entry in entries for _, density in entry.densities)


def test_the_first_steps_and_layers_are_dense_by_default(fresh):
    pipe = fresh("wan")
    with apply(
        pipe,
        attention_backend=SVG2,
        attention_backend_config={**FEW, "svg2_first_times_fp": 0.5, "svg2_first_layers_fp": 0.5},
    ) as handle:
        generate(pipe, "wan")
        layers = [x for x in handle.report().layers if x.component == "transformer"]
        own = [layer for layer in layers if str(layer.role) == "self"]
    first, second = own
    assert [(e.steps, str(e.selection.backend)) for e in first.entries] == [(None, "torch_sdpa")]
    assert [(e.steps, str(e.selection.backend)) for e in second.entries] == [
        ("first 0.5 of all", "torch_sdpa"),
        (None, SVG2),
    ]
    assert all(entry.calls for entry in second.entries)


def test_nothing_is_kept_of_a_request_that_has_ended(fresh, monkeypatch):
    caches, sizes = [], []

    class Watched(CentroidCache):
        def __init__(self):
            super().__init__()
            caches.append(self)

        def keep(self, *args):
            super().keep(*args)
            sizes.append(len(self))

    monkeypatch.setattr(svg2_attn, "CentroidCache", Watched)
    pipe = fresh("wan")
    config = {**FEW, **NO_DENSE_PART}
    with apply(pipe, attention_backend=SVG2, attention_backend_config=config):
        generate(pipe, "wan")
    assert max(sizes) > 0
    assert [len(cache) for cache in caches] == [0] * len(caches)
