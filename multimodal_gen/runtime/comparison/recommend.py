"""Which configuration of a comparison to take: the fastest that is good enough.

Good enough is what meets every limit that is given, as a mean over prompts and seeds:

    min_psnr     PSNR in dB, at least
    min_vmaf     VMAF, at least
    max_error    relative L2 distance of the last latents from the reference's, at most

Without any limit it is what is within the noise of dense kernels. A run that is broken or did not
finish is never good enough, and neither is one that lacks a figure that is limited, nor a sparse
method that was dense in every call: its time is a dense kernel's. Exact kernels may win, too, that
of sparse methods among the noise as any; the reference wins where something is good enough, but
nothing that is faster by more than chance: the interval of the speed must lie above 1, and above
the reference's own noise. The fastest makes the most clips, from the prompt to the pixels, paired
by clip: a step in the middle tells little of a cache, or of a schedule that starts with dense
steps.
"""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from multimodal_gen.errors import ConfigError, UsageError, short
from multimodal_gen.files import require_apart, require_file, require_writable, save_text
from multimodal_gen.runtime.comparison.configurations import EXACT_KERNELS, Plan, cache_of
from multimodal_gen.runtime.comparison.frames import mean_and_spread
from multimodal_gen.runtime.comparison.paired import as_fast, is_faster, speed_text
from multimodal_gen.runtime.comparison.record import Report, Run, read_record
from multimodal_gen.runtime.comparison.verdict import MEASURES, Measure, defects_of, was_dense
from multimodal_gen.runtime.generator.cache import read_cache
from multimodal_gen.runtime.layers.attention.scope import scope_from
from multimodal_gen.runtime.server_args import CALL_SETTINGS, ServerArgs
from multimodal_gen.settings import as_flag

GRID = (
    "sage_attn",
    "sliding_tile_attn:window=[3,3,3]",
    "sliding_tile_attn:window=[3,5,5]",
    "video_sparse_attn:sparsity=0.5",
    "video_sparse_attn:sparsity=0.75",
    "video_sparse_attn:sparsity=0.9",
    "vmoba_attn:temporal_chunk_size=3,spatial_chunk_size=[5,13],st_chunk_size=[7,5,13],"
    "temporal_topk=2,spatial_topk=6,st_topk=18,moba_select_mode=topk",
    "sparse_video_gen_2_attn",
)
"""What is searched where no comparison is given: each sparse method that needs no training, from
mild to strong, and 8 bits. What cannot serve a model is a row that is never good enough."""

_LIMITED: Mapping[str, str] = MappingProxyType(
    {"min_psnr": "psnr", "min_vmaf": "vmaf", "max_error": "latents"}
)
"""Limit -> the measure that it is of, in their order."""

_OWN = ("report.json", "report.html", "clips", "latents", "records", "failures")
"""What a comparison has in its folder."""

_WITHIN = "within the noise of dense kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is good enough; None for no limit.

    Attributes:
        min_psnr: in dB.
        min_vmaf: 0 to 100.
        max_error: relative L2 distance of the last latents.

    Raises:
        ConfigError: a limit is not a finite number.
    """

    min_psnr: float | None = None
    min_vmaf: float | None = None
    max_error: float | None = None

    def __post_init__(self) -> None:
        for name in _LIMITED:
            limit = getattr(self, name)
            if limit is not None and not math.isfinite(limit):
                raise ConfigError(f"{as_flag(name)} must be a finite number, got {limit}")

    @property
    def given(self) -> tuple[tuple[Measure, float], ...]:
        """The limits that are given, with what they limit."""
        measures = {measure.name: measure for measure in MEASURES}
        limits = ((measures[name], getattr(self, limit)) for limit, name in _LIMITED.items())
        return tuple((measure, limit) for measure, limit in limits if limit is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """What to take, and why.

    Attributes:
        run: the fastest run that is good enough, or None.
        nearest: the run that misses the limits by least where none is good enough, or None where
            nothing finished.
        reasons: sentences: what was chosen or comes nearest, and why each faster run was not taken.
    """

    run: Run | None
    nearest: Run | None
    reasons: tuple[str, ...]

    @property
    def cache(self) -> str | None:
        """The step cache of the run, as `--cache` takes it; None where there is none."""
        return None if self.run is None else cache_of(self.run.configuration)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON data, with what `--attention-config` and `--cache` take."""
        return {
            "recommended": self.run.name if self.run else None,
            "nearest": self.nearest.name if self.nearest else None,
            "attention_config": attention_config(self.run) if self.run else None,
            "cache": self.cache,
            "reasons": list(self.reasons),
        }


