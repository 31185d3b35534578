"""The parts of a ring, computed by whichever kernel of a layer gives the log-sum-exp.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from dataclasses import replace

import torch

from multimodal_gen.errors import UnsupportedBackendError, UsageError
from multimodal_gen.runtime.distributed.ring import (
    AttendPart,
    KeyPart,
    RingCall,
    RingInputs,
    part_attention,
    ring_attention,
)
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer, check_gate
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionImpl,
    provides,
)
from multimodal_gen.runtime.layers.attention.backends.common import attend_to_nothing
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.layers.attention.schedule import ScheduleEntry
from multimodal_gen.runtime.layers.attention.selector import Selection
from multimodal_gen.runtime.layers.attention.sequence_parallel.ulysses import (
    HeadsOfRank,
    SplitCall,
)
from multimodal_gen.runtime.managers.forward_context import current_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum

__all__ = ["ring_forward"]


def ring_forward(
    layer: AttentionLayer, call: SplitCall, heads: HeadsOfRank, mask: torch.Tensor | None
) -> torch.Tensor:
    """Return attention of a rank's heads and part of the sequence over the whole sequence.

    Args:
        layer: whose backend computes the parts.
        call: how the tokens are split.
        heads: this rank's heads of its Ulysses group's tokens.
        mask: bool [B, Sk] or [B, 1, 1, Sk] of all keys, or None.

    Returns:
        [B, prefix + S + suffix, h, Dv].

    Raises:
        UnsupportedBackendError: a backend that was asked for cannot be part of a ring.
        UsageError: a causal call has other keys than queries.
    """
    if layer.geometry.causal and call.lengths != call.key_lengths:
        raise UsageError(
            f"a causal layer must have as many keys as queries on each rank of a ring, got "
            f"{list(call.lengths)} queries and {list(call.key_lengths)} keys"
        )
    _check_schedule(layer, call)
    inputs = _ring_inputs(layer, call, heads, mask)
    entry = layer.entry_for(inputs.query)
    whole = AttentionCall(inputs.query, inputs.key, inputs.value, gate=inputs.gate)
    training, context = whole.wants_gradient(), current_forward_context()
    bound, gated = entry.primary, None
    if inputs.gate is not None:
        own = whole._replace(query=heads.tokens[0], mask=mask)
        gated = check_gate(entry, layer.gated_entry(), own).primary.impl
    if bound.has_ring:
        if training:
            if not bound.impl.trains_in_ring:
                raise _no_gradients(entry)
            bound = entry.with_features(Feature.BACKWARD)
        out = bound.impl.forward_ring(inputs, context)
        bound.calls += 1
        return out
    if training and gated is not None and not gated.trains_in_ring:
        raise _no_gradients(entry)
    if mask is not None and layer.geometry.causal:
        # Leaving out keys would move the diagonal of the kernels.
        layer.detour(_by_definition(bound.selection))
    attend = _attend_part(layer, entry, training=training)
    shared = (inputs.shared_key, inputs.shared_value)
    out = ring_attention(inputs.query, inputs.key, inputs.value, *shared, attend, inputs.call)
    return out if gated is None else gated.add_coarse_ring(out, inputs, context)


def _ring_inputs(
    layer: AttentionLayer, call: SplitCall, heads: HeadsOfRank, mask: torch.Tensor | None
) -> RingInputs:
    rows, me = call.rows, call.groups.ulysses.index
    query = heads.tokens[0]
    if rows.prefix or rows.suffix:
        query = torch.cat((heads.front[0], query, heads.back[0]), dim=1)
    (key, value), front, back = (
        [call.shares.arrange_keys(x, me) for x in stretch[1:]]
        for stretch in (heads.tokens, heads.front, heads.back)
    )
    shared: list[torch.Tensor | None] = [None, None]
    if front[0].shape[1] or back[0].shape[1]:
        shared = [torch.cat(stretches, dim=1) for stretches in zip(front, back, strict=True)]
    keep = shared_keep = None
    if mask is not None:
        mask = mask.flatten(1)
        stretches = [rows.prefix + rows.in_front, sum(call.key_lengths), rows.suffix]
        before, keep, after = torch.split(mask, stretches, dim=1)
        shared_keep = torch.cat((before, after), dim=1)
    ring = RingCall(
        group=call.groups.ring,
        lengths=call.ring_lengths,
        num_queries=heads.tokens[0].shape[1],
        scale=layer.geometry.softmax_scale,
        causal=layer.geometry.causal,
        prefix=rows.prefix,
        suffix=rows.suffix,
        keep=keep,
        shared_keep=shared_keep,
    )
    return RingInputs(
        call=ring,
        query=query,
        key=key,
        value=value,
        shared_key=shared[0],
        shared_value=shared[1],
        gate=None if heads.gate is None else heads.gate.to(query.dtype),
        first_head=call.heads[0],
    )


def _check_schedule(layer: AttentionLayer, call: SplitCall) -> None:
    """Refuse a backend that somebody asked for, before the first of its steps.

    Raises:
        UnsupportedBackendError: it cannot be part of a ring.
    """
    for entry in layer.schedule():
        reason = _reason_against(entry)
        if reason is not None:
            raise UnsupportedBackendError(
                f"attention backend {entry.primary.selection.label} must not be part of a ring: "
                f"{reason}; use --ring-degree 1 --ulysses-degree {call.groups.sequence.size}, or "
                f"choose another backend"
            )


def _reason_against(entry: ScheduleEntry) -> str | None:
    """Return why what somebody asked for cannot be part of a ring, or None."""
    selection, impl = entry.primary.selection, entry.primary.impl
    if not (selection.source.explicit and selection.asked.backend is selection.backend):
        return None
    reason = impl.ring_reason()
    if reason is not None or Feature.RING in entry.primary.features:
        return reason
    if selection.backend.is_sparse and not provides(impl, "forward_ring"):
        return "what it attends to depends on all tokens of a head, which a ring never joins"
    return "it gives no log-sum-exp to merge by"


def _no_gradients(entry: ScheduleEntry) -> UnsupportedBackendError:
    return UnsupportedBackendError(
        f"attention backend {entry.primary.selection.label} must not get inputs that require grad "
        f"in a ring: it has no backward there; call it under torch.no_grad(), or use "
        f"--ring-degree 1"
    )


def _by_definition(selection: Selection) -> Selection:
    """Return what serves causal parts of a ring under a key mask."""
    return replace(
        selection,
        backend=AttentionBackendEnum.TORCH_SDPA,
        variant="definition",
        reason=(
            f"{selection.label} takes no key mask in a causal ring, whose parts under the diagonal "
            f"are then computed as attention is defined"
        ),
    )


def _attend_part(layer: AttentionLayer, entry: ScheduleEntry, *, training: bool) -> AttendPart:
    """Return what computes a part; it counts as one call however many parts there are."""
    causal = layer.geometry.causal
    needs = (Feature.RING, *((Feature.BACKWARD,) if training else ()))
    bound = entry.with_features(*needs, causal_in_mask=causal)
    bound.calls += 1
    full = bound.impl
    diagonal = entry.with_features(*needs).impl if causal else full

    def attend(query: torch.Tensor, part: KeyPart) -> tuple[torch.Tensor, torch.Tensor]:
        if part.keep is None:
            impl = diagonal if part.causal else full
            return impl.forward_lse(query, part.key, part.value)
        if part.causal:
            return part_attention(query, part, layer.geometry.softmax_scale)
        if bound.masks_lse:
            return full.forward_lse_masked(query, part.key, part.value, part.keep)
        return _attend_to_kept(full, query, part.key, part.value, part.keep)

    return attend


def _attend_to_kept(
    impl: AttentionImpl,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keep: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave padding out, sample by sample: most kernels give no log-sum-exp under a mask.

    For them, how much is left has to reach the host.
    """
    parts = []
    for sample, kept in enumerate(keep):
        positions = kept.nonzero().flatten()
        one = slice(sample, sample + 1)
        q, k, v = (query[one], *(x[one].index_select(1, positions) for x in (key, value)))
        parts.append(impl.forward_lse(q, k, v) if len(positions) else attend_to_nothing(q, v))
    outs, stats = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(stats)
