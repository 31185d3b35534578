"""Whole comparisons of tiny pipelines on the CPU."""

import dataclasses
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import multimodal_gen
from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.comparison import perceptual
from multimodal_gen.runtime.comparison import run as comparing
from multimodal_gen.runtime.comparison.record import Report, Run, read_record
from multimodal_gen.runtime.layers.attention.sparse import method
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from multimodal_gen.settings import as_plain
from multimodal_gen.testing.tiny_models import FAMILIES

FLOOR = "video_sparse_attn:sparsity=0,dense_above=1"
CACHED = "torch_sdpa + first_block:threshold=10"
EVERYTHING = 99  # tiles of a window, along an axis


def tiles(height: int = EVERYTHING, width: int = EVERYTHING, time: int = EVERYTHING) -> str:
    """Return a configuration of windows, which leave nothing out where they are large."""
    parameters = f"window=[{time},{height},{width}],skip_time_steps=0,tile_size=[1,2,2]"
    return f"sliding_tile_attn:{parameters}"


# What the patched backend does to a window that leaves nothing out, by its size along time.
EXACT, SCALED, DROPPED, NOT_A_NUMBER, TOO_LARGE = (
    tiles(),
    *(tiles(time=n) for n in (98, 97, 96, 95)),
)


@pytest.fixture(scope="module")
def broken_backend() -> Iterator[None]:
    """Break windows of some sizes."""
    attend = method.attend_locally

    def broken(router: Any, settings: Any, call: Any, *rest: Any) -> torch.Tensor:
        kind = getattr(settings, "window", (0,))[0]
        if kind == 95:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        out = attend(router, settings, call, *rest)
        if kind == 98:
            out = 1.2 * out
        elif kind == 97:
            first = call.layout.video.start
            out[:, first : first + 4] = 0.0
        elif kind == 96:
            out[0, 0, 0, 0] = torch.nan
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(method, "attend_locally", broken)
        yield


def loaded(folder: Path) -> Any:
    from diffusers import DiffusionPipeline

    return DiffusionPipeline.from_pretrained(folder)


def arguments(family: str, **changes: Any) -> dict[str, Any]:
    """Return what a tiny family is compared with."""
    kwargs = FAMILIES[family].generate_kwargs
    sizes = {name: kwargs[name] for name in ("height", "width", "num_frames") if name in kwargs}
    return {
        "prompts": kwargs["prompt"],
        "num_inference_steps": 2,
        "floor": FLOOR,
        "replayed_steps": 2,
        "page": False,
        **sizes,
        **changes,
    }


def found(report: Report, configuration: str) -> Run:
    (run,) = [each for each in report.runs if each.configuration == configuration]
    return run


def generated(lines: list[str]) -> list[str]:
    """Return which generations the lines of progress tell of."""
    return [line.partition(":")[0] for line in lines if line.startswith("[")]


def processors(pipe: Any) -> dict[str, Any]:
    return dict(pipe.transformer.attn_processors)


@pytest.fixture(scope="module")
def wan(tiny_pipeline: Any, tmp_path_factory: Any, broken_backend: None) -> tuple[Report, Path]:
    """Return a comparison of backends of which some are broken, and its folder."""
    pipe, folder = loaded(tiny_pipeline("wan")), tmp_path_factory.mktemp("comparison") / "wan"
    before = processors(pipe)
    configurations = [EXACT, SCALED, DROPPED, NOT_A_NUMBER, TOO_LARGE, tiles(1, 3), CACHED]
    report = multimodal_gen.compare(
        pipe, backends=configurations, output=folder, **arguments("wan")
    )
    after = processors(pipe)
    assert all(after[name] is before[name] for name in before)
    assert vars(pipe).keys().isdisjoint(("progress_bar", "_progress_bar_config"))
    assert "step" not in vars(pipe.scheduler)
    return report, folder


def test_exact_against_exact_is_within_the_noise(wan: tuple[Report, Path]) -> None:
    report, _ = wan
    run = found(report, EXACT)
    assert run.verdict is not None
    assert run.verdict.word == "within the noise of dense kernels", run.verdict
    assert [each.verdict.word for each in report.floor] == ["within the noise of dense kernels"]
    assert max(error for layer in run.layers for error in layer.relative_l2) < 1e-5
    assert {layer.density for layer in run.layers} == {1.0}
    assert max(run.generations[0].latents) < 1e-4


