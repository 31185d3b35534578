"""Attention layers whose tokens are split over ranks: Ulysses, ring, or both.

Within a Ulysses group tokens are exchanged for heads, so a backend sees the whole sequence (under a
ring: a part of it) with some of the heads. Tokens that all ranks hold, such as text, are never
exchanged: a rank takes its heads of them, and they are where they were in the sequence. Between
Ulysses groups keys and values travel round a ring.

Shapes: B batch, S tokens of a rank, H heads, h heads of a rank, D head size; q/k suffix =
query/key side.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from typing_extensions import override

from multimodal_gen.errors import MultimodalGenError, UnsupportedBackendError, UsageError
from multimodal_gen.runtime.distributed import groups as ranks
from multimodal_gen.runtime.distributed.collectives import (
    GatherHeadsWork,
    HeadPartition,
    ScatterHeadsWork,
    Span,
    all_gather_tokens,
    exchange_plan,
    gather_heads,
    partition_heads,
    scatter_heads,
)
from multimodal_gen.runtime.distributed.groups import ParallelGroups
from multimodal_gen.runtime.distributed.handshake import Progress, handshake
from multimodal_gen.runtime.distributed.ring import RingCall, RingInputs
from multimodal_gen.runtime.distributed.timing import Times, attending, exchanging, recording
from multimodal_gen.runtime.layers.attention.arguments import (
    all_or_none,
    check_mask_meta,
    check_replicated,
    check_seq_lens,
    check_split,
    join_tokens,
)
from multimodal_gen.runtime.layers.attention.attention_layer import (
    AttentionLayer,
    binding_at,
    check_flags,
    in_place_of,
)
from multimodal_gen.runtime.layers.attention.backends.block_masks import apart
from multimodal_gen.runtime.layers.attention.binding import Binding
from multimodal_gen.runtime.layers.attention.call import (
    AttentionCall,
    LayerGeometry,
)
from multimodal_gen.runtime.layers.attention.causal_cache import LayerCache
from multimodal_gen.runtime.layers.attention.config import settings_text
from multimodal_gen.runtime.layers.attention.masks import (
    VarlenMaskMeta,
    masks_keys,
    once_per_call,
    zero_masked_rows,
)
from multimodal_gen.runtime.layers.attention.report import LayerReport
from multimodal_gen.runtime.layers.attention.request import AttentionRole, LayerSite
from multimodal_gen.runtime.layers.attention.scope import SelectionScope
from multimodal_gen.runtime.layers.attention.sequence_parallel.ring import ring_forward
from multimodal_gen.runtime.managers.forward_context import ForwardContext, current_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum

if TYPE_CHECKING:
    from multimodal_gen.runtime.layers.attention.backends.block_masks import AnyBlockMask

_QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# What all ranks hold: q, k and v in front of their tokens and after them, with all heads.
_Around = tuple[_QKV, _QKV] | None
_Message = tuple[Sequence[torch.Tensor], Sequence[tuple[Span, ...]], tuple[int, ...]]


def tokens_are_split() -> bool:
    """Whether this process is one of several ranks that share a sequence."""
    groups = ranks.IN_USE
    return groups is not None and groups.sequence.size > 1


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


class Rows(NamedTuple):
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

    @property
    def of_keys(self) -> list[int]:
        """How many keys are in front of the rank's, are its own, and are behind them."""
        return [self.prefix + self.in_front, self.key, self.suffix]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitCall:
    """One call: what travels, what every rank has, how it joins.

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

    def take_heads(self, call: AttentionCall) -> tuple[Sequence[torch.Tensor], _Around]:
        """Exchange tokens for heads within the Ulysses group.

        Args:
            call: [B, prefix + S + suffix, H, D] queries, as many keys with those in front of them,
                and the gate [B, S, H, D] of the tokens, or None.

        Returns:
            This rank's heads of the tokens of all ranks of the group: q, k, v and, where there is
            one, the gate; and what is around them.
        """
        tokens, around = self.stretches(call)
        gates = () if call.gate is None else (call.gate.to(call.query.dtype),)
        if self.groups.ulysses.size == 1:
            return (*tokens, *gates), around
        sent = self.messages(tokens, *gates)
        return [x for each in sent for x in scatter_heads(*each, self.groups.ulysses)], around

    def stretches(self, call: AttentionCall) -> tuple[_QKV, _Around]:
        """Return q, k and v of this rank's tokens, and what is around them."""
        query, key, value = call[:3]
        prefix, suffix, in_front = self.rows[2:]
        if not (prefix or suffix or in_front):
            return (query, key, value), None
        q = torch.split(query, [prefix, self.rows.query, suffix], dim=1)
        sizes = self.rows.of_keys
        k, v = torch.split(key, sizes, dim=1), torch.split(value, sizes, dim=1)
        front, tokens, back = zip(q, k, v, strict=True)
        return tokens, (front, back)

    def messages(self, tokens: _QKV, *gates: torch.Tensor) -> list[_Message]:
        """Return what is sent together: tensors, the heads and the tokens of each rank."""
        queries, keys = self.shares.queries, self.shares.keys
        lengths, key_lengths = self._of_group(self.lengths), self._of_group(self.key_lengths)
        with_gate = [queries] * len(gates)
        if lengths == key_lengths:
            return [((*tokens, *gates), [queries, keys, keys, *with_gate], lengths)]
        sent: list[_Message] = [(tokens[:1], [queries], lengths)]
        sent.append((tokens[1:], [keys, keys], key_lengths))
        return [*sent, (gates, with_gate, lengths)] if gates else sent

    def joined(
        self, heads: Sequence[torch.Tensor], around: _Around
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return q, k, v and gate over the whole sequence, as a backend takes them.

        Args:
            heads: this rank's, see `take_heads`.
            around: what is around their tokens.
        """
        q, k, v, *gate = heads
        if around is not None:
            front, back = map(self._own_heads, around)
            q, k, v = (_join(each) for each in zip(front, (q, k, v), back, strict=True))
        k, v = self._arranged(k, v)
        return q, k, v, gate[0] if gate else None

    def give_heads(self, out: torch.Tensor) -> torch.Tensor:
        """Exchange heads for tokens: [B, prefix + sum S + suffix, h, Dv] for [B, ..., H, Dv]."""
        group, rows = self.groups.ulysses, self.rows
        if group.size == 1:
            return out
        spans, lengths = self.shares.queries, self._of_group(self.lengths)
        return gather_heads(out, spans, lengths, group, prefix=rows.prefix, suffix=rows.suffix)

    def whole_mask(self, call: AttentionCall) -> torch.Tensor | None:
        """Return the mask of all keys of the sequence, gathered once for layers that share it."""
        mask = call.mask
        if mask is None or call.whole_mask is not None:
            return call.whole_mask
        use = ("whole mask", self.key_lengths, self.rows)

        def gather() -> torch.Tensor:
            front, tokens, back = torch.split(mask, self.rows.of_keys, dim=-1)
            tokens = all_gather_tokens(tokens, self.key_lengths, self.groups.sequence)
            return torch.cat((front, tokens, back), dim=-1)

        return once_per_call(mask, use, gather)

    def ring_inputs(
        self,
        heads: Sequence[torch.Tensor],
        around: _Around,
        mask: torch.Tensor | None,
        geometry: LayerGeometry,
        projection: nn.Linear | None,
    ) -> RingInputs:
        """Return what this rank brings to a ring.

        Args:
            heads: this rank's, see `take_heads`.
            around: what is around their tokens.
            mask: bool [B, Sk] or [B, 1, 1, Sk] of all keys, or None.
            geometry: what the layer computes.
            projection: the layer's trained projection, or None.

        Raises:
            UsageError: a causal call has other keys than queries.
        """
        if geometry.causal and self.lengths != self.key_lengths:
            raise UsageError(
                f"a causal layer must have as many keys as queries on each rank of a ring, got "
                f"{list(self.lengths)} queries and {list(self.key_lengths)} keys"
            )
        rows = self.rows
        query, key, value, *gate = heads
        num_queries = query.shape[1]
        key, value = self._arranged(key, value)
        shared_key = shared_value = key_mask = shared_mask = None
        if around is not None:
            front, back = map(self._own_heads, around)
            if rows.prefix or rows.suffix:
                query = torch.cat((front[0], query, back[0]), dim=1)
            pairs = zip(front[1:], back[1:], strict=True)
            shared_key, shared_value = self._arranged(*(torch.cat(pair, dim=1) for pair in pairs))
        if mask is not None:
            stretches = [rows.prefix + rows.in_front, sum(self.key_lengths), rows.suffix]
            before, key_mask, after = torch.split(mask.flatten(1), stretches, dim=1)
            shared_mask = torch.cat((before, after), dim=1)
        return RingInputs(
            call=RingCall(
                group=self.groups.ring,
                lengths=self.in_ring(self.key_lengths),
                num_queries=num_queries,
                scale=geometry.softmax_scale,
                causal=geometry.causal,
                prefix=rows.prefix,
                suffix=rows.suffix,
                mask=key_mask,
                shared_mask=shared_mask,
            ),
            query=query,
            key=key,
            value=value,
            shared_key=shared_key,
            shared_value=shared_value,
            gate=gate[0] if gate else None,
            first_head=self.heads[0],
            projection=projection,
        )

    def in_ring(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many tokens each rank of a ring has: all of its Ulysses group's."""
        size = self.groups.ulysses.size
        starts = range(0, len(lengths), size)
        return tuple(sum(lengths[start : start + size]) for start in starts)

    def _arranged(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return keys and values as this rank's query heads read them."""
        me = self.groups.ulysses.index
        return self.shares.arrange_keys(key, me), self.shares.arrange_keys(value, me)

    def _own_heads(self, qkv: _QKV) -> _QKV:
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


class SequenceParallelLayer(AttentionLayer):
    """An attention layer that exchanges tokens where ranks share a sequence."""

    @cached_property
    def times(self) -> Times:
        """What its calls take where there are several ranks."""
        return Times()

    def report(self) -> LayerReport:
        """Return what the layer ran so far, and why, and what time it took."""
        return replace(super().report(), times=self.times.taken())

    @override
    def _refused(self, error: MultimodalGenError, *, exchange: bool) -> MultimodalGenError:
        # Ranks that make the call would take the next one of this rank for the same.
        groups = ranks.IN_USE
        if exchange and tokens_are_split() and not torch.compiler.is_compiling():
            assert groups is not None, "ranks share the tokens"
            handshake(groups, self._name_of_calls(), {}, (), error, progress=count_exchange())
        return error

    def _name_of_calls(self) -> str:
        return f"{type(self).__name__} {self.site.name}".strip()

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        """Attend to the tokens of all ranks; on one device, and where asked to, to these alone."""
        groups = ranks.IN_USE
        if groups is None:
            return super()._attend(call)
        if call.exchange and groups.sequence.size > 1:
            return self._attend_over_ranks(call, groups)
        with recording(self.times), attending(call.query.device):
            return super()._attend(call)

    def _attend_over_ranks(self, call: AttentionCall, groups: ParallelGroups) -> torch.Tensor:
        """Attend to the tokens of all ranks.

        Raises:
            UsageError: shapes do not fit, or differ between ranks where they must not.
            RankError: another rank refuses its call, or makes none.
            UnsupportedBackendError: no backend can honour the call.
        """
        cast = call.autocast()
        if cast is not call:
            with torch.autocast(call.query.device.type, enabled=False):
                return self._attend_over_ranks(cast, groups)
        try:
            _check_split(call, groups.ring.size)
            entry = self.entry_for(call.query)  # what is bound for these tensors may be new
            if entry.ulysses_refusal is not None and groups.ulysses.size > 1:
                raise UnsupportedBackendError(entry.ulysses_refusal)
            bound = entry.primary
            if call.exact or (call.no_grid and bound.is_sparse):
                bound, call = in_place_of(bound, call)
        except MultimodalGenError as error:
            raise self._refused(error, exchange=True) from None
        training = torch.is_grad_enabled() and call.wants_gradient()
        split = self._agreed(groups, call, bound, training)
        with recording(self.times):
            if groups.ring.size > 1:
                return self._attend_in_ring(split, bound, call, training)
            observed = bool(entry.observers) and not call.no_grid
            plain = call.mask is None and call.gate is None and not observed
            plain = plain and call.check is None
            if plain and not (training or call.is_extended()):
                count = _num_head_groups(split, bound)
                if count > 1:
                    return _attend_in_head_groups(bound, split, call, count)
            return self._attend_to_heads(split, call)

    def _attend_to_heads(self, split: SplitCall, call: AttentionCall) -> torch.Tensor:
        q, k, v, gate = split.joined(*split.take_heads(call))
        heads = call._replace(
            query=q,
            key=k,
            value=v,
            mask=split.whole_mask(call),
            gate=gate,
            mask_meta=None,
            replicated=(0, 0, 0),
            first_head=split.heads[0],
            check=None,
        )
        with attending(q.device):
            serve, check = super()._attend, call.check
            out = serve(heads) if check is None else check.heads(serve, heads)
        return split.give_heads(out)

    def _attend_in_ring(
        self, split: SplitCall, bound: Binding, call: AttentionCall, training: bool
    ) -> torch.Tensor:
        key_mask, mask = None, split.whole_mask(call)
        mask = None if mask is None else mask != 0
        same_tokens = split.lengths == split.key_lengths and not split.rows.in_front
        self_attention = self.site.role is not AttentionRole.CROSS and same_tokens
        if call.mask is not None and call.mask.dim() == 2 and self_attention:
            key_mask = call.mask != 0
            if training or call.check is not None:
                # K and V's gradients sum over all queries: zero times NaN would reach every row.
                # Nor is a row that nothing reads to count as one that is not finite.
                call = call._replace(query=zero_masked_rows(call.query, key_mask))
        heads = split.take_heads(call)
        inputs = split.ring_inputs(*heads, mask, self.geometry, call.projection)
        size, check = split.groups.sequence.size, call.check
        out = ring_forward(self, bound, inputs, mask, size, check=check)
        if check is not None:
            check.ring(inputs, split.in_ring(split.lengths), out)
        out = split.give_heads(out)
        return out if key_mask is None else zero_masked_rows(out, key_mask)

    def _agreed(
        self, groups: ParallelGroups, call: AttentionCall, bound: Binding, training: bool
    ) -> SplitCall:
        """Return how tokens and heads are split, once all ranks make the same call."""
        query, key, value, mask, gate = call[:5]
        shared, seq_lens, cache = call.replicated, call.seq_lens, call.cache
        own = query.shape[1] - shared[0] - shared[1], key.shape[1] - sum(shared)
        rows = Rows(*own, *shared)
        seen = cache and (*cache.cache.running, cache.sink, cache.window, cache.cut)
        chosen, context = bound.selection, current_forward_context()
        refusal = None
        if gate is not None and gate.shape != query.shape:
            refusal = UsageError(
                f"the gate must have the shape of query, {list(query.shape)}, got "
                f"{list(gate.shape)}"
            )
        facts = {
            "attention backend": chosen.backend,
            "backend parameters": settings_text(chosen.asked.config),
            "batch size": query.shape[0],
            "heads": f"{[*query.shape[2:]]}, {[*key.shape[2:]]}, {[*value.shape[2:]]}",
            "dtype": f"{query.dtype}, {key.dtype}, {value.dtype}",
            "attn_mask": "none" if mask is None else f"{mask.dim()}-D {mask.dtype}",
            "gate_compress": "none" if gate is None else f"{[*gate.shape[2:]]} {gate.dtype}",
            "video": "unknown" if context is None else _video(context),
            "replicated tokens": rows[2:],
            "seq_lens": None if seq_lens is None else tuple(seq_lens),
            "gradients": training,
            "guidance branch": None if context is None else context.cfg_branch,
            "cache": seen,
            "mask of blocks": type(call.block_mask).__name__,
            "sink_logits": call.sink_logits is not None,
        }
        counts = handshake(
            groups,
            self._name_of_calls(),
            facts,
            own,
            refusal,
            progress=count_exchange(),
            wait=query.device.type == "cpu",
        )
        lengths, key_lengths = zip(*counts, strict=True)
        if seq_lens is not None and tuple(seq_lens) != lengths:
            raise UsageError(
                f"seq_lens must hold the tokens of each rank, {list(lengths)}, got {list(seq_lens)}"
            )
        return SplitCall(
            groups=groups,
            shares=partition_heads(query.shape[2], key.shape[2], groups.ulysses.size),
            rows=rows,
            lengths=lengths,
            key_lengths=key_lengths,
        )


def _check_split(call: AttentionCall, ring: int) -> None:
    """Refuse a call that this rank cannot make, whatever the others do.

    Args:
        call: the call.
        ring: ranks in a ring.
    """
    mask = call.mask
    if mask is not None:
        wanted = (call.key.shape[0], call.key.shape[1])
        if not masks_keys(mask) or (mask.shape[0], mask.shape[-1]) != wanted:
            raise UsageError(
                f"attn_mask must be [B, Sk] = {list(wanted)} or [B, 1, 1, Sk], the part of this "
                f"rank, where tokens are split over ranks, got {list(mask.shape)}"
            )
        if ring > 1 and mask.dtype.is_floating_point:
            raise UsageError(
                f"attn_mask must be bool or integer in a ring, got {mask.dtype}; use --ring-degree "
                f"1 for masks that are added to the scores"
            )
    if ring > 1 and call.is_extended():
        raise UsageError(
            f"a call with a cache, a mask of blocks or sink_logits must be split by heads alone, "
            f"got a ring of {ring}; use --ring-degree 1 and more Ulysses ranks"
        )


def _video(context: ForwardContext) -> str:
    """Return where the video of the running denoiser call lies, as ranks compare it."""
    if context.latent_grid is None:
        return "unknown"
    span = context.text_span
    text = "" if span is None else f", text {'before' if span.start == 0 else 'behind'} it"
    return f"{context.latent_grid}{text}"


def _num_head_groups(split: SplitCall, bound: Binding) -> int:
    """Return in how many groups of heads a call without mask, gate or gradient is computed.

    Exchanges of one group then run behind the attention of another. What an implementation keeps
    from call to call is about all heads of the rank; key heads that several query heads read would
    travel more than once.
    """
    asked = split.groups.head_groups or bound.head_groups
    shares = split.shares
    keeps_state = bound.method is not None and bound.method.keeps_state
    if asked == 1 or keeps_state or shares.num_heads != shares.num_kv_heads:
        return 1
    return min(asked, *(stop - start for start, stop in shares.queries))


def _attend_in_head_groups(
    bound: Binding, split: SplitCall, call: AttentionCall, count: int
) -> torch.Tensor:
    """Return attention of this rank's tokens, group of heads by group of heads.

    Everything is packed and sent at once; attention of a group waits for its own heads alone, and
    its output leaves while the next group runs. Sliding tiles gain a little on four GPUs. Dense
    attention of our own kernel takes longer by about what is hidden, and that of FlashAttention 3
    by far more. All groups run dense where a sparse method would keep too much of the rank's heads.

    Args:
        bound: what computes it.
        split: how the tokens are split; there is no ring.
        call: this rank's tensors.
        count: number of groups, at most the heads of a rank.

    Returns:
        [B, prefix + S + suffix, H, Dv].
    """
    rows, context = split.rows, current_forward_context()
    among = split.groups.ulysses
    tokens, around = split.stretches(call)
    groups = [replace(split, shares=shares) for shares in split.shares.in_groups(count)]
    with exchanging(call.query.device):
        coming = [
            [
                ScatterHeadsWork(exchange_plan(*message, among), message[0], among)
                for message in sent
            ]
            for sent in (group.messages(tokens) for group in groups)
        ]
    leaving = []
    for group, works in zip(groups, coming, strict=True):
        with exchanging(call.query.device):
            heads = [x for work in works for x in work.wait()]
        q, k, v, _ = group.joined(heads, around)
        part = call._replace(query=q, key=k, value=v, first_head=group.heads[0])
        if group is groups[0]:
            bound = _serving_all(bound, part, split.heads)
        else:
            part = part._replace(continued=True)
        with attending(q.device):
            out = bound.impl.forward(q, k, v, context, **bound.fields(part))
        with exchanging(q.device):
            message = [out], [group.shares.queries], group.lengths
            plan = exchange_plan(*message, among, prefix=rows.prefix, suffix=rows.suffix)
            leaving.append(GatherHeadsWork(plan, [out], among))
    out = call.query.new_empty((*call.query.shape[:3], call.value.shape[3]))
    with exchanging(out.device):
        for work in leaving:
            work.wait_into(out)
    return bound.count(out)


def _serving_all(bound: Binding, part: AttentionCall, heads: Span) -> Binding:
    """Return what serves all heads of this rank: the implementation, or dense attention.

    Ranks may differ, because what serves them changes nothing of the exchanges.

    Args:
        bound: what was chosen for the layer.
        part: the call with the tensors of one of the groups.
        heads: those of this rank.
    """
    first, last = heads
    query, key, value = (x[:, :, :1].expand(-1, -1, last - first, -1) for x in part[:3])
    whole = part._replace(query=query, key=key, value=value, first_head=first)
    return binding_at(bound, whole, current_forward_context())


class UlyssesAttention(SequenceParallelLayer):
    """Attention whose heads are split over the devices of a Ulysses group.

    Args:
        num_heads: query heads, over all devices.
        head_size: channels per head.
        num_kv_heads: key and value heads; default `num_heads`.
        softmax_scale: factor on q k^T; default `head_size ** -0.5`.
        causal: mask out keys after the query, aligned to the last query and key.
        supported_attention_backends: hint: automatic choice prefers this set.
        prefix: dotted path of the layer in its model; its first number is what `layers:` rules
            go by.
        default_attention_backend: the layer's preference, weaker than a user's request.
        compute_dtype: dtype of q, k and v; default: whichever the first call has.
        site: where the layer sits; default: the component under construction.
        scope: what the user configured; default: the scope in use.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        num_kv_heads: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        supported_attention_backends: Collection[AttentionBackendEnum | str] | None = None,
        prefix: str = "",
        *,
        default_attention_backend: AttentionBackendEnum | str | None = None,
        compute_dtype: torch.dtype | None = None,
        site: LayerSite | None = None,
        scope: SelectionScope | None = None,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            num_kv_heads,
            softmax_scale,
            causal,
            supported_attention_backends,
            default_attention_backend,
            compute_dtype=compute_dtype,
            prefix=prefix,
            site=site,
            scope=scope,
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        replicated_q: torch.Tensor | None = None,
        replicated_k: torch.Tensor | None = None,
        replicated_v: torch.Tensor | None = None,
        seq_lens: list[int] | None = None,
        *,
        cache: LayerCache | None = None,
        sink_logits: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return attention of the sharded tokens, with replicated ones joined at the end.

        Args:
            q: [B, S, H, D], this device's tokens.
            k: [B, S, Hkv, D].
            v: [B, S, Hkv, D].
            replicated_q: [B, R, H, D] tokens every device holds, e.g. text; all three or none.
            replicated_k: [B, R, Hkv, D].
            replicated_v: [B, R, Hkv, D].
            seq_lens: tokens per device when they differ; not together with replicated tokens.
            cache: the layer's part of a `CausalCache` with this device's share of the key heads
                (`key_heads_of_rank`), whose running chunk the tokens of all devices are.
            sink_logits: [H] logit per head of a key that every query sees and that has no value.

        Returns:
            The output [B, S, H, D], and that of the replicated tokens [B, R, H, D] or None.
        """
        try:
            replicated = all_or_none(replicated_q, replicated_k, replicated_v, "replicated_")
            exclusive = replicated is not None
            check_seq_lens(seq_lens, q, exclusive=exclusive, split=tokens_are_split())
            query, key, value = q, k, v
            if replicated is not None:
                query, key, value = (
                    join_tokens(own, shared, (name, f"replicated_{name}"))
                    for name, own, shared in zip("qkv", (q, k, v), replicated, strict=True)
                )
        except MultimodalGenError as error:
            raise self._refused(error, exchange=True) from None
        call = AttentionCall(
            query,
            key,
            value,
            replicated=(0, 0 if replicated is None else replicated[0].shape[1], 0),
            seq_lens=seq_lens,
            cache=cache,
            sink_logits=sink_logits,
        )
        out = self.attend(call)
        return (out, None) if replicated is None else (out[:, : q.shape[1]], out[:, q.shape[1] :])


class UlyssesAttention_VSA(UlyssesAttention):  # noqa: N801  the name users import
    """`UlyssesAttention` with the gate of Video Sparse Attention's coarse branch."""

    def forward(  # type: ignore[override]  # the gate's signature is the documented one
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        replicated_q: torch.Tensor | None = None,
        replicated_k: torch.Tensor | None = None,
        replicated_v: torch.Tensor | None = None,
        seq_lens: list[int] | None = None,
        gate_compress: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention of the sharded tokens.

        Args:
            q: [B, S, H, D], this device's tokens.
            k: [B, S, H, D].
            v: [B, S, H, D].
            replicated_q: must be None; VSA clusters video tokens only.
            replicated_k: must be None.
            replicated_v: must be None.
            seq_lens: tokens per device when they differ.
            gate_compress: [B, S, H, D] weight of the coarse branch; None is weight 0.

        Returns:
            [B, S, H, D].

        Raises:
            UsageError: replicated tokens are given, or a gate that the backend cannot apply.
        """
        try:
            if any(x is not None for x in (replicated_q, replicated_k, replicated_v)):
                raise UsageError(
                    "replicated_q, replicated_k and replicated_v must be None in "
                    "UlyssesAttention_VSA; use UlyssesAttention for joint sequences"
                )
            check_seq_lens(seq_lens, q, exclusive=False, split=tokens_are_split())
        except MultimodalGenError as error:
            raise self._refused(error, exchange=True) from None
        return self.attend(AttentionCall(q, k, v, gate=gate_compress, seq_lens=seq_lens))


class USPAttention(SequenceParallelLayer):
    """Attention under unified sequence parallelism: Ulysses, ring, or both.

    Args:
        num_heads: query heads, over all devices.
        head_size: channels per head.
        num_kv_heads: key and value heads; default `num_heads`.
        softmax_scale: factor on q k^T; default `head_size ** -0.5`.
        causal: mask out keys after the query, aligned to the last query and key.
        supported_attention_backends: hint: automatic choice prefers this set.
        default_attention_backend: the layer's preference, weaker than a user's request.
        prefix: dotted path of the layer in its model; its first number is what `layers:` rules
            go by.
        dropout_rate: must be 0; attention kernels apply no dropout.
        skip_sequence_parallel: never exchange tokens.
        enable_packed_qkv_input_a2a: accepted; q, k and v always travel in one message.
        is_cross_attention: keys come from another sequence.
        compute_dtype: dtype of q, k and v; default: whichever the first call has.
        site: where the layer sits; default: the component under construction.
        scope: what the user configured; default: the scope in use.
        prepare: see `AttentionLayer`.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        num_kv_heads: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        supported_attention_backends: Collection[AttentionBackendEnum | str] | None = None,
        default_attention_backend: AttentionBackendEnum | str | None = None,
        prefix: str = "",
        dropout_rate: float = 0.0,
        skip_sequence_parallel: bool = False,
        enable_packed_qkv_input_a2a: bool = False,
        is_cross_attention: bool = False,
        *,
        compute_dtype: torch.dtype | None = None,
        site: LayerSite | None = None,
        scope: SelectionScope | None = None,
        prepare: Callable[[AttentionLayer, AttentionCall], AttentionCall] | None = None,
    ) -> None:
        if dropout_rate != 0.0:
            raise UsageError(f"dropout_rate must be 0.0, got {dropout_rate}; kernels apply none")
        check_flags(
            skip_sequence_parallel=skip_sequence_parallel,
            enable_packed_qkv_input_a2a=enable_packed_qkv_input_a2a,
        )
        super().__init__(
            num_heads,
            head_size,
            num_kv_heads,
            softmax_scale,
            causal,
            supported_attention_backends,
            default_attention_backend,
            is_cross_attention,
            compute_dtype,
            prefix=prefix,
            site=site,
            scope=scope,
            prepare=prepare,
        )
        self.skip_sequence_parallel = skip_sequence_parallel
        self.enable_packed_qkv_input_a2a = enable_packed_qkv_input_a2a

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: "torch.Tensor | AnyBlockMask | None" = None,
        num_replicated_prefix: int = 0,
        num_replicated_suffix: int = 0,
        num_replicated_kv_prefix: int = 0,
        skip_sequence_parallel_override: bool = False,
        attn_mask_meta: VarlenMaskMeta | None = None,
        qkv_pre_all_to_all: bool = False,
        seq_lens: list[int] | None = None,
        q_prefix: torch.Tensor | None = None,
        k_prefix: torch.Tensor | None = None,
        v_prefix: torch.Tensor | None = None,
        *,
        cache: LayerCache | None = None,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention of this device's tokens.

        Args:
            q: [B, S, H, D].
            k: [B, Sk, Hkv, D].
            v: [B, Sk, Hkv, Dv].
            attn_mask: as `LocalAttention.forward` takes it; where tokens are split over ranks
                [B, Sk] or [B, 1, 1, Sk], this device's part, or a mask of blocks of the whole.
            num_replicated_prefix: leading tokens of q, k and v that every device holds.
            num_replicated_suffix: trailing tokens of q, k and v that every device holds.
            num_replicated_kv_prefix: leading tokens of k and v alone that every device holds.
            skip_sequence_parallel_override: exchange nothing in this call.
            attn_mask_meta: packing of a 2-D `attn_mask`, from `build_varlen_mask_meta`.
            qkv_pre_all_to_all: q, k and v already hold all tokens of this device's heads.
            seq_lens: tokens per device when they differ; excludes masks and replicated tokens.
            q_prefix: [B, P, H, D] tokens put in front of q, on one device; all three or none.
            k_prefix: [B, P, Hkv, D].
            v_prefix: [B, P, Hkv, Dv].
            cache: the layer's part of a `CausalCache` with this device's share of the key heads
                (`key_heads_of_rank`), whose running chunk the tokens of all devices are.
            sink_logits: [H] logit per head of a key that every query sees and that has no value.

        Returns:
            [B, P + S, H, Dv].

        Raises:
            UsageError: arguments exclude each other, or sizes do not fit.
        """
        mask, blocks = (None, None) if attn_mask is None else apart(attn_mask)
        skip = self.skip_sequence_parallel or skip_sequence_parallel_override
        split = tokens_are_split() and not skip
        replicated = (num_replicated_prefix, num_replicated_suffix, num_replicated_kv_prefix)
        try:
            if not (skip_sequence_parallel_override is qkv_pre_all_to_all is False):
                check_flags(
                    skip_sequence_parallel_override=skip_sequence_parallel_override,
                    qkv_pre_all_to_all=qkv_pre_all_to_all,
                )
            check_replicated(replicated, q, k)
            exclusive = attn_mask is not None or any(replicated)
            check_seq_lens(seq_lens, q, exclusive=exclusive, split=split)
            prefix = all_or_none(q_prefix, k_prefix, v_prefix, "", "_prefix")
            if split:
                check_split(prefix is not None, qkv_pre_all_to_all)
            if prefix is not None:
                q, k, v = (
                    join_tokens(front, x, (f"{name}_prefix", name))
                    for name, front, x in zip("qkv", prefix, (q, k, v), strict=True)
                )
                replicated = (prefix[0].shape[1] + num_replicated_prefix, *replicated[1:])
            check_mask_meta(attn_mask_meta, mask, k)
        except MultimodalGenError as error:
            raise self._refused(error, exchange=not skip) from None
        call = AttentionCall(
            q,
            k,
            v,
            mask,
            mask_meta=attn_mask_meta,
            replicated=replicated,
            seq_lens=seq_lens,
            exchange=not skip,
            some_heads=qkv_pre_all_to_all,
            cache=cache,
            block_mask=blocks,
            sink_logits=sink_logits,
        )
        return self.attend(call)

    def forward_with_replicated_kv_prefix(
        self,
        q: torch.Tensor,
        k_prefix: torch.Tensor,
        v_prefix: torch.Tensor,
        k_suffix: torch.Tensor,
        v_suffix: torch.Tensor,
    ) -> torch.Tensor:
        """Return attention of `q` over keys every device holds followed by sharded ones.

        Args:
            q: [B, S, H, D].
            k_prefix: [B, P, Hkv, D].
            v_prefix: [B, P, Hkv, Dv].
            k_suffix: [B, Sk, Hkv, D].
            v_suffix: [B, Sk, Hkv, Dv].

        Returns:
            [B, S, H, Dv].
        """
        try:
            k = join_tokens(k_prefix, k_suffix, ("k_prefix", "k_suffix"))
            v = join_tokens(v_prefix, v_suffix, ("v_prefix", "v_suffix"))
        except MultimodalGenError as error:
            raise self._refused(error, exchange=not self.skip_sequence_parallel) from None
        return self.forward(q, k, v, num_replicated_kv_prefix=k_prefix.shape[1])
