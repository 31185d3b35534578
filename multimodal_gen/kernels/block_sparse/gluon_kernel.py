"""Block-sparse attention on SM90 in Gluon: producer warps feed consumer warpgroups.

A consumer warpgroup owns 64 query rows. K and V travel through rings of STAGES shared-memory tiles
of BN keys, with a full and an empty barrier each; V lags K by one step, and the product P V of a
step runs while the scores of the next one are computed. With s = scale * log2(e) * q k^T:

* exact: the online softmax, m' = max(m, rowmax s), acc = acc 2^(m - m') + 2^(s - m') v;
* lazy: the same, with m' = m unless rowmax s > m + SLACK. Weights then reach 2^SLACK, which costs
  no bits, and hardly any step rescales: each warp of 16 rows jumps over it when it may;
* fast: the row maximum of the first step stays the reference, so nothing is rescaled. bfloat16
  weights have the exponents of fp32, so only a row whose later scores are far above the reference
  can go wrong. A consumer of such rows is flagged and writes nothing: the exact kernel redoes them,
  for which queries may be where results go.

Where rows choose among the blocks of their list, a step of a block that a row does not keep has the
reference infinity in that row, which makes its weights 0.

OWN: every consumer has its own query block, ring and producer warp; else all consumers share one.

SKIP: where the scores of a step lie so many powers of two below m in all 64 rows of a consumer, its
weights are not added, and its product P V does not run. It takes the exact or the lazy kernel; the
lazy one's m may be up to SLACK below the largest score, which then skips less.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from multimodal_gen.kernels.block_sparse.call import Call
from multimodal_gen.kernels.block_sparse.gluon_step_kernel import (
    LOWEST,
    advance_unless_needless,
    kept_blocks,
    last_product,
)
from multimodal_gen.kernels.block_sparse.gluon_work_kernel import (
    More,
    Outs,
    Shape,
    block_ahead,
    block_of,
    choices,
    find_work,
    first_turn,
    infinity,
    launch_with_redo,
    lost,
    make_rings,
    step_start,
    store_lse,
    store_values,
    tail_keys,
    whole_keys,
)
from multimodal_gen.kernels.block_sparse.steps_kernel import (
    PLAN_NUMBERS,
    Plan,
    lists_of,
    work_list,
)
from multimodal_gen.kernels.block_sparse.tuning import GluonTile
from multimodal_gen.kernels.hopper_kernel import (
    OVERFLOW,
    fetch,
    partial_sums,
    scores,
    specialize,
    wait_empty,
    wait_full,
)
from multimodal_gen.kernels.launch.descriptors import TOKENS_BY_HEAD, described_at
from multimodal_gen.kernels.launch.launcher import Launch, Launcher

# Rows that choose may not see the keys of the reference: below this, weights may have been lost.
UNDERFLOW = gl.constexpr(2.0**-64)


@gluon.jit
def _load_v(dv, work, start, step, rings, FIRST: gl.constexpr, C: gl.constexpr):
    """Load V of a step, once its slot is empty."""
    slot = wait_empty(rings.v_empty, step, FIRST, C)
    fetch(dv, [work.b, work.kv_h, start, 0], rings.v_full.index(slot), rings.v.index(slot))


@gluon.jit
def _producer(fed, W: gl.constexpr, C: gl.constexpr):
    """One warp: loads a tile's Q, and K and V of every step, V one step late."""
    dq, dk, dv, work, rings = fed
    SHARERS: gl.constexpr = 1 if C.own else C.consumers
    FIRST: gl.constexpr = W * C.stages if C.own else 0
    steps = work.num_full + work.num_tail
    if steps > 0:
        turn = steps * 0
        if C.sync > 0:
            turn = first_turn(work, gl.load(work.sweep, volatile=True), C)
        start = step_start(work, 0, turn, C)
        for c in gl.static_range(SHARERS):
            place = [work.b, work.h, work.row + c * 64, 0]
            fetch(dq, place, rings.q_full.index(W + c), rings.q.index(W + c))
        # Not `start`: the compiler takes loop variables that begin with one value for the same.
        before = steps * 0
        for step in range(steps):
            following = step_start(work, gl.minimum(step + 1, steps - 1), turn, C)
            if C.sync > 0:
                gl.store(work.sweep, start, mask=step % C.sync == C.sync - 1)
            slot = wait_empty(rings.k_empty, step, FIRST, C)
            fetch(dk, [work.b, work.kv_h, start, 0], rings.k_full.index(slot), rings.k.index(slot))
            if step > 0:
                _load_v(dv, work, before, step - 1, rings, FIRST, C)
            before = start
            start = following
        _load_v(dv, work, before, steps - 1, rings, FIRST, C)


