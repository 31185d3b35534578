"""Launches the SM90 kernel on a plan."""

import dataclasses
import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, launch_order, unit_stride
from multimodal_gen.kernels.block_sparse.tuning import HopperTile
from multimodal_gen.kernels.launcher import Launcher

if TYPE_CHECKING:
    from multimodal_gen.kernels.block_sparse.hopper.work.kernel import Shape

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
        plan: the pairs, on the same device.
        out: contiguous [B, Sq, H, D]; only rows that belong to a query block are written.
        lse: contiguous fp32 [B, H, Sq], or None.
        scale: factor of the scores.
        tile: shape of a program, as `hopper_tile` chooses it.
    """
    from multimodal_gen.kernels.block_sparse.hopper.kernel import describe

    key = ("hopper", tile, q.shape, k.shape[2], lse is None)
    launch = plan.cache.get(key)
    if launch is None:
        launch = plan.cache[key] = _prepare(q, k, plan, tile, lse)
    shape, rows = launch.shape, launch.num_flags
    # One allocation, whose second part begins at a multiple of 16 bytes like the first.
    marks = launch.counts.new_zeros(rows + launch.num_sweeps)
    sweep = marks[rows:] if launch.num_sweeps else marks
    arguments = (
        describe(q, 64, shape.head_size), describe(k, tile.keys, shape.head_size),
        describe(v, tile.keys, shape.head_size), out, out if lse is None else lse, marks, sweep,
        *launch.arguments, *out.stride()[:3],
        *((0, 0) if lse is None else lse.stride()[:2]), scale / math.log(2.0),
    )  # fmt: skip
    _launcher().each(launch.grid, *arguments, variants=launch.variants)


@cache
def _launcher() -> Launcher:
    from multimodal_gen.kernels.block_sparse.hopper.kernel import attention_kernel

    return Launcher(attention_kernel)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Launch:
    """What launches on one plan have in common, whatever the tensors.

    Attributes:
        grid: number of programs.
        shape: the kernel to compile.
        variants: its options, and those of the kernel that redoes flagged tiles, if any.
        arguments: those that follow from the plan, in the kernel's order.
        counts: a tensor of the plan.
        num_flags: int32 flags to make room for, a multiple of four.
        num_sweeps: positions of key sweeps to make room for.
    """

    grid: tuple[int]
    shape: "Shape"
    variants: tuple[dict[str, Any], ...]
    arguments: tuple[Any, ...]
    counts: torch.Tensor
    num_flags: int
    num_sweeps: int


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    plan: BlockPlan,
    tile: HopperTile,
    lse: torch.Tensor | None,
) -> _Launch:
    from multimodal_gen.kernels.block_sparse.steps.kernel import make_steps

    batch, _, heads, channels = q.shape
    kv = plan.kv
    whole = kv.is_regular and kv.size % tile.keys == 0 and plan.row_bits is None
    sub = kv.size // tile.keys if whole else 0
    steps = None if sub else make_steps(plan, tile.keys)
    lists = plan.indices if steps is None else steps.starts
    lists = unit_stride(lists)
    counts = plan.counts if steps is None else steps.num_full
    tail_counts = counts if steps is None else steps.num_tail
    tail_lengths = counts if steps is None else steps.tail_lengths
    # A plan with row bits is always cut in steps, none of which are merged.
    blocks = lists if steps is None or steps.blocks is None else steps.blocks
    bits = counts.unsqueeze(3) if plan.row_bits is None else plan.row_bits.contiguous()
    order = launch_order(plan, counts)
    _, plan_h, num_q = counts.shape
    total = batch * heads * num_q
    num_tiles = -(-total // tile.consumers) if tile.own else total * _q_tiles(plan, tile)
    kv_tail = kv.total - (kv.num - 1) * kv.size
    shape = _shape(plan, tile, channels, sub, ordered=order is not None, lse=lse is not None)
    q_bounds = [
        counts if t is None else unit_stride(t).expand(batch, heads, -1)
        for t in (plan.q.starts, plan.q.lengths)
    ]
    every_list, every_count = lists.expand(batch, heads, -1, -1), counts.expand(batch, heads, -1)
    arguments = (
        every_list, every_count, tail_counts, tail_lengths, counts if order is None else order,
        *q_bounds, counts.numel(), heads // plan_h, num_q, plan_h, heads // k.shape[2],
        kv.num - 1, kv_tail, lists.shape[3], plan.indices.shape[3],
        *every_list.stride()[:3], *every_count.stride(), k.shape[2],
        *q_bounds[0].stride()[:2], *q_bounds[1].stride()[:2], plan.q.size, plan.q.total, total,
        blocks, bits, *bits.expand(batch, heads, -1, -1).stride()[:2], bits.shape[3],
    )  # fmt: skip
    redo = dataclasses.replace(shape, fast=False, redo=True, sync=0)
    return _Launch(
        grid=(num_tiles,),
        shape=shape,
        variants=tuple(
            {"C": c, "num_warps": 4} for c in ((shape, redo) if tile.fast else (shape,))
        ),
        arguments=arguments,
        counts=counts,
        num_flags=-(-num_tiles // 4) * 4 if tile.fast else 4,
        num_sweeps=batch * k.shape[2] if tile.sync else 0,
    )


def _q_tiles(plan: BlockPlan, tile: HopperTile) -> int:
    """Return how many tiles a query block takes."""
    return 1 if tile.own else -(-plan.q.size // (64 * tile.consumers))


def _shape(
    plan: BlockPlan, tile: HopperTile, channels: int, sub: int, *, ordered: bool, lse: bool
) -> "Shape":
    """Return the compile-time shape of the kernel."""
    from multimodal_gen.kernels.block_sparse.hopper.work.kernel import Shape

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
        lazy=tile.lazy,
        sync=tile.sync,
        ragged=sub == 0 or kv_tail != plan.kv.size,
        ordered=ordered,
        q_starts=plan.q.starts is not None,
        q_lengths=plan.q.lengths is not None,
        bits=plan.row_bits is not None,
        one_word=plan.row_bits is not None and plan.row_bits.shape[3] == 1,
        lse=lse,
        redo=False,
        registers=tile.registers,
        producer_registers=tile.producer_registers,
    )
