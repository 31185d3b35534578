"""The branches of classifier-free guidance on different ranks, where both come in one batch."""

import inspect
from typing import Any

import torch
from torch import nn

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.parallel.cfg_ranks import CfgRanks, is_guided, refuse_unguided
from multimodal_gen.integrations.parallel.outputs import sample_of, with_sample
from multimodal_gen.runtime.distributed.agreement import Turn
from multimodal_gen.runtime.managers.forward_context import current_forward_context

__all__ = ["BatchSplit"]

_LATENT = "hidden_states"


class BatchSplit:
    """Gives one half of each batch to this rank, by a hook before a denoiser and one after it.

    Args:
        ranks: who computes the halves.
        model: the denoiser.
        component: its name.
        pipeline: its pipeline, or None for a bare model.
        arguments: the denoiser's arguments that have a batch axis, the first.
    """

    def __init__(
        self,
        ranks: CfgRanks,
        model: nn.Module,
        component: str,
        pipeline: Any,
        arguments: tuple[str, ...],
    ) -> None:
        self._ranks = ranks
        self._component = component
        self._pipeline = pipeline
        self._arguments = arguments
        self._names = [*inspect.signature(type(model).forward).parameters][1:]
        self._is_split = False

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Keep this rank's half of the arguments; a forward pre-hook with keyword arguments.

        Raises:
            UsageError: the generation has no guidance.
        """
        del module
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        batch = arguments[_LATENT].shape[0]
        if batch % 2 or is_guided(self._pipeline) is False:
            raise refuse_unguided(self._pipeline, self._component)
        start = self._ranks.branch * batch // 2
        for name in self._arguments:
            value = arguments.get(name)
            if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == batch:
                arguments[name] = value[start : start + batch // 2]
        self._is_split = True
        return (), arguments

    def after(self, module: nn.Module, args: object, output: Any) -> Any:
        """Return the predictions of both halves; a forward hook."""
        del args
        if not self._is_split:
            return output
        self._is_split = False
        sample = sample_of(output)
        if sample is None:
            raise UsageError(
                f"{type(module).__name__} must return one tensor under --cfg-parallel, got "
                f"{type(output).__name__}; run without --cfg-parallel"
            )
        context = current_forward_context()
        turn = Turn() if context is None else Turn(step=context.current_timestep)
        halves = self._ranks.share(sample, f"the guidance batch of {self._component}", {}, turn)
        return with_sample(output, torch.cat(halves))