def test_a_cache_is_one_more_configuration(wan: tuple[Report, Path]) -> None:
    report, _ = wan
    run = found(report, CACHED)
    assert (run.status, run.name, run.backend) == ("done", "torch_sdpa+first_block", "torch_sdpa")
    assert run.verdict is not None
    assert run.verdict.word != "within the noise of dense kernels"
    text = "\n".join(run.attention)
    assert "did not run: transformer.self, layers 1, in 2 of 4 calls of the model" in text
    assert "note: transformer: FirstBlockCacheConfig(threshold=10.0) was enabled" in text
    assert "did not run" not in "\n".join(found(report, EXACT).attention)


@pytest.mark.parametrize(
    ("configuration", "words"),
    [
        (SCALED, {"visible", "broken"}),
        (DROPPED, {"visible", "broken"}),
        (NOT_A_NUMBER, {"broken"}),
    ],
)
def test_a_backend_that_is_broken_is_not_within_the_noise(
    wan: tuple[Report, Path], configuration: str, words: set[str]
) -> None:
    run = found(wan[0], configuration)
    assert run.status == "done"
    assert run.verdict is not None
    assert run.verdict.word in words


def test_errors_by_layer_tell_what_is_wrong(wan: tuple[Report, Path]) -> None:
    scaled = found(wan[0], SCALED).layers
    assert {round(error, 4) for layer in scaled for error in layer.relative_l2} == {0.2}
    assert {round(cosine, 6) for layer in scaled for cosine in layer.cosine} == {1.0}
    dropped = found(wan[0], DROPPED).layers
    assert all(0.01 < error < 1 for layer in dropped for error in layer.relative_l2)
    broken = found(wan[0], NOT_A_NUMBER)
    assert all(np.isnan(layer.relative_l2[0]) for layer in broken.layers)
    assert all(np.isfinite(layer.relative_l2[1]) for layer in broken.layers)
    assert broken.generations[0].non_finite > 0


def test_out_of_memory_is_a_row(wan: tuple[Report, Path]) -> None:
    run = found(wan[0], TOO_LARGE)
    assert (run.status, run.generations, run.cost) == ("out of memory", (), None)
    assert "tried to allocate 2 GiB" in run.message
    assert run.verdict is not None
    assert run.verdict.word == "failed"


def test_a_sparse_method_has_densities_masses_and_pictures(wan: tuple[Report, Path]) -> None:
    report, _ = wan
    run = found(report, tiles(1, 3))
    assert run.cost is not None
    assert run.cost.density == pytest.approx(run.layers[0].density)
    assert 0 < run.cost.density < 1
    assert all(0 < mass < 1 for layer in run.layers for mass in layer.kept_mass)
    assert {layer.kept_mass_source for layer in run.layers} == {"plan"}
    steps = {(layer.step, layer.layer, layer.branch) for layer in run.layers}
    assert steps == {(s, n, b) for s in (0, 1) for n in (0, 1) for b in ("cond", "uncond")}
    assert {mask.layer for mask in run.masks} == {1}
    for mask in run.masks:
        kept, exact = np.array(mask.kept), np.array(mask.exact)
        assert kept.sum() == pytest.approx(1, abs=0.02)
        assert exact.sum() == pytest.approx(1, abs=0.02)
        # Rows of the query's own tiles alone, at all times.
        height = mask.query[1] // 2 * 2
        rows = np.flatnonzero(kept.sum(axis=(0, 2)))
        assert set(rows * mask.cell[1]) <= {height, height + 1}
        assert (exact > 0).all()
    assert found(report, EXACT).masks == ()


def test_costs_and_files_are_those_of_the_run(wan: tuple[Report, Path]) -> None:
    report, folder = wan
    for run in (report.reference, found(report, EXACT)):
        (generation,) = run.generations
        assert len(generation.step_seconds) == 2
        assert generation.seconds > sum(generation.step_seconds)
        assert run.cost is not None
        assert 0 < run.cost.attention_share < 1
        assert run.cost.warm_up_seconds > 0
        frames = np.load(folder / generation.frames_path)
        assert frames.dtype == np.uint8
        assert frames.shape == (report.settings["num_frames"], *frames.shape[1:3], 3)
        assert (folder / generation.preview_path).stat().st_size > 100
    assert report.reference.generations[0].latents == ()
    assert as_plain(read_record(Report, folder / "report.json")) == as_plain(report)


