"""Comparisons of a tiny Wan on two ranks: what one process finds, and failures that all hear of."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import multimodal_gen
from multimodal_gen.runtime.comparison.record import LayerErrors, Report, Run
from multimodal_gen.runtime.distributed.groups import parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.layers.attention.sparse import method
from multimodal_gen.testing.tiny_models import FAMILIES

TILES = "sliding_tile_attn:window=[1,3,1],skip_time_steps=0,tile_size=[1,2,2]"
TOO_LARGE = "sliding_tile_attn:window=[1,1,1],skip_time_steps=0,tile_size=[1,2,2]"
FLOOR = "video_sparse_attn:sparsity=0"

ULYSSES, RING, CFG = Mesh(ulysses=2), Mesh(ring=2), Mesh(cfg=2)


def compare(folder: str, output: str, failing: str = "", **changes: Any) -> Report:
    """Compare; the last candidate fails on the ranks that `failing` names, at the step behind."""
    from diffusers import DiffusionPipeline

    attend, attend_ring = method.attend_locally, method.attend_ring

    def fail(settings: Any, context: Any) -> None:
        groups = parallel_groups()
        ranks, _, step = failing.partition("@")
        mine = "0" if groups is None else str(groups.rank)
        fails = getattr(settings, "window", None) == (1, 1, 1) and mine in ranks
        if fails and context.current_timestep >= int(step):
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    def failing_attend(router: Any, settings: Any, call: Any, context: Any) -> torch.Tensor:
        fail(settings, context)
        return attend(router, settings, call, context)

    def failing_ring(router: Any, settings: Any, inputs: Any, context: Any) -> torch.Tensor:
        fail(settings, context)
        return attend_ring(router, settings, inputs, context)

    family = FAMILIES["wan"].generate_kwargs
    given: dict[str, Any] = {
        "backends": [TILES],
        "floor": FLOOR,
        "prompts": family["prompt"],
        "num_inference_steps": 2,
        "replayed_steps": 2,
        "page": False,
        **{name: family[name] for name in ("height", "width", "num_frames")},
        **changes,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(method, "attend_locally", failing_attend)
        patch.setattr(method, "attend_ring", failing_ring)
        pipe = DiffusionPipeline.from_pretrained(folder)
        return multimodal_gen.compare(pipe, output=output, **given)


def assert_alike(several: Report, one: Report) -> None:
    """Check that figures differ by rounding alone."""
    assert [run.status for run in several.runs] == [run.status for run in one.runs]
    for found, wanted in zip(several.runs, one.runs, strict=True):
        _assert_layers_alike(found, wanted)
        steps = [len(clip.step_seconds) for clip in found.generations]
        assert steps == [len(clip.step_seconds) for clip in wanted.generations]
        for clip, alone in zip(found.generations, wanted.generations, strict=True):
            assert clip.latents == pytest.approx(alone.latents, abs=1e-4)
            if clip.frames is not None and alone.frames is not None:
                assert min(clip.frames.psnr, 60) == pytest.approx(
                    min(alone.frames.psnr, 60), abs=0.1
                )
                assert clip.frames.ssim == pytest.approx(alone.frames.ssim, abs=1e-3)
        if found.cost is not None and wanted.cost is not None:
            assert found.cost.density == pytest.approx(wanted.cost.density)


def _assert_layers_alike(found: Run, wanted: Run) -> None:
    def by_place(run: Run) -> dict[tuple[Any, ...], LayerErrors]:
        return {(x.component, x.name, x.step, x.branch): x for x in run.layers}

    several, one = by_place(found), by_place(wanted)
    assert several.keys() == one.keys()
    for place, layer in several.items():
        alone = one[place]
        assert layer.relative_l2 == pytest.approx(alone.relative_l2, rel=1e-3, abs=1e-5)
        assert layer.relative_l1 == pytest.approx(alone.relative_l1, rel=1e-3, abs=1e-5)
        assert layer.cosine == pytest.approx(alone.cosine, abs=1e-5)
        assert layer.kept_mass == pytest.approx(alone.kept_mass, abs=1e-5)
        assert layer.kept_mass_source == alone.kept_mass_source
        assert layer.density == pytest.approx(alone.density)
        assert layer.clips == alone.clips
    pictures = {(m.layer, m.head, m.step): m for m in found.masks}
    assert [*pictures] == [(m.layer, m.head, m.step) for m in wanted.masks]
    for mask in wanted.masks:
        shown = torch.tensor(pictures[mask.layer, mask.head, mask.step].kept)
        torch.testing.assert_close(shown, torch.tensor(mask.kept), atol=1e-3, rtol=0.02)


@pytest.fixture(scope="module")
def alone(tiny_pipeline: Any, tmp_path_factory: Any) -> Callable[[int], Report]:
    """Return what one process finds in so many steps."""

    @cache
    def make(steps: int) -> Report:
        out = tmp_path_factory.mktemp("alone") / "out"
        return compare(str(tiny_pipeline("wan")), str(out), num_inference_steps=steps)

    return make


@pytest.mark.parametrize(
    ("mesh", "steps"),
    [
        (ULYSSES, 1),
        pytest.param(RING, 2, marks=pytest.mark.slow),
        pytest.param(CFG, 2, marks=pytest.mark.slow),  # in the first step ranks share nothing
    ],
    ids=["ulysses", "ring", "cfg"],
)
def test_two_ranks_find_what_one_process_finds(
    mesh: Mesh,
    steps: int,
    two_ranks: Any,
    tiny_pipeline: Any,
    tmp_path: Path,
    alone: Callable[[int], Report],
) -> None:
    folder, out = str(tiny_pipeline("wan")), tmp_path / "out"
    changes = {"num_inference_steps": steps}
    first, second = two_ranks.run(mesh, compare_with, folder, str(out), "", changes)
    assert first == second
    assert_alike(first, alone(steps))
    assert first.environment.num_ranks == 2
    assert first.environment.mesh == {"cfg": mesh.cfg, "ring": mesh.ring, "ulysses": mesh.ulysses}
    assert (out / "report.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "failing"), [(ULYSSES, "01@1"), (RING, "01@1"), (CFG, "1@1"), (CFG, "0@1")]
)
def test_out_of_memory_on_a_rank_is_a_row_and_the_next_backend_runs(
    mesh: Mesh, failing: str, two_ranks: Any, tiny_pipeline: Any, tmp_path: Path
) -> None:
    out, changes = str(tmp_path / "out"), {"backends": [TOO_LARGE, TILES], "replayed_steps": 0}
    folder = str(tiny_pipeline("wan"))
    first, second = two_ranks.run(mesh, compare_with, folder, out, failing, changes)
    assert first == second
    failed, ran = first.candidates
    assert failed.status == "out of memory"
    rank = failing[0]
    assert failed.message == f"out of memory: rank {rank}: tried to allocate 2 GiB"
    assert (ran.status, len(ran.generations)) == ("done", 1)
    # What is left is gone on with, also where memory has been found meanwhile.
    again, _ = two_ranks.run(mesh, compare_with, folder, out, "", {**changes, "resume": True})
    assert [run.status for run in again.candidates] == ["done", "done"]
    assert again.candidates[1].generations == ran.generations


@pytest.mark.slow
def test_a_replay_that_fails_on_one_rank_is_left_out(
    two_ranks: Any, tiny_pipeline: Any, tmp_path: Path
) -> None:
    changes = {"backends": [TOO_LARGE, TILES]}
    folder, out = str(tiny_pipeline("wan")), str(tmp_path / "out")
    first, _ = two_ranks.run(CFG, compare_with, folder, out, "1@1", changes)
    failed, ran = first.candidates
    assert failed.status == "out of memory"
    assert {layer.step for layer in failed.layers} == {0, 1}  # what the other rank found
    assert {len(layer.relative_l2) for layer in failed.layers} == {4}
    assert {layer.step for layer in ran.layers} == {0, 1}


def compare_with(folder: str, output: str, failing: str, changes: dict[str, Any]) -> Report:
    """Do as `compare`, in a form that other processes can be asked for."""
    return compare(folder, output, failing, **changes)
