"""`report.html`: a report as one page that needs no network and no other file.

A page stays below its limit by what its clips take, in this order: they are encoded at the first
step of `SIZES`; while the page is too large, at the next one; and if even the last is too much, the
last prompts and seeds lose theirs, one after another, which the page says. Figures are always of
all clips, as they were generated.
"""

import base64
import io
import itertools
import json
import math
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from multimodal_gen.errors import MissingDependencyError, UsageError
from multimodal_gen.files import atomic_write
from multimodal_gen.runtime.comparison.frames import find_ffmpeg
from multimodal_gen.runtime.comparison.paired import (
    as_fast,
    difference,
    holds,
    is_faster,
    speed_text,
)
from multimodal_gen.runtime.comparison.plots import (
    HeatMap,
    Series,
    error_over_steps,
    heat_maps,
    largest_error,
    latents_over_steps,
    series_of,
    time_against_quality,
)
from multimodal_gen.runtime.comparison.record import (
    Estimate,
    MaskPicture,
    Report,
    Run,
    grouped,
    kept_mass_sources,
)
from multimodal_gen.runtime.comparison.verdict import (
    FACTOR,
    MEASURES,
    SCORE,
    Measure,
    NoiseComparison,
    compare_with_noise,
    was_dense,
)

LIMIT = 20_000_000
"""Bytes that a page may have."""

SIZES = ((640, 23), (480, 26), (360, 29), (240, 32))
"""Longest side of a clip in pixels, and the rate factor of H.264: larger is coarser."""

_PICTURES = 6  # of masks, by run
_DENSE = "dense in every call: no winner"  # a row's kind
_SEARCHED = ("psnr", "vmaf", "score")  # what time is drawn against
_PACKAGE = "multimodal_gen.runtime.comparison"


def require_page() -> None:
    """Check that a page can be made, before minutes are spent on what it shows.

    Raises:
        MissingDependencyError: a package is missing.
    """
    find_ffmpeg()
    for package in ("matplotlib", "jinja2", "numpy", "PIL"):
        try:
            __import__(package)
        except ImportError as error:
            raise MissingDependencyError(
                f"the page of a comparison needs {package} ({error}); install with: "
                f"pip install 'multimodal_gen[compare]'"
            ) from error


def write_page(report: Report, folder: Path, path: Path, *, limit: int = LIMIT) -> int:
    """Write the page of a report, all of it or nothing; an older one is replaced.

    Args:
        report: with verdicts (`judged`).
        folder: where the paths of its clips start.
        path: the page, "report.html".
        limit: bytes it may have.

    Returns:
        Its size in bytes.

    Raises:
        MissingDependencyError: a package is missing.
        UsageError: the limit is too small for a page without clips, or a clip cannot be encoded.
    """
    require_page()
    context = _context(report)
    bare = len(_rendered(context))
    if bare > limit:
        raise UsageError(
            f"limit must be at least {bare} bytes, which the page takes without clips, got {limit}"
        )
    takes, note = _takes(report, folder, limit - bare)
    if note:
        context["notes"] = [*context["notes"], note]
    frames = [clip["frames"] for take in takes for clip in take["clips"]]
    page = _rendered({**context, "takes": takes, "frames": max(frames, default=1)})
    with atomic_write(path) as partial:
        partial.write_bytes(page)
    return len(page)


def _rendered(context: Mapping[str, Any]) -> bytes:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    sources = {
        part: files(_PACKAGE).joinpath(f"page.{part}").read_text("utf-8")
        for part in ("html", "css", "js")
    }
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(sources["html"]).render(
        style=Markup(sources["css"]), script=Markup(sources["js"]), **context
    )
    return page.encode("utf-8", "replace")  # a prompt may hold half of a surrogate pair


def _context(report: Report) -> dict[str, Any]:
    """Return what the template needs, but for the clips."""
    from markupsafe import Markup

    series = series_of(report)
    colours = {each.run.name: each.css for each in series}
    found = {run.name: compare_with_noise(run, report.floor) for run in report.runs[1:]}
    measures = [m for m in MEASURES if any(e.measure is m for run in found.values() for e in run)]
    scored = [SCORE] if report.score is not None else []
    trade_offs = [
        (Markup(svg), measure.label)
        for measure in (*MEASURES, SCORE)
        if measure.name in _SEARCHED and (svg := time_against_quality(series, measure))
    ]
    drawn = {"latents": latents_over_steps(series), "errors": error_over_steps(series)}
    steps = {name: Markup(svg) for name, svg in drawn.items() if svg}
    maps = _maps(heat_maps(series, report.floor), colours)
    mapped = {group["name"] for group in maps}
    masks = [
        {**_mask(picture), "run": run.name, "colour": colours[run.name]}
        for run in report.candidates
        for picture in run.masks[:_PICTURES]
    ]
    return {
        "report": report,
        "factor": f"{FACTOR:g}",
        "is_video": report.model.kind == "video",
        "glance": _glance(report),
        "measures": [*measures, *scored],
        "searched": [m for m in (*MEASURES, SCORE) if m.name in _SEARCHED],
        "differences": _differences(report, [*measures, *scored]),
        "rows": [_row(report, each, found.get(each.run.name, ()), measures) for each in series],
        "notes": list(report.notes),
        "trade_offs": trade_offs,
        "steps": steps,
        "maps": maps,
        "unmapped": [
            (run.name, largest_error(run))
            for run in report.runs[1:]
            if run.layers and run.name not in mapped
        ],
        "layer_table": _layer_table(report),
        "layer_clips": max((call.clips for run in report.runs for call in run.layers), default=0),
        "masks": masks,
        "takes": [],
        "frames": 1,
    }


