"""Moving tokens in plain PyTorch: the definition, for any device, with gradients.

Shapes: B batch, S tokens, H heads, D head size; an index is [S], [B, S] or [B, H, S].
"""

import torch


def gather_reference(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return `tensor[:, index]`, laid out head-major.

    Args:
        tensor: [B, S, H, D].
        index: [S_out], [B, S_out] or [B, H, S_out], values in [0, S).

    Returns:
        [B, S_out, H, D]; transposed to [B, H, S_out, D] it is contiguous.
    """
    rows = tensor.transpose(1, 2)
    if index.ndim == 1:
        return rows.index_select(2, index).transpose(1, 2)
    batch, heads, _, size = rows.shape
    index = index if index.ndim == 3 else index[:, None]
    every = index.long().unsqueeze(3).expand(batch, heads, -1, size)
    return rows.gather(2, every).transpose(1, 2)


def scatter_reference(source: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """Write `out[:, index] = source`.

    Args:
        source: [B, S_in, H, D].
        index: [S_in], [B, S_in] or [B, H, S_in], distinct values in [0, S).
        out: [B, S, H, D]; other tokens keep what they hold.
    """
    if index.ndim == 1:
        out.index_copy_(1, index.long(), source)
    else:
        index = index.transpose(1, 2) if index.ndim == 3 else index.unsqueeze(2)
        out.scatter_(1, index.long().unsqueeze(3).expand(source.shape), source)
