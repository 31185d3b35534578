"""Calls with a mask of blocks, or with sink logits.

A mask of blocks runs on the block-sparse engine, and the report says so; FlexAttention takes its
own. Sink logits, which only make a head's weights smaller, are applied by the log-sum-exp:

    out' = out * Z / (Z + exp(sink)) = out * sigmoid(lse - sink),   Z = exp(lse)

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from dataclasses import replace

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention, kernel_for
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, flatten, unflatten
from multimodal_gen.kernels.coded_attention.api import coded_attention, coded_kernel_for
from multimodal_gen.kernels.part_merge.api import merge_two
from multimodal_gen.kernels.part_merge.reference import merge_two_reference
from multimodal_gen.kernels.tensors import loadable
from multimodal_gen.runtime.layers.attention.backends.block_masks import (
    AnyBlockMask,
    Plans,
    check_block_mask,
    plans_of,
)
from multimodal_gen.runtime.layers.attention.backends.flex_attn import FlexAttentionImpl
from multimodal_gen.runtime.layers.attention.binding import Binding
from multimodal_gen.runtime.layers.attention.call import AttentionCall, LayerGeometry
from multimodal_gen.runtime.layers.attention.causal_cache import SeenCodes
from multimodal_gen.runtime.layers.attention.request import AttentionRole, Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_BY_BLOCKS = "the mask is one of blocks"


def check_blocks(call: AttentionCall, geometry: LayerGeometry) -> None:
    """Refuse a mask of blocks or sink logits that a call cannot have, and what excludes a cache."""
    cache, blocks, logits = call.cache, call.block_mask, call.sink_logits
    what = " and ".join(
        name
        for name, x in (("a cache", cache), ("a mask of blocks", blocks), ("sink_logits", logits))
        if x is not None
    )
    excluded = (
        ("attn_mask", call.mask is not None),
        ("a gate", call.gate is not None),
        ("replicated tokens", any(call.replicated)),
        ("both a cache and a mask of blocks", cache is not None and blocks is not None),
        ("gradients", call.wants_gradient() and (cache is not None or logits is not None)),
        ("causal=True", geometry.causal and (cache is not None or blocks is not None)),
        ("cross-attention", cache is not None and geometry.site.role is AttentionRole.CROSS),
    )
    for name, given in excluded:
        if given:
            raise UsageError(f"a call with {what} must come without {name}; leave one of them out")
    own = (1, call.query.shape[2], geometry.num_heads)
    if blocks is not None and (found := _num_heads(blocks)) not in own:
        raise UsageError(
            f"a mask of blocks must be of one head or of all {geometry.num_heads}, got one of "
            f"{found} heads"
        )
    if blocks is not None and not isinstance(blocks, BlockPlan):
        check_block_mask(blocks, call.query.shape[0], call.query.shape[1], call.key.shape[1])
    if logits is None or (
        isinstance(logits, torch.Tensor)
        and logits.shape == (geometry.num_heads,)
        and logits.is_floating_point()
        and logits.device == call.query.device
    ):
        return
    got = (
        f"{list(logits.shape)} {logits.dtype} on {logits.device}"
        if isinstance(logits, torch.Tensor)
        else f"a {type(logits).__name__}"
    )
    raise UsageError(
        f"sink_logits must be a floating tensor of one logit per head, [{geometry.num_heads}] on "
        f"{call.query.device}, got {got}"
    )


def _num_heads(mask: AnyBlockMask) -> int:
    """Return the heads of a mask of blocks, 1 where it is that of any."""
    if isinstance(mask, BlockPlan):
        return max((x.shape[1] for x in mask.tensors() if x.dim() > 1), default=1)
    return mask.kv_indices.shape[1]


def attend_blocks(bound: Binding, call: AttentionCall) -> torch.Tensor:
    """Return attention of a call with a mask of blocks or sink logits, [B, Sq, H, Dv].

    Sparse methods choose their keys themselves: a mask of blocks makes their calls dense.
    """
    if call.block_mask is None:
        return attend_on_backend(bound, call)
    out = _on_flex_attention(bound, call)
    if out is not None:
        return out
    plans = _plans(call)
    if bound.is_sparse:
        bound = bound.without_grid(_BY_BLOCKS)
    return attend_on_engine(bound, call, plans, _BY_BLOCKS)


def attend_on_backend(bound: Binding, call: AttentionCall) -> torch.Tensor:
    """Return the output on the layer's own backend, as sink logits, if any, leave it."""
    if call.sink_logits is not None:
        bound = bound.with_features(Feature.LSE)
        return apply_sink(call, *bound.count(bound.impl.forward_lse(*call[:3])))
    if bound.by_shape is not None:
        bound = bound.by_shape.at(call)
    return bound.attend(call)