def _glance(report: Report) -> list[tuple[str, str, str]]:
    """Return what the fastest runs of each verdict are: label, names and speed.

    Those whose speed the clips do not tell from the fastest's are named with it. Within the noise
    it is the reference where nothing is faster than it by more than chance.
    """
    found = []
    candidates = [run for run in report.candidates if not was_dense(run)]
    for word, label in (
        ("within the noise of dense kernels", "Fastest within the noise"),
        ("visible", "Fastest with a visible difference"),
    ):
        timed = [
            (-run.speed.mean, run.name, run)
            for run in (*report.floor, *candidates)
            if run.verdict and run.verdict.word == word and run.speed
        ]
        if timed:
            *_, fastest = min(timed, key=lambda each: each[:2])
            names = [fastest.name, *as_fast(fastest, (run for *_, run in timed))]
            hint = f"{_speed(fastest)} x the reference's speed"
            if not is_faster(fastest.speed, report.reference.speed):
                hint += ", no faster than its own noise"
                if word != "visible":
                    names = [report.reference.name]
                    hint = "the reference: nothing within the noise is faster by more than chance"
            found.append((label, " or ".join(names), hint))
    for word, label in (("broken", "Broken"), ("failed", "Failed")):
        names = [run.name for run in report.runs if run.verdict and run.verdict.word == word]
        found += [(label, ", ".join(names), "")] if names else []
    return found


def _differences(report: Report, measures: Sequence[Measure]) -> dict[str, Any]:
    """Return what lies between runs, paired by clip: rows of candidates and of all, by measure.

    Those of candidates are from the one that is best by a measure, those of all from dense kernels:
    the noise, of the score the reference.
    """
    runs = [
        run
        for run in report.candidates
        if run.verdict and run.verdict.word not in ("broken", "failed")
        if not was_dense(run) and len(run.generations) > 1
    ]
    columns = [_from_best(measure, runs) for measure in measures]
    best = [(run.name, [column[run.name] for column in columns]) for run in runs]
    dense = [
        (
            run.name,
            [_difference(measure, run.differences.get(measure.name)) for measure in measures],
        )
        for run in (*report.floor, *report.candidates)
        if run.differences and len(run.generations) > 1
    ]
    return {"best": best if len(best) > 1 else [], "dense": dense}


def _difference(measure: Measure, found: Estimate | None) -> tuple[str, str, bool]:
    """Return a difference, its interval, and whether it is beyond chance."""
    if found is None:
        return "-", "", False
    return (*measure.apart(found), not holds(found, 0))


def _from_best(measure: Measure, runs: Sequence[Run]) -> dict[str, tuple[str, str, bool]]:
    """Return each run's cell of a measure: difference, interval, whether it is beyond chance."""
    figures = {run.name: measure.figures(run) for run in runs}
    distances = {
        name: statistics.fmean(map(measure.distance, found.values()))
        for name, found in figures.items()
        if found
    }
    sound = {name: apart for name, apart in distances.items() if not math.isnan(apart)}
    best = min(sound, key=lambda name: sound[name], default="")
    cells = {
        name: _difference(measure, difference(found, figures.get(best, {})))
        for name, found in figures.items()
    }
    return {**cells, best: ("best", "", False)}


def _row(
    report: Report, drawn: Series, found: Sequence[NoiseComparison], measures: Sequence[Any]
) -> dict[str, Any]:
    run = drawn.run
    kind = "candidate"
    if run is report.reference:
        kind = "the reference"
    elif any(run is each for each in report.floor):
        kind = "exact kernel: the noise"
    elif was_dense(run):
        kind = _DENSE
    by_measure = {each.measure.name: each for each in found}
    cells = [_cell(by_measure.get(measure.name), kind) for measure in measures]
    cells += [_score(run)] if report.score is not None else []
    speed = _speed(run).partition(" ")
    return {"run": run, "kind": kind, "colour": drawn.css, "cells": cells, "speed": speed}


