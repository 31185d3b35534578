"""How far one clip is from another, by the metrics that ffmpeg has built in, and `perceptual.py`.

    PSNR    dB    filter `psnr` on RGB: 10 log10(255^2 / MSE), the MSE over every frame and channel
    SSIM          Wang et al. 2004 on luma at full size: an 11 x 11 Gaussian window with a sigma of
                  1.5, mean over frames (`float_ssim` of libvmaf; not ffmpeg's filter `ssim`, which
                  takes unweighted 8 x 8 blocks)
    XPSNR   dB    filter `xpsnr` on luma, weighted by what the reference shows; ffmpeg's average
    VMAF          model vmaf_v0.6.1, 0 to 100, mean over frames. Equal clips get 97 to 100
    flicker       mean of |next frame - this frame| over pixels and channels, in levels of 8 bits

Luma is BT.709 in the range of TV, 16 to 235, in 4:2:0, as ffmpeg makes it from RGB. PSNR and XPSNR
of equal clips are infinite. Where they are averaged with finite ones they count as `MOST_DB`.
"""

import json
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.comparison.paired import MOST_DB, mean_and_deviation
from multimodal_gen.runtime.comparison.perceptual import measure_perceptual
from multimodal_gen.runtime.comparison.record import FrameMetrics
from multimodal_gen.runtime.generator.output import require_encoder

_METRICS = (
    *("psnr", "ssim", "xpsnr", "vmaf", "flicker", "flicker_reference"),
    *("lpips", "st_lpips", "cvvdp"),
)

_VMAF_PIXELS = 17  # with less along an axis libvmaf reads beyond the frame, and crashes
_LUMA = "scale=out_color_matrix=bt709:out_range=tv:flags=bicubic+accurate_rnd,format=yuv420p"
_PSNR = re.compile(r"PSNR .*\baverage:(\S+)")
_XPSNR = re.compile(r"XPSNR +y: *(\S+)")


def measure_frames(
    frames: Any, reference: Any, *, fps: float = 16.0, perceptual: bool = True
) -> tuple[FrameMetrics, tuple[str, ...]]:
    """Compare a clip, or an image as a clip of one frame, with its reference.

    Args:
        frames: NumPy array, uint8 [T, H, W, C] with 1, 3 or 4 channels, of which a fourth is left
            out. Any size.
        reference: what it should be, in the same shape.
        fps: frames per second, by which XPSNR weighs motion. Default: 16.
        perceptual: whether those of `perceptual.py` are computed, too. Default: yes.

    Returns:
        The metrics, None where there is none, and a sentence for each that says why. `non_finite`
        is 0: pixels of 8 bits cannot tell.

    Raises:
        MissingDependencyError: imageio-ffmpeg or its ffmpeg is missing.
        UsageError: the two differ in shape, or are no such arrays.
    """
    for name, array in (("frames", frames), ("reference", reference)):
        _check(name, array)
    if frames.shape != reference.shape:
        raise UsageError(
            f"frames must have the reference's shape {tuple(reference.shape)}, got "
            f"{tuple(frames.shape)}"
        )
    frames, reference = _as_rgb(frames), _as_rgb(reference)
    found, reasons = _measure_with_ffmpeg(frames, reference, fps)
    more, others = measure_perceptual(frames, reference, fps) if perceptual else ({}, [])
    metrics = FrameMetrics(
        **found,
        **more,
        flicker=_flicker(frames),
        flicker_reference=_flicker(reference),
        constant=any(map(_loses_everything, frames, reference)),
    )
    return metrics, (*reasons, *others)


def summarise(metrics: Sequence[FrameMetrics]) -> tuple[FrameMetrics, FrameMetrics]:
    """Return the mean of every metric over several clips, and its standard deviation.

    The deviation is that of a sample (n - 1), and 0 for one clip. A metric that some clips lack is
    that of the others. Of the means, `constant` is true where it is for any, and `non_finite` is
    the sum.
    """
    pairs: dict[str, tuple[Any, Any]] = {}
    for name in _METRICS:
        values = [value for each in metrics if (value := getattr(each, name)) is not None]
        pairs[name] = mean_and_spread(values) if values else (None, None)
    mean = FrameMetrics(
        constant=any(each.constant for each in metrics),
        non_finite=sum(each.non_finite for each in metrics),
        **{name: mean for name, (mean, _) in pairs.items()},
    )
    return mean, FrameMetrics(**{name: spread for name, (_, spread) in pairs.items()})


def mean_and_spread(figures: Sequence[float]) -> tuple[float, float]:
    """Return the mean of one metric over clips, and its standard deviation (n - 1; 0 for one).

    Where all are infinite so is the mean; among finite ones, infinite ones count as `MOST_DB`.
    """
    if all(map(math.isinf, figures)):
        return figures[0], 0.0
    return mean_and_deviation([MOST_DB if each == math.inf else each for each in figures])


