"""Ring attention: queries stay, keys and values travel round, parts are merged by log-sum-exp.

While a rank attends to the keys it has, the next ones are on their way into a second buffer. What
all ranks hold (text) does not travel: every rank attends to its own copy, once.

Any kernel that returns the natural log-sum-exp will do. Gradients do not go through the kernel: a
second round recomputes the weights from the merged log-sum-exp, and the gradients of keys and
values travel with them until they are home.

Shapes: B batch, S tokens of a rank, H heads, D head size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from multimodal_gen.runtime.distributed.groups import Group
from multimodal_gen.runtime.distributed.partial import KeyPart, Merger, part_gradients
from multimodal_gen.runtime.distributed.timing import attending, exchanging

__all__ = ["AttendPart", "RingCall", "Transfer", "ring_attention"]

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
        keep: bool [B, sum S], False for padding among the tokens of all ranks.
        shared_keep: bool [B, P], the same for keys that all ranks hold.
    """

    group: Group
    lengths: tuple[int, ...]
    scale: float
    num_queries: int | None = None
    causal: bool = False
    prefix: int = 0
    suffix: int = 0
    keep: torch.Tensor | None = None
    shared_keep: torch.Tensor | None = None

    def keep_of(self, owner: int) -> torch.Tensor | None:
        """Return the mask of the tokens of one rank."""
        if self.keep is None:
            return None
        start = sum(self.lengths[:owner])
        return self.keep[:, start : start + self.lengths[owner]]

    def _rows(self) -> tuple[slice, slice]:
        """Return which rows of q are this rank's tokens, and which come after them."""
        count = self.lengths[self.group.index] if self.num_queries is None else self.num_queries
        own = slice(self.prefix, self.prefix + count)
        return own, slice(own.stop, own.stop + self.suffix)

    def rows_of(self, owner: int) -> Iterator[tuple[slice, bool]]:
        """Yield (rows of q, causal) that see the keys of a rank."""
        own, after = self._rows()
        if not self.causal:
            yield slice(0, after.stop), False
        elif owner < self.group.index:
            yield slice(own.start, after.stop), False
        else:
            if owner == self.group.index:
                yield own, True
            yield after, False

    def rows_of_shared(self) -> Iterator[tuple[slice, bool]]:
        """Yield (rows of q, causal) that see the keys all ranks hold.

        They are in front of the tokens, unless there are rows of queries that all ranks hold at
        the end: then they are those.
        """
        own, after = self._rows()
        if not self.causal:
            yield slice(0, after.stop), False
        elif self.suffix:
            yield after, True
        else:
            yield slice(0, own.start), True
            yield own, False


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
        merger = Merger(query, value.shape[-1])

        for owner, (k, v) in _travel(call, key, value, shared=(shared_key, shared_value)):
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
        home = _Home(call, key, value)
        for owner, (k, v) in _travel(call, key, value, shared=(shared_key, shared_value)):
            grads = [torch.zeros_like(x, dtype=lse.dtype) for x in (k, v)]
            for rows, part in _parts(call, owner, k, v):
                by_part = part_gradients(
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
                home.send(owner, grads)
        grad_key, grad_value = home.arrived()
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
    """Yield the parts that are not empty; `owner` None is what all ranks hold."""
    keep = call.shared_keep if owner is None else call.keep_of(owner)
    for rows, causal in call.rows_of_shared() if owner is None else call.rows_of(owner):
        if rows.stop > rows.start and key.shape[1]:
            yield rows, KeyPart(key=key, value=value, causal=causal, keep=keep, owner=owner)


def _travel(
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
        under_way = None
        if step + 1 < group.size:
            coming = call.lengths[(owner - 1) % group.size]
            under_way = Transfer(group, here, [_shape(x, coming) for x in (key, value)])
        if step == 0 and shared[0] is not None and shared[1] is not None:
            yield None, (shared[0], shared[1])
        yield owner, here
        if under_way is not None:
            here = under_way.wait()


class _Home:
    """Takes the gradients of keys and values along until they are back where the tokens live."""

    def __init__(self, call: RingCall, key: torch.Tensor, value: torch.Tensor) -> None:
        self._call = call
        self._like = (key, value)
        self._under_way: Transfer | None = None
        self._arrived: tuple[torch.Tensor, torch.Tensor] | None = None

    def send(self, owner: int, grads: list[torch.Tensor]) -> None:
        """Add the gradients of a rank's tokens to what came with them, and send them on."""
        group = self._call.group
        total = (grads[0], grads[1])
        if self._under_way is not None:
            before = self.arrived()
            total = (total[0] + before[0], total[1] + before[1])
        if group.size == 1:
            self._arrived = total
            return
        length = self._call.lengths[(owner - 1) % group.size]
        self._under_way = Transfer(group, total, [_shape(x, length) for x in self._like])

    def arrived(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what came last; after a whole round that is this rank's."""
        if self._under_way is not None:
            self._arrived = self._under_way.wait()
            self._under_way = None
        assert self._arrived is not None
        return self._arrived


class Transfer:
    """Tensors that go to the next rank of a ring while ones from the previous rank come in.

    On a GPU they travel on a stream of their own, which starts when what is sent has been computed
    and ends before what `wait` is followed by. Kernels launched between the two run beside it.
    """

    def __init__(
        self, group: Group, tensors: tuple[torch.Tensor, torch.Tensor], coming: list[torch.Size]
    ) -> None:
        after = group.ranks[(group.index + 1) % group.size]
        before = group.ranks[group.index - 1]
        with exchanging(tensors[0].device):
            # They must live, and must not change, until they have left.
            self._sent = [x.contiguous() for x in tensors]
            self._received = [x.new_empty(s) for x, s in zip(tensors, coming, strict=True)]
            operations = [
                dist.P2POp(dist.isend, x, after, group.handle) for x in self._sent if x.numel()
            ]
            operations += [
                dist.P2POp(dist.irecv, x, before, group.handle) for x in self._received if x.numel()
            ]
            self._works = dist.batch_isend_irecv(operations) if operations else []

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
