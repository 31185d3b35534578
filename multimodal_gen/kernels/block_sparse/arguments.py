"""What has to hold of the arguments of attention over a plan, whatever computes it.

Shapes: B batch, Sq and Sk tokens, H query heads, Hkv key heads, D head size.
"""

import math

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan

__all__ = ["check_arguments"]

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_arguments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: BlockPlan, scale: float | None
) -> None:
    """Raise unless tensors, a plan and a scale fit each other.

    Args:
        q: [B, Sq, H, D].
        k: [B, Sk, Hkv, D].
        v: [B, Sk, Hkv, D].
        plan: which pairs count.
        scale: factor of the scores, or None.

    Raises:
        UsageError: a type, shape, dtype or device does not fit.
    """
    _validate_types(q, k, v, plan, scale)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise UsageError(
                f"`{name}` must have q's dtype and device ({q.dtype}, {q.device}), "
                f"got {tensor.dtype}, {tensor.device}"
            )
    if q.dtype not in _FLOATING:
        raise UsageError(f"`q` must be float16, bfloat16, float32 or float64, got {q.dtype}")
    batch, queries, heads, head_size = q.shape
    keys, kv_heads = k.shape[1:3]
    if k.shape[0] != batch or k.shape[3] != head_size:
        raise UsageError(f"`k` must be [{batch}, Sk, Hkv, {head_size}], got {list(k.shape)}")
    if v.shape != k.shape:
        raise UsageError(f"`v` must have the shape of k {list(k.shape)}, got {list(v.shape)}")
    if heads % kv_heads:
        raise UsageError(f"`q` must have a multiple of k's {kv_heads} heads, got {heads}")
    _validate_plan(plan, q.device, (batch, heads), queries, keys)


def _validate_types(q: object, k: object, v: object, plan: object, scale: object) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"`{name}` must be a tensor, got {type(tensor).__name__}")
        if tensor.ndim != 4 or 0 in tensor.shape[1:]:
            raise UsageError(
                f"`{name}` must be [B, S, H, D], and S, H and D at least 1, "
                f"got {list(tensor.shape)}"
            )
    if not isinstance(plan, BlockPlan):
        raise UsageError(f"`plan` must be a BlockPlan, got {type(plan).__name__}")
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise UsageError(f"`scale` must be a number or None, got {type(scale).__name__}")
    if not 0.0 < scale < math.inf:
        raise UsageError(f"`scale` must be positive and finite, got {scale}")


def _validate_plan(
    plan: BlockPlan, device: torch.device, leading: tuple[int, int], queries: int, keys: int
) -> None:
    if plan.device != device:
        raise UsageError(
            f"`plan` must be on the device of q ({device}), got {plan.device}; "
            f"call plan.to(q.device)"
        )
    for name, blocks, tokens in (("q", plan.q, queries), ("k", plan.kv, keys)):
        if blocks.total != tokens:
            raise UsageError(
                f"`{name}` must have the {blocks.total} tokens the plan was made for, got {tokens}"
            )
    for tensor in plan.tensors():
        if tensor.ndim == 1:
            continue  # `order`
        for name, size, wanted in zip(("batch", "heads"), tensor.shape, leading, strict=False):
            if size not in (1, wanted):
                raise UsageError(f"`plan` must have 1 or {wanted} as {name}, got {size}")
