"""Sorting rows by their choices, and merging their parts, in Triton.

The sort is a counting sort: the rows of a tile are counted per pattern, the counts are summed up,
and each row then goes behind those before it. A program takes rows through all groups of a head,
so that queries are read once and written to every group that they are in use in.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from multimodal_gen.kernels.launch.launcher import (
    Form,
    Launch,
    Launcher,
    form_of,
    strides_in_vectors,
    vector_of,
)
from multimodal_gen.kernels.select.row_reference import ChunkGroups, SortedRows
from multimodal_gen.kernels.shared_kernel import next_power_of_2, scan_counts

TILE = 64  # rows of a program
COUNTS = 4096  # counts that a program holds
PARTS = 2048  # elements of a part that a program holds
UNROLL = 6  # parts of a row that are loaded at once, at most


@triton.jit
def _keys(bits_ptr, row, real, group, words, num_chunks, SIZE: tl.constexpr):
    """Return patterns of rows in a group, and their rank; see `row_reference.sort_keys`."""
    first = group * SIZE
    shift = first % 32
    at = row.to(tl.int64) * words + first // 32
    low = tl.load(bits_ptr + at, mask=real, other=0).to(tl.int64) & 0xFFFFFFFF
    both = real & ((row * 0 + first // 32 + 1) < words)
    high = tl.load(bits_ptr + at + 1, mask=both, other=0).to(tl.int64) & 0xFFFFFFFF
    pattern = ((low | (high << 32)) >> shift).to(tl.int32)
    pattern = pattern & ((1 << tl.minimum(SIZE, num_chunks - first)) - 1)
    rank = pattern ^ (pattern >> 1)
    rank = rank ^ (rank >> 2)
    rank = rank ^ (rank >> 4)
    return pattern, (rank - 1) & ((1 << SIZE) - 1)


@triton.jit(do_not_specialize=["tokens", "words", "num_chunks", "groups", "tiles"])
def _count_kernel(
    bits_ptr, count_ptr, tokens, words, num_chunks, groups, tiles,
    SIZE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Rows of every pattern: [B * H, G, tiles, patterns]. Grid [B * H * tiles].

    What the last tile lacks counts as rows with the empty pattern, which comes last.
    """
    pid = tl.program_id(0)
    tile = pid % tiles
    bh = (pid // tiles).to(tl.int64)
    row = tile * T + tl.arange(0, T)
    real = row < tokens
    BINS: tl.constexpr = 1 << SIZE
    bins = tl.arange(0, BINS)
    bits_ptr += bh * tokens * words
    for group in range(groups):
        _, key = _keys(bits_ptr, row, real, group, words, num_chunks, SIZE)
        count = tl.histogram(tl.where(real, key, BINS - 1), BINS)
        tl.store(count_ptr + ((bh * groups + group) * tiles + tile) * BINS + bins, count)


@triton.jit(do_not_specialize=["tiles"])
def _offset_kernel(
    count_ptr, total_ptr, tiles, BINS: tl.constexpr, B: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Turn counts into how many rows of the pattern earlier tiles have, and sum them up.

    Grid [B * H * G * BINS / B].
    """
    pid = tl.program_id(0)
    part = (pid // (BINS // B)).to(tl.int64)
    bins = pid % (BINS // B) * B + tl.arange(0, B)
    scan_counts(count_ptr + part * tiles * BINS, total_ptr + part * BINS, tiles, bins, BINS, B, N)


@triton.jit(do_not_specialize=["tokens", "groups", "extra"])
def _begin_kernel(total_ptr, used_ptr, tokens, groups, extra, BINS: tl.constexpr):
    """Turn totals into where the rows of each pattern begin. Grid [B * H * G]."""
    part = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total = tl.load(total_ptr + part * BINS + bins)
    begin = tl.cumsum(total, 0) - total
    tl.store(total_ptr + part * BINS + bins, begin)
    used = tl.sum(tl.where(bins == BINS - 1, begin, 0), 0)
    if (part % groups == 0) & (extra > 0):
        used = tokens
    tl.store(used_ptr + part, used)


@triton.jit(do_not_specialize=["tokens", "room", "words", "num_chunks", "groups", "tiles", "extra"])
def _position_kernel(
    bits_ptr, before_ptr, begin_ptr, used_ptr, moved_bits_ptr, position_ptr,
    tokens, room, words, num_chunks, groups, tiles, extra,
    SIZE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Where T rows of one head go, in every group. Grid [B * H * tiles]."""
    pid = tl.program_id(0)
    tile = pid % tiles
    bh = (pid // tiles).to(tl.int64)
    i = tl.arange(0, T)
    row = tile * T + i
    real = row < tokens
    BINS: tl.constexpr = 1 << SIZE
    bits_ptr += bh * tokens * words
    for group in range(groups):
        part = bh * groups + group
        pattern, key = _keys(bits_ptr, row, real, group, words, num_chunks, SIZE)
        begin = tl.load(begin_ptr + part * BINS + key, mask=real, other=0)
        begin += tl.load(before_ptr + (part * tiles + tile) * BINS + key, mask=real, other=0)
        same = (key[:, None] == key[None, :]) & (i[None, :] < i[:, None])
        position = begin + tl.sum(same.to(tl.int32), 1)
        tl.store(position_ptr + part * tokens + row, position, mask=real)
        moves = real & (position < tl.load(used_ptr + part))
        if group == 0:
            pattern = pattern | extra
        tl.store(moved_bits_ptr + part * room + position, pattern, mask=moves)


@triton.jit
def _rows_of_head(heads, tiles, tokens, T: tl.constexpr):
    """Return the program's batch entry and head, its rows, and which of them exist."""
    pid = tl.program_id(0)
    h = (pid % heads).to(tl.int64)
    tile = pid // heads % tiles
    b = (pid // heads // tiles).to(tl.int64)
    row = tile * T + tl.arange(0, T)
    return b, h, row, row < tokens


@triton.jit(
    do_not_specialize=["q_b", "q_s", "q_h", "tokens", "room", "heads", "groups", "tiles"],
    do_not_specialize_on_alignment=["used_ptr"],
)
def _move_kernel(
    q_ptr, used_ptr, position_ptr, moved_ptr,
    q_b, q_s, q_h, q_d, tokens, room, heads, groups, tiles,
    D: tl.constexpr, DP: tl.constexpr, VEC: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Move T rows of one head to all groups. Grid [B * H * tiles], heads fastest."""
    b, h, row, real = _rows_of_head(heads, tiles, tokens, T)
    d = tl.arange(0, DP)
    q_ptr += (b * q_b + h * q_h) * VEC
    from_ = row.to(tl.int64)[:, None] * q_s * VEC + (d * q_d)[None, :]
    q = tl.load(q_ptr + from_, mask=real[:, None] & (d < D)[None, :], other=0.0)
    for group in range(groups):
        part = (b * heads + h) * groups + group
        position = tl.load(position_ptr + part * tokens + row, mask=real, other=0)
        moves = real & (position < tl.load(used_ptr + part))
        to = (part * room + position)[:, None] * D + d[None, :]
        tl.store(moved_ptr + to, q, mask=moves[:, None] & (d < D)[None, :])


@triton.jit
def _or(a, b):
    return a | b


@triton.jit(do_not_specialize=["blocks"])
def _list_kernel(
    bits_ptr, used_ptr, index_ptr, count_ptr, length_ptr, blocks,
    NUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bits that any row of a block has, and its rows in use. Grid [rows of the plan]."""
    pid = tl.program_id(0)
    part = pid // blocks
    length = tl.load(used_ptr + part) - pid % blocks * BLOCK
    length = tl.minimum(tl.maximum(length, 0), BLOCK)
    row = tl.arange(0, 256)
    bits = tl.load(bits_ptr + pid.to(tl.int64) * BLOCK + row, mask=row < length, other=0)
    either = tl.reduce(bits, 0, _or)
    place = tl.arange(0, 32)
    listed = (either >> place) & 1
    slot = tl.cumsum(listed, 0) - 1
    index_ptr += pid.to(tl.int64) * NUM
    tl.store(index_ptr + slot, place, mask=listed != 0)
    tl.store(count_ptr + pid, tl.sum(listed, 0))
    tl.store(length_ptr + pid, length)


@triton.jit
def _part_lse(given, group):
    """Return the lse of rows in a group, in powers of two, -inf if not in use; and their places."""
    lse_ptr, position_ptr, used_ptr, parts, groups, row, real, tokens, lse_h, lse_s = given
    part = parts + group
    real = real & (row * 0 + group < groups)
    position = tl.load(position_ptr + part * tokens + row, mask=real, other=0)
    used = tl.load(used_ptr + parts + tl.minimum(group, groups - 1))
    taken = real & (position < used)
    at = group * lse_h + position.to(tl.int64) * lse_s
    return tl.load(lse_ptr + at, mask=taken, other=float("-inf")) * 1.4426950408889634, position


@triton.jit(
    do_not_specialize=[
        "out_b", "out_s", "out_h", "part_b", "part_s", "part_h", "lse_b", "lse_h",
        "tokens", "heads", "groups", "tiles",
    ],
    do_not_specialize_on_alignment=["used_ptr"],
)  # fmt: skip
def _merge_kernel(
    part_ptr, lse_ptr, position_ptr, used_ptr, out_ptr,
    part_b, part_s, part_h, part_d, lse_b, lse_h, lse_s, out_b, out_s, out_h, out_d,
    tokens, heads, groups, tiles,
    U: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, VEC: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Merge T rows of one head. Grid [B * H * tiles], heads fastest.

    With m the largest lse of a row, out = sum 2^(lse - m) part / sum 2^(lse - m).
    """
    b, h, row, real = _rows_of_head(heads, tiles, tokens, T)
    d = tl.arange(0, DP)
    mask = real[:, None] & (d < D)[None, :]
    parts = (b * heads + h) * groups
    part_ptr += (b * part_b + h * groups * part_h) * VEC
    lse_ptr += b * lse_b + h * groups * lse_h
    given = (lse_ptr, position_ptr, used_ptr, parts, groups, row, real, tokens, lse_h, lse_s)
    # Unrolled, and in two passes, so that many loads are in flight.
    m = tl.full([T], float("-inf"), tl.float32)
    for first in range(0, groups, U):
        for u in tl.static_range(U):
            lse, _ = _part_lse(given, first + u)
            m = tl.maximum(m, lse)
    m = tl.where(m == float("-inf"), 0.0, m)
    total = tl.zeros([T], tl.float32)
    acc = tl.zeros([T, DP], tl.float32)
    for first in range(0, groups, U):
        for u in tl.static_range(U):
            lse, position = _part_lse(given, first + u)
            taken = lse > float("-inf")
            from_ = ((first + u) * part_h + position.to(tl.int64) * part_s) * VEC
            x = tl.load(
                part_ptr + from_[:, None] + (d * part_d)[None, :],
                mask=taken[:, None] & (d < D)[None, :], other=0.0,
            )  # fmt: skip
            weight = tl.exp2(lse - m)
            acc += x.to(tl.float32) * weight[:, None]
            total += weight
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    to = (b * out_b + h * out_h + row.to(tl.int64) * out_s) * VEC
    out_ptrs = out_ptr + to[:, None] + (d * out_d)[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


_launch_count, _launch_offset = Launcher(_count_kernel), Launcher(_offset_kernel)
_launch_begin = Launcher(_begin_kernel)
_launch_position, _launch_list = Launcher(_position_kernel), Launcher(_list_kernel)
_launch_move, _launch_merge = Launcher(_move_kernel), Launcher(_merge_kernel)


def sort_rows(bits: torch.Tensor, cut: ChunkGroups, *, block: int, extra: bool) -> SortedRows:
    """Launch the sort; see `rows.sort_rows`."""
    bits = bits.contiguous()
    shapes, launches = _sorting(form_of(bits), cut, block, extra)
    counts, totals, used, moved, position, *lists = map(bits.new_empty, shapes)
    indices, list_counts, lengths = lists
    given = (
        (bits, counts), (counts, totals), (totals, used),
        (bits, counts, totals, used, moved, position), (moved, used, *lists),
    )  # fmt: skip
    for launch, tensors in zip(launches, given, strict=True):
        launch(tensors)
    return SortedRows(moved, indices, list_counts, lengths, position, used)


@lru_cache(maxsize=256)
def _sorting(
    bits: Form, cut: ChunkGroups, block: int, extra: bool
) -> tuple[list[tuple[int, ...]], list[Launch]]:
    """Return the shapes of what a sort writes, and what launches it.

    That is the counts of every tile and of all, `used`, the bits, the positions, and the lists of
    `SortedRows`.
    """
    batch, heads, tokens, words = bits.shape
    num_chunks, size, groups = cut.num_chunks, cut.size, cut.num
    tiles, bins = -(-tokens // TILE), 2**size
    parts, num = (batch, heads, groups), batch * heads * groups
    blocks, num_bits, together = -(-tokens // block), size + extra, min(bins, 16)
    room, listed = blocks * block, (batch, heads * groups, blocks)
    shapes = [
        (num, tiles, bins), (num, 1, bins), parts, (batch, heads * groups, room), (*parts, tokens),
        (*listed, num_bits), listed, listed,
    ]  # fmt: skip
    numbers, put = (words, num_chunks, groups, tiles), 1 << size if extra else 0
    launches = [
        Launch(
            _launch_count, (batch * heads * tiles,), (tokens, *numbers),
            [{"SIZE": size, "T": TILE, "num_warps": 2}],
        ),
        Launch(
            _launch_offset, (num * (bins // together),), (tiles,),
            [{"BINS": bins, "B": together, "N": COUNTS // together, "num_warps": 4}],
        ),
        Launch(
            _launch_begin, (num,), (tokens, groups, int(extra)), [{"BINS": bins, "num_warps": 1}]
        ),
        Launch(
            _launch_position, (batch * heads * tiles,), (tokens, room, *numbers, put),
            [{"SIZE": size, "T": TILE, "num_warps": 2}],
        ),
        Launch(
            _launch_list, (num * blocks,), (blocks,),
            [{"NUM": num_bits, "BLOCK": block, "num_warps": 1}],
        ),
    ]  # fmt: skip
    return shapes, launches


def move_rows(query: torch.Tensor, rows: SortedRows) -> torch.Tensor:
    """Launch the move; see `rows.move_rows`."""
    used, position = rows.used.contiguous(), rows.position.contiguous()
    shape, launch = _moving(form_of(query), (form_of(used), form_of(position)), rows.room)
    moved = query.new_empty(shape)
    launch((query, used, position, moved))
    return moved.transpose(1, 2)


@lru_cache(maxsize=256)
def _moving(query: Form, rows: tuple[Form, Form], room: int) -> tuple[tuple[int, ...], Launch]:
    """Return the shape of moved rows, and what launches the move."""
    (batch, tokens, heads, head_size), groups = query.shape, rows[1].shape[2]
    vector, tiles = vector_of(query), -(-tokens // TILE)
    options = {"D": head_size, "DP": next_power_of_2(head_size), "VEC": vector, "T": TILE}
    fixed = (*strides_in_vectors(query, vector), tokens, room, heads, groups, tiles)
    grid, variants = (batch * heads * tiles,), [{**options, "num_warps": 4}]
    return (batch, heads * groups, room, head_size), Launch(_launch_move, grid, fixed, variants)


def merge_parts(
    parts: torch.Tensor, lse: torch.Tensor, rows: SortedRows, out: torch.Tensor
) -> None:
    """Launch the merge; see `rows.merge_parts`."""
    used, position = rows.used.contiguous(), rows.position.contiguous()
    launch = _merging(*map(form_of, (parts, lse, out)), (form_of(used), form_of(position)))
    launch((parts, lse, position, used, out))


@lru_cache(maxsize=256)
def _merging(parts: Form, lse: Form, out: Form, rows: tuple[Form, Form]) -> Launch:
    """Return what launches a merge."""
    (batch, tokens, heads, head_size), groups = out.shape, rows[1].shape[2]
    vector, padded = vector_of(parts, out), next_power_of_2(head_size)
    at_once = max(PARTS // padded, 16)
    tiles = -(-tokens // at_once)
    fixed = (
        *strides_in_vectors(parts, vector), *lse.strides, *strides_in_vectors(out, vector),
        tokens, heads, groups, tiles,
    )  # fmt: skip
    options = {
        "U": -(-groups // -(-groups // UNROLL)), "D": head_size, "DP": padded, "VEC": vector,
        "T": at_once, "num_warps": 4,
    }  # fmt: skip
    return Launch(_launch_merge, (batch * heads * tiles,), fixed, [options])
