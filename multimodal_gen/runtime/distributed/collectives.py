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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.distributed.groups import Group
from multimodal_gen.runtime.distributed.timing import exchanging

__all__ = [
    "ExchangePlan",
    "ExchangeRowsWork",
    "GatherHeadsWork",
    "HeadPartition",
    "ScatterHeadsWork",
    "Span",
    "all_gather_tokens",
    "all_gather_with_gradients",
    "gather_heads",
    "gather_heads_async",
    "partition_heads",
    "scatter_heads",
    "scatter_heads_async",
]

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
        first, stop = self.queries[rank]
        group = self.num_heads // self.num_kv_heads
        read = [head // group - self.keys[rank][0] for head in range(first, stop)]
        each = len(read) // max(1, x.shape[2])
        if read == [i // max(1, each) for i in range(len(read))]:
            return x
        return x.index_select(2, torch.tensor(read, device=x.device))

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExchangePlan:
    """One exchange.

    Attributes:
        group: who takes part.
        lengths: tokens of each rank.
        spans: per tensor, the heads of each rank.
        sizes: per tensor, D.
        prefix: rows in front of the tokens that all ranks hold.
        suffix: rows after the tokens that all ranks hold.
    """

    group: Group
    lengths: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    sizes: tuple[int, ...]
    prefix: int = 0
    suffix: int = 0

    @classmethod
    def of(
        cls,
        tensors: Sequence[torch.Tensor],
        spans: Sequence[tuple[Span, ...]],
        lengths: Sequence[int],
        group: Group,
        *,
        prefix: int = 0,
        suffix: int = 0,
    ) -> "ExchangePlan":
        """Return the plan of tensors [B, rows, H, D] each."""
        return cls(
            group=group,
            lengths=tuple(lengths),
            spans=tuple(spans),
            sizes=tuple(x.shape[3] for x in tensors),
            prefix=prefix,
            suffix=suffix,
        )

    @property
    def rows(self) -> list[int]:
        """Rows of each rank: its tokens and those all hold."""
        return [self.prefix + length + self.suffix for length in self.lengths]

    def shapes(self, rank: int) -> list[tuple[int, int]]:
        """Return (h, D) of each tensor on `rank`."""
        pairs = zip(self.spans, self.sizes, strict=True)
        return [(spans[rank][1] - spans[rank][0], size) for spans, size in pairs]

    def width(self, rank: int) -> int:
        """Return the columns of a row with the heads of `rank`."""
        return sum(heads * size for heads, size in self.shapes(rank))

    def views(self, block: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Return [rows, B, width(rank)] as one [rows, B, h, D] per tensor."""
        shapes = self.shapes(rank)
        columns = torch.split(block, [heads * size for heads, size in shapes], dim=-1)
        return [x.view(*x.shape[:-1], *shape) for x, shape in zip(columns, shapes, strict=True)]

    def rows_of_ranks(self, x: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Return the pieces of [prefix + sum S + suffix, ...] that make up each rank's rows."""
        front, *tokens, back = torch.split(x, [self.prefix, *self.lengths, self.suffix])
        return [(front, own, back) for own in tokens]


class ScatterHeadsWork:
    """An exchange of [B, rows, H, D] for [B, prefix + sum S + suffix, h, D], shared rows summed."""

    def __init__(self, plan: ExchangePlan, tensors: Sequence[torch.Tensor]) -> None:
        self._plan = plan
        like, batch, me = tensors[0], tensors[0].shape[0], plan.group.index
        self._batch = batch
        ranks = range(plan.group.size)
        with exchanging(like.device):
            sent, blocks = _buffer(
                like, batch, [(plan.rows[me], plan.width(rank)) for rank in ranks]
            )
            for rank, block in enumerate(blocks):
                for view, x, spans in zip(
                    plan.views(block, rank), tensors, plan.spans, strict=True
                ):
                    _copy(view, x[:, :, slice(*spans[rank])].transpose(0, 1))
            coming = _buffer(like, batch, [(rows, plan.width(me)) for rows in plan.rows])
            self._message = _Message(sent, blocks, *coming, plan.group)

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Return per tensor [B, prefix + sum S + suffix, h, D], not contiguous."""
        plan, me = self._plan, self._plan.group.index
        with exchanging(self._message.received.device):
            received, arrived = self._message.wait()
            whole = received.view(sum(plan.rows), self._batch, plan.width(me))
            if plan.prefix or plan.suffix:
                whole = _sum_shared(plan, arrived)
        return tuple(x.transpose(0, 1) for x in plan.views(whole, me))


class GatherHeadsWork:
    """The transpose of `ScatterHeadsWork`: [B, prefix + sum S + suffix, h, D] for [B, rows, H, D].

    Heads that are on several ranks are summed.
    """

    def __init__(self, plan: ExchangePlan, tensors: Sequence[torch.Tensor]) -> None:
        self._plan = plan
        like, batch, me = tensors[0], tensors[0].shape[0], plan.group.index
        with exchanging(like.device):
            sent, blocks = self._packed(tensors)
            shapes = [(plan.rows[me], plan.width(rank)) for rank in range(plan.group.size)]
            self._message = _Message(sent, blocks, *_buffer(like, batch, shapes), plan.group)

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Return per tensor [B, rows, H, D]."""
        with exchanging(self._message.received.device):
            blocks = self._blocks()
            return tuple(
                _join_heads([block[i] for block in blocks], spans)
                for i, spans in enumerate(self._plan.spans)
            )

    def wait_into(self, out: torch.Tensor) -> None:
        """Write the heads of the only tensor, each of which is on one rank, to [B, rows, H, D]."""
        with exchanging(out.device):
            for (block,), span in zip(self._blocks(), self._plan.spans[0], strict=True):
                _copy(out[:, :, slice(*span)], block)

    def _blocks(self) -> list[list[torch.Tensor]]:
        """Return [B, rows, h, D] of each rank and tensor."""
        _, arrived = self._message.wait()
        return [
            [x.transpose(0, 1) for x in self._plan.views(block, rank)]
            for rank, block in enumerate(arrived)
        ]

    def _packed(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return what is sent, and its blocks [rows, B, width] for each rank."""
        plan, like, me = self._plan, tensors[0], self._plan.group.index
        shapes = [(rows, plan.width(me)) for rows in plan.rows]
        turned = [x.transpose(0, 1) for x in tensors]
        if len(turned) == 1 and not (plan.prefix or plan.suffix) and turned[0].is_contiguous():
            flat = turned[0].reshape(-1)
            return flat, _blocks_of(flat, like.shape[0], shapes)
        sent, blocks = _buffer(like, like.shape[0], shapes)
        for i, x in enumerate(turned):
            for block, pieces in zip(blocks, plan.rows_of_ranks(x), strict=True):
                rows = torch.split(plan.views(block, me)[i], [len(piece) for piece in pieces])
                for view, piece in zip(rows, pieces, strict=True):
                    _copy(view, piece)
        return sent, blocks


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
                batch, width = x.shape[0], x.shape[2] * x.shape[3]
                sent = x.transpose(0, 1).index_select(0, rows).view(-1)
                blocks = _blocks_of(sent, batch, [(count, width) for count in leaving])
                received = _buffer(x, batch, [(count, width) for count in coming])
                self._messages.append(_Message(sent, blocks, *received, group))

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Return per tensor [B, sum coming, H, D], those of the first rank first, contiguous."""
        with exchanging(self._messages[0].received.device):
            return tuple(
                message.wait()[0].view(-1, shape[0], *shape[2:]).transpose(0, 1).contiguous()
                for message, shape in zip(self._messages, self._shapes, strict=True)
            )


class _Message:
    """Data to and from every rank of a group, under way."""

    def __init__(
        self,
        sent: torch.Tensor,
        blocks: list[torch.Tensor],
        received: torch.Tensor,
        arrived: list[torch.Tensor],
        group: Group,
    ) -> None:
        self.received = received
        self._sent = sent  # must live, and must not change, until it has left
        self._arrived = arrived
        self._work: Any = None
        if group.handle is None:
            received.copy_(sent)
            return
        self._work = dist.all_to_all_single(
            received,
            sent,
            [block.numel() for block in arrived],
            [block.numel() for block in blocks],
            group=group.handle,
            async_op=True,
        )

    def wait(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the flat memory that came in and its blocks; on a GPU the stream waits."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self.received, self._arrived


def _buffer(
    like: torch.Tensor, batch: int, shapes: list[tuple[int, int]]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return flat memory and the [rows, B, width] blocks it consists of."""
    flat = like.new_empty(sum(rows * batch * width for rows, width in shapes))
    return flat, _blocks_of(flat, batch, shapes)


def _blocks_of(flat: torch.Tensor, batch: int, shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    blocks = torch.split(flat, [rows * batch * width for rows, width in shapes])
    return [
        block.view(rows, batch, width) for block, (rows, width) in zip(blocks, shapes, strict=True)
    ]


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, 8 bytes at a time where both tensors lie so.

    Strided copies move one number per thread: of 2 bytes each they use half of the memory's rate.
    """
    size = target.element_size()
    if size < 8 and target.dtype is source.dtype and _in_eights(target) and _in_eights(source):
        target, source = target.view(torch.int64), source.view(torch.int64)
    target.copy_(source)


def _in_eights(x: torch.Tensor) -> bool:
    """Whether rows of `x` are whole numbers of 8 bytes that lie where such numbers may."""
    each = 8 // x.element_size()
    return (
        x.stride(-1) == 1
        and x.data_ptr() % 8 == 0
        and not any(n % each for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
    )


def _sum_shared(plan: ExchangePlan, arrived: list[torch.Tensor]) -> torch.Tensor:
    """Return [prefix + sum S + suffix, B, width] of blocks that each have the shared rows."""
    split = [
        torch.split(block, [plan.prefix, length, plan.suffix])
        for block, length in zip(arrived, plan.lengths, strict=True)
    ]
    front, tokens, back = zip(*split, strict=True)
    return torch.cat((_sum(front), *tokens, _sum(back)))


def _join_heads(blocks: list[torch.Tensor], spans: tuple[Span, ...]) -> torch.Tensor:
    """Return [B, S, H, D] of blocks [B, S, h, D]; heads in several blocks are summed."""
    if all(spans[i][1] == spans[i + 1][0] for i in range(len(spans) - 1)):
        return torch.cat(blocks, dim=2)
    batch, rows, _, size = blocks[0].shape
    dtype = torch.promote_types(blocks[0].dtype, torch.float32)
    out = blocks[0].new_zeros(batch, rows, spans[-1][1], size, dtype=dtype)
    for block, (start, stop) in zip(blocks, spans, strict=True):
        out[:, :, start:stop] += block
    return out.to(blocks[0].dtype)


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
    plan = ExchangePlan.of(tensors, spans, lengths, group)
    out: tuple[torch.Tensor, ...] = _Scatter.apply(plan, *tensors)  # type: ignore[no-untyped-call]
    return out


def scatter_heads_async(
    tensors: Sequence[torch.Tensor],
    spans: Sequence[tuple[Span, ...]],
    lengths: Sequence[int],
    group: Group,
) -> ScatterHeadsWork:
    """Do as `scatter_heads`, without gradients and without waiting for what comes.

    Kernels that are launched before `wait` run while data travel.
    """
    return ScatterHeadsWork(ExchangePlan.of(tensors, spans, lengths, group), tensors)


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
    plan = ExchangePlan.of([x], [spans], lengths, group, prefix=prefix, suffix=suffix)
    out: tuple[torch.Tensor, ...] = _Gather.apply(plan, x)  # type: ignore[no-untyped-call]
    return out[0]


def gather_heads_async(
    x: torch.Tensor,
    spans: tuple[Span, ...],
    lengths: Sequence[int],
    group: Group,
    *,
    prefix: int = 0,
    suffix: int = 0,
) -> GatherHeadsWork:
    """Do as `gather_heads`, without gradients and without waiting for what comes.

    The heads in `spans` may be some of the layer's.
    """
    plan = ExchangePlan.of([x], [spans], lengths, group, prefix=prefix, suffix=suffix)
    return GatherHeadsWork(plan, [x])


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


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: ExchangePlan, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.plan = plan
        return ScatterHeadsWork(plan, tensors).wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *GatherHeadsWork(ctx.plan, grads).wait()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: ExchangePlan, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.plan = plan
        return GatherHeadsWork(plan, tensors).wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ScatterHeadsWork(ctx.plan, grads).wait()
