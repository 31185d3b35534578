"""A comparison on a GPU: its events, its memory, and the rows that are recomputed."""

import pytest
import torch

import multimodal_gen
from multimodal_gen.runtime.comparison.record import Report
from multimodal_gen.runtime.distributed.groups import parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.generator.attention_check import exact_rows, row_errors, sample_rows
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.sparse import method
from multimodal_gen.testing.processes import World
from multimodal_gen.testing.tiny_models import FAMILIES

pytestmark = pytest.mark.gpu


def test_recomputed_rows_agree_with_every_exact_kernel_of_this_gpu() -> None:
    q, k, v = (torch.randn(1, 3000, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    layer, rows = LocalAttention(4, 128), sample_rows(3000, seed=0, device="cuda")
    (truth,) = exact_rows(layer, AttentionCall(q, k, v), rows, (v,))
    l1, l2, cosine = row_errors(layer(q, k, v)[:, rows.cuda()], truth)
    assert truth.dtype == torch.float64
    assert float(l1.max()) < 0.01
    assert float(l2.max()) < 0.01
    assert float(cosine.min()) > 0.9999


def test_a_comparison_measures_time_memory_and_layers(tmp_path) -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("imageio_ffmpeg")
    family = FAMILIES["wan"]
    pipe = family.build(0).to("cuda", torch.bfloat16)
    report = multimodal_gen.compare(
        pipe,
        prompts="a fox",
        backends="video_sparse_attn:topk=1,dense_above=1;sage_attn",
        output=tmp_path / "out",
        height=family.height,
        width=family.width,
        num_frames=family.num_frames,
        num_inference_steps=3,
        page=False,
    )
    assert report.floor, report.notes
    for run in report.runs:
        assert run.status == "done", run.message
        assert run.cost is not None
        assert 0 < run.cost.attention_share < 1
        assert 0 < run.cost.peak_memory <= report.peak_memory
        assert run.layers
    assert max(error for run in report.floor for x in run.layers for error in x.relative_l2) < 0.02
    sparse, quantised = report.candidates
    assert sparse.cost.density < 1
    assert sparse.masks
    assert quantised.cost.density == 1


def compare(output: str, failing: str = "") -> Report:
    """Compare a tiny Wan; the first candidate runs out of memory on the ranks in `failing`."""
    attend = method.attend_locally

    def out_of_memory(router, settings, call, context):
        groups = parallel_groups()
        rank = 0 if groups is None else groups.rank
        if settings.topk == 1 and str(rank) in failing and context.current_timestep == 1:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return attend(router, settings, call, context)

    family = FAMILIES["wan"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(method, "attend_locally", out_of_memory)
        return multimodal_gen.compare(
            family.build(0).to("cuda", torch.bfloat16),
            prompts="a fox",
            backends="video_sparse_attn:topk=1,dense_above=1;video_sparse_attn:topk=2,dense_above=1",
            output=output,
            height=family.height,
            width=family.width,
            num_frames=family.num_frames,
            num_inference_steps=3,
            replayed_steps=0 if failing else 3,
            page=False,
        )


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    pytest.importorskip("diffusers")
    pytest.importorskip("imageio_ffmpeg")
    folder = tmp_path_factory.mktemp("gpus")
    with World(2, folder, device_type="cuda", timeout=300.0) as world:
        yield world


@pytest.mark.multi_gpu
@pytest.mark.parametrize("mesh", [Mesh(ulysses=2), Mesh(ring=2), Mesh(cfg=2)], ids=str)
def test_two_gpus_replay_the_layers_of_one(mesh, two_gpus, tmp_path) -> None:
    alone = compare(str(tmp_path / "alone"))
    first, second = two_gpus.run(mesh, compare, str(tmp_path / "shared"))
    assert first == second
    for several, one in zip(first.runs, alone.runs, strict=True):
        assert several.status == one.status == "done", several.message
        found = {(x.name, x.step, x.branch): x for x in several.layers}
        wanted = {(x.name, x.step, x.branch): x for x in one.layers}
        assert found.keys() == wanted.keys()
        for place, layer in found.items():
            assert layer.relative_l2 == pytest.approx(wanted[place].relative_l2, rel=0.1, abs=0.01)
            assert layer.kept_mass == pytest.approx(wanted[place].kept_mass, abs=0.05)
        assert several.cost.peak_memory > 0


@pytest.mark.multi_gpu
@pytest.mark.parametrize("mesh", [Mesh(ulysses=2), Mesh(cfg=2)], ids=str)
def test_gpus_that_run_out_of_memory_together_go_on_with_the_next_backend(
    mesh, two_gpus, tmp_path
) -> None:
    report, _ = two_gpus.run(mesh, compare, str(tmp_path / "out"), "01")
    failed, ran = report.candidates
    assert (failed.status, ran.status) == ("out of memory", "done")
