"""Splits the tokens of a denoiser over ranks by hooks on its modules, and gathers its output.

`torch.compile` may trace the hooks, as a module they hang on may be compiled on its own. What they
read is set anew for every call. Gathering is one opaque operator to it.

B batch, S tokens, C channels.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.denoiser_context import (
    TokenShare,
    TokenSplit,
    WithText,
    current_denoiser_context,
    share_tokens,
)
from multimodal_gen.integrations.hooks import StandIn, do_nothing
from multimodal_gen.integrations.models.adapter import Grid
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan
from multimodal_gen.runtime.distributed.collectives import all_gather_tokens
from multimodal_gen.runtime.distributed.groups import ParallelGroups, parallel_groups
from multimodal_gen.runtime.distributed.handshake import handshake
from multimodal_gen.runtime.distributed.timing import recording
from multimodal_gen.runtime.layers.attention.sequence_parallel.layer import count_exchange
from multimodal_gen.runtime.managers.forward_context import TextSpan


def gather_sequence(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return [B, sum S, C] of each rank's [B, S, C].

    Args:
        x: this rank's tokens.
        lengths: S of each rank that shares the sequence.
    """
    if torch.compiler.is_compiling():
        return _gather_op(x, lengths)
    return _gather(x, lengths)


def _gather(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    groups = parallel_groups()
    if groups is None or groups.sequence.size != len(lengths):
        raise UsageError(
            f"the {len(lengths)} ranks that share a sequence must stay together while a model is "
            f"attached, got {'none' if groups is None else groups.sequence.size}; call remove() on "
            f"its handle before the groups change"
        )
    facts = {
        "tokens": tuple(lengths),
        "batch size": x.shape[0],
        "channels": tuple(x.shape[2:]),
        "dtype": x.dtype,
    }
    on_cpu = x.device.type == "cpu"
    refusal = _refusal(x, lengths[groups.sequence.index], groups.rank)
    progress = count_exchange()
    handshake(groups, "gathering of tokens", facts, (), refusal, progress=progress, wait=on_cpu)
    context = current_denoiser_context()
    split = None if context is None else context.split
    with recording(None if split is None else split.times):
        whole = all_gather_tokens(x.transpose(1, -1), lengths, groups.sequence)
    return whole.transpose(1, -1).contiguous()


def _refusal(x: torch.Tensor, length: int, rank: int) -> UsageError | None:
    """Return why the tokens of this rank cannot be gathered, or None."""
    if x.shape[1] != length:
        return UsageError(
            f"the tokens of rank {rank} must be {length} again where they are gathered, as many as "
            f"it was given, got {x.shape[1]}; a model that changes their number cannot be split"
        )
    if x.requires_grad and torch.is_grad_enabled():
        return UsageError(
            "tokens that ranks gather must not require grad; call the model under torch.no_grad()"
        )
    return None


@torch.library.custom_op("multimodal_gen::gather_sequence", mutates_args=())
def _gather_op(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    return _gather(x, lengths)


@_gather_op.register_fake
def _(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    return x.new_empty((x.shape[0], sum(lengths), *x.shape[2:]))


class TokenSplitter:
    """The hooks that split one denoiser.

    Args:
        model: the denoiser.
        plan: where to cut.
        groups: the groups of this process, of which several ranks share a sequence.

    Attributes:
        split: the split of the running call.

    Raises:
        UsageError: the model has no such modules.
    """

    def __init__(self, model: nn.Module, plan: SplitPlan, groups: ParallelGroups) -> None:
        self._model = model
        self._plan = plan
        self._group = groups.sequence
        self._calls = 0
        self.split = TokenSplit(whole=plan.whole)
        # In this order: some modules get of all ranks what was cut for the module around them.
        self._cuts = tuple(
            (cut, module)
            for cut in (*plan.cuts, *plan.gathered)
            for module in _find(model, cut.module)
            if cut.only_if is None or getattr(module, cut.only_if, False)
        )
        (self._gathered,) = _find(model, plan.gather)

    def begin(self, call: Any, grid: Grid | None, text: TextSpan | None) -> int:
        """Settle the split of a call (a `ModelCall`); return how many came before it."""
        number = self._calls
        self._calls += 1
        plan = self._plan
        refusal = None if plan.refuse is None else plan.refuse(call)
        if refusal is not None:
            raise UsageError(f"{refusal}; run it on one GPU")
        behind = None if plan.behind is None else plan.behind(call)
        settle = self.split.settle = functools.partial(self._settle, text, behind)
        if plan.tokens is None:
            return number
        if plan.tokens == "grid":
            tokens = None if grid is None else math.prod(grid)
        else:
            tokens = plan.tokens(call)
        if tokens is None:
            raise UsageError(
                f"a call of {type(self._model).__name__} must tell its latent size where ranks "
                f"share its tokens, got none; run it on one GPU"
            )
        settle(tokens)
        return number

    def end(self) -> None:
        """Say that the call is over."""
        self.split.share = self.split.settle = None

    def end_request(self) -> None:
        """Take note that a generation is over."""
        self._calls = 0

    def _settle(self, text: TextSpan | None, behind: int | None, tokens: int) -> TokenShare:
        share = share_tokens(tokens, self._group.size, self._group.index, text)
        share = self.split.share = replace(
            share,
            back=share.back if behind is None else behind,
            keys_alone=self._plan.keys_alone,
            exact=self._plan.tokens is None,
        )
        return share

    def install(self, undo: ExitStack) -> None:
        """Set the hooks; `undo` takes the way back."""
        # Modules alike share a hook, so that a graph compiled for one serves the others.
        hooks: dict[Any, _ArgumentCut] = {}
        for cut, module in self._cuts:
            if cut.argument is None:
                handle = module.register_forward_hook(_OutputCut(cut, self.split))
            else:
                names = [*inspect.signature(type(module).forward).parameters][1:]
                if cut.argument not in names:
                    continue
                position = names.index(cut.argument)
                kind = _ArgumentGather if cut in self._plan.gathered else _ArgumentCut
                new = kind(cut, cut.argument, position, self.split)
                hook = hooks.setdefault((cut, position), new)
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
            undo.callback(handle.remove)
        gather = _Gather(self.split, self._plan.gather, with_text=self._plan.with_text)
        undo.callback(self._gathered.register_forward_hook(gather).remove)
        undo.callback(self.end)


class _Hook(StandIn):
    """A hook that `torch.compile` may trace, and that a copy of its module does not run."""

    def __init__(self, split: TokenSplit) -> None:
        self.split = split

    def in_copies(self) -> Callable[..., None]:
        return do_nothing


class _Gather(_Hook):
    """A forward hook that gathers what a module returns."""

    def __init__(self, split: TokenSplit, name: str, *, with_text: WithText) -> None:
        super().__init__(split)
        self.name = name
        self.with_text = with_text

    def __call__(self, module: nn.Module, args: object, output: Any) -> Any:
        share = self.split.share
        if share is None:
            return output
        if isinstance(output, tuple):
            return (self._gathered(output[0], share), *output[1:])
        if output.dim() == 2:
            return self._gathered(output[None], share)[0]
        return self._gathered(output, share)

    def _gathered(self, output: torch.Tensor, share: TokenShare) -> torch.Tensor:
        if output.requires_grad and torch.is_grad_enabled():
            raise UsageError(
                "a denoiser must run under torch.no_grad() where its tokens are split over ranks: "
                "its output carries no gradient"
            )
        front, back = share.text_rows(output.shape[1], share.length, self.with_text)
        _expect(output, 1, front + share.length + back, f"the output of {self.name}")
        # One rank's text is taken for all, where it belongs: each has rounded it by itself.
        last = len(share.lengths) - 1
        start = front if share.index else 0
        stop = output.shape[1] - (back if share.index < last else 0)
        lengths = list(share.lengths)
        lengths[0] += front
        lengths[last] += back
        return gather_sequence(output[:, start:stop], lengths)


class _CutHook(_Hook):
    """A hook that keeps this rank's tokens of tensors."""

    def __init__(self, cut: Cut, split: TokenSplit) -> None:
        super().__init__(split)
        self.cut = cut

    def keep(self, value: Any) -> Any:
        """Return this rank's part of an argument or output."""
        cut = self.cut
        share = self._share_of(value)
        if share is None:
            return value
        if cut.is_count:
            return share.of_leading(value)
        if cut.index is None:
            return _keep_all(cut, share, value)
        if not isinstance(value, (tuple, list)):
            return value
        own = _keep_all(cut, share, value[cut.index])
        return type(value)(own if i == cut.index else x for i, x in enumerate(value))

    def _share_of(self, value: Any) -> TokenShare | None:
        """Return the split, which an argument or output settles if nothing did before."""
        split, cut = self.split, self.cut
        if split.share is not None or split.settle is None:
            return split.share
        tensors = value if isinstance(value, (tuple, list)) else (value,)
        fitting = (
            x for x in tensors if isinstance(x, torch.Tensor) and cut.dims in (None, x.dim())
        )
        sizes = [x.shape[cut.dim] for x in fitting]
        return split.settle(sizes[0]) if sizes else None


class _OutputCut(_CutHook):
    """A forward hook that cuts what a module returns."""

    def __call__(self, module: nn.Module, args: object, output: Any) -> Any:
        return self.keep(output)


class _ArgumentCut(_CutHook):
    """A forward pre-hook that cuts an argument."""

    def __init__(self, cut: Cut, name: str, position: int, split: TokenSplit) -> None:
        super().__init__(cut, split)
        self.name = name
        self.position = position

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        name, position = self.name, self.position
        if name in kwargs:
            return args, {**kwargs, name: self.keep(kwargs[name])}
        if position < len(args):
            own = self.keep(args[position])
            return (*args[:position], own, *args[position + 1 :]), kwargs
        return args, kwargs


class _ArgumentGather(_ArgumentCut):
    """A forward pre-hook that gathers an argument."""

    def keep(self, value: Any) -> Any:
        """Return the tokens of all ranks."""
        share, dim = self.split.share, self.cut.dim
        if share is None or not isinstance(value, torch.Tensor):
            return value
        _expect(value, dim, share.length, self.name)
        rows = value if dim else value[None]
        gathered = gather_sequence(rows.flatten(2), share.lengths)
        whole = gathered.reshape(rows.shape[0], share.total, *rows.shape[2:])
        return whole if dim else whole[0]


def _keep_all(cut: Cut, share: TokenShare, value: Any) -> Any:
    """Return this rank's part of a tensor, or of each of several; all else as it is."""
    if isinstance(value, torch.Tensor):
        return _keep(cut, share, value)
    if isinstance(value, (tuple, list)):
        return type(value)(_keep_all(cut, share, x) for x in value)
    if isinstance(value, Mapping):
        return {name: _keep_all(cut, share, x) for name, x in value.items()}
    return value


def _keep(cut: Cut, share: TokenShare, x: torch.Tensor) -> torch.Tensor:
    if cut.dims is not None and x.dim() != cut.dims:
        return x
    whole = x.flatten(cut.dim) if cut.flat else x
    if whole.shape[cut.dim] == 1:
        return x
    rows = whole.shape[cut.dim]
    front, back = share.text_rows(rows, share.total, cut.with_text)
    if not cut.may_end_early:
        name = cut.argument or f"the output of {cut.module}"
        _expect(whole, cut.dim, front + share.total + back, name)
    return share.take(whole, cut.dim, front=front, back=back)


def _expect(x: torch.Tensor, dim: int, length: int, name: str) -> None:
    if x.shape[dim] != length:
        raise UsageError(
            f"{name} must have {length} tokens on axis {dim}, got {list(x.shape)}; this model "
            f"cannot be split over ranks, run it on one GPU"
        )


def _find(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the modules that a dotted name with one "*", or "-1" at the end, stands for."""
    before, star, after = path.partition("*")
    try:
        if path.endswith(".-1"):
            return [*model.get_submodule(path.removesuffix(".-1")).children()][-1:]
        found = model.get_submodule(before.rstrip("."))
        children = [*found.children()] if star else [found]
        return [child.get_submodule(after.lstrip(".")) for child in children]
    except AttributeError as error:
        raise UsageError(
            f"{type(model).__name__} must have a module {path} to be split over ranks ({error}); "
            f"run it on one GPU"
        ) from None
