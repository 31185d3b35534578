"""Sparse VideoGen 2 in whole pipelines: its dense parts, and what it keeps between steps."""

import pytest

from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.runtime.layers.attention.sparse.methods import svg2 as svg2_attn
from multimodal_gen.runtime.layers.attention.sparse.methods.svg2 import CentroidCache
from tests.integrations.conftest import generate

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


@pytest.fixture
def caches(monkeypatch):
    """Return a list that fills with the caches that layers make."""
    made = []

    class Watched(CentroidCache):
        most = 0

        def __init__(self):
            super().__init__()
            made.append(self)

        def store(self, *args):
            super().store(*args)
            self.most = max(self.most, len(self))

    monkeypatch.setattr(svg2_attn, "CentroidCache", Watched)
    return made


def left(caches):
    return [len(cache) for cache in caches if cache.most]


def stop(pipe, step, timestep, kwargs):
    pipe._interrupt = True
    return kwargs


def fail(pipe, step, timestep, kwargs):
    raise RuntimeError("out of memory")


@pytest.mark.slow_cases("to its end", "two experts")
@pytest.mark.parametrize(
    ("family", "config", "overrides"),
    [
        ("wan", {}, {}),
        ("wan", {"dense_steps": "1"}, {}),
        ("wan", {}, {"callback_on_step_end": stop}),
        # Two experts, of which one runs the first steps alone.
        ("wan22", {}, {}),
    ],
    ids=["to its end", "a dense last step", "stopped early", "two experts"],
)
def test_nothing_is_kept_of_a_generation_that_has_ended(family, config, overrides, fresh, caches):
    pipe = fresh(family)
    config = {**FEW, **NO_DENSE_PART, **config}
    with apply(pipe, attention_backend=SVG2, attention_backend_config=config):
        generate(pipe, family, **overrides)
        assert left(caches)
        assert not any(left(caches))


@pytest.mark.slow_cases("another one", "told so")
@pytest.mark.parametrize("how", ["told so", "removed", "another one"])
def test_a_generation_that_failed_is_dropped_in_time(how, fresh, caches):
    pipe = fresh("wan")
    config = {**FEW, **NO_DENSE_PART}
    with apply(pipe, attention_backend=SVG2, attention_backend_config=config) as handle:
        with pytest.raises(RuntimeError, match="out of memory"):
            generate(pipe, "wan", callback_on_step_end=fail)
        assert all(left(caches))
        if how == "told so":
            handle.end_request()
        elif how == "removed":
            handle.remove()
        else:
            generate(pipe, "wan")
        assert not any(left(caches))


def test_a_pipeline_of_two_experts_goes_on_from_step_to_step(fresh, caches):
    """What ends a generation does not end it early: the second step starts warm."""
    pipe = fresh("wan22")
    config = {**FEW, **NO_DENSE_PART}
    found = []

    class Counting(svg2_attn.SVG2Router):
        def cluster_side(self, settings, x, num, known, keep, age):
            found.append(known is not None)
            return super().cluster_side(settings, x, num, known, keep, age)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(svg2_attn.SVG2Backend, "router", Counting)
        handle = apply(pipe, attention_backend=SVG2, attention_backend_config=config)
    with handle:
        generate(pipe, "wan22")
    # Two of four steps per expert: the first of each is cold.
    assert sum(found) == len(found) / 2 > 0
