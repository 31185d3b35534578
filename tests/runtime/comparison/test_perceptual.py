"""Metrics of packages that need not be there, and what is said where they are not."""

import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from multimodal_gen.runtime.comparison import perceptual as module
from multimodal_gen.runtime.comparison.perceptual import FRAMES, available, measure_perceptual


class FakeDistance(torch.nn.Module):
    """Mean absolute difference by frame, where LPIPS has its network."""

    def __init__(self, net: str, version: str, verbose: bool) -> None:
        super().__init__()
        assert (net, version, verbose) == ("alex", "0.1", False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x - y).abs().mean((1, 2, 3), keepdim=True)


def black_and_white() -> tuple[Any, Any]:
    shape = (10, 32, 32, 3)
    return np.full(shape, 255, np.uint8), np.zeros(shape, np.uint8)


def moving(frames: int = 20) -> Any:
    """Return waves that move."""
    t, y, x = np.ogrid[:frames, :64, :96]
    waves = [np.sin((x + 3 * t) / 7 + k) * np.cos((y - t) / 5 - k) for k in range(3)]
    return np.stack([127.5 + 100 * wave for wave in waves], axis=-1).astype(np.uint8)


def test_without_their_packages_every_metric_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert available() == ()
    assert measure_perceptual(*black_and_white(), 16.0) == (
        {},
        [
            "LPIPS: the package lpips is not installed",
            "ST-LPIPS: the packages of the extra `perceptual` are not installed",
            "CVVDP: the packages of the extra `perceptual` are not installed",
        ],
    )


def test_lpips_is_measured_only_where_its_weights_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: name == "lpips" or None)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    found, (reason, *_) = measure_perceptual(*black_and_white(), 16.0)
    assert found == {}
    assert "not fetched unasked" in reason
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "alexnet-owt-7be5be79.pth").touch()
    monkeypatch.setitem(sys.modules, "lpips", types.SimpleNamespace(LPIPS=FakeDistance))
    assert measure_perceptual(*black_and_white(), 16.0)[0] == {"lpips": 2.0}


@pytest.mark.parametrize(
    ("package", "label", "least"),
    [("lpips", "LPIPS", 31), ("stlpips_pytorch", "ST-LPIPS", 21)],
)
def test_a_clip_that_is_too_small_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, package: str, label: str, least: int
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: name == package or None)
    monkeypatch.setitem(sys.modules, package, None)  # it is not imported for nothing
    for height, width in ((least - 1, 64), (64, least - 1)):
        small = np.zeros((2, height, width, 3), np.uint8)
        reasons = measure_perceptual(small, small, 16.0)[1]
        said = (
            f"{label}: needs frames of at least {least}x{least} pixels, these have {width}x{height}"
        )
        assert said in reasons


def test_st_lpips_takes_the_least_size_that_it_is_said_to() -> None:
    pytest.importorskip("stlpips_pytorch.stlpips", reason="needs the extra `perceptual`")
    least = np.zeros((1, 21, 21, 3), np.uint8)
    assert measure_perceptual(least, least, 16.0)[0]["st_lpips"] == 0.0


