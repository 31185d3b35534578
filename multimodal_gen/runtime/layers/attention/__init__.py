"""Attention layers and the selection of their backends."""

from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionBackend
from multimodal_gen.runtime.layers.attention.layer import (
    LocalAttention,
    UlyssesAttention,
    UlyssesAttention_VSA,
    USPAttention,
)
from multimodal_gen.runtime.layers.attention.selector import get_attn_backend

__all__ = [
    "AttentionBackend",
    "LocalAttention",
    "USPAttention",
    "UlyssesAttention",
    "UlyssesAttention_VSA",
    "get_attn_backend",
]
