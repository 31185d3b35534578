"""Serves layers exactly that 8 bits, or a sparse method, turn out not to serve.

Whether an output is finite is looked at in every call. In some it is held against exact attention
of a few rows, as `attention_check.py` does. Nothing waits for the device inside of a layer: what
was found is read before the next call of a denoiser, where its timestep is read too, so which
layers are served exactly does not depend on timing.
"""

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
    mask_of,
    projects,
    row_errors,
    sampled,
)
from multimodal_gen.runtime.guard_bounds import GuardBounds
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.binding import Binding
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.causal_cache import LayerCache
from multimodal_gen.runtime.layers.attention.kinds.blocks import apply_sink
from multimodal_gen.runtime.layers.attention.kinds.masks import KeyMask
from multimodal_gen.runtime.layers.attention.masks import zero_masked_rows
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.sequence_parallel.layer import (
    SequenceParallelLayer,
    tokens_are_split,
)
from multimodal_gen.runtime.managers.forward_context import current_forward_context

EVERY = 17
"""Of so many calls of a layer one is compared; of fewer, where a denoiser has fewer layers.

It is odd: where calls of two guidance branches take turns, each of them has its own.
"""

MISSED = "it missed the bound of the attention guard"
AGAIN = "the attention guard had a call that may not be finite computed again"

NO_BOUND = "no bound for sparse methods was given (sparse=B)"
NO_BOUND_OF_BITS = "no bound for backends that round to 8 bits was given (quantized=B)"
MORE = "a gate or a trained projection adds to attention"

_WIDEST = 128  # channels of a head of kernels over blocks
_BLOCK = 128  # queries, and keys, of the plan of a call that is computed again

_Key: TypeAlias = tuple[str | None, str]  # component, and name of a layer


