"""Sparse methods in whole pipelines: dense where they keep all, and to the end with less."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.runtime.layers.attention.sparse.methods.cube import CubeRouter
from multimodal_gen.testing.tiny_models import FAMILIES
from tests.integrations.conftest import generate

MANY = ("wan", "wan22", "hunyuan_video", "flux", "qwen_image")
ABOVE_DENSE = {"dense_above": 1}


@dataclass(frozen=True, kw_only=True)
class Method:
    """What a method is given, beside `given`: to keep all, to keep less, to be dense itself.

    Attributes:
        near: norm of the difference to dense latents, as a share, where it is not exact.
        families: pipelines that it is tried on; `quick` are those of every run.
    """

    given: dict[str, Any]
    whole: dict[str, Any]
    some: dict[str, Any]
    dense: dict[str, Any]
    near: float | None = None
    families: tuple[str, ...] = MANY
    quick: tuple[str, ...] = ("wan",)


SLA = Method(
    given={"BLKQ": 64},
    whole={"topk_ratio": 1.0},
    some={"topk_ratio": 0.0},
    dense={"topk_ratio": 0.0, "dense_steps": "0-", "dense_layers": "0"},
    families=("wan", "wan22", "hunyuan_video"),  # the others' images are one block
)
METHODS = {
    "sla_attn": SLA,
    # Latents err as the scores do, by a hundredth of their spread, step by step.
    "sage_sla_attn": Method(
        given=SLA.given,
        whole=SLA.whole,
        some=SLA.some,
        dense={"topk_ratio": 0.0, "dense_steps": "0-"},
        near=0.05,
        families=("wan", "hunyuan_video"),
    ),
    "video_sparse_attn": Method(
        given={},
        whole={},
        some={"topk": 1},
        dense={"topk": 1, "dense_steps": "0-", "dense_layers": "0"},
        families=(*MANY, "flux2_klein"),
        quick=("wan", "qwen_image"),
    ),
    "vmoba_attn": Method(
        given={
            "temporal_chunk_size": 1,
            "spatial_chunk_size": [2, 3],
            "st_chunk_size": [1, 2, 3],
            "moba_select_mode": "topk",
            "temporal_layer": 0,  # images have one frame
        },
        whole={"first_full_step": 0, "spatial_topk": 10_000, "st_topk": 10_000},
        some={"first_full_step": 0, "spatial_topk": 2, "st_topk": 2},
        dense={"first_full_step": 1000, "first_full_layer": 1, "spatial_topk": 2, "st_topk": 2},
        quick=("qwen_image",),
    ),
    "sparse_video_gen_2_attn": Method(
        given={"svg2_num_q_centroids": 3, "svg2_num_k_centroids": 6, "svg2_kmeans_iter_init": 2},
        whole={
            "svg2_top_p_kmeans": 1,
            "svg2_first_layers_fp": 0,
            "svg2_first_times_fp": 0,
        },
        some={
            "svg2_top_p_kmeans": 0.2,
            "svg2_first_layers_fp": 0,
            "svg2_first_times_fp": 0,
        },
        dense={"svg2_first_times_fp": 1},
        quick=("qwen_image",),
    ),
    "sol_attn": Method(
        given={"dense_steps": None, "dense_layers": None, "tile_size": [1, 2, 2], "neighbours": 0},
        whole={"tau": -1000.0, **ABOVE_DENSE},
        some={"tau": 0.0},
        dense={"dense_steps": "0-"},
        families=tuple(FAMILIES),
        quick=("qwen_image",),
    ),
}


def run(pipe: Any, family: str, backend: str, **config: Any) -> tuple[torch.Tensor, list[float]]:
    """Return latents, and what the report says of the calls that ran the method."""
    with apply(pipe, attention_backend=backend, attention_backend_config=config) as handle:
        latents = generate(pipe, family)
        found = [
            entry
            for layer in handle.report().layers
            for entry in layer.entries
            if str(entry.selection.backend) == backend and entry.calls
        ]
    return latents, [density for entry in found for _, density in entry.densities]


@pytest.mark.parametrize(
    ("backend", "family"),
    [
        pytest.param(name, family, marks=[] if family in method.quick else [pytest.mark.slow])
        for name, method in METHODS.items()
        for family in method.families
    ],
)
def test_a_pipeline_is_dense_where_all_is_kept_and_otherwise_where_less_is(
    backend, family, fresh, stock_latents
):
    method, stock, pipe = METHODS[backend], stock_latents(family), fresh(family)
    latents, densities = run(pipe, family, backend, **method.given, **method.whole)
    if method.near is None:
        assert (latents - stock).abs().max() <= 1e-3
    else:
        assert 0 < (latents - stock).norm() / stock.norm() <= method.near
    assert densities
    assert all(math.isclose(density, 1, abs_tol=1e-9) for density in densities)
    latents, densities = run(pipe, family, backend, **method.given, **method.some)
    assert latents.isfinite().all()
    assert (latents - stock).abs().max() > 1e-5
    assert densities
    assert all(0.0 < density < 1.0 for density in densities)


@pytest.mark.parametrize("backend", METHODS)
def test_dense_steps_and_layers_run_on_the_dense_backend(backend, fresh, stock_latents):
    method = METHODS[backend]
    latents, densities = run(fresh("wan"), "wan", backend, **{**method.given, **method.dense})
    assert (latents - stock_latents("wan")).abs().max() <= 1e-3
    assert densities == []


def test_means_bring_the_latents_nearer_to_dense_ones(fresh, stock_latents):
    dense, given = stock_latents("wan"), METHODS["sol_attn"].given
    errors = [
        (run(fresh("wan"), "wan", "sol_attn", **given, tau=1.0, tail=tail)[0] - dense).norm()
        for tail in ("pooled", "none")
    ]
    assert errors[0] < errors[1]


OTHERS = {
    "subblock_sparse_attn": {"skip_first_steps": 0, "min_seq_len": 0, "tail": "pooled"},
    "pisa_attn": {"density": 0.1},
    "cube_sparse_attn": {"topk_ratio": 0.2, "local_cube_size": [1, 2, 2]},
    "nabla_attn": {"P": 0.5, "wT": 1, "tile_size": [1, 2, 2]},
    "draft_attn": {"sparsity_ratio": 0.6, "pool_h": 2, "pool_w": 2},
    "video_sparse_attn_h3": {"sparsity": 1.0},
    "bsa_attn": {"kv_cumulative_threshold": 0.5, "min_kv_blocks": 1, "tile_size": [1, 2, 2]},
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
    latents, densities = run(fresh(family), family, backend, **OTHERS[backend], **ABOVE_DENSE)
    assert latents.isfinite().all()
    assert densities
    assert latents.shape == stock_latents(family).shape


def test_a_pipeline_chooses_once_in_so_many_steps(fresh, monkeypatch):
    chosen, choose = [], CubeRouter.choose
    monkeypatch.setattr(CubeRouter, "choose", lambda *x: chosen.append(1) or choose(*x))
    pipe, given = fresh("wan"), {**OTHERS["cube_sparse_attn"], **ABOVE_DENSE}
    made = []
    for every in (1, 3, 99):
        chosen.clear()
        with apply(
            pipe,
            attention_backend="cube_sparse_attn",
            attention_backend_config={**given, "refresh_every": every},
        ) as handle:
            generate(pipe, "wan", num_inference_steps=4)
            entries = [
                entry
                for layer in handle.report().layers
                for entry in layer.entries
                if str(entry.selection.backend) == "cube_sparse_attn" and entry.calls
            ]
        made.append(len(chosen))
        assert all(len(entry.densities) == 4 for entry in entries)
    assert made[0] == sum(entry.calls for entry in entries)
    assert (made[1], made[2]) == (made[0] // 2, made[0] // 4)
