"""The chunks that every query chooses, in Triton.

A mean in fp32 is the sum of three 16-bit terms, so scores are three products on tensor cores, each
exact up to fp32 sums. The choice needs no sort: bisection over the scores closes in, for a row
held in registers, on the last chunk that is needed.
"""

import torch
import triton
import triton.language as tl

from multimodal_gen.kernels.launch.launcher import Launcher
from multimodal_gen.kernels.select.row_reference import ChunkMeans, Rule
from multimodal_gen.kernels.shared_kernel import (
    add_product,
    interpreted,
    next_power_of_2,
    padded_channels,
)

ROWS = 64
SCORES = 8192  # held by a program
MEANS = 2**14  # elements of the means held at once
TERMS = 3
SPLIT = 512  # means that a program cuts into terms


@triton.jit
def _mass(x, taken, lowest, per_score, COUNTS: tl.constexpr):
    """Return what taken entries count: 1, or how far their score lies above the lowest."""
    mass = taken.to(tl.int32)
    if not COUNTS:
        mass = tl.where(taken, (x - lowest[:, None]) * per_score[:, None], 0.0)
    return mass


@triton.jit
def _between(low, ceiling, entries, least, COUNTS: tl.constexpr):
    """Return where to look next, given how many entries lie between, and how many of them to drop.

    That is where entries that lie evenly would be cut so; the middle where masses are not counts.
    """
    middle = low + (ceiling - low) * 0.5
    if COUNTS:
        share = tl.minimum(tl.maximum(least / tl.maximum(entries, 1).to(tl.float32), 0.05), 0.95)
        guess = low + (ceiling - low) * share
        middle = tl.where((guess > low) & (guess < ceiling), guess, middle)
    return middle


@triton.jit
def _crossing(x, need, least, top, lowest, per_score, COUNTS: tl.constexpr):
    """Return low and high of every row: from `low` on the masses reach the need, from `high` not.

    Between them lies one entry, or several that are equal, or none where masses are counts and
    those from `low` on are just the need. Where all masses together do not reach the need, `low`
    stays the least entry. Guesses and middles take turns.
    """
    low = least
    high = tl.full(top.shape, float("inf"), tl.float32)
    between = tl.sum((x > float("-inf")).to(tl.int32), 1)
    above = tl.zeros(between.shape, tl.int32)
    middle = _between(low, top, between, between - need, COUNTS)
    open = (between > 1) & (top > low)
    while tl.max(open.to(tl.int32), 0) > 0:
        for turn in tl.static_range(2):
            inside = x >= middle[:, None]
            count = tl.sum(inside.to(tl.int32), 1)
            reached = count
            if not COUNTS:
                reached = tl.sum(_mass(x, inside, lowest, per_score, COUNTS), 1)
            enough = reached >= need
            rises = open & enough
            falls = open & (enough == 0)
            high = tl.where(falls, middle, high)
            above = tl.where(falls, count, above)
            between = tl.where(rises, count, between)
            low = tl.where(rises, middle, low)
            if COUNTS:
                # As many as are needed: what lies below is out, and nothing is left between.
                exact = rises & (count == need)
                high = tl.where(exact, middle, high)
                above = tl.where(exact, count, above)
            ceiling = tl.minimum(high, top)
            # The last entry that is needed is the least one between, or there are more to drop.
            dropped = tl.maximum(between - need, 1)
            middle = _between(low, ceiling, between - above, dropped, COUNTS and turn == 1)
            # The top itself is tried last, once nothing lies between it and the rest.
            last = (middle <= low) & (high > top) & (ceiling > low)
            middle = tl.where(last, top, middle)
            open = open & (between - above > 1) & (middle > low) & (middle < high)
    return low, high


