"""Serves layers exactly that 8 bits, or a sparse method, turn out not to serve.

What ran is held against exact attention of a few rows, as `attention_check.py` does. Nothing waits
for the device inside of a layer: errors are read before the next call of a denoiser, where its
timestep is read too, so which layers are served exactly does not depend on timing.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.runtime.attention_report import GuardedCall, GuardMiss, GuardReport
from multimodal_gen.runtime.distributed.collectives import all_reduce
from multimodal_gen.runtime.distributed.groups import gathered, parallel_groups
from multimodal_gen.runtime.distributed.ring import AttendPart, KeyPart, RingInputs
from multimodal_gen.runtime.generator.attention_check import (
    error_in_ring,
    row_errors,
    sampled,
    step_of_turn,
)
from multimodal_gen.runtime.guard_bounds import GuardBounds
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.binding import Binding
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.causal_cache import LayerCache
from multimodal_gen.runtime.layers.attention.request import LayerSite
from multimodal_gen.runtime.layers.attention.sequence_parallel.layer import (
    SequenceParallelLayer,
    tokens_are_split,
)
from multimodal_gen.runtime.managers.forward_context import current_forward_context

EVERY = 8
"""In so many steps, every layer is checked once."""

MISSED = "it missed the bound of the attention guard"
AGAIN = "the attention guard had a call that may not be finite computed again"

_WIDEST = 128  # channels of a head of kernels over blocks
_BLOCK = 128  # queries, and keys, of the plan of a call that is computed again

_Key: TypeAlias = tuple[str | None, str]  # component, and name of a layer


class AttentionGuard:
    """Checks self-attention in every step, the layers in turn, and has those that miss run exactly.

    A layer that missed stays exact, in later generations too. Where ranks share a sequence, or
    compute a guidance branch each, a layer that missed on one of them is exact on all, from the
    same call on. Some calls are not checked, which the report tells with the reason; of those whose
    output is more than attention, by a gate or a trained projection, only whether it is finite.

    Args:
        bounds: the errors that layers may have.
    """

    def __init__(self, bounds: GuardBounds) -> None:
        self._bounds = bounds
        # Misses as they are of outputs that are not finite, and on the device: the error, whether
        # the output is not finite, and whether the truth is not; of all ranks of a sequence.
        self._pending: list[tuple[GuardMiss, torch.Tensor]] = []
        # What was read of them, and what layers are served by: what all ranks have found.
        self._found: dict[_Key, GuardMiss] = {}
        self._missed: dict[_Key, GuardMiss] = {}
        self._calls = 0
        self._unchecked: Counter[str] = Counter()  # calls by why
        # The first calls whose exact attention is not finite either.
        self._senseless: dict[_Key, GuardedCall] = {}
        # By layer: the step that was checked last, and shapes of its calls that were.
        self._checked: dict[_Key, tuple[object, set[tuple[int, int]]]] = {}
        self._settled: object = None  # the step in which guidance branches did so last

    def __call__(
        self,
        layer: AttentionLayer,
        serve: Callable[[AttentionCall], torch.Tensor],
        call: AttentionCall,
    ) -> torch.Tensor:
        """Serve a call of a layer, exactly where it missed before, and check it on its turn.

        Raises:
            UsageError: a CUDA graph is being captured, which would replay one decision for ever.
        """
        _refuse_capture(call.query)
        site = layer.site
        if (site.component, site.name) in self._missed:
            return serve(call._replace(exact=MISSED))
        ring = _ring_of(layer, call)
        step = self._step(site, call, ring)
        if step is None:
            return serve(call)
        query = (call.autocast() if call.autocasts() else call).query
        bound = layer.entry_for(query).primary
        if not _is_approximate(bound, call):
            return serve(call)
        unchecked = _unchecked(layer, call, ring)
        if unchecked:
            self._unchecked[unchecked] += 1
            return serve(call)
        with torch.no_grad():
            check = _Check(layer, self._miss(site, bound, step), self._note)
            # Where ranks share the tokens, it is checked where this one has its heads of them.
            return serve(call._replace(check=check)) if ring else check.heads(serve, call)

    def _step(self, site: LayerSite, call: AttentionCall, ring: int) -> int | None:
        """Return the running step if a call is to be checked at it, or None."""
        step = step_of_turn(site, -(-(site.num_layers or 1) // EVERY))
        context = current_forward_context()
        if step is None or context is None:
            return None
        now = (context.request_id, step)
        key, shape = (site.component, site.name), (call.query.shape[1], call.key.shape[1])
        if ring:  # what is the same on all ranks, none of which may leave a check out
            shape = (sum(call.seq_lens or ()) or 1, sum(call.replicated))
        last, shapes = self._checked.get(key, (None, set()))
        if last != now:
            shapes = set()
            self._checked[key] = (now, shapes)
        if shape in shapes or not (ring or min(shape)):
            return None
        shapes.add(shape)
        return step

    def _miss(self, site: LayerSite, bound: Binding, step: int) -> GuardMiss:
        """Return what a call is, should it turn out not to be finite."""
        return GuardMiss(
            component=site.component,
            name=site.name,
            role=site.role,
            layer=site.layer,
            step=step,
            error=None,
            bound=self._bounds.sparse if bound.is_sparse else self._bounds.quantized,
            dense=bound.is_sparse,
        )

    def _note(
        self, miss: GuardMiss, error: torch.Tensor, finite: torch.Tensor, sane: torch.Tensor
    ) -> None:
        """Keep what was found of a call, of all ranks of its sequence.

        Args:
            miss: what it is, should it not be finite.
            error: relative L2 error of the worst head; NaN where something is not finite.
            finite: whether the output is finite.
            sane: whether the truth is.
        """
        self._calls += 1
        known = error.float().nan_to_num(0.0, posinf=torch.inf)
        found = torch.stack((known, 1 - finite.float(), 1 - sane.float()))
        groups = parallel_groups()
        if groups is not None:
            all_reduce(found, groups.sequence, largest=True)
        self._pending.append((miss, found))

    def settle(self) -> None:
        """Read the errors that were found, and decide which layers run exactly from now on.

        Every rank calls it before every call of its denoisers, with its context. Ranks that compute
        different guidance branches tell each other what they found once in a step.

        Raises:
            UsageError: a CUDA graph is being captured.
        """
        groups, context = parallel_groups(), current_forward_context()
        if groups is None or groups.cfg.size == 1:
            self._read()
            self._missed.update(self._found)
            return
        now = None if context is None else (context.request_id, context.current_timestep)
        if now is None or now == self._settled:
            return
        self._settled = now
        self._read()
        branches = gathered([*self._found.values()], groups.cfg_control)
        for miss in sorted((miss for found in branches for miss in found), key=_order):
            self._missed[miss.component, miss.name] = miss

    def _read(self) -> None:
        """Read the errors of the calls that were checked since; waits for the device."""
        pending, self._pending = self._pending, []
        for miss, found in pending:
            _refuse_capture(found)
            error, infinite, insane = found.tolist()
            within = miss.bound is None or error <= miss.bound
            key = (miss.component, miss.name)
            if insane:  # exact attention would not help
                self._senseless.setdefault(key, GuardedCall.of(miss))
                continue
            if (not infinite and within) or key in self._found or key in self._missed:
                continue
            self._found[key] = replace(miss, error=None if infinite else error)

    def report(self) -> GuardReport:
        """Return what was found so far; waits for the device, not for other ranks."""
        self._read()
        return GuardReport(
            quantized=self._bounds.quantized,
            sparse=self._bounds.sparse,
            calls=self._calls,
            missed=tuple({**self._found, **self._missed}.values()),
            unchecked=tuple(self._unchecked.items()),
            senseless=tuple(self._senseless.values()),
        )


class _Check:
    """Looks at what one call gives, and computes again at once what is not finite.

    Attributes:
        reason: see `SplitCheck`.
    """

    reason = AGAIN

    def __init__(self, layer: AttentionLayer, miss: GuardMiss, note: Callable[..., None]) -> None:
        self._layer = layer
        self._miss = miss
        self._note = note
        self._finite: list[torch.Tensor] = []  # of each part of a ring

    def heads(
        self, serve: Callable[[AttentionCall], torch.Tensor], call: AttentionCall
    ) -> torch.Tensor:
        """See `SplitCheck`; so are calls whose tokens are not split."""
        seen = call.autocast() if call.autocasts() else call
        out = serve(call)
        finite = out.isfinite().all()
        error, sane = finite.new_zeros((), dtype=torch.float32), torch.ones_like(finite)
        if self._is_attention(seen):
            rows, truth = sampled(self._layer, _with_all_keys(seen), out, self._miss.step)
            error, sane = row_errors(rows, truth)[1].max(), truth.isfinite().all()
        if seen.mask is None:  # under one, queries may be padding; rounding may hide what they are
            sane = sane & seen.query.isfinite().all()
        self._note(self._miss, error, finite, sane)
        return _finite_or_again(self._layer, serve, call, seen, out, finite)

    def part(self, attend: AttendPart, exact: AttendPart) -> AttendPart:
        """See `SplitCheck`."""
        scale = self._layer.geometry.softmax_scale

        def checked(query: torch.Tensor, part: KeyPart) -> tuple[torch.Tensor, torch.Tensor]:
            out, lse = attend(query, part)
            finite = out.isfinite().all() & (lse < torch.inf).all()
            self._finite.append(finite)
            if out.device.type == "cpu":
                return (out, lse) if finite else exact(query, part)
            plain = out.device.type == "cuda" and part.mask is None and not part.causal
            if plain and query.shape[3] == part.value.shape[3] <= _WIDEST:
                again = dense_unless(finite, query, part.key, part.value, scale=scale)
            else:
                again = exact(query, part)
            return torch.where(finite, out, again[0]), torch.where(finite, lse, again[1])

        return checked

    def ring(self, inputs: RingInputs, lengths: Sequence[int], out: torch.Tensor) -> None:
        """See `SplitCheck`."""
        finite = torch.stack((*self._finite, out.isfinite().all())).all()
        tensors = (inputs.query, inputs.key, inputs.value)
        call = AttentionCall(*tensors, gate=inputs.gate, projection=inputs.projection)
        error, sane = finite.new_zeros((), dtype=torch.float32), torch.ones_like(finite)
        if self._is_attention(call):
            error, sane = error_in_ring(self._layer, inputs, lengths, out, self._miss.step)
        if inputs.call.mask is None and inputs.call.shared_mask is None:
            sane = sane & inputs.query.isfinite().all()
        self._note(self._miss, error, finite, sane)

    def _is_attention(self, call: AttentionCall) -> bool:
        """Whether the output of a call is attention and nothing else."""
        bound = self._layer.entry_for(call.query).primary
        projects = call.projection is not None and "projection" in bound.impl.takes
        return call.gate is None and not projects


def _ring_of(layer: AttentionLayer, call: AttentionCall) -> int:
    """Return how many ranks are in the ring that a call is split over, 0 where it is not split."""
    groups = parallel_groups()
    split = isinstance(layer, SequenceParallelLayer) and call.exchange and tokens_are_split()
    return groups.ring.size if groups is not None and split else 0


def _is_approximate(bound: Binding, call: AttentionCall) -> bool:
    """Whether what serves a call rounds to less than 16 bits, or leaves pairs out."""
    if not (bound.rounds or (bound.is_sparse and not call.no_grid)):
        return False
    # Masks of blocks, and what lies in pieces of a cache, are served by kernels that are exact.
    in_pieces = call.cache is not None and _stretch(call.cache) is None
    return call.block_mask is None and (bound.is_sparse or not in_pieces)


def _unchecked(layer: AttentionLayer, call: AttentionCall, ring: int) -> str:
    """Return why a call is not checked that could be approximate; "" where it is."""
    if call.wants_gradient():
        return "they need gradients"
    if ring > 1 and layer.geometry.causal:
        return "they are causal, in a ring"
    if call.cache is not None and _stretch(call.cache) is None:
        return "what they see lies in pieces of a cache"
    return ""


def _stretch(cache: LayerCache) -> tuple[int, int] | None:
    """Return which rows of a cache the running chunk sees; None where they are not in one piece."""
    seen = cache.visible()
    return None if seen.codes is not None else seen.stretch


def _with_all_keys(call: AttentionCall) -> AttentionCall:
    """Return a call with the keys and values that it sees, which were written to its cache."""
    stretch = None if call.cache is None else _stretch(call.cache)
    if call.cache is None or stretch is None:
        return call
    seen = call.cache.visible()
    key, value = (x.narrow(1, *stretch) for x in (seen.keys, seen.values))
    return call._replace(key=key, value=value, cache=None)


def _order(miss: GuardMiss) -> tuple[int, float]:
    """Return what misses are sorted by: the worst of a step last."""
    return miss.step, math.inf if miss.error is None else miss.error


def _finite_or_again(
    layer: AttentionLayer,
    serve: Callable[[AttentionCall], torch.Tensor],
    call: AttentionCall,
    seen: AttentionCall,
    out: torch.Tensor,
    finite: torch.Tensor,
) -> torch.Tensor:
    """Return the output of a call, or what dense attention gives where it is not finite.

    A GPU is not waited for: there a plain call is computed again over no block at all where `out`
    is finite, which takes next to nothing, and other calls are computed again in any case.

    Args:
        layer: whose call it is.
        serve: serves it.
        call: the call.
        seen: the call in the dtype that kernels get.
        out: its output, [B, Sq, H, Dv].
        finite: bool, 0-d, whether that is finite.
    """
    if out.device.type == "cpu":
        return out if finite else serve(call._replace(exact=AGAIN))
    if out.device.type != "cuda" or not _is_plain(layer, seen):
        return torch.where(finite, out, serve(call._replace(exact=AGAIN)))
    scale = layer.geometry.softmax_scale
    return torch.where(finite, out, dense_unless(finite, *seen[:3], scale=scale)[0])


def _is_plain(layer: AttentionLayer, call: AttentionCall) -> bool:
    """Whether kernels over blocks serve a call as it is."""
    if layer.geometry.causal or call.mask is not None or any(call.replicated) or call.is_extended():
        return False
    if call.gate is not None or call.projection is not None:
        return False
    return call.query.shape[3] == call.value.shape[3] <= _WIDEST


def dense_unless(
    done: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dense attention and its log-sum-exp, in next to no time where it is not needed.

    Which of them it is the device decides: nothing waits for it.

    Args:
        done: bool, 0-d, on the device of the others: whether it is not.
        query: [B, Sq, H, D].
        key: [B, Sk, Hkv, D].
        value: [B, Sk, Hkv, D].
        scale: factor of the scores.

    Returns:
        [B, Sq, H, D] in the dtype of `query`, and fp32 [B, H, Sq]; or zeros, and -inf.
    """
    rows, keys = (Blocks.regular(x.shape[1], _BLOCK) for x in (query, key))
    every = torch.arange(keys.num, dtype=torch.int32, device=query.device)
    plan = BlockPlan(
        indices=every.expand(1, 1, rows.num, keys.num),
        counts=(~done).to(torch.int32).mul(keys.num).expand(1, 1, rows.num),
        q=rows,
        kv=keys,
        uniform=True,
    )
    with torch.autocast(query.device.type, enabled=False):
        found = block_sparse_attention(query, key, value, plan, scale=scale, return_lse=True)
    assert isinstance(found, tuple), "the lse was asked for"
    return found


def _refuse_capture(x: torch.Tensor) -> None:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UsageError(
            "attention_guard (--attention-guard) must be left out while a CUDA graph is captured, "
            "which would replay what the guard decided in one step for ever; leave it out, or run "
            "without the graph"
        )
