"""Cut each row's list of key blocks into steps of STEP keys, the partial ones last.

A kernel that loops over steps needs no mask in its main loop, whatever the blocks' sizes. Blocks
that follow one another in memory are merged first, so only the end of a run can be partial.

B batch, H heads, Nq query blocks; `steps` and `blocks` are [rows, room], `tail_lengths`
[rows, tail_room], the counts [rows], with rows = B|1 * H|1 * Nq.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from multimodal_gen.kernels.block_sparse.plan import (
    BlockPlan,
    bounds_of,
    broadcast_leading,
    launch_order,
)
from multimodal_gen.kernels.launch.launcher import Launcher
from multimodal_gen.kernels.shared_kernel import maximum, next_power_of_2
from multimodal_gen.kernels.tensors import unit_stride


class Plan(NamedTuple):
    """A plan as kernels read it, in the order of `WorkList.arguments`; then what some add."""

    list: Any
    count: Any
    tail_count: Any
    tail_length: Any
    order: Any
    start: Any
    length: Any
    rows: Any
    rep_h: Any
    num: Any
    plan_h: Any
    group: Any
    last: Any
    tail: Any
    room: Any
    tail_room: Any
    list_b: Any
    list_h: Any
    list_n: Any
    count_b: Any
    count_h: Any
    count_n: Any
    start_b: Any
    start_h: Any
    length_b: Any
    length_h: Any
    size: Any
    total: Any
    lists: Any
    more: Any


# Parameters of kernels that compilations do not depend on; some leave out `group`, too.
PLAN_NUMBERS = tuple(
    name for name in Plan._fields[Plan._fields.index("rows") : -2] if name != "group"
)

CHUNK = 128  # entries of a list that a program looks at together
SHORT_ROW = 512  # entries of a row of a map, which one look is enough for
LONG_ROW_CHUNK = 256  # of longer rows, likewise


@triton.jit(do_not_specialize=["num", "rows_h", "rows_q"])
def _list_kernel(
    map_ptr, index_ptr, count_ptr, map_at, rows_h, rows_q, num, room, CHUNK: tl.constexpr
):
    """Grid [rows]: list what a row of a map keeps, as far as there is room."""
    row = tl.program_id(0)
    i = (row % rows_q).to(tl.int64)
    h = (row // rows_q % rows_h).to(tl.int64)
    b = (row // rows_q // rows_h).to(tl.int64)
    map_ptr += b * map_at[0] + h * map_at[1] + i * map_at[2]
    index_ptr += row.to(tl.int64) * room
    listed = 0
    for first in range(0, num, CHUNK):
        j = first + tl.arange(0, CHUNK)
        kept = (tl.load(map_ptr + j, mask=j < num, other=0) != 0).to(tl.int32)
        slot = listed + tl.cumsum(kept, 0) - kept
        tl.store(index_ptr + slot, j, mask=(kept > 0) & (slot < room))
        listed += tl.sum(kept, 0)
    tl.store(count_ptr + row, tl.minimum(listed, room))


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps of every row: `num_full` whole ones from the front, `num_tail` partial ones at the end.

    Attributes:
        starts: int32 [B|1, H|1, Nq, room]; first key row of step i at i, of partial step i at
            room - 1 - i.
        tail_lengths: int32 [B|1, H|1, Nq, tail_room]; keys of partial step i, in (0, step).
        num_full: int32 [B|1, H|1, Nq].
        num_tail: int32 [B|1, H|1, Nq].
        blocks: like `starts`, the block of each step; None unless asked for.
    """

    starts: torch.Tensor
    tail_lengths: torch.Tensor
    num_full: torch.Tensor
    num_tail: torch.Tensor
    blocks: torch.Tensor | None


@triton.jit
def _block_at(index_ptr, mask, kv, GIVEN_STARTS: tl.constexpr, GIVEN_LENGTHS: tl.constexpr):
    """Return block, first row and length at entries of a list; length 0 where masked out."""
    start_ptr, length_ptr, size, total = kv
    block = tl.load(index_ptr, mask=mask, other=0)
    start = tl.load(start_ptr + block, mask=mask, other=0) if GIVEN_STARTS else block * size
    if GIVEN_LENGTHS:
        length = tl.load(length_ptr + block, mask=mask, other=0)
    else:
        length = tl.minimum(total - start, size)
    return block, start, tl.where(mask, length, 0)


