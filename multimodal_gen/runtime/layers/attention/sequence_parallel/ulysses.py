"""One call whose tokens are split over ranks: what travels, what every rank has, how it joins.

Shapes: B batch, S tokens of a rank, H heads, h heads of a rank, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import repeat
from types import MappingProxyType

import torch

from multimodal_gen.runtime.distributed.collectives import (
    GatherHeadsWork,
    HeadPartition,
    Span,
    all_gather_tokens,
    gather_heads,
    gather_heads_async,
    scatter_heads,
    scatter_heads_async,
)
from multimodal_gen.runtime.distributed.groups import ParallelGroups
from multimodal_gen.runtime.distributed.handshake import Progress
from multimodal_gen.runtime.distributed.timing import attending
from multimodal_gen.runtime.layers.attention.binding import Binding
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.managers.forward_context import current_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum

__all__ = [
    "HeadsOfRank",
    "Rows",
    "SplitCall",
    "attend_in_head_groups",
    "count_exchange",
    "num_head_groups",
]

_QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Head groups with which a forward on four GPUs was faster than with one, by the rows of
# scripts/bench/results/parallel.csv; what is not here was slower, or was not measured.
_MEASURED = MappingProxyType({AttentionBackendEnum.SLIDING_TILE_ATTN: 2})


def count_exchange() -> Progress:
    """Return how far this rank is, and count one exchange of the denoiser call that runs.

    It counts from the beginning of that call, never for longer: a rank that leaves out its last
    exchange is found at the first one of the next call. Outside of denoiser calls, as in layers
    that are called on their own, there is nothing to count from.
    """
    context = current_forward_context()
    if context is None:
        return Progress()
    call = Progress().call if context.call_number is None else context.call_number
    return Progress(step=context.current_timestep, call=call, exchange=next(context.exchanges))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Which rows of a rank's tensors are its tokens; the others are on all ranks.

    Attributes:
        query: tokens of the rank among the queries.
        key: the same among the keys.
        prefix: rows of q, k and v in front of them.
        suffix: rows of q, k and v after them.
        in_front: rows of k and v alone in front of them.
    """

    query: int
    key: int
    prefix: int
    suffix: int
    in_front: int

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, replicated: tuple[int, ...]) -> "Rows":
        """Return the rows of tensors [B, S, H, D] of which some are on all ranks."""
        prefix, suffix, in_front = replicated
        return cls(
            query=query.shape[1] - prefix - suffix,
            key=key.shape[1] - prefix - suffix - in_front,
            prefix=prefix,
            suffix=suffix,
            in_front=in_front,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadsOfRank:
    """The heads of a rank, in up to three stretches of the sequence.

    Attributes:
        front: q, k and v in front of the tokens; lengths of q and k may differ.
        tokens: those of all ranks of the Ulysses group.
        back: q, k and v after them.
        gate: the gate of the tokens, or None.
    """

    front: _QKV
    tokens: _QKV
    back: _QKV
    gate: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitCall:
    """One call.

    Attributes:
        groups: this process's groups.
        shares: the heads of each rank of a Ulysses group.
        rows: this rank's tokens.
        lengths: queries of each rank of the sequence.
        key_lengths: keys of each rank of the sequence.
    """

    groups: ParallelGroups
    shares: HeadPartition
    rows: Rows
    lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]

    @property
    def heads(self) -> Span:
        """The query heads of this rank."""
        return self.shares.queries[self.groups.ulysses.index]

    @property
    def same_tokens(self) -> bool:
        """Whether queries and keys are the same tokens, as in self-attention."""
        return self.lengths == self.key_lengths and not self.rows.in_front

    @property
    def num_keys(self) -> int:
        """Keys of the whole sequence, those that all ranks hold included."""
        rows = self.rows
        return rows.prefix + rows.in_front + sum(self.key_lengths) + rows.suffix

    @property
    def ring_lengths(self) -> tuple[int, ...]:
        """Keys of each rank of a ring: those of its Ulysses group."""
        size = self.groups.ulysses.size
        starts = range(0, len(self.key_lengths), size)
        return tuple(sum(self.key_lengths[start : start + size]) for start in starts)

    def take_heads(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor | None,
    ) -> HeadsOfRank:
        """Exchange tokens for heads within the Ulysses group.

        Args:
            query: [B, prefix + S + suffix, H, D].
            key: [B, prefix + in_front + S + suffix, Hkv, D].
            value: [B, prefix + in_front + S + suffix, Hkv, Dv].
            gate: [B, S, H, D], or None.
        """
        front, tokens, back = self._stretches(query, key, value)
        if self.groups.ulysses.size > 1:
            tokens, gate = self._exchange(tokens, gate)
        return HeadsOfRank(
            front=self._own_heads(front), tokens=tokens, back=self._own_heads(back), gate=gate
        )

    def start_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> Callable[[], HeadsOfRank]:
        """Do as `take_heads`, without gradients; what is returned waits for what comes."""
        front, tokens, back = self._stretches(query, key, value)
        group, queries, keys = self.groups.ulysses, self.shares.queries, self.shares.keys
        lengths, key_lengths = self._of_group(self.lengths), self._of_group(self.key_lengths)
        q = tokens[:1], [queries], lengths, group
        kv = tokens[1:], [keys, keys], key_lengths, group
        if lengths == key_lengths:
            coming = [scatter_heads_async(tokens, [queries, keys, keys], lengths, group)]
        else:
            coming = [scatter_heads_async(*q), scatter_heads_async(*kv)]

        def arrived() -> HeadsOfRank:
            q, k, v = (x for message in coming for x in message.wait())
            return HeadsOfRank(
                front=self._own_heads(front),
                tokens=(q, k, v),
                back=self._own_heads(back),
                gate=None,
            )

        return arrived

    def _stretches(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[_QKV, _QKV, _QKV]:
        """Return q, k and v in front of this rank's tokens, of them, and after them."""
        rows = self.rows
        before = (rows.prefix, *repeat(rows.prefix + rows.in_front, 2))
        counts = (rows.query, rows.key, rows.key)
        front, tokens, back = zip(
            *(
                torch.split(x, [start, count, rows.suffix], dim=1)
                for x, start, count in zip((query, key, value), before, counts, strict=True)
            ),
            strict=True,
        )
        return front, tokens, back

    def joined(
        self, heads: HeadsOfRank
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return q, k, v and gate over the whole sequence, as a backend takes them."""
        q, k, v = (
            _join(pieces) for pieces in zip(heads.front, heads.tokens, heads.back, strict=True)
        )
        k, v = (self.shares.arrange_keys(x, self.groups.ulysses.index) for x in (k, v))
        return q, k, v, heads.gate

    def give_heads(self, out: torch.Tensor) -> torch.Tensor:
        """Exchange heads for tokens: [B, prefix + sum S + suffix, h, Dv] for [B, ..., H, Dv]."""
        group = self.groups.ulysses
        if group.size == 1:
            return out
        prefix, suffix = self.rows.prefix, self.rows.suffix
        lengths = self._of_group(self.lengths)
        return gather_heads(out, self.shares.queries, lengths, group, prefix=prefix, suffix=suffix)

    def start_tokens(self, out: torch.Tensor) -> GatherHeadsWork:
        """Do as `give_heads` with the heads there are, without waiting for what comes."""
        rows, lengths = self.rows, self._of_group(self.lengths)
        spans, group = self.shares.queries, self.groups.ulysses
        return gather_heads_async(
            out, spans, lengths, group, prefix=rows.prefix, suffix=rows.suffix
        )

    def gather_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the mask of all keys of the sequence, gathered once for layers that share it.

        Args:
            mask: [..., prefix + in_front + S + suffix].
        """
        context = current_forward_context()
        if context is None:
            return self._gather_mask(mask)
        use = ("whole mask", self.key_lengths, self.rows)
        return context.cache.get(mask, use, lambda: self._gather_mask(mask))

    def _gather_mask(self, mask: torch.Tensor) -> torch.Tensor:
        rows = self.rows
        stretches = [rows.prefix + rows.in_front, rows.key, rows.suffix]
        front, tokens, back = torch.split(mask, stretches, dim=-1)
        tokens = all_gather_tokens(tokens, self.key_lengths, self.groups.sequence)
        return torch.cat((front, tokens, back), dim=-1)

    def _exchange(
        self, tokens: _QKV, gate: torch.Tensor | None
    ) -> tuple[_QKV, torch.Tensor | None]:
        group, queries, keys = self.groups.ulysses, self.shares.queries, self.shares.keys
        lengths, key_lengths = self._of_group(self.lengths), self._of_group(self.key_lengths)
        if lengths != key_lengths:
            (q,) = scatter_heads(tokens[:1], [queries], lengths, group)
            k, v = scatter_heads(tokens[1:], [keys, keys], key_lengths, group)
            return (q, k, v), None
        if gate is None:
            q, k, v = scatter_heads(tokens, [queries, keys, keys], lengths, group)
            return (q, k, v), None
        spans = [queries, keys, keys, queries]
        q, k, v, gate = scatter_heads((*tokens, gate.to(tokens[0].dtype)), spans, lengths, group)
        return (q, k, v), gate

    def _own_heads(self, qkv: tuple[torch.Tensor, ...]) -> _QKV:
        me = self.groups.ulysses.index
        queries, keys = slice(*self.shares.queries[me]), slice(*self.shares.keys[me])
        q, k, v = qkv
        return q[:, :, queries], k[:, :, keys], v[:, :, keys]

    def _of_group(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lengths of the ranks of this Ulysses group."""
        size = self.groups.ulysses.size
        start = self.groups.ring.index * size
        return lengths[start : start + size]


def _join(pieces: tuple[torch.Tensor, ...]) -> torch.Tensor:
    present = [x for x in pieces if x.shape[1]]
    # Attention without any token is still attention of the right shape.
    return torch.cat(present, dim=1) if len(present) > 1 else (present or pieces[1:2])[0]


def num_head_groups(split: SplitCall, bound: Binding) -> int:
    """Return in how many groups of heads a call without mask, gate or gradient is computed.

    Exchanges of one group then run behind the attention of another. What an implementation keeps
    from call to call is about all heads of the rank; key heads that several query heads read would
    travel more than once.
    """
    asked = split.groups.head_groups
    if bound.keeps_state or split.shares.num_heads != split.shares.num_kv_heads:
        return 1
    if asked is None:
        asked = _MEASURED.get(bound.selection.backend, 1)
    return min(asked, *(stop - start for start, stop in split.shares.queries))


def attend_in_head_groups(
    bound: Binding, split: SplitCall, call: AttentionCall, count: int
) -> torch.Tensor:
    """Return attention of this rank's tokens, group of heads by group of heads.

    Everything is packed and sent at once; attention of a group waits for its own heads alone, and
    its output leaves while the next group runs. Sliding tiles gain a little on four GPUs. Dense
    attention of our own kernel takes longer by about what is hidden, and that of FlashAttention 3
    by far more.

    Args:
        bound: what computes it.
        split: how the tokens are split; there is no ring.
        call: this rank's tensors.
        count: number of groups, at most the heads of a rank.

    Returns:
        [B, prefix + S + suffix, H, Dv].
    """
    groups = [replace(split, shares=shares) for shares in split.shares.in_groups(count)]
    coming = [group.start_heads(*call[:3]) for group in groups]
    context = current_forward_context()
    leaving = []
    for group, arrived in zip(groups, coming, strict=True):
        q, k, v, _ = group.joined(arrived())
        part = call._replace(first_head=group.heads[0], continued=group is not groups[0])
        with attending(q.device):
            out = bound.forward(q, k, v, context, **bound.fields(part))
        leaving.append(group.start_tokens(out))
    out = call.query.new_empty((*call.query.shape[:3], call.value.shape[3]))
    for tokens in leaving:
        tokens.wait_into(out)
    return bound.count(out)
