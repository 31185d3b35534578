"""Attention layers whose tokens are split over ranks: Ulysses, ring, or both.

Within a Ulysses group tokens are exchanged for heads, so a backend sees the whole sequence (under a
ring: a part of it) with some of the heads. Tokens that all ranks hold, such as text, are never
exchanged: a rank takes its heads of them, and they are where they were in the sequence. Between
Ulysses groups keys and values travel round a ring.

Shapes: B batch, S tokens of a rank, H heads, D head size; q/k suffix = query/key side.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from multimodal_gen.errors import MultimodalGenError, UsageError
from multimodal_gen.runtime.distributed.collectives import partition_heads
from multimodal_gen.runtime.distributed.groups import ParallelGroups, parallel_groups
from multimodal_gen.runtime.distributed.handshake import handshake
from multimodal_gen.runtime.distributed.timing import Times, attending, recording
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.call import (
    AttentionCall,
    all_or_none,
    check_exchange,
    check_flags,
    check_mask_meta,
    check_no_replicated,
    check_replicated,
    check_seq_lens,
    check_split,
    join_tokens,
    lists_or_mask,
)
from multimodal_gen.runtime.layers.attention.config import settings_text
from multimodal_gen.runtime.layers.attention.masks import VarlenMaskMeta, zero_masked_rows
from multimodal_gen.runtime.layers.attention.report import LayerReport
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.schedule import ScheduleEntry
from multimodal_gen.runtime.layers.attention.scope import LayerSite, SelectionScope
from multimodal_gen.runtime.layers.attention.sequence_parallel.ring import ring_forward
from multimodal_gen.runtime.layers.attention.sequence_parallel.ulysses import (
    Rows,
    SplitCall,
    attend_in_head_groups,
    count_exchange,
    num_head_groups,
)
from multimodal_gen.runtime.managers.forward_context import current_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum

if TYPE_CHECKING:
    from multimodal_gen.runtime.layers.attention.call import Lists
    from multimodal_gen.runtime.layers.attention.causal_cache import LayerCache

__all__ = [
    "SequenceParallelLayer",
    "USPAttention",
    "UlyssesAttention",
    "UlyssesAttention_VSA",
    "tokens_are_split",
]


def tokens_are_split() -> bool:
    """Whether this process is one of several ranks that share a sequence."""
    groups = parallel_groups()
    return groups is not None and groups.sequence.size > 1


class SequenceParallelLayer(AttentionLayer):
    """An attention layer that exchanges tokens where ranks share a sequence.

    Attributes:
        times: what its calls take where there are several ranks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.times = Times()

    def report(self) -> LayerReport:
        """Return what the layer ran so far, and why, and what time it took."""
        return replace(super().report(), times=self.times.taken())

    def announced(self, error: MultimodalGenError, *, split: bool) -> MultimodalGenError:
        """Return why this rank cannot make a call, once the others have heard it.

        Those that make the call would take the next one of this rank for the same.

        Args:
            error: what is wrong with the call.
            split: whether the call would have exchanged tokens.
        """
        groups = parallel_groups()
        if split and groups is not None and not torch.compiler.is_compiling():
            handshake(groups, self._name_of_calls(), {}, (), error, progress=count_exchange())
        return error

    def _refused(self, call: AttentionCall, error: MultimodalGenError) -> MultimodalGenError:
        return self.announced(error, split=call.exchange and tokens_are_split())

    def _name_of_calls(self) -> str:
        return f"{type(self).__name__} {self.site.name}".strip()

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        """Attend to the tokens of all ranks; on one device, and where told so, to these alone."""
        groups = parallel_groups()
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
        refusal = _mask_refusal(call, groups) or _ring_refusal(call, groups)
        if refusal is not None:
            raise self._refused(call, refusal)
        if call.autocasts():
            with torch.autocast(call.query.device.type, enabled=False):
                return self._attend_over_ranks(call.autocast(), groups)
        try:
            entry = self.entry_for(call.query)  # what is bound for these tensors may be new
            if call.off_grid and entry.primary.selection.backend.is_sparse:
                entry = entry.off_grid(call.off_grid)
        except MultimodalGenError as error:
            raise self._refused(call, error) from None
        rows = Rows.of(call.query, call.key, call.replicated)
        lengths, key_lengths = self._handshake(groups, call, rows, entry)
        split = SplitCall(
            groups=groups,
            shares=partition_heads(call.query.shape[2], call.key.shape[2], groups.ulysses.size),
            rows=rows,
            lengths=lengths,
            key_lengths=key_lengths,
        )
        with recording(self.times):
            return self._exchange_and_attend(split, call, entry)

    def _exchange_and_attend(
        self, split: SplitCall, call: AttentionCall, entry: ScheduleEntry
    ) -> torch.Tensor:
        if split.groups.ring.size > 1:
            return self._attend_in_ring(split, call)
        plain = call.mask is None and call.gate is None and not call.is_listed()
        if plain and not call.wants_gradient():
            count = num_head_groups(split, entry)
            if count > 1:
                return attend_in_head_groups(entry.primary, split, call, count)
        q, k, v, gate = split.joined(split.take_heads(*call[:3], call.gate))
        heads = AttentionCall(
            q,
            k,
            v,
            _whole_mask(split, call),
            gate,
            off_grid=call.off_grid,
            first_head=split.heads[0],
            cache=call.cache,
            lists=call.lists,
            sink_logits=call.sink_logits,
        )
        with attending(q.device):
            out = super()._attend(heads)
        return split.give_heads(out)

    def _attend_in_ring(self, split: SplitCall, call: AttentionCall) -> torch.Tensor:
        query, keep = call.query, None
        mask = _whole_mask(split, call)
        mask = None if mask is None else mask != 0
        self_attention = self.site.role is not AttentionRole.CROSS and split.same_tokens
        if call.mask is not None and call.mask.dim() == 2 and self_attention:
            keep = call.mask != 0
            if call.wants_gradient():
                # K and V's gradients sum over all queries: zero times NaN would reach every row.
                query = zero_masked_rows(query, keep)
        heads = split.take_heads(query, call.key, call.value, call.gate)
        out = split.give_heads(ring_forward(self, split, heads, mask))
        return out if keep is None else zero_masked_rows(out, keep)

    def _handshake(
        self, groups: ParallelGroups, call: AttentionCall, rows: Rows, entry: ScheduleEntry
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return how many queries and keys each rank brings, once all make the same call."""
        query, key, value, mask, gate = call[:5]
        seq_lens = call.seq_lens
        chosen = entry.primary.selection
        facts = {
            "attention backend": chosen.backend,
            "backend parameters": settings_text(chosen.asked.config),
            "batch size": query.shape[0],
            "heads": f"{[*query.shape[2:]]}, {[*key.shape[2:]]}, {[*value.shape[2:]]}",
            "dtype": f"{query.dtype}, {key.dtype}, {value.dtype}",
            "attn_mask": "none" if mask is None else f"{mask.dim()}-D {mask.dtype}",
            "gate_compress": "none" if gate is None else f"{[*gate.shape[2:]]} {gate.dtype}",
            "video": _video(),
            "replicated tokens": (rows.prefix, rows.suffix, rows.in_front),
            "seq_lens": None if seq_lens is None else tuple(seq_lens),
            "gradients": call.wants_gradient(),
            "guidance branch": _branch(),
            "cache": _past_of(call),
            "mask of blocks": type(call.lists).__name__,
            "sink_logits": call.sink_logits is not None,
        }
        counts = handshake(
            groups,
            self._name_of_calls(),
            facts,
            (rows.query, rows.key),
            _gate_refusal(call),
            progress=count_exchange(),
            wait=query.device.type == "cpu",
        )
        lengths, key_lengths = (tuple(count[i] for count in counts) for i in range(2))
        if seq_lens is not None and tuple(seq_lens) != lengths:
            raise UsageError(
                f"seq_lens must hold the tokens of each rank, {list(lengths)}, got {list(seq_lens)}"
            )
        return lengths, key_lengths


def _whole_mask(split: SplitCall, call: AttentionCall) -> torch.Tensor | None:
    """Return the mask of the tokens of all ranks, or None."""
    if call.mask is None:
        return None
    return split.gather_mask(call.mask) if call.whole_mask is None else call.whole_mask


def _mask_refusal(call: AttentionCall, groups: ParallelGroups) -> UsageError | None:
    """Return why this rank cannot make a call with such a mask, whatever the others do."""
    mask, key = call.mask, call.key
    if mask is None:
        return None
    wanted = (key.shape[0], key.shape[1])
    narrow = mask.dim() == 4 and tuple(mask.shape[1:3]) == (1, 1)
    if not (mask.dim() == 2 or narrow) or (mask.shape[0], mask.shape[-1]) != wanted:
        return UsageError(
            f"attn_mask must be [B, Sk] = {list(wanted)} or [B, 1, 1, Sk], the part of this "
            f"rank, where tokens are split over ranks, got {list(mask.shape)}"
        )
    if groups.ring.size > 1 and mask.dtype.is_floating_point:
        return UsageError(
            f"attn_mask must be bool or integer in a ring, got {mask.dtype}; use --ring-degree "
            f"1 for masks that are added to the scores"
        )
    return None


def _ring_refusal(call: AttentionCall, groups: ParallelGroups) -> UsageError | None:
    """Return why calls with a cache, lists of blocks or sink logits cannot be part of a ring."""
    if groups.ring.size == 1 or not call.is_listed():
        return None
    return UsageError(
        f"a call with a cache, a mask of blocks or sink_logits must be split by heads alone, got "
        f"a ring of {groups.ring.size}; use --ring-degree 1 and more Ulysses ranks"
    )


def _past_of(call: AttentionCall) -> tuple[object, ...]:
    """Return what a call sees of a cache, as ranks compare it."""
    part = call.cache
    return () if part is None else (*part.cache.running, part.sink, part.window, part.cut)


def _video() -> str:
    """Return where the video of the running denoiser call lies, as ranks compare it."""
    context = current_forward_context()
    if context is None or context.latent_grid is None:
        return "unknown"
    span = context.text_span
    text = "" if span is None else f", text {'before' if span.start == 0 else 'behind'} it"
    return f"{context.latent_grid}{text}"


def _branch() -> str | None:
    context = current_forward_context()
    return None if context is None else context.cfg_branch


def _gate_refusal(call: AttentionCall) -> UsageError | None:
    query, gate = call.query, call.gate
    if gate is None or gate.shape == query.shape:
        return None
    return UsageError(
        f"the gate must have the shape of query, {list(query.shape)}, got {list(gate.shape)}"
    )


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
            supported_attention_backends=supported_attention_backends,
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
        cache: "LayerCache | None" = None,
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
        split = tokens_are_split()
        try:
            replicated = all_or_none(replicated_q, replicated_k, replicated_v, "replicated_")
            check_seq_lens(seq_lens, q, exclusive=replicated is not None, split=split)
            if replicated is not None:
                query, key, value = (
                    join_tokens(own, shared, (name, f"replicated_{name}"))
                    for name, own, shared in zip("qkv", (q, k, v), replicated, strict=True)
                )
        except MultimodalGenError as error:
            raise self.announced(error, split=split) from None
        if replicated is None:
            call = AttentionCall(q, k, v, seq_lens=seq_lens, cache=cache, sink_logits=sink_logits)
            return self.attend(call), None
        suffix = (0, replicated[0].shape[1], 0)
        out = self.attend(
            AttentionCall(
                query, key, value, replicated=suffix, cache=cache, sink_logits=sink_logits
            )
        )
        return out[:, : q.shape[1]], out[:, q.shape[1] :]


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
        split = tokens_are_split()
        try:
            check_no_replicated(replicated_q, replicated_k, replicated_v)
            check_seq_lens(seq_lens, q, exclusive=False, split=split)
        except MultimodalGenError as error:
            raise self.announced(error, split=split) from None
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
            is_cross_attention=is_cross_attention,
            skip_sequence_parallel=skip_sequence_parallel,
            enable_packed_qkv_input_a2a=enable_packed_qkv_input_a2a,
        )
        super().__init__(
            num_heads,
            head_size,
            num_kv_heads,
            softmax_scale,
            causal,
            supported_attention_backends=supported_attention_backends,
            default_attention_backend=default_attention_backend,
            role=AttentionRole.CROSS if is_cross_attention else AttentionRole.SELF,
            compute_dtype=compute_dtype,
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
        attn_mask: "torch.Tensor | Lists | None" = None,
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
        cache: "LayerCache | None" = None,
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
        mask, lists = attn_mask, None
        if mask is not None and not isinstance(mask, torch.Tensor):
            mask, lists = lists_or_mask(mask)
        skip = self.skip_sequence_parallel or skip_sequence_parallel_override
        split = tokens_are_split() and not skip
        replicated = (num_replicated_prefix, num_replicated_suffix, num_replicated_kv_prefix)
        try:
            check_exchange(skip_sequence_parallel_override, qkv_pre_all_to_all)
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
            raise self.announced(error, split=split) from None
        return self.attend(
            AttentionCall(
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
                lists=lists,
                sink_logits=sink_logits,
            )
        )

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
            raise self.announced(
                error, split=tokens_are_split() and not self.skip_sequence_parallel
            ) from None
        return self.forward(q, k, v, num_replicated_kv_prefix=k_prefix.shape[1])
