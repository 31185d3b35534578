"""The JSON file beside a result: enough to know, and to repeat, what was run."""

import importlib.metadata
import json
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from multimodal_gen.runtime.layers.attention.report import Json

__all__ = ["Timings", "record_json", "versions"]

_DISTRIBUTIONS = ("torch", "diffusers", "transformers", "accelerate", "triton")


class Timings:
    """Wall-clock seconds of the phases of a run.

    Work on an accelerator is waited for at the end of every denoising step, so that a step's time
    is its own.

    Args:
        device: where the pipeline runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.phases: dict[str, float] = {}
        self.steps: list[float] = []
        self._device = device
        self._started: float | None = None
        self._mark: float | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the `with` block as phase `name`."""
        start = self.now()
        yield
        self.phases[name] = self.now() - start

    def now(self) -> float:
        """Return the time once the device is idle."""
        synchronize = torch.get_device_module(self._device).synchronize
        # Not every kind of device takes an argument here; the current one is the default.
        synchronize(*([] if self._device.index is None else [self._device]))
        return time.perf_counter()

    def start_steps(self) -> None:
        """Mark the start of the first denoising step."""
        self._started = self._mark = self.now()

    def step_done(self) -> None:
        """Mark the end of a denoising step."""
        now = self.now()
        self.steps.append(now - (self._mark or now))
        self._mark = now

    def split(self, start: float) -> None:
        """Take what ran since `start`, outside the steps, as the phases "prepare" and "decode"."""
        end = self.now()
        self.phases["prepare"] = (self._started or start) - start
        self.phases["decode"] = end - (self._mark or end)

    def as_dict(self) -> dict[str, Json]:
        """Return seconds by phase, and by step under "steps", rounded to microseconds."""
        phases: dict[str, Json] = {name: round(value, 6) for name, value in self.phases.items()}
        return {**phases, "steps": [round(value, 6) for value in self.steps]}


def versions(device: torch.device) -> dict[str, Json]:
    """Return versions of Python and the libraries, and the device's name."""
    found: dict[str, Json] = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    # The module knows the local build, e.g. 2.13.0+cu130, which the metadata may leave out.
    found["torch"] = torch.__version__
    found["cuda"] = torch.version.cuda
    found["device"] = _device_name(device)
    return found


def record_json(record: dict[str, Any], path: Path) -> None:
    """Write a record as indented JSON."""
    path.write_text(
        json.dumps(record, indent=2, ensure_ascii=True, allow_nan=False) + "\n", "utf-8"
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)
