"""Frames against their reference, by ffmpeg, by scikit-image, and by hand."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multimodal_gen.errors import MissingDependencyError, UsageError
from multimodal_gen.runtime.comparison import frames as module
from multimodal_gen.runtime.comparison.frames import (
    find_ffmpeg,
    measure_frames,
    summarise,
)
from multimodal_gen.runtime.comparison.paired import MOST_DB
from multimodal_gen.runtime.comparison.record import FrameMetrics


def clip(frames: int = 3, height: int = 48, width: int = 65) -> Any:
    """Return a pattern that moves."""
    t, y, x = np.ogrid[:frames, :height, :width]
    waves = [np.sin((x + 3 * t) / 7 + k) * np.cos((y - t) / 5 - k) for k in range(3)]
    return np.stack([127.5 + 100 * wave for wave in waves], axis=-1).astype(np.uint8)


def noisy(frames: Any, amplitude: int = 9) -> Any:
    noise = np.random.default_rng(0).integers(-amplitude, amplitude + 1, frames.shape)
    return (frames.astype(int) + noise).clip(0, 255).astype(np.uint8)


def luma(frames: Any) -> Any:
    """Return BT.709's luma in the range of TV."""
    weights = np.array([0.2126, 0.7152, 0.0722]) * 219 / 255
    return (16 + frames @ weights).round().clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("amplitude", [2, 9, 60])
def test_psnr_and_ssim_agree_with_scikit_image(amplitude: int) -> None:
    metrics = pytest.importorskip("skimage.metrics")
    reference = clip()
    frames = noisy(reference, amplitude)
    found, _ = measure_frames(frames, reference)
    psnr = metrics.peak_signal_noise_ratio(reference, frames)
    assert found.psnr == pytest.approx(psnr, abs=1e-3)
    pairs = zip(luma(reference), luma(frames), strict=True)
    window = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    ssim = [metrics.structural_similarity(*pair, data_range=255, **window) for pair in pairs]
    assert found.ssim == pytest.approx(np.mean(ssim), abs=1e-3)


def test_figures_are_those_of_ffmpegs_own_log(tmp_path: Path) -> None:
    reference = clip()
    frames = noisy(reference)
    found, _ = measure_frames(frames, reference, fps=16)
    inputs = []
    for name, pixels in (("reference", reference), ("frames", frames)):
        (tmp_path / name).write_bytes(pixels.tobytes())
        inputs += ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", "65x48", "-r", "16", "-i", name]
    to_luma = "format=gbrp,scale=out_color_matrix=bt709:flags=bicubic+accurate_rnd,format=yuv420p"
    graph = (
        f"[0:v]split[a][b];[1:v]split[c][d];[c][a]psnr=f=psnr.log[e];"
        f"[b]{to_luma},split[g][h];[d]{to_luma},split[i][j];"
        f"[g][i]xpsnr=f=xpsnr.log[k];[j][h]libvmaf=log_fmt=csv:log_path=vmaf.csv[l]"
    )
    outputs = [word for pad in "ekl" for word in ("-map", f"[{pad}]", "-f", "null", "-")]
    command = [find_ffmpeg(), *inputs, "-filter_complex", graph, *outputs]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    squares = [
        float(line.split("mse_avg:")[1].split()[0])
        for line in (tmp_path / "psnr.log").read_text().splitlines()
    ]
    assert found.psnr == pytest.approx(10 * math.log10(255**2 / np.mean(squares)), abs=1e-3)
    (average,) = (
        line for line in (tmp_path / "xpsnr.log").read_text().splitlines() if "average" in line
    )
    assert found.xpsnr == pytest.approx(float(average.split("y:")[1].split()[0]), abs=1e-3)
    heads, *rows = (line.split(",") for line in (tmp_path / "vmaf.csv").read_text().splitlines())
    vmaf = [float(row[heads.index("vmaf")]) for row in rows]
    assert found.vmaf == pytest.approx(np.mean(vmaf), abs=1e-3)


def test_equal_clips_are_infinitely_close() -> None:
    found, _ = measure_frames(clip(), clip())
    assert found.psnr == found.xpsnr == math.inf
    assert found.ssim == pytest.approx(1)
    assert found.vmaf is not None
    assert found.vmaf > 97
    assert found.flicker == found.flicker_reference


def test_more_noise_is_worse_by_every_metric() -> None:
    reference = clip()
    little, much = (measure_frames(noisy(reference, n), reference)[0] for n in (4, 40))
    for name in ("psnr", "ssim", "xpsnr", "vmaf"):
        assert getattr(much, name) < getattr(little, name), name