def attend_on_engine(
    bound: Binding,
    call: AttentionCall,
    plans: Plans,
    why: str,
    *,
    codes: SeenCodes | None = None,
) -> torch.Tensor:
    """Return the output on the block-sparse engine, as sink logits, if any, leave it.

    Args:
        bound: what would serve the call if it took a mask of blocks.
        call: the call.
        plans: what is attended to.
        why: why there are blocks, for the report.
        codes: what else is attended to.
    """
    query, key, value = (x if loadable(x) else x.contiguous() for x in call[:3])
    scale, parts = bound.demand.geometry.softmax_scale, []
    kernels = [kernel_for(query, key, value, plan) for plan in plans]
    merged = call.sink_logits is not None or len(plans) > 1 or codes is not None
    for plan, kernel in zip(plans, kernels, strict=True):
        found = block_sparse_attention(
            query,
            key,
            value,
            plan,
            scale=scale,
            kernel=kernel,
            return_lse=merged,
        )
        parts.append((found, None) if isinstance(found, torch.Tensor) else found)
    takes = "takes no lists of blocks"
    if codes is not None:
        parts.append(coded_attention(query, *codes[:3], scale=scale))
        kernels.append(f"{coded_kernel_for(query)} on codes of {codes.bits} bits")
        takes = "reads no codes"
    out, out_lse = parts[0]
    for more, more_lse in parts[1:]:
        assert out_lse is not None
        assert more_lse is not None
        merge = merge_two_reference if call.wants_gradient() else merge_two
        out, out_lse = merge(out, out_lse, more, more_lse, dtype=query.dtype)
    ran = replace(
        bound.selection,
        backend=AttentionBackendEnum.TRITON_ATTN,
        variant=" and ".join(dict.fromkeys(kernels)),
        reason=f"{bound.selection.label} {takes}, and {why}",
    )
    bound.rerouted[ran] += 1
    return apply_sink(call, out, out_lse)


def apply_sink(call: AttentionCall, out: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
    """Return an output as its sink logits, if any, leave it."""
    logits = call.sink_logits
    if logits is None:
        return out
    assert lse is not None, "it was asked for"
    own = logits[call.first_head : call.first_head + call.query.shape[2]]
    kept = torch.sigmoid(lse - own[:, None].to(lse.dtype))  # [B, H, Sq]
    return (out * kept.transpose(1, 2).unsqueeze(-1)).to(out.dtype)


def _on_flex_attention(bound: Binding, call: AttentionCall) -> torch.Tensor | None:
    """Return the output of FlexAttention, where it is asked for and can take a call's mask."""
    impl, mask = bound.impl, call.block_mask
    if (
        not isinstance(impl, FlexAttentionImpl)
        or mask is None
        or isinstance(mask, BlockPlan)
        or mask.kv_indices.shape[1] not in (1, call.query.shape[2])
        or (call.wants_gradient() and Feature.BACKWARD not in bound.features)
    ):
        return None
    found = impl.forward_blocks(*call[:3], mask, lse=call.sink_logits is not None)
    return apply_sink(call, *bound.count(found))


def _plans(call: AttentionCall) -> Plans:
    """Return the plans of a call's mask of blocks, for the heads that it has."""
    mask = call.block_mask
    assert mask is not None, "callers know"
    if isinstance(mask, BlockPlan):
        return (_of_heads(mask, call),)
    plans = plans_of(mask, call.query.shape[1], call.key.shape[1])
    return tuple(_of_heads(plan, call) for plan in plans)


def _of_heads(plan: BlockPlan, call: AttentionCall) -> BlockPlan:
    """Return a plan for the heads of a call; itself where it is the same for all of them."""
    first, size = call.first_head, call.query.shape[2]
    # Without the order in which kernels start all of the rows.
    tensors, sizes = flatten(replace(plan, order=None))
    own = [x if x.shape[1] in (1, size) else x[:, first : first + size] for x in tensors]
    if all(x is all_heads for x, all_heads in zip(own, tensors, strict=True)):
        return plan
    return unflatten(call.query, call.key, own, sizes)
