"""The parts of a ring, computed by whichever kernel of a layer gives the log-sum-exp.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from dataclasses import replace

import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.runtime.distributed.ring import (
    AttendPart,
    KeyPart,
    RingInputs,
    part_attention,
    ring_attention,
)
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionImpl
from multimodal_gen.runtime.layers.attention.backends.common import attend_to_nothing
from multimodal_gen.runtime.layers.attention.binding import Binding
from multimodal_gen.runtime.layers.attention.call import AttentionCall, SplitCheck
from multimodal_gen.runtime.layers.attention.kinds.gate import check_gate
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.layers.attention.selector import Selection
from multimodal_gen.runtime.managers.forward_context import ForwardContext, current_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum


def ring_forward(
    layer: AttentionLayer,
    bound: Binding,
    inputs: RingInputs,
    mask: torch.Tensor | None,
    num_ranks: int,
    *,
    check: SplitCheck | None = None,
) -> torch.Tensor:
    """Return attention of a rank's heads and part of the sequence over the whole sequence.

    Args:
        layer: whose call it is.
        bound: what computes the parts.
        inputs: what this rank brings.
        mask: bool [B, Sk] or [B, 1, 1, Sk] of all keys, or None.
        num_ranks: ranks that share the sequence.
        check: looks at the parts; None for nothing. Not at those of a sparse method.

    Returns:
        [B, prefix + S + suffix, h, Dv].

    Raises:
        UnsupportedBackendError: a backend that was asked for cannot be part of a ring.
    """
    _check_schedule(layer, num_ranks)
    whole = AttentionCall(inputs.query, inputs.key, inputs.value, gate=inputs.gate)
    training, context = whole.wants_gradient(), current_forward_context()
    bound, gated = _by_rule(bound, inputs, context), None
    if inputs.gate is not None:
        tokens = slice(inputs.call.prefix, inputs.query.shape[1] - inputs.call.suffix)
        own = whole._replace(query=inputs.query[:, tokens], mask=mask)
        gated = check_gate(bound, layer.gated(), own).method
    for part in (bound.method, gated):
        reason = None if part is None else part.limits.ring_gradients
        if training and reason is not None:
            raise UnsupportedBackendError(
                f"attention backend {bound.selection.label} must not get inputs that require grad "
                f"in a ring: it has no backward there, for {reason}; call it under "
                f"torch.no_grad(), or use --ring-degree 1"
            )
    if bound.method is not None and Feature.RING in bound.features:
        bound = bound.with_features(Feature.BACKWARD) if training else bound
        assert bound.method is not None, "what trains it is the same method"
        return bound.count(bound.method.forward_ring(inputs, context))
    causal = layer.geometry.causal
    by_definition = mask is not None and causal
    if by_definition:  # leaving out keys would move the diagonal of the kernels
        bound.reroute(_by_definition(bound.selection))
    needs = (Feature.RING, *((Feature.BACKWARD,) if training else ()))

    def computed_by(bound: Binding) -> tuple[Binding, AttendPart]:
        full = bound.with_features(*needs, causal_in_mask=causal)
        return full, _attend_part(layer, full, bound.with_features(*needs) if causal else full)

    full, attend = computed_by(bound)
    if check is not None:
        attend = check.part(attend, computed_by(bound.exact(check.reason))[1])
    shared = (inputs.shared_key, inputs.shared_value)
    out = ring_attention(inputs.query, inputs.key, inputs.value, *shared, attend, inputs.call)
    if not by_definition:
        full.count(out)  # as one call, however many parts there are
    return out if gated is None else gated.add_branch_in_ring(out, inputs, context)


def _by_rule(bound: Binding, inputs: RingInputs, context: ForwardContext | None) -> Binding:
    """Return what serves a call, which a method's own rule may leave dense; see `binding_at`."""
    call, method = inputs.call, bound.method
    if method is None:
        return bound
    reason = method.ruled_dense(call.prefix + sum(call.lengths) + call.suffix, context)
    return bound if reason is None else bound.dense(reason)


def _check_schedule(layer: AttentionLayer, num_ranks: int) -> None:
    """Refuse a backend that was asked for, before the first of its steps.

    Raises:
        UnsupportedBackendError: it cannot be part of a ring.
    """
    for bound in (entry.primary for entry in layer.schedule()):
        reason = bound.impl.limits.ring
        if reason is None and Feature.RING not in bound.features:
            reason = "it gives no log-sum-exp to merge by"
            if bound.is_sparse:
                reason = (
                    "what it attends to depends on all tokens of a head, which a ring never joins"
                )
        if reason is not None and bound.selection.named:
            raise UnsupportedBackendError(
                f"attention backend {bound.selection.label} must not be part of a ring: "
                f"{reason}; use --ring-degree 1 --ulysses-degree {num_ranks}, or "
                f"choose another backend"
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


def _attend_part(layer: AttentionLayer, full: Binding, diagonal: Binding) -> AttendPart:
    """Return what computes a part: one that is seen in full, or one on the diagonal."""

    def attend(query: torch.Tensor, part: KeyPart) -> tuple[torch.Tensor, torch.Tensor]:
        if part.mask is None:
            impl = (diagonal if part.causal else full).impl
            return impl.forward_lse(query, part.key, part.value)
        if part.causal:
            return part_attention(query, part, layer.geometry.softmax_scale)
        if full.impl.masks_lse:
            return full.impl.forward_lse(query, part.key, part.value, part.mask)
        return _attend_to_kept(full.impl, query, part, part.mask)

    return attend


def _attend_to_kept(
    impl: AttentionImpl, query: torch.Tensor, part: KeyPart, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave padding out, sample by sample: most kernels give no log-sum-exp under a mask.

    For them, how much is left has to reach the host.
    """
    parts = []
    for sample, kept in enumerate(mask):
        positions = kept.nonzero().flatten()
        one = slice(sample, sample + 1)
        q, k, v = (query[one], *(x[one].index_select(1, positions) for x in (part.key, part.value)))
        parts.append(impl.forward_lse(q, k, v) if len(positions) else attend_to_nothing(q, v))
    outs, stats = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(stats)