def recommend(report: Report, limits: Limits) -> Recommendation:
    """Return the fastest run of a report that is good enough.

    Args:
        report: with verdicts.
        limits: what is good enough.
    """
    reference = report.reference
    if broken := defects_of(reference):
        text = f"The reference, {reference.name}, is broken, so nothing can be compared with it: "
        return Recommendation(run=None, nearest=None, reasons=(text + " ".join(broken),))
    finished = [run for run in report.runs[1:] if run.status == "done" and run.speed is not None]
    finished.sort(key=_speed, reverse=True)
    # Among the noise, the kernel of sparse methods that keeps everything is an exact one.
    dense = {run.name for run in report.candidates if was_dense(run)}
    misses = {run.name: _misses(run, limits, is_dense=run.name in dense) for run in finished}
    good = next((run for run in finished if not misses[run.name]), None)
    if good is not None:
        others = as_fast(good, [run for run in finished if not misses[run.name]])
        if not is_faster(good.speed, reference.speed):
            good, others = reference, []
        least = 1.0 if good is reference else _speed(good)
        faster = [run for run in finished if misses[run.name] and _speed(run) > least]
        reasons = [_chosen(good, reference, limits)]
        if others:
            reasons.append(f"{', '.join(others)}: as fast, as far as these clips can tell.")
        reasons += [f"{run.name} is faster: {'; '.join(misses[run.name])}." for run in faster]
        if (cache := cache_of(good.configuration)) is not None:
            reasons.append(
                f"It takes --cache {cache}, which is no part of an --attention-config: its file is "
                f"one for `sglang generate --config`, which holds both."
            )
        return Recommendation(run=good, nearest=None, reasons=tuple(reasons))
    sound = [run for run in finished if run.verdict is None or run.verdict.word != "broken"]
    nearest = min(sound, key=lambda run: (run.name in dense, _shortfall(run, limits)), default=None)
    if nearest is None:
        text = "No run of this comparison finished unbroken, so there is nothing to recommend."
        return Recommendation(run=None, nearest=None, reasons=(text,))
    reasons = [
        f"No run of this comparison is good enough: stay with {reference.name}.",
        f"{nearest.name} comes nearest: {'; '.join(misses[nearest.name])}.",
    ]
    return Recommendation(run=None, nearest=nearest, reasons=tuple(reasons))


def attention_config(run: Run) -> dict[str, Any]:
    """Return what `--attention-config` takes for a run."""
    parameters = {"config": dict(run.parameters)} if run.parameters else {}
    return {"backend": run.backend, **parameters}


def write_config(recommendation: Recommendation, path: Path) -> None:
    """Write a recommended run as a file for `sglang generate`, all of it or nothing.

    It is one for `--attention-config`; of a run with a step cache, which those cannot hold, it is
    one for `--config`. The reasons stand above it as comments. An older file is replaced.

    Raises:
        ConfigError: the run's backend or cache does not take its parameters any more.
        UsageError: the file cannot be written.
    """
    check_file(path)
    assert recommendation.run is not None, "there is something to write"
    config = attention_config(recommendation.run)
    scope_from(attention_config=config)
    if recommendation.cache is not None:
        read_cache(recommendation.cache)
        config = {"attention_config": config, "cache": recommendation.cache}
    comments = "".join(
        f"# {line}\n" for reason in recommendation.reasons for line in reason.splitlines()
    )
    save_text(path, comments + yaml.safe_dump(config, sort_keys=False), what="--output")


def check_file(path: Path) -> None:
    """Check that a config can be written, before minutes are spent on a search for it.

    Raises:
        UsageError: the file is a folder, or cannot lie where it is to lie; or nothing would read it
            as YAML.
    """
    require_file(path, "--output")
    if path.is_dir():
        raise UsageError(
            f"--output must be a file, got {str(path)!r}, which is a folder; try "
            f"{str(path / 'attention.yaml')!r}"
        )
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise UsageError(
            f"--output must end in .yaml or .yml, as what reads it goes by that, got "
            f"{short(str(path))}"
        )


def check_apart(path: Path, comparison: Path) -> None:
    """Check that a config takes the place of nothing that a comparison consists of.

    Args:
        path: where the config is to be written.
        comparison: the folder of the comparison, or its report.

    Raises:
        UsageError: the file is its report, its page, or in one of its folders.
    """
    folder = comparison.parent if comparison.name == "report.json" else comparison
    own = {(folder / name).resolve() for name in _OWN}
    if not comparison.is_dir():
        own.add(comparison.resolve())

    def is_one(file: Path) -> bool:
        return not own.isdisjoint((file, *file.parents))

    require_apart(path, "--output", "a file of the comparison", is_one, "attention.yaml")


