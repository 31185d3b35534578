"""Clips of coloured shapes that move over a ground, with captions and the truth of every frame.

Scenes are drawn on the CPU from a seed and rendered on any device, so that the same seed gives the
same clips everywhere. A caption says what can be seen, and no more:

    a red ball moves quickly right and a blue box bounces up and down over a striped ground

Coordinates are in heights of the frame, from its upper left corner; y grows downwards.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

COLOURS = {
    "red": (0.90, 0.12, 0.12),
    "green": (0.10, 0.70, 0.22),
    "blue": (0.15, 0.30, 0.95),
    "yellow": (0.95, 0.85, 0.10),
    "purple": (0.65, 0.15, 0.80),
    "cyan": (0.10, 0.80, 0.90),
}
"""Name -> RGB in [0, 1]; grounds are grey, so that a hue belongs to a shape."""

KINDS = ("ball", "box", "triangle", "ring")
GROUNDS = ("plain", "striped", "checked", "dotted")
STEPS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}
BOUNCES = {"bounces left and right": (1.0, 0.0), "bounces up and down": (0.0, 1.0)}
STILL = "stands still"
SPEEDS = ("slowly", "quickly")

# Heights of the frame that a shape covers in a clip, by speed: of one leg, and of each of two.
_LEG = {"slowly": (0.20, 0.30), "quickly": (0.46, 0.60)}
_HALF = {"slowly": (0.14, 0.20), "quickly": (0.32, 0.42)}
_SWING = (0.22, 0.34)
_RADIUS = (0.12, 0.17)
_PAN = 0.25  # heights of the frame that the ground moves at most in a clip
_TRIES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Motion:
    """How a shape moves.

    Attributes:
        words: as in a caption, without the speed: "moves right then up".
        speed: one of `SPEEDS`; "" where the words have none.
    """

    words: str
    speed: str = ""

    def __str__(self) -> str:
        if not self.speed:
            return self.words
        verb, _, rest = self.words.partition(" ")
        return f"{verb} {self.speed} {rest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One object of a scene.

    Attributes:
        kind: one of `KINDS`.
        colour: a name of `COLOURS`.
        motion: how it moves.
        radius: half of its height, in heights of the frame.
        path: its centre (x, y) in every frame.
    """

    kind: str
    colour: str
    motion: Motion
    radius: float
    path: tuple[tuple[float, float], ...]

    def __str__(self) -> str:
        return f"a {self.colour} {self.kind} {self.motion}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The truth of a clip.

    Attributes:
        shapes: its objects, the hindmost first.
        ground: one of `GROUNDS`.
        greys: brightness of the ground's two shades, in [0, 1].
        scale: size of the ground's pattern, in heights of the frame.
        pan: how far the ground moves in the clip, in heights of the frame.
    """

    shapes: tuple[Shape, ...]
    ground: str
    greys: tuple[float, float]
    scale: float
    pan: tuple[float, float]

    @property
    def caption(self) -> str:
        """What a user would type."""
        objects = " and ".join(str(shape) for shape in self.shapes)
        return f"{objects} over a {self.ground} ground"


def draw_scenes(seed: int, count: int, *, frames: int, aspect: float = 1.0) -> list[Scene]:
    """Return scenes; the same seed gives the same ones, wherever it is.

    Args:
        seed: seed of the draw.
        count: how many.
        frames: T.
        aspect: width over height of the frame.
    """
    drawn = random.Random(f"scenes {seed}")
    return [_scene(drawn, frames, aspect) for _ in range(count)]


def captions() -> Iterator[str]:
    """Yield captions that have every word of the grammar, for the tokenizer."""
    kinds = itertools.cycle(itertools.product(COLOURS, KINDS, GROUNDS))
    for motion, (colour, kind, ground) in zip(motions() * 8, kinds, strict=False):
        yield f"a {colour} {kind} {motion} and a {colour} {kind} {motion} over a {ground} ground"


def motions() -> list[Motion]:
    """Return every motion of the grammar."""
    moves = [Motion(words=words, speed=speed) for words in _moves() for speed in SPEEDS]
    return moves + [Motion(words=words) for words in (*BOUNCES, STILL)]


def _moves() -> Iterator[str]:
    for step, (x, _) in STEPS.items():
        yield f"moves {step}"
        yield from (
            f"moves {step} then {turn}" for turn, (u, _) in STEPS.items() if (u == 0) != (x == 0)
        )


def _scene(drawn: random.Random, frames: int, aspect: float) -> Scene:
    ground = drawn.choice(GROUNDS)
    dark = drawn.uniform(0.1, 0.55)
    pan = (0.0, 0.0) if drawn.random() < 0.5 else _times(drawn.choice(list(STEPS.values())), _PAN)
    while True:
        shapes = _shapes(drawn, 1 if drawn.random() < 0.6 else 2, frames, aspect)
        if shapes is not None:
            break
    return Scene(
        shapes=shapes,
        ground=ground,
        greys=(dark, dark + drawn.uniform(0.2, 0.35)),
        scale=drawn.uniform(0.16, 0.28),
        pan=pan,
    )


def _shapes(
    drawn: random.Random, count: int, frames: int, aspect: float
) -> tuple[Shape, ...] | None:
    """Return shapes that hide one another in the middle of a clip at most, or None."""
    colours = drawn.sample(list(COLOURS), count)
    for _ in range(_TRIES):
        shapes = tuple(_shape(drawn, colour, frames, aspect) for colour in colours)
        if all(_apart(*pair) for pair in itertools.combinations(shapes, 2)):
            return shapes
    return None


def _apart(one: Shape, other: Shape) -> bool:
    """Whether two shapes are apart in both ends of a clip, and in most of its frames."""
    least = 1.5 * (one.radius + other.radius)
    near = [math.dist(a, b) < least for a, b in zip(one.path, other.path, strict=True)]
    end = max(1, len(near) // 5)
    return not any(near[:end]) and not any(near[-end:]) and sum(near) <= 0.4 * len(near)


def _shape(drawn: random.Random, colour: str, frames: int, aspect: float) -> Shape:
    motion = _motion(drawn)
    radius = drawn.uniform(*_RADIUS)
    steps = _steps(drawn, motion, frames)
    start = tuple(
        drawn.uniform(radius - min(axis), size - radius - max(axis))
        for axis, size in zip(zip(*steps, strict=True), (aspect, 1.0), strict=True)
    )
    path = tuple((start[0] + x, start[1] + y) for x, y in steps)
    return Shape(kind=drawn.choice(KINDS), colour=colour, motion=motion, radius=radius, path=path)


def _motion(drawn: random.Random) -> Motion:
    kind = drawn.random()
    if kind < 0.1:
        return Motion(words=STILL)
    if kind < 0.3:
        return Motion(words=drawn.choice(list(BOUNCES)))
    words = [words for words in _moves() if (" then " in words) == (kind < 0.5)]
    return Motion(words=drawn.choice(words), speed=drawn.choice(SPEEDS))


def _steps(drawn: random.Random, motion: Motion, frames: int) -> list[tuple[float, float]]:
    """Return where a shape is in every frame, from where it starts."""
    times = [frame / max(frames - 1, 1) for frame in range(frames)]
    if motion.words in BOUNCES:
        swing = drawn.uniform(*_SWING) * drawn.choice((-1, 1))
        turns = [1 - abs(1 - (3 * time) % 2) for time in times]  # there, back and there again
        return [_times(BOUNCES[motion.words], swing * turn) for turn in turns]
    if motion.words == STILL:
        return [(0.0, 0.0)] * frames
    _, first, *second = motion.words.replace(" then", "").split()
    if not second:
        length = drawn.uniform(*_LEG[motion.speed])
        return [_times(STEPS[first], length * time) for time in times]
    length = drawn.uniform(*_HALF[motion.speed])
    found = []
    for time in times:
        x, y = _times(STEPS[first], length * min(2 * time, 1))
        u, v = _times(STEPS[second[0]], length * max(2 * time - 1, 0))
        found.append((x + u, y + v))
    return found


def _times(step: tuple[float, float], length: float) -> tuple[float, float]:
    return step[0] * length, step[1] * length


def render(
    scenes: Sequence[Scene], *, height: int, width: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return the clips of scenes, fp32 [N, 3, T, height, width] in [0, 1]."""
    frames = len(scenes[0].shapes[0].path)
    rows = (torch.arange(height, device=device) + 0.5) / height
    columns = (torch.arange(width, device=device) + 0.5) / height
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    clips = torch.empty(len(scenes), 3, frames, height, width, device=device)
    for clip, scene in zip(clips, scenes, strict=True):
        clip[:] = _ground(scene, x, y, frames)
        for shape in scene.shapes:
            colour = torch.tensor(COLOURS[shape.colour], device=device).view(3, 1, 1, 1)
            clip.lerp_(colour.expand_as(clip), _coverage(shape, x, y, height))
    return clips


def _ground(scene: Scene, x: torch.Tensor, y: torch.Tensor, frames: int) -> torch.Tensor:
    """Return the brightness of the ground, [T, H, W]."""
    time = torch.linspace(0, 1, frames, device=x.device).view(-1, 1, 1)
    u = (x - scene.pan[0] * time) * (math.tau / scene.scale)
    v = (y - scene.pan[1] * time) * (math.tau / scene.scale)
    dark, bright = scene.greys
    if scene.ground == "plain":
        return torch.full_like(u, dark)
    if scene.ground == "striped":
        wave = torch.sin(u + v)
    elif scene.ground == "checked":
        wave = 3 * torch.sin(u) * torch.sin(v)
    else:
        wave = torch.sin(u) * torch.sin(v) * 4 - 2.4
    return dark + (bright - dark) * torch.sigmoid(4 * wave)


def _coverage(shape: Shape, x: torch.Tensor, y: torch.Tensor, height: int) -> torch.Tensor:
    """Return how much of each pixel a shape covers, [T, H, W], from its signed distance."""
    path = torch.tensor(shape.path, device=x.device).view(-1, 2, 1, 1)
    u, v = x - path[:, 0], y - path[:, 1]
    radius = shape.radius
    if shape.kind == "box":
        distance = torch.maximum(u.abs(), v.abs()) - 0.9 * radius
    elif shape.kind == "triangle":  # with a point above
        distance = torch.maximum((2 * u.abs() - v - radius) / math.sqrt(5), v - radius)
    else:
        distance = torch.hypot(u, v) - radius
        if shape.kind == "ring":
            distance = torch.maximum(distance, 0.55 * radius - torch.hypot(u, v))
    return (0.5 - distance * height).clamp(0, 1)