def test_the_reference_is_not_changed_by_what_is_measured_beside_it(
    wan: tuple[Report, Path], tiny_pipeline: Any
) -> None:
    report, folder = wan
    names = ("height", "width", "num_frames", "num_inference_steps")
    with multimodal_gen.apply(pipe := loaded(tiny_pipeline("wan")), attention_backend="torch_sdpa"):
        frames = pipe(
            prompt=report.prompts[0],
            generator=torch.Generator().manual_seed(0),
            output_type="np",
            **{name: report.settings[name] for name in names},
        ).frames[0]
    kept = np.load(folder / report.reference.generations[0].frames_path)
    assert np.array_equal(kept, (frames.clip(0, 1) * 255).round().astype("uint8"))


class Stop(BaseException):
    """Ends a comparison, as Ctrl-C does."""


def test_a_comparison_that_was_interrupted_goes_on(tiny_pipeline: Any, tmp_path: Path) -> None:
    pipe = loaded(tiny_pipeline("flux"))
    given = arguments(
        "flux", backends=EXACT, output=tmp_path / "out", num_inference_steps=1, replayed_steps=1
    )
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if line.startswith("[2/4]"):
            raise Stop

    with pytest.raises(Stop):
        multimodal_gen.compare(pipe, **given, say=say)
    assert lines[0] == "warming up"
    assert "left" in lines[1]
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.*")}
    assert not any(path.name == "report.json" for path in made)
    with pytest.raises(UsageError, match=r"--output must be a new or empty folder.*--resume"):
        multimodal_gen.compare(pipe, **given)
    # What was half-written when a process was killed is made again.
    records = sorted((tmp_path / "out" / "records").glob("*.json"))
    (clip,) = (tmp_path / "out" / "clips").glob("block_sparse-p0*.npy")
    clip.write_bytes(clip.read_bytes()[:1000])  # as a full disk leaves it
    (tmp_path / "out" / "clips" / ".compare-x.partial.npy").write_bytes(b"half")
    (tmp_path / "out" / "records" / f"{'0' * 24}.json").write_text("{")
    lines.clear()
    report = multimodal_gen.compare(pipe, **given, resume=True, say=lines.append)
    assert generated(lines) == [
        "[1/3] block_sparse, prompt 1, seed 0",
        "[2/3] sliding_tile_attn, prompt 1, seed 0",
        "[3/3] torch_sdpa again, prompt 1, seed 0",
    ]
    assert [run.status for run in report.runs] == ["done"] * 3
    assert not list((tmp_path / "out").rglob(".*"))
    kept = [path for path in records if path.stat().st_mtime_ns == made[path]]
    assert len(kept) == len(records) - 1
    lines.clear()
    again = multimodal_gen.compare(pipe, **given, resume=True, say=lines.append)
    assert lines == []
    same = {"created": "", "seconds": 0.0}
    assert as_plain(dataclasses.replace(again, **same)) == as_plain(
        dataclasses.replace(report, **same)
    )


def test_a_comparison_goes_on_with_its_prompts_at_other_places(
    tiny_pipeline: Any, tmp_path: Path
) -> None:
    pipe, lines = loaded(tiny_pipeline("flux")), list[str]()
    given = arguments("flux", backends=tiles(1, 1), output=tmp_path / "out", replayed_steps=0)
    given |= {"num_inference_steps": 1, "prompts": ["a fox", "a dog"]}
    before = found(multimodal_gen.compare(pipe, **given), tiles(1, 1)).generations
    given["prompts"] = ["a dog", "a fox"]
    report = multimodal_gen.compare(pipe, **given, resume=True, say=lines.append)
    assert lines == []
    after = found(report, tiles(1, 1)).generations
    assert [each.prompt for each in after] == [0, 1]
    assert [each.frames for each in after] == [each.frames for each in reversed(before)]
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, shift=9.0)
    multimodal_gen.compare(pipe, **given, resume=True, say=lines.append)
    assert len(generated(lines)) == 8  # nothing of another scheduler counts


