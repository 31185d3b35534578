#!/usr/bin/env python3
"""What sparse attention does to a video: every method on the shapes model, scored.

    python scripts/shapes/study.py screen --size large --model FOLDER --out FOLDER [--only REGEX]
    python scripts/shapes/study.py front --size large --model FOLDER --out FOLDER

`study.yaml` lists methods, budgets and what else is varied, one factor at a time. `screen` makes
clips of a few captions with every configuration; `front` of many, with those of the screen that no
other one beats in both score and time. Either is a comparison (`sglang attention compare`) in a
folder of its own, with its page, and goes on where it was stopped; its rows are in FOLDER/PART.csv.
The captions are those of clips that training did not see; the score of these clips and that of
captions swapped among them are rows, too.
"""

import argparse
import csv
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

# A checkout works without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clips import draw_scenes, render
from models import SIZES, Size, Stage
from score import score

STUDY = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
SEED = 11
"""Of the captions: below the seeds of training, and not that of its evaluations."""
METRICS = ("psnr", "ssim", "xpsnr", "vmaf", "st_lpips", "cvvdp")


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


def captions_of(size: Size, count: int) -> tuple[list[str], list[float], list[float]]:
    """Return captions, the scores of their real clips, and those with another's caption."""
    stage = size.stages[-1]
    scenes = draw_scenes(SEED, count, frames=stage.frames, aspect=stage.width / stage.height)
    said = [scene.caption for scene in scenes]
    real, swapped = [], []
    for scene, other in zip(scenes, said[1:] + said[:1], strict=True):
        (clip,) = render([scene], height=stage.height, width=stage.width)
        video = clip.permute(1, 2, 3, 0).numpy()
        real.append(score(video, scene.caption))
        swapped.append(score(video, other))
    return said, real, swapped


def compared(
    pipe: Any, stage: Stage, captions: Sequence[str], part: str, texts: Any, to: Path
) -> Any:
    """Return the report of a comparison of configurations, which goes on where it was stopped."""
    import multimodal_gen

    return multimodal_gen.compare(
        pipe,
        prompts=captions,
        backends=texts,
        output=to,
        seeds=STUDY["parts"][part]["seeds"],
        resume=to.exists(),
        layers_for=2,
        score=score,
        height=stage.height,
        width=stage.width,
        num_frames=stage.frames,
        num_inference_steps=STUDY["steps"],
        guidance_scale=STUDY["guidance_scale"],
        say=lambda line: print(line, flush=True),
    )


def rows_of(report: Any, names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield a row of every run; figures that a run lacks are left out."""
    for run in (report.reference, *report.floor, *report.candidates):
        scores = [each.score for each in run.generations if each.score is not None]
        row = {
            "name": names.get(run.configuration, run.configuration),
            "configuration": run.configuration,
            "status": run.status,
            "clips": len(scores),
            "score": _mean(scores),
            "layer_error": _mean([1 - min(each.cosine) for each in run.layers]),
        }
        found = run.differences.get("score")
        if found is not None:
            row |= {"difference": found.mean, "low": found.low, "high": found.high}
        if run.cost is not None:
            row |= {"density": run.cost.density, "seconds": run.cost.generation_seconds}
        if run.frames_mean is not None:
            row |= {metric: getattr(run.frames_mean, metric) for metric in METRICS}
        device, versions = report.environment.device, report.environment.versions
        row |= {"gpu": device, "torch": versions.get("torch"), "commit": report.environment.commit}
        yield {key: round(x, 5) if isinstance(x, float) else x for key, x in row.items()}


def _mean(figures: Sequence[float]) -> float | None:
    return sum(figures) / len(figures) if figures else None


def front_of(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the configurations that no other one beats in both score and time."""
    whole = [row for row in rows if row["status"] == "done" and row["score"] and row["seconds"]]
    points = [(float(row["score"]), -float(row["seconds"])) for row in whole]
    return [
        row["configuration"]
        for row, point in zip(whole, points, strict=True)
        if not any(
            all(a >= b for a, b in zip(other, point, strict=True)) and other != point
            for other in points
        )
    ]


def write(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows with all their columns as a CSV file."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=tuple(STUDY["parts"]))
    parser.add_argument("--size", choices=sorted(SIZES), default="large")
    parser.add_argument("--model", type=Path, required=True, help="folder of the pipeline")
    parser.add_argument("--out", type=Path, required=True, help="folder of comparisons and rows")
    parser.add_argument("--only", default="", help="configurations whose name matches")
    parser.add_argument("--captions", type=int, help="how many (those of the part)")
    given = parser.parse_args(argv)
    size = SIZES[given.size]
    count = given.captions or STUDY["parts"][given.part]["captions"]
    names = {text: name for name, text in configurations(given.only)}
    texts = list(names)
    if given.part == "front":
        with (given.out / "screen.csv").open(newline="") as file:
            best = set(front_of(list(csv.DictReader(file))))
        texts = [text for text in texts if text in best]
    from diffusers import WanPipeline

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    pipe = WanPipeline.from_pretrained(given.model, torch_dtype=dtype).to(device)
    captions, real, swapped = captions_of(size, count)
    report = compared(pipe, size.stages[-1], captions, given.part, texts, given.out / given.part)
    ends = {"real clips": real, "captions swapped": swapped}
    rows = [{"name": name, "clips": count, "score": _mean(each)} for name, each in ends.items()]
    write([*rows, *rows_of(report, names)], given.out / f"{given.part}.csv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
