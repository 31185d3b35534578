"""Runs cuDNN's block-sparse attention, of the package nvidia-cudnn-frontend, on a plan.

It takes a list of key blocks for every sample, query head and query block, of 64 or 128 tokens;
larger blocks of a plan become several. Keys past the last one are left out by the number of keys of
every block, which it wants wherever one is not full.

Tested by simulation only: the calls are checked against a package with the same signature.
"""

from dataclasses import dataclass

import torch

from multimodal_gen.kernels.block_sparse.call import Call
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, key_tiles
from multimodal_gen.kernels.engine import cudnn_size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockLists:
    """The key blocks of every query block, as the package takes them.

    Attributes:
        indices: int32 [B, H, rows, n], contiguous; past the count anything.
        counts: int32 [B, H, rows], contiguous, 0 where a row has none.
        sizes: int32 [blocks], keys of every block; None where all are full.
    """

    indices: torch.Tensor
    counts: torch.Tensor
    sizes: torch.Tensor | None


def make_lists(plan: BlockPlan, size: int, batch: int, heads: int) -> BlockLists:
    """Return the plan's lists for B samples and H heads; does not wait for the device.

    Args:
        plan: regular blocks, whose sizes are multiples of `size`.
        size: tokens of a block of the package's.
        batch: B.
        heads: H, query heads.
    """
    indices, counts = plan.indices, plan.counts
    if plan.kv.size > size:
        indices, counts, _ = key_tiles(plan, size)
    per_block, rows = plan.q.size // size, -(-plan.q.total // size)
    if per_block > 1:
        indices, counts = (
            x.repeat_interleave(per_block, 2)[:, :, :rows] for x in (indices, counts)
        )
    total, sizes = plan.kv.total, None
    if total % size:
        sizes = counts.new_full((-(-total // size),), size)
        sizes[-1:].fill_(total % size)
    return BlockLists(
        indices=_compact(indices.expand(batch, heads, -1, -1)),
        counts=_compact(counts.expand(batch, heads, -1)),
        sizes=sizes,
    )


def attend(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out and, where asked for, lse.

    Args:
        call: on a plan of regular blocks without row bits; q, k and v are copied unless they are
            contiguous and aligned to 16 bytes.

    Returns:
        out, contiguous [B, Sq, H, D] in q's dtype; lse, fp32 [B, H, Sq], natural logarithm, or
        None. Rows without keys give 0 and -inf.
    """
    from cudnn.block_sparse_attention import block_sparse_attention_forward

    plan, (batch, _, heads, _) = call.plan, call.q.shape
    size = cudnn_size(call.form.request)
    assert size is not None, "the reasons refuse such plans"
    lists = plan.derive(("cudnn", size, batch, heads), make_lists, plan, size, batch, heads)
    found = block_sparse_attention_forward(
        _compact(call.q),
        _compact(call.k),
        _compact(call.v),
        lists.indices,
        block_sizes=lists.sizes,
        q2k_block_nums=lists.counts,
        sparse_block_size=size,
        allow_empty_block_nums=True,
        softmax_scale=call.scale,
        pack_gqa=False,  # lists are per query head
        layout="bshd",
    )
    return found["o_tensor"], found["lse_tensor"] if call.return_lse else None


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as the package's kernels are compiled for: compact, and aligned."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor
