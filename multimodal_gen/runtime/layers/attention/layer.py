"""The attention layers a model uses: `LocalAttention`, `UlyssesAttention`, `USPAttention`.

Tensors are [B, S, H, D]. The sequence-parallel layers compute on many devices what they compute on
one, where replicated tokens are part of the sequence and nothing is exchanged.
"""

from typing import TYPE_CHECKING

from multimodal_gen.runtime.layers.attention.attention_layer import LocalAttention
from multimodal_gen.runtime.layers.attention.masks import (
    VarlenMaskMeta,
    build_varlen_mask_meta,
    build_varlen_mask_meta_from_lengths,
    build_varlen_mask_meta_from_ranges,
)

if TYPE_CHECKING:
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
