"""What attention layers may know of the denoiser call they run in.

The context is set once per denoiser call, never per layer, and lives in a `ContextVar`: threads
and nested calls do not see each other's.
"""

import itertools
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Final, TypeVar

import torch

from multimodal_gen.errors import UsageError, short
from multimodal_gen.settings import expect

T = TypeVar("T")

_MOST_TOKENS = 2**31 - 1  # they are indexed by 32 bits


def _is_count(value: object) -> bool:
    """Whether a value is an integer from 0; in a step of many calls the first test is enough."""
    if type(value) is int:
        return value >= 0
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSpan:
    """Where text tokens sit in a joint sequence.

    Attributes:
        start: index of the first text token.
        length: number of text positions, padding included.
    """

    start: int
    length: int

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("length", self.length)):
            if not _is_count(value):
                raise UsageError(
                    f"{name} of a TextSpan must be an integer >= 0, got {short(value)}"
                )

    @property
    def stop(self) -> int:
        """Index after the last text position."""
        return self.start + self.length


class TensorCache:
    """What the layers of a call derive from the same tensor, such as the packing of a mask.

    It holds the tensors, so that no other one gets the identity of one it knows. A tensor that was
    changed in place counts as another one, except inference tensors, whose changes torch does not
    count: within one call of the denoiser they must stay as they are.
    """

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[Hashable, tuple[torch.Tensor, Any]] = {}

    def get(self, tensor: torch.Tensor, use: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` gives, which is called once per tensor and use."""
        version = 0 if tensor.is_inference() else tensor._version
        key = (id(tensor), version, use)
        if key not in self._values:
            self._values[key] = (tensor, make())
        value: T = self._values[key][1]
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """One denoiser call.

    Attributes:
        current_timestep: index of the denoising step, from 0.
        attn_metadata: metadata a caller prepared for its backend, or None.
        forward_batch: the request object of the caller, or None.
        timestep: the scheduler's timestep value, or None when unknown.
        num_steps: number of denoising steps, or None when unknown.
        sigmas: the noise level of every denoising step, in the scheduler's units, or None when
            unknown.
        latent_grid: (T, H, W) of the video tokens after patching, or None when unknown.
        text_span: where text sits in joint sequences, or None when attention sees no text.
        cfg_branch: "cond", "uncond" or "both" (batched), or None when unknown.
        branch_key: tells the calls of one denoising step apart, so that what is kept of a call goes
            to that of the next step with the same key; None where that is not known.
        component: pipeline component that runs, e.g. "transformer_2".
        request_id: identifies the generation, so that caches of two requests never mix; without
            one, nothing is carried from step to step.
        call_number: the denoiser's calls of this request before this one, or None when unknown.
        kv_cache: the `CausalCache` of the running chunk, for self-attention layers that have a
            number and are given no cache; None without.
        exchanges: counts the exchanges of layers with other ranks in this call.
        cache: what the layers of this call derive from tensors they share.

    Raises:
        UsageError: `current_timestep`, `num_steps`, `sigmas`, `latent_grid` or `text_span` has
            another type, or is out of range.
    """

    current_timestep: int
    attn_metadata: Any = None
    forward_batch: Any = None
    timestep: float | None = None
    num_steps: int | None = None
    sigmas: tuple[float, ...] | None = None
    latent_grid: tuple[int, int, int] | None = None
    text_span: TextSpan | None = None
    cfg_branch: str | None = None
    branch_key: Hashable = None
    component: str | None = None
    request_id: str | None = None
    call_number: int | None = None
    kv_cache: Any = field(default=None, compare=False, repr=False)
    exchanges: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)
    cache: TensorCache = field(default_factory=TensorCache, compare=False, repr=False)

    def __post_init__(self) -> None:
        step, count, grid = self.current_timestep, self.num_steps, self.latent_grid
        if not _is_count(step):
            raise UsageError(
                f"current_timestep must be the index of a denoising step, an integer >= 0, got "
                f"{short(step)}; what the scheduler counts by is `timestep`"
            )
        if count is not None and not _is_count(count):
            raise UsageError(f"num_steps must be an integer >= 0 or None, got {short(count)}")
        if self.sigmas is not None and type(self.sigmas) is not tuple:
            words = "the noise levels of all denoising steps or None"
            expect("sigmas", self.sigmas, (list, torch.Tensor), words)
            object.__setattr__(self, "sigmas", tuple(float(sigma) for sigma in self.sigmas))
        if grid is not None:
            fits = isinstance(grid, (tuple, list)) and len(grid) == 3
            if not fits or not all(_is_count(size) and size for size in grid):
                raise UsageError(
                    f"latent_grid must be (T, H, W), three integers >= 1, or None, got "
                    f"{short(grid)}"
                )
            if grid[0] * grid[1] * grid[2] > _MOST_TOKENS:
                raise UsageError(
                    f"latent_grid must have at most {_MOST_TOKENS} tokens, got {short(grid)}"
                )
            if type(grid) is not tuple:
                object.__setattr__(self, "latent_grid", tuple(grid))
        remedy = "make one with TextSpan(start=..., length=...)"
        expect("text_span", self.text_span, TextSpan | None, "a TextSpan or None", remedy)

    @property
    def is_last_step(self) -> bool:
        """Whether no denoising step follows, as far as that is known."""
        return self.num_steps is not None and self.current_timestep >= self.num_steps - 1


_CONTEXT: ContextVar[ForwardContext | None] = ContextVar("multimodal_gen_forward", default=None)

current_forward_context: Final = _CONTEXT.get
"""Returns the current context, or None outside a denoiser call."""


@contextmanager
def set_forward_context(
    current_timestep: int,
    attn_metadata: Any = None,
    forward_batch: Any = None,
    *,
    timestep: float | None = None,
    num_steps: int | None = None,
    sigmas: tuple[float, ...] | None = None,
    latent_grid: tuple[int, int, int] | None = None,
    text_span: TextSpan | None = None,
    cfg_branch: str | None = None,
    branch_key: Hashable = None,
    component: str | None = None,
    request_id: str | None = None,
    call_number: int | None = None,
    kv_cache: Any = None,
) -> Iterator[ForwardContext]:
    """Describe the denoiser call that runs inside the `with` block.

    For the arguments, and for what is refused, see `ForwardContext`.
    """
    context = ForwardContext(
        current_timestep=current_timestep,
        attn_metadata=attn_metadata,
        forward_batch=forward_batch,
        timestep=timestep,
        num_steps=num_steps,
        sigmas=sigmas,
        latent_grid=latent_grid,
        text_span=text_span,
        cfg_branch=cfg_branch,
        branch_key=branch_key,
        component=component,
        request_id=request_id,
        call_number=call_number,
        kv_cache=kv_cache,
    )
    with use_forward_context(context):
        yield context


@contextmanager
def set_for_block(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Let a context variable have a value inside the `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def use_forward_context(context: ForwardContext | None) -> AbstractContextManager[None]:
    """Make `context` the current one inside the `with` block."""
    return set_for_block(_CONTEXT, context)


def replace_forward_context(context: ForwardContext | None) -> None:
    """Make `context` the current one until it is replaced, for hooks, which no block encloses."""
    _CONTEXT.set(context)


def get_forward_context() -> ForwardContext:
    """Return the current context.

    Raises:
        RuntimeError: no denoiser call is running.
    """
    context = _CONTEXT.get()
    if context is None:
        raise RuntimeError(
            "no forward context is set; run the denoiser inside `with set_forward_context(step):`"
        )
    return context
