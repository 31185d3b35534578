"""Runs FlashAttention-4 on a plan.

It takes two lists of key tiles per query block: full ones, which it computes without looking at
single keys, and masked ones. Its key tile is fixed by the head size, so a key block may become
several tiles; only the tile that the keys end in is masked.
"""

from dataclasses import dataclass

import torch

from multimodal_gen.kernels.block_sparse.call import Call
from multimodal_gen.kernels.block_sparse.plan import BlockPlan


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
    kv, room = plan.kv, plan.indices.shape[3]
    per_block = kv.size // keys
    tiles = -(-kv.total // keys)
    # The last block is listed last, if at all, and may have fewer tiles.
    last = (plan.counts - 1).clamp_min(0).unsqueeze(-1)
    ends = plan.indices.gather(3, last.long()).squeeze(-1) == kv.num - 1
    ends = (ends & (plan.counts > 0)).int()
    counts = plan.counts * per_block - ends * (kv.num * per_block - tiles)
    within = torch.arange(per_block, dtype=torch.int32, device=plan.device)
    indices = (plan.indices.unsqueeze(-1) * per_block + within).flatten(3)
    masked = ends if kv.total % keys else torch.zeros_like(ends)
    return TileLists(
        full_counts=counts - masked,
        # A row that lists every block has more entries than there are tiles.
        full_indices=indices[..., : min(room * per_block, tiles)],
        mask_counts=masked,
        mask_indices=masked.new_full((1, 1, plan.q.num, 1), tiles - 1),
    )


def attend(call: Call, *, keys: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out and, where asked for, lse.

    Args:
        call: on a plan of regular blocks without row bits; q, k and v are copied by the package
            if their rows are not aligned to 16 bytes.
        keys: keys of a tile, as `fa4_keys` chooses them.

    Returns:
        out, contiguous [B, Sq, H, D] in q's dtype; lse, fp32 [B, H, Sq], natural logarithm, or
        None.
    """
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    plan = call.plan
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
