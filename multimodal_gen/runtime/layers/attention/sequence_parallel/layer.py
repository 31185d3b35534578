"""Attention layers whose tokens are split over ranks: Ulysses, ring, or both.

Within a Ulysses group tokens are exchanged for heads, so a backend sees the whole sequence (under a
ring: a part of it) with some of the heads. Tokens that all ranks hold, such as text, are never
exchanged: a rank takes its heads of them, and they are where they were in the sequence. Between
Ulysses groups keys and values travel round a ring.

Shapes: B batch, S tokens of a rank, H heads, D head size; q/k suffix = query/key side.
"""

from dataclasses import replace
from typing import Any

import torch

from multimodal_gen.errors import MultimodalGenError, UsageError
from multimodal_gen.runtime.distributed.collectives import partition_heads
from multimodal_gen.runtime.distributed.groups import ParallelGroups, parallel_groups
from multimodal_gen.runtime.distributed.handshake import handshake
from multimodal_gen.runtime.distributed.timing import Times, attending, recording
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.binding import Binding
from multimodal_gen.runtime.layers.attention.call import AttentionCall, device_type
from multimodal_gen.runtime.layers.attention.config import settings_text
from multimodal_gen.runtime.layers.attention.masks import zero_masked_rows
from multimodal_gen.runtime.layers.attention.report import LayerReport
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.sequence_parallel.ring import ring_forward
from multimodal_gen.runtime.layers.attention.sequence_parallel.ulysses import (
    Rows,
    SplitCall,
    attend_in_head_groups,
    count_exchange,
    num_head_groups,
)
from multimodal_gen.runtime.managers.forward_context import current_forward_context

__all__ = ["SequenceParallelLayer", "tokens_are_split"]


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
        kind = device_type(call.query.device)
        if kind != "meta" and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return self._attend_over_ranks(call.autocast(), groups)
        try:
            entry = self.entry_for(call.query)  # what is bound for these tensors may be new
            bound = entry.primary
            if call.no_grid and bound.is_sparse:
                bound = bound.without_grid(call.no_grid)
        except MultimodalGenError as error:
            raise self._refused(call, error) from None
        rows = Rows.of(call.query, call.key, call.replicated)
        lengths, key_lengths = self._handshake(groups, call, rows, bound)
        split = SplitCall(
            groups=groups,
            shares=partition_heads(call.query.shape[2], call.key.shape[2], groups.ulysses.size),
            rows=rows,
            lengths=lengths,
            key_lengths=key_lengths,
        )
        with recording(self.times):
            observed = bool(entry.observers) and not call.no_grid
            return self._exchange_and_attend(split, call, bound, observed=observed)

    def _exchange_and_attend(
        self, split: SplitCall, call: AttentionCall, bound: Binding, *, observed: bool
    ) -> torch.Tensor:
        if split.groups.ring.size > 1:
            return self._attend_in_ring(split, call)
        plain = call.mask is None and call.gate is None and not observed
        extended = (
            call.cache is not None or call.block_mask is not None or call.sink_logits is not None
        )
        if plain and not extended and not (torch.is_grad_enabled() and call.wants_gradient()):
            count = num_head_groups(split, bound)
            if count > 1:
                return attend_in_head_groups(bound, split, call, count)
        q, k, v, gate = split.joined(split.take_heads(*call[:3], call.gate))
        heads = AttentionCall(
            q,
            k,
            v,
            _whole_mask(split, call),
            gate,
            no_grid=call.no_grid,
            first_head=split.heads[0],
            projection=call.projection,
            cache=call.cache,
            block_mask=call.block_mask,
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
        self, groups: ParallelGroups, call: AttentionCall, rows: Rows, bound: Binding
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return how many queries and keys each rank brings, once all make the same call."""
        query, key, value, mask, gate = call[:5]
        seq_lens = call.seq_lens
        chosen = bound.selection
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
            "gradients": torch.is_grad_enabled() and call.wants_gradient(),
            "guidance branch": _branch(),
            "cache": _past_of(call),
            "mask of blocks": type(call.block_mask).__name__,
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
    if groups.ring.size == 1 or not call.is_extended():
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
