"""A step of a consumer on SM90: scores, softmax, and the product P V of the step before.

`gluon_kernel` says which softmax there are, and what a step may be left out for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from multimodal_gen.kernels.block_sparse.gluon_work_kernel import choices, infinity, lost
from multimodal_gen.kernels.hopper_kernel import partial_sums, scores, wait_full

# How far, in powers of two, scores may lie above a lazy reference.
SLACK = gl.constexpr(8.0)
# The bit of a consumer's blocks that says that a product P V is pending.
PENDING = gl.constexpr(-(2**31))
# Lower than any score, and finite: the maximum of nothing.
LOWEST = gl.constexpr(-3.0e38)


def _rescale_assembly(count: int) -> str:
    """Return PTX that multiplies `count` values $count.. by factors, unless all of a warp's are 1.

    A thread of an MMA accumulator holds pairs of two rows in turns, so factors 0 and 2 are those
    of its rows.
    """
    factor = 2 * count
    moves = "".join(f"mov.f32 ${i}, ${count + i};" for i in range(count))
    products = "".join(f"mul.f32 ${i}, ${i}, ${factor + i};" for i in range(count))
    return (
        "{ .reg .pred any;"
        f"setp.neu.f32 any, ${factor}, 0f3F800000;"
        f"setp.neu.or.f32 any, ${factor + 2}, 0f3F800000, any;"
        "vote.sync.any.pred any, any, 0xffffffff;"
        f"{moves}"
        "@!any bra.uni SKIP_${:uid};"
        f"{products}"
        "SKIP_${:uid}: }"
    )


RESCALE = gl.constexpr(_rescale_assembly(32))
RESCALE_WIDE = gl.constexpr(_rescale_assembly(64))
OPERANDS = gl.constexpr(",".join(["=f"] * 32 + ["f"] * 64))
OPERANDS_WIDE = gl.constexpr(",".join(["=f"] * 64 + ["f"] * 128))


@gluon.jit
def _rescale(acc, alpha, C: gl.constexpr):
    """Return `acc` times `alpha`, both [64, D]; jumps over it where all factors of a warp are 1."""
    if C.head_size == 128:
        acc = gl.inline_asm_elementwise(
            RESCALE_WIDE, OPERANDS_WIDE, [acc, alpha], dtype=gl.float32, is_pure=True, pack=64
        )
    else:
        acc = gl.inline_asm_elementwise(
            RESCALE, OPERANDS, [acc, alpha], dtype=gl.float32, is_pure=True, pack=32
        )
    return acc


@gluon.jit
def _nearest(m_step, m, words, block, work, ROW: gl.constexpr, C: gl.constexpr):
    """Return how far above its reference the highest score of a step lies, of all rows; []."""
    seen = ROW + gl.arange(0, 64, m.type.layout) < work.real
    if C.bits:
        seen = seen & (lost(words, block) == 0)
    return gl.max(gl.where(seen, m_step - m, LOWEST), 0)


@gluon.jit
def advance(
    q, rings, acc, sums, m, weights, keys, step, work, scale_log2, FIRST: gl.constexpr,
    ROW: gl.constexpr, MASKED: gl.constexpr, dtype: gl.constexpr, C: gl.constexpr, block=None,
    words=None, nearest=0.0, PENDING: gl.constexpr = True,
):  # fmt: skip
    """Scores of `step` while P V of the step before is in flight, if PENDING; then its softmax.

    Where rows choose, `block` is that of the step, and `words` their choices if one word holds
    each. Where steps are skipped, `nearest` is made that of the step.
    """
    BN: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    if C.bits and not C.one_word:
        words = choices(work, ROW, block, C.rows_s, C)
    slot = wait_full(rings.k_full, step, FIRST, C)
    s_token = scores(q, rings.k.index(slot), C)
    slot_v = wait_full(rings.v_full, step - 1, FIRST, C)
    if PENDING:
        v_tile = rings.v.index(slot_v).reshape([BN, D])
        o_token = hopper.warpgroup_mma(weights, v_tile, acc, is_async=True)
        s = hopper.warpgroup_mma_wait(1, deps=[s_token])
    else:
        s = hopper.warpgroup_mma_wait(0, deps=[s_token])
    mbarrier.arrive(rings.k_empty.index(slot))
    if MASKED:
        columns = gl.arange(0, BN, C.columns)
        s = gl.where(gl.expand_dims(columns < keys, 0), s, float("-inf"))
    m_new = m
    if not C.fast:
        m_step = gl.max(s, 1) * scale_log2
        if C.bits:
            m_step = gl.where(lost(words, block) == 0, m_step, LOWEST)
        if C.skip > 0:
            nearest = _nearest(m_step, m, words, block, work, ROW, C)
        m_new = gl.where(m_step > m + SLACK, m_step, m) if C.lazy else gl.maximum(m, m_step)
    reference = m_new
    if C.bits:
        reference = m_new + infinity(words, block)
    p = gl.exp2(s * scale_log2 - gl.expand_dims(reference, 1))
    following = weights
    if not C.fast:
        alpha = gl.exp2(m - m_new)
    if C.lazy:
        sums_rows: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
        sums = sums * gl.expand_dims(gl.convert_layout(alpha, sums_rows), 1)
    if C.skip > 0:
        added = partial_sums(p, C) if C.lazy else gl.sum(p, 1)
        added = gl.where(nearest > -C.skip, added, gl.zeros_like(added))
        sums = sums + added if C.lazy else sums * alpha + added
    elif C.fast or C.lazy:
        sums += partial_sums(p, C)
    else:
        sums = sums * alpha + gl.sum(p, 1)
    if C.fast:
        # Before the wait, unlike below: that is what keeps the exact variant's registers down.
        following = gl.convert_layout(p.to(dtype), weights.type.layout)
    # The weights in flight must pass through the wait, or their registers are reused early.
    if C.fast and C.bits:
        # And so must the next ones, to be ready before it where that pays.
        acc, weights, following = hopper.warpgroup_mma_wait(0, deps=[o_token, weights, following])
    elif PENDING:
        acc, weights = hopper.warpgroup_mma_wait(0, deps=[o_token, weights])
    mbarrier.arrive(rings.v_empty.index(slot_v))
    if not C.fast:
        following = gl.convert_layout(p.to(dtype), weights.type.layout)
        factor, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(alpha, C.rows_o), 1), acc)
        acc = _rescale(acc, factor, C) if C.lazy else acc * factor
    return acc, sums, m_new, following, nearest


@gluon.jit
def last_product(acc, weights, rings, slot, C: gl.constexpr):
    """Return `acc` with P V of the last step."""
    v_tile = rings.v.index(slot).reshape([C.keys, C.head_size])
    o_token = hopper.warpgroup_mma(weights, v_tile, acc, is_async=True)
    acc, weights = hopper.warpgroup_mma_wait(0, deps=[o_token, weights])
    return acc


@gluon.jit
def _either(first, second):
    return first | second


@gluon.jit
def kept_blocks(words):
    """Return the blocks that any row of a consumer keeps, of the rows' `words`."""
    return gl.reduce(words, 0, _either) | PENDING


