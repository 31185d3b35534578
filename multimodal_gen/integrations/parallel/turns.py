"""Stands in for a denoiser's forward, to leave out the calls that other ranks compute."""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from multimodal_gen.integrations.branches import branch_name
from multimodal_gen.integrations.parallel.guidance import BranchTurns
from multimodal_gen.runtime.layers.attention.tensors import autocasts
from multimodal_gen.runtime.managers.forward_context import current_forward_context

__all__ = ["take_turns"]


def take_turns(model: nn.Module, turns: BranchTurns, undo: ExitStack) -> None:
    """Let `turns` decide which calls of a denoiser are computed; `undo` takes the way back.

    Hooks of the model run around calls that are left out, too.
    """
    before = vars(model).get("forward")
    stand_in = _Forward(model, turns)
    vars(model)["forward"] = stand_in
    undo.callback(_put_back, model, stand_in, before)


class _Forward:
    """What a denoiser has in place of its `forward`.

    A copy of the model gets its class's own.
    """

    def __init__(self, model: nn.Module, turns: BranchTurns) -> None:
        self._model = model
        self._forward: Callable[..., Any] = model.forward
        # Only the denoiser's own forward is for Dynamo to trace.
        untraced: Callable[..., Callable[..., Any]] = torch.compiler.disable
        self._begin, self._finish = untraced(turns.begin), untraced(turns.finish)
        self._stopped = False
        functools.update_wrapper(self, self._forward)

    @functools.partial(torch.compiler.disable, recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the call, or leave it to other ranks."""
        context = current_forward_context()
        if self._stopped or context is None:
            return self._forward(*args, **kwargs)
        latent = kwargs.get("hidden_states", args[0] if args else None)
        form = (_form(latent), kwargs.get("return_dict", True))
        output = self._begin(form, context, branch_name())
        computed = output is None
        if computed:
            output = self._forward(*args, **kwargs)
        return self._finish(output, computed=computed)

    def stop(self) -> None:
        """Compute all calls from now on: somebody else holds on to this object."""
        self._stopped = True

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _OwnForward, (self._model,)


def _form(latent: object) -> tuple[object, ...] | None:
    """Return what the form of a prediction depends on, as far as it is the latent's."""
    if not isinstance(latent, torch.Tensor):
        return None
    kind = latent.device.type
    cast = torch.get_autocast_dtype(kind) if autocasts(kind) else None
    return tuple(latent.shape), latent.dtype, latent.device, cast


class _OwnForward:
    """What the stand-in copies to: the `forward` of the model's class."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a call."""
        return type(self._model).forward(self._model, *args, **kwargs)


def _put_back(model: nn.Module, stand_in: _Forward, before: Any) -> None:
    stand_in.stop()
    if vars(model).get("forward") is not stand_in:
        return
    if before is None:
        del vars(model)["forward"]
    else:
        vars(model)["forward"] = before
