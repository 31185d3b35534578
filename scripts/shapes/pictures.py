"""The pictures of the study: score against time, and frames of clips next to each other."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, str]
MARKS = {"tail": ("^", "with its tail"), "dense first": ("s", "first steps dense")}
FRAMES = 5  # of a clip
_WIDTH = 208  # of a frame, in pixels
_LABEL = 22  # height of a line of text, in pixels


def joined(folder: Path) -> list[dict[str, str]]:
    """Return the rows of the screen that have a score, with the seconds of `times`.

    Dense attention has those of `auto`, the fastest that is exact.
    """
    timed = {row["configuration"]: row["seconds"] for row in _rows(folder / "times.csv")}
    timed["torch_sdpa"] = timed.get("auto", timed["torch_sdpa"])
    return [
        {**row, "seconds": timed[row["configuration"]]}
        for row in _rows(folder / "screen.csv")
        if row["score"] and timed.get(row["configuration"])
    ]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def draw_curves(rows: Sequence[Row], out: Path) -> None:
    """Draw score against time, a panel per method, dense attention in each.

    Args:
        rows: of `joined`.
        out: the picture, PNG or SVG.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "study"  # the same rows give the same file
    from matplotlib import pyplot

    (dense,) = (row for row in rows if row["configuration"] == "torch_sdpa")
    methods = dict.fromkeys(_method(row) for row in rows if ":{" in row["configuration"])
    columns = min(4, len(methods))
    lines = -(-len(methods) // columns)
    size = (3.0 * columns, 2.3 * lines + 0.6)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axis, method in zip(axes.flat, methods, strict=False):
        axis.axhline(float(dense["score"]), color="gray", linewidth=0.8)
        axis.plot(*_point(dense), "*", color="black", markersize=9, label="dense")
        of_method = [row for row in rows if _method(row) == method]
        budgets = [_point(row) for row in of_method if ", " not in row["name"]]
        axis.plot(*zip(*sorted(budgets), strict=True), "o-", label="four budgets")
        for variant, (mark, label) in MARKS.items():
            found = [_point(row) for row in of_method if row["name"].endswith(f", {variant}")]
            if found:
                axis.plot(*zip(*found, strict=True), mark, markersize=7, label=label)
        axis.set_title(method, fontsize=9)
        axis.grid(alpha=0.3)
    for axis in [*axes.flat][len(methods) :]:
        axis.set_axis_off()
    axes.flat[0].set_ylim(0, 1.05)
    axes.flat[0].set_xlim(left=0)
    figure.supxlabel("seconds of one video at the dimensions of Wan 1.3B", fontsize=9)
    figure.supylabel("score", fontsize=9)
    labelled = {x.get_label(): x for axis in axes.flat for x in axis.get_lines()}
    labelled = {name: line for name, line in labelled.items() if not name.startswith("_")}
    figure.legend(
        labelled.values(), labelled.keys(), loc="outside upper center", ncols=4, fontsize=9
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    pyplot.close(figure)


def _method(row: Row) -> str:
    return row["configuration"].partition(":")[0]


def _point(row: Row) -> tuple[float, float]:
    return float(row["seconds"]), float(row["score"])


def clips_in(reports: Sequence[Path], prompt: int) -> Iterator[tuple[str, Any]]:
    """Yield the configurations of comparisons, each with its clip [T, H, W, 3] of a prompt."""
    import numpy as np

    seen: set[str] = set()
    for path in reports:
        report, folder = json.loads(path.read_text("utf-8")), path.parent
        for run in (report["reference"], *report["candidates"]):
            made = [x for x in run["generations"] if x["prompt"] == prompt and x["frames_path"]]
            if made and run["configuration"] not in seen:
                seen.add(run["configuration"])
                yield run["configuration"], np.load(folder / made[0]["frames_path"], mmap_mode="r")


def draw_clips(clips: Mapping[str, Any], out: Path) -> None:
    """Draw frames of clips, a line for each under its name.

    Args:
        clips: uint8 [T, H, W, 3] by name.
        out: the picture.
    """
    from PIL import Image, ImageDraw

    lines = []
    for name, clip in clips.items():
        places = [round(i * (len(clip) - 1) / (FRAMES - 1)) for i in range(FRAMES)]
        height = round(_WIDTH * clip.shape[1] / clip.shape[2])
        line = Image.new("RGB", (FRAMES * _WIDTH, height + _LABEL), "white")
        ImageDraw.Draw(line).text((4, 5), name, fill="black")
        for number, place in enumerate(places):
            frame = Image.fromarray(clip[place]).resize((_WIDTH, height))
            line.paste(frame, (number * _WIDTH, _LABEL))
        lines.append(line)
    whole = Image.new("RGB", (FRAMES * _WIDTH, sum(line.height for line in lines)))
    top = 0
    for line in lines:
        whole.paste(line, (0, top))
        top += line.height
    out.parent.mkdir(parents=True, exist_ok=True)
    whole.save(out, quality=85)
