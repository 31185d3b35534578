"""Runs FlashAttention-4 on a plan.

It takes two lists of key tiles per query block: full ones, which it computes without looking at
single keys, and masked ones. Its key tile is fixed by the head size, so a key block may become
several tiles; only the tile that the keys end in is masked.
"""

from dataclasses import dataclass

import torch

from multimodal_gen.kernels.block_sparse.call import Call
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, key_tiles
from multimodal_gen.kernels.engine import fa4_keys


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TileLists:
    """The key tiles of every query block.

    Attributes:
        full_counts: int32 [B|1, H|1, Nq], tiles whose keys all exist.
        full_indices: int32 [B|1, H|1, Nq, n], stride 1 along n; past the count anything.
        mask_counts: int32 [B|1, H|1, Nq], 1 where the row has the tile that the keys end in.
        mask_indices: int32 [1, 1, Nq, 1], that tile.
    """

    full_counts: torch.Tensor
    full_indices: torch.Tensor
    mask_counts: torch.Tensor
    mask_indices: torch.Tensor


def make_lists(plan: BlockPlan, keys: int) -> TileLists:
    """Return the plan's lists in tiles of `keys`; does not wait for the device.

    Args:
        plan: regular blocks, whose size is a multiple of `keys`.
        keys: keys of a tile.
    """
    total = plan.kv.total
    indices, counts, ends = key_tiles(plan, keys)
    masked = ends if total % keys else torch.zeros_like(ends)
    return TileLists(
        full_counts=counts - masked,
        full_indices=indices,
        mask_counts=masked,
        mask_indices=masked.new_full((1, 1, plan.q.num, 1), -(-total // keys) - 1),
    )


def attend(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out and, where asked for, lse.

    Args:
        call: on a plan of regular blocks without row bits; q, k and v are copied by the package
            if their rows are not aligned to 16 bytes.

    Returns:
        out, contiguous [B, Sq, H, D] in q's dtype; lse, fp32 [B, H, Sq], natural logarithm, or
        None.
    """
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    plan, keys = call.plan, fa4_keys(call.form.request)
    assert keys is not None, "the reasons refuse such plans"
    lists = plan.derive(("fa4", keys), make_lists, plan, keys)
    out, lse = flash_attn_func(
        call.q,
        call.k,
        call.v,
        softmax_scale=call.scale,
        pack_gqa=False,  # lists are per query head
        block_sparse_tensors=BlockSparseTensorsTorch(
            mask_block_cnt=lists.mask_counts,
            mask_block_idx=lists.mask_indices,
            full_block_cnt=lists.full_counts,
            full_block_idx=lists.full_indices,
            block_size=(plan.q.size, keys),
        ),
        return_lse=call.return_lse,
    )
    return out, lse if call.return_lse else None
