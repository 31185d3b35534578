"""Tensors [B, S, H, D] in the memory layouts that attention inputs come in."""

from types import MappingProxyType

import torch

__all__ = ["LAYOUTS", "with_layout"]

# Name -> (axes of the memory from the outermost in, entries before and after along the heads).
LAYOUTS = MappingProxyType(
    {
        "token-major": ("bshd", 0),
        "head-major": ("bhsd", 0),
        "tokens outermost": ("sbhd", 0),
        "a slice of the heads": ("bshd", 2),
        "a slice of the heads, head-major": ("bhsd", 1),
        "heads innermost": ("bsdh", 0),
    }
)


def with_layout(values: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a view equal to `values` [B, S, H, D] whose memory is laid out as `layout` names.

    What lies around a slice is NaN.
    """
    axes, around = LAYOUTS[layout]
    order = tuple("bshd".index(axis) for axis in axes)
    batch, tokens, heads, size = values.shape
    whole = values.new_full((batch, tokens, heads + 2 * around, size), torch.nan)
    whole = whole.permute(order).contiguous().permute(tuple(order.index(i) for i in range(4)))
    view = whole[:, :, around : around + heads]
    return view.copy_(values)