@gluon.jit
def consume(given, W: gl.constexpr, C: gl.constexpr):
    """One warpgroup: attends with 64 query rows of a tile; byte W of the tile's flag is its own."""
    work, rings, flags, scale_log2 = given
    dtype: gl.constexpr = rings.q.dtype
    FIRST: gl.constexpr = W * C.stages if C.own else 0
    ROW: gl.constexpr = 0 if C.own else W * 64
    BN: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    steps = work.num_full + work.num_tail
    if steps == 0:
        nothing = gl.zeros([64, D], dtype, C.store_layout)
        store_values(work.out, nothing, work, work.owned, ROW, C)
        unseen = gl.full([64], float("-inf"), gl.float32, C.rows_s)
        store_lse(unseen, work, work.owned, ROW, C)
    else:
        q_tile = rings.q.index(W).reshape([64, D])
        mbarrier.wait(rings.q_full.index(W), 0)
        q = q_tile
        if C.q_registers:
            q = q_tile.load(C.q_layout)
        words = None
        if C.bits:
            block = block_of(work, 0, C)
            words = choices(work, ROW, block, C.rows_s, C)
        mbarrier.wait(rings.k_full.index(FIRST), 0)
        s_token = scores(q, rings.k.index(FIRST), C)
        s = hopper.warpgroup_mma_wait(0, deps=[s_token])
        mbarrier.arrive(rings.k_empty.index(FIRST))
        if C.ragged:
            keys = whole_keys(C)
            if C.passes:
                if work.num_full == 0:
                    keys = tail_keys(work, 0, C)
            elif work.num_tail > 0:
                keys = tail_keys(work, 0, C)
            columns = gl.arange(0, BN, C.columns)
            s = gl.where(gl.expand_dims(columns < keys, 0), s, float("-inf"))
        m = gl.max(s, 1) * scale_log2
        reference = m
        if C.bits:
            reference = m + infinity(words, block)
            if not C.fast:
                m = gl.where(lost(words, block) == 0, m, LOWEST)
        p = gl.exp2(s * scale_log2 - gl.expand_dims(reference, 1))
        sums = partial_sums(p, C) if C.fast or C.lazy else gl.sum(p, 1)
        weights = gl.convert_layout(p.to(dtype), C.p_layout)
        acc = gl.zeros([64, D], gl.float32, C.o_layout)
        nearest = scale_log2 * 0  # of the first step, which counts
        skipped = steps * 0
        mine = steps * 0
        if C.passes:
            mine = kept_blocks(words)
        last = work.num_full
        if C.passes:
            last = gl.maximum(last, 1)
        elif C.ragged:
            last += gl.minimum(work.num_tail, 1)
        # Blocks are looked up a step ahead, so that no product waits for them.
        ahead = block_ahead(work, 0, C)
        for step in range(1, last):
            block = ahead
            ahead = block_ahead(work, step, C)
            acc, sums, m, weights, nearest, skipped, mine = advance_unless_needless(
                q, rings, acc, sums, m, weights, BN, step, work, scale_log2, FIRST, ROW, False,
                dtype, C, block, words, nearest, skipped, mine,
            )  # fmt: skip
        if C.sub == 0:  # a regular plan has one partial step at most
            for step in range(last, steps):
                keys = tail_keys(work, step - work.num_full, C)
                block = ahead
                ahead = block_ahead(work, step, C)
                acc, sums, m, weights, nearest, skipped, mine = advance_unless_needless(
                    q, rings, acc, sums, m, weights, keys, step, work, scale_log2, FIRST, ROW, True,
                    dtype, C, block, words, nearest, skipped, mine,
                )  # fmt: skip
        slot = wait_full(rings.v_full, steps - 1, FIRST, C)
        if C.skip > 0:
            if nearest > -C.skip:
                acc = last_product(acc, weights, rings, slot, C)
            else:
                skipped += (nearest > LOWEST).to(gl.int32)
            if work.real > ROW:
                gl.atomic_add(flags, skipped.to(gl.int64))
                gl.atomic_add(flags + 1, steps.to(gl.int64))
        else:
            acc = last_product(acc, weights, rings, slot, C)

        row_sum = sums
        owned = work.owned
        if C.redo:
            owned = gl.where((gl.load(flags) & (1 << 8 * W)) > 0, work.owned, 0)
        if C.fast or C.lazy:
            row_sum = gl.convert_layout(gl.sum(sums, 1), C.rows_s)
        if C.fast:
            real = ROW + gl.arange(0, 64, C.rows_s) < work.real
            sound = row_sum < OVERFLOW
            if C.bits:
                sound = sound & (row_sum > UNDERFLOW)
            wrong = gl.max((real & ~sound).to(gl.int32), 0)
            if wrong > 0:
                flag = (flags + gl.program_id(0)).to(gl.pointer_type(gl.int8), bitcast=True)
                gl.store(flag + W, 1)
            owned = gl.where(wrong > 0, 0, work.owned)
        inverse = 1.0 / row_sum
        lse = 0.6931471805599453 * (m + gl.log2(row_sum))
        if C.bits:
            inverse = gl.where(row_sum > 0.0, inverse, 0.0)
            lse = gl.where(row_sum > 0.0, lse, float("-inf"))
        o = acc * gl.expand_dims(gl.convert_layout(inverse, C.rows_o), 1)
        q_tile.store(o.to(dtype))
        staged = q_tile.load(C.store_layout)
        store_values(work.out, staged, work, owned, ROW, C)
        store_lse(lse, work, owned, ROW, C)


