"""A comparison that never ran, with figures and clips as a real one has: for tests of reports.

The clip shows hills, a sun and a ball. Backends change it as they would: another exact kernel by
single levels, 8 bits by noise, tiles by steps at their borders, one that is broken by all of it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from multimodal_gen.runtime.comparison.frames import measure_frames, summarise
from multimodal_gen.runtime.comparison.record import (
    Cost,
    Environment,
    FrameMetrics,
    Generation,
    LayerErrors,
    MaskPicture,
    Model,
    Report,
    Run,
)
from multimodal_gen.runtime.comparison.verdict import judged

# Name, configuration, error, time of a step in seconds, density, share of time in attention.
_RUNS = (
    ("torch_sdpa", "torch_sdpa", 0.0, 0.912, 1.0, 0.71),
    ("fa", "fa", 0.0015, 0.874, 1.0, 0.69),
    ("sage_attn", "sage_attn", 0.012, 0.611, 1.0, 0.55),
    ("sliding_tile_attn", "sliding_tile_attn:window=[3,3,3]", 0.11, 0.402, 0.31, 0.34),
    ("video_sparse_attn", "video_sparse_attn:sparsity=0.9", 0.2, 0.338, 0.1, 0.22),
    ("video_sparse_attn-2", "video_sparse_attn:sparsity=0.75", 0.07, 0.447, 0.25, 0.38),
    ("vmoba_attn", "vmoba_attn", 0.9, 0.512, 0.25, 0.42),
)
_PARAMETERS: Any = MappingProxyType(
    {
        "sliding_tile_attn": {"window": [3, 3, 3]},
        "video_sparse_attn": {"sparsity": 0.9},
        "video_sparse_attn-2": {"sparsity": 0.75},
    }
)
_BROKEN = "vmoba_attn"


def make_report(
    folder: Path,
    *,
    kind: str = "video",
    size: tuple[int, int, int] = (17, 96, 168),
    prompts: tuple[str, ...] = ("A red fox runs through fresh snow at sunrise",),
    seeds: tuple[int, ...] = (0, 1),
    layers: int = 12,
    steps: int = 20,
    heads: int = 6,
    measured: bool = False,
) -> Report:
    """Write the clips of a comparison of six backends, and return its report.

    Args:
        folder: where the clips go.
        kind: "video" or "image".
        size: frames, height and width of a clip; one frame is taken for an image.
        prompts: what is said to be shown.
        seeds: each shows something else.
        layers: self-attention layers.
        steps: denoising steps.
        heads: of every layer.
        measured: measure the frames instead of making figures up, which takes a second per clip.
    """
    size = size if kind == "video" else (1, *size[1:])
    runs = []
    for number in range(len(_RUNS)):
        clips = [
            _generation(folder, number, prompt, seed, size, steps, measured)
            for prompt in range(len(prompts))
            for seed in seeds
        ]
        runs.append(_run(number, clips, layers, steps, heads))
    failed = Run(
        name="svg2", configuration="sparse_video_gen_2_attn", backend="sparse_video_gen_2_attn",
        parameters={}, status="out of memory", message="needs 151 GiB, the device has 139 GiB",
    )  # fmt: skip
    report = Report(
        created="2026-01-31T12:00:00Z",
        environment=Environment(
            device="made up",
            versions={"python": "3.11", "torch": "2.13.0", "diffusers": "0.42.1", "triton": None},
            multimodal_gen="0.1.0",
        ),
        model=Model(
            path="A made-up model",
            pipeline="WanPipeline",
            kind="video" if kind == "video" else "image",
            dtype="bfloat16",
            identity="0" * 12,
        ),
        settings={"height": 480, "width": 832, "num_inference_steps": steps, "fps": 16},
        prompts=prompts,
        seeds=seeds,
        score="score.py:score",
        reference=runs[0],
        floor=(runs[1],),
        candidates=(*runs[2:], failed),
        notes=("LPIPS: the package lpips is not installed",),
    )
    return judged(report)


def _run(number: int, clips: Sequence[Generation], layers: int, steps: int, heads: int) -> Run:
    name, configuration, error, step, density, share = _RUNS[number]
    backend = configuration.partition(":")[0]
    frames = [each.frames for each in clips if each.frames is not None]
    mean, spread = summarise(frames) if frames else (None, None)
    return Run(
        name=name,
        configuration=configuration,
        backend=backend,
        parameters=_PARAMETERS.get(name, {}),
        attention=(f"transformer.self, layers 0-{layers - 1}: {backend}",),
        generations=tuple(clips),
        cost=Cost(
            step_seconds=step,
            generation_seconds=step * steps + 3.1,
            warm_up_seconds=1.7 + number,
            peak_memory=int((18.2 + density) * 2**30),
            density=density,
            attention_share=share,
        ),
        layers=tuple(_layers(error, density, backend, layers, steps, heads)),
        masks=tuple(_masks(backend, layers)) if density < 1 and name != _BROKEN else (),
        frames_mean=mean,
        frames_spread=spread,
    )


def _generation(
    folder: Path,
    run: int,
    prompt: int,
    seed: int,
    size: tuple[int, int, int],
    steps: int,
    measured: bool,
) -> Generation:
    name, _, error, step, *_ = _RUNS[run]
    reference = _scene(size, 3 * prompt + seed)
    random = np.random.default_rng([run, prompt, seed])
    frames = _CHANGES[name](reference, random)
    path = f"{name}/{prompt}-{seed}.npy"
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    np.save(folder / path, frames)
    metrics = None
    if run:
        figures = _made_up(error, size[0] > 1, random)
        metrics = measure_frames(frames, reference)[0] if measured else figures
    growth = np.linspace(0.2, 1, steps) ** 1.5 * error * random.uniform(0.9, 1.1)
    seconds = step * random.uniform(0.98, 1.02, steps)
    return Generation(
        prompt=prompt,
        seed=seed,
        frames_path=path,
        seconds=float(seconds.sum()) + 3.1,
        repeat_seconds=None if run else float(seconds.sum()) * random.uniform(0.99, 1.01) + 3.1,
        step_seconds=tuple(seconds.tolist()),
        score=max(0.0, 0.95 - 0.05 * (seed % 3) - 0.4 * error),
        latents=tuple(growth.tolist()) if run else (),
        frames=metrics,
    )


def _made_up(error: float, moves: bool, random: np.random.Generator) -> FrameMetrics:
    level = error * float(random.uniform(0.8, 1.2))
    psnr = -20 * math.log10(level) + 6
    return FrameMetrics(
        psnr=psnr,
        ssim=max(0.0, 1 - level / 2),
        xpsnr=psnr + 2,
        vmaf=max(0.0, 100 - 140 * level),
        st_lpips=level / 3,
        cvvdp=10 - 8 * level,
        flicker=4.1 * (1 + level) if moves else None,
        flicker_reference=4.1 if moves else None,
        constant=error > 0.5,
    )


def _scene(size: tuple[int, int, int], seed: int) -> Any:
    """Return hills that pass by, a sun that rises and a ball that bounces."""
    frames, height, width = size
    t = np.arange(frames).reshape(-1, 1, 1) / 16
    y, x = np.ogrid[:height, :width]
    y, x = y[None] / height, x[None] / width
    sky = np.stack([0.95 - 0.5 * y + 0 * x + 0 * t, 0.6 + 0.1 * y + 0 * x + 0 * t,
                    0.5 + 0.4 * y + 0 * x + 0.05 * t], axis=-1)  # fmt: skip
    pictures = np.broadcast_to(sky, (frames, height, width, 3)).copy()
    sun = (x - 0.7) ** 2 * (width / height) ** 2 + (y - 0.45 + 0.08 * t) ** 2 < 0.02
    pictures[np.broadcast_to(sun, pictures.shape[:3])] = (1.0, 0.93, 0.7)
    for depth, colour in ((0.55, (0.55, 0.5, 0.62)), (0.7, (0.36, 0.38, 0.5)), (0.85, (0.9,) * 3)):
        wave = np.sin(x * 9 * depth + t * depth * 2 + seed + 5 * depth)
        hill = y > depth + 0.07 * wave + 0.02 * np.sin(31 * x + 3 * t)
        pictures[np.broadcast_to(hill, pictures.shape[:3])] = colour
    middle = 0.78 - 0.25 * np.abs(np.sin(3 * t + seed))
    ball = ((x - 0.15 - 0.4 * t) * width / height) ** 2 + (y - middle) ** 2 < 0.006
    pictures[np.broadcast_to(ball, pictures.shape[:3])] = (0.83, 0.32, 0.12)
    grain = np.random.default_rng(seed).normal(0, 0.012, (frames, height, width, 1))
    return ((pictures + grain).clip(0, 1) * 255).round().astype(np.uint8)


def _with_noise(levels: float) -> Callable[[Any, np.random.Generator], Any]:
    def change(frames: Any, random: np.random.Generator) -> Any:
        return (frames + random.normal(0, levels, frames.shape)).clip(0, 255).astype(np.uint8)

    return change


def _with_tiles(side: int, levels: float) -> Callable[[Any, np.random.Generator], Any]:
    def change(frames: Any, random: np.random.Generator) -> Any:
        count, height, width, _ = frames.shape
        steps = random.normal(0, levels, (count, -(-height // side), -(-width // side), 3))
        tiles = steps.repeat(side, 1).repeat(side, 2)[:, :height, :width]
        return (frames + tiles).clip(0, 255).astype(np.uint8)

    return change


_CHANGES: Mapping[str, Any] = {
    "torch_sdpa": lambda frames, random: frames,
    "fa": _with_noise(0.6),
    "sage_attn": _with_noise(2.5),
    "sliding_tile_attn": _with_tiles(24, 8),
    "video_sparse_attn": _with_tiles(12, 14),
    "video_sparse_attn-2": _with_tiles(12, 5),
    "vmoba_attn": lambda frames, random: np.zeros_like(frames),
}


def _layers(
    error: float, density: float, backend: str, layers: int, steps: int, heads: int
) -> Iterator[LayerErrors]:
    random = np.random.default_rng(7)
    by_head = random.lognormal(0, 0.5, (layers, heads))
    for step in range(0, steps, 2):
        for layer in range(layers):
            depth = 0.5 + 1.5 * math.sin(math.pi * (layer + 1) / (layers + 1))
            errors = error * depth * (1.4 - step / steps) * by_head[layer]
            if not error:
                errors = 1e-7 * by_head[layer]
            yield LayerErrors(
                component="transformer",
                name=f"blocks.{layer}.attn1",
                layer=layer,
                step=step,
                branch="cond",
                backend=backend,
                relative_l1=tuple((0.8 * errors).tolist()),
                relative_l2=tuple(errors.tolist()),
                cosine=tuple((1 - errors.clip(0, 1) ** 2 / 2).tolist()),
                kept_mass=tuple((1 - errors.clip(0, 1) / 2).tolist()) if density < 1 else None,
                density=density,
            )


def _masks(backend: str, layers: int) -> Iterator[MaskPicture]:
    grid, cell = (9, 15, 26), (3, 4, 4)
    counts = tuple(-(-tokens // side) for tokens, side in zip(grid, cell, strict=True))
    random = np.random.default_rng(len(backend))
    for layer, head in ((0, 1), (layers // 2, 4)):
        query = (4, 7, 9 + 3 * head)
        where = [
            (np.arange(n) * side + side / 2 - at) / extent
            for n, side, at, extent in zip(counts, cell, query, grid, strict=True)
        ]
        t, y, x = np.meshgrid(*where, indexing="ij")
        exact = np.exp(-14 * (t**2 + y**2 + x**2)) * random.lognormal(0, 0.9, counts)
        exact /= exact.sum()
        if backend == "sliding_tile_attn":
            keep = (abs(t) < 0.36) & (abs(y) < 0.4) & (abs(x) < 0.24)
        else:
            keep = exact >= np.sort(exact, axis=None)[-max(1, exact.size // 8)]
        kept = np.where(keep, exact, 0)
        yield MaskPicture(
            component="transformer",
            layer=layer,
            head=head,
            step=8,
            grid=grid,
            cell=cell,
            query=query,
            kept=_nested(kept / kept.sum()),
            exact=_nested(exact),
        )


def _nested(array: Any) -> Any:
    return tuple(map(_nested, array)) if array.ndim else float(array)
