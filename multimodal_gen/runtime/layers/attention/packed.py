"""Calls with key padding on kernels for packed sequences."""

import torch

from multimodal_gen.runtime.layers.attention.binding import Bound
from multimodal_gen.runtime.layers.attention.masks import KeyMask
from multimodal_gen.runtime.layers.attention.varlen import VarlenMaskMeta, build_varlen_mask_meta
from multimodal_gen.runtime.managers.forward_context import current_forward_context


def attend_packed(
    bound: Bound,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor,
    mask: KeyMask,
    meta: VarlenMaskMeta | None,
) -> torch.Tensor:
    """Return attention of padded [B, S, H, D] inputs on a kernel for packed sequences."""
    meta = meta or _shared_meta(attn_mask, mask)
    batch, num_queries = query.shape[:2]
    if mask.covers_queries:
        packed_query, cu_seqlens_q = meta.pack(query), meta.cu_seqlens
    else:
        packed_query = query.flatten(0, 1)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
        cu_seqlens_q = starts * num_queries
    bound.calls += 1
    out = bound.impl.forward_varlen(
        packed_query,
        meta.pack(key),
        meta.pack(value),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=meta.cu_seqlens,
        max_seqlen_q=num_queries,
        max_seqlen_k=meta.max_seqlen,
    )
    if mask.covers_queries:
        return meta.unpack(out)
    return out.reshape(batch, num_queries, *out.shape[1:])


def _shared_meta(attn_mask: torch.Tensor, mask: KeyMask) -> VarlenMaskMeta:
    """Return the packing, built once per denoiser call for all layers that share a mask."""
    context = current_forward_context()
    if context is None:
        return build_varlen_mask_meta(mask.keep)
    # The mask is kept beside its packing, so that its id is not reused within the call. One mask
    # may be broadcast over calls of different batch sizes.
    version = 0 if attn_mask.is_inference() else attn_mask._version
    slot = ("varlen", id(attn_mask), version, mask.keep.shape[0])
    if slot not in context.cache:
        context.cache[slot] = (attn_mask, build_varlen_mask_meta(mask.keep))
    meta: VarlenMaskMeta = context.cache[slot][1]
    return meta
