"""Calls with a gate, which weighs the coarse branch of a sparse method.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention.binding import Binding
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.managers.forward_context import current_forward_context


def check_gate(bound: Binding, gated: Binding | None, call: AttentionCall) -> Binding:
    """Return what has a coarse branch, once the gate is known to fit.

    Args:
        bound: what serves the step.
        gated: what has the coarse branch, of the same schedule, or None.
        call: a call with a gate.

    Raises:
        UsageError: nothing has a coarse branch, the gate does not fit, or there is a mask.
    """
    if gated is None:
        raise UsageError(
            f"the gate must be None unless the backend is video_sparse_attn, this layer runs "
            f"{bound.selection.backend}, which has no coarse branch to weigh"
        )
    query, gate, attn_mask = call.query, call.gate, call.mask
    assert gate is not None, "callers know"
    if attn_mask is not None or gate.shape != query.shape:
        mask = "no mask" if attn_mask is None else f"a mask of shape {list(attn_mask.shape)}"
        raise UsageError(
            f"the gate must have the shape of query, {list(query.shape)}, and come without a mask, "
            f"got {list(gate.shape)} with {mask}"
        )
    return gated


def attend_gated(bound: Binding, gated: Binding | None, call: AttentionCall) -> torch.Tensor:
    """Return attention plus the weighed coarse branch, [B, Sq, H, Dv].

    Dense steps of a schedule get the branch too: they are its sparse ones at sparsity 0.

    Args:
        bound: what serves the step.
        gated: what has a coarse branch, of the same schedule, or None.
        call: a call with a gate.

    Raises:
        UsageError: see `check_gate`.
    """
    coarse = check_gate(bound, gated, call)
    if call.wants_gradient():
        bound, coarse = (b.with_features(Feature.BACKWARD) for b in (bound, coarse))
    assert call.gate is not None, "callers know"
    gate = call.gate.to(call.query.dtype)
    out = bound.attend(call._replace(gate=gate))
    if "gate" in bound.impl.takes:
        return out
    assert coarse.method is not None, "what takes a gate is a sparse method"
    return coarse.method.add_branch(out, *call[:3], gate, current_forward_context())