@gluon.jit
def _pass_over(acc, weights, rings, step, mine, FIRST: gl.constexpr, C: gl.constexpr):
    """Return `acc` with P V of the step before, if that is pending; leaves `step` to the others."""
    # A slot that is still empty counts arrivals of its turn before.
    slot = wait_full(rings.k_full, step, FIRST, C)
    mbarrier.arrive(rings.k_empty.index(slot))
    slot_v = wait_full(rings.v_full, step - 1, FIRST, C)
    if mine < 0:
        acc = last_product(acc, weights, rings, slot_v, C)
    mbarrier.arrive(rings.v_empty.index(slot_v))
    return acc


@gluon.jit
def advance_unless_needless(
    q, rings, acc, sums, m, weights, keys, step, work, scale_log2, FIRST: gl.constexpr,
    ROW: gl.constexpr, MASKED: gl.constexpr, dtype: gl.constexpr, C: gl.constexpr, block, words,
    nearest, skipped, mine,
):  # fmt: skip
    """`advance`, or leave the step to others where the consumer keeps none of it.

    Where steps are skipped, without P V of the step before if that one was; counts those. `mine`
    is what `kept_blocks` returned, and whether a product is pending.
    """
    if C.passes:
        if (mine >> block) & 1:
            acc, sums, m, weights, nearest = advance(
                q, rings, acc, sums, m, weights, keys, step, work, scale_log2, FIRST, ROW, MASKED,
                dtype, C, block, words, nearest,
            )  # fmt: skip
            mine |= PENDING
        else:
            acc = _pass_over(acc, weights, rings, step, mine, FIRST, C)
            weights = gl.zeros_like(weights)
            mine &= ~PENDING
    elif C.skip > 0:
        if nearest > -C.skip:
            acc, sums, m, weights, nearest = advance(
                q, rings, acc, sums, m, weights, keys, step, work, scale_log2, FIRST, ROW, MASKED,
                dtype, C, block, words, nearest, True,
            )  # fmt: skip
        else:
            skipped += (nearest > LOWEST).to(gl.int32)
            acc, sums, m, weights, nearest = advance(
                q, rings, acc, sums, m, weights, keys, step, work, scale_log2, FIRST, ROW, MASKED,
                dtype, C, block, words, nearest, False,
            )  # fmt: skip
    else:
        acc, sums, m, weights, nearest = advance(
            q, rings, acc, sums, m, weights, keys, step, work, scale_log2, FIRST, ROW, MASKED,
            dtype, C, block, words, nearest,
        )  # fmt: skip
    return acc, sums, m, weights, nearest, skipped, mine
