"""Attention layers whose tokens are split over ranks: Ulysses, ring, or both.

Within a Ulysses group tokens are exchanged for heads, so a backend sees the whole sequence (under a
ring: a chunk of it) with some of the heads. Tokens that all ranks hold, such as text, are never
exchanged: a rank takes its heads of them, and they are where they were in the sequence. Between
Ulysses groups keys and values travel round a ring.

Shapes: B batch, S tokens of a rank, H heads, D head size; q/k suffix = query/key side.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from multimodal_gen.errors import MultimodalGenError, UsageError
from multimodal_gen.runtime.distributed.collectives import partition_heads
from multimodal_gen.runtime.distributed.groups import ParallelGroups, parallel_groups
from multimodal_gen.runtime.distributed.handshake import handshake
from multimodal_gen.runtime.distributed.timing import Times, attending, recording
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.call import (
    are_tensors,
    autocast,
    autocasts,
    fits,
    misfit,
    no_tensor,
    wants_gradient,
)
from multimodal_gen.runtime.layers.attention.config import settings_text
from multimodal_gen.runtime.layers.attention.custom_ops import outside_graphs, parallel_attention_op
from multimodal_gen.runtime.layers.attention.masks import zero_masked_rows
from multimodal_gen.runtime.layers.attention.report import LayerReport
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.schedule import Route
from multimodal_gen.runtime.layers.attention.sequence_parallel.ring import attend_in_ring
from multimodal_gen.runtime.layers.attention.sequence_parallel.ulysses import (
    Rows,
    SplitCall,
    attend_in_chunks,
    next_turn,
    num_chunks,
)
from multimodal_gen.runtime.managers.forward_context import current_forward_context

__all__ = ["SplitAttentionLayer", "tokens_are_split"]


def tokens_are_split() -> bool:
    """Whether this process is one of several ranks that share a sequence."""
    groups = parallel_groups()
    return groups is not None and groups.sequence.size > 1


class SplitAttentionLayer(AttentionLayer):
    """An attention layer that exchanges tokens where ranks share a sequence.

    Attributes:
        times: what its calls take where there are several ranks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.times = Times()

    def run_over_ranks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *,
        replicated: tuple[int, int, int] = (0, 0, 0),
        seq_lens: Sequence[int] | None = None,
        gate: torch.Tensor | None = None,
        skip: bool = False,
    ) -> torch.Tensor:
        """Attend to the tokens of all ranks, as one opaque operator while `torch.compile` traces.

        On one device, and where it is told to skip, it is `run`.

        Args:
            query: [B, Sq, H, D].
            key: [B, Sk, Hkv, D].
            value: [B, Sk, Hkv, Dv].
            attn_mask: [B, Sk] or [B, 1, 1, Sk], this rank's part.
            replicated: tokens that all ranks hold: in front, at the end, keys in front.
            seq_lens: tokens of each rank; ranks tell each other when None.
            gate: [B, Sq, H, D] weight of the coarse branch, or None.
            skip: exchange nothing.

        Returns:
            [B, Sq, H, Dv].
        """
        if skip or not tokens_are_split():
            return self.run(query, key, value, attn_mask, gate)
        if not torch.compiler.is_compiling():
            return self.attend_split(query, key, value, attn_mask, replicated, seq_lens, gate)
        if autocasts(query.device.type):
            query, key, value = autocast(query, key, value)
        if wants_gradient(query, key, value, gate):
            return _outside_the_graph(
                self, query, key, value, attn_mask, replicated, seq_lens, gate
            )
        return parallel_attention_op(
            query, key, value, attn_mask, self._layer_id, replicated, seq_lens, gate
        )

    def told(self, refusal: MultimodalGenError, split: bool) -> MultimodalGenError:
        """Return why this rank cannot make a call, once the others have heard it.

        Those that make the call would take the next one of this rank for the same.

        Args:
            refusal: the error of an argument.
            split: whether the call would have exchanged tokens.
        """
        groups = parallel_groups()
        if split and groups is not None and not torch.compiler.is_compiling():
            handshake(groups, self._name_of_calls(), {}, (), refusal, progress=next_turn())
        return refusal

    def _name_of_calls(self) -> str:
        return f"{type(self).__name__} {self.site.name}".strip()

    def attend_split(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        replicated: tuple[int, ...],
        seq_lens: Sequence[int] | None,
        gate: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `run_over_ranks`.

        Raises:
            UsageError: shapes do not fit, or differ between ranks where they must not.
            RankError: another rank refuses its call, or makes none.
            UnsupportedBackendError: no backend can honour the call.
        """
        groups = parallel_groups()
        assert groups is not None, "callers know"
        name = self._name_of_calls()
        refusal = self._refusal(groups, query, key, value, attn_mask)
        if refusal is not None:
            raise self.told(refusal, split=True)
        if autocasts(query.device.type):
            query, key, value = autocast(query, key, value)
            with torch.autocast(query.device.type, enabled=False):
                return self.attend_split(query, key, value, attn_mask, replicated, seq_lens, gate)
        try:
            route = self.route(query)  # what is bound for these tensors may be new
        except MultimodalGenError as error:
            raise self.told(error, split=True) from None
        rows = Rows.of(query, key, replicated)
        lengths, key_lengths = self._agree(
            groups, name, (query, key, value, attn_mask, gate), rows, seq_lens, route
        )
        call = SplitCall(
            groups=groups,
            shares=partition_heads(query.shape[2], key.shape[2], groups.ulysses.size),
            rows=rows,
            lengths=lengths,
            key_lengths=key_lengths,
        )
        self.hold_heads_from(call.heads[0])
        try:
            with recording(self.times):
                if groups.ring.size > 1:
                    return self._attend_in_ring(call, query, key, value, attn_mask, gate)
                if attn_mask is None and gate is None and not wants_gradient(query, key, value):
                    chunks = num_chunks(call, route)
                    if chunks > 1:
                        bound = route.primary
                        return attend_in_chunks(self, bound, call, query, key, value, chunks)
                return self._attend_to_heads(call, query, key, value, attn_mask, gate)
        finally:
            self.hold_heads_from(0)

    def attend_now(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to this rank's tensors alone; see `AttentionLayer.attend_now`."""
        if parallel_groups() is None:
            return super().attend_now(query, key, value, attn_mask, gate)
        with recording(self.times), attending(query.device):
            return super().attend_now(query, key, value, attn_mask, gate)

    def report(self) -> LayerReport:
        """Return what the layer ran so far, and why, and what time it took."""
        return replace(super().report(), times=self.times.taken())

    def whole_mask(self, call: SplitCall, mask: torch.Tensor) -> torch.Tensor:
        """Return the mask of all keys of the sequence, of which `mask` is this rank's part."""
        return call.gather_mask(mask)

    def _attend_to_heads(
        self,
        call: SplitCall,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        gate: torch.Tensor | None,
    ) -> torch.Tensor:
        q, k, v, gate = call.joined(call.take_heads(query, key, value, gate))
        mask = None if attn_mask is None else self.whole_mask(call, attn_mask)
        with attending(q.device):
            out = self.attend_fitting(q, k, v, mask, gate=gate)
        return call.give_heads(out)

    def _attend_in_ring(
        self,
        call: SplitCall,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        gate: torch.Tensor | None,
    ) -> torch.Tensor:
        keep = None
        mask = None if attn_mask is None else self.whole_mask(call, attn_mask) != 0
        self_attention = self.site.role is not AttentionRole.CROSS and call.same_tokens
        if attn_mask is not None and attn_mask.dim() == 2 and self_attention:
            keep = attn_mask != 0
            if wants_gradient(query, key, value):
                # K and V's gradients sum over all queries: zero times NaN would reach every row.
                query = zero_masked_rows(query, keep)
        heads = call.take_heads(query, key, value, gate)
        out = call.give_heads(attend_in_ring(self, call, heads, mask))
        return out if keep is None else zero_masked_rows(out, keep)

    def _agree(
        self,
        groups: ParallelGroups,
        name: str,
        given: tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any, Any],
        rows: Rows,
        seq_lens: Sequence[int] | None,
        route: Route,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return how many queries and keys each rank brings, once all make the same call."""
        query, key, value, mask, gate = given
        chosen = route.primary.selection
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
            "gradients": wants_gradient(query, key, value, gate),
            "guidance branch": _branch(),
        }
        counts = handshake(
            groups,
            name,
            facts,
            (rows.query, rows.key),
            _gate_refusal(gate, query),
            progress=next_turn(),
            wait=query.device.type == "cpu",
        )
        lengths, key_lengths = (tuple(count[i] for count in counts) for i in range(2))
        if seq_lens is not None and tuple(seq_lens) != lengths:
            raise UsageError(
                f"seq_lens must hold the tokens of each rank, {list(lengths)}, got {list(seq_lens)}"
            )
        return lengths, key_lengths

    def _refusal(
        self,
        groups: ParallelGroups,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> UsageError | None:
        """Return why this rank cannot make the call, whatever the others do; or None."""
        if not are_tensors(query, key, value, mask):
            return no_tensor(query=query, key=key, value=value, attn_mask=mask)
        if not fits(query.shape, key.shape, value.shape, self.geometry):
            return misfit(query, key, value, self.geometry)
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


@outside_graphs
def _outside_the_graph(layer: SplitAttentionLayer, *inputs: Any) -> torch.Tensor:
    """Attend where gradients are needed: autograd cannot look into the opaque operator."""
    return layer.attend_split(*inputs)


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


def _gate_refusal(gate: torch.Tensor | None, query: torch.Tensor) -> UsageError | None:
    if gate is None or gate.shape == query.shape:
        return None
    return UsageError(
        f"the gate must have the shape of query, {list(query.shape)}, got {list(gate.shape)}"
    )