@triton.jit(
    do_not_specialize=["size", "total", "num_q", "heads", "room", "tail_room", "max_whole"],
    do_not_specialize_on_alignment=["count_ptr"],
)
def _steps_kernel(
    index_ptr,
    count_ptr,
    kv_start_ptr,
    kv_length_ptr,
    step_ptr,
    block_ptr,
    tail_length_ptr,
    num_full_ptr,
    num_tail_ptr,
    index_at,
    count_at,
    start_at,
    length_at,
    size,
    total,
    num_q,
    heads,
    room,
    tail_room,
    max_whole,
    STEP: tl.constexpr,
    MERGE: tl.constexpr,
    GIVEN_STARTS: tl.constexpr,
    GIVEN_LENGTHS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid [rows]. A run's step is emitted by the block that completes it.

    With C the cumulated lengths and R the value of C where the current run began, a block covers
    [p, p + length) of its run, p = C - R, and completes (p + length) // STEP - p // STEP steps.
    """
    row = tl.program_id(0)
    i = (row % num_q).to(tl.int64)
    b = (row // num_q // heads).to(tl.int64)
    h = (row // num_q % heads).to(tl.int64)
    index_ptr += b * index_at[0] + h * index_at[1] + i * index_at[2]
    if GIVEN_STARTS:
        kv_start_ptr += b * start_at[0] + h * start_at[1]
    if GIVEN_LENGTHS:
        kv_length_ptr += b * length_at[0] + h * length_at[1]
    step_ptr += row.to(tl.int64) * room
    block_ptr += row.to(tl.int64) * room
    tail_length_ptr += row.to(tl.int64) * tail_room
    count = tl.load(count_ptr + b * count_at[0] + h * count_at[1] + i * count_at[2])

    kv = (kv_start_ptr, kv_length_ptr, size, total)
    num_full = 0
    num_tail = 0
    cumulated = 0
    run_began = 0
    for first in range(0, count, CHUNK):
        e = first + tl.arange(0, CHUNK)
        valid = e < count
        at = index_ptr + e * index_at[3]
        block, start, length = _block_at(at, valid, kv, GIVEN_STARTS, GIVEN_LENGTHS)
        if MERGE:
            has_before = valid & (e > 0)
            at = index_ptr + (e - 1) * index_at[3]
            _, before_start, before_length = _block_at(
                at, has_before, kv, GIVEN_STARTS, GIVEN_LENGTHS
            )
            has_after = e + 1 < count
            at = index_ptr + (e + 1) * index_at[3]
            _, after_start, _ = _block_at(at, has_after, kv, GIVEN_STARTS, GIVEN_LENGTHS)
            begins = valid & ((e == 0) | (start != before_start + before_length))
            ends = valid & ((e + 1 == count) | (after_start != start + length))
        else:
            begins = valid
            ends = valid
        done = cumulated + tl.cumsum(length, 0)
        marked = tl.where(begins, done - length, run_began)
        began = tl.associative_scan(marked, 0, maximum)
        p = done - length - began
        whole = tl.where(valid, (p + length) // STEP - p // STEP, 0)
        slot = num_full + tl.cumsum(whole, 0) - whole
        origin = start - p + p // STEP * STEP
        for t in range(max_whole):
            tl.store(step_ptr + slot + t, origin + t * STEP, mask=t < whole)
            if not MERGE:
                tl.store(block_ptr + slot + t, block, mask=t < whole)
        rest = tl.where(ends, (p + length) % STEP, 0)
        partial = (rest > 0).to(tl.int32)
        slot = num_tail + tl.cumsum(partial, 0) - partial
        tl.store(step_ptr + room - 1 - slot, start + length - rest, mask=rest > 0)
        tl.store(tail_length_ptr + slot, rest, mask=rest > 0)
        if not MERGE:
            tl.store(block_ptr + room - 1 - slot, block, mask=rest > 0)
        num_full += tl.sum(whole, 0)
        num_tail += tl.sum(partial, 0)
        cumulated += tl.sum(length, 0)
        run_began = tl.max(began, 0)
    tl.store(num_full_ptr + row, num_full)
    tl.store(num_tail_ptr + row, num_tail)


_launch_list = Launcher(_list_kernel)
_launch_steps = Launcher(_steps_kernel)


def make_lists(block_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and the counts of a plan of a map; does not wait for the device.

    Args:
        block_mask: bool [B, H, Nq, Nk], stride 1 along rows.

    Returns:
        int32 [B, H, Nq, Nk], arbitrary past the counts, and int32 [B, H, Nq].
    """
    batch, heads, num_q, num = block_mask.shape
    indices = torch.empty(block_mask.shape, dtype=torch.int32, device=block_mask.device)
    counts = torch.empty(block_mask.shape[:3], dtype=torch.int32, device=block_mask.device)
    chunk = max(next_power_of_2(num), 16) if num <= SHORT_ROW else LONG_ROW_CHUNK
    _launch_list(
        (batch * heads * num_q,),
        block_mask.view(torch.uint8), indices, counts, block_mask.stride()[:3],
        heads, num_q, num, num, CHUNK=chunk, num_warps=1,  # threads that hold much scan little
    )  # fmt: skip
    return indices, counts


def make_steps(plan: BlockPlan, step: int) -> Steps:
    """Cut the lists of `plan` into steps of `step` keys, once; does not wait for the device.

    With `row_bits` blocks are not merged, because each step then belongs to one block.
    """
    return plan.derive(("steps", step), _make_steps, plan, step)


def refresh_steps(plan: BlockPlan) -> None:
    """Cut the lists anew into the steps there are, after they were changed in place."""
    for key, known in list(plan.cache.items()):
        if isinstance(known, Steps):
            _make_steps(plan, key[1], into=known)


class Lists(NamedTuple):
    """The lists of a plan, whose blocks are cut in steps of so many keys.

    Attributes:
        tensors: of `WorkList.arguments`; another one stands for what a plan does not have.
        blocks: like the lists, [B|1, H|1, Nq, room], the block of every step.
        bits: int32 [B|1, H|1, Sq, words], what rows choose; some tensor where they do not.
        sub: steps of a key block; 0 where lists hold steps.
        ordered: whether there is an order.
    """

    tensors: tuple[torch.Tensor, ...]
    blocks: torch.Tensor
    bits: torch.Tensor
    sub: int
    ordered: bool


def lists_of(plan: BlockPlan, step: int, *, blocks: bool = True) -> Lists:
    """Return the lists of a plan, once; see `work_list`."""
    return plan.derive(("lists", step, blocks), _lists_of, plan, step, blocks)


def _lists_of(plan: BlockPlan, step: int, blocks: bool) -> Lists:
    kv, counts = plan.kv, plan.counts
    sub = kv.size // step if blocks and kv.is_regular and kv.size % step == 0 else 0
    if sub:
        lists = blocks_of = unit_stride(plan.indices)
        tails = (counts, counts)
    else:
        steps = make_steps(plan, step)
        lists, counts, tails = steps.starts, steps.num_full, (steps.num_tail, steps.tail_lengths)
        blocks_of = lists if steps.blocks is None else steps.blocks
    order = launch_order(plan, counts)
    bounds = [counts if t is None else unit_stride(t) for t in (plan.q.starts, plan.q.lengths)]
    return Lists(
        tensors=(lists, counts, *tails, counts if order is None else order, *bounds),
        blocks=blocks_of,
        bits=lists if plan.row_bits is None else plan.row_bits.contiguous(),
        sub=sub,
        ordered=order is not None,
    )


class WorkList(NamedTuple):
    """What kernels read of a plan: its lists, and what follows from the forms of its tensors.

    Attributes:
        lists: the lists.
        numbers: of lists in the plan, of heads that share each, of query blocks and of heads in the
            plan; query heads of a key head; the last key block and its keys, the room of a list,
            and of its partial steps; strides of lists, of counts, and of starts and lengths; rows
            of a query block, and of all.
        blocks: like the lists, [B, H, Nq, room], the block of every step.
        num: lists of all heads.
        ragged: whether any step may be partial.
    """

    lists: Lists
    numbers: tuple[int, ...]
    blocks: torch.Tensor
    num: int
    ragged: bool

    @property
    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """Those of kernels.

        The lists, their counts, the numbers and the lengths of partial steps, order, starts and
        lengths of query blocks; then `numbers`.
        """
        return (*self.lists.tensors, *self.numbers)


def work_list(
    plan: BlockPlan, step: int, batch: int, heads: int, kv_heads: int, *, blocks: bool = True
) -> WorkList:
    """Return what kernels read of a plan, once.

    Args:
        plan: the plan.
        step: keys of a step.
        batch: B.
        heads: query heads.
        kv_heads: key heads.
        blocks: whether lists may hold blocks that consist of whole steps.
    """
    key = ("work list", step, batch, heads, kv_heads, blocks)
    return plan.derive(key, _work_list, plan, step, batch, heads, kv_heads, blocks)


def _work_list(
    plan: BlockPlan, step: int, batch: int, heads: int, kv_heads: int, blocks: bool
) -> WorkList:
    kv, found = plan.kv, lists_of(plan, step, blocks=blocks)
    lists, counts = found.tensors[:2]
    _, plan_h, num_q = counts.shape
    kv_tail = kv.total - (kv.num - 1) * kv.size
    every_list = lists.expand(batch, heads, -1, -1)
    every_count = counts.expand(batch, heads, -1)
    _, strides = bounds_of(plan.q, batch, heads, counts)
    return WorkList(
        lists=found,
        numbers=(
            counts.numel(), heads // plan_h, num_q, plan_h, heads // kv_heads, kv.num - 1, kv_tail,
            lists.shape[3], plan.indices.shape[3],
            *every_list.stride()[:3], *every_count.stride(), *strides, plan.q.size, plan.q.total,
        ),
        blocks=found.blocks.expand(batch, heads, -1, -1),
        num=batch * heads * num_q,
        ragged=not found.sub or kv_tail != kv.size,
    )  # fmt: skip


def _make_steps(plan: BlockPlan, step: int, into: Steps | None = None) -> Steps:
    kv, indices, counts = plan.kv, plan.indices, plan.counts
    leading = broadcast_leading(counts, *kv.tensors())
    num_q, longest = indices.shape[2:]
    # Blocks are disjoint, so whole steps cannot outnumber those of all keys.
    room = min(longest * -(-kv.size // step), kv.total // step + longest)
    merge = plan.row_bits is None
    if into is None:
        starts = indices.new_empty((*leading, num_q, room))
        into = Steps(
            starts=starts,
            tail_lengths=indices.new_empty((*leading, num_q, longest)),
            num_full=indices.new_empty((*leading, num_q)),
            num_tail=indices.new_empty((*leading, num_q)),
            blocks=None if merge else torch.empty_like(starts),
        )
    indices, counts = indices.expand(*leading, -1, -1), counts.expand(*leading, -1)
    kv_starts, kv_lengths = (
        indices if t is None else unit_stride(t).expand(*leading, -1)
        for t in (kv.starts, kv.lengths)
    )
    chunk = min(max(next_power_of_2(longest), 16), CHUNK)
    _launch_steps(
        (into.num_full.numel(),),
        indices,
        counts,
        kv_starts,
        kv_lengths,
        into.starts,
        into.starts if into.blocks is None else into.blocks,
        into.tail_lengths,
        into.num_full,
        into.num_tail,
        indices.stride(),
        counts.stride(),
        kv_starts.stride()[:2],
        kv_lengths.stride()[:2],
        kv.size,
        kv.total,
        num_q,
        leading[1],
        room,
        longest,
        -(-kv.size // step),
        STEP=step,
        MERGE=merge,
        GIVEN_STARTS=kv.starts is not None,
        GIVEN_LENGTHS=kv.lengths is not None,
        CHUNK=chunk,
        num_warps=max(chunk // 32, 1),
    )
    return into