@triton.jit(do_not_specialize=["tokens", "heads", "group", "num_chunks", "extra"])
def _select_kernel(
    q_ptr, m_ptr, own_ptr, count_ptr, mask_ptr, out_ptr, pairs_ptr,
    q_b, q_s, q_h, q_d, m_t, m_b, m_h, m_n, count_b, mask_b, mask_s,
    tokens, heads, group, num_chunks, words, extra, threshold,
    D: tl.constexpr, DP: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, NP: tl.constexpr,
    TOPK: tl.constexpr, MASKED: tl.constexpr, ROWS_MASKED: tl.constexpr, SHIFT: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Bits of BM queries of one head. Grid [B * blocks of queries * H], heads fastest."""
    pid = tl.program_id(0)
    h = (pid % heads).to(tl.int64)
    blocks = tl.cdiv(tokens, BM)
    block = pid // heads % blocks
    b = (pid // heads // blocks).to(tl.int64)
    row = block * BM + tl.arange(0, BM)
    real = row < tokens
    n = tl.arange(0, NP)
    q_ptr += b * q_b + h * q_h
    m_ptr += b * m_b + h // group * m_h
    # Products with the three terms of the means, smallest first: [BM, NP].
    scores = tl.zeros([BM, NP], tl.float32)
    for back in tl.static_range(3):
        scores = scores * SHIFT
        for first in tl.static_range(0, DP, BD):
            d = first + tl.arange(0, BD)
            at = row.to(tl.int64)[:, None] * q_s + d.to(tl.int64)[None, :] * q_d
            q = tl.load(q_ptr + at, mask=real[:, None] & (d < D)[None, :], other=0.0)
            terms = m_ptr + (2 - back) * m_t + n[None, :] * m_n + d[:, None]
            m = tl.load(terms, mask=(n < num_chunks)[None, :] & (d < D)[:, None], other=0.0)
            scores = add_product(q, m, scores, UPCAST)
    own = tl.load(own_ptr + row, mask=real, other=0)
    is_own = n[None, :] == own[:, None]
    count = tl.load(count_ptr + b * count_b + n, mask=n < num_chunks, other=0)
    others = (n < num_chunks)[None, :] & (is_own == 0) & real[:, None]
    if MASKED:
        others = others & (count > 0)[None, :]
    if ROWS_MASKED:
        kept = tl.load(mask_ptr + b * mask_b + row.to(tl.int64) * mask_s, mask=real, other=0)
        others = others & (kept != 0)[:, None]
    x = tl.where(others, scores, float("-inf"))
    alone = tl.max(others.to(tl.int32), 1) == 0
    least = tl.where(alone, 0.0, tl.min(tl.where(others, scores, float("inf")), 1))
    top = tl.where(alone, 0.0, tl.max(x, 1))
    lowest = least
    per_score = least
    need = tl.full([BM], 0, tl.int32) + extra
    if not TOPK:
        mine = tl.sum(tl.where(is_own, scores, 0.0), 1)
        lowest = tl.where(alone, mine, tl.minimum(mine, least))
        spread = tl.where(alone, mine, tl.maximum(mine, top)) - lowest
        per_score = 1.0 / tl.where(spread <= 1e-6, 1.0, spread)
        mine = (mine - lowest) * per_score
        total = mine + tl.sum(_mass(x, x > float("-inf"), lowest, per_score, TOPK), 1) + 1e-6
        need = tl.maximum(threshold - mine / total, 0.0) * total
    low, high = _crossing(x, need, least, top, lowest, per_score, TOPK)
    chosen = x >= high[:, None]
    reached = tl.sum(_mass(x, chosen, lowest, per_score, TOPK), 1)
    takes = reached < need
    if not TOPK:
        takes = takes | (tl.max(chosen.to(tl.int32), 1) == 0)
    # Entries that are equal count the same, and go to the lowest chunks: one at a time, because
    # there is hardly ever more than one.
    limit = tl.full([BM], -1, tl.int32)
    place = 0
    while tl.max(takes.to(tl.int32), 0) > 0:
        equal = (x >= low[:, None]) & (x < high[:, None])
        following = tl.min(tl.where(equal & (n[None, :] > limit[:, None]), n[None, :], NP), 1)
        takes = takes & (following < NP)
        limit = tl.where(takes, following, limit)
        each = tl.max(_mass(x, equal, lowest, per_score, TOPK), 1)
        place += 1
        takes = takes & (reached + place * each < need)
    chosen = (x >= high[:, None]) | ((x >= low[:, None]) & (n[None, :] <= limit[:, None]))
    chosen = (chosen | is_own) & real[:, None]
    keys = tl.sum(tl.where(chosen, count[None, :], 0), 1)
    tl.store(pairs_ptr + pid, tl.sum(keys.to(tl.int64), 0))
    bits = tl.reshape(chosen.to(tl.int32), [BM, NP // 32, 32]) << tl.arange(0, 32)[None, None, :]
    packed = tl.sum(bits, 2)
    w = tl.arange(0, NP // 32)
    out_ptr += (b * heads + h) * tokens * words
    at = row.to(tl.int64)[:, None] * words + w[None, :]
    tl.store(out_ptr + at, packed, mask=real[:, None] & (w < words)[None, :])


@triton.jit
def _split_kernel(m_ptr, term_ptr, total, SHIFT: tl.constexpr, N: tl.constexpr):
    """Cut `total` means into three terms each, [3, total]. Grid [blocks of N]."""
    i = tl.program_id(0) * N + tl.arange(0, N)
    real = i < total
    rest = tl.load(m_ptr + i, mask=real, other=0.0)
    for term in tl.static_range(3):
        value = rest.to(term_ptr.dtype.element_ty)
        tl.store(term_ptr + term * total + i, value, mask=real)
        rest = (rest - value.to(tl.float32)) * SHIFT


_launch_select, _launch_split = Launcher(_select_kernel), Launcher(_split_kernel)


def _warps(padded: int, *, topk: bool) -> dict[str, int]:
    """Return the warps of a program, and a bound of its registers that lets more programs run."""
    if padded > (128 if topk else 32):
        return {"num_warps": 8}
    if torch.version.hip is not None:
        return {"num_warps": 4}
    return {"num_warps": 4, "maxnreg": 128 if padded <= 64 else 168}


def select_chunks(
    query: torch.Tensor,
    chunks: ChunkMeans,
    own: torch.Tensor,
    rule: Rule,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the choice in the scope `query_head`; see `rows.select_chunks`."""
    batch, tokens, heads, head_size = query.shape
    means = chunks.means
    kv_heads, num_chunks = means.shape[1:3]
    words = -(-num_chunks // 32)
    out = torch.empty((batch, heads, tokens, words), dtype=torch.int32, device=query.device)
    # Terms of float16 are shifted up, or the smaller ones would vanish.
    shift = 2.0**11 if query.dtype == torch.float16 else 1.0
    terms = torch.empty((TERMS, *means.shape), dtype=query.dtype, device=means.device)
    _launch_split(
        (-(-means.numel() // SPLIT),), means.contiguous(), terms, means.numel(),
        SHIFT=shift, N=SPLIT, num_warps=4,
    )  # fmt: skip
    padded = next_power_of_2(max(num_chunks, 32))
    rows = ROWS if padded <= 128 else max(SCORES // padded, 16)
    width = padded_channels(head_size)
    programs = batch * -(-tokens // rows) * heads
    pairs = torch.empty((programs,), dtype=torch.int64, device=query.device)
    counts = chunks.counts.expand(batch, -1)
    rows_kept = own if mask is None else mask.view(torch.uint8)
    _launch_select(
        (programs,), query, terms, own, counts, rows_kept, out, pairs,
        *query.stride(), *terms.stride()[:4], counts.stride(0),
        *((0, 0) if mask is None else mask.stride()),
        tokens, heads, heads // kv_heads, num_chunks, words,
        (rule.topk or 1) - 1, rule.threshold,
        D=head_size, DP=width, BD=min(width, max(MEANS // padded, 16)), BM=rows, NP=padded,
        TOPK=rule.topk is not None, MASKED=chunks.masked, ROWS_MASKED=mask is not None,
        SHIFT=1.0 / shift, UPCAST=interpreted(),
        **_warps(padded, topk=rule.topk is not None),
    )  # fmt: skip
    return out, pairs.sum()
