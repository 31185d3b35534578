"""What CUDA graphs read is made before they are captured, and never dropped."""

import gc
import weakref

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels import static_cache as module
from multimodal_gen.kernels.static_cache import static_cache


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