def test_xpsnr_weighs_by_the_reference() -> None:
    """What is busy hides errors: the same two clips the other way round get another figure."""
    flat = np.full((3, 64, 96, 3), 120, np.uint8)
    flat[:, 0, 0] = 130
    busy = noisy(flat, 30)
    forth, back = (measure_frames(a, b)[0] for a, b in ((busy, flat), (flat, busy)))
    assert forth.psnr == back.psnr
    assert forth.xpsnr < back.xpsnr  # type: ignore[operator]


def test_flicker_is_the_mean_difference_of_successive_frames() -> None:
    reference = np.zeros((3, 20, 20, 3), np.uint8)
    frames = reference.copy()
    frames[1] += 10
    frames[2, :10] += 30
    found, _ = measure_frames(frames, reference)
    assert found.flicker == pytest.approx((10 + 15) / 2)
    assert found.flicker_reference == 0


def test_an_image_has_no_flicker() -> None:
    found, _ = measure_frames(noisy(clip(1)), clip(1))
    assert found.flicker is found.flicker_reference is None
    assert None not in (found.psnr, found.ssim, found.xpsnr, found.vmaf)


@pytest.mark.parametrize(("height", "width"), [(17, 17), (33, 19), (270, 18)])
def test_odd_sizes_are_measured(height: int, width: int) -> None:
    reference = clip(2, height, width)
    found, _ = measure_frames(noisy(reference), reference)
    assert None not in (found.psnr, found.ssim, found.xpsnr, found.vmaf)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (16, 64), (64, 16)])
def test_frames_too_small_for_vmaf_get_a_reason(height: int, width: int) -> None:
    reference = clip(2, height, width)
    found, notes = measure_frames(255 - reference, reference)
    assert found.vmaf is found.ssim is None
    assert None not in (found.psnr, found.xpsnr)
    assert any("at least 17x17" in note and f"{width}x{height}" in note for note in notes)


def test_grey_and_transparent_images_are_measured() -> None:
    reference = clip(1)
    for channels in (slice(0, 1), [0, 1, 2, 0]):
        part = reference[..., channels]
        found, _ = measure_frames(part, part)
        assert found.psnr == math.inf


def test_a_frame_of_one_colour_is_constant_where_the_reference_has_more() -> None:
    reference, frames = clip(), clip()
    frames[1] = 7
    assert measure_frames(frames, reference)[0].constant
    assert not measure_frames(reference, reference)[0].constant
    reference[1] = 9
    assert not measure_frames(frames, reference)[0].constant


def test_what_is_no_clip_is_refused() -> None:
    good = clip()
    with pytest.raises(UsageError, match=r"uint8 array .* got float64 \[3, 48, 65, 3\]"):
        measure_frames(good / 255, good)
    with pytest.raises(UsageError, match="got list"):
        measure_frames(good, good.tolist())
    with pytest.raises(UsageError, match=r"reference's shape \(3, 48, 65, 3\), got \(2, 48"):
        measure_frames(good[:2], good)


def test_a_failure_of_ffmpeg_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LUMA", "no_such_filter")
    found, notes = measure_frames(noisy(clip()), clip())
    assert found.psnr is not None
    assert found.xpsnr is found.vmaf is None
    assert any(note.startswith("XPSNR: ffmpeg ended with status") for note in notes)
    assert any(note.startswith("SSIM and VMAF: ffmpeg ended with status") for note in notes)


def test_a_missing_ffmpeg_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'multimodal_gen\[compare\]'"):
        find_ffmpeg()


def test_means_and_spreads_are_over_the_clips_that_have_a_figure() -> None:
    mean, spread = summarise(
        [FrameMetrics(psnr=30.0, vmaf=90.0), FrameMetrics(psnr=34.0, constant=True, non_finite=2)]
    )
    assert (mean.psnr, mean.vmaf, mean.ssim) == (32.0, 90.0, None)
    assert (mean.constant, mean.non_finite) == (True, 2)
    assert spread.psnr == pytest.approx(math.sqrt(8))
    assert (spread.vmaf, spread.ssim) == (0.0, None)


def test_infinite_decibels_count_as_the_most_beside_finite_ones() -> None:
    infinite = FrameMetrics(psnr=math.inf)
    mean, spread = summarise([infinite, infinite])
    assert (mean.psnr, spread.psnr) == (math.inf, 0.0)
    mean, _ = summarise([infinite, FrameMetrics(psnr=40.0)])
    assert mean.psnr == (MOST_DB + 40) / 2
