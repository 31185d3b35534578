"""Calls with a mask, which is brought to one of two kinds: key padding, or one that says more.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from dataclasses import dataclass, replace

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention.binding import Binding
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.masks import (
    build_varlen_mask_meta,
    once_per_call,
    with_causal,
    zero_masked_rows,
)
from multimodal_gen.runtime.layers.attention.request import AttentionRole, Feature

# Added to a score, it leaves a weight of 0 in every dtype. Models use -9000 and less; -10000 is
# -9984 in bfloat16.
_LEFT_OUT = -9000.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyMask:
    """Keys that may be attended to.

    Attributes:
        tokens: bool [B, Sk], True for keys that are attended to.
        covers_queries: the same positions are the queries; rows of masked queries become zero.
    """

    tokens: torch.Tensor
    covers_queries: bool

    def broadcastable(self) -> torch.Tensor:
        """Return the mask as bool [B, 1, 1, Sk]."""
        return self.tokens[:, None, None, :]


def normalise_mask(
    mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *, self_attention: bool
) -> KeyMask | torch.Tensor:
    """Bring a mask to one of the two kinds; never synchronises with the device.

    Args:
        mask: [B, Sk] key padding, [B, Sq, Sk], or 4-D broadcastable to [B, H, Sq, Sk]. Bool and
            integer masks keep where non-zero; floating ones are added to the scores.
        query: [B, Sq, H, D].
        key: [B, Sk, Hkv, D].
        self_attention: a 2-D mask over as many keys as queries masks the queries too.

    Returns:
        A mask of keys; or one that says more, bool (True attends) or additive in the query's dtype,
        broadcastable to [B, H, Sq, Sk].

    Raises:
        UsageError: the mask's shape does not fit.
    """
    batch, num_queries, num_heads = query.shape[:3]
    num_keys = key.shape[1]
    given = list(mask.shape)
    additive, two_dimensional = mask.dtype.is_floating_point, len(given) == 2
    if not additive and mask.dtype is not torch.bool:
        mask = mask != 0
    if two_dimensional:
        mask = mask[:, None, None, :]
    elif len(given) == 3:
        mask = mask[:, None]
    wanted = (batch, num_heads, num_queries, num_keys)
    fits = mask.dim() == 4 and mask.shape[-1] == num_keys
    if not fits or any(have not in (1, n) for have, n in zip(mask.shape, wanted, strict=True)):
        raise UsageError(
            f"attn_mask must be [B, Sk] = {[batch, num_keys]}, [B, Sq, Sk] = "
            f"{[batch, num_queries, num_keys]} or broadcastable to [B, H, Sq, Sk] = "
            f"{list(wanted)}, got {given}"
        )
    if additive:
        return mask.to(query.dtype)
    if mask.shape[1] != 1 or mask.shape[2] != 1:
        return mask
    return KeyMask(
        tokens=mask[:, 0, 0, :].expand(batch, num_keys),
        covers_queries=two_dimensional and self_attention and num_queries == num_keys,
    )


def as_key_mask(mask: torch.Tensor, *, self_attention: bool) -> KeyMask | None:
    """Return the key mask that a dense mask spells out, or None where it says more than that.

    Waits for the device. An additive mask spells one out where it holds nothing but zeros and, for
    keys that are left out, -inf or a number so low that exp() of it is 0, such as the -10000 of
    many models. All rows have to leave out the same keys; in self-attention rows of keys that are
    left out may leave out everything.

    Args:
        mask: [B, H | 1, Sq | 1, Sk], bool or additive.
        self_attention: a mask over as many keys as queries may mask the queries too.
    """
    if mask.requires_grad or not mask.numel():
        return None
    allowed, additive = mask, mask.dtype is not torch.bool
    if additive:
        allowed = mask == 0
    seen = allowed.any(-1)  # [B, H, Sq]
    common = allowed.any(2).any(1)  # [B, Sk]
    same = (allowed == (common[:, None, None, :] & seen[..., None])).all()
    square = self_attention and mask.shape[2] == mask.shape[3]
    queries_too = (seen == common[:, None, :]).all() if square else same.new_zeros(())
    known, finite = same, same.new_zeros(())
    if additive:
        known = same & (allowed | (mask <= _LEFT_OUT)).all()
        finite = (~allowed & (mask > -torch.inf)).any()
    known, every, queries_too, finite = torch.stack(
        (known, seen.all(), queries_too, finite)
    ).tolist()
    # A row of low numbers is one of equal weights, unlike a row of -inf.
    if not known or not (every or (queries_too and not finite)):
        return None
    return KeyMask(tokens=common, covers_queries=not every)


def attend_masked(bound: Binding, call: AttentionCall) -> torch.Tensor:
    """Return attention of a call under its mask, [B, Sq, H, Dv].

    Args:
        bound: what serves calls like it without one.
        call: the call.

    Raises:
        UsageError: the mask's shape does not fit.
        UnsupportedBackendError: no backend can honour it, or fallbacks are refused.
    """
    geometry = bound.demand.geometry
    training = (Feature.BACKWARD,) if call.wants_gradient() else ()
    mask = _mask_for(bound, call, self_attention=geometry.site.role is not AttentionRole.CROSS)
    kind, rows = Feature.DENSE_MASK, None
    if isinstance(mask, KeyMask):
        packs = not geometry.causal or mask.covers_queries
        if packs and bound.features.issuperset((Feature.VARLEN, *training)):
            return _attend_packed(bound, call, mask)
        # A mask alone does not keep NaN in padding out: a weight of zero times NaN is NaN.
        query, key, value = call.query, *(zero_masked_rows(x, mask.tokens) for x in call[1:3])
        if training and mask.covers_queries:
            # The gradients of K and V sum over all queries: zero times NaN would reach every row.
            query = zero_masked_rows(query, mask.tokens)
        call = call._replace(query=query, key=key, value=value)
        kind, rows = Feature.KEY_MASK, mask.tokens if mask.covers_queries else None
        mask = mask.broadcastable()
    if geometry.causal:
        kind, mask = Feature.DENSE_MASK, with_causal(mask, call.query.shape[1])
    serving = bound.with_features(kind, *training, causal_in_mask=geometry.causal)
    out = serving.attend(call, mask)
    return out if rows is None else zero_masked_rows(out, rows)


def _mask_for(
    bound: Binding, call: AttentionCall, *, self_attention: bool
) -> KeyMask | torch.Tensor:
    """Return the mask of a call: one of keys, where a sparse method takes no other and it can be.

    Whether it can is found out once per denoiser call and mask.
    """
    given = call.mask
    assert given is not None, "callers know"
    mask = normalise_mask(given, call.query, call.key, self_attention=self_attention)
    wants_keys = bound.is_sparse and Feature.DENSE_MASK not in bound.features
    if isinstance(mask, KeyMask) or not wants_keys or given.is_meta:
        return mask
    if given.is_cuda and torch.cuda.is_current_stream_capturing():
        return mask

    def look() -> KeyMask | None:
        return as_key_mask(mask, self_attention=self_attention)

    found = once_per_call(given, ("key mask", mask.dtype, self_attention), look)
    if found is None:
        return mask
    batch, num_keys = call.key.shape[:2]
    return replace(found, tokens=found.tokens.expand(batch, num_keys))


def _attend_packed(bound: Binding, call: AttentionCall, mask: KeyMask) -> torch.Tensor:
    """Return attention of padded inputs on a kernel for packed sequences."""
    query, key, value, attn_mask = call[:4]
    assert attn_mask is not None, "callers know"
    batch, num_queries = query.shape[:2]
    # One mask may be broadcast over calls of different batch sizes.
    meta = call.mask_meta or once_per_call(
        attn_mask, ("packing", batch), lambda: build_varlen_mask_meta(mask.tokens)
    )
    if mask.covers_queries:
        packed_query, cu_seqlens_q = meta.pack(query), meta.cu_seqlens
    else:
        packed_query = query.flatten(0, 1)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
        cu_seqlens_q = starts * num_queries
    out = bound.impl.forward_varlen(
        packed_query,
        meta.pack(key),
        meta.pack(value),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=meta.cu_seqlens,
        max_seqlen_q=num_queries,
        max_seqlen_k=meta.max_seqlen,
    )
    bound.count(out)
    if mask.covers_queries:
        return meta.unpack(out)
    return out.reshape(batch, num_queries, *out.shape[1:])
