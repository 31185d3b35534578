"""What CUDA graphs read is made before they are captured, and never dropped."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels import static_cache as module
from multimodal_gen.kernels.static_cache import static_cache, wait_for_devices


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """A switch that pretends that a graph is being captured."""
    state = {"on": False}
    monkeypatch.setattr(module, "being_captured", lambda: state["on"])
    return state


def test_the_last_results_are_kept() -> None:
    @static_cache(maxsize=2)
    def make(size: int) -> torch.Tensor:
        return torch.zeros(size)

    first = make(1)
    assert make(1) is first
    make(2), make(3)
    assert make(1) is not first


def test_what_is_made_is_there_for_every_stream(monkeypatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(module, "wait_for_devices", lambda: done.append("waited"))

    @static_cache(maxsize=2)
    def make(size: int) -> int:
        done.append("made")
        return size

    make(1), make(1)
    assert done == ["made", "waited"]


def test_every_device_in_use_is_waited_for(monkeypatch, capture: dict[str, bool]) -> None:
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda i: i != 1, raising=False)

    def stream(index: int) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: waited.append(index))

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    wait_for_devices()
    assert waited == [0, 2]
    capture["on"] = True
    wait_for_devices()
    assert waited == [0, 2], "a capture computes nothing, and may not be waited for"


def test_a_capture_makes_nothing(capture: dict[str, bool]) -> None:
    @static_cache(maxsize=2)
    def make(size: int) -> torch.Tensor:
        return torch.zeros(size)

    capture["on"] = True
    with pytest.raises(UsageError, match=r"run the call once before the capture"):
        make(1)
    capture["on"] = False
    made = make(1)
    capture["on"] = True
    assert make(1) is made


def test_what_a_capture_read_is_held_for_good(capture: dict[str, bool]) -> None:
    @static_cache(maxsize=1)
    def make(size: int, *, factor: int = 1) -> torch.Tensor:
        return torch.zeros(size * factor)

    read, other = make(1, factor=2), weakref.ref(make(1))
    make(1, factor=2)
    gc.collect()
    assert other() is None
    capture["on"] = True
    assert make(1, factor=2) is not read, "it had been dropped before the capture"
    held = weakref.ref(make(1, factor=2))
    capture["on"] = False
    make(5)
    del read
    gc.collect()
    assert held() is not None
    capture["on"] = True
    assert make(1, factor=2) is held()
