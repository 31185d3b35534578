"""The branches of classifier-free guidance on different ranks, where each is a call of its own.

For the branch that other ranks compute, a pipeline gets a tensor that is filled when both branches
are there: at the end of the second call. All ranks compute a step whose predictions are yet
unknown in form, or which may turn out to have one branch only: the first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.parallel.cfg_ranks import CfgRanks, is_guided, refuse_unguided
from multimodal_gen.integrations.parallel.outputs import sample_of, with_sample
from multimodal_gen.integrations.parallel.promise import Promise, keep, promise
from multimodal_gen.runtime.managers.forward_context import ForwardContext

__all__ = ["BranchTurns"]

_Compute = Callable[[], Any]
_BRANCHES = (None, "cond", "uncond")


@dataclass(slots=True, kw_only=True)
class _Step:
    """The calls of a denoiser in one step.

    Attributes:
        key: request and step.
        in_turns: each rank computes its branch only.
        first: prediction of the first branch, or None before it and after the second.
        name: name of the first branch, or None where the pipeline gives none.
        calls: how many there were.
    """

    key: tuple[str | None, int]
    in_turns: bool = False
    first: torch.Tensor | None = None
    name: str | None = None
    calls: int = 0


class BranchTurns:
    """Lets this rank compute its own branch only.

    Args:
        ranks: who computes the branches.
        component: the denoiser's name.
        pipeline: its pipeline, or None for a bare model.
    """

    def __init__(self, ranks: CfgRanks, component: str, pipeline: Any) -> None:
        self._ranks = ranks
        self._component = component
        self._pipeline = pipeline
        self._step: _Step | None = None
        # Calls in the last whole step of this generation; None before there was one.
        self._calls: int | None = None
        # By the form of the inputs, an output of which only the form counts.
        self._forms: dict[Any, tuple[Any, torch.device]] = {}

    def end_request(self) -> None:
        """Take note that a generation is over."""
        self._step = self._calls = None

    def call(self, compute: _Compute, form: Any, context: ForwardContext, name: str | None) -> Any:
        """Return the prediction of a call of the denoiser, or a promise of it.

        Args:
            compute: computes it.
            form: what its form depends on, hashable.
            context: the call.
            name: what the pipeline calls the branch, or None where it does not tell.
        """
        if name not in _BRANCHES:
            return compute()
        step = self._step_of((context.request_id, context.current_timestep))
        step.calls += 1
        if step.first is None or (name is not None and name == step.name):
            return self._first(step, compute, form, name)
        return self._second(step, compute, form)

    def _step_of(self, key: tuple[str | None, int]) -> _Step:
        if self._step is None or self._step.key != key:
            self._calls = None if self._step is None else self._step.calls
            self._step = _Step(key=key)
        return self._step

    def _first(self, step: _Step, compute: _Compute, form: Any, name: str | None) -> Any:
        step.name = name
        step.in_turns = self._is_guided() and form in self._forms
        if step.in_turns and self._ranks.branch == 1:
            output = self._output(form)
            reader = type(self._pipeline or self).__name__
            promised = promise(_sample(output), reader)
            step.first = promised
            return with_sample(output, promised)
        output = compute()
        step.first = sample_of(output)
        return output

    def _second(self, step: _Step, compute: _Compute, form: Any) -> Any:
        first, step.first = step.first, None
        assert first is not None, "callers know"
        output = self._output(form) if step.in_turns and self._ranks.branch == 0 else compute()
        second = sample_of(output)
        if second is None:
            return output
        call = f"the guidance branches of {self._component}"
        mine = second if self._ranks.branch == 1 else first
        branches = self._ranks.share(mine, call, {"step": step.key[1], "in turns": step.in_turns})
        if isinstance(first, Promise):
            keep(first, branches[0])
        elif self._ranks.branch == 1:
            first.copy_(branches[0])
        if self._ranks.branch == 0:
            second.copy_(branches[1])
        if form not in self._forms:
            self._forms[form] = (with_sample(output, second.to("meta")), second.device)
        return output

    def _is_guided(self) -> bool:
        """Whether the step that begins will have two branches.

        Raises:
            UsageError: the generation has none that do.
        """
        guided = is_guided(self._pipeline)
        varies = getattr(self._pipeline, "guider", None) is not None
        if not varies and (guided is False or self._calls == 1):
            raise refuse_unguided(self._pipeline, self._component)
        return self._calls == 2 if guided is None else guided

    def _output(self, form: Any) -> Any:
        """Return an output in a known form, with numbers yet to come."""
        like, device = self._forms[form]
        sample = _sample(like)
        return with_sample(like, torch.full_like(sample, torch.nan, device=device))


def _sample(output: Any) -> torch.Tensor:
    sample = sample_of(output)
    if sample is None:
        raise UsageError(f"a denoiser must return one tensor, got {type(output).__name__}")
    return sample
