"""Whole pipelines over ranks: what comes out is what one process gives."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from multimodal_gen.runtime.distributed.mesh import Mesh
from tests.helpers.methods import SMALL
from tests.integrations.parallel import pipelines

TOLERANCE = 1e-4
METHODS = (
    "sliding_tile_attn",
    "video_sparse_attn",
    "vmoba_attn",
    "sparse_video_gen_2_attn",
    "sla_attn",
    "sol_attn",
)


@pytest.mark.slow_cases("flux", "qwen_image", "wan22")
@pytest.mark.parametrize(
    "family",
    [
        *("wan22", "hunyuan_video", "ltx", "flux", "qwen_image"),
        pytest.param("hunyuan_video_15", marks=pytest.mark.slow),
    ],
)
def test_a_ring_gives_the_latents_of_one_process(two_ranks, tiny_pipeline, stock_latents, family):
    folder = tiny_pipeline(family)
    results = two_ranks.run(Mesh(ring=2), pipelines.latents, folder, family, {})
    for latents, notes, _ in results:
        assert (latents - stock_latents(family)).abs().max() <= TOLERANCE
        assert "transformer: 2 ranks share the sequence (ring 2)" in notes
    assert torch.equal(results[0][0], results[1][0])


@pytest.mark.slow_cases(
    "cogvideox-2 CFG x 1 ring x 2 Ulysses = 4 GPUs", "wan-1 CFG x 2 ring x 2 Ulysses = 4 GPUs"
)
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("wan", Mesh(ulysses=2, ring=2)),
        ("cogvideox", Mesh(cfg=2, ulysses=2)),
        pytest.param("wan", Mesh(cfg=2, ulysses=2), marks=pytest.mark.slow),
        pytest.param("cogvideox", Mesh(ulysses=2, ring=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_four_ranks_give_the_latents_of_one_process(
    four_ranks, tiny_pipeline, stock_latents, family, mesh
):
    folder = tiny_pipeline(family)
    results = four_ranks.run(mesh, pipelines.latents, folder, family, {})
    for latents, _, _ in results:
        assert (latents - stock_latents(family)).abs().max() <= TOLERANCE
        assert torch.equal(latents, results[0][0])


@pytest.mark.slow_cases(
    "flux-sliding_tile_attn",
    "hunyuan_video-video_sparse_attn",
    "wan-sla_attn",
    "wan-sliding_tile_attn",
    "wan-sol_attn",
    "wan-sparse_video_gen_2_attn",
    "wan-video_sparse_attn",
    "wan-vmoba_attn",
)
@pytest.mark.parametrize(
    ("family", "backend"),
    [
        *(("wan", backend) for backend in METHODS),
        ("hunyuan_video", "video_sparse_attn"),
        ("flux", "sliding_tile_attn"),
        ("qwen_image", "vmoba_attn"),
        pytest.param("hunyuan_video", "sparse_video_gen_2_attn", marks=pytest.mark.slow),
        pytest.param("qwen_image", "video_sparse_attn", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:.*proj_l")
def test_a_sparse_method_on_some_heads_attends_as_on_all(two_ranks, tiny_pipeline, family, backend):
    call = (tiny_pipeline(family), family, backend, SMALL[backend], 2)
    for want, got, densities in two_ranks.run(Mesh(ulysses=2), pipelines.sparse, *call):
        assert (got - want).abs().max() <= TOLERANCE
        assert densities
        assert min(densities) < 1.0


@pytest.mark.slow_cases("hunyuan_video-video_sparse_attn", "wan-sla_attn")
@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("wan", "sliding_tile_attn"),
        ("wan", "sla_attn"),
        ("hunyuan_video", "video_sparse_attn"),
        pytest.param("flux", "sliding_tile_attn", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:.*proj_l")
def test_a_sparse_method_attends_in_a_ring_as_alone(two_ranks, tiny_pipeline, family, backend):
    call = (tiny_pipeline(family), family, backend, SMALL[backend], 2)
    for want, got, densities in two_ranks.run(Mesh(ring=2), pipelines.sparse, *call):
        assert (got - want).abs().max() <= TOLERANCE
        assert densities
        assert min(densities) < 1.0


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("wan", Mesh(ulysses=2)),
        ("wan", Mesh(ring=2)),
        ("wan", Mesh(cfg=2)),
        ("cogvideox", Mesh(cfg=2)),
        ("hunyuan_video", Mesh(ring=2)),
    ],
    ids=str,
)
def test_layers_that_miss_a_bound_are_dense_on_all_ranks(
    two_ranks, tiny_pipeline, stock_latents, family, mesh
):
    # Where ranks compute other branches, what is found of one branch counts for both.
    bounds = (1e9, 1e-6) if mesh.cfg > 1 else (1e-6, 1e-6)
    backend = "video_sparse_attn"
    call = (tiny_pipeline(family), family, backend, SMALL[backend], bounds)
    (latents, missed), (others, same) = two_ranks.run(mesh, pipelines.guarded, *call)
    assert {miss.layer for miss in missed} == set(range(4 if family == "hunyuan_video" else 2))
    assert missed == same
    assert torch.equal(latents, others)
    assert (latents - stock_latents(family)).abs().max() <= 1e-3


@pytest.fixture
def trained(tiny_pipeline, tmp_path):
    """A pipeline folder with the gates and projections that sparse methods train."""
    folder = shutil.copytree(tiny_pipeline("wan"), tmp_path / "wan")
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(5)
    for block in range(2):
        for name, size in (("to_gate_compress", 128), ("attn1.proj_l", 32)):
            weight = torch.randn(size, size, generator=generator) / size**0.5
            tensors[f"blocks.{block}.{name}.weight"] = weight
            tensors[f"blocks.{block}.{name}.bias"] = torch.full((size,), 0.5)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.mark.slow_cases("sla_attn", "video_sparse_attn")
@pytest.mark.parametrize("backend", ["video_sparse_attn", "sla_attn"])
def test_gates_and_projections_of_a_checkpoint_count_on_every_rank(
    two_ranks, tiny_pipeline, trained, backend
):
    config = SMALL[backend]
    untrained = two_ranks.run(
        Mesh(ulysses=2), pipelines.sparse, tiny_pipeline("wan"), "wan", backend, config, 2
    )
    results = two_ranks.run(Mesh(ulysses=2), pipelines.sparse, trained, "wan", backend, config, 2)
    for (want, got, _), (other, _, _) in zip(results, untrained, strict=True):
        assert (got - want).abs().max() <= TOLERANCE
        assert (other - want).abs().max() > 1e-2
