"""Tells attention layers what they may know of each denoiser call, through `ForwardContext`.

A forward pre-hook sets the context and a forward hook ends it, so it is there once per call. Both
run outside of compiled graphs. torch calls no hook after a `KeyboardInterrupt`: what that leaves
behind ends with the next call or with the hooks.
"""

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.causal_blocks import CausalBlocks
from multimodal_gen.integrations.denoiser_context import DenoiserContext, current_denoiser_context
from multimodal_gen.integrations.guidance_branch import branch_name
from multimodal_gen.integrations.hooks import (
    StandIn,
    own_method,
    replace_method,
    untraced_hook,
)
from multimodal_gen.integrations.models.adapter import ModelAdapter, ModelCall
from multimodal_gen.integrations.padding import KeyPadding
from multimodal_gen.integrations.parallel.token_split import TokenSplitter
from multimodal_gen.integrations.steps import Step, StepTracker
from multimodal_gen.kernels.static_cache import being_captured
from multimodal_gen.runtime.layers.attention.config import StepSet
from multimodal_gen.runtime.layers.attention.report import NotRun
from multimodal_gen.runtime.managers.forward_context import (
    current_forward_context,
    replace_forward_context,
    use_forward_context,
)

_BATCHED = "cond_uncond"

# The one cache that compares what the first block made of the tokens.
_DECIDES_BY_BLOCK = "FirstBlockCacheConfig"

# Those whose modules do not tell guidance branches apart that are calls of their own.
_KEEPS_ONE_BRANCH = ("PyramidAttentionBroadcastConfig", "FasterCacheConfig")

# The one that takes half of a batch for the unconditional branch, unless it is told otherwise.
_HALVES_BATCHES = "FasterCacheConfig"

# What the forward methods of diffusers call their timestep.
_TIMESTEPS = ("timestep", "timesteps", "t", "timestep_ratio")


class _Checkpointing(StandIn):
    """A model's function for gradient checkpointing, which recomputes in the context of the call.

    The call has ended by then, and autograd recomputes in a thread of its own.

    Attributes:
        own: the model's function.
    """

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.own(function, *args, **kwargs)
        context = current_forward_context()

        def run(*args: Any, **kwargs: Any) -> Any:
            with use_forward_context(context):
                return function(*args, **kwargs)

        return self.own(run, *args, **kwargs)

    def in_copies(self) -> Callable[..., Any]:
        return self.own


