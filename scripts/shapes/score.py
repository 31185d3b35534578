#!/usr/bin/env python3
"""How much of a caption a clip holds, read from its pixels without a network.

    python scripts/shapes/score.py CAPTION [VIDEO ...]

prints that of each video, and how far the others are from the first. Without videos it prints
nothing, and fails where the caption is none.

`score` finds the shapes of a clip by their hue, as grounds are grey, and reads kind, motion and
speed from the area that each covers over the frames. What it reads is compared with what the
caption says: one fact for the number of shapes, and for each that the caption names whether its
colour is there, its kind, its motion, and its speed where one is said. The score is the share of
facts that hold. The ground is none of them.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

COLOURS = ("red", "green", "blue", "yellow", "purple", "cyan")
_HUES = np.array([0.0, 131.0, 229.0, 53.0, 286.0, 188.0])  # degrees
_ROWS = 240  # of a frame that has more, pixels in between are not read
_SATURATED = 0.4  # least spread of a pixel's channels that is no grey
_PRESENT = 0.008  # least share of a frame that is a shape
_WHOLE = 0.85  # share of a shape's area from which on nothing hides it
_SEEN = 0.4  # and from which on it can be followed
_HIDDEN = 0.2  # most frames that a shape may be hidden in
_PART = 0.1  # least share of a colour's area that is a shape of its own
_FRAMES = 5  # in which these are counted
_ROWS_OF_COUNT = 80  # of a frame, likewise

_STEP = "left|right|up|down"
_OBJECT = re.compile(
    rf"an? ({'|'.join(COLOURS)}) (ball|box|triangle|ring) (stands still|bounces left and right"
    rf"|bounces up and down|moves (?:slowly |quickly )?(?:{_STEP})(?: then (?:{_STEP}))?)"
)
_EXAMPLE = "a red ball moves right and a blue box stands still over a striped ground"

Floats = NDArray[np.floating]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Read:
    """What is seen, or said, of one shape.

    Attributes:
        colour: its name.
        kind: "ball", "box", "triangle" or "ring".
        motion: "moves right then up", "bounces up and down", "stands still", ...
        speed: "slowly", "quickly", or "" where the motion has none.
        count: shapes of that colour.
    """

    colour: str
    kind: str
    motion: str
    speed: str
    count: int = 1


def score(video: Sequence[object] | Floats, prompt: str) -> float:
    """Return the share of a caption's facts that a clip holds, in [0, 1].

    Args:
        video: [T, H, W, 3], floats in [0, 1] or uint8; or frames that are such arrays or pictures.
        prompt: a caption of `clips.Scene`.

    Raises:
        ValueError: the video or the caption is none.
    """
    held = [holds for kind in facts(video, prompt).values() for holds in kind]
    return sum(held) / len(held)


def facts(video: Sequence[object] | Floats, prompt: str) -> dict[str, list[bool]]:
    """Return what a caption says, and of each fact whether a clip holds it.

    Args:
        video: as for `score`.
        prompt: the same.

    Returns:
        By "number", "colour", "kind", "motion" and "speed".

    Raises:
        ValueError: the video or the caption is none.
    """
    said = said_by(prompt)
    seen = {shape.colour: shape for shape in seen_in(as_array(video, rows=_ROWS))}
    pairs = [(shape, seen.get(shape.colour)) for shape in said]
    number = sum(shape.count for shape in seen.values())
    held = {"number": [number == len(said)], "colour": [found is not None for _, found in pairs]}
    for name in ("kind", "motion", "speed"):
        held[name] = [
            found is not None and getattr(found, name) == getattr(shape, name)
            for shape, found in pairs
            if getattr(shape, name)
        ]
    return held


def as_array(video: Sequence[object] | Floats, *, rows: int | None = None) -> Floats:
    """Return a clip as fp32 [T, H, W, 3] in [0, 1].

    Args:
        video: as for `score`.
        rows: of a frame that has twice as many or more, pixels in between are left out.

    Raises:
        ValueError: it is no clip.
    """
    frames = [np.asarray(frame) for frame in video] if np.iterable(video) else []
    kinds = {f"{frame.dtype} {[*frame.shape]}": frame for frame in frames}
    wanted = "a video must be [T, H, W, 3], finite floats in [0, 1] or uint8, got"
    if len(kinds) != 1:
        raise ValueError(f"{wanted} {' and '.join(kinds) or 'no frame'}")
    ((kind, frame),) = kinds.items()
    is_bytes, is_float = frame.dtype == np.uint8, np.issubdtype(frame.dtype, np.floating)
    if not (is_bytes or is_float) or frame.shape[2:] != (3,) or not frame.size:
        raise ValueError(f"{wanted} frames of {kind}")
    if is_float:
        low, high = (float(of([of(frame) for frame in frames])) for of in (np.min, np.max))
        if not 0 <= low <= high <= 1:
            raise ValueError(f"{wanted} frames of {kind} from {low:g} to {high:g}")
    step = max(1, len(frame) // rows) if rows else 1
    array = np.stack([frame[::step, ::step] for frame in frames])
    return array.astype(np.float32) / (255 if is_bytes else 1)


def said_by(prompt: str) -> list[Read]:
    """Return what a caption says of each shape.

    Raises:
        ValueError: it is none of `clips.Scene`.
    """
    text = prompt if isinstance(prompt, str) else ""
    objects, _, ground = text.strip().rstrip(".").lower().partition(" over ")
    found = [_OBJECT.fullmatch(each) for each in re.split(r" and (?=an? )", objects)]
    if not re.fullmatch(r"an? \w+ ground", ground) or None in found:
        raise ValueError(f"a caption must be such as {_EXAMPLE!r}, got {prompt!r}")
    said = []
    for colour, kind, motion in (each.groups() for each in found if each):
        speed = next((word for word in ("slowly", "quickly") if word in motion), "")
        said.append(Read(colour, kind, motion.replace(f"{speed} ", "") if speed else motion, speed))
    return said


def seen_in(video: Floats) -> list[Read]:
    """Return what a clip [T, H, W, 3] shows of each shape."""
    red, green, blue = np.moveaxis(video, -1, 0)
    spread = np.maximum(np.maximum(red, green), blue) - np.minimum(np.minimum(red, green), blue)
    coloured = spread > _SATURATED
    nearest = np.full(coloured.shape, -1, np.int8)
    nearest[coloured] = _nearest_hue(video[coloured])
    found = []
    for number, colour in enumerate(COLOURS):
        mask = nearest == number
        areas = mask.mean((1, 2))
        if np.quantile(areas, _HIDDEN) >= _PRESENT:
            whole = np.flatnonzero(areas >= _WHOLE * np.quantile(areas, 0.9))
            step = max(1, mask.shape[1] // _ROWS_OF_COUNT)
            few = mask[whole[:: -(-len(whole) // _FRAMES)], ::step, ::step]
            count = int(np.median([_count(frame) for frame in few]))
            found.append(Read(colour, _kind(mask[whole]), *_motion(mask, areas), count))
    return found


def _nearest_hue(pixels: Floats) -> NDArray[np.integer]:
    """Return the number of the colour whose hue is nearest, of pixels [N, 3]."""
    red, green, blue = pixels.T
    hue = np.degrees(np.arctan2(np.sqrt(3) * (green - blue), 2 * red - green - blue))
    apart = np.abs((hue[..., None] - _HUES + 180) % 360 - 180)
    return apart.argmin(-1)


def _box(mask: Bools) -> tuple[float, float, float, float]:
    """Return the first and last row and column that a shape covers more than at a point."""
    edges: list[float] = []
    for counts in (mask.sum(1), mask.sum(0)):
        inside = np.flatnonzero(counts > max(1, 0.08 * counts.max()))
        edges += [inside[0], inside[-1] + 1]
    return edges[0], edges[1], edges[2], edges[3]


def _count(mask: Bools) -> int:
    """Return how many parts of a frame's mask [H, W] hang together, specks aside."""
    left, count = mask.copy(), 0
    while left.any():
        part = np.zeros_like(left)
        part.flat[left.argmax()] = True
        size = 0
        while size < part.sum():
            size = part.sum()
            for way in (part, part[::-1], part.T, part.T[::-1]):  # down, up, right, left
                way[1:] |= way[:-1]
            part &= left
        count += size >= _PART * mask.sum()
        left &= ~part
    return count


def _kind(masks: Bools) -> str:
    """Return what a shape is, by frames [N, H, W] in which nothing hides it."""
    votes: list[str] = []
    for mask in masks:
        top, bottom, left, right = map(int, _box(mask))
        part = mask[top:bottom, left:right]
        height, width = part.shape
        middle = part[2 * height // 5 : 3 * height // 5 + 1, 2 * width // 5 : 3 * width // 5 + 1]
        upper, lower = part[: height // 2].sum(), part[(height + 1) // 2 :].sum()
        if middle.mean() < 0.5:
            votes.append("ring")
        elif lower > 1.7 * upper:
            votes.append("triangle")
        else:
            votes.append("box" if part.mean() > 0.89 else "ball")
    return max(set(votes), key=votes.count)


def _motion(mask: Bools, areas: Floats) -> tuple[str, str]:
    """Return how a shape moves, and how fast, from the middle of what it covers."""
    seen = np.flatnonzero(areas >= _SEEN * np.quantile(areas, 0.9))
    height = mask.shape[1]
    boxes = np.array([_box(mask[frame]) for frame in seen]) / height
    middle = np.stack([boxes[:, 2:].mean(1), boxes[:, :2].mean(1)], 1)
    frames = np.arange(len(mask))
    path = np.stack([np.interp(frames, seen, axis) for axis in middle.T], 1)
    ends = max(1, len(path) // 8)
    first, last = path[:ends].mean(0), path[-ends:].mean(0)
    half = path[len(path) // 2]
    across = int(np.ptp(path, axis=0).argmax())
    extent, net = float(np.ptp(path[:, across])), last - first
    legs = np.array([half - first, last - half])
    if extent < 0.07:
        return "stands still", ""
    back = np.abs(np.diff(path[:, across])).sum()
    if back > 1.8 * extent:
        return ("bounces left and right", "bounces up and down")[across], ""
    lengths = np.linalg.norm(legs, axis=1)
    turned = abs(legs[0] @ legs[1]) < 0.6 * lengths.prod()
    if lengths.min() > 0.07 and turned:
        speed = "quickly" if lengths.mean() > 0.24 else "slowly"
        return f"moves {_word(legs[0])} then {_word(legs[1])}", speed
    speed = "quickly" if float(np.linalg.norm(net)) > 0.35 else "slowly"
    return f"moves {_word(net)}", speed


def _word(step: Floats) -> str:
    """Return the direction of a step."""
    axis = int(np.abs(step).argmax())
    return (("left", "right"), ("up", "down"))[axis][int(step[axis] > 0)]


def psnr(video: Floats, reference: Floats) -> float:
    """Return how near a clip is to another in decibels; infinite where they are the same."""
    with np.errstate(divide="ignore"):
        return float(-10 * np.log10(np.mean(np.square(video - reference))))


def _read(path: Path) -> Floats:
    """Return the clip of a file.

    Raises:
        ValueError: it holds none.
    """
    from imageio_ffmpeg import get_ffmpeg_exe

    words = [get_ffmpeg_exe(), "-v", "error", "-i", path, "-f", "image2pipe", "-c:v", "ppm", "-"]
    done = subprocess.run(words, capture_output=True)
    header = re.match(rb"P6\n(\d+) (\d+)\n255\n", done.stdout)
    if header is None:
        said = done.stderr.decode().strip().rpartition("\n")[2]
        raise ValueError(f"{path} must be a video: {said or 'it has no frame'}")
    width, height = map(int, header.groups())
    frames = np.frombuffer(done.stdout, np.uint8).reshape(-1, header.end() + 3 * width * height)
    return as_array(frames[:, header.end() :].reshape(-1, height, width, 3))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("caption", help="what the videos should show")
    parser.add_argument("videos", type=Path, nargs="*", help="the first is the reference")
    given = parser.parse_args(argv)
    try:
        said_by(given.caption)
        clips = [_read(path) for path in given.videos]
        scores = [score(clip, given.caption) for clip in clips]
    except ValueError as error:
        parser.error(str(error))
    if any(clip.shape != clips[0].shape for clip in clips):
        parser.error("videos must have the same size and length")
    for path, found, clip in zip(given.videos, scores, clips, strict=True):
        apart = f", PSNR {psnr(clip, clips[0]):.1f} dB from {given.videos[0]}"
        print(f"{path}: {found:.0%} of the caption{'' if clip is clips[0] else apart}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
