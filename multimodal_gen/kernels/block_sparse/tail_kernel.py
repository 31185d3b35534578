"""The pooled tail in Triton: goes on with the online softmax where block-sparse attention ended.

For a tile of BM query rows, whose exact part has the output o and the log-sum-exp lse, over steps
of BN pooled keys, with s = scale * log2(e) * q kc^T + log2(n), minus infinity for kept blocks:

    m = log2(e) lse;  old = 1;  new = 0;  acc = 0
    m' = max(m, rowmax s);  p = 2^(s - m');  a = 2^(m - m')
    old = old a;  new = new a + rowsum p;  acc = acc a + p vc
    out = (old o + acc + new * scale * q H) / (old + new);   lse = ln 2 (m + log2(old + new))

It reads and writes the output once, and needs no memory but the log2(n) and minus infinities.
"""

import torch
import triton
import triton.language as tl

from multimodal_gen.kernels.block_sparse.call import TailCall
from multimodal_gen.kernels.block_sparse.plan import bounds_of
from multimodal_gen.kernels.block_sparse.triton_kernel import describe
from multimodal_gen.kernels.block_sparse.tuning import TritonTile
from multimodal_gen.kernels.launch.launcher import Launcher
from multimodal_gen.kernels.shared_kernel import (
    bounds,
    dot,
    interpreted,
    next_power_of_2,
    padded_channels,
)
from multimodal_gen.kernels.tensors import unit_stride

LOG2E = 1.4426950408889634
POOL_ROWS = 64  # tokens that are added at once
PACKED_ROWS, PACKED_WORDS = 4, 32  # of a program that packs bits


@triton.jit
def _sizes(size_ptr, first, num, BN: tl.constexpr):
    """Return log2 of the tokens of BN blocks, minus infinity where there are none."""
    n = first + tl.arange(0, BN)
    return tl.load(size_ptr + n, mask=n < num, other=float("-inf"))


