"""Launches the SM90 kernel on a plan."""

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, launch_order
from multimodal_gen.kernels.block_sparse.tuning import HopperTile

if TYPE_CHECKING:
    from multimodal_gen.kernels.block_sparse.hopper.kernel import Shape

__all__ = ["attend"]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: BlockPlan,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    scale: float,
    tile: HopperTile,
) -> None:
    """Launch the kernel, and the redo of the tiles it flags; writes `out` and `lse`.

    Args:
        q: [B, Sq, H, D], stride 1 along D, all other strides multiples of 16 bytes.
        k: [B, Sk, Hkv, D], as q.
        v: [B, Sk, Hkv, D], as q.
        plan: the pairs, without row bits, on the same device.
        out: contiguous [B, Sq, H, D]; only rows that belong to a query block are written.
        lse: contiguous fp32 [B, H, Sq], or None.
        scale: factor of the scores.
        tile: shape of a program, as `hopper_tile` chooses it.
    """
    from multimodal_gen.kernels.block_sparse.hopper.kernel import attention_kernel, describe
    from multimodal_gen.kernels.block_sparse.steps.kernel import make_steps

    batch, _, heads, channels = q.shape
    kv = plan.kv
    sub = kv.size // tile.keys if kv.is_regular and kv.size % tile.keys == 0 else 0
    steps = None if sub else make_steps(plan, tile.keys)
    lists = plan.indices if steps is None else steps.starts
    if lists.stride(3) != 1:
        lists = lists.contiguous()
    counts = plan.counts if steps is None else steps.num_full
    tail_counts = counts if steps is None else steps.num_tail
    tail_lengths = counts if steps is None else steps.tail_lengths
    order = launch_order(plan, counts)
    _, plan_h, num_q = counts.shape
    total = batch * heads * num_q
    num_tiles = -(-total // tile.consumers) if tile.own else total * _q_tiles(plan, tile)
    kv_tail = kv.total - (kv.num - 1) * kv.size
    shape = _shape(plan, tile, channels, sub, ordered=order is not None, lse=lse is not None)
    q_bounds = [
        counts if t is None else t.expand(batch, heads, -1).contiguous()
        for t in (plan.q.starts, plan.q.lengths)
    ]
    flags = counts.new_zeros((num_tiles,) if tile.fast else (1,))
    sweep = counts.new_zeros((batch * k.shape[2],) if tile.sync else (1,))
    every_list, every_count = lists.expand(batch, heads, -1, -1), counts.expand(batch, heads, -1)
    arguments = (
        describe(q, 64, shape.head_size), describe(k, tile.keys, shape.head_size),
        describe(v, tile.keys, shape.head_size), out, out if lse is None else lse, flags,
        every_list, every_count, tail_counts, tail_lengths, counts if order is None else order,
        sweep, *q_bounds,
        counts.numel(), heads // plan_h, num_q, plan_h, heads // k.shape[2], kv.num - 1, kv_tail,
        lists.shape[3], plan.indices.shape[3],
        *every_list.stride()[:3], *every_count.stride(), k.shape[2],
        *q_bounds[0].stride()[:2], *q_bounds[1].stride()[:2], plan.q.size, plan.q.total, total,
        *out.stride()[:3], *((0, 0) if lse is None else lse.stride()[:2]), scale / math.log(2.0),
    )  # fmt: skip
    attention_kernel[(num_tiles,)](*arguments, shape, num_warps=4)
    if tile.fast:
        redo = dataclasses.replace(shape, fast=False, redo=True, sync=0)
        attention_kernel[(num_tiles,)](*arguments, redo, num_warps=4)


def _q_tiles(plan: BlockPlan, tile: HopperTile) -> int:
    """Return how many tiles a query block takes."""
    return 1 if tile.own else -(-plan.q.size // (64 * tile.consumers))


def _shape(
    plan: BlockPlan, tile: HopperTile, channels: int, sub: int, *, ordered: bool, lse: bool
) -> "Shape":
    """Return the compile-time shape of the kernel."""
    from multimodal_gen.kernels.block_sparse.hopper.kernel import Shape

    kv_tail = plan.kv.total - (plan.kv.num - 1) * plan.kv.size
    return Shape(
        keys=tile.keys,
        head_size=64 if channels <= 64 else 128,
        channels=channels,
        sub=sub,
        q_tiles=_q_tiles(plan, tile),
        consumers=tile.consumers,
        stages=tile.stages,
        own=tile.own,
        q_registers=tile.q_registers,
        fast=tile.fast,
        sync=tile.sync,
        ragged=sub == 0 or kv_tail != plan.kv.size,
        ordered=ordered,
        q_starts=plan.q.starts is not None,
        q_lengths=plan.q.lengths is not None,
        lse=lse,
        redo=False,
        registers=tile.registers,
        producer_registers=tile.producer_registers,
    )
