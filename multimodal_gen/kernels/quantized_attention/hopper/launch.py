"""Launches the SM90 kernel on a plan."""

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, launch_order
from multimodal_gen.kernels.launcher import Launcher
from multimodal_gen.kernels.quantized_attention.quantise.packed import Packed
from multimodal_gen.kernels.quantized_attention.slots import in_slots
from multimodal_gen.kernels.quantized_attention.tuning import HopperTile

if TYPE_CHECKING:
    from multimodal_gen.kernels.quantized_attention.hopper.work.kernel import Shape

__all__ = ["attend"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Launch:
    """What launches on one plan have in common, whatever the tensors.

    Attributes:
        grid: number of programs.
        shape: the kernel to compile.
        variants: its options, and those of the kernel that redoes flagged tiles, if any.
        arguments: those that follow from the plan, in the kernel's order.
        counts: a tensor of the plan.
    """

    grid: tuple[int]
    shape: "Shape"
    variants: tuple[dict[str, Any], ...]
    arguments: tuple[Any, ...]
    counts: torch.Tensor


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
        packed: quantised tensors, made for tiles of 64 * `tile.consumers` rows and `tile.unit`
            keys: V in 8 bits with its keys permuted, or in bfloat16, as the tile says.
        plan: the pairs, without row bits and not causal, on the same device.
        out: contiguous [B, Sq, H, D]; only rows that belong to a query block are written.
        lse: contiguous fp32 [B, H, Sq], or None.
        tile: shape of a program, as `hopper_tile` chooses it.
    """
    from multimodal_gen.kernels.quantized_attention.hopper.kernel import describe

    key = ("8-bit hopper", tile, out.shape, packed.k.shape[1], lse is None)
    launch = plan.cache.get(key)
    if launch is None:
        launch = plan.cache[key] = _prepare(packed, plan, out, tile, lse=lse is not None)
    shape = launch.shape
    if tile.e4m3:
        values = describe(packed.v, shape.head_size, tile.keys)
    else:
        values = describe(packed.v.permute(0, 2, 1, 3), tile.unit, shape.head_size)
    flags = launch.counts.new_zeros(launch.grid if tile.fast else (1,))
    arguments = (
        describe(packed.q, 64, shape.head_size), describe(packed.k, tile.unit, shape.head_size),
        values, out, out if lse is None else lse, flags,
        packed.q_scale, packed.k_scale, packed.v_scale, packed.shift,
        *launch.arguments, packed.q.shape[2], packed.k_scale.shape[2],
        *out.stride()[:3], *((0, 0) if lse is None else lse.stride()[:2]),
    )  # fmt: skip
    _launcher().each(launch.grid, *arguments, variants=launch.variants)


@cache
def _launcher() -> Launcher:
    from multimodal_gen.kernels.quantized_attention.hopper.kernel import attention_kernel

    return Launcher(attention_kernel)


def _prepare(
    packed: Packed, plan: BlockPlan, out: torch.Tensor, tile: HopperTile, *, lse: bool
) -> _Launch:
    from multimodal_gen.kernels.block_sparse.steps.kernel import make_steps

    batch, _, heads, channels = out.shape
    slotted = in_slots(plan, tile.unit)
    kv = slotted.kv
    sub = kv.size // tile.unit if kv.is_regular else 0
    steps = None if sub else make_steps(slotted, tile.unit)
    lists = plan.indices if steps is None else steps.starts
    if lists.stride(3) != 1:
        lists = lists.contiguous()
    counts = plan.counts if steps is None else steps.num_full
    tail_counts = counts if steps is None else steps.num_tail
    tail_lengths = counts if steps is None else steps.tail_lengths
    order = launch_order(plan, counts)
    _, plan_h, num_q = counts.shape
    kv_tail = kv.total - (kv.num - 1) * kv.size
    q_tiles = packed.q_slots // (64 * tile.consumers)
    shape = _shape(plan, tile, channels=channels, head_size=packed.q.shape[3], sub=sub)
    shape = dataclasses.replace(
        shape,
        q_tiles=q_tiles,
        ragged=sub == 0 or kv_tail != kv.size,
        ordered=order is not None,
        lse=lse,
    )
    q_bounds = [
        counts if t is None else t.expand(batch, heads, -1).contiguous()
        for t in (plan.q.starts, plan.q.lengths)
    ]
    every_list, every_count = lists.expand(batch, heads, -1, -1), counts.expand(batch, heads, -1)
    arguments = (
        every_list, every_count, tail_counts, tail_lengths, counts if order is None else order,
        *q_bounds, counts.numel(), heads // plan_h, num_q, plan_h, heads // packed.k.shape[1],
        kv.num - 1, kv_tail, lists.shape[3], plan.indices.shape[3],
        *every_list.stride()[:3], *every_count.stride(),
        *q_bounds[0].stride()[:2], *q_bounds[1].stride()[:2],
        plan.q.size, packed.q_slots, plan.q.total,
    )  # fmt: skip
    redo = dataclasses.replace(shape, fast=False, redo=True)
    return _Launch(
        grid=(batch * heads * num_q * q_tiles,),
        shape=shape,
        variants=tuple(
            {"C": c, "num_warps": 4} for c in ((shape, redo) if tile.fast else (shape,))
        ),
        arguments=arguments,
        counts=counts,
    )


def _shape(
    plan: BlockPlan, tile: HopperTile, *, channels: int, head_size: int, sub: int
) -> "Shape":
    """Return the compile-time shape of the kernel, as far as it does not follow from a call."""
    from multimodal_gen.kernels.quantized_attention.hopper.work.kernel import Shape

    return Shape(
        keys=tile.keys,
        unit=tile.unit,
        head_size=head_size,
        channels=channels,
        sub=sub,
        q_tiles=1,
        consumers=tile.consumers,
        stages=tile.stages,
        ragged=True,
        ordered=False,
        q_starts=plan.q.starts is not None,
        q_lengths=plan.q.lengths is not None,
        lse=True,
        e4m3=tile.e4m3,
        fast=tile.fast,
        redo=False,
        q_registers=tile.q_registers,
        registers=tile.registers,
        producer_registers=tile.producer_registers,
    )
