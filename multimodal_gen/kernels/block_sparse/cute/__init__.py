"""The FlashAttention-4 provider: the block-sparse interface of the package flash-attn-4."""
