"""The coarse stage in Triton: SM80 and later, ROCm, and Triton's interpreter.

Selection needs no sort. Scores become integers of the same order; bisection over these finds the
smallest one to keep, for a row held in registers, and a running sum then lists what is kept in
increasing order.
"""

import torch
import triton
import triton.language as tl

from multimodal_gen.kernels.launcher import Launcher
from multimodal_gen.kernels.shared_kernel import interpreted, next_power_of_2

READ_BYTES = 2**15  # of a tile, at once
SCORE_ROWS = 64
SCORE_KEYS = 128
CELLS = 64  # of queries, and of keys, whose scores a program makes
LISTED = 256  # keys that are listed at once
# Scores wait for their selection in a buffer of this size: about the L2 cache of a large GPU.
SCRATCH_BYTES = 2**26


@triton.jit
def _owner(pid, heads, num_tiles, HEADS_FIRST: tl.constexpr):
    """Return batch, head and tile of a program; those that are close in memory run together."""
    if HEADS_FIRST:
        h = pid % heads
        tile = pid // heads % num_tiles
    else:
        tile = pid % num_tiles
        h = pid // num_tiles % heads
    b = pid // heads // num_tiles
    return b.to(tl.int64), h.to(tl.int64), tile.to(tl.int64)


@triton.jit
def _tokens(start, length, index_ptr, first, INDEXED: tl.constexpr, T: tl.constexpr):
    """Return the positions of T tokens of a tile, and which of them exist."""
    i = first + tl.arange(0, T)
    real = i < length
    position = (start + i).to(tl.int64)
    if INDEXED:
        position = tl.load(index_ptr + position, mask=real, other=0).to(tl.int64)
    return position, real


@triton.jit(do_not_specialize=["heads", "num_tiles"])
def _pool_kernel(
    x_ptr, out_ptr, start_ptr, length_ptr, index_ptr, keep_ptr, x_b, x_s, x_h, x_d, keep_b, keep_s,
    heads, num_tiles,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, INDEXED: tl.constexpr,
    MASKED: tl.constexpr, HEADS_FIRST: tl.constexpr,
):  # fmt: skip
    """Grid [B * H * N]."""
    b, h, tile = _owner(tl.program_id(0), heads, num_tiles, HEADS_FIRST)
    start = tl.load(start_ptr + tile)
    length = tl.load(length_ptr + tile)
    d = tl.arange(0, DP).to(tl.int64)
    x_ptr += b * x_b + h * x_h
    total = tl.zeros([DP], tl.float32)
    count = length
    for first in range(0, length, T):
        position, real = _tokens(start, length, index_ptr, first, INDEXED, T)
        if MASKED:
            kept = tl.load(keep_ptr + b * keep_b + position * keep_s, mask=real, other=0) != 0
            count -= tl.sum((real & (kept == 0)).to(tl.int32), 0)
            real = real & kept
        mask = real[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + position[:, None] * x_s + d[None, :] * x_d, mask=mask, other=0.0)
        total += tl.sum(x.to(tl.float32), 0)
    mean = total / tl.maximum(count, 1).to(tl.float32)
    out_ptr += ((b * heads + h) * num_tiles + tile) * D
    tl.store(out_ptr + d, mean.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["heads", "num_tiles"])
