"""The branches of classifier-free guidance on different ranks.

Where both come in one batch, each rank computes half of it. Where each is a call of its own, a
pipeline gets, for the branch that other ranks compute, a tensor that is filled when both branches
are there: at the end of the second call. All ranks compute a step whose predictions are yet unknown
in form, or which may turn out to have one branch only: the first.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.denoiser_context import leave_to_another_rank
from multimodal_gen.integrations.guidance_branch import branch_name
from multimodal_gen.integrations.hooks import replace_method
from multimodal_gen.runtime.distributed.groups import HandshakeState, ParallelGroups
from multimodal_gen.runtime.distributed.handshake import Progress, handshake
from multimodal_gen.runtime.distributed.timing import Times, exchanging, recording
from multimodal_gen.runtime.managers.forward_context import ForwardContext, current_forward_context
from multimodal_gen.runtime.managers.guidance import unguided_error


def sample_of(output: Any) -> torch.Tensor | None:
    """Return the prediction, or None where a denoiser returns something else or more."""
    if isinstance(output, tuple) and len(output) == 1:
        output = output[0]
    elif hasattr(output, "sample") and len(output) == 1:
        output = output.sample
    return output if isinstance(output, torch.Tensor) else None


def with_sample(like: Any, sample: torch.Tensor) -> Any:
    """Return `sample` in an output like another one."""
    if isinstance(like, torch.Tensor):
        return sample
    return (sample,) if type(like) is tuple else type(like)(sample=sample)


class CfgRanks:
    """This rank and the one that computes the other guidance branch.

    Args:
        groups: the groups of this process.

    Attributes:
        times: what exchanging takes.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self.times = Times()
        self._group = groups.cfg
        # They agree among themselves, as the ranks of a sequence do.
        self._control = replace(groups, control=groups.cfg_control, handshakes=HandshakeState())

    @property
    def branch(self) -> int:
        """The branch of this rank: 0 for what is called first, or comes first in a batch."""
        return self._group.index

    def share(
        self, own: torch.Tensor, call: str, facts: dict[str, object], progress: Progress
    ) -> tuple[torch.Tensor, ...]:
        """Return what both ranks have, in order, once they are at the same call.

        Raises:
            UsageError: the ranks do not agree.
            RankError: a rank does not get there.
        """
        own = own.contiguous()
        facts = {"shape": tuple(own.shape), "dtype": own.dtype, **facts}
        handshake(self._control, call, facts, (), progress=progress)
        received = [torch.empty_like(own) for _ in self._group.ranks]
        with recording(self.times), exchanging(own.device):
            dist.all_gather(received, own, group=self._group.handle)
        return tuple(received)


def is_guided(pipeline: Any) -> bool | None:
    """Whether the running step of a pipeline has two branches; None where it does not tell."""
    conditions = getattr(getattr(pipeline, "guider", None), "num_conditions", None)
    if isinstance(conditions, int):
        return conditions > 1
    guided = getattr(pipeline, "do_classifier_free_guidance", None)
    return None if guided is None else bool(guided)


def refuse_unguided(pipeline: Any, component: str) -> UsageError:
    """Return the error for a generation that has one branch only."""
    name = component if pipeline is None else type(pipeline).__name__
    advice = "pass a guidance scale above 1 and, where the pipeline needs it, a negative prompt"
    if "true_cfg_scale" in inspect.signature(type(pipeline).__call__).parameters:
        # Their guidance scale is an input of the denoiser, which has one branch whatever it is.
        advice = "pass a true_cfg_scale above 1 and a negative prompt"
    return unguided_error(name, "a generation without", advice)


_LATENT = "hidden_states"


class BatchedCfg:
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
        progress = Progress() if context is None else Progress(step=context.current_timestep)
        halves = self._ranks.share(sample, f"the guidance batch of {self._component}", {}, progress)
        return with_sample(output, torch.cat(halves))