class AttentionGuard:
    """Looks at self-attention in every call, and has layers run exactly that miss their bound.

    A layer that missed stays exact, in later generations too. Where ranks share a sequence, or
    compute a guidance branch each, a layer that missed on one of them is exact on all, from the
    same call on.

    Attributes:
        bounds: see `Args`.

    Args:
        bounds: the errors that layers may have.
        before: the guard of an earlier generation of the same layers, whose misses and turns are
            taken over.
    """

    def __init__(self, bounds: GuardBounds, before: "AttentionGuard | None" = None) -> None:
        self.bounds = bounds
        # Misses as they are of outputs that are not finite, and on the device: the error, whether
        # the output is not finite, and whether the truth is not; of all ranks of a sequence.
        self._pending: list[tuple[GuardMiss, torch.Tensor]] = []
        # What was read of them, and what layers are served by: what all ranks have found.
        self._found: dict[_Key, GuardMiss] = {}
        self._missed: dict[_Key, GuardMiss] = {}
        # How many calls of a layer could have been compared, and which layers were; then and now.
        self._turns: Counter[_Key] = Counter()
        self._compared: set[_Key] = set()
        if before is not None:
            before._read()
            self._found.update(before._found)
            self._turns.update(before._turns)
            self._compared.update(before._compared)
        self._calls = 0
        self._tested = 0
        self._only_finite: Counter[str] = Counter()  # calls by why
        self._unchecked: Counter[str] = Counter()
        # The first calls whose exact attention is not finite either.
        self._senseless: dict[_Key, GuardedCall] = {}
        self._settled: object = None  # the step in which guidance branches did so last

    def __call__(
        self,
        layer: AttentionLayer,
        serve: Callable[[AttentionCall], torch.Tensor],
        call: AttentionCall,
    ) -> torch.Tensor:
        """Serve a call of a layer, exactly where it missed before, and look at what it gives.

        Raises:
            UsageError: a CUDA graph is being captured, which would replay one decision for ever.
        """
        _refuse_capture(call.query)
        site, context = layer.site, current_forward_context()
        key = (site.component, site.name)
        if key in self._missed:
            return serve(call._replace(exact=MISSED))
        if site.role is not AttentionRole.SELF or context is None:
            return serve(call)
        call = call.autocast()  # what kernels get
        bound, ring = layer.entry_for(call.query).primary, _ring_of(layer, call)
        unchecked = _unchecked(layer, bound, call, ring)
        if unchecked is not None:
            self._unchecked.update(filter(None, [unchecked]))
            return serve(call)
        self._tested += 1
        limit = self.bounds.sparse if bound.is_sparse else self.bounds.quantized
        only_finite = ""
        if limit is None:
            only_finite = NO_BOUND if bound.is_sparse else NO_BOUND_OF_BITS
        if call.gate is not None or projects(layer, call):
            only_finite = MORE
        miss = GuardMiss(
            component=site.component,
            name=site.name,
            role=site.role,
            layer=site.layer,
            step=context.current_timestep,
            error=None,
            bound=limit,
            dense=bound.is_sparse,
        )
        if only_finite:
            self._only_finite[only_finite] += 1
        check = _Check(layer, miss, self._note, compares=not only_finite and self._turn(layer))
        # Where ranks share the tokens, it is looked at where this one has its heads of them.
        return serve(call._replace(check=check)) if ring else check.heads(serve, call)

    def _turn(self, layer: AttentionLayer) -> bool:
        """Count a call of a layer; return whether it is to be compared. Layers take turns."""
        site = layer.site
        key, count = (site.component, site.name), site.num_layers or 1
        every = min(count | 1, EVERY)
        turn = self._turns[key] % every == (site.layer or 0) * every // count % every
        self._turns[key] += 1
        if turn:
            self._calls += 1
            self._compared.add(key)
        return turn

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
        known = error.float().nan_to_num(0.0, posinf=torch.inf)
        found = torch.stack((known, 1 - finite.float(), 1 - sane.float()))
        groups = parallel_groups()
        if groups is not None:
            all_reduce(found, groups.sequence, largest=True)
        self._pending.append((miss, found))

    def settle(self) -> None:
        """Read what was found, and decide which layers run exactly from now on.

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
        for found in gathered([*self._found.values()], groups.cfg_control):
            self._missed.update({(miss.component, miss.name): miss for miss in found})

    def _read(self) -> None:
        """Read what was found of the calls since; waits for the device."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        misses, found = zip(*pending, strict=True)
        _refuse_capture(found[0])
        for miss, (error, infinite, insane) in zip(
            misses, torch.stack([x.to(found[0].device) for x in found]).tolist(), strict=True
        ):
            key = (miss.component, miss.name)
            if insane:  # exact attention would not help
                self._senseless.setdefault(key, GuardedCall.of(miss))
            elif infinite or (miss.bound is not None and error > miss.bound):
                self._found[key] = replace(miss, error=None if infinite else error)

    def report(self) -> GuardReport:
        """Return what was found so far; waits for the device, not for other ranks."""
        self._read()
        missed = {**self._found, **self._missed}
        return GuardReport(
            bounds=self.bounds,
            calls=self._calls,
            tested=self._tested,
            missed=tuple(missed.values()),
            waiting=tuple(sorted(self._turns.keys() - self._compared - missed.keys())),
            only_finite=dict(self._only_finite),
            unchecked=dict(self._unchecked),
            senseless=tuple(self._senseless.values()),
        )


