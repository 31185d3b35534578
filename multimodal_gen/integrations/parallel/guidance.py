"""The branches of classifier-free guidance on different ranks, where each is a call of its own.

For the branch that other ranks compute, a pipeline gets a tensor that is filled when both branches
are there: at the end of the second call. All ranks compute a step whose predictions are yet
unknown in form, or which may turn out to have one branch only: the first.
"""

from dataclasses import dataclass
from typing import Any

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.parallel.cfg_ranks import CfgRanks, is_guided, refuse_unguided
from multimodal_gen.integrations.parallel.outputs import sample_of, with_sample
from multimodal_gen.integrations.parallel.promise import Promise, keep, promise
from multimodal_gen.runtime.distributed.agreement import Turn
from multimodal_gen.runtime.managers.forward_context import ForwardContext

__all__ = ["BranchTurns"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A call that runs.

    Attributes:
        step: its step.
        form: what the form of its output depends on.
        branch: 0 for the first of the step, 1 for the second.
    """

    step: _Step
    form: Any
    branch: int


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
        self._open: _Call | None = None
        self._predicts = True
        # Calls in the last whole step of this generation; None before there was one.
        self._calls: int | None = None
        # By the form of the inputs, an output of which only the form counts.
        self._forms: dict[Any, tuple[Any, torch.device]] = {}

    def end_request(self) -> None:
        """Take note that a generation is over."""
        self._step = self._calls = self._open = None

    def begin(self, form: Any, context: ForwardContext, name: str | None) -> Any:
        """Return an output whose numbers another rank computes, or None for a call to compute.

        Args:
            form: what the form of the output depends on, hashable.
            context: the call.
            name: what the pipeline calls the branch, or None where it does not tell.

        Raises:
            UsageError: the generation has no guidance.
        """
        self._open = None
        if name not in _BRANCHES or not self._predicts:
            return None
        step = self._step_of((context.request_id, context.current_timestep))
        step.calls += 1
        branch = int(step.first is not None and (name is None or name != step.name))
        if branch == 0:
            step.name = name
            step.in_turns = self._is_guided() and form in self._forms
        skip = step.in_turns and branch != self._ranks.branch
        self._open = _Call(step=step, form=form, branch=branch)
        return self._output(form) if skip else None

    def finish(self, output: Any, *, computed: bool) -> Any:
        """Return the output of a call once it may be, with all its numbers or a promise of them."""
        call, self._open = self._open, None
        sample = None if call is None else sample_of(output)
        if call is None:
            return output
        if sample is None:
            # Not the noise but, from a ControlNet, hints for those who predict it.
            self._predicts = False
            return output
        if call.branch == 1:
            self._share(call, sample)
            if call.form not in self._forms:
                self._forms[call.form] = (with_sample(output, sample.to("meta")), sample.device)
            return output
        if not computed:
            pipeline = self._pipeline
            reader = self._component if pipeline is None else type(pipeline).__name__
            sample = promise(sample, reader)
        call.step.first = sample
        return output if computed else with_sample(output, sample)

    def _share(self, call: _Call, second: torch.Tensor) -> None:
        """Give both ranks the predictions of both branches."""
        step, mine = call.step, self._ranks.branch
        first, step.first = step.first, None
        assert first is not None, "it was called before"
        turn = Turn(step=step.key[1], call=step.calls)
        name = f"the guidance branches of {self._component}"
        own = second if mine == 1 else first
        branches = self._ranks.share(own, name, {"in turns": step.in_turns}, turn)
        if isinstance(first, Promise):
            keep(first, branches[0])
        elif mine == 1:
            first.copy_(branches[0])
        if mine == 0:
            second.copy_(branches[1])

    def _step_of(self, key: tuple[str | None, int]) -> _Step:
        if self._step is None or self._step.key != key:
            self._calls = None if self._step is None else self._step.calls
            self._step = _Step(key=key)
        return self._step

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
