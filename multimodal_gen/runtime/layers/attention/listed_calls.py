"""Calls whose keys are chosen before they come: by a cache of chunks, or by lists of blocks.

A cache whose chunks lie in one piece is a plain tensor, which the layer's own backend attends to.
Everything else runs on the block-sparse engine, and the report says so. Sink logits, which only
make a head's weights smaller, are applied by the log-sum-exp of either:

    out' = out * Z / (Z + exp(sink)) = out * sigmoid(lse - sink),   Z = exp(lse)

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention, kernel_for
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.engine import loadable
from multimodal_gen.kernels.part_merge.api import merge_two
from multimodal_gen.kernels.part_merge.reference import merge_two_reference
from multimodal_gen.kernels.tile_order.api import gather_tokens, scatter_tokens
from multimodal_gen.runtime.layers.attention.backends.block_masks import (
    Plans,
    is_block_mask,
    plans_of,
)
from multimodal_gen.runtime.layers.attention.backends.flex_attn import FlexAttentionImpl
from multimodal_gen.runtime.layers.attention.binding import Binding
from multimodal_gen.runtime.layers.attention.call import AttentionCall, LayerGeometry
from multimodal_gen.runtime.layers.attention.causal_cache import CausalCache, LayerCache
from multimodal_gen.runtime.layers.attention.request import AttentionRole, Feature
from multimodal_gen.runtime.managers.forward_context import current_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["Lists", "attend_listed", "check_listed", "lists_or_mask", "with_cache"]

Lists: TypeAlias = "BlockPlan | BlockMask"
"""What a layer takes as a mask of blocks."""

_IN_PIECES = "what a chunk sees lies in pieces of the cache"
_BY_BLOCKS = "the mask is one of blocks"
_OF_SEVERAL = "keys in a cache are those of several calls"
_IN_WINDOWS = "the layer sees windows of it already"


def lists_or_mask(
    attn_mask: "torch.Tensor | Lists | None",
) -> "tuple[torch.Tensor | None, Lists | None]":
    """Return what a layer is given as its mask, apart: a tensor, or lists of blocks."""
    if isinstance(attn_mask, BlockPlan) or is_block_mask(attn_mask):
        return None, attn_mask  # type: ignore[return-value]  # told apart by name
    return attn_mask, None  # type: ignore[return-value]


def with_cache(call: AttentionCall, geometry: LayerGeometry, cache: object) -> AttentionCall:
    """Return a call with its layer's part of a cache, unless it has one or attends to text.

    Args:
        call: the call.
        geometry: what the layer is.
        cache: what the context of the running denoiser call has.

    Raises:
        UsageError: it is no cache, or the layer has no number among its layers.
    """
    if call.cache is not None or geometry.site.role is not AttentionRole.SELF:
        return call
    if not isinstance(cache, CausalCache):
        raise UsageError(f"kv_cache must be a CausalCache or None, got a {type(cache).__name__}")
    layer = geometry.site.layer
    if layer is None or layer >= len(cache.layers):
        raise UsageError(
            f"a layer must have a number below {len(cache.layers)} to find its part of the "
            f"context's cache, got {layer}; pass cache=cache.layers[i], or prefix= to the layer"
        )
    return call._replace(cache=cache.layers[layer])


def check_listed(call: AttentionCall, geometry: LayerGeometry) -> None:
    """Refuse a cache, lists of blocks or sink logits that a call cannot have."""
    cache, lists, logits = call.cache, call.lists, call.sink_logits
    what = " and ".join(
        name
        for name, x in (("a cache", cache), ("a mask of blocks", lists), ("sink_logits", logits))
        if x is not None
    )
    beside = (
        ("attn_mask", call.mask is not None),
        ("a gate", call.gate is not None),
        ("replicated tokens", any(call.replicated)),
        ("both a cache and a mask of blocks", cache is not None and lists is not None),
        ("gradients", call.wants_gradient() and (cache is not None or logits is not None)),
        ("causal=True", geometry.causal and (cache is not None or lists is not None)),
        ("cross-attention", cache is not None and geometry.site.role is AttentionRole.CROSS),
    )
    for name, given in beside:
        if given:
            raise UsageError(f"a call with {what} must come without {name}; leave one of them out")
    if cache is not None and not isinstance(cache, LayerCache):
        raise UsageError(
            f"cache must be a layer's part of a CausalCache, got a {type(cache).__name__}; pass "
            f"cache.layers[i]"
        )
    if cache is not None and not cache.cache.is_running:
        raise UsageError("a chunk must be running, got none; call begin(start, tokens) first")
    own = (1, call.query.shape[2], geometry.num_heads)
    if lists is not None and (found := _num_heads(lists)) not in own:
        raise UsageError(
            f"a mask of blocks must be of one head or of all {geometry.num_heads}, got one of "
            f"{found} heads"
        )
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


def _num_heads(lists: "BlockPlan | BlockMask") -> int:
    """Return the heads of lists of blocks, 1 where they are of any."""
    if isinstance(lists, BlockPlan):
        return max((x.shape[1] for x in lists.tensors() if x.dim() > 1), default=1)
    return lists.kv_indices.shape[1]


def attend_listed(bound: Binding, call: AttentionCall, geometry: LayerGeometry) -> torch.Tensor:
    """Return attention of a call with a cache, lists of blocks, or sink logits.

    Sparse methods choose their keys themselves: over a cache among blocks of what is kept, where
    they can (`AttentionImpl.cut_of_cache`). Their other calls of this kind run dense.

    Args:
        bound: what serves the layer at the running step.
        call: the call; `check_listed` has nothing against it.
        geometry: what the layer is.

    Returns:
        [B, Sq, H, Dv].

    Raises:
        UsageError: the tensors are not those of the running chunk, or of the lists.
        UnsupportedBackendError: the layer's method is sparse, and fallbacks are refused.
    """
    if call.cache is not None:
        return _attend_cached(bound, call, call.cache, geometry)
    plans: Plans = ()
    if call.lists is not None:
        plans = () if _flex_with_mask(bound, call) else _plans(call)
        if bound.is_sparse:
            bound = bound.off_grid(_BY_BLOCKS)
    if plans:
        return _with_sink(call, *_on_the_engine(bound, call, plans, geometry, _BY_BLOCKS))
    return _with_sink(call, *_on_its_backend(bound, call))


def _attend_cached(
    bound: Binding, call: AttentionCall, cache: LayerCache, geometry: LayerGeometry
) -> torch.Tensor:
    """Return attention of the running chunk of a cache, once it is written."""
    tokens = cache.cache.running.tokens
    if call.query.shape[1] != tokens:
        raise UsageError(
            f"query must have the {tokens} tokens of the running chunk, got "
            f"{call.query.shape[1]}; begin() says how many a chunk has"
        )
    context, chooses = current_forward_context(), bound.is_sparse
    if chooses:
        kept = cache.cache.size.kept
        cut = _IN_WINDOWS if cache.cut else bound.impl.cut_of_cache(kept, context)
        if isinstance(cut, str):
            chooses, bound = False, bound.off_grid(f"{_OF_SEVERAL}: {cut}")
        else:
            cache = replace(cache, cut=cut)
    cache.append(call.key, call.value)
    seen = cache.visible()
    key, value = seen.keys, seen.values
    if seen.stretch is not None:
        key, value = (x.narrow(1, *seen.stretch) for x in (key, value))
        call = call._replace(key=key, value=value)
        return _with_sink(call, *_on_its_backend(bound, call))
    query, tiles = call.query, seen.tiles
    if tiles is not None and not tiles.in_order:
        (query,) = gather_tokens([query], tiles.order.order)
    call = call._replace(query=query, key=key, value=value)
    if tiles is not None and chooses:
        found = bound.count(bound.impl.forward_tiles(query, key, value, tiles, context))
        out = _with_sink(call, *found)
    else:
        out = _with_sink(call, *_on_the_engine(bound, call, (seen.plan,), geometry, _IN_PIECES))
    if tiles is None or tiles.in_order:
        return out
    in_order = torch.empty_like(out, memory_format=torch.contiguous_format)
    scatter_tokens(out, tiles.order.order, in_order)
    return in_order


def _with_sink(call: AttentionCall, out: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
    """Return an output as its sink logits, if any, leave it."""
    logits = call.sink_logits
    if logits is None:
        return out
    assert lse is not None, "it was asked for"
    own = logits[call.first_head : call.first_head + call.query.shape[2]]
    kept = torch.sigmoid(lse - own[:, None].to(lse.dtype))  # [B, H, Sq]
    return (out * kept.transpose(1, 2).unsqueeze(-1)).to(out.dtype)


def _flex_with_mask(
    bound: Binding, call: AttentionCall
) -> "tuple[FlexAttentionImpl, BlockMask] | None":
    """Return FlexAttention and the block mask of a call, where it is asked for and can take it."""
    impl, lists = bound.impl, call.lists
    fits = (
        isinstance(impl, FlexAttentionImpl)
        and lists is not None
        and not isinstance(lists, BlockPlan)
        and lists.kv_indices.shape[1] in (1, call.query.shape[2])
        and (not call.wants_gradient() or Feature.BACKWARD in bound.features)
    )
    return (impl, lists) if fits else None  # type: ignore[return-value]  # narrowed above


def _on_its_backend(
    bound: Binding, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor | None]:
    flex = _flex_with_mask(bound, call)
    if flex is not None:
        impl, mask = flex
        lse = call.sink_logits is not None
        return bound.count(impl.forward_blocks(*call[:3], mask, lse=lse))
    if call.sink_logits is not None:
        bound = bound.with_features(Feature.LSE)
        return bound.count(bound.impl.forward_lse(*call[:3]))
    if bound.varies:
        bound = bound.at(call, current_forward_context())
    return bound.attend(call), None


def _on_the_engine(
    bound: Binding, call: AttentionCall, plans: Plans, geometry: LayerGeometry, why: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output, and the lse where sink logits want it.

    Args:
        bound: what would serve the call if it took lists of blocks.
        call: the call.
        plans: the lists.
        geometry: what the layer is.
        why: why there are lists, for the report.
    """
    query, key, value = (x if loadable(x) else x.contiguous() for x in call[:3])
    parts, kernels = [], [kernel_for(query, key, value, plan) for plan in plans]
    for plan, kernel in zip(plans, kernels, strict=True):
        found = block_sparse_attention(
            query,
            key,
            value,
            plan,
            scale=geometry.softmax_scale,
            kernel=kernel,
            return_lse=call.sink_logits is not None or len(plans) > 1,
        )
        parts.append((found, None) if isinstance(found, torch.Tensor) else found)
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
        reason=f"{bound.selection.label} takes no lists of blocks, and {why}",
    )
    return bound.count((out, out_lse), by=ran)


