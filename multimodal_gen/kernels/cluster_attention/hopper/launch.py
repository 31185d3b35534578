"""Launches the SM90 kernel on clusters."""

import math
from typing import TYPE_CHECKING

import torch

from multimodal_gen.kernels.block_sparse.tuning import HopperTile
from multimodal_gen.kernels.cluster_attention.plan import TILE_ROWS, Groups, Pieces

if TYPE_CHECKING:
    from multimodal_gen.kernels.block_sparse.hopper.work.kernel import Shape

__all__ = ["EXACT", "FAST", "attend"]

FAST = HopperTile(
    consumers=3, keys=64, stages=4, q_registers=False, registers=160, producer_registers=32
)
EXACT = HopperTile(
    consumers=3,
    keys=64,
    stages=4,
    q_registers=False,
    fast=False,
    lazy=True,
    registers=160,
    producer_registers=32,
)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pieces: Pieces,
    keys: Groups,
    keep: torch.Tensor,
    *,
    scale: float,
    tile: HopperTile | None = None,
) -> torch.Tensor:
    """Return the attention of clusters; does not wait for the device.

    Args:
        q: [B, Sq, H, D] in cluster order, stride 1 along D, other strides multiples of 16 bytes.
        k: [B, Sk, Hkv, D], as q.
        v: [B, Sk, Hkv, D], as q.
        pieces: of clusters of queries, at most `TILE_ROWS` each; they cover all rows of q.
        keys: clusters of keys, whose `starts` ascend.
        keep: bool [B, H, Cq, Ck].
        scale: factor of the scores.
        tile: shape of a program.

    Returns:
        [B, Sq, H, D], in cluster order.
    """
    from multimodal_gen.kernels.block_sparse.hopper.kernel import describe
    from multimodal_gen.kernels.cluster_attention.boxes.kernel import BOX, make_boxes
    from multimodal_gen.kernels.cluster_attention.hopper.kernel import cluster_kernel

    tile = tile or (FAST if q.dtype == torch.bfloat16 else EXACT)
    batch, _, heads, channels = q.shape
    width = 64 if channels <= 64 else 128
    assert tile.consumers * 64 == TILE_ROWS, "pieces are cut for these tiles"
    boxes = make_boxes(keys, keep)
    starts, lengths, cluster = (
        x.contiguous() for x in (pieces.starts, pieces.lengths, pieces.cluster)
    )
    num = pieces.starts.shape[2]
    total = batch * heads * num
    out = torch.empty_like(q)
    flags = boxes.counts.new_zeros(total if tile.fast else 1)
    arguments = (
        describe(q, 64, width), describe(k, tile.keys, width), describe(v, tile.keys, width),
        describe(k, BOX, width), describe(v, BOX, width), out, flags,
        starts, lengths, cluster,
        boxes.whole, boxes.starts, boxes.lengths, boxes.counts,
        num, heads, heads // k.shape[2], keep.shape[2],
        boxes.whole.shape[3], boxes.starts.shape[3], *out.stride()[:3], scale / math.log(2.0),
    )  # fmt: skip
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        cluster_kernel[(total,)](*arguments, _shape(tile, channels, redo=False), num_warps=4)
        if tile.fast:
            cluster_kernel[(total,)](*arguments, _shape(tile, channels, redo=True), num_warps=4)
    return out


def _shape(tile: HopperTile, channels: int, *, redo: bool) -> "Shape":
    """Return the compile-time shape of the kernel, of which the consumers use a part."""
    from multimodal_gen.kernels.block_sparse.hopper.work.kernel import Shape

    return Shape(
        keys=tile.keys,
        head_size=64 if channels <= 64 else 128,
        channels=channels,
        sub=0,
        q_tiles=1,
        consumers=tile.consumers,
        stages=tile.stages,
        own=False,
        q_registers=tile.q_registers,
        fast=tile.fast and not redo,
        lazy=tile.lazy or redo,
        sync=0,
        ragged=True,
        ordered=False,
        q_starts=True,
        q_lengths=False,
        bits=False,
        one_word=False,
        lse=False,
        redo=redo,
        registers=tile.registers,
        producer_registers=tile.producer_registers,
    )
