"""Platforms without their hardware: torch is told what it would see there."""

import importlib.metadata
import re
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
import torch

from multimodal_gen.runtime import platforms
from multimodal_gen.runtime.platforms import BUILTIN_PLATFORMS, PlatformEnum
from multimodal_gen.runtime.platforms.devices import CpuPlatform, CudaPlatform, RocmPlatform

PRESENT = SimpleNamespace(is_available=lambda: True)
ABSENT = SimpleNamespace(is_available=lambda: False)


@pytest.fixture
def bare(monkeypatch):
    """Hide whatever accelerator this machine has; return the patcher."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "xpu", ABSENT, raising=False)
    monkeypatch.setattr(torch, "npu", ABSENT, raising=False)
    monkeypatch.setattr(torch, "musa", ABSENT, raising=False)
    return monkeypatch


def reveal(monkeypatch, kind: str) -> None:
    if kind == "mps":
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    elif kind in ("cuda", "rocm"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.version, "cuda", "13.0" if kind == "cuda" else None)
        monkeypatch.setattr(torch.version, "hip", "7.0" if kind == "rocm" else None)
    elif kind != "cpu":
        monkeypatch.setattr(torch, kind, PRESENT, raising=False)


@pytest.mark.parametrize("kind", ["mps", "xpu", "rocm", "cuda", "npu", "musa", "cpu"])
def test_each_platform_is_detected_when_its_device_is_the_only_one(bare, kind):
    reveal(bare, kind)
    assert str(platforms.detect_platform().name) == kind


def test_platforms_are_tried_in_the_documented_order(bare):
    order = [str(cls.name) for cls in BUILTIN_PLATFORMS]
    assert order == ["mps", "xpu", "rocm", "cuda", "npu", "musa", "cpu"]
    found = []
    for kind in ("musa", "npu", "cuda", "xpu", "mps"):
        reveal(bare, kind)
        found.append(str(platforms.detect_platform().name))
    assert found == ["musa", "npu", "cuda", "xpu", "mps"]


@pytest.mark.parametrize("kind", ["xpu", "npu", "musa"])
def test_a_torch_without_the_extension_has_no_such_device(bare, kind):
    bare.delattr(torch, kind)
    assert str(platforms.detect_platform().name) == "cpu"


def test_a_cuda_build_of_torch_without_a_gpu_is_the_cpu(bare):
    bare.setattr(torch.version, "cuda", "13.0")
    assert str(platforms.detect_platform().name) == "cpu"


@pytest.mark.parametrize("cls", [CudaPlatform, RocmPlatform])
def test_a_gpu_reports_its_capability_and_name(monkeypatch, cls):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    assert cls().get_device_capability(4) == (9, 4)
    assert cls().get_device_name(1) == "GPU 1"


def test_a_platform_without_marketing_names_reports_its_kind():
    assert CpuPlatform().get_device_name() == "cpu"


def test_the_current_platform_is_detected_once(monkeypatch):
    calls = []
    monkeypatch.setattr(platforms, "detect_platform", lambda: calls.append(1) or CpuPlatform())
    platforms.current_platform.cache_clear()
    assert platforms.current_platform() is platforms.current_platform()
    assert len(calls) == 1
    platforms.current_platform.cache_clear()


def register(monkeypatch, **named: str) -> None:
    def registered(*, group: str) -> list[EntryPoint]:
        return [EntryPoint(name, value, group) for name, value in named.items()]

    monkeypatch.setattr(importlib.metadata, "entry_points", registered)


@pytest.fixture
def importable(monkeypatch, tmp_path):
    """A package on the path that defines platforms, good and bad."""
    source = (
        "from multimodal_gen.runtime.platforms import PlatformEnum\n"
        "from multimodal_gen.runtime.platforms.devices import CpuPlatform\n"
        "class Good(CpuPlatform):\n"
        "    name = PlatformEnum.OOT\n"
        "class Away(Good):\n"
        "    def is_available(self):\n"
        "        return False\n"
        "number = 3\n"
    )
    (tmp_path / "plugged_platform.py").write_text(source)
    (tmp_path / "exploding_platform.py").write_text("raise RuntimeError('no driver')\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("importable")
def test_a_platform_from_an_entry_point_comes_first(bare):
    register(bare, good="plugged_platform:Good")
    reveal(bare, "cuda")
    assert platforms.detect_platform().name is PlatformEnum.OOT


@pytest.mark.usefixtures("importable")
def test_a_registered_platform_without_its_device_is_passed_over(bare):
    register(bare, away="plugged_platform:Away")
    assert str(platforms.detect_platform().name) == "cpu"


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("plugged_platform:number", r"'bad' in group 'multimodal_gen.platforms' must name a"),
        ("exploding_platform:Good", r"'bad' in group .* must load, got .*no driver.*uninstall"),
        ("no_such_module_here:Good", r"'bad' in group .* must load, got ModuleNotFoundError"),
    ],
)
def test_a_broken_entry_point_is_left_out_with_a_warning(bare, caplog, value, message):
    register(bare, bad=value, away="plugged_platform:Away", good="plugged_platform:Good")
    assert platforms.detect_platform().name is PlatformEnum.OOT
    (warning,) = caplog.messages
    assert re.search(message, warning)
    (error,) = platforms.broken_platforms().values()
    assert str(error) in warning
