#!/usr/bin/env python3
"""What sparse attention does to a video: every method on the shapes model, scored.

    python scripts/shapes/study.py PART --size large --model FOLDER --out FOLDER [--only REGEX]

`study.yaml` lists methods, budgets and what else is varied, one factor at a time. PART is one of

- `times`: how long a generation of Wan 1.3B's dimensions takes with each configuration, as the
  shapes model is so small that attention is nearly all it does; but its are the maps of attention.
- `screen`: clips of a few captions with each configuration, scored.
- `front`: clips of many captions with those that no other one clearly beats in score and time.
- `trained`: the same clips after `train_sparse.py` has fine-tuned the model for a method.
- `pictures`: the score against time, and frames of one clip of the screen.
- `all`: one after another.

`screen`, `front` and `trained` are comparisons (`sglang attention compare`) in folders of their
own. Rows are in FOLDER/PART.csv, the scores of clips in FOLDER/PART_clips.csv. They are written as
soon as they are known, a few configurations at a time, and not measured again: the same command
goes on where it was stopped. `--processes` shares the configurations out, and until all are done,
rows are in FOLDER/PART-NUMBER.csv. Several may share a GPU, as the shapes model mostly waits for
the host; `times` refuses that. The captions are those of clips that training did not see; the score
of these clips and that of captions swapped among them are rows, too.

`front --perceptual` adds ST-LPIPS and ColorVideoVDP to the rows of the best settings. Both run on
the CPU, where a clip of size large takes two cores some 90 s, so they are measured on the first few
captions, whose clips are made once more, after all else. Without it there are none, even where
their packages are installed.
"""

import argparse
import csv
import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import yaml

# A checkout works without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clips import Scene, draw_scenes, render
from models import SIZES, Size, Stage, embedded, make_pipeline
from pictures import clips_in, draw_clips, draw_curves, joined
from score import score
from train import DEVICE, TRAINING_SEEDS, Pool

Rows = list[dict[str, Any]]

STUDY = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
SEED = 11
"""Of the captions: below the seeds of training, and not that of its evaluations."""
PERCEPTUAL = ("st_lpips", "cvvdp")
METRICS = ("psnr", "ssim", "xpsnr", "vmaf", *PERCEPTUAL)
APART = {"difference": "mean", "low": "low", "high": "high"}
ENDS = ("real clips", "captions swapped")
DENSE = "torch_sdpa"
TOGETHER = 4
"""Configurations of a comparison, or captions of one on many: what is lost where it is stopped."""
LOSS, CLEAR, FASTER = 0.1, 0.03, 0.95
"""What the front is made of, see `front_of`."""
TIMED = 4
"""The most steps that are timed of those that the same things serve."""
PICTURED = 2
"""Of the captions of the screen, that of the clips that are drawn: a shape that moves."""
LEARNT_EVERY = 2
"""Steps between those whose self-attention is timed."""


def configurations(only: str = "") -> Iterator[tuple[str, str]]:
    """Yield what is compared: a name, and the configuration as `compare` reads it.

    Args:
        only: a regular expression that names must match.
    """
    for name, text in _all_configurations():
        if re.search(only, name):
            yield name, text


def _all_configurations() -> Iterator[tuple[str, str]]:
    yield from ((backend, backend) for backend in STUDY["exact"])
    for backend, given in STUDY["methods"].items():
        base, budgets = given.get("base", {}), given["budgets"]
        for budget in budgets:
            yield f"{backend} {_short(budget)}", _text(backend, {**base, **budget})
        middle = budgets[STUDY["middle"]]
        for variant, more in STUDY["variants"].items():
            changed = given["advice"] if variant == "dense first" else more
            if changed.keys() <= _parameters(backend) - set(given.get("without", ())):
                settings = {**base, **middle, **changed}
                yield f"{backend} {_short(middle)}, {variant}", _text(backend, settings)


def _parameters(backend: str) -> set[str]:
    """Return the names of a method's parameters."""
    from multimodal_gen.runtime.layers.attention.backends.registry import backends_of
    from multimodal_gen.runtime.layers.attention.config import parameters_of
    from multimodal_gen.runtime.platforms import AttentionBackendEnum

    (found,) = backends_of(AttentionBackendEnum.parse(backend))
    assert found.config_cls is not None
    return set(parameters_of(found.config_cls))


def _short(settings: Mapping[str, Any]) -> str:
    return " ".join(
        f"{key}={json.dumps(value)}".replace(" ", "") for key, value in settings.items()
    )


def _text(backend: str, settings: Mapping[str, Any]) -> str:
    return f"{backend}:{json.dumps(settings)}"


def _scenes(part: str, given: argparse.Namespace) -> list[Scene]:
    return scenes_of(SIZES[given.size], given.captions or _part(part)["captions"])