def _cell(found: NoiseComparison | None, kind: str) -> dict[str, Any]:
    if found is None:
        return {"text": "-", "small": [], "beyond": False}
    number = found.measure.number(found.mean)
    if math.isinf(found.mean) and found.measure.better == "higher":
        number = "equal"
    several = found.count > 1 and math.isfinite(found.mean)
    small = [f"\u00b1 {found.measure.number(found.spread)}"] if several else []
    beyond = found.within is False and kind in ("candidate", _DENSE)
    return {"text": number, "small": small, "beyond": beyond}


def _score(run: Run) -> dict[str, Any]:
    scores, apart = [*SCORE.figures(run).values()], run.differences.get("score")
    text = SCORE.number(statistics.fmean(scores)) if scores else "-"
    lower, interval, beyond = _difference(SCORE, apart)
    small = [lower, interval] if apart is not None else []
    return {"text": text, "small": small, "beyond": beyond}


def _speed(run: Run) -> str:
    return "-" if run.speed is None else speed_text(run.speed)


def _maps(found: Sequence[HeatMap], colours: Mapping[str, str]) -> list[dict[str, Any]]:
    from markupsafe import Markup

    groups: dict[str, list[dict[str, Any]]] = {}
    for each in found:
        data = {
            "box": [round(share, 4) for share in each.box],
            "across": each.across,
            "rows": each.rows,
            "columns": each.columns,
            "values": [[v if v is None else float(f"{v:.3g}") for v in r] for r in each.values],
        }
        groups.setdefault(each.run, []).append(
            {
                "svg": Markup(each.svg),
                "data": json.dumps(data),
                "drawn": each,
                "has_gaps": None in sum(each.values, ()),
            }
        )
    return [{"name": run, "colour": colours[run], "maps": maps} for run, maps in groups.items()]


def _layer_table(report: Report) -> dict[str, Any]:
    """Return the mean error of every layer, and the density and cosine of all."""
    runs = [run for run in report.runs[1:] if run.layers]
    errors = [
        grouped(
            ((call.component, call.layer), error)
            for call in run.layers
            for error in call.relative_l2
        )
        for run in runs
    ]
    rows = [
        (f"{place[0]} {place[1]}", [_mean(of_run.get(place, ()), "{:.2e}") for of_run in errors])
        for place in sorted({place for of_run in errors for place in of_run})
    ]
    for label, figures in (
        ("density", lambda call: (call.density,)),
        ("mass kept", lambda call: call.kept_mass or ()),
        ("cosine", lambda call: call.cosine),
    ):
        means = [_mean([f for call in run.layers for f in figures(call)], "{:.4f}") for run in runs]
        rows.append((label, means))
    rows.append(("mass kept, from", [", ".join(kept_mass_sources(run)) or "-" for run in runs]))
    spreads = [[call.spread for call in run.layers if call.spread is not None] for run in runs]
    if any(spreads):
        means = [_mean([f for each in of for f in each.relative_l2], "{:.2e}") for of in spreads]
        rows.append(("error, spread over clips", means))
    return {"heads": [run.name for run in runs], "rows": rows}


def _mean(figures: Sequence[float], form: str) -> str:
    return form.format(statistics.fmean(figures)) if figures else "-"


def _mask(picture: MaskPicture) -> dict[str, Any]:
    """Return the strips of one head's mask, one picture per layer of cells in time."""
    import numpy as np

    kept, exact = (np.array(each, dtype=float) for each in (picture.kept, picture.exact))
    share = float((kept > 0).mean())
    mass = float(exact[kept > 0].sum() / exact.sum()) if exact.sum() else 0.0
    strips = [("the run", "What is kept", kept), ("exact attention", "Exact attention", exact)]
    return {
        "picture": picture,
        "share": share,
        "mass": mass,
        "strips": [
            {"label": label, "title": title, "frames": list(_mask_frames(picture, weights))}
            for label, title, weights in strips
        ],
    }