def _plans(call: AttentionCall) -> Plans:
    """Return the plans of a call's lists, for the heads that it has."""
    lists, (num_queries, heads) = call.lists, call.query.shape[1:3]
    if isinstance(lists, BlockPlan):
        plans: Plans = (lists,)
    else:
        assert lists is not None, "callers know"
        plans = plans_of(lists, num_queries, call.key.shape[1])
    first = call.first_head
    return tuple(_of_heads(plan, slice(first, first + heads)) for plan in plans)


def _of_heads(plan: BlockPlan, heads: slice) -> BlockPlan:
    """Return a plan for some of its heads; itself where it is the same for all of them."""
    if all(x.dim() == 1 or x.shape[1] in (1, heads.stop - heads.start) for x in plan.tensors()):
        return plan

    def of(x: torch.Tensor | None) -> torch.Tensor | None:
        return x if x is None or x.shape[1] == 1 else x[:, heads]

    def cut(blocks: Blocks) -> Blocks:
        return replace(blocks, starts=of(blocks.starts), lengths=of(blocks.lengths))

    indices, counts = of(plan.indices), of(plan.counts)
    assert indices is not None
    assert counts is not None
    return replace(
        plan,
        indices=indices,
        counts=counts,
        q=cut(plan.q),
        kv=cut(plan.kv),
        row_bits=of(plan.row_bits),
        order=None,
    )