def test_a_package_that_cannot_be_imported_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one is whose torchvision was built for another torch."""
    monkeypatch.setattr(module, "find_spec", lambda name: name == "stlpips_pytorch" or None)
    monkeypatch.setitem(sys.modules, "stlpips_pytorch", None)
    reasons = measure_perceptual(*black_and_white(), 16.0)[1]
    assert reasons[1].startswith("ST-LPIPS: import of stlpips_pytorch halted")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AttributeError("no attribute 'shape'"), "AttributeError: no attribute 'shape'"),
        (KeyError("fps"), "KeyError: 'fps'"),
        (ValueError("too small"), "too small"),
    ],
)
def test_whatever_a_package_raises_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def fail(frames: Any, reference: Any, fps: float) -> float:
        raise error

    fine = ("fine", "FINE", lambda *clips: 1.0, "torch", "")
    monkeypatch.setattr(module, "_METRICS", (("bad", "BAD", fail, "torch", ""), fine))
    assert measure_perceptual(*black_and_white(), 16.0) == ({"fine": 1.0}, [f"BAD: {said}"])


def test_st_lpips_sees_few_frames_spread_evenly_and_forgives_a_shift() -> None:
    pytest.importorskip("stlpips_pytorch.stlpips", reason="needs the extra `perceptual`")
    clip = moving()
    assert measure_perceptual(clip, clip, 16.0)[0]["st_lpips"] == 0.0
    seen = [round(i * 19 / (FRAMES - 1)) for i in range(FRAMES)]
    changed = clip.copy()
    changed[[at for at in range(20) if at not in seen]] = 0  # of frames that are not looked at
    assert measure_perceptual(changed, clip, 16.0)[0]["st_lpips"] == 0.0
    noise = np.random.default_rng(0).integers(-40, 41, clip.shape)
    noisy = (clip + noise).clip(0, 255).astype(np.uint8)
    shifted, far = (
        measure_perceptual(each, clip, 16.0)[0]["st_lpips"] for each in (np.roll(clip, 1, 2), noisy)
    )
    assert 0 < shifted < far / 2


STRAY = {"interp", "third_party", "video_source", "video_source_yuv"}
PYCVVDP = """
import os, sys
sys.path.append(os.path.dirname(__file__))
from interp import jod
from third_party.cpuinfo import cpuinfo

class cvvdp:
    def __init__(self, **options):
        pass

    def predict(self, *clips, **options):
        return jod, cpuinfo
"""


@pytest.mark.parametrize("imported", [True, False])
def test_color_video_vdp_leaves_modules_of_others_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, imported: bool
) -> None:
    """Its own are imported under names such as `interp`, which a user's folder may have, too."""
    package = tmp_path / "pycvvdp"
    (package / "third_party").mkdir(parents=True)
    (package / "__init__.py").write_text(PYCVVDP)
    (package / "interp.py").write_text("jod = 9.0\n")
    (package / "third_party" / "cpuinfo.py").write_text("cpuinfo = None\n")
    (tmp_path / "interp.py").write_text("raise RuntimeError('of a user')\n")
    monkeypatch.syspath_prepend(tmp_path)
    others = {"interp": types.ModuleType("interp")} if imported else {}
    path = [*sys.path]
    with patch.dict(sys.modules):
        for name in [each for each in sys.modules if each.partition(".")[0] in {"pycvvdp", *STRAY}]:
            del sys.modules[name]
        sys.modules.update(others)
        for _ in range(2):
            assert measure_perceptual(*black_and_white(), 16.0)[0]["cvvdp"] == 9.0
        assert {name: sys.modules[name] for name in STRAY & {*sys.modules}} == others
        assert "third_party.cpuinfo" not in sys.modules
    assert sys.path == path


def test_color_video_vdp_is_ten_for_equal_clips_and_leaves_nothing_behind() -> None:
    pytest.importorskip("torchvision", reason="needs the extra `perceptual`")
    if "pycvvdp" not in available():
        pytest.skip("needs the extra `perceptual`")
    clip, path = moving(6), [*sys.path]
    for equal in (clip, clip[:1]):  # a video and a picture
        assert measure_perceptual(equal, equal, 16.0)[0]["cvvdp"] == 10.0
    assert sys.path == path
    assert not STRAY & {*sys.modules}
    faint = (clip + np.random.default_rng(0).integers(-4, 5, clip.shape)).clip(0, 255)
    strong = (clip + np.random.default_rng(0).integers(-40, 41, clip.shape)).clip(0, 255)
    near, far = (
        measure_perceptual(each.astype(np.uint8), clip, 16.0)[0]["cvvdp"]
        for each in (faint, strong)
    )
    assert far < near < 10