def _mask_frames(picture: MaskPicture, weights: Any) -> Iterator[dict[str, Any]]:
    """Yield a picture per layer of cells: a pixel per token, transparent where nothing is kept."""
    import numpy as np
    from matplotlib import colormaps
    from PIL import Image

    colours = (colormaps["viridis"](np.linspace(0, 1, 255))[:, :3] * 255).round().astype(np.uint8)
    palette = [0, 0, 0, *colours.flatten().tolist()]
    high = weights.max() or 1.0
    # Three decades: attention falls off by orders of magnitude.
    levels = 1 + np.log10((weights / high).clip(1e-3, 1)) / 3
    indices = np.where(weights > 0, 1 + (levels * 254).round(), 0).astype(np.uint8)
    frames, height, width = picture.grid
    t, y, x = picture.query
    for number, cells in enumerate(indices):
        tokens = cells.repeat(picture.cell[1], 0).repeat(picture.cell[2], 1)[:height, :width]
        image = Image.fromarray(np.ascontiguousarray(tokens)).convert("P")
        image.putpalette(palette)
        buffer = io.BytesIO()
        image.save(buffer, "PNG", transparency=0, optimize=True)
        first = number * picture.cell[0]
        last = min(first + picture.cell[0], frames) - 1
        yield {
            "uri": _data_uri("image/png", buffer.getvalue()),
            "label": f"frame {first}" if first == last else f"frames {first}-{last}",
            "query": (100 * (x + 0.5) / width, 100 * (y + 0.5) / height)
            if first <= t <= last
            else None,
        }


def _takes(report: Report, folder: Path, room: int) -> tuple[list[dict[str, Any]], str]:
    """Return the clips by prompt and seed, in at most `room` bytes, and what had to be left out."""
    takes: list[dict[str, Any]] = []
    asked = list(itertools.product(range(len(report.prompts)), report.seeds))
    for size in SIZES:
        takes = [_take(report, folder, *each, size) for each in asked]
        if sum(map(_weight, takes)) <= room:
            return takes, ""
    total = len(takes)
    while takes and sum(map(_weight, takes)) > room:
        takes.pop()
    return takes, (
        f"The clips of {total - len(takes)} of {total} prompts and seeds are left out of this "
        f"page, to keep it small; they are in its folder."
    )


def _weight(take: Mapping[str, Any]) -> int:
    """Return about how many bytes the clips of a prompt and seed take in the page."""
    return sum(len(clip["uri"]) + 600 for clip in take["clips"]) + 4 * len(take["prompt"]) + 400


def _take(
    report: Report, folder: Path, prompt: int, seed: int, size: tuple[int, int]
) -> dict[str, Any]:
    fps = float(report.settings.get("fps") or 16)
    clips = []
    for each in series_of(report):
        for clip in each.run.generations:
            if (clip.prompt, clip.seed) == (prompt, seed) and clip.frames_path:
                pixels = _pixels(folder / clip.frames_path)
                encoded = _encoded(pixels, report.model.kind == "video", size, fps)
                found = {"run": each.run, "colour": each.css, "generation": clip}
                clips.append({**found, "frames": len(pixels), **encoded})
    return {"number": prompt + 1, "seed": seed, "prompt": report.prompts[prompt], "clips": clips}


def _pixels(path: Path) -> Any:
    """Return a clip [T, H, W, C] that is read when it is needed."""
    import numpy as np

    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"the clip {str(path)!r} must be a NumPy file: {error}") from None


def _encoded(pixels: Any, is_video: bool, size: tuple[int, int], fps: float) -> dict[str, Any]:
    height, width = pixels.shape[1:3]
    scale = min(1.0, size[0] / max(height, width))
    # H.264 needs even sizes.
    width, height = (max(2, 2 * round(length * scale / 2)) for length in (width, height))
    if is_video:
        data = _as_h264(pixels, (width, height), size[1], fps)
        return {"uri": _data_uri("video/mp4", data), "width": width, "height": height}
    from PIL import Image

    buffer = io.BytesIO()
    image = Image.fromarray(pixels[0].squeeze()).convert("RGB")
    image.resize((width, height), Image.Resampling.LANCZOS).save(buffer, "JPEG", quality=90)
    return {"uri": _data_uri("image/jpeg", buffer.getvalue()), "width": width, "height": height}


def _as_h264(pixels: Any, size: tuple[int, int], factor: int, fps: float) -> bytes:
    """Return an MP4 whose every eighth frame can be sought to at once."""
    import tempfile

    height, width, channels = pixels.shape[1:]
    layout = {1: "gray", 3: "rgb24", 4: "rgba"}[channels]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "clip.mp4")
        command = [
            find_ffmpeg(), "-loglevel", "error", "-f", "rawvideo", "-pix_fmt", layout,
            "-s", f"{width}x{height}", "-r", f"{fps:g}", "-i", "-",
            "-vf", f"scale={size[0]}:{size[1]}:flags=area", "-pix_fmt", "yuv420p",
            "-c:v", "libx264", "-preset", "veryfast", "-crf", str(factor), "-g", "8", "-bf", "0",
            "-movflags", "+faststart", "-an", str(target),
        ]  # fmt: skip
        done = subprocess.run(command, input=pixels.tobytes(), capture_output=True)
        if done.returncode:
            reason = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise UsageError(f"a clip could not be encoded for the page: {' '.join(reason)}")
        return target.read_bytes()


def _data_uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