@gluon.jit
def _run(dq, dk, dv, tile, plan, outs, flags, scale_log2, C: gl.constexpr):
    """Allocate the rings and start the partitions of one tile."""
    CONSUMERS: gl.constexpr = C.consumers
    SLOTS: gl.constexpr = C.consumers * C.stages if C.own else C.stages
    SHARERS: gl.constexpr = 1 if C.own else C.consumers
    rings = make_rings(dq, dk, dv, SLOTS, SHARERS, C)
    work = find_work(0, tile, plan, outs, C)
    given = (work, rings, flags, scale_log2)
    fed = (dq, dk, dv, work, rings)
    if C.own:
        other = find_work(1, tile, plan, outs, C)
        other_given = (other, rings, flags, scale_log2)
        other_fed = (dq, dk, dv, other, rings)
        specialize(consume, (given, other_given), _producer, (fed, other_fed), C)
    else:
        specialize(consume, (given,), _producer, (fed,), C)
    if C.redo:
        for w in gl.static_range(CONSUMERS):
            mbarrier.invalidate(rings.q_full.index(w))
        for slot in gl.static_range(SLOTS):
            mbarrier.invalidate(rings.k_full.index(slot))
            mbarrier.invalidate(rings.v_full.index(slot))
            mbarrier.invalidate(rings.k_empty.index(slot))
            mbarrier.invalidate(rings.v_empty.index(slot))


@gluon.jit(
    do_not_specialize=[*PLAN_NUMBERS, "group", "sweep_b", "lists", "bits_b", "bits_h", "words"],
    do_not_specialize_on_alignment=["length_ptr"],
)
def attention_kernel(
    dq, dk, dv, out_ptr, lse_ptr, flag_ptr, sweep_ptr, scale_log2,
    list_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, start_ptr, length_ptr,
    block_ptr, bits_ptr,
    rows, rep_h, num, plan_h, group, last, tail, room, tail_room,
    list_b, list_h, list_n, count_b, count_h, count_n,
    start_b, start_h, length_b, length_h, size, total,
    lists, sweep_b, bits_b, bits_h, words,
    out_b, out_s, out_h, lse_b, lse_h, C: gl.constexpr,
):  # fmt: skip
    """Grid: one program per tile; a redo does only those whose flag is set."""
    plan = Plan(
        list_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, start_ptr, length_ptr,
        rows, rep_h, num, plan_h, group, last, tail, room, tail_room,
        list_b, list_h, list_n, count_b, count_h, count_n,
        start_b, start_h, length_b, length_h, size, total,
        lists, More(sweep_ptr, sweep_b, block_ptr, bits_ptr, bits_b, bits_h, words),
    )  # fmt: skip
    outs = Outs(out_ptr, lse_ptr, out_b, out_s, out_h, lse_b, lse_h)
    if C.redo:
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        first = gl.program_id(0) * C.redo
        marks = gl.load(flag_ptr + first + gl.arange(0, C.redo, layout))
        if gl.max(marks, 0) > 0:
            for tile in range(first, first + C.redo):
                if gl.load(flag_ptr + tile) > 0:
                    _run(dq, dk, dv, tile, plan, outs, flag_ptr + tile, scale_log2, C)
    else:
        _run(dq, dk, dv, gl.program_id(0), plan, outs, flag_ptr, scale_log2, C)