def test_every_clip_runs_on_all_backends_before_the_next(
    tiny_pipeline: Any, tmp_path: Path
) -> None:
    """Who starts changes, a failure is left out of the rest, and the reference runs twice."""
    lines: list[str] = []
    multimodal_gen.compare(
        loaded(tiny_pipeline("flux")),
        backends=[tiles(1, 1), tiles(1, 3)],
        output=tmp_path / "out",
        say=lines.append,
        **arguments(
            "flux", num_inference_steps=1, replayed_steps=0, prompts=["a fox"], seeds=[0, 1]
        ),
    )
    kernels = ("block_sparse", "sliding_tile_attn", "sliding_tile_attn-2")
    order = ["torch_sdpa", *kernels, "torch_sdpa again"]
    then = ["torch_sdpa", *kernels[1:], kernels[0], "torch_sdpa again"]
    assert generated(lines) == [
        f"[{at + 1}/10] {name}, prompt 1, seed {at // 5}" for at, name in enumerate([*order, *then])
    ]
    report = read_record(Report, tmp_path / "out" / "report.json")
    assert all(each.repeat_seconds for each in report.reference.generations)
    assert report.reference.speed is not None
    assert report.reference.speed.count == 2
    assert all(run.speed is not None and run.speed.low is not None for run in report.candidates)
    assert "psnr" in report.candidates[0].differences


def test_scores_of_every_clip_are_in_the_report(tiny_pipeline: Any, tmp_path: Path) -> None:
    asked: list[Any] = []

    def brightness(video: Any, prompt: str) -> Any:
        asked.append((video.shape[0], video.shape[-1], prompt))
        return video.mean() / 255

    given = arguments("flux", backends=tiles(1, 1), output=tmp_path / "out", replayed_steps=0)
    given |= {"num_inference_steps": 1, "prompts": ["a fox"], "seeds": (0, 1)}
    pipe = loaded(tiny_pipeline("flux"))
    report = multimodal_gen.compare(pipe, **given, score=brightness)
    assert asked == [(1, 3, "a fox")] * 6
    assert report.score is not None
    assert report.score.endswith("brightness")
    for run in report.runs:
        for clip in run.generations:
            frames = np.load(tmp_path / "out" / clip.frames_path)
            assert clip.score == pytest.approx(frames.mean() / 255)
    score = report.candidates[0].differences["score"]
    pairs = zip(report.candidates[0].generations, report.reference.generations, strict=True)
    assert score.mean == pytest.approx(np.mean([one.score - other.score for one, other in pairs]))
    # Another function needs no generation; one that fails leaves all as it was.
    lines: list[str] = []
    again = {**given, "resume": True, "say": lines.append}
    assert multimodal_gen.compare(pipe, **again).score is None
    with pytest.raises(UsageError, match=r"score must return a number in \[0, 1\] .* got 7 from"):
        multimodal_gen.compare(pipe, **again, score=lambda video, prompt: 7)
    assert generated(lines) == []


def test_a_score_that_fails_is_known_with_the_first_clip(
    tiny_pipeline: Any, tmp_path: Path
) -> None:
    def bad(video: Any, prompt: str) -> float:
        raise ZeroDivisionError("by zero")

    lines: list[str] = []
    with pytest.raises(UsageError, match=r"got ZeroDivisionError: by zero from .*bad"):
        multimodal_gen.compare(
            loaded(tiny_pipeline("flux")),
            backends=EXACT,
            output=tmp_path / "out",
            say=lines.append,
            score=bad,
            **arguments("flux", num_inference_steps=1, replayed_steps=0, seeds=(0, 1)),
        )
    assert generated(lines) == []


def scored_runs(report: Report) -> list[Any]:
    return [report.reference, *(each for each in report.candidates if each.status == "done")]