@triton.jit
def _row_bias(bits_ptr, size, rows, row_stride, first, num, real, BN: tl.constexpr):
    """Return `size`, and minus infinity where a row keeps a block: [BM, BN]."""
    n = first + tl.arange(0, BN)
    at = rows[:, None] * row_stride + (n // 32)[None, :]
    words = tl.load(bits_ptr + at, mask=real[:, None] & (n < num)[None, :], other=-1)
    kept = (words >> (n % 32)[None, :]) & 1
    return tl.where(kept == 0, size[None, :], float("-inf"))


@triton.jit
def _tail_tile(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, kept_ptr, size_ptr, slope_ptr,
    q_at, k_at, v_at, out_at, lse_at, kept_at, slope_at, size_b, size_h,
    b, h, block, first_row, length, num, num_q, group, scale, scale_log2,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAIR: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, SLOPE: tl.constexpr, STAGES: tl.constexpr,
    UPCAST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Do `length` rows of a head from `first_row` on, of query block `block`; see `_tail_kernel`.

    WORDS: `kept` holds words of bits, of every row if ROWS, else of query blocks.
    """
    in_tile = tl.arange(0, BM)
    real = in_tile < length
    d = tl.arange(0, DP)
    n = tl.arange(0, BN)
    real_d = d < D
    mask = real[:, None] & real_d[None, :]
    q_ptr += b * q_at[0] + h * q_at[2] + first_row * q_at[1]
    q = tl.load(q_ptr + in_tile[:, None] * q_at[1] + d[None, :] * q_at[3], mask=mask, other=0.0)
    lse_ptrs = lse_ptr + b * lse_at[0] + h * lse_at[1] + first_row + in_tile
    m = tl.load(lse_ptrs, mask=real, other=float("-inf")) * 1.4426950408889634
    acc = tl.zeros([BM, DP], tl.float32)
    old = tl.full([BM], 1.0, tl.float32)
    new = tl.zeros([BM], tl.float32)
    kv_h = h // group
    kept_ptr += b * kept_at[0] + h * kept_at[1]
    kept_ptr += (first_row if ROWS else block.to(tl.int64)) * kept_at[2]
    if WORDS:
        size_ptr += b * size_b + kv_h * size_h
        # Read one step ahead and used in the next, so that no step waits for it; likewise below.
        size_next = _sizes(size_ptr, 0, num, BN)
    else:
        bias_next = tl.load(kept_ptr + n)
    if PAIR:
        other = kept_ptr + tl.where(block + 1 < num_q, kept_at[2], 0)
        other_next = tl.load(other + n)
    for first in tl.range(0, num, BN, num_stages=STAGES):
        following = tl.where(first + BN < num, first + BN, 0)
        if WORDS:
            rows = in_tile if ROWS else in_tile * 0
            bias = _row_bias(kept_ptr, size_next, rows, kept_at[2], first, num, real, BN)
            size_next = _sizes(size_ptr, first + BN, num, BN)
        else:
            bias = bias_next[None, :]
            bias_next = tl.load(kept_ptr + following + n)
        if PAIR:
            bias = tl.where((in_tile < BM // 2)[:, None], bias, other_next[None, :])
            other_next = tl.load(other + following + n)
        if TMA:
            corner = [b.to(tl.int32), kv_h.to(tl.int32), first, 0]
            k_t = tl.trans(k_ptr.load(corner).reshape(BN, DP))
            v = v_ptr.load(corner).reshape(BN, DP)
        else:
            there = first + n < num
            at = (first + n).to(tl.int64)
            k_mask = there[None, :] & real_d[:, None]
            k_base = k_ptr + b * k_at[0] + kv_h * k_at[1]
            k_t = tl.load(k_base + (at * k_at[2])[None, :] + d[:, None], mask=k_mask, other=0.0)
            v_mask = there[:, None] & real_d[None, :]
            v_base = v_ptr + b * v_at[0] + kv_h * v_at[1]
            v = tl.load(v_base + (at * v_at[2])[:, None] + d[None, :], mask=v_mask, other=0.0)
        s = dot(q, k_t, UPCAST) * scale_log2 + bias
        m_new = tl.maximum(m, tl.max(s, 1))
        # A row that has seen no key yet has m = -inf, and -inf - -inf is a NaN.
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - reference[:, None])
        alpha = tl.exp2(m - reference)
        old = old * alpha
        new = new * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + dot(p.to(v.dtype), v, UPCAST)
        m = m_new
    if SLOPE:
        at = slope_ptr + b * slope_at[0] + kv_h * slope_at[1] + d[:, None] * D + d[None, :]
        slope = tl.load(at, mask=real_d[:, None] & real_d[None, :], other=0.0)
        acc += (new * scale)[:, None] * dot(q, slope.to(q.dtype), UPCAST)
    out_ptr += b * out_at[0] + h * out_at[2] + first_row * out_at[1]
    out_ptrs = out_ptr + in_tile[:, None] * out_at[1] + d[None, :]
    exact = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    total = old + new
    nothing = m == float("-inf")
    total = tl.where(nothing, 1.0, total)
    out = (acc + exact * old[:, None]) / total[:, None]
    out = tl.where(nothing[:, None], 0.0, out)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)
    lse = tl.where(nothing, float("-inf"), 0.6931471805599453 * (m + tl.log2(total)))
    tl.store(lse_ptrs, lse, mask=real)


@triton.jit(
    do_not_specialize=[
        "num", "num_q", "group", "heads", "total", "q_size", "q_total", "size_b", "size_h",
        "q_start_b", "q_start_h", "q_length_b", "q_length_h",
    ]
)  # fmt: skip
def _tail_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, kept_ptr, size_ptr, slope_ptr,
    q_start_ptr, q_length_ptr, flag_ptr,
    q_at, k_at, v_at, out_at, lse_at, kept_at, slope_at, size_b, size_h,
    q_start_b, q_start_h, q_length_b, q_length_h,
    num, num_q, group, heads, total, q_size, q_total, scale, scale_log2,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, QSUB: tl.constexpr,
    PAIR: tl.constexpr, ROWS: tl.constexpr, FLAGS: tl.constexpr, Q_STARTS: tl.constexpr,
    Q_LENGTHS: tl.constexpr, SLOPE: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Grid [tiles, H, B]; QSUB tiles of BM rows per query block.

    PAIR: a tile holds two query blocks of BM / 2 rows. ROWS: every row chooses, and tiles are cut
    from all rows; `kept` then holds words, otherwise what `_bias_of` returns. FLAGS: programs share
    `total` tiles, of which those that are flagged are done, if any is; `flag` begins with how many
    are, and `kept` holds words of query blocks.
    """
    turns = 1
    if FLAGS:
        if tl.load(flag_ptr) == 0:
            return
        turns = tl.cdiv(total - tl.program_id(0), tl.num_programs(0))
    for turn in range(turns):
        if FLAGS:
            place = tl.program_id(0) + turn * tl.num_programs(0)
            wanted = tl.load(flag_ptr + 1 + place) != 0
            tile = place // QSUB % num_q * QSUB + place % QSUB
            h = (place // QSUB // num_q % heads).to(tl.int64)
            b = (place // QSUB // num_q // heads).to(tl.int64)
        else:
            wanted = True
            tile = tl.program_id(0)
            h = tl.program_id(1).to(tl.int64)
            b = tl.program_id(2).to(tl.int64)
        if PAIR or ROWS:
            block = tile * 2
            inside = 0
            begin = (tile * BM).to(tl.int32)
            length = tl.minimum(q_total - begin, BM)
        else:
            block = tile // QSUB
            inside = tile % QSUB * BM
            begin, length = bounds(
                b, h, block, q_size, q_total, q_start_ptr, q_length_ptr,
                q_start_b, q_start_h, q_length_b, q_length_h, Q_STARTS, Q_LENGTHS,
            )  # fmt: skip
        if wanted & (inside < length):
            _tail_tile(
                q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, kept_ptr, size_ptr, slope_ptr,
                q_at, k_at, v_at, out_at, lse_at, kept_at, slope_at, size_b, size_h,
                b, h, block, begin.to(tl.int64) + inside, length - inside, num, num_q, group,
                scale, scale_log2, BM, BN, D, DP, PAIR, ROWS, ROWS or FLAGS, SLOPE, STAGES, UPCAST,
                TMA,
            )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "num"])
def _pool_kernel(
    x_ptr, out_ptr, start_ptr, length_ptr, x_at, start_at, length_at, heads, num,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Grid [B * H * N]: the mean of one block."""
    pid = tl.program_id(0)
    block = pid % num
    h = (pid // num % heads).to(tl.int64)
    b = (pid // num // heads).to(tl.int64)
    start = tl.load(start_ptr + b * start_at[0] + h * start_at[1] + block).to(tl.int64)
    length = tl.load(length_ptr + b * length_at[0] + h * length_at[1] + block)
    d = tl.arange(0, DP).to(tl.int64)
    x_ptr += b * x_at[0] + h * x_at[2] + start * x_at[1]
    total = tl.zeros([DP], tl.float32)
    for first in range(0, length, T):
        i = first + tl.arange(0, T)
        mask = (i < length)[:, None] & (d < D)[None, :]
        at = i[:, None].to(tl.int64) * x_at[1] + d[None, :] * x_at[3]
        x = tl.load(x_ptr + at, mask=mask, other=0.0)
        total += tl.sum(x.to(tl.float32), 0)
    mean = total / tl.maximum(length, 1).to(tl.float32)
    tl.store(out_ptr + pid.to(tl.int64) * D + d, mean.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["rows", "num", "words"])
def _pack_kernel(kept_ptr, word_ptr, rows, num, words, R: tl.constexpr, W: tl.constexpr):
    """Grid [rows / R, words / W]: bit j % 32 of word j // 32 of a row is its entry j; 1 behind."""
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    n = tl.program_id(1) * (W * 32) + tl.arange(0, W * 32)
    mask = (row < rows)[:, None] & (n < num)[None, :]
    kept = tl.load(kept_ptr + row[:, None] * num + n[None, :], mask=mask, other=1).to(tl.int32)
    bits = tl.sum(tl.reshape(kept << (n % 32)[None, :], [R, W, 32]), 2)
    w = tl.program_id(1) * W + tl.arange(0, W)
    there = (row < rows)[:, None] & (w < words)[None, :]
    tl.store(word_ptr + row[:, None] * words + w[None, :], bits, mask=there)


_launch_tail = Launcher(_tail_kernel)
_launch_pack = Launcher(_pack_kernel)
_launch_pool = Launcher(_pool_kernel)


def pool_blocks(x: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the means of blocks of [B, S, H, D], in its dtype: [B, H, N, D].

    Args:
        x: the tensor, any strides.
        starts: int32 [B|1, H|1, N].
        lengths: int32 [B|1, H|1, N]; the mean of none is zero.
    """
    batch, _, heads, size = x.shape
    num = starts.shape[2]
    starts, lengths = (unit_stride(t).expand(batch, heads, -1) for t in (starts, lengths))
    means = x.new_empty((batch, heads, num, size))
    _launch_pool(
        (batch * heads * num,), x, means, starts, lengths, x.stride(),
        starts.stride()[:2], lengths.stride()[:2], heads, num,
        D=size, DP=next_power_of_2(size), T=POOL_ROWS, num_warps=4,
    )  # fmt: skip
    return means


def pack_bits(kept: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return bool [..., N] as words: bit j % 32 of word j // 32 is entry j.

    Args:
        kept: the entries.
        multiple: N is padded to a multiple of it with ones; a multiple of 32.

    Returns:
        int32 [..., ceil(N / multiple) * multiple / 32].
    """
    num = kept.shape[-1]
    kept = kept.contiguous().view(torch.uint8)
    words = -(-num // multiple) * multiple // 32
    packed = kept.new_empty((*kept.shape[:-1], words), dtype=torch.int32)
    rows = packed.numel() // words
    _launch_pack(
        (-(-rows // PACKED_ROWS), -(-words // PACKED_WORDS)), kept, packed, rows, num, words,
        R=PACKED_ROWS, W=PACKED_WORDS, num_warps=4,
    )  # fmt: skip
    return packed


def add_tail(call: TailCall, *, tile: TritonTile, copy_engine: bool = False) -> None:
    """Launch the kernel, which changes `out` and `lse`; see `tail.add_tail`.

    With `copy_engine` means are read through tensor descriptors, as SM90 and later can: all strides
    of `keys` and `values` but the last, which is 1, are then multiples of 16 bytes.
    """
    kept, sizes = call.kept, call.pooled.counts.float().log2()
    if call.queries is None:
        kept = unit_stride(kept)
    else:
        kept = _bias_of(kept, sizes, call.q.shape[2], multiple=tile.keys)
    launch(call, sizes, kept, tile, copy_engine=copy_engine)


def launch(
    call: TailCall,
    sizes: torch.Tensor,
    kept: torch.Tensor,
    tile: TritonTile,
    *,
    copy_engine: bool = False,
    flags: torch.Tensor | None = None,
    programs: int = 0,
) -> None:
    """Launch the kernel for all tiles, or for those that are flagged; see `add_tail`.

    Args:
        call: with query blocks and without a slope where tiles are flagged.
        sizes: log2 of the tokens of a block, fp32 [B|1, Hp|1, N].
        kept: what `_bias_of` returns, or the words of rows that choose; of flagged tiles which
            blocks are kept, in words as `pack_bits` makes them: [B|1, H|1, Nq, W].
        tile: shape of a program.
        copy_engine: see `add_tail`.
        flags: int32 [1 + B * H * Nq * tiles of a block]: how many are set, then all.
        programs: how many there are, where tiles are flagged.
    """
    out, lse, q, pooled, _, queries, scale = call
    batch, total, heads, size = q.shape
    assert out.stride(3) == lse.stride(2) == 1, "engines write such tensors"
    keys, values = map(unit_stride, (pooled.keys, pooled.values))
    slope = None if pooled.slope is None else pooled.slope.contiguous()
    kept = kept.expand(batch, heads, -1, -1)
    sizes = unit_stride(sizes).expand(batch, keys.shape[1], -1)
    num_q, q_size, starts, lengths = 1, total, None, None
    bounds, strides = [sizes, sizes], [0, 0, 0, 0]
    if queries is not None:
        num_q, q_size, starts, lengths = queries.num, queries.size, queries.starts, queries.lengths
        bounds, strides = bounds_of(queries, batch, heads, sizes)
    width = padded_channels(size)
    by_row = queries is None
    pair = flags is None and not by_row and lengths is None and 2 * q_size == tile.rows
    per_block = 1 if pair or by_row else -(-q_size // tile.rows)
    tiles = -(-total // tile.rows) if pair or by_row else num_q * per_block
    inputs: tuple[object, ...] = (keys, values)
    if copy_engine:
        inputs = tuple(describe(x.transpose(1, 2), tile.keys, width) for x in (keys, values))
    _launch_tail(
        (tiles, heads, batch) if flags is None else (programs,),
        q, *inputs, out, lse, kept, sizes, keys if slope is None else slope, *bounds,
        sizes if flags is None else flags,
        q.stride(), keys.stride()[:3], values.stride()[:3], out.stride(), lse.stride()[:2],
        kept.stride()[:3], (0, 0) if slope is None else slope.stride()[:2], *sizes.stride()[:2],
        *strides, keys.shape[2], num_q, heads // keys.shape[1], heads, batch * heads * tiles,
        q_size, total, scale, scale * LOG2E,
        BM=tile.rows, BN=tile.keys, D=size, DP=width, QSUB=per_block, PAIR=pair, ROWS=by_row,
        FLAGS=flags is not None, Q_STARTS=starts is not None, Q_LENGTHS=lengths is not None,
        SLOPE=slope is not None, STAGES=tile.stages, UPCAST=interpreted(), TMA=copy_engine,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _bias_of(kept: torch.Tensor, sizes: torch.Tensor, heads: int, *, multiple: int) -> torch.Tensor:
    """Return what the kernel adds to the scores of a query block: a load per key, without masks.

    Args:
        kept: bool [B|1, H|1, Nq, N].
        sizes: log2 of the tokens of a block, fp32 [B|1, Hp|1, N].
        heads: H.
        multiple: N is padded to a multiple of it, as if those blocks were kept.

    Returns:
        fp32 [B|1, H|1, Nq, N'], minus infinity where a block is kept or empty.
    """
    if sizes.shape[1] > 1:
        sizes = sizes.repeat_interleave(heads // sizes.shape[1], dim=1)
    leading = torch.broadcast_shapes(kept.shape[:2], sizes.shape[:2])
    num = kept.shape[3]
    bias = sizes.new_empty((*leading, kept.shape[2], -(-num // multiple) * multiple))
    bias[..., num:] = -torch.inf
    nothing = sizes.new_full((), -torch.inf)
    torch.where(kept, nothing, sizes.unsqueeze(2), out=bias[..., :num])
    return bias