class _Check:
    """Looks at what one call gives, and computes again at once what is not finite.

    Attributes:
        reason: see `SplitCheck`.
    """

    reason = AGAIN

    def __init__(
        self, layer: AttentionLayer, miss: GuardMiss, note: Callable[..., None], *, compares: bool
    ) -> None:
        self._layer = layer
        self._miss = miss
        self._note = note
        self._compares = compares
        self._finite: list[torch.Tensor] = []  # of each part of a ring

    def heads(
        self, serve: Callable[[AttentionCall], torch.Tensor], call: AttentionCall
    ) -> torch.Tensor:
        """See `SplitCheck`; so are calls whose tokens are not split."""
        layer, on_cpu = self._layer, call.query.device.type == "cpu"
        before = {bound: bound.tally() for bound in layer.bindings()} if on_cpu else {}
        out = serve(call)
        finite = _is_finite(out)
        if on_cpu and not finite:  # what it gives is dropped: it counts as what serves it again
            for bound in layer.bindings():
                bound.count_again(bound.tally() - before.get(bound, Counter()), -1)
        fixed, sane = _finite_or_again(layer, serve, call, out, finite)
        error = finite.new_zeros((), dtype=torch.float32)
        if self._compares:
            rows, truth = sampled(layer, _with_all_keys(call), out, self._miss.step)
            error, sane = row_errors(rows, truth)[1].max(), sane & truth.isfinite().all()
            if call.mask is None:  # else they may be padding; rounding may hide what they are
                sane = sane & _is_finite(call.query)
        self._note(self._miss, error, finite, sane)
        return fixed

    def part(self, attend: AttendPart, exact: AttendPart) -> AttendPart:
        """See `SplitCheck`."""
        scale = self._layer.geometry.softmax_scale

        def checked(query: torch.Tensor, part: KeyPart) -> tuple[torch.Tensor, torch.Tensor]:
            out, lse = attend(query, part)
            finite = _is_finite(out) & (lse < torch.inf).all()
            self._finite.append(finite)
            if out.device.type == "cpu":
                return (out, lse) if finite else exact(query, part)
            if not out.is_cuda or not _fits_blocks(query, part.value):
                return out, lse
            again = dense_unless(finite, query, part.key, part.value, scale=scale, keep=part.mask)
            return torch.where(finite, out, again[0]), torch.where(finite, lse, again[1])

        return checked

    def ring(self, inputs: RingInputs, lengths: Sequence[int], out: torch.Tensor) -> None:
        """See `SplitCheck`."""
        sane = _is_finite(out)
        finite = torch.stack((*self._finite, sane)).all()
        sane = sane | _are_finite(inputs.query, inputs.key, inputs.value)  # some stays as it was
        error = finite.new_zeros((), dtype=torch.float32)
        if self._compares:
            error, sound = error_in_ring(self._layer, inputs, lengths, out, self._miss.step)
            sane = sane & sound
            if inputs.call.mask is None and inputs.call.shared_mask is None:
                sane = sane & _is_finite(inputs.query)
        self._note(self._miss, error, finite, sane)


def _ring_of(layer: AttentionLayer, call: AttentionCall) -> int:
    """Return how many ranks are in the ring that a call is split over, 0 where it is not split."""
    groups = parallel_groups()
    split = isinstance(layer, SequenceParallelLayer) and call.exchange and tokens_are_split()
    return groups.ring.size if groups is not None and split else 0


def _unchecked(layer: AttentionLayer, bound: Binding, call: AttentionCall, ring: int) -> str | None:
    """Return why a call is not looked at: "" where it is exact, None where it is looked at."""
    in_pieces = call.cache is not None and _stretch(call.cache) is None
    # Masks of blocks, and what lies in pieces of a cache, are served by kernels that are exact.
    approximate = (bound.is_sparse and not call.no_grid) or (bound.rounds and not in_pieces)
    if not approximate or call.block_mask is not None:
        rounded = call.cache is not None and call.cache.cache.size.bits < 16
        return "their cache keeps keys and values in fewer than 16 bits" if rounded else ""
    if call.wants_gradient():
        return "they need gradients"
    if ring > 1 and layer.geometry.causal:
        return "they are causal, in a ring"
    return "what they see lies in pieces of a cache" if in_pieces else None


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


def _is_finite(x: torch.Tensor) -> torch.Tensor:
    """Return whether all numbers are finite, bool, 0-d; one pass, and no wait for the device."""
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    return torch.stack(x.detach().aminmax()).isfinite().all()  # NaN is the least and the most


