"""Exchanges between the ranks of a group: heads for tokens (Ulysses), rows, and masks.

Before an exchange of a Ulysses group a rank holds all heads of its tokens, after it all tokens of
its heads. All tensors of a call travel in one message, packed once: what arrives is
[sum S, B, columns], of which q, k and v are views. In a ring of which every rank needs known rows
of the others, those travel straight to who needs them.

Heads need not divide. Query heads differ by one at most between ranks, because they are what the
time goes by; a rank gets every key head that its query heads read, so a key head may be on several.

Gradients are those of the exchange as a linear map of all ranks' tensors to all ranks' tensors.
What ranks hold copies of gets the gradient of each copy: the copies' sum is the shared gradient.

Shapes: B batch, S tokens of a rank, H heads of the layer, h heads of a rank, D channels per head;
lengths of ranks and heads of ranks may differ.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, repeat
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.distributed.groups import Group
from multimodal_gen.runtime.distributed.timing import exchanging

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPartition:
    """The heads of every rank, as half-open spans.

    Attributes:
        num_heads: query heads in all.
        num_kv_heads: key and value heads in all.
        queries: span of query heads of each rank.
        keys: span of key heads of each rank.
    """

    num_heads: int
    num_kv_heads: int
    queries: tuple[Span, ...]
    keys: tuple[Span, ...]

    def arrange_keys(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the key or value heads of a rank as its query heads read them in equal groups.

        Args:
            x: [B, S, h, D], the heads in `keys[rank]`.
            rank: whose they are.

        Returns:
            `x` where query heads of the rank divide into equal groups, one per key head; else
            one key head per query head.
        """
        read = _read_heads(self, rank)
        return x if read is None else x.index_select(2, torch.tensor(read, device=x.device))

    def in_groups(self, count: int) -> tuple["HeadPartition", ...]:
        """Return the heads of every rank in `count` runs, each as even as can be.

        Args:
            count: at most the query heads of any rank.
        """
        return _in_groups(self, count)