def _add_gated_kernel(
    out_ptr, gate_ptr, coarse_ptr, start_ptr, length_ptr, index_ptr,
    out_b, out_s, out_h, out_d, gate_b, gate_s, gate_h, gate_d, coarse_b, coarse_h, coarse_n,
    coarse_d, heads, num_tiles,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, INDEXED: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
):  # fmt: skip
    """Grid [B * H * N]; `out` is changed in place."""
    b, h, tile = _owner(tl.program_id(0), heads, num_tiles, HEADS_FIRST)
    start = tl.load(start_ptr + tile)
    length = tl.load(length_ptr + tile)
    d = tl.arange(0, DP).to(tl.int64)
    at = coarse_ptr + b * coarse_b + h * coarse_h + tile * coarse_n
    value = tl.load(at + d * coarse_d, mask=d < D, other=0.0).to(tl.float32)
    out_ptr += b * out_b + h * out_h
    gate_ptr += b * gate_b + h * gate_h
    for first in range(0, length, T):
        position, real = _tokens(start, length, index_ptr, first, INDEXED, T)
        mask = real[:, None] & (d < D)[None, :]
        gate = tl.load(
            gate_ptr + position[:, None] * gate_s + d[None, :] * gate_d, mask=mask, other=0.0
        )
        outs = out_ptr + position[:, None] * out_s + d[None, :] * out_d
        out = tl.load(outs, mask=mask, other=0.0).to(tl.float32)
        out += gate.to(tl.float32) * value[None, :]
        tl.store(outs, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _ordered(score):
    """Return integers in the order of the scores; equal scores, 0 and -0 too, become equal."""
    score = tl.where(score == 0.0, 0.0, score)
    score = tl.where(score != score, float("inf"), score)
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["first_block", "num_q", "num_kv", "heads", "group"])
def _score_kernel(
    q_ptr, k_ptr, key_ptr, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d,
    first_block, num_q, num_kv, heads, group, key_row,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid [blocks of BM rows, blocks of BN keys]; writes [blocks * BM, key_row]."""
    local = tl.program_id(0)
    blocks = tl.cdiv(num_q, BM)
    block = first_block + local
    h = (block // blocks % heads).to(tl.int64)
    b = (block // blocks // heads).to(tl.int64)
    row = block % blocks * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    q_ptr += b * q_b + h * q_h
    k_ptr += b * k_b + h // group * k_h
    acc = tl.zeros([BM, BN], tl.float32)
    for first in range(0, D, BD):
        d = first + tl.arange(0, BD)
        q_mask = (row < num_q)[:, None] & (d < D)[None, :]
        k_mask = (n < num_kv)[None, :] & (d < D)[:, None]
        q = tl.load(q_ptr + row[:, None] * q_n + d[None, :] * q_d, mask=q_mask, other=0.0)
        k = tl.load(k_ptr + n[None, :] * k_n + d[:, None] * k_d, mask=k_mask, other=0.0)
        if UPCAST:
            q = q.to(tl.float32)
            k = k.to(tl.float32)
        acc = tl.dot(q, k, acc, input_precision="ieee")
    at = (local * BM + tl.arange(0, BM)).to(tl.int64)
    keys = key_ptr + at[:, None] * key_row + n[None, :]
    tl.store(keys, _ordered(acc), mask=(row < num_q)[:, None] & (n < num_kv)[None, :])


@triton.jit(do_not_specialize=["first_block", "num_q", "num_kv", "heads", "group"])
def _cell_score_kernel(
    q_ptr, k_ptr, q_real_ptr, k_real_ptr, key_ptr, q_b, q_h, q_n, k_b, k_h, k_n, q_real_b, k_real_b,
    first_block, num_q, num_kv, heads, group, key_row, scale,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CQ: tl.constexpr,
    CK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid [blocks of BM query tiles, blocks of BN key tiles], tiles of CQ and CK cells.

    Writes the logarithm of the sum of exp(scale * q.k) over the cells of two tiles.
    """
    local = tl.program_id(0)
    blocks = tl.cdiv(num_q, BM)
    block = first_block + local
    h = (block // blocks % heads).to(tl.int64)
    b = (block // blocks // heads).to(tl.int64)
    q_cell = block % blocks * (BM * CQ) + tl.arange(0, BM * CQ)
    k_cell = tl.program_id(1) * (BN * CK) + tl.arange(0, BN * CK)
    q_real = tl.load(q_real_ptr + b * q_real_b + q_cell, mask=q_cell < num_q * CQ, other=0) != 0
    k_real = tl.load(k_real_ptr + b * k_real_b + k_cell, mask=k_cell < num_kv * CK, other=0) != 0
    d = tl.arange(0, DP)
    q_ptr += b * q_b + h * q_h
    k_ptr += b * k_b + h // group * k_h
    q_mask = q_real[:, None] & (d < D)[None, :]
    k_mask = k_real[None, :] & (d < D)[:, None]
    q = tl.load(q_ptr + q_cell[:, None].to(tl.int64) * q_n + d[None, :], mask=q_mask, other=0.0)
    k = tl.load(k_ptr + k_cell[None, :].to(tl.int64) * k_n + d[:, None], mask=k_mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
        k = k.to(tl.float32)
    scores = tl.dot(q, k, input_precision="ieee") * scale
    scores = tl.where(q_real[:, None] & k_real[None, :], scores, float("-inf"))
    cells = tl.reshape(scores, [BM, CQ, BN, CK])
    largest = tl.max(tl.max(cells, 3), 1)
    nothing = largest == float("-inf")
    shift = tl.where(nothing, 0.0, largest)
    weights = tl.exp(cells - shift[:, None, :, None])
    total = tl.where(nothing, 1.0, tl.sum(tl.sum(weights, 3), 1))
    total = tl.where(nothing, float("-inf"), tl.log(total) + shift)
    row = block % blocks * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    at = (local * BM + tl.arange(0, BM)).to(tl.int64)
    keys = key_ptr + at[:, None] * key_row + n[None, :]
    tl.store(keys, _ordered(total), mask=(row < num_q)[:, None] & (n < num_kv)[None, :])


@triton.jit(do_not_specialize=["first_block", "num_q", "num_kv", "heads", "count", "always"])
def _select_kernel(
    key_ptr, out_ptr, out_b, out_h, out_n,
    first_block, num_q, num_kv, heads, count, always, key_row,
    BM: tl.constexpr, NP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid [rows]. `smallest` becomes the largest key that at least `count` others reach."""
    local = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(num_q, BM)
    block = first_block + local // BM
    row = block % blocks * BM + local % BM
    if row < num_q:
        key_ptr += local * key_row
        out_ptr += block // blocks // heads * out_b + block // blocks % heads * out_h + row * out_n
        n = tl.arange(0, NP)
        keys = tl.load(key_ptr + n, mask=n < num_kv, other=-0x80000000)
        smallest = tl.min(tl.where(n < num_kv, keys, 0x7FFFFFFF), 0)
        largest = tl.max(keys, 0)
        above = 0  # keys beyond `largest`
        hit = False  # `smallest` is reached by exactly `count`
        while smallest < largest:
            middle = (smallest | largest) - ((smallest ^ largest) >> 1)
            reach = tl.sum((keys >= middle).to(tl.int32), 0)
            enough = reach >= count
            hit = reach == count
            above = tl.where(enough, above, reach)
            smallest = tl.where(enough, middle, smallest)
            largest = tl.where(hit, middle, tl.where(enough, largest, middle - 1))
        ties = tl.where(hit, num_kv, count - above)
        listed = 0
        equal = 0
        for first in range(0, num_kv, CHUNK):
            j = first + tl.arange(0, CHUNK)
            key = tl.load(key_ptr + j, mask=j < num_kv, other=-0x80000000)
            is_tie = (key == smallest) & (j < num_kv)
            rank = equal + tl.cumsum(is_tie.to(tl.int32), 0)
            keep = ((key > smallest) | (is_tie & (rank <= ties))) & (j < num_kv)
            slot = listed + tl.cumsum(keep.to(tl.int32), 0) - 1
            tl.store(out_ptr + slot, j, mask=keep)
            listed += tl.sum(keep.to(tl.int32), 0)
            equal += tl.sum(is_tie.to(tl.int32), 0)
        for first in range(0, always, CHUNK):
            j = first + tl.arange(0, CHUNK)
            tl.store(out_ptr + count + j, num_kv + j, mask=j < always)


def _channels(head_size: int) -> int:
    return next_power_of_2(max(head_size, 16))


def _tokens_at_once(tensor: torch.Tensor, limit: int) -> int:
    """Return the tokens of one head of [B, S, H, D] that `limit` bytes hold."""
    return min(max(limit // (_channels(tensor.shape[3]) * tensor.element_size()), 8), 64)


_launch_pool, _launch_add_gated = Launcher(_pool_kernel), Launcher(_add_gated_kernel)
_launch_score, _launch_select = Launcher(_score_kernel), Launcher(_select_kernel)
_launch_cell_score = Launcher(_cell_score_kernel)


def pool_tiles(
    tensor: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    index: torch.Tensor | None,
    keep: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Launch the mean over the tiles of one tensor; see `api.pool_tiles`."""
    batch, _, heads, head_size = tensor.shape
    num_tiles = len(starts)
    out = tensor.new_empty((batch, heads, num_tiles, head_size), dtype=dtype)
    _launch_pool(
        (batch * heads * num_tiles,),
        tensor, out, starts, lengths, starts if index is None else index,
        starts if keep is None else keep.view(torch.uint8),
        *tensor.stride(), *((0, 0) if keep is None else keep.stride()), heads, num_tiles,
        D=head_size, DP=_channels(head_size), T=_tokens_at_once(tensor, READ_BYTES),
        INDEXED=index is not None, MASKED=keep is not None,
        HEADS_FIRST=tensor.stride(2) < tensor.stride(1), num_warps=4,
    )  # fmt: skip
    return out


def add_gated(
    out: torch.Tensor,
    gate: torch.Tensor,
    coarse: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    index: torch.Tensor | None,
) -> torch.Tensor:
    """Launch the gated sum, which changes `out`; see `api.add_gated`."""
    batch, _, heads, head_size = out.shape
    num_tiles = len(starts)
    _launch_add_gated(
        (batch * heads * num_tiles,),
        out, gate, coarse, starts, lengths, starts if index is None else index,
        *out.stride(), *gate.stride(), *coarse.stride(), heads, num_tiles,
        D=head_size, DP=_channels(head_size), T=_tokens_at_once(out, READ_BYTES // 4),
        INDEXED=index is not None, HEADS_FIRST=out.stride(2) < out.stride(1), num_warps=4,
    )  # fmt: skip
    return out


def select_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    count: int,
    always: int,
    out: torch.Tensor,
    *,
    scratch_bytes: int = SCRATCH_BYTES,
    warps: int | None = None,
) -> None:
    """Launch scores and selection, as many rows at a time as the buffer holds.

    Args:
        query: [B, H, Nq, D].
        key: [B, Hkv, Nk, D].
        count: key tiles to keep.
        always: blocks after the tiles that every row keeps.
        out: int32 [B, H, Nq, at least count + always], stride 1 along rows; is written to.
        scratch_bytes: size of the buffer of scores.
        warps: warps that share a row; by default one for every 4096 keys.
    """
    batch, heads, num_q, head_size = query.shape
    num_kv = key.shape[2]
    padded = next_power_of_2(max(num_kv, 32))
    key_row = -(-num_kv // 16) * 16
    blocks = batch * heads * -(-num_q // SCORE_ROWS)
    step = min(blocks, max(1, scratch_bytes // (4 * SCORE_ROWS * key_row)))
    scratch = torch.empty((step * SCORE_ROWS, key_row), dtype=torch.int32, device=query.device)
    # Products of fp32 run outside the tensor cores, from registers.
    wide = query.dtype == torch.float32
    for first in range(0, blocks, step):
        used = min(step, blocks - first)
        _launch_score(
            (used, -(-num_kv // SCORE_KEYS)),
            query, key, scratch, *query.stride(), *key.stride(),
            first, num_q, num_kv, heads, heads // key.shape[1], key_row,
            D=head_size, BD=min(16 if wide else 64, _channels(head_size)),
            BM=SCORE_ROWS, BN=SCORE_KEYS,
            UPCAST=interpreted(), num_warps=8 if wide else 4, num_stages=2,
        )  # fmt: skip
        _launch_select(
            (used * SCORE_ROWS,),
            scratch, out, *out.stride()[:3], first, num_q, num_kv, heads, count, always, key_row,
            BM=SCORE_ROWS, NP=padded, CHUNK=LISTED,
            num_warps=warps or min(max(padded // 4096, 1), 16),
        )  # fmt: skip


def select_cells(
    query: torch.Tensor,
    key: torch.Tensor,
    q_real: torch.Tensor,
    k_real: torch.Tensor,
    cells: tuple[int, int],
    count: int,
    always: int,
    out: torch.Tensor,
    scale: float,
    *,
    scratch_bytes: int = SCRATCH_BYTES,
) -> None:
    """Launch scores of cells and selection; see `reference.select_cells_reference`.

    All tensors have stride 1 along their last dimension.
    """
    batch, heads, num_cells, head_size = query.shape
    num_q, num_kv = num_cells // cells[0], key.shape[2] // cells[1]
    rows, keys = CELLS // cells[0], CELLS // cells[1]
    padded = next_power_of_2(max(num_kv, 32))
    key_row = -(-num_kv // 16) * 16
    blocks = batch * heads * -(-num_q // rows)
    step = min(blocks, max(1, scratch_bytes // (4 * rows * key_row)))
    scratch = torch.empty((step * rows, key_row), dtype=torch.int32, device=query.device)
    real = [x.view(torch.uint8).expand(batch, -1) for x in (q_real, k_real)]
    for first in range(0, blocks, step):
        used = min(step, blocks - first)
        _launch_cell_score(
            (used, -(-num_kv // keys)),
            query, key, *real, scratch, *query.stride()[:3], *key.stride()[:3],
            real[0].stride(0), real[1].stride(0),
            first, num_q, num_kv, heads, heads // key.shape[1], key_row, scale,
            D=head_size, DP=_channels(head_size), BM=rows, BN=keys, CQ=cells[0], CK=cells[1],
            UPCAST=interpreted(), num_warps=4,
        )  # fmt: skip
        _launch_select(
            (used * rows,),
            scratch, out, *out.stride()[:3], first, num_q, num_kv, heads, count, always, key_row,
            BM=rows, NP=padded, CHUNK=LISTED, num_warps=min(max(padded // 4096, 1), 16),
        )  # fmt: skip