# What may be done with it meanwhile: it tells its form, and parts of it.
_TOLD = tuple(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim"))
_FORM = frozenset({*_TOLD, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.stride})
_PARTS = frozenset({torch.Tensor.__getitem__, torch.Tensor.view, torch.Tensor.narrow})


class PendingTensor(torch.Tensor):
    """See `pending_tensor`.

    Attributes:
        numbers: the memory, as an ordinary tensor.
        state: shared with its parts.
    """

    numbers: torch.Tensor
    state: "_State"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do with the numbers what is done with an ordinary tensor, once they are here."""
        del types
        states: list[_State] = []
        plain, named = _numbers(args, states), _numbers(dict(kwargs or {}), states)
        waiting = next((state for state in states if not state.filled), None)
        if waiting is not None and func not in _FORM and func not in _PARTS:
            raise UsageError(
                f"{waiting.reader} must not use the prediction of one guidance branch before it "
                f"asks for the other under --cfg-parallel, got {_name(func)}; run without "
                f"--cfg-parallel"
            )
        out = func(*plain, **named)
        return _wrap(out, waiting) if waiting is not None and func in _PARTS else out


class _State:
    def __init__(self, reader: str) -> None:
        self.reader = reader
        self.filled = False


def pending_tensor(numbers: torch.Tensor, reader: str) -> PendingTensor:
    """Return a tensor whose numbers are not there until `fill` fills its memory, `numbers`.

    Its parts may be taken; everything else that reads it raises.

    Args:
        numbers: the memory.
        reader: who gets it, for messages.
    """
    return _wrap(numbers, _State(reader))


def fill(pending: PendingTensor, numbers: torch.Tensor) -> None:
    """Give a pending tensor its numbers, and with it the parts that were taken of it."""
    pending.numbers.copy_(numbers)
    pending.state.filled = True


def _wrap(numbers: torch.Tensor, state: _State) -> PendingTensor:
    wrapped = numbers.as_subclass(PendingTensor)
    wrapped.numbers = numbers
    wrapped.state = state
    return wrapped


def _numbers(value: Any, states: list[_State]) -> Any:
    if isinstance(value, PendingTensor):
        states.append(value.state)
        return value.numbers
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_numbers(x, states) for x in value)
    if isinstance(value, dict):
        return {key: _numbers(x, states) for key, x in value.items()}
    return value


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)
    return str(getattr(owner, "__name__", name)) if name == "__get__" else str(name)


_BRANCHES = (None, "cond", "uncond")


@dataclass(slots=True, kw_only=True)
class _Step:
    """The calls of a denoiser in one step.

    Attributes:
        key: request and step.
        in_parallel: each rank computes its branch only.
        first: prediction of the first branch, or None before it and after the second.
        name: name of the first branch, or None where the pipeline gives none.
        calls: how many there were.
    """

    key: tuple[str | None, int]
    in_parallel: bool = False
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


class SequentialCfg:
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
            step.in_parallel = self._is_guided() and form in self._forms
        skip = step.in_parallel and branch != self._ranks.branch
        self._open = _Call(step=step, form=form, branch=branch)
        return self._output(form) if skip else None

    def finish(self, output: Any, *, computed: bool) -> Any:
        """Return the output of a call once it may be, with all its numbers or a `PendingTensor`."""
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
            sample = pending_tensor(sample, reader)
        call.step.first = sample
        return output if computed else with_sample(output, sample)

    def _share(self, call: _Call, second: torch.Tensor) -> None:
        """Give both ranks the predictions of both branches."""
        step, mine = call.step, self._ranks.branch
        first, step.first = step.first, None
        assert first is not None, "it was called before"
        progress = Progress(step=step.key[1], call=step.calls)
        name = f"the guidance branches of {self._component}"
        own = second if mine == 1 else first
        branches = self._ranks.share(own, name, {"in parallel": step.in_parallel}, progress)
        if isinstance(first, PendingTensor):
            fill(first, branches[0])
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
        sample = sample_of(like)
        assert sample is not None, "what has a form is one tensor"
        return with_sample(like, torch.full_like(sample, torch.nan, device=device))


def run_own_branch(model: nn.Module, cfg: SequentialCfg, undo: ExitStack) -> None:
    """Let `cfg` decide which calls of a denoiser are computed; `undo` takes the way back.

    Hooks of the model run around calls that are left out, too.
    """
    own = model.forward
    # Only the denoiser's own forward is for Dynamo to trace.
    untraced: Callable[..., Callable[..., Any]] = torch.compiler.disable
    begin, finish = untraced(cfg.begin), untraced(cfg.finish)
    leave = untraced(leave_to_another_rank)

    @functools.partial(torch.compiler.disable, recursive=False)
    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        context = current_forward_context()
        if context is None:
            return own(*args, **kwargs)
        latent = kwargs.get("hidden_states", args[0] if args else None)
        form = (_form(latent), kwargs.get("return_dict", True))
        output = begin(form, context, branch_name())
        computed = output is None
        if computed:
            output = own(*args, **kwargs)
        else:
            leave()
        return finish(output, computed=computed)

    replace_method(model, "forward", forward, undo, over_others=True)


def _form(latent: object) -> tuple[object, ...] | None:
    """Return what the form of a prediction depends on, as far as it is the latent's."""
    if not isinstance(latent, torch.Tensor):
        return None
    kind = latent.device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return tuple(latent.shape), latent.dtype, latent.device, cast
