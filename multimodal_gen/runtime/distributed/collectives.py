"""Exchanges between the ranks of a Ulysses group: tokens against heads, and back.

Before an exchange a rank holds all heads of its tokens, after it all tokens of its heads. All
tensors of a call travel in one message, packed once and read in place: what arrives is
[sum S, B, columns], of which q, k and v are views.

Shapes: B batch, S tokens of a rank, H heads of the layer, h heads of a rank, D channels per head;
lengths of ranks and heads of ranks may differ.

Gradients are those of the exchange as a linear map of all ranks' tensors to all ranks' tensors.
What ranks hold copies of gets the gradient of each copy: the copies' sum is the shared gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.distributed.groups import Group
from multimodal_gen.runtime.distributed.heads import Span

__all__ = ["gather_heads", "gather_tokens", "scatter_heads"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
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
    sizes = tuple(x.shape[3] for x in tensors)
    plan = _Plan(group=group, lengths=tuple(lengths), spans=tuple(spans), sizes=sizes)
    out: tuple[torch.Tensor, ...] = _Scatter.apply(plan, *tensors)  # type: ignore[no-untyped-call]
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
    plan = _Plan(
        group=group,
        lengths=tuple(lengths),
        spans=(spans,),
        sizes=(x.shape[3],),
        prefix=prefix,
        suffix=suffix,
    )
    out: tuple[torch.Tensor, ...] = _Gather.apply(plan, x)  # type: ignore[no-untyped-call]
    return out[0]


def gather_tokens(x: torch.Tensor, lengths: Sequence[int], group: Group) -> torch.Tensor:
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
    # Backends know no bool.
    plain = x.to(torch.uint8) if x.dtype is torch.bool else x
    sent = F.pad(plain, (0, longest - x.shape[-1])).contiguous()
    received = [torch.empty_like(sent) for _ in lengths]
    dist.all_gather(received, sent, group=group.handle)
    parts = [part[..., :length] for part, length in zip(received, lengths, strict=True)]
    return torch.cat(parts, dim=-1).to(x.dtype)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.plan = plan
        return _tokens_of_heads(plan, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *_heads_of_tokens(ctx.plan, grads)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.plan = plan
        return _heads_of_tokens(plan, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *_tokens_of_heads(ctx.plan, grads)


def _tokens_of_heads(plan: _Plan, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Exchange [B, rows, H, D] for [B, prefix + sum S + suffix, h, D], shared rows summed."""
    like, batch, me = tensors[0], tensors[0].shape[0], plan.group.index
    ranks = range(plan.group.size)
    sent, blocks = _buffer(like, batch, [(plan.rows[me], plan.width(rank)) for rank in ranks])
    for rank, block in enumerate(blocks):
        for view, x, spans in zip(plan.views(block, rank), tensors, plan.spans, strict=True):
            view.copy_(x[:, :, slice(*spans[rank])].transpose(0, 1))
    received, arrived = _buffer(like, batch, [(rows, plan.width(me)) for rows in plan.rows])
    _exchange(received, arrived, sent, blocks, plan.group)
    whole = received.view(sum(plan.rows), batch, plan.width(me))
    if plan.prefix or plan.suffix:
        whole = _sum_shared(plan, arrived)
    return tuple(x.transpose(0, 1) for x in plan.views(whole, me))


def _heads_of_tokens(plan: _Plan, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Exchange [B, prefix + sum S + suffix, h, D] for [B, rows, H, D]: the transpose of the above.

    Heads that are on several ranks are summed.
    """
    like, batch, me = tensors[0], tensors[0].shape[0], plan.group.index
    ranks = range(plan.group.size)
    sent, blocks = _buffer(like, batch, [(rows, plan.width(me)) for rows in plan.rows])
    for i, x in enumerate(tensors):
        for block, pieces in zip(blocks, plan.rows_of_ranks(x.transpose(0, 1)), strict=True):
            rows = torch.split(plan.views(block, me)[i], [len(piece) for piece in pieces])
            for view, piece in zip(rows, pieces, strict=True):
                view.copy_(piece)
    received, arrived = _buffer(like, batch, [(plan.rows[me], plan.width(rank)) for rank in ranks])
    _exchange(received, arrived, sent, blocks, plan.group)
    views = [plan.views(block, rank) for rank, block in enumerate(arrived)]
    return tuple(
        _join_heads([view[i].transpose(0, 1) for view in views], spans)
        for i, spans in enumerate(plan.spans)
    )


def _buffer(
    like: torch.Tensor, batch: int, shapes: list[tuple[int, int]]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return flat memory and the [rows, B, width] blocks it consists of."""
    sizes = [rows * batch * width for rows, width in shapes]
    flat = like.new_empty(sum(sizes))
    blocks = torch.split(flat, sizes)
    return flat, [
        block.view(rows, batch, width) for block, (rows, width) in zip(blocks, shapes, strict=True)
    ]


def _exchange(
    received: torch.Tensor,
    arrived: list[torch.Tensor],
    sent: torch.Tensor,
    blocks: list[torch.Tensor],
    group: Group,
) -> None:
    if group.handle is None:
        received.copy_(sent)
        return
    dist.all_to_all_single(
        received,
        sent,
        [block.numel() for block in arrived],
        [block.numel() for block in blocks],
        group=group.handle,
    )


def _sum_shared(plan: _Plan, arrived: list[torch.Tensor]) -> torch.Tensor:
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