def _checkpointing_parts(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a model of diffusers that recompute, and the functions they do it by."""
    for part in model.modules():
        if getattr(part, "gradient_checkpointing", False):
            yield part, getattr(part, "_gradient_checkpointing_func", None)


def forget_checkpoints(model: nn.Module) -> None:
    """Give a model back the functions it recomputes by."""
    for part, function in _checkpointing_parts(model):
        if isinstance(function, _Checkpointing):
            part._gradient_checkpointing_func = function.own


class DenoiserHooks:
    """The hooks of one denoiser.

    Args:
        model: the denoiser.
        adapter: its family.
        component: its name in the pipeline.
        tracker: follows the pipeline's steps; the denoisers of a pipeline share one.
        pipeline: the pipeline, or None for a bare model.
        splitter: splits the tokens of a call over ranks, or None where they stay together.
        layers: names of its attention modules, for `not_run`.

    Attributes:
        named_by_sigma: steps that layers know by their noise levels, which calls then must have.
        caches: sentences about the caches that were enabled in calls.
        num_calls: calls that finished here.
    """

    def __init__(
        self,
        model: nn.Module,
        adapter: ModelAdapter,
        component: str,
        tracker: StepTracker,
        pipeline: Any = None,
        splitter: TokenSplitter | None = None,
        layers: Sequence[str] = (),
    ) -> None:
        self._adapter = adapter
        self._component = component
        self._tracker = tracker
        self._pipeline = pipeline
        self._splitter = splitter
        self._layers = layers
        self._config = getattr(model, "config", None)
        entry = adapter.causal_blocks
        self._blocks = None if entry is None or splitter is not None else CausalBlocks(entry)
        self._model = model
        self._names = [*inspect.signature(type(model).forward).parameters][1:]
        self._timestep = next((name for name in _TIMESTEPS if name in self._names), None)
        self._memo = WeakTensorKeyDictionary()
        self.named_by_sigma: StepSet | None = None
        self.caches: dict[str, None] = {}
        self._cache: object = None
        # How often the branches of the running step were called, by the pipeline's name for them.
        self._of_step: tuple[tuple[str, int], Counter[str | None]] = (("", -1), Counter())
        self.num_calls = 0
        self._not_run: dict[str, Counter[int]] = {}
        self.before = untraced_hook(self._before)
        self.after = untraced_hook(self._after)

    @property
    def tells_steps(self) -> bool:
        """Whether the denoising step of a call can be told."""
        named = self._timestep is not None or self._adapter.timestep is not None
        return named or self._tracker.has_index

    def end_context(self) -> None:
        """End the context these hooks set in this thread, if it is there still.

        With it end the contexts of calls inside of that call. Those around it stay.
        """
        if self._splitter is not None:
            self._splitter.end()
        if self._blocks is not None:
            self._blocks.end(self._model)
        context = current_forward_context()
        while context is not None:
            ours = context if isinstance(context, DenoiserContext) else None
            context = None if ours is None else ours.outer
            if ours is not None and ours.hooks is self:
                replace_forward_context(context)
                return

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Set the context; a forward pre-hook with keyword arguments."""
        self.end_context()
        if torch.is_grad_enabled():
            for part, function in _checkpointing_parts(module):
                if function is not None and not isinstance(function, _Checkpointing):
                    part._gradient_checkpointing_func = _Checkpointing(function)
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        self._look_at_cache(module, _batch_of(arguments))
        call = ModelCall(config=self._config, arguments=arguments, memo=self._memo)
        padding = self._adapter.padding(call)
        step, timestep = self._locate(call, padding)
        outer = current_forward_context()
        if step.num_steps is None and outer is not None and outer.num_steps is not None:
            # No scheduler says where a run is, but who calls does: a training loop.
            step = dataclasses.replace(
                step, index=outer.current_timestep, num_steps=outer.num_steps
            )
        if self.named_by_sigma is not None and step.sigmas is None:
            self._tracker.require_sigmas(self.named_by_sigma)
        grid, text = self._adapter.grid(call), self._adapter.text_span(call)
        splitter, lists = self._splitter, None
        if self._blocks is not None:
            latents = call.tensor("hidden_states")
            lists = None if latents is None else self._blocks.begin(module, grid, latents.device)
        context = DenoiserContext(
            current_timestep=step.index,
            timestep=timestep,
            num_steps=step.num_steps,
            sigmas=step.sigmas,
            latent_grid=grid,
            text_span=text,
            cfg_branch=self._branch(),
            branch_key=self._branch_key(step),
            component=self._component,
            request_id=step.request_id,
            call_number=None if splitter is None else splitter.begin(call, grid, text),
            padding=padding,
            split=None if splitter is None else splitter.split,
            lists=lists,
            batch=_batch_of(arguments),
            described=self._adapter.described,
            hooks=self,
            outer=outer,
        )
        replace_forward_context(context)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """End the context; a forward hook that is called after errors too, without an output."""
        del module, args
        context = current_denoiser_context()
        finished = output is not None and context is not None and context.hooks is self
        if context is not None and finished and not context.elsewhere:
            self.num_calls += 1
            for name in self._layers:
                if name not in context.ran:
                    self._not_run.setdefault(name, Counter())[context.current_timestep] += 1
        self.end_context()

    def not_run(self, name: str) -> NotRun | None:
        """Return the calls in which an attention module did not run, None where it always ran."""
        if name not in self._not_run:
            return None
        return NotRun(tuple(sorted(self._not_run[name].items())), self.num_calls)

    def _look_at_cache(self, model: nn.Module, batch: int | None = None) -> None:
        """Note the cache that is enabled; refuse one that does not fit how the model is called.

        Args:
            model: the model.
            batch: samples of the call that begins, or None where that is not plain.
        """
        cache = getattr(model, "_cache_config", None)
        if cache is None and getattr(model, "_is_cached", False):
            cache = "cache-dit"  # which keeps what it was given to itself
        if cache is self._cache:
            return
        if self._splitter is not None and type(cache).__name__ == _DECIDES_BY_BLOCK:
            raise UsageError(
                f"{self._component} must not have a {_DECIDES_BY_BLOCK} where ranks share its "
                f"tokens: each rank would decide by its own tokens whether blocks are skipped, and "
                f"wait for others in vain; use a cache that goes by steps, or one GPU"
            )
        distilled = getattr(cache, "is_guidance_distilled", False)
        if type(cache).__name__ == _HALVES_BATCHES and not distilled:
            branch = self._branch()
            if branch in ("cond", "uncond") or (batch or 0) % 2:
                got = "one branch" if branch is None else f"{branch} alone"
                raise UsageError(
                    f"{self._component} must be called with both branches of guidance in one batch "
                    f"under a {_HALVES_BATCHES}, which drops half of it, got {got} in a batch of "
                    f"{batch}; use another cache, or set its is_guidance_distilled for a model "
                    f"without guidance"
                )
        self._cache = cache
        if cache is not None:
            self.caches[f"{described_cache(cache)} was enabled"] = None

    def _locate(self, call: ModelCall, padding: KeyPadding | None) -> tuple[Step, float | None]:
        """Find the step and settle the padding, with one device synchronisation for both.

        While a CUDA graph is captured nothing can be read: the step is that of the call before,
        and the model's own masks stay.
        """
        of_grid = self._adapter.timestep
        value = of_grid(call) if of_grid else call.arguments.get(self._timestep or "")
        scale = self._adapter.timestep_scale
        if being_captured():
            step, number = self._tracker.locate_again()
            return step, None if number is None else number / scale
        timestep = value if isinstance(value, torch.Tensor) else torch.tensor(float(value or 0))
        if timestep.is_meta or not timestep.numel():  # nothing to read
            return self._tracker.locate_by_index(), None
        # The tokens of an image to continue have timestep 0; the others have the step's.
        facts = timestep.float().amax().reshape(1)
        if padding is not None:
            facts = torch.cat((facts, padding.facts().to(facts.device)))
        number, *rest = facts.tolist()
        if padding is not None:
            padding.resolve(rest)
        if value is None:
            return self._tracker.locate_by_index(), None
        step = self._tracker.locate(number, timestep.dtype, scale)
        return step, number / scale

    def _branch_key(self, step: Step) -> tuple[str | None, int]:
        """Return what the pipeline calls the running call, and how many of the step were so."""
        name, place = branch_name(), (step.request_id, step.index)
        if self._of_step[0] != place:
            self._of_step = (place, Counter())
        count = self._of_step[1][name]
        self._of_step[1][name] += 1
        cache = type(self._cache).__name__
        if cache in _KEEPS_ONE_BRANCH and len(self._of_step[1]) > 1:
            self.caches[
                f"{cache} keeps one output per module for all guidance branches: calls "
                f"of one branch get what calls of another left, as this pipeline makes them apart"
            ] = None
        return name, count

    def _branch(self) -> str | None:
        name = branch_name()
        if name in ("cond", "uncond"):
            return name
        if name != _BATCHED and not self._adapter.batches_guidance:
            return None
        # Pipelines use the name for a batch of both branches without guidance, too.
        guided = getattr(self._pipeline, "do_classifier_free_guidance", None)
        if guided is None:
            return "both" if name == _BATCHED else None
        return "both" if guided else "cond"


def _batch_of(arguments: Mapping[str, Any]) -> int | None:
    """Return how many samples a denoiser is called with, or None where that is not plain."""
    latents = arguments.get("hidden_states")
    return latents.shape[0] if isinstance(latents, torch.Tensor) and latents.dim() else None


def described_cache(config: object) -> str:
    """Return a cache of diffusers as text: its class and what is not at its default."""
    if not dataclasses.is_dataclass(config):
        return str(config)
    given = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, (bool, int, float, str, tuple)) and value != field.default:
            given.append(f"{field.name}={value}")
    return f"{type(config).__name__}({', '.join(given)})"


def notice_end(pipeline: Any, ended: Callable[[], None], undo: ExitStack) -> None:
    """Call `ended` at the end of every call of a pipeline that lets itself be noticed.

    Calls of diffusers' pipelines end with `maybe_free_model_hooks`. Others, and calls that fail,
    end for the layers with the next generation, or when their handle is told so or removed.

    Args:
        pipeline: the pipeline, or None.
        ended: what to call.
        undo: takes the step that takes it back.
    """

    def maybe_free_model_hooks(*args: Any, **kwargs: Any) -> Any:
        ended()
        return own_method(pipeline, "maybe_free_model_hooks")(*args, **kwargs)

    replace_method(pipeline, "maybe_free_model_hooks", maybe_free_model_hooks, undo)