_launcher = Launcher(attention_kernel)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """Launches on plans and for tensors of one form; see `prepare`.

    Attributes:
        launch: the kernel, and the one that redoes flagged tiles, if any.
        step: keys of a step.
        num_flags: int32 flags to make room for; see `launch_with_redo`.
        num_sweeps: positions of key sweeps to make room for.
        inputs: returns the descriptors of q, k and v at three addresses.
    """

    launch: Launch
    step: int
    num_flags: int
    num_sweeps: int
    inputs: Callable[[int, int, int], tuple[TensorDescriptor, ...]]

    def __call__(self, call: Call, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Launch the kernel, and the redo of the tiles it flags; writes `out` and `lse`.

        Args:
            call: of the form of the one that was prepared for, on a plan of the form of its plan.
            out: likewise; only rows that belong to a query block are written.
            lse: only if it was prepared for.
        """
        plan, rows = call.plan, self.num_flags
        lists = lists_of(plan, self.step, blocks=plan.row_bits is None)
        sweep = marks = plan.counts  # where nothing is marked
        if rows or self.num_sweeps:
            # One allocation, whose second part begins at a multiple of 16 bytes like the first.
            marks = plan.counts.new_zeros(rows + self.num_sweeps)
            sweep = marks[rows:] if self.num_sweeps else marks
        # Where steps are skipped nothing is flagged, and they are counted in that place.
        flags = marks if call.skip is None else call.skip.counts_on(out.device)
        inputs = self.inputs(call.q.data_ptr(), call.k.data_ptr(), call.v.data_ptr())
        scale = call.scale / math.log(2.0)
        launched = (
            *inputs, out, out if lse is None else lse, flags, sweep, scale,
            *lists.tensors, lists.blocks, lists.bits,
        )  # fmt: skip
        self.launch(launched)


def prepare(
    call: Call, out: torch.Tensor, lse: torch.Tensor | None, *, tile: GluonTile
) -> Prepared:
    """Return the launches on plans and for tensors of one form.

    Of one form are tensors of the same shapes, strides, dtypes, device and alignment to 16 bytes,
    and plans of the same `form`.

    Args:
        call: whose tensors have stride 1 along D, and all other strides multiples of 16 bytes; what
            is skipped are steps of `tile.keys` keys.
        out: [B, Sq, H, D] with stride 1 along D, which may be `q`.
        lse: contiguous fp32 [B, H, Sq], or None.
        tile: shape of a program, as `gluon_tile` chooses it; not `fast` where steps are skipped.
    """
    q, k, v, plan = call[:4]
    below = 0.0 if call.skip is None else call.skip.octaves
    assert not (tile.fast and below), "the fast kernel knows no maxima"
    batch, _, heads, channels = q.shape
    # A plan with row bits is always cut in steps, none of which are merged.
    work = work_list(plan, tile.keys, batch, heads, k.shape[2], blocks=plan.row_bits is None)
    bits = work.lists.bits
    shape = Shape.of_work(
        plan,
        work,
        channels,
        **dataclasses.asdict(tile),
        lse=lse is not None,
        q_tiles=1 if tile.own else -(-plan.q.size // (64 * tile.consumers)),
        bits=plan.row_bits is not None,
        one_word=plan.row_bits is not None and plan.row_bits.shape[3] == 1,
        skip=below,
        passes=plan.row_bits is not None and plan.kv.num < 32 and tile.fast,
    )
    arguments = (
        *work.numbers, work.num, k.shape[2],
        *bits.expand(batch, heads, -1, -1).stride()[:2], bits.shape[3],
        *out.stride()[:3], *((0, 0) if lse is None else lse.stride()[:2]),
    )  # fmt: skip
    redo = {"passes": False, "sync": 0}
    launch, num_flags = launch_with_redo(_launcher, shape, work, arguments, **redo)
    described = partial(
        _inputs_at,
        forms=tuple((x.shape, x.stride(), x.dtype) for x in (q, k, v)),
        rows=(64, tile.keys, tile.keys),
        head_size=shape.head_size,
    )
    return Prepared(
        launch=launch,
        step=tile.keys,
        num_flags=num_flags,
        num_sweeps=batch * k.shape[2] if tile.sync else 0,
        inputs=lru_cache(maxsize=1024)(described),
    )


def _inputs_at(
    *addresses: int,
    forms: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...],
    rows: tuple[int, ...],
    head_size: int,
) -> tuple[TensorDescriptor, ...]:
    """Return the descriptors of several tensors [B, S, H, D]; see `described_at`."""
    every = zip(addresses, forms, rows, strict=True)
    return tuple(described_at(at, *form, n, head_size, TOKENS_BY_HEAD) for at, form, n in every)
