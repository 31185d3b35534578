"""The merge of two parts in plain PyTorch: the definition, for any device.

Shapes: B batch, S tokens, H heads, D head size.
"""

import torch


def merge_weights(
    lse: torch.Tensor, more_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return both parts' weights [B, S, H, 1], 0 where a part sees nothing, and the merged lse.

    Args:
        lse: natural log-sum-exp of the first part, [B, H, S].
        more_lse: that of the second.
    """
    total = torch.logaddexp(lse, more_lse)
    shift = total.masked_fill(total == -torch.inf, 0.0)
    old, new = ((x - shift).exp().transpose(1, 2).unsqueeze(-1) for x in (lse, more_lse))
    return old, new, total


def merge_two_reference(
    out: torch.Tensor,
    lse: torch.Tensor,
    more: torch.Tensor,
    more_lse: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the merged output [B, S, H, D] in `dtype` and its lse; see `api.merge_two`."""
    old, new, total = merge_weights(lse, more_lse)
    merged = out * old
    merged.addcmul_(more, new)
    return merged.to(dtype), total