def check_search(plan: Plan, args: ServerArgs) -> None:
    """Refuse a search in a folder whose report would lose something by it.

    A search goes on with its own: the report there, if there is one yet, has nothing but prompts,
    seeds and configurations of the search, with the same model, settings and reference.

    Args:
        plan: what is searched.
        args: settings of its generations.

    Raises:
        UsageError: the folder is none, or holds something else.
        ConfigError: it holds a report that cannot be read.
    """
    folder = plan.folder
    if not os.path.exists(folder):
        require_writable(folder, "--comparison")
        return
    if not folder.is_dir():
        holds = "is a file"
    elif (folder / "report.json").exists():
        differs = _not_searched(read_record(Report, folder / "report.json"), plan, args)
        holds = f"holds another comparison, with other {', '.join(differs)}" if differs else ""
    else:
        found = [path.name for path in folder.iterdir()]
        interrupted = {"records", "failures"} & set(found)
        holds = "" if interrupted or not found else "has files in it that are no comparison"
    if holds:
        raise UsageError(
            f"--comparison must be a new or empty folder, or this search's own, got "
            f"{str(folder)!r}, which {holds}; name another folder, or read a comparison that is "
            f"there by leaving --model-path out"
        )


def _not_searched(report: Report, plan: Plan, args: ServerArgs) -> list[str]:
    """Return what a report has that the one of a search in its folder would not have."""
    asked = {
        name: value
        for name in (*CALL_SETTINGS, "fps")
        if (value := getattr(args, name)) is not None
    }
    settings = dict(report.settings)
    if args.fps is None:  # what the pipeline says
        settings.pop("fps", None)
    paths = {
        os.path.realpath(os.path.expanduser(path))  # refuses no name
        for path in (report.model.path, args.model_path)
    }
    same = {
        "model": len(paths) == 1,
        "dtype": args.dtype in ("auto", report.model.dtype),
        "settings": settings == asked,
        "reference": report.reference.configuration == plan.reference.text,
        "prompts": set(report.prompts) <= set(plan.prompts),
        "seeds": set(report.seeds) <= set(plan.seeds),
        "backends": {run.configuration for run in report.candidates}
        <= {each.text for each in plan.candidates},
        "exact kernels": {run.configuration for run in report.floor} <= set(EXACT_KERNELS),
        "replayed layers": not any(run.layers for run in report.runs),
    }
    return [what for what, is_same in same.items() if not is_same]


def _speed(run: Run) -> float:
    assert run.speed is not None
    return run.speed.mean


def _misses(run: Run, limits: Limits, *, is_dense: bool) -> list[str]:
    """Return why a run is not good enough; `is_dense`, for a sparse method that was dense."""
    word = run.verdict.word if run.verdict else "unknown"
    if word == "broken":
        assert run.verdict is not None
        return [f"it is broken: {' '.join(run.verdict.reasons).rstrip('.')}"]
    if is_dense:
        return ["it was dense in every call, so its figures say nothing of the method"]
    if not limits.given:
        known = word if word == "visible" else "not known to be noise"
        return [] if word == _WITHIN else [f"its difference is {known}"]
    return list(_missed_limits(run, limits))


def _missed_limits(run: Run, limits: Limits) -> Iterator[str]:
    for measure, limit in limits.given:
        figure = _figure(run, measure)
        if figure is None:
            yield f"it has no {measure.label}"
        elif not _meets(measure, figure, limit):
            less = "at least" if measure.better == "higher" else "at most"
            yield f"{measure.label} is {measure.text(figure)}, not {less} {measure.text(limit)}"


def _meets(measure: Measure, figure: float, limit: float) -> bool:
    return figure >= limit if measure.better == "higher" else figure <= limit


def _figure(run: Run, measure: Measure) -> float | None:
    found = [*measure.figures(run).values()]
    return mean_and_spread(found)[0] if found else None


def _shortfall(run: Run, limits: Limits) -> float:
    """Return by which share of a limit a run misses the one it is farthest from.

    Without limits it is the error of the latents.
    """
    if not limits.given:
        error = next(measure for measure in MEASURES if measure.name == "latents")
        figure = _figure(run, error)
        return math.inf if figure is None else figure
    shares = [0.0]
    for measure, limit in limits.given:
        figure = _figure(run, measure)
        if figure is None:
            return math.inf
        if not _meets(measure, figure, limit):
            shares.append(abs(figure - limit) / max(abs(limit), 1e-12))
    return max(shares)


def _chosen(run: Run, reference: Run, limits: Limits) -> str:
    if run is reference:
        return f"{run.name}, the reference: nothing good enough is faster by more than chance."
    figures = [
        f"{measure.label} {measure.text(figure)}"
        for measure, _ in limits.given
        if (figure := _figure(run, measure)) is not None
    ]
    text = f"{run.configuration} is the fastest that is good enough"
    text += f" ({', '.join(figures) if figures else _WITHIN})"
    if run.cost is not None and reference.cost is not None:
        text += (
            f": {run.cost.generation_seconds:.3g} s per generation, where {reference.name} takes "
            f"{reference.cost.generation_seconds:.3g} s"
        )
    if run.speed is not None and run.speed.low is not None:
        text += f"; {speed_text(run.speed)} times its speed, paired by clip"
    return f"{text}."
