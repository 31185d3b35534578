"""Ring attention: queries stay, keys and values travel round, parts are merged by log-sum-exp.

While a rank attends to the keys it has, the next ones are on their way into a second buffer. What
all ranks hold (text) does not travel: every rank attends to its own copy, once.

A part is an output [B, Sq, H, Dv] and the natural log-sum-exp of its scores, fp32 [B, H, Sq]; any
kernel that returns both will do. A query that sees none of the keys has output 0 and log-sum-exp
-inf. Gradients do not go through the kernel: a second round recomputes the weights from the merged
log-sum-exp, and the gradients of keys and values travel with them until they are home. Where parts
record gradients themselves, as those of sparse methods do, all keys are collected first instead.

Shapes: B batch, S tokens of a rank, H heads, D head size; q/k suffix = query/key side.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from multimodal_gen.kernels.part_merge.api import merge_two
from multimodal_gen.kernels.part_merge.reference import merge_weights
from multimodal_gen.runtime.distributed.groups import Group
from multimodal_gen.runtime.distributed.timing import attending, exchanging

# Scores that a formula holds at a time: 64 Mi, a quarter of a GiB in fp32.
_MAX_SCORES = 1 << 26

_Part = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyPart:
    """A part of the keys as some queries see it.

    Attributes:
        key: [B, Sk, Hkv, D].
        value: [B, Sk, Hkv, Dv].
        causal: query i sees key j <= i + Sk - Sq.
        mask: bool [B, Sk], False for padding; None where there is none.
        owner: whose tokens they are in a ring; None for those that all ranks hold.
    """

    key: torch.Tensor
    value: torch.Tensor
    causal: bool = False
    mask: torch.Tensor | None = None
    owner: int | None = None


class PartMerger:
    """Merges parts over different keys, in fp32 or better.

    Parts of all queries are merged in one pass each. The last of them waits until the result is
    asked for, so that it is written in its dtype at once.

    Args:
        query: [B, Sq, H, D].
        value_size: Dv.
    """

    def __init__(self, query: torch.Tensor, value_size: int) -> None:
        batch, rows, heads = query.shape[:3]
        self._like = query
        self._shape = (batch, rows, heads, value_size)
        self._precise = torch.promote_types(query.dtype, torch.float32)
        self._merged: _Part | None = None
        self._last: _Part | None = None

    def add(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge a part of the queries in `rows`; its tensors must not be written to any more."""
        lse = lse.to(self._precise)
        if out.shape[1] == self._shape[1]:
            self._merged = self._all(self._precise)
            self._last = (out, lse)
            return
        merged, seen = self._writable()
        old, new, total = merge_weights(seen[:, :, rows], lse)
        merged[:, rows].mul_(old)
        # A row without keys holds zeros in every part; its weight is 0, too.
        merged[:, rows].addcmul_(out, new)
        seen[:, :, rows] = total

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output in the dtype of the query, and the log-sum-exp."""
        out, lse = self._all(self._like.dtype) or self._nothing()
        return out.to(self._like.dtype), lse

    def _all(self, dtype: torch.dtype) -> _Part | None:
        """Return what there is so far; in `dtype` where two parts have to be merged for it."""
        if self._merged is None or self._last is None:
            return self._last or self._merged
        return merge_two(*self._merged, *self._last, dtype=dtype)

    def _writable(self) -> _Part:
        """Make what there is so far one precise part that may be written to, and return it."""
        part = self._all(self._precise)
        if part is None:
            part = self._nothing()
        elif self._merged is None:
            part = part[0].to(self._precise, copy=True), part[1].clone()
        self._merged, self._last = part, None
        return part

    def _nothing(self) -> _Part:
        """Return what is merged when there are no keys."""
        batch, rows, heads, _ = self._shape
        out = self._like.new_zeros(self._shape, dtype=self._precise)
        return out, out.new_full((batch, heads, rows), -math.inf)


def part_attention(
    query: torch.Tensor, part: KeyPart, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a part by the formula, for what kernels do not give the log-sum-exp of.

    Args:
        query: [B, Sq, H, D].
        part: the keys.
        scale: factor on q k^T.
    """
    outs, stats = [], []
    value = _masked(part.value, part.mask)
    for _, scores in _scores(query, part, scale):
        lse = scores.logsumexp(-1)
        weights = _weight(scores, lse[..., None])
        outs.append(torch.einsum("bngts,bsnd->btngd", weights, value.to(weights.dtype)))
        stats.append(lse.flatten(1, 2))
    return torch.cat(outs, dim=1).flatten(2, 3).to(query.dtype), torch.cat(stats, dim=-1)