def scenes_of(size: Size, count: int) -> list[Scene]:
    """Return the scenes whose captions are generated."""
    stage = size.stages[-1]
    return draw_scenes(SEED, count, frames=stage.frames, aspect=stage.width / stage.height)


def ends_of(scenes: Sequence[Scene], stage: Stage) -> Iterator[dict[str, Any]]:
    """Yield the scores of the scenes' own clips, and of these with each other's captions."""
    said = [scene.caption for scene in scenes]
    for scene, other in zip(scenes, said[1:] + said[:1], strict=True):
        (clip,) = render([scene], height=stage.height, width=stage.width, device=DEVICE)
        video = clip.permute(1, 2, 3, 0).cpu().numpy()
        for name, caption in zip(ENDS, (scene.caption, other), strict=True):
            yield {"name": name, "caption": scene.caption, "score": score(video, caption)}


def screen(given: argparse.Namespace, names: Mapping[str, str]) -> None:
    """Compare configurations on a few captions; processes share out the configurations.

    Args:
        given: the command line.
        names: those of the configurations.
    """
    left, scenes = _left("screen", given, names.values()), _scenes("screen", given)
    texts = [text for text in [*names][given.shard :: given.processes] if names[text] in left]
    if not texts:
        return
    pipe, to = _pipeline(given.model), given.out / _shard("screen", given)
    noise = False
    if not given.shard:
        _add_ends(given, "screen", to)
        noise = {name for name, _ in _scored("screen", given)} <= {*ENDS, DENSE, *names.values()}
    for start in range(0, len(texts), TOGETHER):
        some = texts[start : start + TOGETHER]
        report = compared(pipe, given, "screen", scenes, some, to, noise=noise and not start)
        _add_both([*rows_of(report, names, given.commit)], scores_of(report, names), to)


def front(given: argparse.Namespace, names: Mapping[str, str]) -> None:
    """Compare configurations on many captions; processes share out the captions.

    Args:
        given: the command line.
        names: those of the configurations.
    """
    if not given.shard:
        _add_ends(given, "front", given.out / "front-0")
    _by_captions(given, "front", given.model, names, share=(given.shard, given.processes))


def perceptual(given: argparse.Namespace, names: Mapping[str, str]) -> None:
    """Add ST-LPIPS and ColorVideoVDP of the first captions to the front's best settings.

    The best are those whose score is shown to be not clearly less than that of dense attention.

    Args:
        given: the command line.
        names: those of the configurations.

    Raises:
        SystemExit: they could not be measured.
    """
    rows = {row["name"]: row for row in read(given.out / "front.csv")}
    best = {
        text: name
        for text, name in names.items()
        if (low := rows.get(name, {}).get("low")) and float(low) >= -CLEAR
        if not all(rows[name][metric] for metric in PERCEPTUAL)
    }
    if not best:
        return
    pipe, to, few = _pipeline(given.model), given.out / "perceptual", _scenes("front", given)
    report = compared(
        pipe, given, "front", few[:TOGETHER], [*best], to, noise=False, perceptual=True
    )
    found = {
        row["name"]: {metric: row.get(metric) for metric in PERCEPTUAL}
        for row in rows_of(report, best, given.commit)
        if row["name"] in best.values()
    }
    if any(None in metrics.values() for metrics in found.values()):
        raise SystemExit(f"--perceptual could not be measured: {'; '.join(report.notes)}")
    path = given.out / "front-0.csv"
    write([{**row, **found.get(row["name"], {})} for row in read(path)], path)


