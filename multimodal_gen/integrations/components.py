"""Finds what `apply` can reach in its target: denoisers, encoders, and what is left alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from multimodal_gen.errors import MissingDependencyError, UsageError


class Kind(Enum):
    """What a component is to `apply`."""

    DENOISER = "denoiser"
    ENCODER = "encoder"
    AUTOENCODER = "autoencoder"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Component:
    """One model of the target.

    Attributes:
        name: its key in the pipeline.
        model: the model itself, without the wrapper of `torch.compile`.
        kind: what it is.
    """

    name: str
    model: nn.Module
    kind: Kind


def find_components(target: object) -> tuple[Component, ...]:
    """Return the models of a pipeline, or the one model given, each once.

    A bare model counts as the component `transformer`, `unet` or `text_encoder`.

    Raises:
        UsageError: the target is neither a pipeline nor a model.
        MissingDependencyError: diffusers is not installed.
    """
    model = unwrap(target)
    if isinstance(model, nn.Module):
        kind = _kind("", model)
        if kind is None:
            raise UsageError(
                f"target must be a model of diffusers or transformers, got {type(model).__name__}"
            )
        return (Component(name=_bare_name(model, kind), model=model, kind=kind),)
    named = getattr(target, "components", None)
    if not isinstance(named, Mapping):
        raise UsageError(
            f"target must be a diffusers pipeline or model, got {type(target).__name__}"
        )
    found: dict[int, Component] = {}
    for name, value in named.items():
        model = unwrap(value)
        kind = _kind(name, model) if isinstance(model, nn.Module) else None
        if kind is not None:
            found.setdefault(id(model), Component(name=name, model=model, kind=kind))
    return tuple(found.values())


def unwrap(model: Any) -> Any:
    """Return the model inside the wrapper that `torch.compile(model)` returns."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def whole_number(owner: object, *names: str) -> int | None:
    """Return the first attribute that is a positive whole number: libraries name sizes in ways."""
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def compute_dtype(module: nn.Module, model: nn.Module) -> torch.dtype:
    """Return the dtype a module most likely computes in, whatever its weights are stored in."""
    for parameter in module.parameters():
        if _computes(parameter.dtype):
            return parameter.dtype
    dtype = getattr(model, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) and _computes(dtype) else torch.bfloat16


def _computes(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize >= 2


def _kind(name: str, model: nn.Module) -> Kind | None:
    try:
        from diffusers import ModelMixin
    except ImportError as error:
        raise MissingDependencyError(
            f"apply() needs diffusers ({error}); install with: pip install 'multimodal_gen[video]'"
        ) from error
    if isinstance(model, ModelMixin):
        autoencoder = "vae" in name or "Autoencoder" in type(model).__name__
        return Kind.AUTOENCODER if autoencoder else Kind.DENOISER
    return Kind.ENCODER if is_of_transformers(model) else None


def is_of_transformers(model: object) -> bool:
    """Tell whether this is a model of transformers."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return False
    return isinstance(model, PreTrainedModel)


def _bare_name(model: nn.Module, kind: Kind) -> str:
    if kind is Kind.DENOISER:
        return "unet" if "UNet" in type(model).__name__ else "transformer"
    return "text_encoder" if kind is Kind.ENCODER else "vae"
