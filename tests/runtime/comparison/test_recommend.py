"""Which configuration is recommended, why, and that its file is taken as it is."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from multimodal_gen.cli.batch import asked_for, jobs_of
from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.comparison.configurations import EXACT_KERNELS, read_configurations
from multimodal_gen.runtime.comparison.recommend import (
    GRID,
    Limits,
    attention_config,
    recommend,
    write_config,
)
from multimodal_gen.runtime.comparison.record import (
    Cost,
    Environment,
    FrameMetrics,
    Generation,
    Model,
    Report,
    Run,
)
from multimodal_gen.runtime.comparison.verdict import judged
from multimodal_gen.runtime.layers.attention.config import config_as_dict
from multimodal_gen.runtime.layers.attention.scope import scope_from, scope_from_args
from multimodal_gen.runtime.platforms import AttentionBackendEnum


def run(name: str, seconds: float, *psnrs: float, **fields: Any) -> Run:
    """Return a run with a time per step, and a clip for each PSNR."""
    vmaf = fields.pop("vmaf", 50.0)  # more than PSNR
    backend = AttentionBackendEnum.parse(fields.setdefault("backend", "sage_attn"))
    clips = tuple(
        Generation(
            prompt=0,
            seed=seed,
            seconds=10 * seconds,
            latents=(1 / psnr,),
            frames=FrameMetrics(psnr=psnr, vmaf=vmaf and psnr + vmaf, constant=psnr < 10),
        )
        for seed, psnr in enumerate(psnrs)
    )
    cost = Cost(
        step_seconds=seconds,
        generation_seconds=10 * seconds,
        warm_up_seconds=0,
        peak_memory=None,
        density=fields.pop("density", 0.3 if backend.is_sparse else 1),
        attention_share=0.5,
    )
    values = {"configuration": f"{name}:x=1", "parameters": {}, **fields}
    return Run(name=name, generations=clips, cost=cost, **values)


def reference(seconds: float) -> Run:
    """Return the run that others are compared with, which has no figures of frames."""
    dense = run("torch_sdpa", seconds, 1.0, 1.0)
    clips = tuple(replace(clip, frames=None, latents=()) for clip in dense.generations)
    return replace(dense, generations=clips)


def report(*candidates: Run, seconds: float = 1.0) -> Report:
    return judged(
        Report(
            created="2026-01-01T00:00:00Z",
            environment=Environment(device="cpu", versions={}, multimodal_gen="0"),
            model=Model(path="m", pipeline="P", kind="video", dtype="float32", identity="0"),
            settings={},
            prompts=("a fox",),
            seeds=(0, 1),
            reference=reference(seconds),
            floor=(run("fa", 0.9, 50.0, 50.0),),
            candidates=candidates,
        )
    )


FAST = run("fast", 0.3, 20.0, 22.0)
MIDDLE = run("middle", 0.5, 34.0, 36.0)
SLOW = run("slow", 0.8, 49.0, 49.0)
BROKEN = run("broken", 0.1, 9.0, 45.0)


def test_the_fastest_run_that_meets_every_limit_is_recommended() -> None:
    found = recommend(report(BROKEN, SLOW, MIDDLE, FAST), Limits(min_psnr=30, min_vmaf=80))
    assert found.run is not None
    assert (found.run.name, found.nearest) == ("middle", None)
    assert found.reasons == (
        "middle:x=1 is the fastest that is good enough (PSNR 35.0 dB, VMAF 85.0): 5 s per "
        "generation, where torch_sdpa takes 10 s; 2.00 [2.00, 2.00] times its speed, paired by "
        "clip.",
        "broken is faster: it is broken: A frame of one colour in 1 of 2 clips.",
        "fast is faster: PSNR is 21.0 dB, not at least 30.0 dB; VMAF is 71.0, not at least 80.0.",
    )


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"min_psnr": 35.0}, "middle"),
        ({"min_psnr": 35.01}, "slow"),
        ({"min_vmaf": 71.0}, "fast"),
        ({"max_error": 0.03}, "middle"),
        ({"max_error": 0.021}, "slow"),
        ({}, "slow"),
    ],
)
def test_limits_are_met_at_their_boundary_by_the_mean(limits: Any, name: str) -> None:
    found = recommend(report(SLOW, MIDDLE, FAST), Limits(**limits))
    assert found.run is not None
    assert found.run.name == name


def test_without_limits_it_is_what_is_within_the_noise() -> None:
    found = recommend(report(SLOW, FAST), Limits())
    assert "(within the noise of dense kernels)" in found.reasons[0]
    assert found.reasons[1] == "fast is faster: its difference is visible."


def test_where_nothing_is_good_enough_the_nearest_is_named() -> None:
    found = recommend(replace(report(BROKEN, MIDDLE, FAST), floor=()), Limits(min_psnr=40))
    assert found.run is None
    assert found.nearest is not None
    assert found.nearest.name == "middle"
    assert found.reasons == (
        "No run of this comparison is good enough: stay with torch_sdpa.",
        "middle comes nearest: PSNR is 35.0 dB, not at least 40.0 dB.",
    )
    found = recommend(replace(report(FAST, MIDDLE), floor=()), Limits())
    assert found.nearest is not None
    assert found.nearest.name == "middle"


def test_what_did_not_finish_or_has_no_figure_is_not_good_enough() -> None:
    failed = replace(FAST, status="out of memory", message="needs 90 GiB")
    assert recommend(replace(report(failed), floor=()), Limits()).nearest is None
    no_vmaf = run("image", 0.2, 60.0, 60.0, vmaf=None)
    found = recommend(replace(report(no_vmaf, SLOW), floor=()), Limits(min_vmaf=90))
    assert found.run is not None
    assert found.run.name == "slow"
    assert found.reasons[1] == "image is faster: it has no VMAF."


def test_a_sparse_method_that_was_dense_throughout_is_not_recommended() -> None:
    dense = run("sol_attn", 0.1, 60.0, 60.0, backend="sol_attn", density=1)
    for limits in (Limits(), Limits(min_psnr=40)):
        found = recommend(report(dense, SLOW), limits)
        assert found.run is not None
        assert found.run.name == "slow"
        assert found.reasons[1] == (
            "sol_attn is faster: it was dense in every call, so its figures say nothing of the "
            "method."
        )
    nearest = recommend(replace(report(dense, FAST), floor=()), Limits(min_psnr=59)).nearest
    assert nearest is not None
    assert nearest.name == "fast"


def test_an_exact_kernel_of_a_sparse_method_is_recommended_as_any_exact_kernel() -> None:
    (kernel,) = (text for text in EXACT_KERNELS if text.startswith("video_sparse_attn"))
    fields = {"backend": "video_sparse_attn", "configuration": kernel, "density": 1}
    noise = run("block_sparse", 0.6, 60.0, 60.0, **fields)
    for limits in (Limits(), Limits(min_psnr=40)):
        found = recommend(judged(replace(report(SLOW), floor=(noise,))), limits)
        assert found.run is not None
        assert found.run.name == "block_sparse"
        assert found.reasons[0].startswith(f"{kernel} is the fastest that is good enough")
    found = recommend(judged(replace(report(FAST), floor=(noise,))), Limits(min_psnr=61))
    assert found.nearest is not None
    assert found.nearest.name == "block_sparse"


def test_the_reference_is_recommended_where_it_is_faster() -> None:
    found = recommend(report(SLOW, FAST, seconds=0.4), Limits())
    assert found.run is not None
    assert found.run.name == "torch_sdpa"
    assert "nothing good enough is faster by more than chance" in found.reasons[0]
    assert [reason.split()[0] for reason in found.reasons[1:]] == ["fast"]


def test_nothing_is_recommended_beside_a_broken_reference() -> None:
    usual = report(run("sparse", 0.5, 40.0))
    clip, *others = usual.reference.generations
    broken = replace(usual.reference, generations=(replace(clip, non_finite=1), *others))
    found = recommend(replace(usual, reference=broken), Limits(min_psnr=30))
    assert (found.run, found.nearest) == (None, None)
    assert found.reasons[0].endswith("NaN or infinite values in 1 of 2 clips.")


def test_runs_are_ranked_by_a_whole_generation() -> None:
    """Of 20 dense steps of 10 s and 30 sparse ones of 2 s the median step is 2 s."""
    late, even = run("late", 2.0, 50.0, 50.0), run("even", 3.0, 50.0, 50.0)
    late, even = (
        replace(
            each,
            cost=replace(each.cost, generation_seconds=seconds),
            generations=tuple(replace(clip, seconds=seconds) for clip in each.generations),
        )
        for each, seconds in ((late, 260.0), (even, 150.0))
    )
    found = recommend(report(late, even, seconds=50.0), Limits(min_psnr=40))
    assert found.run is not None
    assert found.run.name == "fa"  # 9 s
    found = recommend(replace(report(late, even, seconds=50.0), floor=()), Limits(min_psnr=40))
    assert found.run is not None
    assert found.run.name == "even"
    assert ": 150 s per generation, where torch_sdpa takes 500 s; " in found.reasons[0]


def seconds_of(each: Run, *seconds: float) -> Run:
    pairs = zip(each.generations, seconds, strict=True)
    return replace(each, generations=tuple(replace(clip, seconds=taken) for clip, taken in pairs))


def test_what_chance_may_have_made_faster_is_not_recommended() -> None:
    """Means are 9.05 and 10 s, but only one of the two clips was faster."""
    lucky = seconds_of(run("lucky", 0.9, 50.0, 50.0), 8.1, 10.0)
    found = recommend(replace(report(lucky), floor=()), Limits(min_psnr=40))
    assert found.run is not None
    assert found.run.name == "torch_sdpa"
    # As fast as the second pass of the reference is nothing, either.
    even = run("even", 0.9, 50.0, 50.0)
    compared = replace(report(even), floor=())
    clips = tuple(replace(clip, repeat_seconds=8.5) for clip in compared.reference.generations)
    noisy = judged(replace(compared, reference=replace(compared.reference, generations=clips)))
    for each, name in ((compared, "even"), (noisy, "torch_sdpa")):
        chosen = recommend(each, Limits(min_psnr=40)).run
        assert chosen is not None
        assert chosen.name == name


def test_runs_that_are_not_told_apart_are_named_together() -> None:
    first = seconds_of(run("first", 0.5, 50.0, 50.0), 4.0, 5.0)
    second = seconds_of(run("second", 0.5, 50.0, 50.0), 5.0, 4.1)
    found = recommend(report(first, second), Limits(min_psnr=40))
    assert found.run is not None
    assert found.run.name in ("first", "torch_sdpa")
    first, second = (
        seconds_of(each, *s) for each, s in ((first, (4.0, 4.1)), (second, (4.1, 4.0)))
    )
    found = recommend(report(second, first), Limits(min_psnr=40))
    assert found.reasons[1].endswith("as fast, as far as these clips can tell.")
    assert found.run is not None
    assert {found.run.name, found.reasons[1].partition(":")[0]} == {"first", "second"}


def test_limits_must_be_numbers() -> None:
    with pytest.raises(ConfigError, match="--min-psnr must be a finite number, got nan"):
        Limits(min_psnr=math.nan)


@pytest.mark.parametrize("text", [*GRID, "torch_sdpa"])
def test_the_file_holds_what_was_run(text: str, tmp_path: Path) -> None:
    (configuration,) = read_configurations([text])
    chosen = run(
        configuration.name, 0.1, 99.0, 99.0,
        configuration=text, backend=configuration.backend, parameters=configuration.parameters,
    )  # fmt: skip
    found = recommend(report(chosen), Limits())
    assert found.run is not None
    assert (found.run.name, found.run.generations) == (chosen.name, chosen.generations)
    path = tmp_path / "attention.yaml"
    write_config(found, path)
    assert path.read_text().startswith(f"# {text} is the fastest that is good enough")
    assert yaml.safe_load(path.read_text()) == attention_config(chosen)
    scope = scope_from(attention_config=str(path))
    assert scope.default is not None
    assert scope.default.backend is not None
    assert str(scope.default.backend) == configuration.backend
    if scope.default.config is not None:
        assert config_as_dict(scope.default.config) == configuration.parameters
    assert [each.name for each in tmp_path.iterdir()] == ["attention.yaml"]


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("torch_sdpa + first_block:threshold=0.1", "torch_sdpa"),
        ("video_sparse_attn:sparsity=0.9 + first_block:threshold=0.1", "video_sparse_attn"),
    ],
)
def test_a_cache_is_part_of_what_generate_gets(text: str, backend: str, tmp_path: Path) -> None:
    (configuration,) = read_configurations([text])
    chosen = run(
        configuration.name, 0.1, 99.0, 99.0,
        configuration=text, backend=configuration.backend, parameters=configuration.parameters,
    )  # fmt: skip
    found = recommend(report(chosen), Limits())
    assert found.as_dict()["cache"] == "first_block:threshold=0.1"
    assert "It takes --cache first_block:threshold=0.1" in found.reasons[-1]
    path = tmp_path / "generate.yaml"
    write_config(found, path)
    assert "# It takes --cache first_block:threshold=0.1" in path.read_text()
    typed = {"config": str(path), "model_path": "m", "prompt": ["a fox"]}
    (job,) = jobs_of(asked_for(typed))
    assert job.args.cache == "first_block:threshold=0.1"
    scope = scope_from_args(job.args)
    assert scope.default is not None
    assert str(scope.default.backend) == backend
    if scope.default.config is not None:
        assert config_as_dict(scope.default.config) == configuration.parameters
    with pytest.raises(ConfigError, match="attention_config"):  # nothing runs without the cache
        scope_from(attention_config=str(path))


def test_a_configuration_that_is_no_more_is_not_written(tmp_path: Path) -> None:
    gone = run("sliding_tile_attn", 0.1, 99.0, 99.0, parameters={"gone": 1})
    with pytest.raises(ConfigError, match="gone"):
        write_config(recommend(report(gone), Limits()), tmp_path / "attention.yaml")
    assert not list(tmp_path.iterdir())
