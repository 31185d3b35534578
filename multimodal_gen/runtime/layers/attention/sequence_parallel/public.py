"""The public attention layers whose tokens are split over ranks.

Shapes: B batch, S tokens of a rank, H heads, D head size.
"""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch

from multimodal_gen.errors import MultimodalGenError, UsageError
from multimodal_gen.runtime.layers.attention.arguments import (
    all_or_none,
    check_exchange,
    check_flags,
    check_mask_meta,
    check_no_replicated,
    check_replicated,
    check_seq_lens,
    check_split,
    join_tokens,
)
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.backends.block_masks import apart
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.masks import VarlenMaskMeta
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import LayerSite, SelectionScope
from multimodal_gen.runtime.layers.attention.sequence_parallel.layer import (
    SequenceParallelLayer,
    tokens_are_split,
)
from multimodal_gen.runtime.platforms import AttentionBackendEnum

if TYPE_CHECKING:
    from multimodal_gen.runtime.layers.attention.backends.block_masks import AnyBlockMask
    from multimodal_gen.runtime.layers.attention.causal_cache import LayerCache

__all__ = ["USPAttention", "UlyssesAttention", "UlyssesAttention_VSA"]


class UlyssesAttention(SequenceParallelLayer):
    """Attention whose heads are split over the devices of a Ulysses group.

    Args:
        num_heads: query heads, over all devices.
        head_size: channels per head.
        num_kv_heads: key and value heads; default `num_heads`.
        softmax_scale: factor on q k^T; default `head_size ** -0.5`.
        causal: mask out keys after the query, aligned to the last query and key.
        supported_attention_backends: hint: automatic choice prefers this set.
        prefix: dotted path of the layer in its model; its first number is what `layers:` rules
            go by.
        compute_dtype: dtype of q, k and v; default: whichever the first call has.
        site: where the layer sits; default: the component under construction.
        scope: what the user configured; default: the scope in use.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        num_kv_heads: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        supported_attention_backends: Collection[AttentionBackendEnum | str] | None = None,
        prefix: str = "",
        *,
        compute_dtype: torch.dtype | None = None,
        site: LayerSite | None = None,
        scope: SelectionScope | None = None,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            num_kv_heads,
            softmax_scale,
            causal,
            supported_attention_backends=supported_attention_backends,
            compute_dtype=compute_dtype,
            prefix=prefix,
            site=site,
            scope=scope,
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        replicated_q: torch.Tensor | None = None,
        replicated_k: torch.Tensor | None = None,
        replicated_v: torch.Tensor | None = None,
        seq_lens: list[int] | None = None,
        *,
        cache: "LayerCache | None" = None,
        sink_logits: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return attention of the sharded tokens, with replicated ones joined at the end.

        Args:
            q: [B, S, H, D], this device's tokens.
            k: [B, S, Hkv, D].
            v: [B, S, Hkv, D].
            replicated_q: [B, R, H, D] tokens every device holds, e.g. text; all three or none.
            replicated_k: [B, R, Hkv, D].
            replicated_v: [B, R, Hkv, D].
            seq_lens: tokens per device when they differ; not together with replicated tokens.
            cache: the layer's part of a `CausalCache` with this device's share of the key heads
                (`key_heads_of_rank`), whose running chunk the tokens of all devices are.
            sink_logits: [H] logit per head of a key that every query sees and that has no value.

        Returns:
            The output [B, S, H, D], and that of the replicated tokens [B, R, H, D] or None.
        """
        split = tokens_are_split()
        try:
            replicated = all_or_none(replicated_q, replicated_k, replicated_v, "replicated_")
            check_seq_lens(seq_lens, q, exclusive=replicated is not None, split=split)
            if replicated is not None:
                query, key, value = (
                    join_tokens(own, shared, (name, f"replicated_{name}"))
                    for name, own, shared in zip("qkv", (q, k, v), replicated, strict=True)
                )
        except MultimodalGenError as error:
            raise self.announced(error, split=split) from None
        if replicated is None:
            call = AttentionCall(q, k, v, seq_lens=seq_lens, cache=cache, sink_logits=sink_logits)
            return self.attend(call), None
        suffix = (0, replicated[0].shape[1], 0)
        out = self.attend(
            AttentionCall(
                query, key, value, replicated=suffix, cache=cache, sink_logits=sink_logits
            )
        )
        return out[:, : q.shape[1]], out[:, q.shape[1] :]


