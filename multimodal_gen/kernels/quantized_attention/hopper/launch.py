"""Launches the SM90 kernel on a plan."""

import dataclasses
from typing import TYPE_CHECKING

import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, launch_order
from multimodal_gen.kernels.block_sparse.steps.kernel import make_steps
from multimodal_gen.kernels.quantized_attention.quantise.packed import Packed
from multimodal_gen.kernels.quantized_attention.slots import in_slots
from multimodal_gen.kernels.quantized_attention.tuning import HopperTile

if TYPE_CHECKING:
    from multimodal_gen.kernels.quantized_attention.hopper.kernel import Shape

__all__ = ["attend"]


def attend(
    packed: Packed,
    plan: BlockPlan,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    tile: HopperTile,
) -> None:
    """Launch the kernel, and the redo of the tiles it flags; writes `out` and `lse`.

    Args:
        packed: quantised tensors, made for tiles of 64 * `tile.consumers` rows and `tile.keys`
            keys: V in 8 bits with its keys permuted, or in bfloat16, as the tile says.
        plan: the pairs, without row bits and not causal, on the same device.
        out: contiguous [B, Sq, H, D]; only rows that belong to a query block are written.
        lse: contiguous fp32 [B, H, Sq], or None.
        tile: shape of a program, as `hopper_tile` chooses it.
    """
    from multimodal_gen.kernels.quantized_attention.hopper.kernel import attention_kernel, describe

    batch, _, heads, channels = out.shape
    slotted = in_slots(plan, tile.keys)
    kv = slotted.kv
    sub = kv.size // tile.keys if kv.is_regular else 0
    steps = None if sub else make_steps(slotted, tile.keys)
    lists = plan.indices if steps is None else steps.starts
    if lists.stride(3) != 1:
        lists = lists.contiguous()
    counts = plan.counts if steps is None else steps.num_full
    tail_counts = counts if steps is None else steps.num_tail
    tail_lengths = counts if steps is None else steps.tail_lengths
    order = launch_order(plan, counts)
    _, plan_h, num_q = counts.shape
    head_size = packed.q.shape[3]
    kv_heads = packed.k.shape[1]
    kv_tail = kv.total - (kv.num - 1) * kv.size
    q_tiles = packed.q_slots // (64 * tile.consumers)
    shape = _shape(
        plan, tile, (channels, head_size), sub,
        q_tiles=q_tiles, ragged=sub == 0 or kv_tail != kv.size, ordered=order is not None,
        lse=lse is not None,
    )  # fmt: skip
    q_bounds = [
        counts if t is None else t.expand(batch, heads, -1).contiguous()
        for t in (plan.q.starts, plan.q.lengths)
    ]
    every_list, every_count = lists.expand(batch, heads, -1, -1), counts.expand(batch, heads, -1)
    values = (
        describe(packed.v, head_size, tile.keys)
        if tile.e4m3
        else describe(packed.v.permute(0, 2, 1, 3), tile.keys, head_size)
    )
    num_tiles = batch * heads * num_q * q_tiles
    flags = counts.new_zeros((num_tiles,) if tile.fast else (1,))
    arguments = (
        describe(packed.q, 64, head_size), describe(packed.k, tile.keys, head_size),
        values, out, out if lse is None else lse, flags,
        packed.q_scale, packed.k_scale, packed.v_scale, packed.shift,
        every_list, every_count, tail_counts, tail_lengths, counts if order is None else order,
        *q_bounds,
        counts.numel(), heads // plan_h, num_q, plan_h, heads // kv_heads, kv.num - 1, kv_tail,
        lists.shape[3], plan.indices.shape[3],
        *every_list.stride()[:3], *every_count.stride(),
        *q_bounds[0].stride()[:2], *q_bounds[1].stride()[:2],
        plan.q.size, packed.q_slots, plan.q.total, packed.q.shape[2], packed.k_scale.shape[2],
        *out.stride()[:3], *((0, 0) if lse is None else lse.stride()[:2]),
    )  # fmt: skip
    attention_kernel[(num_tiles,)](*arguments, shape, num_warps=4)
    if tile.fast:
        redo = dataclasses.replace(shape, fast=False, redo=True)
        attention_kernel[(num_tiles,)](*arguments, redo, num_warps=4)


def _shape(
    plan: BlockPlan,
    tile: HopperTile,
    channels: tuple[int, int],
    sub: int,
    *,
    q_tiles: int,
    ragged: bool,
    ordered: bool,
    lse: bool,
) -> "Shape":
    """Return the compile-time shape of the kernel; `channels` before and after padding."""
    from multimodal_gen.kernels.quantized_attention.hopper.kernel import Shape

    return Shape(
        keys=tile.keys,
        head_size=channels[1],
        channels=channels[0],
        sub=sub,
        q_tiles=q_tiles,
        consumers=tile.consumers,
        stages=tile.stages,
        ragged=ragged,
        ordered=ordered,
        q_starts=plan.q.starts is not None,
        q_lengths=plan.q.lengths is not None,
        lse=lse,
        e4m3=tile.e4m3,
        fast=tile.fast,
        redo=False,
        registers=tile.registers,
        producer_registers=tile.producer_registers,
    )