def find_ffmpeg() -> str:
    """Return the path of the ffmpeg that imageio-ffmpeg brings.

    Raises:
        MissingDependencyError: there is none.
    """
    return require_encoder("comparing frames", "compare")


def _check(name: str, array: Any) -> None:
    import numpy as np

    good = isinstance(array, np.ndarray) and array.dtype == np.uint8 and array.ndim == 4
    if not good or array.shape[-1] not in (1, 3, 4) or 0 in array.shape:
        is_array = isinstance(array, np.ndarray)
        got = f"{array.dtype} {list(array.shape)}" if is_array else type(array).__name__
        raise UsageError(f"{name} must be a uint8 array [T, H, W, C] with pixels, got {got}")


def _as_rgb(frames: Any) -> Any:
    import numpy as np

    return np.repeat(frames, 3, axis=-1) if frames.shape[-1] == 1 else frames[..., :3]


def _loses_everything(frame: Any, reference: Any) -> bool:
    """Tell whether a frame [H, W, 3] has one colour only, where the reference's has more."""
    return bool((frame == frame[0, 0]).all() and not (reference == reference[0, 0]).all())


def _flicker(frames: Any) -> float | None:
    import numpy as np

    # By frame: differences of a whole clip would take twice its memory.
    steps = [np.abs(after.astype(np.int16) - before).mean() for before, after in pairwise(frames)]
    return float(np.mean(steps)) if steps else None


def _measure_with_ffmpeg(
    frames: Any, reference: Any, fps: float
) -> tuple[dict[str, Any], list[str]]:
    """Return the metrics that could be computed by name, and why others could not."""
    found: dict[str, Any] = {}
    reasons = []
    height, width = frames.shape[1:3]
    with tempfile.TemporaryDirectory() as folder:
        clips = (Path(folder, "reference.rgb"), Path(folder, "frames.rgb"))
        for path, pixels in zip(clips, (reference, frames), strict=True):
            with path.open("wb") as file:
                for frame in pixels:  # a clip need not be contiguous
                    file.write(frame.tobytes())
        raw = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{fps:g}")
        inputs = [part for clip in clips for part in (*raw, "-i", str(clip))]
        command = [find_ffmpeg(), "-hide_banner", "-nostats", "-nostdin", *inputs]
        small = min(height, width) < _VMAF_PIXELS
        # Each is a process of its own, and those of PSNR and XPSNR use few cores.
        with ThreadPoolExecutor() as pool:
            vmaf = None if small else pool.submit(_vmaf, command, Path(folder, "vmaf.json"))
            psnr = pool.submit(_filtered, command, "[1:v][0:v]psnr")
            # Its first input is the reference, that of the others is what is judged.
            xpsnr = pool.submit(_filtered, command, f"[0:v]{_LUMA}[r];[1:v]{_LUMA}[d];[r][d]xpsnr")
        for name, done, pattern in (("psnr", psnr, _PSNR), ("xpsnr", xpsnr, _XPSNR)):
            log, problem = done.result()
            match = None if problem else pattern.search(log)
            if match is None:
                reasons.append(f"{name.upper()}: {problem or 'ffmpeg printed no figure'}")
            else:
                found[name] = float(match[1])
        if vmaf is None:
            reasons.append(
                f"SSIM and VMAF need frames of at least {_VMAF_PIXELS}x{_VMAF_PIXELS} pixels, "
                f"these have {width}x{height}"
            )
        else:
            pooled, problem = vmaf.result()
            found.update(pooled)
            reasons.extend([f"SSIM and VMAF: {problem}"] if problem else [])
    return found, reasons


def _filtered(command: Sequence[str], graph: str) -> tuple[str, str]:
    """Run a filter over clips; return what ffmpeg printed and, where it failed, why."""
    done = subprocess.run(
        [*command, "-filter_complex", graph, "-f", "null", "-"],
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode == 0:
        return done.stderr, ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    last = re.sub(r" @ 0x\w+", "", lines[-1]) if lines else "it printed nothing"
    return done.stderr, f"ffmpeg ended with status {done.returncode}: {last.strip()}"


def _vmaf(command: Sequence[str], log: Path) -> tuple[dict[str, float], str]:
    """Return SSIM and VMAF and, where there are none, why; `log` is a file to write."""
    threads = min(os.cpu_count() or 1, 16)
    # Quotes keep the colon from ending the option, the backslash from ending the feature's.
    options = f"n_threads={threads}:log_fmt=json:feature='name=float_ssim\\:scale=1'"
    path = re.sub(r"([\\':])", r"\\\1", str(log))
    graph = f"[0:v]{_LUMA}[r];[1:v]{_LUMA}[d];[d][r]libvmaf={options}:log_path='{path}'"
    _, problem = _filtered(command, graph)
    if problem:
        return {}, problem
    pooled = json.loads(log.read_text("utf-8"))["pooled_metrics"]
    return {"ssim": pooled["float_ssim"]["mean"], "vmaf": pooled["vmaf"]["mean"]}, ""
