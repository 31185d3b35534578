"""Plans of every block, for dense attention on our own kernels.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from dataclasses import replace
from functools import lru_cache

import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.tile_order.api import gather_tokens
from multimodal_gen.runtime.layers.attention.backends._common import refuse_mask

__all__ = ["dense_plan", "drop_masked"]


@lru_cache(maxsize=128)
def dense_plan(
    num_queries: int,
    num_keys: int,
    q_size: int,
    kv_size: int,
    causal: bool,
    device: torch.device,
) -> BlockPlan:
    """Return the plan of dense attention on regular blocks; the last 128 are cached.

    A new plan is waited for, so that any stream may read what is cached.

    Args:
        num_queries: Sq.
        num_keys: Sk.
        q_size: queries per block.
        kv_size: keys per block.
        causal: whether keys after the query are dropped.
        device: where the tensors lie.
    """
    with torch.inference_mode(False):
        plan = BlockPlan.dense(
            Blocks.regular(num_queries, q_size),
            Blocks.regular(num_keys, kv_size),
            device,
            causal=causal,
        )
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()
    return plan


def drop_masked(
    key: torch.Tensor, value: torch.Tensor, plan: BlockPlan, attn_mask: torch.Tensor, label: str
) -> tuple[torch.Tensor, torch.Tensor, BlockPlan]:
    """Move the kept keys of every sample to its front; does not wait for the device.

    Args:
        key: [B, Sk, Hkv, D].
        value: [B, Sk, Hkv, D].
        plan: a plan of `dense_plan`.
        attn_mask: bool [B|1, 1, 1, Sk], True where a key is kept.
        label: who asks, for messages.

    Returns:
        Keys and values in the new order, and the plan whose blocks end with each sample's kept
        keys.

    Raises:
        UsageError: the plan is causal.
    """
    if plan.causal:
        refuse_mask(attn_mask, f"causal {label}")
    keep = attn_mask[:, 0, 0, :].expand(key.shape[0], -1)
    index = torch.argsort(~keep, dim=1, stable=True).int()
    key, value = gather_tokens((key, value), index)
    kv = plan.kv
    starts = torch.arange(kv.num, dtype=torch.int32, device=keep.device) * kv.size
    lengths = (keep.sum(1, dtype=torch.int32).view(-1, 1, 1) - starts).clamp(0, kv.size)
    ragged = Blocks.ragged(starts.view(1, 1, -1), lengths, total=kv.total, size=kv.size)
    return key, value, replace(plan, kv=ragged)