def test_clips_that_are_written_beside_the_next_run_are_the_same(
    tiny_pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, keep = comparing.Comparison.run, comparing.Results.keep

    def beside(self: comparing.Comparison) -> Report:
        self._writer = comparing._Writer(in_background=True)  # as on a GPU
        return whole(self)

    def failing(self: Any, configuration: Any, *args: Any, **kwargs: Any) -> Any:
        if configuration.text == SCALED:
            raise OSError("no space left")
        return keep(self, configuration, *args, **kwargs)

    monkeypatch.setattr(comparing.Comparison, "run", beside)
    monkeypatch.setattr(comparing.Results, "keep", failing)
    report = multimodal_gen.compare(
        loaded(tiny_pipeline("flux")),
        backends=[EXACT, SCALED, tiles(1, 1)],
        output=tmp_path / "out",
        score=lambda image, prompt: float(image.mean()) / 255,
        **arguments("flux", num_inference_steps=1, replayed_steps=None, floor=()),
    )
    assert report.floor == ()
    assert all(0 < each.score < 1 for run in scored_runs(report) for each in run.generations)
    sparse = found(report, tiles(1, 1))
    assert [each.status for each in report.candidates] == ["done", "failed", "done"]
    assert found(report, SCALED).message == "OSError: no space left"
    assert found(report, EXACT).frames_mean is not None
    assert all(each.frames_path is not None for each in sparse.generations)
    assert {layer.step for layer in sparse.layers} == {0}


def test_a_reference_that_cannot_be_written_beside_the_next_run_ends_the_comparison(
    tiny_pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = comparing.Comparison.run

    def beside(self: comparing.Comparison) -> Report:
        self._writer = comparing._Writer(in_background=True)  # as on a GPU
        return whole(self)

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise UsageError("no space left")

    monkeypatch.setattr(comparing.Comparison, "run", beside)
    monkeypatch.setattr(comparing.Results, "keep", failing)
    with pytest.raises(UsageError, match="no space left"):
        multimodal_gen.compare(
            loaded(tiny_pipeline("flux")),
            backends=[EXACT],
            output=tmp_path / "out",
            **arguments("flux", num_inference_steps=1, replayed_steps=None),
        )
    assert not (tmp_path / "out" / "report.json").exists()


def test_a_report_that_cannot_be_written_is_one_line(tiny_pipeline: Any, tmp_path: Path) -> None:
    (tmp_path / "report.json").mkdir()
    with pytest.raises(ConfigError, match=r"^the report must be written to a file, got .*: Is a d"):
        multimodal_gen.compare(
            loaded(tiny_pipeline("flux")),
            backends=[EXACT],
            output=tmp_path,
            resume=True,
            **arguments("flux", num_inference_steps=1, replayed_steps=None),
        )


def test_metrics_of_packages_are_left_out_until_they_are_asked_for(
    tiny_pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metric = ("st_lpips", "ST-LPIPS", lambda *_: 0.25, "numpy", "numpy is")
    monkeypatch.setattr(perceptual, "_METRICS", (metric,))
    given = arguments("flux", backends=[EXACT], output=tmp_path / "out", num_inference_steps=1)
    given |= {"replayed_steps": 0, "floor": ()}
    lines: list[str] = []
    pipe = loaded(tiny_pipeline("flux"))
    without = multimodal_gen.compare(pipe, **given, perceptual=False).candidates[0].frames_mean
    given |= {"resume": True, "say": lines.append}
    found = multimodal_gen.compare(pipe, **given).candidates[0].frames_mean
    assert not generated(lines)
    assert without is not None
    assert without.st_lpips is None
    assert found == dataclasses.replace(without, st_lpips=0.25)


@pytest.mark.slow
def test_layers_are_replayed_for_as_many_prompts_and_seeds_as_asked(
    tiny_pipeline: Any, tmp_path: Path
) -> None:
    given = arguments("flux", backends=tiles(1, 3), output=tmp_path / "out", num_inference_steps=1)
    given |= {"prompts": ["a fox", "a dog"], "layers_for": 1, "replayed_steps": 1}
    lines: list[str] = []
    pipe = loaded(tiny_pipeline("flux"))
    one = multimodal_gen.compare(pipe, **given).candidates[0]
    # The reference makes its second clip once more, and nothing else runs.
    given |= {"layers_for": None, "resume": True, "say": lines.append}
    both = multimodal_gen.compare(pipe, **given).candidates[0]
    assert generated(lines) == ["[1/1] torch_sdpa, prompt 2, seed 0"]
    assert {(layer.clips, layer.spread) for layer in one.layers} == {(1, None)}
    assert {layer.clips for layer in both.layers} == {2}
    for alone, layer in zip(one.layers, both.layers, strict=True):
        assert layer.spread is not None
        assert layer.relative_l2 != alone.relative_l2
        # Of two figures, the deviation is their distance by the root of two.
        pairs = zip(layer.relative_l2, alone.relative_l2, strict=True)
        distances = [abs(mean - first) * 2**0.5 for mean, first in pairs]
        assert layer.spread.relative_l2 == pytest.approx(distances, rel=1e-2)
    assert both.masks == one.masks


def test_backends_that_cannot_serve_the_model_are_rows(tiny_pipeline: Any, tmp_path: Path) -> None:
    report = multimodal_gen.compare(
        loaded(tiny_pipeline("flux")),
        backends=[
            "sliding_tile_attn:mask_strategy_file_path=absent.json",
            "sage_attn",
            "torch_sdpa + text_kv",
        ],
        output=tmp_path / "out",
        **arguments("flux", num_inference_steps=1, replayed_steps=0),
    )
    refused, would_fall_back, unfit = report.candidates
    assert {refused.status, would_fall_back.status, unfit.status} == {"failed"}
    assert "must be used with a model that has a place for it" in unfit.message
    assert "absent.json" in refused.message
    assert "sage_attn cannot serve the model here: needs platform cuda" in would_fall_back.message
    assert report.reference.status == "done"
    assert report.reference.layers == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reference": "video_sparse_attn"}, "--reference must be a dense backend"),
        ({"prompts": []}, "at least one prompt and one seed"),
        ({"seeds": ()}, "at least one prompt and one seed"),
        ({"num_frames": 5}, "--num-frames must be left out for FluxPipeline"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_written(
    tiny_pipeline: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    given = arguments("flux", backends="torch_sdpa", output=tmp_path / "out")
    with pytest.raises(UsageError, match=message):
        multimodal_gen.compare(loaded(tiny_pipeline("flux")), **{**given, **changes})
    assert not (tmp_path / "out").exists()


def test_what_a_backend_warns_of_is_logged_once_for_all_clips(
    tiny_pipeline: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = arguments("wan", floor="triton_attn", replayed_steps=0, seeds=(0, 1))
    pipe = loaded(tiny_pipeline("wan"))
    backends = "sla_attn:topk_ratio=0.3"
    multimodal_gen.compare(pipe, backends=backends, output=tmp_path / "out", **given)
    messages = [record.getMessage() for record in caplog.records]
    assert sum("given no trained proj_l" in message for message in messages) == 1


def test_layers_with_a_trained_projection_have_no_errors_which_a_note_says(
    tiny_pipeline: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(tiny_pipeline("wan"), tmp_path / "wan")
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    size = loaded(folder).transformer.config.attention_head_dim
    projections = {f"blocks.{i}.attn1.proj_l.weight": torch.eye(size) for i in range(2)}
    save_file(load_file(weights) | projections, weights)
    given = arguments("wan", floor=(), backends="sla_attn:topk_ratio=0.3", output=tmp_path / "out")
    report = multimodal_gen.compare(loaded(folder), **given)
    (run,) = report.candidates
    assert run.attention
    assert not run.layers
    assert report.notes[0] == (
        f"sla_attn: {len(report.reference.layers)} calls of layers have no errors, a trained "
        f"proj_l adds to attention there"
    )
    assert not any("given no trained proj_l" in each.getMessage() for each in caplog.records)


def test_steps_that_are_dense_by_their_noise_level_are_replayed(
    tiny_pipeline: Any, tmp_path: Path
) -> None:
    backends = f'{tiles(1, 1, 1)},dense_sigma=">0.99"'
    given = arguments("wan", floor=(), backends=backends, output=tmp_path / "out")
    report = multimodal_gen.compare(loaded(tiny_pipeline("wan")), **given)
    (run,) = report.candidates
    ran = {(each.step, each.backend.split()[0], each.density < 1) for each in run.layers}
    assert ran == {(0, "torch_sdpa", False), (1, "sliding_tile_attn", True)}
    assert not [note for note in report.notes if "replaying failed" in note]


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"wan"}))
def test_every_family_is_compared(
    tiny_pipeline: Any, tmp_path: Path, family: str, broken_backend: None
) -> None:
    report = multimodal_gen.compare(
        loaded(tiny_pipeline(family)),
        backends=[EXACT, DROPPED, NOT_A_NUMBER],
        output=tmp_path / "out",
        **arguments(family, page=find_spec("matplotlib") is not None),
    )
    assert (tmp_path / "out" / "report.html").exists() == (find_spec("matplotlib") is not None)
    words = [run.verdict.word for run in report.candidates if run.verdict is not None]
    assert words[0] == "within the noise of dense kernels", report.candidates[0].verdict
    assert words[1] in ("visible", "broken")
    assert words[2] == "broken"
    for run in (*report.floor, *report.candidates):
        assert run.layers
        assert AttentionBackendEnum.parse(run.backend)
