"""The best tiles of every tile in Triton, without a sort.

Scores become integers of the same order; bisection finds the smallest one to keep, for a row held
in registers, and a running sum then lists what is kept in increasing order.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from multimodal_gen.kernels.launch.launcher import Form, Launch, Launcher, form_of
from multimodal_gen.kernels.select.reference import Ranking
from multimodal_gen.kernels.shared_kernel import interpreted, next_power_of_2, padded_channels

SCORE_ROWS = 64
SCORE_KEYS = 128
SCORES = 256  # a program makes for one query tile at once, of its cells and those of key tiles
CELL_STEPS = 20  # it does so often
LOG2E = 1.4426950408889634
LISTED = 256  # keys that are listed at once
# Scores wait for their selection in a buffer of this size: some times the L2 cache of a large GPU.
SCRATCH_BYTES = 2**27


@triton.jit
def _ordered(score):
    """Return integers in the order of the scores; equal scores, 0 and -0 too, become equal."""
    score = tl.where(score == 0.0, 0.0, score)
    score = tl.where(score != score, float("inf"), score)
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _between(low, high):
    """Return an integer above `low` and up to `high`, of the score midway if there is one.

    Scores lie closer together than integers of their order, whose first bits are exponents.
    """
    first = (low ^ ((low >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    last = (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    middle = _ordered(first * 0.5 + last * 0.5)
    inside = (middle > low) & (middle <= high)
    return tl.where(inside, middle, (low | high) - ((low ^ high) >> 1))


@triton.jit
def _reach(keys, rest, middle, NP: tl.constexpr, REST: tl.constexpr):
    """Return how many of a row are no less than `middle`; a thread adds up what it holds first."""
    found = (keys >= middle).to(tl.int32)
    if REST:
        found = tl.sum(tl.reshape(found, [NP // REST, REST]), 0) + (rest >= middle).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _rows(first_block, num_q, heads, BM: tl.constexpr):
    """Return batch, head and the first of the BM query tiles of a program."""
    blocks = tl.cdiv(num_q, BM)
    block = first_block + tl.program_id(0)
    h = (block // blocks % heads).to(tl.int64)
    b = (block // blocks // heads).to(tl.int64)
    return b, h, block % blocks * BM


@triton.jit
def _store_scores(key_ptr, scores, row, n, num_q, end, key_row, BM: tl.constexpr):
    """Write the scores of a program's query tiles and key tiles up to `end` as integers."""
    at = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    keys = key_ptr + at[:, None] * key_row + n[None, :]
    tl.store(keys, _ordered(scores), mask=(row < num_q)[:, None] & (n < end)[None, :])


@triton.jit(do_not_specialize=["first_block", "num_q", "num_kv", "heads", "group"])
def _score_kernel(
    q_ptr, k_ptr, key_ptr, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d,
    first_block, num_q, num_kv, heads, group, key_row,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid [blocks of BM rows, blocks of BN keys]; writes [blocks * BM, key_row]."""
    b, h, first_row = _rows(first_block, num_q, heads, BM)
    row = first_row + tl.arange(0, BM)
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
    _store_scores(key_ptr, acc, row, n, num_q, num_kv, key_row, BM)


@triton.jit(do_not_specialize=["first_block", "num_q", "num_kv", "heads", "group", "span"])
def _cell_score_kernel(
    q_ptr, k_ptr, q_real_ptr, k_real_ptr, key_ptr, q_b, q_h, q_n, k_b, k_h, k_n, q_real_b, k_real_b,
    first_block, num_q, num_kv, heads, group, key_row, span, scale_log2,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CQ: tl.constexpr,
    CK: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid [blocks of BM query tiles, spans of key tiles], tiles of CQ and CK cells.

    Writes the logarithm, to base 2, of the sum of exp(scale * q.k) over the cells of two tiles. The
    rows of a product are cells 0 of all tiles, then cells 1, and so on, and its columns likewise:
    then a thread holds all pairs of cells of its tiles, and adds them up alone.
    """
    b, h, first_row = _rows(first_block, num_q, heads, BM)
    own = first_row + tl.arange(0, BM)
    row = tl.arange(0, BM * CQ)
    q_cell = (first_row + row % BM) * CQ + row // BM
    column = tl.arange(0, BN * CK)
    k_cell = column % BN * CK + column // BN
    d = tl.arange(0, DP)
    in_q = q_cell < num_q * CQ
    q_real = tl.load(q_real_ptr + b * q_real_b + q_cell, mask=in_q, other=0) != 0
    q_bias = tl.where(q_real, 0.0, float("-inf"))
    q_ptr += b * q_b + h * q_h
    k_ptr += b * k_b + h // group * k_h
    k_real_ptr += b * k_real_b
    q_mask = in_q[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + q_cell[:, None].to(tl.int64) * q_n + d[None, :], mask=q_mask, other=0.0)
    q = q.to(tl.float32) if UPCAST else q
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, num_kv)
    for first in tl.range(begin, end, BN, num_stages=STAGES):
        cell = first * CK + k_cell
        there = cell < num_kv * CK
        k_real = tl.load(k_real_ptr + cell, mask=there, other=0) != 0
        k_bias = tl.where(k_real, 0.0, float("-inf"))
        k_mask = there[None, :] & (d < D)[:, None]
        k = tl.load(k_ptr + cell[None, :].to(tl.int64) * k_n + d[:, None], mask=k_mask, other=0.0)
        k = k.to(tl.float32) if UPCAST else k
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2 + k_bias[None, :]
        scores += q_bias[:, None]
        cells = tl.reshape(scores, [CQ, BM, CK, BN])
        largest = tl.max(tl.max(cells, 2), 0)
        nothing = largest == float("-inf")
        shift = tl.where(nothing, 0.0, largest)
        weights = tl.exp2(cells - shift[None, :, None, :])
        total = tl.where(nothing, 1.0, tl.sum(tl.sum(weights, 2), 0))
        total = tl.where(nothing, float("-inf"), tl.log2(total) + shift)
        n = first + tl.arange(0, BN)
        _store_scores(key_ptr, total, own, n, num_q, end, key_row, BM)


