"""Exchanges between the ranks of a Ulysses group: tokens against heads, and back.

Before an exchange a rank holds all heads of its tokens, after it all tokens of its heads.

Shapes: B batch, S tokens of a rank, H heads of the layer, h heads of a rank, D channels per head;
lengths of ranks and heads of ranks may differ.

Gradients are those of the exchange as a linear map of all ranks' tensors to all ranks' tensors.
What ranks hold copies of gets the gradient of each copy: the copies' sum is the shared gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.distributed.exchange import (
    ExchangePlan,
    HeadsUnderWay,
    TokensUnderWay,
)
from multimodal_gen.runtime.distributed.groups import Group
from multimodal_gen.runtime.distributed.heads import Span
from multimodal_gen.runtime.distributed.timing import exchanging

__all__ = [
    "gather_heads",
    "gather_tokens",
    "scatter_heads",
    "start_gather",
    "start_scatter",
]


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


def start_scatter(
    tensors: Sequence[torch.Tensor],
    spans: Sequence[tuple[Span, ...]],
    lengths: Sequence[int],
    group: Group,
) -> HeadsUnderWay:
    """Do as `scatter_heads`, without gradients and without waiting for what comes.

    Kernels that are launched before `arrived` run while data travel.
    """
    return HeadsUnderWay(ExchangePlan.of(tensors, spans, lengths, group), tensors)


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


def start_gather(
    x: torch.Tensor,
    spans: tuple[Span, ...],
    lengths: Sequence[int],
    group: Group,
    *,
    prefix: int = 0,
    suffix: int = 0,
) -> TokensUnderWay:
    """Do as `gather_heads`, without gradients and without waiting for what comes.

    The heads in `spans` may be some of the layer's.
    """
    plan = ExchangePlan.of([x], [spans], lengths, group, prefix=prefix, suffix=suffix)
    return TokensUnderWay(plan, [x])


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
    with exchanging(x.device):
        # Backends know no bool.
        plain = x.to(torch.uint8) if x.dtype is torch.bool else x
        sent = F.pad(plain, (0, longest - x.shape[-1])).contiguous()
        received = [torch.empty_like(sent) for _ in lengths]
        dist.all_gather(received, sent, group=group.handle)
        parts = [part[..., :length] for part, length in zip(received, lengths, strict=True)]
        return torch.cat(parts, dim=-1).to(x.dtype)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: ExchangePlan, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.plan = plan
        return HeadsUnderWay(plan, tensors).arrived()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *TokensUnderWay(ctx.plan, grads).arrived()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: ExchangePlan, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.plan = plan
        return TokensUnderWay(plan, tensors).arrived()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *HeadsUnderWay(ctx.plan, grads).arrived()