def part_attention_backward(
    query: torch.Tensor,
    part: KeyPart,
    scale: float,
    grad: torch.Tensor,
    delta: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v that go through one part, in fp32 or better.

    Args:
        query: [B, Sq, H, D].
        part: the keys.
        scale: factor on q k^T.
        grad: gradient of the merged output, [B, Sq, H, Dv].
        delta: its product with the merged output, summed over channels, [B, H, Sq].
        lse: of the merged parts, [B, H, Sq].
    """
    dtype = lse.dtype
    key, value = (_masked(x, part.mask).to(dtype) for x in (part.key, part.value))
    groups = (key.shape[2], query.shape[2] // key.shape[2])
    grad_query = torch.empty_like(query, dtype=dtype)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    delta, lse = (torch.unflatten(x, 1, groups) for x in (delta.to(dtype), lse))
    for rows, scores in _scores(query, part, scale):
        weights = _weight(scores, lse[..., rows, None])
        upstream = torch.unflatten(grad[:, rows].to(dtype), 2, groups)
        grad_value += torch.einsum("bngts,btngd->bsnd", weights, upstream)
        grad_weights = torch.einsum("btngd,bsnd->bngts", upstream, value)
        grad_scores = weights * (grad_weights - delta[..., rows, None]) * scale
        own = torch.einsum("bngts,bsnd->btngd", grad_scores, key)
        grad_query[:, rows] = own.flatten(2, 3)
        tile = torch.unflatten(query[:, rows].to(dtype), 2, groups)
        grad_key += torch.einsum("bngts,btngd->bsnd", grad_scores, tile)
    return grad_query, grad_key, grad_value


def _scores(
    query: torch.Tensor, part: KeyPart, scale: float
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield rows of queries with their scores [B, Hkv, H / Hkv, rows, Sk], masked ones -inf."""
    batch, num_queries, heads = query.shape[:3]
    num_keys, kv_heads = part.key.shape[1:3]
    dtype = torch.promote_types(query.dtype, torch.float32)
    groups = (kv_heads, heads // kv_heads)
    key = _masked(part.key, part.mask).to(dtype)
    tile = max(1, _MAX_SCORES // max(1, batch * heads * num_keys))
    columns = torch.arange(num_keys, device=query.device)
    for start in range(0, num_queries, tile):
        rows = slice(start, min(start + tile, num_queries))
        own = torch.unflatten(query[:, rows].to(dtype), 2, groups)
        scores = torch.einsum("btngd,bsnd->bngts", own, key) * scale
        if part.causal:
            last = torch.arange(rows.start, rows.stop, device=query.device)
            seen = columns <= (last + num_keys - num_queries)[:, None]
            scores = scores.masked_fill(~seen, -math.inf)
        if part.mask is not None:
            scores = scores.masked_fill(~part.mask[:, None, None, None], -math.inf)
        yield rows, scores


def _weight(exponent: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return exp(exponent - total), 0 where nothing is seen."""
    return (exponent - total.masked_fill(total == -math.inf, 0.0)).exp()


def _masked(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return [B, S, H, D] with zeros where it is padding: a weight of 0 times NaN is NaN."""
    return x if mask is None else torch.where(mask[:, :, None, None], x, 0.0)


AttendPart = Callable[[torch.Tensor, KeyPart], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RingCall:
    """What a ring computes.

    Attributes:
        group: the ranks, in the order of their tokens.
        lengths: tokens of each rank.
        scale: factor on q k^T.
        num_queries: queries of this rank that are not on all ranks; as many as it has keys when
            None, and whenever the call is causal.
        causal: mask out keys after the query.
        prefix: rows of q in front of a rank's tokens that all ranks hold.
        suffix: such rows after them.
        mask: bool [B, sum S], False for padding among the tokens of all ranks.
        shared_keep: bool [B, P], the same for keys that all ranks hold.
    """

    group: Group
    lengths: tuple[int, ...]
    scale: float
    num_queries: int | None = None
    causal: bool = False
    prefix: int = 0
    suffix: int = 0
    mask: torch.Tensor | None = None
    shared_mask: torch.Tensor | None = None

    def mask_of(self, owner: int) -> torch.Tensor | None:
        """Return the mask of the tokens of one rank."""
        if self.mask is None:
            return None
        start = sum(self.lengths[:owner])
        return self.mask[:, start : start + self.lengths[owner]]


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shared_key: torch.Tensor | None,
    shared_value: torch.Tensor | None,
    attend: AttendPart,
    call: RingCall,
) -> torch.Tensor:
    """Return attention of this rank's queries over the keys of all ranks.

    Args:
        query: [B, prefix + S + suffix, H, D].
        key: [B, S, Hkv, D], this rank's tokens.
        value: [B, S, Hkv, Dv].
        shared_key: [B, P, Hkv, D] that all ranks hold: the keys of the prefix or the suffix, or
            ones in front that have no queries; None for none.
        shared_value: [B, P, Hkv, Dv].
        attend: returns one part; gets no empty inputs.
        call: the rest.

    Returns:
        [B, prefix + S + suffix, H, Dv] in the dtype of `query`.
    """
    out: torch.Tensor = _Ring.apply(  # type: ignore[no-untyped-call]
        attend, call, query, key, value, shared_key, shared_value
    )
    return out


def recorded_ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shared_key: torch.Tensor | None,
    shared_value: torch.Tensor | None,
    attend: AttendPart,
    call: RingCall,
) -> torch.Tensor:
    """Do as `ring_attention`, not causal, for an `attend` that records gradients.

    The keys and values of all ranks stay in memory until the backward pass has run.
    """
    assert not call.causal, "parts are of all queries"
    query, *held = _Collected.apply(call, query, key, value)  # type: ignore[no-untyped-call]
    group, (batch, rows, heads) = call.group, query.shape[:3]
    owners: list[int | None] = [(group.index - step) % group.size for step in range(group.size)]
    keys = list(zip(owners, held[::2], held[1::2], strict=True))
    if shared_key is not None and shared_value is not None:
        keys.append((None, shared_key, shared_value))
    found = [
        attend(query, part) for owner, k, v in keys for _, part in _parts(call, owner, k, v)
    ]  # fmt: skip
    if not found:  # without queries, whose ranks take part in the backward pass nevertheless
        return query.new_zeros((batch, rows, heads, value.shape[3])) + 0 * query[..., :1]
    outs, stats = zip(*found, strict=True)
    precise = torch.promote_types(query.dtype, torch.float32)
    lse = torch.stack([x.to(precise) for x in stats])
    # Rows that see no key have parts that are all zero.
    lse = lse.masked_fill((lse == -math.inf).all(0), 0.0)
    weights = lse.softmax(0).transpose(2, 3).unsqueeze(-1)
    merged = sum(weight * out.to(precise) for weight, out in zip(weights, outs, strict=True))
    return merged.to(query.dtype)


class _Collected(torch.autograd.Function):
    """The queries, then keys and values of every rank, this one's first; see `_rotate`.

    Queries are only here so that every rank's backward pass comes by.
    """

    @staticmethod
    def forward(
        ctx: Any, call: RingCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.call, ctx.like = call, (key.detach(), value.detach())
        rounds = _rotate(call, key, value, shared=(None, None))
        found = [x for _, pair in rounds for x in pair]
        return query.view_as(query), key.view_as(key), value.view_as(value), *found[2:]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: RingCall = ctx.call
        gradients = _GradientRing(call, *ctx.like)
        for step in range(call.group.size):
            owner = (call.group.index - step) % call.group.size
            key, value = (
                x.to(torch.promote_types(x.dtype, torch.float32))
                for x in grads[1 + 2 * step : 3 + 2 * step]
            )
            gradients.send(owner, (key, value))
        grad_key, grad_value = gradients.wait()
        return (
            None,
            grads[0],
            *(x.to(like.dtype) for x, like in zip((grad_key, grad_value), ctx.like, strict=True)),
        )


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        attend: AttendPart,
        call: RingCall,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        shared_key: torch.Tensor | None,
        shared_value: torch.Tensor | None,
    ) -> torch.Tensor:
        merger = PartMerger(query, value.shape[-1])

        for owner, (k, v) in _rotate(call, key, value, shared=(shared_key, shared_value)):
            for rows, part in _parts(call, owner, k, v):
                with attending(query.device):
                    merger.add(rows, *attend(query[:, rows], part))
        with attending(query.device):
            out, lse = merger.result()
        ctx.call = call
        ctx.save_for_backward(query, key, value, shared_key, shared_value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: RingCall = ctx.call
        query, key, value, shared_key, shared_value, out, lse = ctx.saved_tensors
        delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
        grad_query = torch.zeros_like(query, dtype=lse.dtype)
        shared_grads: list[torch.Tensor | None] = [None, None]
        gradients = _GradientRing(call, key, value)
        for owner, (k, v) in _rotate(call, key, value, shared=(shared_key, shared_value)):
            grads = (torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype))
            for rows, part in _parts(call, owner, k, v):
                by_part = part_attention_backward(
                    query[:, rows],
                    part,
                    call.scale,
                    grad[:, rows],
                    delta[..., rows],
                    lse[..., rows],
                )
                grad_query[:, rows] += by_part[0]
                for total, more in zip(grads, by_part[1:], strict=True):
                    total += more
            if owner is None:
                shared_grads = [x.to(key.dtype) for x in grads]
            else:
                gradients.send(owner, grads)
        grad_key, grad_value = gradients.wait()
        return (
            None,
            None,
            grad_query.to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            *shared_grads,
        )


def _parts(
    call: RingCall, owner: int | None, key: torch.Tensor, value: torch.Tensor
) -> Iterator[tuple[slice, KeyPart]]:
    """Yield rows of q with the part of a rank's keys that they see, as far as neither is empty.

    Keys that all ranks hold (`owner` None) are in front of the tokens, unless all ranks hold rows
    of queries at the end: then they are those.
    """
    me, mask = call.group.index, call.shared_mask if owner is None else call.mask_of(owner)
    count = call.lengths[me] if call.num_queries is None else call.num_queries
    start, stop = call.prefix, call.prefix + count
    before, own, after = slice(0, start), slice(start, stop), slice(stop, stop + call.suffix)
    if not call.causal:
        seen = [(slice(0, after.stop), False)]
    elif owner is None:
        seen = [(after, True)] if call.suffix else [(before, True), (own, False)]
    elif owner < me:
        seen = [(slice(start, after.stop), False)]
    else:
        seen = [(own, True), (after, False)] if owner == me else [(after, False)]
    for rows, causal in seen:
        if rows.stop > rows.start and key.shape[1]:
            yield rows, KeyPart(key=key, value=value, causal=causal, mask=mask, owner=owner)


def _rotate(
    call: RingCall,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    shared: tuple[torch.Tensor | None, torch.Tensor | None],
) -> Iterator[tuple[int | None, tuple[torch.Tensor, torch.Tensor]]]:
    """Yield (owner, (k, v)) of what all ranks hold, then of every rank, this one first.

    The next keys and values are under way while the caller works on the ones it was given.
    """
    group, here = call.group, (key, value)
    for step in range(group.size):
        owner = (group.index - step) % group.size
        transfer = None
        if step + 1 < group.size:
            coming = call.lengths[(owner - 1) % group.size]
            transfer = Transfer(group, here, [_shape(x, coming) for x in (key, value)])
        if step == 0 and shared[0] is not None and shared[1] is not None:
            yield None, (shared[0], shared[1])
        yield owner, here
        if transfer is not None:
            here = transfer.wait()


class _GradientRing:
    """Takes the gradients of keys and values along until they are back where the tokens live."""

    def __init__(self, call: RingCall, key: torch.Tensor, value: torch.Tensor) -> None:
        self._call = call
        self._like = (key, value)
        self._transfer: Transfer | None = None

    def send(self, owner: int, grads: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Add the gradients of a rank's tokens to what came with them, and send them on."""
        if self._transfer is not None:
            before = self._transfer.wait()
            grads = (grads[0] + before[0], grads[1] + before[1])
        length = self._call.lengths[(owner - 1) % self._call.group.size]
        coming = [_shape(x, length) for x in self._like]
        self._transfer = Transfer(self._call.group, grads, coming)

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what came last; after a whole round that is this rank's."""
        assert self._transfer is not None, "every rank sends to the next"
        return self._transfer.wait()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RingInputs:
    """What a rank holds of a sequence whose keys and values travel round a ring.

    Attributes:
        call: how the tokens are split, and the masks of all of them.
        query: [B, prefix + S + suffix, H, D].
        key: [B, S, Hkv, D].
        value: [B, S, Hkv, D].
        shared_key: keys that all ranks hold, [B, P, Hkv, D], or None.
        shared_value: their values.
        gate: weight of a coarse branch, [B, S, H, D], or None.
        first_head: index of the first head of `query` among the layer's heads.
        projection: the layer's trained projection, or None.
    """

    call: RingCall
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    shared_key: torch.Tensor | None
    shared_value: torch.Tensor | None
    gate: torch.Tensor | None = None
    first_head: int = 0
    projection: torch.nn.Linear | None = None

    def to(self, dtype: torch.dtype) -> "RingInputs":
        """Return the same inputs in another dtype."""
        names = ("query", "key", "value", "shared_key", "shared_value", "gate")
        held = {name: getattr(self, name) for name in names}
        return replace(self, **{name: x.to(dtype) for name, x in held.items() if x is not None})


class Transfer:
    """Tensors that go to the next rank of a ring while ones from the previous rank come in.

    On a GPU they travel on a stream of their own, which starts when what is sent has been computed
    and ends before what `wait` is followed by. Kernels launched between the two overlap it.
    """

    def __init__(
        self, group: Group, tensors: tuple[torch.Tensor, torch.Tensor], coming: list[torch.Size]
    ) -> None:
        after = group.ranks[(group.index + 1) % group.size]
        before = group.ranks[group.index - 1]
        self._works: list[dist.Work] = []
        with exchanging(tensors[0].device):
            # They must live, and must not change, until they have left.
            self._sent = self._received = [x.contiguous() for x in tensors]
            if group.size == 1:
                return
            self._received = [x.new_empty(s) for x, s in zip(tensors, coming, strict=True)]
            operations = [
                dist.P2POp(dist.isend, x, after, group.handle) for x in self._sent if x.numel()
            ]
            operations += [
                dist.P2POp(dist.irecv, x, before, group.handle) for x in self._received if x.numel()
            ]
            if operations:
                self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what came in."""
        with exchanging(self._received[0].device):
            for work in self._works:
                work.wait()
        key, value = self._received
        return key, value


def _shape(x: torch.Tensor, length: int) -> torch.Size:
    """Return the shape of [B, S, H, D] with another S."""
    return torch.Size((x.shape[0], length, *x.shape[2:]))
