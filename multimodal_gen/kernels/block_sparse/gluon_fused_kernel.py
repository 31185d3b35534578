"""The backward pass of block-sparse attention on SM90 in one kernel, which adds dq up in memory.

A program owns 128 keys, 64 per consumer warpgroup, whose dk and dv stay in registers while steps of
64 queries travel through a ring in shared memory; see `gluon_backward_kernel` for the formulas. The
scores' gradients of a step, of both warpgroups, are left in shared memory, and each warpgroup
multiplies them with half of the channels of all 128 keys. The copy engine adds the products to dq
in fp32 while dk of the step is computed. The order of these sums
differs from run to run.

Five products instead of the seven of two kernels.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from multimodal_gen.kernels.block_sparse.backward_kernel import levels, transposed
from multimodal_gen.kernels.block_sparse.call import Backward
from multimodal_gen.kernels.block_sparse.gluon_backward_kernel import GradientShape, store_through
from multimodal_gen.kernels.block_sparse.gluon_work_kernel import (
    More,
    Outs,
    find_work,
    step_start,
)
from multimodal_gen.kernels.block_sparse.steps_kernel import PLAN_NUMBERS, Plan, work_list
from multimodal_gen.kernels.hopper_kernel import barriers, specialize, wait_empty
from multimodal_gen.kernels.launch.compat import async_add, async_load
from multimodal_gen.kernels.launch.descriptors import describe_tokens
from multimodal_gen.kernels.launch.launcher import Launcher

STEP = 64  # queries
KEYS = 128  # of a program
STAGES = 2  # of the ring; there is no room for three
HALF = gl.constexpr(64)  # channels of dq that a warpgroup computes


class Rings(NamedTuple):
    """Shared memory: tiles, and barriers that say when they are full and empty."""

    k: Any
    v: Any
    k_half: Any
    q: Any
    grad: Any
    level: Any
    delta: Any
    scores: Any
    sums: Any
    own_full: Any
    full: Any
    empty: Any
    scores_full: Any


@gluon.jit
def _producer(fed, W: gl.constexpr, C: gl.constexpr):
    """One warp: loads the keys and values; queries, their gradients, levels, deltas of a step."""
    dk, dv, dk_half, dq, dg, dl, work, rings = fed
    D: gl.constexpr = C.head_size
    steps = work.num_full + work.num_tail
    if steps > 0:
        for w in gl.static_range(2):
            full = rings.own_full.index(w)
            row = work.row + w * 64
            mbarrier.expect(full, 3 * 64 * D * 2)
            async_load(dk, [work.b, work.h, row, 0], full, rings.k.index(w))
            async_load(dv, [work.b, work.h, row, 0], full, rings.v.index(w))
            for half in gl.static_range(2):
                place = rings.k_half.index(half * 2 + w)
                async_load(dk_half, [work.b, work.h, row, half * HALF], full, place)
        start = step_start(work, 0, 0, C)
        for step in range(steps):
            following = step_start(work, gl.minimum(step + 1, steps - 1), 0, C)
            slot = wait_empty(rings.empty, step, 0, C)
            full = rings.full.index(slot)
            mbarrier.expect(full, 2 * C.keys * D * 2 + 2 * C.keys * 4)
            async_load(dl, [0, work.b, work.h, start], full, rings.level.index(slot))
            async_load(dq, [work.b, work.h, start, 0], full, rings.q.index(slot))
            async_load(dl, [1, work.b, work.h, start], full, rings.delta.index(slot))
            async_load(dg, [work.b, work.h, start, 0], full, rings.grad.index(slot))
            start = following


@gluon.jit
def _begin(columns, factor, rows):
    """Return products of columns and a factor, plus rows, in registers of their own."""
    rows, columns = gl.broadcast(gl.expand_dims(rows, 1), gl.expand_dims(columns, 0))
    rows, factor = gl.broadcast(rows, factor)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [columns, factor, rows], dtype=gl.float32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _add(dq, rings, d_sums, work, start, W: gl.constexpr, none):
    """Add half of the channels of 64 rows to dq in memory."""
    tile = rings.sums.index(W + none)
    tma.store_wait(0)
    tile.reshape([64, HALF]).store(dq)
    hopper.fence_async_shared()
    async_add(d_sums, [work.b, work.h, start, W * HALF], tile)


@gluon.jit
def _consumer(given, W: gl.constexpr, C: gl.constexpr):
    """One warpgroup: dk and dv of 64 keys, and half of the channels of dq."""
    work, rings, d_sums, scale, scale_log2, dv_ptr = given
    dtype: gl.constexpr = rings.k.dtype
    N: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    half_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16]
    )
    dk = gl.zeros([64, D], gl.float32, C.o_layout)
    dv = gl.zeros([64, D], gl.float32, C.o_layout)
    steps = work.num_full + work.num_tail
    if steps > 0:
        inside = W * 64 + gl.arange(0, 64, C.rows_s)
        reach = gl.where(inside < work.real, 0.0, float("-inf"))
        nothing = gl.zeros_like(reach)
        start = step_start(work, 0, 0, C)
        mbarrier.wait(rings.own_full.index(0), 0)
        mbarrier.wait(rings.own_full.index(1), 0)
        for step in range(steps):
            none = step >> 30  # 0, which the compiler must not know: places would fill registers
            slot = step % C.stages + none
            k = rings.k.index(W + none).reshape([64, D])
            v = rings.v.index(W + none).reshape([64, D])
            q = rings.q.index(slot).reshape([N, D])
            grad = rings.grad.index(slot).reshape([N, D])
            mbarrier.wait(rings.full.index(slot), (step // C.stages) & 1)
            # Scores begin at minus their level, and dO v^T at minus delta, which costs no register
            # more than the sums themselves.
            delta = rings.delta.index(slot).reshape([N]).load(C.columns)
            p_first = _begin(delta, scale_log2 * 0.0 - 1.0, nothing)
            level = rings.level.index(slot).reshape([N]).load(C.columns)
            s_first = _begin(level, -1.0 / scale_log2, reach)
            s_token = hopper.warpgroup_mma(k, q.permute((1, 0)), s_first, is_async=True)
            p_token = hopper.warpgroup_mma(v, grad.permute((1, 0)), p_first, is_async=True)
            s = hopper.warpgroup_mma_wait(1, deps=[s_token])
            p = gl.exp2(s * scale_log2)
            weights = gl.convert_layout(p.to(dtype), C.p_layout)
            # Begun before dO v^T is waited for: else ptxas moves the exponentials behind that.
            v_token = hopper.warpgroup_mma(weights, grad, dv, is_async=True)
            dp = hopper.warpgroup_mma_wait(1, deps=[p_token])
            ds = (p * dp).to(dtype)
            scores = gl.convert_layout(ds, C.p_layout)
            # Two buffers: a warpgroup writes one only once the other is done reading it.
            buffer = step & 1
            rings.scores.index(buffer * 2 + W).store(ds)
            hopper.fence_async_shared()
            mbarrier.arrive(rings.scores_full.index(buffer))
            mbarrier.wait(rings.scores_full.index(buffer), (step >> 1) & 1)
            zero = gl.zeros([64, HALF], gl.float32, half_layout)
            ds_0 = rings.scores.index(buffer * 2).permute((1, 0))
            ds_1 = rings.scores.index(buffer * 2 + 1).permute((1, 0))
            k_0 = rings.k_half.index(W * 2 + none).reshape([64, HALF])
            k_1 = rings.k_half.index(W * 2 + 1 + none).reshape([64, HALF])
            q_token = hopper.warpgroup_mma(ds_0, k_0, zero, use_acc=False, is_async=True)
            q_token = hopper.warpgroup_mma(ds_1, k_1, q_token, is_async=True)
            k_token = hopper.warpgroup_mma(scores, q, dk, is_async=True)
            dv, dq, weights = hopper.warpgroup_mma_wait(1, deps=[v_token, q_token, weights])
            following = step_start(work, gl.minimum(step + 1, steps - 1), 0, C)
            _add(dq, rings, d_sums, work, start, W, none)
            start = following
            dk, scores = hopper.warpgroup_mma_wait(0, deps=[k_token, scores])
            mbarrier.arrive(rings.empty.index(slot))
        tma.store_wait(0)
    # Not through the keys, which the other warpgroup may still read.
    tile = rings.v.index(W).reshape([64, D])
    store_through(dk * scale, tile, work.out, work, W * 64, C)
    store_through(dv, tile, dv_ptr, work, W * 64, C)


@gluon.jit(do_not_specialize=[*PLAN_NUMBERS, "group", "lists"])
def fused_backward_kernel(
    d_k, d_v, d_half, d_q, d_g, d_l, d_sums, dk_ptr, dv_ptr,
    list_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, start_ptr, length_ptr,
    rows, rep_h, num, plan_h, group, last, tail, room, tail_room,
    list_b, list_h, list_n, count_b, count_h, count_n,
    start_b, start_h, length_b, length_h, size, total, lists,
    out_b, out_s, out_h, scale, C: gl.constexpr,
):  # fmt: skip
    """Grid: one program per 128 keys of a key block."""
    plan = Plan(
        list_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, start_ptr, length_ptr,
        rows, rep_h, num, plan_h, group, last, tail, room, tail_room,
        list_b, list_h, list_n, count_b, count_h, count_n,
        start_b, start_h, length_b, length_h, size, total,
        lists, More(list_ptr, 0, list_ptr, list_ptr, 0, 0, 0),
    )  # fmt: skip
    outs = Outs(dk_ptr, count_ptr, out_b, out_s, out_h, 0, 0)
    dtype: gl.constexpr = d_k.dtype
    D: gl.constexpr = C.head_size
    RING: gl.constexpr = C.stages
    scores_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2
    )
    rings = Rings(
        gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], d_k.layout),
        gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], d_v.layout),
        gl.allocate_shared_memory(dtype, [4, 1, 1, 64, HALF], d_half.layout),
        gl.allocate_shared_memory(dtype, [C.stages, 1, 1, C.keys, D], d_q.layout),
        gl.allocate_shared_memory(dtype, [C.stages, 1, 1, C.keys, D], d_g.layout),
        gl.allocate_shared_memory(gl.float32, [C.stages, 1, 1, 1, C.keys], d_l.layout),
        gl.allocate_shared_memory(gl.float32, [C.stages, 1, 1, 1, C.keys], d_l.layout),
        gl.allocate_shared_memory(dtype, [4, 64, C.keys], scores_layout),
        gl.allocate_shared_memory(gl.float32, [2, 1, 1, 64, HALF], d_sums.layout),
        barriers(2, 1),
        barriers(RING, 1),
        barriers(RING, 2),
        barriers(2, 2),
    )
    hopper.fence_async_shared()
    scale_log2 = scale * 1.4426950408889634
    work = find_work(0, gl.program_id(0), plan, outs, C)
    dv = dv_ptr + work.b.to(gl.int64) * out_b + work.h.to(gl.int64) * out_h
    dv += work.row.to(gl.int64) * out_s
    given = (work, rings, d_sums, scale, scale_log2, dv)
    fed = (d_k, d_v, d_half, d_q, d_g, d_l, work, rings)
    specialize(_consumer, (given,), _producer, (fed,), C)


_launcher = Launcher(fused_backward_kernel)


def _describe_rows(rows: torch.Tensor) -> TensorDescriptor:
    """Describe fp32 [2, B, H, S] to the copy engine, by boxes of a step."""
    if rows.shape[3] % 4:  # rows of 16 bytes
        rows = torch.nn.functional.pad(rows, (0, 4 - rows.shape[3] % 4))
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=4)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [1, 1, 1, STEP], layout)


def attend_backward(
    call: Backward, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, [B, S, H, D], contiguous.

    Args:
        call: whose tensors all have as many heads, stride 1 along D and other strides that are
            multiples of 16 bytes; its plan has whole blocks, no row bits and is not causal.
        rows: level and delta of the queries, fp32 [2, B, H, Sq], contiguous, where they are known.
    """
    q, k, v, plan, _, _, grad, _, scale = call
    assert plan.q.size % STEP == plan.kv.size % KEYS == 0, "others are not chosen"
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    rows = levels(call) if rows is None else rows
    batch, _, heads, channels = q.shape
    of_keys = transposed(plan)
    work = work_list(of_keys, STEP, batch, heads, heads)
    shape = GradientShape.of_work(
        of_keys, work, channels, keys=STEP, q_tiles=plan.kv.size // KEYS, consumers=2,
        stages=STAGES, registers=240,
    )  # fmt: skip
    sums = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    _launcher(
        (shape.num_tiles(work),),
        describe_tokens(k, 64, 128), describe_tokens(v, 64, 128),
        describe_tokens(k, 64, HALF.value), describe_tokens(q, STEP, 128),
        describe_tokens(grad, STEP, 128), _describe_rows(rows),
        describe_tokens(sums, STEP, HALF.value), dk, dv, *work.arguments, work.num,
        *dk.stride()[:3], scale, C=shape, num_warps=4,
    )  # fmt: skip
    torch.mul(sums, scale, out=dq)
    return dq, dk, dv
