"""What a cluster of queries loads: whole steps of keys, and boxes of eight.

Kept clusters of keys that adjoin form runs. A run is cut into whole steps from its front; what
remains of it is cut into boxes of BOX_KEYS keys, of which the last may be partial. Full boxes come
first, then partial ones, so a step of boxes needs a mask only where those begin.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from multimodal_gen.kernels.cluster_attention.plan import Groups
from multimodal_gen.kernels.launch.launcher import Launcher
from multimodal_gen.kernels.shared_kernel import maximum, minimum, next_power_of_2
from multimodal_gen.kernels.tensors import unit_stride

STEP = 64
BOX_KEYS = 8
_BOXES = STEP // BOX_KEYS


class Boxes(NamedTuple):
    """The keys of every cluster of queries, in cluster order of the keys.

    Attributes:
        whole: int32 [B, H, Cq, room], first keys of whole steps.
        starts: int32 [B, H, Cq, room], first keys of boxes; full boxes, then partial ones, then
            empty ones up to a whole step of boxes.
        lengths: like `starts`, keys of each box.
        counts: int32 [B, H, Cq, 3], the numbers of whole steps, full boxes and partial boxes.
    """

    whole: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    counts: torch.Tensor


@triton.jit
def _clusters(mask_ptr, start_ptr, count_ptr, j, num):
    """First key and number of keys of clusters; 0 keys where they are not kept."""
    inside = (j >= 0) & (j < num)
    kept = tl.load(mask_ptr + j, mask=inside, other=0) != 0
    start = tl.load(start_ptr + j, mask=inside, other=0)
    count = tl.load(count_ptr + j, mask=inside, other=0)
    return start, tl.where(kept, count, 0)


@triton.jit(do_not_specialize=["heads", "group", "num_q", "num_k", "whole_room", "room"])
def _boxes_kernel(
    mask_ptr, start_ptr, count_ptr, whole_ptr, box_ptr, length_ptr, counts_ptr,
    mask_b, mask_h, mask_q, start_b, start_h, count_b, count_h,
    heads, group, num_q, num_k, whole_room, room,
    BLOCK: tl.constexpr, STEP: tl.constexpr, BOX: tl.constexpr,
):  # fmt: skip
    """Grid [B * H * Cq]. Clusters lie in ascending order; one that ends a run emits its boxes."""
    row = tl.program_id(0).to(tl.int64)
    b = row // num_q // heads
    h = row // num_q % heads
    mask_ptr += b * mask_b + h * mask_h + row % num_q * mask_q
    start_ptr += b * start_b + h // group * start_h
    count_ptr += b * count_b + h // group * count_h
    whole_ptr += row * whole_room
    box_ptr += row * room
    length_ptr += row * room

    j = tl.arange(0, BLOCK)
    start, length = _clusters(mask_ptr, start_ptr, count_ptr, j, num_k)
    kept = length > 0
    end = start + length
    # Where the last kept cluster before this one ends, and the next one after it begins.
    s, n = _clusters(mask_ptr, start_ptr, count_ptr, j - 1, num_k)
    before = tl.associative_scan(tl.where(n > 0, s + n, -1), 0, maximum)
    s, n = _clusters(mask_ptr, start_ptr, count_ptr, j + 1, num_k)
    after = tl.associative_scan(tl.where(n > 0, s, 2147483647), 0, minimum, reverse=True)
    done = tl.cumsum(length, 0)
    began = tl.associative_scan(tl.where(kept & (start != before), done - length, 0), 0, maximum)
    p = done - length - began

    steps = tl.where(kept, (p + length) // STEP - p // STEP, 0)
    slot = tl.cumsum(steps, 0) - steps
    origin = start - p + p // STEP * STEP
    for t in range(tl.max(steps, 0)):
        tl.store(whole_ptr + slot + t, origin + t * STEP, mask=t < steps)

    rest = tl.where(kept & (after != end), (p + length) % STEP, 0)
    full = rest // BOX
    num_full = tl.sum(full, 0)
    slot = tl.cumsum(full, 0) - full
    for t in tl.static_range(STEP // BOX - 1):
        at = slot + t
        tl.store(box_ptr + at, end - rest + t * BOX, mask=t < full)
        tl.store(length_ptr + at, BOX + tl.zeros_like(at), mask=t < full)
    partial = rest % BOX
    some = (partial > 0).to(tl.int32)
    num_partial = tl.sum(some, 0)
    at = num_full + tl.cumsum(some, 0) - some
    tl.store(box_ptr + at, end - partial, mask=partial > 0)
    tl.store(length_ptr + at, partial, mask=partial > 0)
    fill = tl.arange(0, STEP // BOX)
    used = num_full + num_partial
    tl.store(box_ptr + used + fill, tl.zeros_like(fill), mask=fill < STEP // BOX - 1)
    tl.store(length_ptr + used + fill, tl.zeros_like(fill), mask=fill < STEP // BOX - 1)

    tl.store(counts_ptr + row * 3, tl.sum(steps, 0))
    tl.store(counts_ptr + row * 3 + 1, num_full)
    tl.store(counts_ptr + row * 3 + 2, num_partial)


_launch_boxes = Launcher(_boxes_kernel)


def make_boxes(keys: Groups, cluster_mask: torch.Tensor) -> Boxes:
    """Cut what is kept into whole steps and boxes; does not wait for the device.

    Args:
        keys: clusters of keys of Hkv heads; `starts` ascend.
        cluster_mask: bool [B, H, Cq, Ck].
    """
    batch, heads, num_q, num_k = cluster_mask.shape
    total = keys.order.shape[2]
    whole_room = max(total // STEP, 1)
    # Each run leaves 7 full boxes and a partial one at most; a step of boxes is filled up.
    room = min(_BOXES * num_k, total) + _BOXES
    shape = (batch, heads, num_q)
    boxes = Boxes(
        *(
            torch.empty((*shape, n), dtype=torch.int32, device=cluster_mask.device)
            for n in (whole_room, room, room, 3)
        )
    )
    mask, begin, count = map(unit_stride, (cluster_mask, keys.starts, keys.counts))
    block = max(next_power_of_2(num_k), 32)
    _launch_boxes(
        (batch * heads * num_q,),
        mask.view(torch.uint8), begin, count, *boxes,
        *mask.stride()[:3], *begin.stride()[:2], *count.stride()[:2],
        heads, heads // count.shape[1], num_q, num_k, whole_room, room,
        BLOCK=block, STEP=STEP, BOX=BOX_KEYS, num_warps=4,
    )  # fmt: skip
    return boxes
