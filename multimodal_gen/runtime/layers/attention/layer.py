"""The attention layers a model uses: `LocalAttention`, `UlyssesAttention`, `USPAttention`.

Tensors are [B, S, H, D]. The sequence-parallel layers compute on many devices what they compute on
one, where replicated tokens are part of the sequence and nothing is exchanged.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from multimodal_gen.runtime.layers.attention.arguments import check_flags
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.backends.block_masks import apart
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.masks import (
    VarlenMaskMeta,
    build_varlen_mask_meta,
    build_varlen_mask_meta_from_lengths,
    build_varlen_mask_meta_from_ranges,
)
from multimodal_gen.runtime.layers.attention.request import AttentionRole, LayerSite
from multimodal_gen.runtime.layers.attention.scope import SelectionScope
from multimodal_gen.runtime.platforms import AttentionBackendEnum

if TYPE_CHECKING:
    from multimodal_gen.runtime.layers.attention.backends.block_masks import AnyBlockMask
    from multimodal_gen.runtime.layers.attention.causal_cache import LayerCache
    from multimodal_gen.runtime.layers.attention.sequence_parallel.layer import (
        UlyssesAttention,
        UlyssesAttention_VSA,
        USPAttention,
    )

__all__ = [
    "LocalAttention",
    "USPAttention",
    "UlyssesAttention",
    "UlyssesAttention_VSA",
    "VarlenMaskMeta",
    "build_varlen_mask_meta",
    "build_varlen_mask_meta_from_lengths",
    "build_varlen_mask_meta_from_ranges",
]

_OF_SEVERAL_RANKS = ("USPAttention", "UlyssesAttention", "UlyssesAttention_VSA")


def __getattr__(name: str) -> object:
    """Import the layers that exchange tokens when one is asked for: many models have none."""
    if name not in _OF_SEVERAL_RANKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from multimodal_gen.runtime.layers.attention.sequence_parallel import layer

    return getattr(layer, name)


class LocalAttention(AttentionLayer):
    """Attention over tokens that live on one device.

    Args:
        num_heads: query heads.
        head_size: channels per head.
        num_kv_heads: key and value heads; default `num_heads`.
        softmax_scale: factor on q k^T; default `head_size ** -0.5`.
        causal: mask out keys after the query, aligned to the last query and key.
        supported_attention_backends: hint: automatic choice prefers this set.
        default_attention_backend: the layer's preference, weaker than a user's request.
        is_cross_attention: keys come from another sequence.
        compute_dtype: dtype of q, k and v; default: whichever the first call has.
        site: where the layer sits; default: the component under construction.
        scope: what the user configured; default: the scope in use.

    Raises:
        UsageError: a size is not positive, or heads are not a multiple of key heads.
        UnsupportedBackendError: the requested backend cannot serve the layer.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        num_kv_heads: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        supported_attention_backends: Collection[AttentionBackendEnum | str] | None = None,
        default_attention_backend: AttentionBackendEnum | str | None = None,
        is_cross_attention: bool = False,
        compute_dtype: torch.dtype | None = None,
        *,
        site: LayerSite | None = None,
        scope: SelectionScope | None = None,
    ) -> None:
        check_flags(is_cross_attention=is_cross_attention)
        super().__init__(
            num_heads,
            head_size,
            num_kv_heads,
            softmax_scale,
            causal,
            supported_attention_backends=supported_attention_backends,
            default_attention_backend=default_attention_backend,
            role=AttentionRole.CROSS if is_cross_attention else AttentionRole.SELF,
            compute_dtype=compute_dtype,
            site=site,
            scope=scope,
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: "torch.Tensor | AnyBlockMask | None" = None,
        *,
        cache: "LayerCache | None" = None,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention of `q` over `k` and `v`.

        Args:
            q: [B, Sq, H, D].
            k: [B, Sk, Hkv, D].
            v: [B, Sk, Hkv, Dv].
            attn_mask: [B, Sk] key padding (masked queries come back as zeros in self-attention),
                [B, Sq, Sk], or 4-D broadcastable to [B, H, Sq, Sk]; bool and integer masks keep
                where non-zero, floating ones are added to the scores. Or FlexAttention's
                `BlockMask`, or a `BlockPlan`.
            cache: the layer's part of a `CausalCache`, whose running chunk `k` and `v` are; it is
                written, and `q` sees what the cache shows of the past too.
            sink_logits: [H] logit per head of a key that every query sees and that has no value.

        Returns:
            [B, Sq, H, Dv].
        """
        blocks = None
        if attn_mask is not None and not isinstance(attn_mask, torch.Tensor):
            attn_mask, blocks = apart(attn_mask)
        call = AttentionCall(q, k, v, attn_mask)
        if cache is not None or blocks is not None or sink_logits is not None:
            call = call._replace(cache=cache, block_mask=blocks, sink_logits=sink_logits)
        return self.attend(call)
