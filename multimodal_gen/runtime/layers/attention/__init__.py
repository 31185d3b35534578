"""Attention layers and the selection of their backends."""

from typing import TYPE_CHECKING

from multimodal_gen.runtime.layers.attention import layer
from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionBackend
from multimodal_gen.runtime.layers.attention.layer import LocalAttention
from multimodal_gen.runtime.layers.attention.selector import get_attn_backend

if TYPE_CHECKING:
    from multimodal_gen.runtime.layers.attention.layer import (
        UlyssesAttention,
        UlyssesAttention_VSA,
        USPAttention,
    )

__all__ = [
    "AttentionBackend",
    "LocalAttention",
    "USPAttention",
    "UlyssesAttention",
    "UlyssesAttention_VSA",
    "get_attn_backend",
]


def __getattr__(name: str) -> object:
    """Return a layer that exchanges tokens, see `layer`."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(layer, name)