@triton.jit(
    do_not_specialize=["first_block", "num_q", "num_kv", "heads", "count", "always", "near"]
)
def _select_kernel(
    key_ptr, out_ptr, out_b, out_h, out_n,
    first_block, num_q, num_kv, heads, count, always, near, key_row,
    BM: tl.constexpr, NP: tl.constexpr, REST: tl.constexpr, CHUNK: tl.constexpr, MAP: tl.constexpr,
):  # fmt: skip
    """Grid [rows]. `smallest` becomes the largest key that at least `count` others reach.

    A row is held in two parts, the second of which may have no room. Lists what is kept; or, if
    MAP, marks it, and what is at most `near` away from the row's number.
    """
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
        rest = keys
        if REST:
            n = NP + tl.arange(0, REST)
            rest = tl.load(key_ptr + n, mask=n < num_kv, other=-0x80000000)
            smallest = tl.minimum(smallest, tl.min(tl.where(n < num_kv, rest, 0x7FFFFFFF), 0))
            largest = tl.maximum(largest, tl.max(rest, 0))
        above = 0  # keys beyond `largest`
        hit = False  # `smallest` is reached by exactly `count`
        while smallest < largest:
            middle = _between(smallest, largest)
            reach = _reach(keys, rest, middle, NP, REST)
            enough = reach >= count
            hit = reach == count
            above = tl.where(enough, above, reach)
            smallest = tl.where(enough, middle, smallest)
            largest = tl.where(hit, middle, tl.where(enough, largest, middle - 1))
        listed = 0
        equal = 0
        for first in range(0, num_kv, CHUNK):
            j = first + tl.arange(0, CHUNK)
            key = tl.load(key_ptr + j, mask=j < num_kv, other=-0x80000000)
            chosen = (key >= smallest) & (j < num_kv)
            if not hit:  # of equal ones the first
                is_tie = (key == smallest) & (j < num_kv)
                rank = equal + tl.cumsum(is_tie.to(tl.int32), 0)
                chosen &= (key > smallest) | (rank <= count - above)
                equal += tl.sum(is_tie.to(tl.int32), 0)
            if MAP:
                chosen |= tl.abs(j - row) <= near
                tl.store(out_ptr + j, chosen.to(tl.uint8), mask=j < num_kv)
            else:
                slot = listed + tl.cumsum(chosen.to(tl.int32), 0) - 1
                tl.store(out_ptr + slot, j, mask=chosen)
                listed += tl.sum(chosen.to(tl.int32), 0)
        for first in range(0, 0 if MAP else always, CHUNK):
            j = first + tl.arange(0, CHUNK)
            tl.store(out_ptr + count + j, num_kv + j, mask=j < always)


