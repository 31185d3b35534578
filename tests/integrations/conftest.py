"""Pipelines to attach to, and what their attention layers get to know."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from multimodal_gen.runtime.layers.attention.layer import USPAttention
from multimodal_gen.runtime.layers.attention.scope import LayerSite
from multimodal_gen.runtime.managers.forward_context import (
    ForwardContext,
    current_forward_context,
)
from multimodal_gen.testing.tiny_models import FAMILIES


@dataclass(frozen=True)
class Call:
    """One call of a layer: where it sits, what it was told, and what it was given."""

    site: LayerSite
    context: ForwardContext | None
    query: tuple[int, ...]
    key: tuple[int, ...]
    mask: tuple[int, ...] | None


# HunyuanVideo-1.5 runs its glyph encoder on the quoted words of a prompt, and only then.
PROMPT = 'A shop window with a sign that says "open" in large letters'


def load(folder: Path) -> Any:
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: Any, family: str, **overrides: Any) -> torch.Tensor:
    """Return the latents of one run with seed 0."""
    generator = torch.Generator().manual_seed(0)
    defaults = {**FAMILIES[family].generate_kwargs, "prompt": PROMPT, "output_type": "latent"}
    kwargs = {**defaults, **overrides}
    latents: torch.Tensor = pipe(generator=generator, **kwargs)[0]
    return latents


@pytest.fixture(scope="session")
def fresh(tiny_pipeline: Callable[[str], Path]) -> Callable[[str], Any]:
    """Return a function that loads a family's pipeline, untouched."""
    return lambda family: load(tiny_pipeline(family))


@pytest.fixture(scope="session")
def stock_latents(fresh: Callable[[str], Any]) -> Callable[[str], torch.Tensor]:
    """Return a function that gives the latents of a family's untouched pipeline."""
    return cache(lambda family: generate(fresh(family), family))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Record every call that reaches a layer of an attached model."""
    recorded: list[Call] = []
    attend = USPAttention.attend

    def record(self, call):
        if not torch.compiler.is_compiling():
            recorded.append(
                Call(
                    site=self.site,
                    context=current_forward_context(),
                    query=tuple(call.query.shape),
                    key=tuple(call.key.shape),
                    mask=None if call.mask is None else tuple(call.mask.shape),
                )
            )
        return attend(self, call)

    monkeypatch.setattr(USPAttention, "attend", record)
    return recorded
