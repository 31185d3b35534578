"""Calls on a cache of chunks, of which the keys and values are the running one.

What lies in one piece is a plain tensor, which the layer's own backend attends to. What lies in
several runs on the block-sparse engine, and the report says so.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from dataclasses import replace

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.tile_order.api import gather_tokens, scatter_tokens
from multimodal_gen.runtime.layers.attention.binding import Binding
from multimodal_gen.runtime.layers.attention.call import AttentionCall, LayerGeometry
from multimodal_gen.runtime.layers.attention.causal_cache import CausalCache, LayerCache
from multimodal_gen.runtime.layers.attention.kinds.blocks import (
    apply_sink,
    attend_blocks,
    attend_on_backend,
    attend_on_engine,
    check_blocks,
)
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.sparse.executors.cache import attend_cache
from multimodal_gen.runtime.managers.forward_context import ForwardContext, current_forward_context

_IN_PIECES = "what a chunk sees lies in pieces of the cache"
_OF_SEVERAL = "keys in a cache are those of several calls"
_OF_OLDER = "older chunks of the cache are kept in them"
_IN_WINDOWS = "the layer sees windows of it already"
_IN_CODES = "codes of chunks are read as a whole"


def check_extended(
    call: AttentionCall, geometry: LayerGeometry, context: ForwardContext | None
) -> AttentionCall:
    """Return a call with the cache of its context, once all but its tensors is known to fit.

    Args:
        call: a call with a cache, a mask of blocks or sink logits, or whose context has a cache.
        geometry: what the layer is.
        context: the running denoiser call.

    Raises:
        UsageError: the call cannot have what it has, or the context has something else.
    """
    if context is not None and context.kv_cache is not None:
        call = _with_cache(call, geometry, context.kv_cache)
    check_blocks(call, geometry)
    cache: object = call.cache
    if cache is not None and not isinstance(cache, LayerCache):
        raise UsageError(
            f"cache must be a layer's part of a CausalCache, got a {type(cache).__name__}; pass "
            f"cache.layers[i]"
        )
    if cache is not None and not cache.cache.is_running:
        raise UsageError("a chunk must be running, got none; call begin(start, tokens) first")
    return call


def attend_extended(bound: Binding, call: AttentionCall) -> torch.Tensor:
    """Return attention of a call with a cache, a mask of blocks or sink logits, [B, Sq, H, Dv].

    With a cache it is that of the running chunk, once it is written. Sparse methods choose among
    the blocks of what is kept, where they can; else such calls run dense.

    Args:
        bound: what serves the layer at the running step.
        call: the call; `check_extended` has nothing against it.

    Raises:
        UsageError: the tensors are not those of the running chunk, or of the mask.
        UnsupportedBackendError: the layer's method is sparse, and fallbacks are refused.
    """
    cache = call.cache
    if cache is None:
        return attend_blocks(bound, call)
    tokens = cache.cache.running.tokens
    if call.query.shape[1] != tokens:
        raise UsageError(
            f"query must have the {tokens} tokens of the running chunk, got "
            f"{call.query.shape[1]}; begin() says how many a chunk has"
        )
    context, method = current_forward_context(), bound.method
    if method is not None:
        kept = cache.cache.size.kept
        grid = None if context is None else context.latent_grid
        coded = _IN_CODES if cache.cache.size.num_coded else method.limits.cache
        reason = _IN_WINDOWS if cache.cut else coded
        cut = reason or method.router.cut_of_cache(method.settings(context), kept, grid)
        if isinstance(cut, str):
            method, bound = None, bound.without_grid(f"{_OF_SEVERAL}: {cut}")
        else:
            cache = replace(cache, cut=cut)
    cache.append(call.key, call.value)
    seen = cache.visible()
    key, value = seen.keys, seen.values
    if seen.stretch is not None and seen.codes is None:
        key, value = (x.narrow(1, *seen.stretch) for x in (key, value))
        call = call._replace(key=key, value=value)
        return attend_on_backend(bound, call)
    query, tiles = call.query, seen.tiles
    if tiles is not None and not tiles.in_order:
        (query,) = gather_tokens([query], tiles.order.order)
    call = call._replace(query=query, key=key, value=value)
    if tiles is not None and method is not None:
        settings = method.settings(context)
        method.kernel.begin_call()
        found = attend_cache(method.router, settings, call[:3], tiles, context)
        out = apply_sink(call, *bound.count(found))
    else:
        why = _IN_PIECES if seen.codes is None else _OF_OLDER
        out = attend_on_engine(bound, call, (seen.plan,), why, codes=seen.codes)
    if tiles is None or tiles.in_order:
        return out
    in_order = torch.empty_like(out, memory_format=torch.contiguous_format)
    scatter_tokens(out, tiles.order.order, in_order)
    return in_order


def _with_cache(call: AttentionCall, geometry: LayerGeometry, cache: object) -> AttentionCall:
    """Return a call with its layer's part of a cache, unless it has one or attends to text."""
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