class UlyssesAttention_VSA(UlyssesAttention):  # noqa: N801  the name users import
    """`UlyssesAttention` with the gate of Video Sparse Attention's coarse branch."""

    def forward(  # type: ignore[override]  # the gate's signature is the documented one
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        replicated_q: torch.Tensor | None = None,
        replicated_k: torch.Tensor | None = None,
        replicated_v: torch.Tensor | None = None,
        seq_lens: list[int] | None = None,
        gate_compress: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention of the sharded tokens.

        Args:
            q: [B, S, H, D], this device's tokens.
            k: [B, S, H, D].
            v: [B, S, H, D].
            replicated_q: must be None; VSA clusters video tokens only.
            replicated_k: must be None.
            replicated_v: must be None.
            seq_lens: tokens per device when they differ.
            gate_compress: [B, S, H, D] weight of the coarse branch; None is weight 0.

        Returns:
            [B, S, H, D].

        Raises:
            UsageError: replicated tokens are given, or a gate that the backend cannot apply.
        """
        split = tokens_are_split()
        try:
            check_no_replicated(replicated_q, replicated_k, replicated_v)
            check_seq_lens(seq_lens, q, exclusive=False, split=split)
        except MultimodalGenError as error:
            raise self.announced(error, split=split) from None
        return self.attend(AttentionCall(q, k, v, gate=gate_compress, seq_lens=seq_lens))


class USPAttention(SequenceParallelLayer):
    """Attention under unified sequence parallelism: Ulysses, ring, or both.

    Args:
        num_heads: query heads, over all devices.
        head_size: channels per head.
        num_kv_heads: key and value heads; default `num_heads`.
        softmax_scale: factor on q k^T; default `head_size ** -0.5`.
        causal: mask out keys after the query, aligned to the last query and key.
        supported_attention_backends: hint: automatic choice prefers this set.
        default_attention_backend: the layer's preference, weaker than a user's request.
        prefix: dotted path of the layer in its model; its first number is what `layers:` rules
            go by.
        dropout_rate: must be 0; attention kernels apply no dropout.
        skip_sequence_parallel: never exchange tokens.
        enable_packed_qkv_input_a2a: accepted; q, k and v always travel in one message.
        is_cross_attention: keys come from another sequence.
        compute_dtype: dtype of q, k and v; default: whichever the first call has.
        site: where the layer sits; default: the component under construction.
        scope: what the user configured; default: the scope in use.
        prepare: see `AttentionLayer`.
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
        prefix: str = "",
        dropout_rate: float = 0.0,
        skip_sequence_parallel: bool = False,
        enable_packed_qkv_input_a2a: bool = False,
        is_cross_attention: bool = False,
        *,
        compute_dtype: torch.dtype | None = None,
        site: LayerSite | None = None,
        scope: SelectionScope | None = None,
        prepare: Callable[[AttentionLayer, AttentionCall], AttentionCall] | None = None,
    ) -> None:
        if dropout_rate != 0.0:
            raise UsageError(f"dropout_rate must be 0.0, got {dropout_rate}; kernels apply none")
        check_flags(
            is_cross_attention=is_cross_attention,
            skip_sequence_parallel=skip_sequence_parallel,
            enable_packed_qkv_input_a2a=enable_packed_qkv_input_a2a,
        )
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
            prefix=prefix,
            site=site,
            scope=scope,
            prepare=prepare,
        )
        self.skip_sequence_parallel = skip_sequence_parallel
        self.enable_packed_qkv_input_a2a = enable_packed_qkv_input_a2a

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: "torch.Tensor | AnyBlockMask | None" = None,
        num_replicated_prefix: int = 0,
        num_replicated_suffix: int = 0,
        num_replicated_kv_prefix: int = 0,
        skip_sequence_parallel_override: bool = False,
        attn_mask_meta: VarlenMaskMeta | None = None,
        qkv_pre_all_to_all: bool = False,
        seq_lens: list[int] | None = None,
        q_prefix: torch.Tensor | None = None,
        k_prefix: torch.Tensor | None = None,
        v_prefix: torch.Tensor | None = None,
        *,
        cache: "LayerCache | None" = None,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention of this device's tokens.

        Args:
            q: [B, S, H, D].
            k: [B, Sk, Hkv, D].
            v: [B, Sk, Hkv, Dv].
            attn_mask: as `LocalAttention.forward` takes it; where tokens are split over ranks
                [B, Sk] or [B, 1, 1, Sk], this device's part, or a mask of blocks of the whole.
            num_replicated_prefix: leading tokens of q, k and v that every device holds.
            num_replicated_suffix: trailing tokens of q, k and v that every device holds.
            num_replicated_kv_prefix: leading tokens of k and v alone that every device holds.
            skip_sequence_parallel_override: exchange nothing in this call.
            attn_mask_meta: packing of a 2-D `attn_mask`, from `build_varlen_mask_meta`.
            qkv_pre_all_to_all: q, k and v already hold all tokens of this device's heads.
            seq_lens: tokens per device when they differ; excludes masks and replicated tokens.
            q_prefix: [B, P, H, D] tokens put in front of q, on one device; all three or none.
            k_prefix: [B, P, Hkv, D].
            v_prefix: [B, P, Hkv, Dv].
            cache: the layer's part of a `CausalCache` with this device's share of the key heads
                (`key_heads_of_rank`), whose running chunk the tokens of all devices are.
            sink_logits: [H] logit per head of a key that every query sees and that has no value.

        Returns:
            [B, P + S, H, Dv].

        Raises:
            UsageError: arguments exclude each other, or sizes do not fit.
        """
        mask, blocks = attn_mask, None
        if mask is not None and not isinstance(mask, torch.Tensor):
            mask, blocks = apart(mask)
        skip = self.skip_sequence_parallel or skip_sequence_parallel_override
        split = tokens_are_split() and not skip
        replicated = (num_replicated_prefix, num_replicated_suffix, num_replicated_kv_prefix)
        try:
            check_exchange(skip_sequence_parallel_override, qkv_pre_all_to_all)
            check_replicated(replicated, q, k)
            exclusive = attn_mask is not None or any(replicated)
            check_seq_lens(seq_lens, q, exclusive=exclusive, split=split)
            prefix = all_or_none(q_prefix, k_prefix, v_prefix, "", "_prefix")
            if split:
                check_split(prefix is not None, qkv_pre_all_to_all)
            if prefix is not None:
                q, k, v = (
                    join_tokens(front, x, (f"{name}_prefix", name))
                    for name, front, x in zip("qkv", prefix, (q, k, v), strict=True)
                )
                replicated = (prefix[0].shape[1] + num_replicated_prefix, *replicated[1:])
            check_mask_meta(attn_mask_meta, mask, k)
        except MultimodalGenError as error:
            raise self.announced(error, split=split) from None
        return self.attend(
            AttentionCall(
                q,
                k,
                v,
                mask,
                mask_meta=attn_mask_meta,
                replicated=replicated,
                seq_lens=seq_lens,
                exchange=not skip,
                some_heads=qkv_pre_all_to_all,
                cache=cache,
                block_mask=blocks,
                sink_logits=sink_logits,
            )
        )

    def forward_with_replicated_kv_prefix(
        self,
        q: torch.Tensor,
        k_prefix: torch.Tensor,
        v_prefix: torch.Tensor,
        k_suffix: torch.Tensor,
        v_suffix: torch.Tensor,
    ) -> torch.Tensor:
        """Return attention of `q` over keys every device holds followed by sharded ones.

        Args:
            q: [B, S, H, D].
            k_prefix: [B, P, Hkv, D].
            v_prefix: [B, P, Hkv, Dv].
            k_suffix: [B, Sk, Hkv, D].
            v_suffix: [B, Sk, Hkv, Dv].

        Returns:
            [B, S, H, Dv].
        """
        try:
            k = join_tokens(k_prefix, k_suffix, ("k_prefix", "k_suffix"))
            v = join_tokens(v_prefix, v_suffix, ("v_prefix", "v_suffix"))
        except MultimodalGenError as error:
            raise self.announced(
                error, split=tokens_are_split() and not self.skip_sequence_parallel
            ) from None
        return self.forward(q, k, v, num_replicated_kv_prefix=k_prefix.shape[1])
