"""An attention call of ComfyUI, in the layout and with the masks of this package's layers.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from typing import Any

import torch

from multimodal_gen.errors import UsageError

# Keyword arguments that are honoured, or that concern ComfyUI's own functions alone.
_KNOWN = frozenset(
    {
        "transformer_options",
        "scale",
        "enable_gqa",
        "low_precision_attention",
        "_inside_attn_wrapper",
    }
)


def check_options(
    query: torch.Tensor, attn_precision: torch.dtype | None, options: dict[str, Any]
) -> None:
    """Refuse a call that asks for what a layer cannot honour.

    Args:
        query: the queries.
        attn_precision: dtype of the scores, or None.
        options: keyword arguments of the call.

    Raises:
        UsageError: names what is not known.
    """
    if attn_precision not in (None, torch.float32, query.dtype):
        raise UsageError(f"attn_precision must be torch.float32 or None, got {attn_precision}")
    unknown = [name for name, x in options.items() if name not in _KNOWN and x is not None]
    if unknown:
        raise UsageError(
            f"keyword arguments of an attention call must be among {', '.join(sorted(_KNOWN))}, "
            f"got {', '.join(sorted(unknown))}"
        )


def wants_exact(
    query: torch.Tensor, attn_precision: torch.dtype | None, options: dict[str, Any]
) -> bool:
    """Return whether a call must not be rounded to 8 bits or less."""
    if options.get("low_precision_attention") is False:
        return True
    return attn_precision is torch.float32 and query.dtype is not torch.float32


def as_heads(
    x: torch.Tensor, num_heads: int, head_size: int | None, *, split: bool
) -> torch.Tensor:
    """Return q, k or v as [B, S, H, D], a view of it.

    Args:
        x: [B, S, H * D], or [B, H, S, D] where heads are split.
        num_heads: H, of [B, S, H * D] where `head_size` is None.
        head_size: D, where H is to be found from it.
        split: whether heads are split.

    Raises:
        UsageError: it has another shape.
    """
    if x.dim() != (4 if split else 3):
        wanted = "[B, H, S, D]" if split else "[B, S, H * D]"
        raise UsageError(f"q, k and v must be {wanted}, got {list(x.shape)}")
    if split:
        return x.transpose(1, 2)
    if x.shape[-1] % (head_size or num_heads):
        raise UsageError(
            f"q, k and v must have channels for {num_heads} heads, got {list(x.shape)}"
        )
    size = head_size or x.shape[-1] // num_heads
    return x.view(*x.shape[:-1], -1, size)


def as_mask(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    """Return a mask with four axes, as ComfyUI understands those with fewer.

    Two axes are [Sq, Sk], or [B, Sk] where that does not fit; three are [B, Sq, Sk].

    Args:
        mask: the mask, or None.
        query: [B, Sq, H, D].
        key: [B, Sk, H, D].
    """
    if mask is None or mask.dim() == 4:
        return mask
    if mask.dim() == 3:
        return mask[:, None]
    of_pairs = mask.shape[0] in (1, query.shape[1])
    if mask.dim() == 2 and mask.shape == (query.shape[0], key.shape[1]) and not of_pairs:
        return mask[:, None, None]
    return mask[None, None] if mask.dim() == 2 else mask


def as_output(out: torch.Tensor, *, split: bool) -> torch.Tensor:
    """Return [B, S, H, D] as [B, H, S, D] where heads stay split, else as [B, S, H * D]."""
    return out.transpose(1, 2) if split else out.flatten(2)