@lru_cache(maxsize=256)
def partition_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> HeadPartition:
    """Deal heads out to `num_ranks` ranks.

    Raises:
        UsageError: there are fewer heads than ranks.
    """
    if num_heads < num_ranks:
        raise UsageError(
            f"a layer must have a head for each of the {num_ranks} ranks of a Ulysses group, got "
            f"{num_heads} heads; use --ulysses-degree {num_heads} or less, and a ring for the rest"
        )
    group = num_heads // num_kv_heads
    queries = _runs(0, num_heads, num_ranks)
    keys = tuple((start // group, (stop - 1) // group + 1) for start, stop in queries)
    return HeadPartition(num_heads=num_heads, num_kv_heads=num_kv_heads, queries=queries, keys=keys)


@lru_cache(maxsize=256)
def _read_heads(shares: HeadPartition, rank: int) -> list[int] | None:
    """Return which of a rank's key heads its query heads read, None where in equal groups."""
    group, (first, last) = shares.num_heads // shares.num_kv_heads, shares.keys[rank]
    read = [head // group - first for head in range(*shares.queries[rank])]
    each = max(1, len(read) // max(1, last - first))
    return None if read == [i // each for i in range(len(read))] else read


@lru_cache(maxsize=256)
def _in_groups(shares: HeadPartition, count: int) -> tuple[HeadPartition, ...]:
    group = shares.num_heads // shares.num_kv_heads
    runs = [_runs(start, stop, count) for start, stop in shares.queries]
    return tuple(
        HeadPartition(
            num_heads=shares.num_heads,
            num_kv_heads=shares.num_kv_heads,
            queries=queries,
            keys=tuple((start // group, (stop - 1) // group + 1) for start, stop in queries),
        )
        for queries in zip(*runs, strict=True)
    )


def _runs(start: int, stop: int, count: int) -> tuple[Span, ...]:
    """Cut a span into `count` spans whose sizes differ by one at most."""
    size, larger = divmod(stop - start, count)
    return tuple(pairwise(start + i * size + min(i, larger) for i in range(count + 1)))


# Size, strides and offset of a tensor in flat memory, as `torch.as_strided` takes them.
_Place = tuple[tuple[int, ...], tuple[int, ...], int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExchangePlan:
    """What a rank sends and gets where heads are exchanged for tokens; made by `exchange_plan`.

    Both lie in flat memory, a block per rank of the group. A row of a block is one token of one
    sample: the heads of all tensors side by side.

    Attributes:
        lengths: tokens of each rank.
        prefix: rows in front of the tokens that all ranks hold.
        suffix: rows after the tokens that all ranks hold.
        spans: per tensor, the heads of each rank.
        adjacent: per tensor, whether the heads of ranks follow each other, each on one rank.
        row: numbers per token, with the heads of this rank.
        by_heads: numbers in each block of this rank's rows, with the heads of each rank.
        by_rows: numbers in each block of this rank's heads, with the rows of each rank.
        in_heads: per block of `by_heads` and tensor, where its [B, rows, h, D] lies.
        in_rows: the same of `by_rows`.
        joined: per tensor, where [B, prefix + sum S + suffix, h, D] with this rank's heads lies.
    """

    lengths: tuple[int, ...]
    prefix: int
    suffix: int
    spans: tuple[tuple[Span, ...], ...]
    adjacent: tuple[bool, ...]
    row: int
    by_heads: list[int]
    by_rows: list[int]
    in_heads: list[list[_Place]]
    in_rows: list[list[_Place]]
    joined: list[_Place]


def exchange_plan(
    tensors: Sequence[torch.Tensor],
    spans: Sequence[tuple[Span, ...]],
    lengths: Sequence[int],
    group: Group,
    *,
    prefix: int = 0,
    suffix: int = 0,
) -> ExchangePlan:
    """Return what this rank sends and gets; kept per kind of call.

    Args:
        tensors: [B, rows, H, D] each, before or after the exchange.
        spans: per tensor, the heads of each rank; a head may be on several.
        lengths: tokens of each rank.
        group: the ranks, in the order of their tokens.
        prefix: rows in front of the tokens that all ranks hold.
        suffix: rows after the tokens that all ranks hold.
    """
    sizes = tuple([x.shape[3] for x in tensors])
    batch = tensors[0].shape[0]
    return _plan(group.index, batch, tuple(lengths), tuple(spans), sizes, prefix, suffix)


@lru_cache(maxsize=256)
def _plan(
    rank: int,
    batch: int,
    lengths: tuple[int, ...],
    spans: tuple[tuple[Span, ...], ...],
    sizes: tuple[int, ...],
    prefix: int,
    suffix: int,
) -> ExchangePlan:
    shapes = [
        [(stop - start, size) for (start, stop), size in zip(heads, sizes, strict=True)]
        for heads in zip(*spans, strict=True)
    ]
    own, rows = shapes[rank], [prefix + length + suffix for length in lengths]
    by_heads = [rows[rank] * batch * _width(each) for each in shapes]
    by_rows = [count * batch * _width(own) for count in rows]
    starts = accumulate(by_heads, initial=0)
    in_heads = [_places(batch, rows[rank], *each) for each in zip(shapes, starts, strict=False)]
    starts = accumulate(by_rows, initial=0)
    in_rows = [_places(batch, *each) for each in zip(rows, repeat(own), starts, strict=False)]
    return ExchangePlan(
        lengths=lengths,
        prefix=prefix,
        suffix=suffix,
        spans=spans,
        adjacent=tuple(all(a[1] == b[0] for a, b in pairwise(each)) for each in spans),
        row=batch * _width(own),
        by_heads=by_heads,
        by_rows=by_rows,
        in_heads=in_heads,
        in_rows=in_rows,
        joined=_places(batch, prefix + sum(lengths) + suffix, own, 0),
    )


def _width(shapes: list[tuple[int, int]]) -> int:
    """Return the numbers in a row of tensors with (h, D) each."""
    return sum(heads * size for heads, size in shapes)


def _places(batch: int, rows: int, shapes: list[tuple[int, int]], start: int) -> list[_Place]:
    """Return where [B, rows, h, D] of each tensor lies in a block that begins at `start`."""
    width, found = _width(shapes), list[_Place]()
    for heads, size in shapes:
        found.append(((batch, rows, heads, size), (width, batch * width, size, 1), start))
        start += heads * size
    return found


class ScatterHeadsWork:
    """An exchange of [B, rows, H, D] for [B, prefix + sum S + suffix, h, D], shared rows summed.

    It carries no gradients. Kernels that are launched before `wait` run while data travel.
    """

    def __init__(self, plan: ExchangePlan, tensors: Sequence[torch.Tensor], group: Group) -> None:
        self._plan = plan
        sent = tensors[0].new_empty(sum(plan.by_heads))
        for rank, places in enumerate(plan.in_heads):
            for place, x, spans in zip(places, tensors, plan.spans, strict=True):
                _copy(sent.as_strided(*place), x[:, :, slice(*spans[rank])])
        self._message = _Message(sent, plan.by_heads, plan.by_rows, group)

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Return per tensor [B, prefix + sum S + suffix, h, D], not contiguous."""
        plan, received = self._plan, self._message.wait()
        if plan.prefix or plan.suffix:
            received = _sum_shared(plan, received)
        return tuple([received.as_strided(*place) for place in plan.joined])


class GatherHeadsWork:
    """The transpose of `ScatterHeadsWork`: [B, prefix + sum S + suffix, h, D] for [B, rows, H, D].

    Heads that are on several ranks are summed.
    """

    def __init__(self, plan: ExchangePlan, tensors: Sequence[torch.Tensor], group: Group) -> None:
        self._plan = plan
        self._message = _Message(_packed_rows(plan, tensors), plan.by_rows, plan.by_heads, group)

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Return per tensor [B, rows, H, D]."""
        plan, received = self._plan, self._message.wait()
        tensors = zip(zip(*plan.in_heads, strict=True), plan.spans, plan.adjacent, strict=True)
        return tuple([_join_heads(received, *tensor) for tensor in tensors])

    def wait_into(self, out: torch.Tensor) -> None:
        """Write the heads of the only tensor, each of which is on one rank, to [B, rows, H, D]."""
        plan, received = self._plan, self._message.wait()
        for (place,), span in zip(plan.in_heads, plan.spans[0], strict=True):
            _copy(out[:, :, slice(*span)], received.as_strided(*place))


class ExchangeRowsWork:
    """An exchange of rows of [B, S, H, D], which every rank gives to the others that need them.

    Args:
        group: who takes part.
        tensors: what rows are taken of, in one message each.
        rows: int64, the rows that leave, those for the first rank first.
        leaving: how many of them are for each rank.
        coming: how many rows each rank sends here.
    """

    def __init__(
        self,
        group: Group,
        tensors: Sequence[torch.Tensor],
        rows: torch.Tensor,
        leaving: Sequence[int],
        coming: Sequence[int],
    ) -> None:
        self._shapes = [x.shape for x in tensors]
        self._messages = []
        with exchanging(rows.device):
            for x in tensors:
                row = x.shape[0] * x.shape[2] * x.shape[3]
                sent = x.transpose(0, 1).index_select(0, rows).view(-1)
                sizes = [count * row for count in leaving]
                message = _Message(sent, sizes, [count * row for count in coming], group)
                self._messages.append(message)

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Return per tensor [B, sum coming, H, D], those of the first rank first, contiguous."""
        with exchanging(self._messages[0].received.device):
            return tuple(
                message.wait().view(-1, shape[0], *shape[2:]).transpose(0, 1).contiguous()
                for message, shape in zip(self._messages, self._shapes, strict=True)
            )


class _Message:
    """Data to and from every rank of a group, under way.

    Args:
        sent: [sum leaving].
        leaving: how many numbers of it are for each rank.
        coming: how many numbers each rank sends here.
        group: who takes part.
    """

    def __init__(
        self, sent: torch.Tensor, leaving: list[int], coming: list[int], group: Group
    ) -> None:
        self.received = sent.new_empty(sum(coming))
        self._sent = sent  # must live, and must not change, until it has left
        self._work: dist.Work | None = None
        if group.handle is None:
            self.received.copy_(sent)
            return
        self._work = dist.all_to_all_single(
            self.received, sent, coming, leaving, group=group.handle, async_op=True
        )

    def wait(self) -> torch.Tensor:
        """Return what came in, [sum coming]; on a GPU the stream waits."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self.received


def _packed_rows(plan: ExchangePlan, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [B, prefix + sum S + suffix, h, D] per tensor as the rows of each rank, flat."""
    shared = plan.prefix or plan.suffix
    if len(tensors) == 1 and not shared:
        turned = tensors[0].transpose(0, 1)
        if turned.is_contiguous():
            return turned.reshape(-1)
    sent, start = tensors[0].new_empty(sum(plan.by_rows)), plan.prefix
    for places, length in zip(plan.in_rows, plan.lengths, strict=True):
        stop, end = start + length, plan.prefix + length
        for place, x in zip(places, tensors, strict=True):
            rows = sent.as_strided(*place)
            _copy(rows[:, plan.prefix : end], x[:, start:stop])
            if shared:
                _copy(rows[:, : plan.prefix], x[:, : plan.prefix])
                _copy(rows[:, end:], x[:, x.shape[1] - plan.suffix :])
        start = stop
    return sent


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, 8 bytes at a time where rows of both are whole numbers of them.

    Strided copies move one number per thread: of 2 bytes each they use half of the memory's rate.
    """
    if target.element_size() < 8 and target.dtype is source.dtype and _in_eights(target, source):
        target, source = target.view(torch.int64), source.view(torch.int64)
    target.copy_(source)


def _in_eights(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether rows of both, of one dtype, lie where numbers of 8 bytes may, and fill them."""
    steps = (*target.stride()[:-1], *source.stride()[:-1], target.shape[-1])
    offset = math.gcd(*steps, target.storage_offset(), source.storage_offset())
    return (
        target.stride(-1) == source.stride(-1) == 1
        and offset % (8 // target.element_size()) == 0
        and target.data_ptr() % 8 == source.data_ptr() % 8 == 0
    )


def _sum_shared(plan: ExchangePlan, received: torch.Tensor) -> torch.Tensor:
    """Return what is in `plan.joined`, of blocks that each have the rows all ranks hold."""
    front, back = plan.prefix * plan.row, plan.suffix * plan.row
    pieces = [
        torch.split(block, [front, block.numel() - front - back, back])
        for block in torch.split(received, plan.by_rows)
    ]
    fronts, tokens, backs = zip(*pieces, strict=True)
    return torch.cat((_sum(fronts), *tokens, _sum(backs)))


def _join_heads(
    received: torch.Tensor, places: tuple[_Place, ...], spans: tuple[Span, ...], adjacent: bool
) -> torch.Tensor:
    """Return one tensor's heads of all ranks, [B, S, H, D]; those on several ranks are summed."""
    blocks = [received.as_strided(*place) for place in places]
    if adjacent:
        return torch.cat(blocks, dim=2)
    batch, rows, _, size = blocks[0].shape
    dtype = torch.promote_types(received.dtype, torch.float32)
    out = received.new_zeros(batch, rows, spans[-1][1], size, dtype=dtype)
    for block, (start, stop) in zip(blocks, spans, strict=True):
        out[:, :, start:stop] += block
    return out.to(received.dtype)


def _sum(blocks: tuple[torch.Tensor, ...]) -> torch.Tensor:
    precise = torch.promote_types(blocks[0].dtype, torch.float32)
    return torch.stack(blocks).sum(0, dtype=precise).to(blocks[0].dtype)


def scatter_heads(
    tensors: Sequence[torch.Tensor],
    spans: Sequence[tuple[Span, ...]],
    lengths: Sequence[int],
    group: Group,
) -> tuple[torch.Tensor, ...]:
    """Give every rank all tokens of its heads, in one message.

    Args:
        tensors: [B, S, H, D] each, of one dtype; H and D may differ between them.
        spans: per tensor, the heads of each rank; a head may be on several.
        lengths: S of each rank.
        group: the ranks, in the order of their tokens.

    Returns:
        Per tensor [B, sum S, h, D], not contiguous.
    """
    plan = exchange_plan(tensors, spans, lengths, group)
    out: tuple[torch.Tensor, ...] = _Exchange.apply(  # type: ignore[no-untyped-call]
        plan, group, ScatterHeadsWork, GatherHeadsWork, *tensors
    )
    return out


def gather_heads(
    x: torch.Tensor,
    spans: tuple[Span, ...],
    lengths: Sequence[int],
    group: Group,
    *,
    prefix: int = 0,
    suffix: int = 0,
) -> torch.Tensor:
    """Give every rank all heads of its tokens: the way back from `scatter_heads`.

    Args:
        x: [B, prefix + sum S + suffix, h, D].
        spans: the heads of each rank; each head is on one.
        lengths: S of each rank.
        group: the ranks, in the order of their tokens.
        prefix: rows in front that belong to no rank: every rank gets them.
        suffix: such rows at the end.

    Returns:
        [B, prefix + S + suffix, H, D].
    """
    plan = exchange_plan([x], [spans], lengths, group, prefix=prefix, suffix=suffix)
    out: tuple[torch.Tensor, ...] = _Exchange.apply(  # type: ignore[no-untyped-call]
        plan, group, GatherHeadsWork, ScatterHeadsWork, x
    )
    return out[0]


def all_gather_tokens(x: torch.Tensor, lengths: Sequence[int], group: Group) -> torch.Tensor:
    """Return what all ranks hold along the last dimension, e.g. a key mask [B, S].

    Args:
        x: [..., S], any dtype; carries no gradient.
        lengths: S of each rank.
        group: the ranks, in the order of their tokens.

    Returns:
        [..., sum S].
    """
    if x.requires_grad and torch.is_grad_enabled():
        raise UsageError("a mask that is split over ranks must not require grad; detach it")
    if group.handle is None:
        return x
    longest = max(lengths)
    with exchanging(x.device):
        # Backends know no bool.
        plain = x.to(torch.uint8) if x.dtype is torch.bool else x
        sent = F.pad(plain, (0, longest - x.shape[-1])).contiguous()
        received = [torch.empty_like(sent) for _ in lengths]
        dist.all_gather(received, sent, group=group.handle)
        parts = [part[..., :length] for part, length in zip(received, lengths, strict=True)]
        return torch.cat(parts, dim=-1).to(x.dtype)


def all_reduce(x: torch.Tensor, group: Group, *, largest: bool = False) -> torch.Tensor:
    """Return `x`, once it holds the sum over all ranks, or the largest of each number.

    Args:
        x: contiguous, the same shape on every rank; written to. Carries no gradient.
        group: the ranks.
        largest: whether to take the largest. What becomes of NaN is not defined then.
    """
    if group.handle is not None:
        with exchanging(x.device):
            operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            dist.all_reduce(x, operation, group=group.handle)
    return x


def all_gather_with_gradients(
    x: torch.Tensor, lengths: Sequence[int], group: Group
) -> torch.Tensor:
    """Do as `all_gather_tokens`, with the gradient of what all ranks made of it.

    The backward pass is an exchange, too, so every rank must use the result.
    """
    gathered: torch.Tensor = _AllGather.apply(lengths, group, x)  # type: ignore[no-untyped-call]
    return gathered


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lengths: Sequence[int], group: Group, x: torch.Tensor) -> torch.Tensor:
        ctx.lengths, ctx.group = list(lengths), group
        return all_gather_tokens(x.detach(), lengths, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total = grad.clone(memory_format=torch.contiguous_format)
        if ctx.group.handle is not None:
            with exchanging(grad.device):
                dist.all_reduce(total, group=ctx.group.handle)
        return None, None, torch.split(total, ctx.lengths, dim=-1)[ctx.group.index]


_Work = type[ScatterHeadsWork] | type[GatherHeadsWork]


class _Exchange(torch.autograd.Function):
    """An exchange whose gradient is exchanged by its transpose."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: ExchangePlan,
        group: Group,
        work: _Work,
        transposed: _Work,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.back = plan, group, transposed
        with exchanging(tensors[0].device):
            return work(plan, tensors, group).wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan, group, transposed = ctx.back
        with exchanging(grads[0].device):
            return None, None, None, None, *transposed(plan, grads, group).wait()
