"""What ranks do with pipelines they load from a folder, once per process."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.runtime.attention_report import GuardMiss
from multimodal_gen.runtime.distributed.groups import parallel_groups, use_parallel_groups
from tests.integrations.conftest import generate, load

GUIDED = {"true_cfg_scale": 3.0, "negative_prompt": "Blurry, low quality"}


@cache
def pipeline(folder: Path) -> Any:
    return load(folder)


def latents(
    folder: Path, family: str, overrides: Mapping[str, Any]
) -> tuple[torch.Tensor, tuple[str, ...], int]:
    """Return the latents of this rank, the report's notes, and how often a denoiser computed."""
    pipe = pipeline(folder)
    count = Count(pipe)
    with apply(pipe) as handle:
        out = generate(pipe, family, **overrides)
        report = handle.report()
    assert "did not run" not in report.summary()
    return out, report.notes, count.end()


class Count:
    """Counts what the denoisers of a pipeline compute."""

    def __init__(self, pipe: Any) -> None:
        self.calls = 0
        names = ("transformer", "transformer_2")
        models = [getattr(pipe, name) for name in names if getattr(pipe, name, None) is not None]
        self._hooks = [model.proj_out.register_forward_hook(self._add) for model in models]

    def _add(self, *call: object) -> None:
        del call
        self.calls += 1

    def end(self) -> int:
        """Return how many calls there were, and count no more."""
        for hook in self._hooks:
            hook.remove()
        return self.calls


def sparse(
    folder: Path, family: str, backend: str, config: Mapping[str, Any], steps: int
) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """Return the latents of one process and of the ranks, and the densities of this rank."""
    pipe = pipeline(folder)
    settings = {"attention_backend": backend, "attention_backend_config": config}
    with use_parallel_groups(None), apply(pipe, **settings):
        want = generate(pipe, family, num_inference_steps=steps)
    with apply(pipe, **settings) as handle:
        got = generate(pipe, family, num_inference_steps=steps)
        layers = handle.report().layers
    densities = [e.density for layer in layers for e in layer.entries if e.densities]
    return want, got, densities


def guarded(
    folder: Path, family: str, backend: str, config: Mapping[str, Any], bounds: Sequence[float]
) -> tuple[torch.Tensor, tuple[GuardMiss, ...]]:
    """Return latents of the ranks once a guard of sparse methods has run, and what missed.

    Args:
        folder: of the pipeline.
        family: its family.
        backend: a sparse method.
        config: its parameters.
        bounds: of each rank, which would have the same outside of a test.
    """
    groups = parallel_groups()
    assert groups is not None
    settings = {"attention_backend": backend, "attention_backend_config": config}
    pipe = pipeline(folder)
    with apply(pipe, **settings, attention_guard={"sparse": bounds[groups.rank]}) as handle:
        generate(pipe, family, num_inference_steps=4)
        latents = generate(pipe, family)
        report = handle.report()
    assert report.guard is not None
    return latents, report.guard.missed


def message(folder: Path, family: str, overrides: Mapping[str, Any]) -> str:
    """Return the error of a generation, which this rank is to get."""
    pipe = pipeline(folder)
    try:
        with apply(pipe):
            generate(pipe, family, **overrides)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