def _parts(num: int) -> tuple[int, int]:
    """Return two powers of two, or one and 0, that together hold a row of `num` keys."""
    whole = next_power_of_2(max(num, 32))
    half = whole // 2
    rest = next_power_of_2(max(num - half, half // 4))
    return (whole, 0) if whole < 512 or rest == half else (half, rest)


def _warps(padded: int) -> int:
    """Return how many warps hold a row of so many keys in their registers."""
    return min(next_power_of_2(-(-padded // 4096)), 16)


_launch_score, _launch_select = Launcher(_score_kernel), Launcher(_select_kernel)
_launch_cell_score = Launcher(_cell_score_kernel)


def select_tiles(
    ranking: Ranking,
    *,
    near: int | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
    warpgroups: bool = False,
) -> None:
    """Launch scores and selection, as many rows at a time as the buffer holds.

    Args:
        ranking: what is chosen; with cells all tensors have stride 1 along their last dimension.
            `out` has stride 1 along rows; with `near` it is a map, uint8 [B, H, Nq, Nk].
        near: how far from a row's own number tiles are kept whatever they score; -1 for none.
        scratch_bytes: size of the buffer of scores.
        warpgroups: whether four warps multiply cells together, as SM90 can.
    """
    query, key, count, always, out, cells, real, scale = ranking
    given = () if real is None else tuple([x.view(torch.uint8) for x in real])
    forms = (form_of(query), form_of(key), form_of(out), *map(form_of, given))
    number, options = (count, always, near, cells, scale), (scratch_bytes, warpgroups)
    room, launches = _prepared(forms, *number, *options)
    scratch = torch.empty(room, dtype=torch.int32, device=out.device)
    for score, select in launches:
        score((query, key, *given, scratch))
        select((scratch, out))


@lru_cache(maxsize=1024)
def _prepared(
    forms: tuple[Form, ...],
    count: int,
    always: int,
    near: int | None,
    cells: tuple[int, int],
    scale: float,
    scratch_bytes: int,
    warpgroups: bool,
) -> tuple[tuple[int, int], list[tuple[Launch, Launch]]]:
    """Return the shape of the scores of tensors of one form, and what launches every turn.

    The forms are those of queries, keys and what is written, and of which cells are real, where
    there are such; the rest is in `select_tiles`.
    """
    query, key, out, *real = forms
    batch, heads, num_q, _ = out.shape
    head_size, num_kv, group = query.shape[3], key.shape[2] // cells[1], heads // key.shape[1]
    part, rest = _parts(num_kv)
    key_row = -(-num_kv // 16) * 16
    if not real:
        launcher, rows, at_once = _launch_score, SCORE_ROWS, SCORE_KEYS
        # Products of fp32 run outside the tensor cores, from registers.
        wide = query.dtype == torch.float32
        strides = (*query.strides, *key.strides)
        more: tuple[float, ...] = ()
        options = {
            "D": head_size, "BD": min(16 if wide else 64, padded_channels(head_size)),
            "BM": rows, "BN": SCORE_KEYS,
            "UPCAST": interpreted(), "num_warps": 8 if wide else 4, "num_stages": 2,
        }  # fmt: skip
    else:
        width = padded_channels(head_size)
        launcher, rows = _launch_cell_score, _cell_rows(cells[0], width, warpgroups)
        keys = min(SCORES // cells[0], 64) // cells[1]
        at_once = keys * CELL_STEPS
        of_batch = [x.strides[0] if x.shape[0] > 1 else 0 for x in real]
        strides, more = (*query.strides[:3], *key.strides[:3], *of_batch), (at_once, scale * LOG2E)
        options = {
            "D": head_size, "DP": width, "BM": rows, "BN": keys, "CQ": cells[0], "CK": cells[1],
            "STAGES": 2 if width <= 128 else 1, "UPCAST": interpreted(),
            "num_warps": 4 if warpgroups or width > 128 else rows // 16,
        }  # fmt: skip
    chosen = {
        "BM": rows, "NP": part, "REST": rest, "CHUNK": LISTED, "MAP": near is not None,
        "num_warps": _warps(part + rest),
    }  # fmt: skip
    blocks = batch * heads * -(-num_q // rows)
    step = min(blocks, max(1, scratch_bytes // (4 * rows * key_row)))
    launches = []
    for first in range(0, blocks, step):
        some = min(step, blocks - first)
        sizes = (first, num_q, num_kv, heads)
        fixed = (*strides, *sizes, group, key_row, *more)
        score = Launch(launcher, (some, -(-num_kv // at_once)), fixed, [options])
        fixed = (*out.strides[:3], *sizes, count, always, -1 if near is None else near, key_row)
        launches.append((score, Launch(_launch_select, (some * rows,), fixed, [chosen])))
    return (step * rows, key_row), launches


def _cell_rows(cells: int, width: int, warpgroups: bool) -> int:
    """Return how many query tiles of `cells` cells a program scores, as shared memory allows.

    Sixteen to a warp, so that a thread holds all cells of its tiles.
    """
    if warpgroups:
        return 64 if cells * width <= 1024 else 32
    return 32 if width <= 128 else 16