def _are_finite(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.stack([_is_finite(x) for x in tensors]).all()


def _finite_or_again(
    layer: AttentionLayer,
    serve: Callable[[AttentionCall], torch.Tensor],
    call: AttentionCall,
    out: torch.Tensor,
    finite: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of a call, or dense attention where it is not finite; and if that is.

    Other devices than the CPU are not waited for: a GPU computes again over no block at all where
    `out` is finite. What kernels over blocks do not take stays as it was.

    Args:
        layer: whose call it is.
        serve: serves it.
        call: the call.
        out: its output, [B, Sq, H, Dv].
        finite: bool, 0-d, whether that is finite.
    """
    if out.device.type == "cpu":
        out = out if finite else serve(call._replace(exact=AGAIN))
        return out, _is_finite(out)
    found = again_unless(finite, layer, call) if out.is_cuda else None
    if found is None:
        return out, finite | _are_finite(*call[:3])
    again, sound = found
    return torch.where(finite, out, again), sound


def again_unless(
    done: torch.Tensor, layer: AttentionLayer, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return dense attention of a call, in next to no time where it is not needed.

    A branch that a gate or a trained projection weighs is left out.

    Args:
        done: bool, 0-d, on the device of the call: whether it is not.
        layer: whose call it is.
        call: the call.

    Returns:
        [B, Sq, H, D], and whether it is finite, bool, 0-d; or None, where kernels over blocks
        cannot serve the call.
    """
    seen, causal = _with_all_keys(call), layer.geometry.causal
    mask, keep, rows = mask_of(layer, seen), None, None
    if isinstance(mask, KeyMask):
        keep, rows = mask.tokens, mask.tokens if mask.covers_queries else None
    if not _fits_blocks(seen.query, seen.value) or (mask is not None and (causal or keep is None)):
        return None
    query, scale = seen.query, layer.geometry.softmax_scale
    if rows is not None:
        query = zero_masked_rows(query, rows)  # what masked ones hold has no influence
    out, lse = dense_unless(done, query, *seen[1:3], scale=scale, keep=keep, causal=causal)
    # A query or key shows in the sums; a value in all rows that see it, as the last one does.
    sound = _is_finite(out[:, -1]) & (lse < torch.inf).all()
    out = apply_sink(seen, out, lse)
    return (out if rows is None else zero_masked_rows(out, rows)), sound


def _fits_blocks(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether kernels over blocks take the heads of a call, and there is something to attend to."""
    sizes = query.shape[3] == value.shape[3] <= _WIDEST
    return sizes and query.numel() > 0 and value.numel() > 0


def dense_unless(
    done: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    keep: torch.Tensor | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dense attention and its log-sum-exp, in next to no time where it is not needed.

    Which of them it is the device decides: nothing waits for it.

    Args:
        done: bool, 0-d, on the device of the others: whether it is not.
        query: [B, Sq, H, D].
        key: [B, Sk, Hkv, D].
        value: [B, Sk, Hkv, D].
        scale: factor of the scores.
        keep: bool [B, Sk], which keys are seen; None for all. What others hold has no influence.
        causal: whether queries see no later keys, aligned to the last of both; not with `keep`.

    Returns:
        [B, Sq, H, D] in the dtype of `query`, and fp32 [B, H, Sq]; or zeros, and -inf.
    """
    rows, keys = (Blocks.regular(x.shape[1], _BLOCK) for x in (query, key))
    every = torch.arange(keys.num, dtype=torch.int32, device=query.device)
    if keep is not None:  # they come first, and the blocks end with the last of them
        order = keep.to(torch.int8).argsort(dim=1, descending=True, stable=True)
        key, value = (zero_masked_rows(x, keep) for x in (key, value))
        key, value = (x.take_along_dim(order[:, :, None, None], 1) for x in (key, value))
        starts = (every * _BLOCK).view(1, 1, -1)
        lengths = (keep.sum(1).view(-1, 1, 1) - starts).clamp(0, _BLOCK).int()
        total = key.shape[1]
        keys = Blocks.ragged(starts, lengths, total=total, size=_BLOCK)
    plan = BlockPlan(
        indices=every.expand(1, 1, rows.num, keys.num),
        counts=(~done).to(torch.int32).mul(keys.num).expand(1, 1, rows.num),
        q=rows,
        kv=keys,
        uniform=True,
        causal=causal,
    )
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
