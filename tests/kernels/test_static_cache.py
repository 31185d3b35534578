"""What CUDA graphs read is made before they are captured, and never dropped."""

import gc
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

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


def test_what_is_first_asked_for_under_inference_mode_serves_training() -> None:
    @static_cache(maxsize=2)
    def make(size: int) -> torch.Tensor:
        return torch.ones(size)

    with torch.inference_mode():
        found = make(1)
    assert make(1) is found
    weight = torch.ones(1, requires_grad=True)
    (found * weight).backward()
    assert weight.grad is not None


def test_what_is_made_is_there_for_every_stream(monkeypatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(module, "wait_for_devices", lambda *_: done.append("waited"))

    @static_cache(maxsize=2)
    def make(size: int) -> int:
        done.append("made")
        return size

    make(1), make(1)
    assert done == ["made", "waited"]


@pytest.fixture
def waited(monkeypatch) -> list[int | None]:
    """Return the CUDA devices whose current streams are waited for."""
    found: list[int | None] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def stream(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: found.append(device.index))

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    return found


@dataclass
class Table:
    parts: tuple[Any, ...]


def test_the_devices_of_what_is_made_are_waited_for(waited, capture: dict[str, bool]) -> None:
    first, second = (torch.device("cuda", i) for i in range(2))
    wait_for_devices(Table((torch.ones(1), [second, None], first)), second, 3)
    assert sorted(waited) == [0, 1]
    wait_for_devices(torch.ones(1), "cuda")
    capture["on"] = True
    wait_for_devices(first)
    assert len(waited) == 2, "a capture computes nothing, and may not be waited for"


@pytest.mark.filterwarnings("ignore:.*lru_cache")
def test_a_graph_that_is_traced_waits_for_nothing(monkeypatch, capture) -> None:
    # Not the functions: Dynamo, which knows them by identity, would never know them again.
    monkeypatch.setattr(torch.cuda, "_initialized", True)

    @static_cache(maxsize=2)
    def make(size: int, device: torch.device) -> torch.Tensor:
        return torch.ones(size)

    compiled = torch.compile(
        lambda: make(3, torch.device("cuda", 0)) + 1, fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(), torch.full((3,), 2.0))


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
