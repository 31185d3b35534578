"""Merging two parts of attention; runs Triton or the reference.

Shapes: B batch, S tokens, H heads, D head size.
"""

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.engine import PART_MERGE, choose_for
from multimodal_gen.kernels.part_merge.reference import merge_two_reference


def merge_two(
    out: torch.Tensor,
    lse: torch.Tensor,
    more: torch.Tensor,
    more_lse: torch.Tensor,
    *,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two attention outputs over different keys, in fp32 or better; carries no gradient.

    Rows that see no key have an output of zeros and a log-sum-exp of -inf.

    Args:
        out: [B, S, H, D].
        lse: natural log-sum-exp of its scores, [B, H, S], fp32 or better.
        more: [B, S, H, D], of any dtype.
        more_lse: [B, H, S], of the dtype of `lse`.
        dtype: of the result.

    Returns:
        The merged output [B, S, H, D] in `dtype`, and its log-sum-exp [B, H, S]; both are new.

    Raises:
        UsageError: shapes or devices do not fit each other.
    """
    batch, tokens, heads, _ = out.shape
    if more.shape != out.shape or more.device != out.device:
        raise UsageError(
            f"`more` must be {list(out.shape)} on {out.device} like out, got {list(more.shape)} on "
            f"{more.device}"
        )
    for name, x in (("lse", lse), ("more_lse", more_lse)):
        if tuple(x.shape) != (batch, heads, tokens) or x.dtype != lse.dtype:
            raise UsageError(
                f"`{name}` must be [B, H, S] = {[batch, heads, tokens]} {lse.dtype}, got "
                f"{list(x.shape)} {x.dtype}"
            )
    exact = lse.dtype is not torch.float32 or dtype is torch.float64
    if out.numel() and choose_for(PART_MERGE, out, more, exact=exact) == "triton":
        from multimodal_gen.kernels.part_merge import part_merge_kernel

        return part_merge_kernel.merge_two(
            out.contiguous(), lse, more.contiguous(), more_lse, dtype
        )
    return merge_two_reference(out, lse, more, more_lse, dtype)