def _by_captions(
    given: argparse.Namespace,
    part: str,
    model: Path,
    names: Mapping[str, str],
    *,
    share: tuple[int, int] = (0, 1),
    files: str = "",
    **more: object,
) -> None:
    """Compare configurations on a few captions at a time, with a file of rows for each time.

    Args:
        given: the command line.
        part: "front" or "trained".
        model: folder of the pipeline.
        names: those of the configurations; one of dense attention is for its rows alone.
        share: which of how many processes this is.
        files: the beginning of the files' names (the part).
        more: columns of the rows.
    """
    pipe, scenes = None, _scenes(part, given)
    for number in range(-(-len(scenes) // TOGETHER))[share[0] :: share[1]]:
        few = scenes[number * TOGETHER :][:TOGETHER]
        left = _left(part, given, names.values(), few)
        texts = [text for text, name in names.items() if name in left and text != DENSE]
        if texts:
            pipe = pipe or _pipeline(model)
            to = given.out / f"{files or part}-{number}"
            noise = part == "front" and not number
            report = compared(pipe, given, part, few, texts, to, noise=noise)
            rows = [{**row, **more} for row in rows_of(report, names, given.commit)]
            _add_both(rows, scores_of(report, names), to)


def _add_ends(given: argparse.Namespace, part: str, to: Path) -> None:
    """Add the scores of the scenes' own clips, and of those with captions swapped."""
    if _left(part, given, ENDS):
        clips = [*ends_of(_scenes(part, given), SIZES[given.size].stages[-1])]
        scores = {name: [x["score"] for x in clips if x["name"] == name] for name in ENDS}
        rows = [{"name": x, "clips": len(each), "score": _mean(each)} for x, each in scores.items()]
        _add_both(rows, clips, to)


def _add_both(rows: Rows, clips: Rows, to: Path) -> None:
    """Add to the rows of a part and then to the scores of clips, which say what is done."""
    _add(rows, Path(f"{to}.csv"))
    _add(clips, Path(f"{to}_clips.csv"))


def _part(name: str) -> dict[str, Any]:
    found: dict[str, Any] = STUDY["parts"][name]
    return found


def _pipeline(folder: Path) -> Any:
    from diffusers import WanPipeline

    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    return WanPipeline.from_pretrained(folder, dtype=dtype).to(DEVICE)


def compared(
    pipe: Any,
    given: argparse.Namespace,
    part: str,
    scenes: Sequence[Scene],
    texts: Sequence[str],
    to: Path,
    *,
    noise: bool,
    perceptual: bool = False,
) -> Any:
    """Return the report of a comparison of configurations, which goes on where it was stopped.

    Its record is kept, but of its clips only those of the screen that a picture shows: all of them
    are more than a disk holds.

    Args:
        pipe: the pipeline.
        given: the command line.
        part: whose seeds the clips have.
        scenes: those of the captions.
        texts: the configurations.
        to: folder of the comparison.
        noise: whether other exact kernels are compared, too.
        perceptual: whether ST-LPIPS and ColorVideoVDP are measured, too.
    """
    import multimodal_gen

    stage = SIZES[given.size].stages[-1]
    report = multimodal_gen.compare(
        pipe,
        prompts=[scene.caption for scene in scenes],
        backends=texts,
        output=to,
        floor=None if noise else (),
        seeds=_part(part)["seeds"],
        resume=to.exists(),
        layers_for=2,
        score=score,
        perceptual=perceptual,
        page=False,
        height=stage.height,
        width=stage.width,
        num_frames=stage.frames,
        num_inference_steps=STUDY["steps"],
        guidance_scale=STUDY["guidance_scale"],
        say=lambda line: print(line, flush=True),
    )
    number = len([*to.glob("report-*.json")])
    (to / "report.json").replace(to / f"report-{number}.json")
    for run in (*report.floor, *report.candidates):
        for clip in run.generations:
            if clip.frames_path and (clip.prompt != PICTURED or part != "screen"):
                (to / clip.frames_path).unlink(missing_ok=True)
    return report


def rows_of(report: Any, names: Mapping[str, str], commit: str) -> Iterator[dict[str, Any]]:
    """Yield a row of every run; figures that a run lacks are left out."""
    for run in (report.reference, *report.floor, *report.candidates):
        scores = [each.score for each in run.generations if each.score is not None]
        row = {
            "name": names.get(run.configuration, run.configuration),
            "configuration": run.configuration,
            "status": run.status,
            "clips": len(scores),
            "score": _mean(scores),
            "layer_error": _layer_error(run),
        }
        found = run.differences.get("score")
        if found is not None:
            row |= {key: getattr(found, x) for key, x in APART.items()}
        if run.cost is not None:
            row["density"] = run.cost.density
        if run.frames_mean is not None:
            row |= {metric: getattr(run.frames_mean, metric) for metric in METRICS}
        device, versions = report.environment.device, report.environment.versions
        row |= {"gpu": device, "torch": versions.get("torch"), "commit": commit}
        yield {key: _rounded(key, x) if isinstance(x, float) else x for key, x in row.items()}


def _layer_error(run: Any) -> float | None:
    """Return the mean error of the calls that its backend served, None where there are none.

    Dense steps and layers of a method, which another backend serves, have none to speak of.
    """
    backend = run.configuration.partition(":")[0].split()[0]  # without "+ cache"
    own = [each for each in run.layers if each.backend.split()[0] == backend]
    return _mean([1 - min(1.0, *each.cosine) for each in own])


def _rounded(column: str, figure: float) -> float:
    """Return a figure as rows have it: errors, which may be small, to three digits."""
    return float(f"{figure:.3g}") if column == "layer_error" else round(figure, 5)


def scores_of(report: Any, names: Mapping[str, str]) -> Rows:
    """Return a row of every clip."""
    return [
        {
            "name": names.get(run.configuration, run.configuration),
            "caption": report.prompts[clip.prompt],
            "seed": clip.seed,
            "score": round(clip.score, 5),
        }
        for run in (report.reference, *report.floor, *report.candidates)
        for clip in run.generations
        if clip.score is not None
    ]


def _mean(figures: Sequence[float]) -> float | None:
    return sum(figures) / len(figures) if figures else None


def times(given: argparse.Namespace, names: Mapping[str, str]) -> None:
    """Time the denoising of one video of Wan 1.3B's dimensions with every configuration.

    The weights are random, but self-attention gets what it gets in the shapes model, of whose maps
    a method then keeps what it keeps there. Steps are those of the study, with one branch of
    guidance, which is counted twice.
    """
    from multimodal_gen.runtime.comparison.configurations import read_configuration

    size = SIZES[given.size]
    model, inputs = _wan(size, heads=size.heads if given.size == "smoke" else 12)
    pipe = make_pipeline(None, None, None, model, shift=size.stages[-1].shift)
    learnt: Learnt | None = None
    done = {row["name"] for row in _rows("times", given) if _is_done(row)}
    for text in [DENSE, "auto", *names][given.shard :: given.processes]:
        name = names.get(text, text)
        if name in done:
            continue
        learnt = learnt or learnt_by(given.model, size, model.config.num_attention_heads)
        row: dict[str, Any] = {"name": name, "configuration": text}
        asked = "" if text == "auto" else spread(text, size.layers, len(model.blocks))
        scope = read_configuration(asked, name="times", taken=[]).scope if asked else None
        try:
            seconds, density = _timed(pipe, inputs, scope, learnt)
            row |= {"status": "done", "seconds": round(2 * seconds, 4), "density": density}
        except Exception as error:  # one configuration is one row
            row |= {"status": f"failed: {str(error).splitlines()[0]}"}
        row |= {"gpu": _gpu(), "torch": torch.__version__, "commit": given.commit}
        print(row, flush=True)
        _add([row], given.out / f"{_shard('times', given)}.csv")


def spread(text: str, layers: int, of: int) -> str:
    """Return a configuration with the dense layers that a larger model has in place of those named.

    Args:
        text: a configuration of the shapes model.
        layers: how many that has.
        of: how many the other has, which take turns with these.
    """
    from multimodal_gen.runtime.layers.attention.config import IndexSelector

    backend, _, given = text.partition(":")
    settings = json.loads(given or "{}")
    if settings.get("dense_layers") is None:
        return text
    named = IndexSelector.parse(settings["dense_layers"])
    settings["dense_layers"] = [layer for layer in range(of) if layer % layers in named]
    return _text(backend, settings)


def _wan(size: Size, *, heads: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a transformer of Wan 1.3B's dimensions, and the arguments of a call.

    Args:
        size: of the shapes model, which has the same tokens and size of heads.
        heads: fewer than 12 make it small.
    """
    from diffusers import WanTransformer3DModel

    layers, ffn = (30, 8960) if heads == 12 else (1, 32)
    stage, dtype = size.stages[-1], torch.bfloat16 if DEVICE == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = WanTransformer3DModel(
            size.patch,
            num_attention_heads=heads,
            attention_head_dim=size.head_size,
            num_layers=layers,
            ffn_dim=ffn,
        )
        frames, height, width = (stage.frames + 3) // 4, stage.height // 8, stage.width // 8
        inputs = {
            "hidden_states": torch.randn(1, 16, frames, height, width, dtype=dtype),
            "encoder_hidden_states": torch.randn(1, 512, 4096, dtype=dtype),
        }
    return model.to(dtype).eval(), inputs


Learnt: TypeAlias = Mapping[int, Sequence[tuple[torch.Tensor, ...]]]
"""Query, key and value, [1, S, H, D] each, of every layer at some steps."""


def learnt_by(folder: Path, size: Size, heads: int) -> Learnt:
    """Return what self-attention of the shapes model gets while it generates a clip.

    Args:
        folder: of its pipeline.
        size: of it.
        heads: how many to return, which repeat its own.
    """
    import multimodal_gen
    from multimodal_gen.runtime.layers.attention.call import watching

    found: dict[int, list[tuple[torch.Tensor, ...]]] = {
        step: [] for step in range(0, STUDY["steps"], LEARNT_EVERY)
    }

    def look(layer: Any, call: Any, serve: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        kept = found.get(_context().current_timestep) if _is_self(layer) else None
        # The first branch of guidance alone.
        if kept is not None and len(kept) == layer.site.layer:
            kept.append(tuple(x.repeat(1, 1, heads // x.shape[2], 1) for x in call[:3]))
        return serve(call)

    pipe, stage = _pipeline(folder), size.stages[-1]
    with torch.inference_mode(), multimodal_gen.apply(pipe), watching(look):
        pipe(
            scenes_of(size, 1)[0].caption,
            height=stage.height,
            width=stage.width,
            num_frames=stage.frames,
            num_inference_steps=STUDY["steps"],
            guidance_scale=STUDY["guidance_scale"],
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        )
    return found


def _feed(learnt: Learnt) -> Callable[[Any, Any, Callable[[Any], torch.Tensor]], torch.Tensor]:
    """Return what looks at calls and gives self-attention what it gets in the shapes model.

    Layers take turns with those of the shapes model, steps have what the last one before them had.
    """

    def look(layer: Any, call: Any, serve: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        if not _is_self(layer):
            return serve(call)
        layers = learnt[_context().current_timestep // LEARNT_EVERY * LEARNT_EVERY]
        query, key, value = layers[layer.site.layer % len(layers)]
        return serve(call._replace(query=query, key=key, value=value))

    return look


def _is_self(layer: Any) -> bool:
    from multimodal_gen.runtime.layers.attention.request import AttentionRole

    return layer.site.role is AttentionRole.SELF


def _context() -> Any:
    from multimodal_gen.runtime.managers.forward_context import current_forward_context

    context = current_forward_context()
    assert context is not None, "a denoiser that is attached has a context"
    return context


@torch.inference_mode()
def _timed(pipe: Any, inputs: Mapping[str, Any], scope: Any, learnt: Learnt) -> tuple[float, float]:
    """Return the seconds of all steps, and the mean density of self-attention."""
    import multimodal_gen
    from multimodal_gen.runtime.layers.attention.call import watching
    from multimodal_gen.runtime.layers.attention.request import AttentionRole

    pipe.scheduler.set_timesteps(STUDY["steps"], DEVICE)
    timesteps = pipe.scheduler.timesteps

    def run(steps: Sequence[int]) -> float:
        _wait()
        start = time.perf_counter()
        for step in steps:
            pipe.transformer(**inputs, timestep=timesteps[step : step + 1], return_dict=False)
        _wait()
        return time.perf_counter() - start

    with multimodal_gen.apply(pipe, scope=scope):
        kinds = kinds_of_steps(lambda: run([0]), STUDY["steps"])
        with watching(_feed(learnt)):
            run([steps[-1] for steps in kinds])  # whatever is compiled
    seconds = density = 0.0
    for steps in kinds:
        with multimodal_gen.apply(pipe, scope=scope) as handle, watching(_feed(learnt)):
            seconds += seconds_of(run, steps)
            layers = [x for x in handle.report().layers if x.role is AttentionRole.SELF]
        shares = [density_of(layer, weights_of(steps)) for layer in layers]
        density += sum(shares) / len(shares) * len(steps) / STUDY["steps"]
    return seconds, round(density, 5)


def kinds_of_steps(call: Callable[[], object], count: int) -> list[list[int]]:
    """Return the denoising steps, those together that the same things serve in every layer.

    Args:
        call: calls the denoiser once.
        count: how many steps there are.
    """
    from multimodal_gen.runtime.layers.attention.call import watching

    served: list[list[Any]] = [[] for _ in range(count)]

    def look(layer: Any, given: Any, serve: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        for step, found in enumerate(served):
            found.append(layer.step_kind(dataclasses.replace(_context(), current_timestep=step)))
        return serve(given)

    with watching(look):
        call()
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for step, found in enumerate(served):
        kinds.setdefault(tuple(found), []).append(step)
    return [*kinds.values()]


def weights_of(steps: Sequence[int]) -> dict[int, float]:
    """Return a few steps of one kind, and how many each stands for.

    The first one, which makes what others go on from, stands for itself, a few for all others.
    """
    rest = steps[1:]
    few = rest[:: -(-len(rest) // (TIMED - 1)) or 1]
    return {steps[0]: 1.0, **{step: len(rest) / len(few) for step in few}}


def seconds_of(run: Callable[[Sequence[int]], float], steps: Sequence[int]) -> float:
    """Return the seconds of steps of one kind, of which a few are run."""
    first, *few = weights_of(steps).items()
    seconds = run([first[0]])
    return seconds + (run([step for step, _ in few]) * few[0][1] if few else 0.0)


def density_of(layer: Any, weights: Mapping[int, float]) -> float:
    """Return the share of pairs that a layer attended to in steps of one kind, by their weights."""
    from multimodal_gen.runtime.generator.attention_check import layer_density

    shares = {step: share for entry in layer.entries for step, share in entry.densities}
    if not weights.keys() <= shares.keys():
        return layer_density(layer)
    return sum(weights[step] * shares[step] for step in weights) / sum(weights.values())


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _gpu() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"


def front_of(rows: Sequence[Mapping[str, str]], seconds: Mapping[str, float]) -> list[str]:
    """Return the configurations that no other one clearly beats in both score and time.

    A few captions tell little, so clearly is a score higher by `CLEAR` in no more time, or one no
    lower in `FASTER` of the time. Who lost more than `LOSS` on dense attention is left out.

    Args:
        rows: of the screen.
        seconds: of each configuration that has a time.
    """
    points = {
        row["configuration"]: (float(row["score"]), seconds[row["configuration"]])
        for row in rows
        if row["status"] == "done" and row["score"] and row["configuration"] in seconds
    }
    least = points[DENSE][0] - LOSS
    return [
        configuration
        for configuration, (scored, took) in points.items()
        if scored >= least
        and not any(
            (other >= scored + CLEAR and less <= took)
            or (other >= scored and less <= FASTER * took)
            for other, less in points.values()
        )
    ]


def _need_rows(part: str, given: argparse.Namespace) -> None:
    """Raise SystemExit where the rows of times and screen, which a part is made of, are missing."""
    missing = [x for x in ("times", "screen") if not (given.out / f"{x}.csv").exists()]
    if missing:
        needed = " and ".join(missing)
        raise SystemExit(f"{part} needs the rows of {needed} in {given.out}; run {needed} first")


def _front(given: argparse.Namespace) -> list[str]:
    """Return the front, dense attention apart, by the rows of screen and times."""
    _need_rows("front", given)
    timed = {
        row["configuration"]: float(row["seconds"])
        for row in read(given.out / "times.csv")
        if row["status"] == "done"
    }
    timed[DENSE] = timed.get("auto", timed[DENSE])  # the fastest exact attention
    screened = read(given.out / "screen.csv")
    return [text for text in front_of(screened, timed) if text != DENSE]


def trained(given: argparse.Namespace) -> None:
    """Fine-tune for every entry of the study, then compare what came out, dense and sparse."""
    stage = SIZES[given.size].stages[-1]
    data = given.out / f"data-{given.shard}.safetensors"
    entries = [(name, x) for name, x in STUDY["trained"].items() if re.search(given.only, name)]
    for name, entry in entries[given.shard :: given.processes]:
        if not _left("trained", given, [name]):
            continue
        folder = given.out / re.sub(r"\W+", "-", name)
        if not (folder / "model_index.json").exists():
            if not data.exists():
                few = min(stage.clips, _part("trained")["clips"])
                _save_data(_pipeline(given.model), dataclasses.replace(stage, clips=few), data)
            options = {**entry["options"], **({"steps": given.steps} if given.steps else {})}
            _fine_tune(given.model, folder, data, stage, {**entry, "options": options})
        seconds = sum(float(row["seconds"] or 0) for row in read(folder / "loss.csv"))
        names = {_text(entry["backend"], entry["config"]): name, DENSE: f"{name}, then dense"}
        files = f"trained-{[*STUDY['trained']].index(name)}"
        _by_captions(given, "trained", folder, names, files=files, training_seconds=round(seconds))


@torch.no_grad()
def _save_data(pipe: Any, stage: Stage, to: Path) -> None:
    """Write latents and embedded captions, as `train_sparse.py` reads them."""
    from safetensors.torch import save_file

    pool = Pool(pipe.vae.float(), pipe.tokenizer, stage, TRAINING_SEEDS)
    prompts = embedded(pipe.text_encoder, pool.tokens[:-1], pool.real[:-1])
    tensors = {"latents": pool.latents, "prompts": prompts}
    save_file({key: x.bfloat16().contiguous().cpu() for key, x in tensors.items()}, to)


def _fine_tune(
    model: Path, folder: Path, data: Path, stage: Stage, entry: Mapping[str, Any]
) -> None:
    """Run `train_sparse.py` in a process of its own, which goes on where another was stopped.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    options = {
        "backend": entry["backend"],
        "config": json.dumps(entry["config"]),
        "data": data,
        "frames": stage.frames,
        "height": stage.height,
        "width": stage.width,
        **entry["options"],
    }
    words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    dtype = ["--dtype", "bfloat16" if DEVICE == "cuda" else "float32"]
    script = Path(__file__).resolve().parents[1] / "train_sparse.py"
    if (folder / "state" / "step.json").exists():
        words.append("--resume")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, script, model, folder, *words, *dtype], check=True)


def pictures(given: argparse.Namespace) -> None:
    """Draw what the rows say, and a clip of dense attention and of what is shown."""
    _need_rows("pictures", given)
    draw_curves(joined(given.out), given.out / "study.svg")
    found = dict(clips_in(sorted(given.out.glob("screen*/report-*.json")), prompt=PICTURED))
    names = {"torch_sdpa": "dense", **{text: name for name, text in configurations()}}
    wanted = ["dense", *STUDY["shown"]]
    clips = {name: found[text] for text, name in names.items() if text in found}
    draw_clips({name: clips[name] for name in wanted if name in clips}, given.out / "clips.jpg")


def _shard(part: str, given: argparse.Namespace) -> str:
    return part if given.processes == 1 else f"{part}-{given.shard}"


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows with all their columns as a CSV file, whole or not at all."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(partial, path)


def _add(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Add rows to a CSV file, see `once`."""
    write(once([*(read(path) if path.exists() else []), *rows]), path)


def once(rows: Sequence[Mapping[str, Any]]) -> Rows:
    """Return each row once: the first that is not of a failure, or else the last."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(str(row.get(name, "")) for name in ("name", "caption", "seed"))
        if key not in found or not _is_done(found[key]):
            found[key] = dict(row)
    return [*found.values()]


def _is_done(row: Mapping[str, Any]) -> bool:
    return row.get("status", "done") in ("", "done")


def merged(rows: Sequence[Mapping[str, Any]], clips: Sequence[Mapping[str, Any]]) -> Rows:
    """Return one row for each name from those of its captions, a few each.

    Figures are means over the clips. The difference is paired by clip anew, as the comparison did:
    to dense attention of the same model.

    Args:
        rows: of all captions, with the number of their `clips`.
        clips: the scores of all clips.
    """
    from multimodal_gen.runtime.comparison.paired import difference

    scores: dict[str, dict[tuple[str, str], float]] = {}
    for clip in clips:
        of_name = scores.setdefault(clip["name"], {})
        of_name[clip["caption"], clip.get("seed", "")] = float(clip["score"])
    found: Rows = []
    for name in dict.fromkeys(row["name"] for row in rows):
        parts = [row for row in rows if row["name"] == name]
        row = dict(next((part for part in parts if not _is_done(part)), parts[0]))
        row["clips"] = sum(int(part["clips"]) for part in parts)
        for column in ("score", "density", "layer_error", *METRICS):
            weights = {i: int(x["clips"]) for i, x in enumerate(parts) if x.get(column)}
            if weights:
                total = sum(float(parts[i][column]) * weight for i, weight in weights.items())
                row[column] = _rounded(column, total / sum(weights.values()))
        dense = scores.get(f"{name}, then dense", scores.get(DENSE, {}))
        apart = difference(scores.get(name, {}), dense)
        if row.get("difference") and apart is not None:
            row |= {key: round(getattr(apart, x), 5) for key, x in APART.items()}
        found.append(row)
    return found


def _files(part: str, given: argparse.Namespace, ending: str = "") -> list[Path]:
    """Return the files with rows of a part, those of all shards there ever were."""
    name = re.compile(rf"{part}(-\d+)*{ending}\.csv")
    return sorted(path for path in given.out.glob("*.csv") if name.fullmatch(path.name))


def _rows(part: str, given: argparse.Namespace, ending: str = "") -> list[dict[str, str]]:
    return [*itertools.chain.from_iterable(map(read, _files(part, given, ending)))]


def _scored(part: str, given: argparse.Namespace) -> set[tuple[str, str]]:
    """Return the names that have a score, each with its captions."""
    return {(row["name"], row["caption"]) for row in _rows(part, given, "_clips")}


def _left(
    part: str,
    given: argparse.Namespace,
    names: Iterable[str],
    scenes: Sequence[Scene] | None = None,
) -> set[str]:
    """Return the names that lack a score of some caption, of those of the part or of scenes."""
    scored = _scored(part, given)
    wanted = [scene.caption for scene in (_scenes(part, given) if scenes is None else scenes)]
    return {name for name in names if any((name, caption) not in scored for caption in wanted)}


def _gather(part: str, given: argparse.Namespace) -> None:
    """Make the files of a part from those of its shards, in the order of the study."""
    names = [*ENDS, DENSE, "auto", *dict(configurations())]
    order = {name: place for place, name in enumerate(names)}
    clips = once(_rows(part, given, "_clips"))
    rows = once(_rows(part, given))
    whole = given.out / f"{part}.csv"
    pieces = [path for path in _files(part, given) if path != whole]
    if part in ("front", "trained") and pieces:
        known = [row for path in pieces for row in read(path.with_name(f"{path.stem}_clips.csv"))]
        if len(once(known)) < len(clips):
            raise SystemExit(
                f"{whole} has captions that no {part}-NUMBER.csv beside it has: put those that it "
                f"was made of there, or move it away"
            )
        rows = merged([*itertools.chain.from_iterable(map(read, pieces))], clips)
    for found, ending in ((rows, ""), (clips, "_clips")):
        if found:
            found.sort(key=lambda row: order.get(row["name"], len(order)))
            write(found, given.out / f"{part}{ending}.csv")


def _run_shards(argv: Sequence[str], count: int) -> None:
    """Run this command in several processes, each with one GPU and its share of the cores.

    Raises:
        SystemExit: processes would share a GPU that is to be timed.
        RuntimeError: one of them failed.
    """
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    if argv[0] == "times" and 0 < len(found) < count:
        raise SystemExit(f"times needs a GPU for each of {count} processes, found {len(found)}")
    share = f"OMP_NUM_THREADS={max(1, (os.cpu_count() or 1) // count)}"
    shards = []
    for shard in range(count):
        # For all that the process starts, too.
        gpu = [f"CUDA_VISIBLE_DEVICES=GPU-{found[shard % len(found)].uuid}"] if found else []
        words = [sys.executable, __file__, *argv, "--shard", str(shard)]
        shards.append(subprocess.Popen(["env", share, *gpu, *words]))
    codes = [shard.wait() for shard in shards]
    if any(codes):
        raise RuntimeError("a part of the study failed, see above; the same command goes on")


def _require_sound(given: argparse.Namespace) -> None:
    """Raise a ValueError where an option is none that a part can use."""
    from multimodal_gen.runtime.comparison.perceptual import available

    for name in ("captions", "steps", "processes"):
        count = getattr(given, name)
        if count is not None and count < 1:
            raise ValueError(
                f"--{name} must be at least 1, got {count}; leave it out for its default"
            )
    try:
        re.compile(given.only)
    except re.error as error:
        raise ValueError(
            f"--only must be a regular expression, got {given.only!r}: {error}; a backslash takes "
            f"a sign as it is"
        ) from None
    if given.part != "pictures" and not (given.model / "model_index.json").is_file():
        raise ValueError(
            f"--model must be the folder of a pipeline, with its model_index.json, got "
            f"{str(given.model)!r}; `train.py export` writes one"
        )
    if given.perceptual and given.part not in ("front", "all"):
        raise ValueError(f"--perceptual must be given with front or all, got {given.part}")
    if given.perceptual and not {"stlpips_pytorch", "pycvvdp"} <= {*available()}:
        raise ValueError(
            "--perceptual must have its packages, which are not installed; install the extra "
            "`perceptual`"
        )
    if given.only and given.shard is None:  # shards have what all parts were asked for
        names = _names_of(given)
        if not any(re.search(given.only, name) for name in names):
            raise ValueError(
                f"--only of {given.part} must match one of {', '.join(map(repr, names))}, got "
                f"{given.only!r}"
            )


def _names_of(given: argparse.Namespace) -> list[str]:
    """Return the names that a part can be asked for; `all` is asked for those of any part."""
    names = {text: name for name, text in configurations()}
    if given.part == "front":
        names = {text: names[text] for text in _front(given) if text in names}
    found = [] if given.part == "trained" else [*names.values()]
    found += [DENSE, "auto"] if given.part == "times" else []
    return [*found, *STUDY["trained"]] if given.part in ("trained", "all") else found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=(*PARTS, "all"))
    parser.add_argument("--size", choices=sorted(SIZES), default="large")
    parser.add_argument("--model", type=Path, required=True, help="folder of the pipeline")
    parser.add_argument("--out", type=Path, required=True, help="folder of comparisons and rows")
    parser.add_argument("--only", default="", help="configurations whose name matches (all)")
    parser.add_argument("--commit", default="", help="of this code, for the rows")
    parser.add_argument("--captions", type=int, help="how many (those of the part)")
    parser.add_argument("--steps", type=int, help="of fine-tuning (those of the study)")
    parser.add_argument("--processes", type=int, default=1, help="how many share the GPUs (1)")
    text = "add ST-LPIPS and ColorVideoVDP to the front's best settings"
    parser.add_argument("--perceptual", action="store_true", help=text)
    parser.add_argument("--shard", type=int, help=argparse.SUPPRESS)
    argv = sys.argv[1:] if argv is None else argv
    given = parser.parse_args(argv)
    try:
        _require_sound(given)
    except ValueError as error:
        parser.error(str(error))
    whole = given.shard is None
    for part in PARTS if given.part == "all" else (given.part,):
        try:
            if given.processes > 1 and whole and part in SHARED:
                _run_shards([part, *argv[1:]], given.processes)
            else:
                given.shard = given.shard or 0
                PARTS[part](given)
        finally:
            if whole and part in SHARED:
                _gather(part, given)
        if given.perceptual and whole and part == "front":
            perceptual(given, _named(given, _front(given)))
            _gather(part, given)
    return 0


def _named(given: argparse.Namespace, texts: Sequence[str] | None = None) -> dict[str, str]:
    """Return the names of configurations that were asked for."""
    names = {text: name for name, text in configurations(given.only)}
    return names if texts is None else {text: names[text] for text in texts if text in names}


PARTS: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "times": lambda given: times(given, _named(given)),
    "screen": lambda given: screen(given, _named(given)),
    "front": lambda given: front(given, _named(given, _front(given))),
    "trained": trained,
    "pictures": pictures,
}
SHARED = ("times", "screen", "front", "trained")
"""Parts that several processes share."""


if __name__ == "__main__":
    sys.exit(main())
