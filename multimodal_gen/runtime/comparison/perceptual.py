"""Metrics of frames that come with packages of their own, on the CPU; nothing is fetched.

LPIPS       of AlexNet, version 0.1, mean over frames; only where its weights are present
ST-LPIPS    the same where a shift by a pixel counts little, of the shift-tolerant AlexNet in
            the wheel of stlpips-pytorch; mean over up to `FRAMES` frames, spread evenly
CVVDP       ColorVideoVDP on `DISPLAY`, in JOD: how visible the difference is to people, in
            detail, colour and motion

None is a video as people see one: LPIPS and ST-LPIPS look at frames, one by one.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from multimodal_gen.errors import first_line

FRAMES = 16
"""Of a clip that ST-LPIPS sees: with two cores it takes 1.6 s for one of 480 x 832 pixels."""

DISPLAY = "standard_fhd"
"""ColorVideoVDP's name of what the clip is seen on: 1920 x 1080 on 24 inches, from 0.6 m."""

_STRAY = ("interp", "third_party", "video_source", "video_source_yuv")
_LPIPS_WEIGHTS = "alexnet-owt-7be5be79.pth"
_LPIPS_PIXELS, _ST_LPIPS_PIXELS = 31, 21  # along either axis, for their poolings
_BATCH = 8


def available() -> tuple[str, ...]:
    """Return which packages are there, without importing them: what is measured depends on it."""
    return tuple(package for *_, package, _ in _METRICS if find_spec(package))


def measure_perceptual(frames: Any, reference: Any, fps: float) -> tuple[dict[str, Any], list[str]]:
    """Return the metrics that could be computed by name, and why others could not.

    Args:
        frames: uint8 [T, H, W, 3].
        reference: the same.
        fps: frames per second.
    """
    found: dict[str, Any] = {}
    reasons = []
    for name, label, measure, package, words in _METRICS:
        if find_spec(package) is None:
            reasons.append(f"{label}: {words} not installed")
            continue
        try:
            found[name] = measure(frames, reference, fps)
        # A package whose torchvision was built for another torch fails in its import so, too.
        except (RuntimeError, ValueError, OSError, ImportError) as error:
            reasons.append(f"{label}: {first_line(error)}")
        except Exception as error:  # a defect of the package
            reasons.append(f"{label}: {type(error).__name__}: {first_line(error)}")
    return found, reasons


def _lpips(frames: Any, reference: Any, fps: float) -> float:
    _check_size(frames, _LPIPS_PIXELS)
    weights = Path(torch.hub.get_dir(), "checkpoints", _LPIPS_WEIGHTS)
    if not weights.is_file():
        raise OSError(
            f"the weights of AlexNet ({_LPIPS_WEIGHTS}) are not among torch.hub's checkpoints on "
            f"this machine, and are not fetched unasked"
        )
    import lpips

    distance = lpips.LPIPS(net="alex", version="0.1", verbose=False).eval()
    return _mean_distance(distance, frames, reference, range(len(frames)))


def _st_lpips(frames: Any, reference: Any, fps: float) -> float:
    _check_size(frames, _ST_LPIPS_PIXELS)
    from stlpips_pytorch import stlpips

    distance = stlpips.LPIPS(net="alex", variant="shift_tolerant", verbose=False)
    count = min(FRAMES, len(frames))
    at = [round(i * (len(frames) - 1) / max(1, count - 1)) for i in range(count)]
    return _mean_distance(distance, frames, reference, at)


def _cvvdp(frames: Any, reference: Any, fps: float) -> float:
    pycvvdp = _import_cvvdp()
    metric = pycvvdp.cvvdp(display_name=DISPLAY, device=torch.device("cpu"), quiet=True)
    rate = fps if len(frames) > 1 else 0  # of a picture
    clips = [each.copy() for each in (frames, reference)]
    jod, _ = metric.predict(*clips, dim_order="FHWC", frames_per_second=rate)
    return min(10.0, float(jod))


def _check_size(frames: Any, least: int) -> None:
    height, width = frames.shape[1:3]
    if min(height, width) < least:
        raise ValueError(
            f"needs frames of at least {least}x{least} pixels, these have {width}x{height}"
        )


def _import_cvvdp() -> Any:
    """Import ColorVideoVDP, and leave nothing behind of how its modules import each other.

    They do as `_STRAY`, by a path that it adds. Others may have modules of these names: those are
    neither taken for its own nor lost.
    """
    if "pycvvdp" in sys.modules:
        return sys.modules["pycvvdp"]
    path, others = [*sys.path], _pop_stray()
    spec = find_spec("pycvvdp")
    sys.path[:0] = (spec and spec.submodule_search_locations) or ()
    try:
        return import_module("pycvvdp")
    finally:
        sys.path[:] = path
        _pop_stray()
        sys.modules.update(others)


def _pop_stray() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] in _STRAY]
    return {name: sys.modules.pop(name) for name in names}


def _mean_distance(
    distance: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    frames: Any,
    reference: Any,
    at: Sequence[int],
) -> float:
    """Return the mean distance of the frames that are named."""
    with torch.inference_mode():
        found = [
            distance(_signed(frames[some]), _signed(reference[some])).flatten()
            for start in range(0, len(at), _BATCH)
            for some in [list(at[start : start + _BATCH])]
        ]
    return torch.cat(found).mean().item()


def _signed(frames: Any) -> torch.Tensor:
    """Return [T, H, W, 3] bytes as [T, 3, H, W] in [-1, 1]."""
    return torch.from_numpy(frames.copy()).permute(0, 3, 1, 2).float() / 127.5 - 1


_EXTRA = "the packages of the extra `perceptual` are"
_METRICS = (
    ("lpips", "LPIPS", _lpips, "lpips", "the package lpips is"),
    ("st_lpips", "ST-LPIPS", _st_lpips, "stlpips_pytorch", _EXTRA),
    ("cvvdp", "CVVDP", _cvvdp, "pycvvdp", _EXTRA),
)
