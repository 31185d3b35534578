"""k-means in Triton, without atomics: assignment, counting sort, means over sorted segments.

N = B * H problems of S tokens each. The nearest centroid is the one with the largest
x.c - |c|^2 / 2: one product on tensor cores, whose tiles are folded into a running maximum per
column and reduced once at the end. The sort is stable: a token's place is where its label begins,
plus the tokens of that label in the chunks before, plus those before it in its own chunk. Kernels
of a problem that has stopped return at once, so the host never asks.
"""

from collections.abc import Callable
from functools import partial
from types import MappingProxyType

import torch
import triton
import triton.language as tl

from multimodal_gen.kernels.launch.launcher import Launch, Launcher
from multimodal_gen.kernels.shared_kernel import (
    interpreted,
    next_power_of_2,
    padded_channels,
    scan_counts,
)

CHUNK = 1024
COMPARED = 64  # as many as a program has threads
SCANNED = 64
BIN_BLOCK = 32
MOST_COLUMNS = 64
# Mean tokens of a cluster up to which -> tokens at once and warps, the first that fits.
UPDATES = ((128, 16, 1), (1 << 31, 32, 2))  # H200, 2026-11
# A 16-bit product takes -|c|^2 / 2 along as one more block of the inner dimension, the sum of SPLIT
# numbers of few bits: that saves an addition per score. They are multiplied by a weight, which
# float16 needs for its range, and the lowest of them stands for no centroid.
PARTS = 16
SPLIT: tl.constexpr = tl.constexpr(3)
WEIGHTS = MappingProxyType({torch.bfloat16: (1.0, -3.0e38), torch.float16: (256.0, -65504.0)})


@triton.jit(do_not_specialize=["heads", "num_tokens", "num_centroids", "num_blocks", "keep_b"])
def _assign_kernel(
    x_ptr, c_ptr, half_ptr, factor_ptr, mask_ptr, active_ptr, label_ptr,
    x_b, x_s, x_h, x_d, mask_b, heads, num_tokens, num_centroids, padded, num_blocks,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
    PARTS: tl.constexpr, KEEP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """label[n, t] = argmax_c x[t].c - |c|^2 / 2. Grid [N * blocks of BM tokens]."""
    pid = tl.program_id(0)
    n = (pid // num_blocks).to(tl.int64)
    if tl.load(active_ptr + n) != 0:
        token = pid % num_blocks * BM + tl.arange(0, BM)
        real = token < num_tokens
        d = tl.arange(0, DP)
        x_ptr += n // heads * x_b + n % heads * x_h
        at = token.to(tl.int64)[:, None] * x_s + d[None, :] * x_d
        x = tl.load(x_ptr + at, mask=real[:, None] & (d < D)[None, :], other=0.0)
        part = tl.arange(0, max(PARTS, 1))
        # Loaded, and not made here, because registers as operands hold the product up.
        factors = tl.load(factor_ptr + (tl.arange(0, BM) * 0)[:, None] + part[None, :])
        if UPCAST:
            x, factors = x.to(tl.float32), factors.to(tl.float32)
        c_ptr += n * padded * D
        half_ptr += n * padded * max(PARTS, 1)
        column = tl.arange(0, BC)
        best = tl.full([BM, BC], float("-inf"), tl.float32)
        which = tl.zeros([BM, BC], tl.int32)
        for first in range(0, num_centroids, BC):
            c = first + column
            if D == DP:
                points = tl.load(c_ptr + c[None, :] * D + d[:, None])
            else:
                points = tl.load(c_ptr + c[None, :] * D + d[:, None], (d < D)[:, None], 0.0)
            points = points.to(x.dtype)
            if PARTS:
                halves = tl.load(half_ptr + part[:, None] * padded + c[None, :]).to(x.dtype)
                score = tl.dot(factors, halves, input_precision="ieee")
                score = tl.dot(x, points, score, input_precision="ieee")
            else:
                score = tl.dot(x, points, input_precision="ieee")
                score += tl.load(half_ptr + c)[None, :]
            nearer = score > best
            best = tl.where(nearer, score, best)
            which = tl.where(nearer, first, which)
        top = tl.max(best, 1)
        last = num_centroids - 1
        label = tl.min(tl.where(best == top[:, None], which + column[None, :], last), 1)
        label = tl.minimum(label, last)
        if KEEP:
            kept = tl.load(mask_ptr + n // heads * mask_b + token, mask=real, other=0)
            label = tl.where(kept != 0, label, num_centroids)
        tl.store(label_ptr + n * num_tokens + token, label, mask=real)


@triton.jit(do_not_specialize=["num_tokens", "num_chunks"])
def _count_kernel(
    label_ptr, active_ptr, count_ptr, num_tokens, num_chunks,
    CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Tokens per label of every chunk; what is past the end has the last bin. Grid [N * chunks]."""
    pid = tl.program_id(0)
    n = (pid // num_chunks).to(tl.int64)
    if tl.load(active_ptr + n) != 0:
        token = pid % num_chunks * CHUNK + tl.arange(0, CHUNK)
        real = token < num_tokens
        label = tl.load(label_ptr + n * num_tokens + token, mask=real, other=BINS - 1)
        counts = tl.histogram(label, BINS)
        tl.store(count_ptr + pid.to(tl.int64) * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["num_chunks"])
def _scan_kernel(
    count_ptr, active_ptr, total_ptr, num_chunks,
    BINS: tl.constexpr, BB: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Replace the counts by those of the chunks before; add them up. Grid [N, BINS / BB]."""
    n = tl.program_id(0).to(tl.int64)
    if tl.load(active_ptr + n) != 0:
        bins = tl.program_id(1) * BB + tl.arange(0, BB)
        count_ptr += n * num_chunks * BINS
        scan_counts(count_ptr, total_ptr + n * BINS, num_chunks, bins, BINS, BB, ROWS)


@triton.jit(do_not_specialize=["num_tokens", "num_chunks"])
def _place_kernel(
    label_ptr, active_ptr, before_ptr, total_ptr, start_ptr, order_ptr, num_tokens, num_chunks,
    CHUNK: tl.constexpr, BINS: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """order[place of token t] = t, and where each label begins. Grid [N * chunks].

    COMPARED tokens at a time are ranked among each other; the last of each label moves on what is
    before the next ones.
    """
    HIGH: tl.constexpr = 1 << 16
    pid = tl.program_id(0)
    n = (pid // num_chunks).to(tl.int64)
    if tl.load(active_ptr + n) != 0:
        before_ptr += pid.to(tl.int64) * BINS
        label_ptr += n * num_tokens
        bins = tl.arange(0, BINS)
        totals = tl.load(total_ptr + n * BINS + bins)
        starts = tl.cumsum(totals, 0) - totals
        if pid % num_chunks == 0:
            tl.store(start_ptr + n * BINS + bins, starts)
        tl.store(before_ptr + bins, starts + tl.load(before_ptr + bins))
        tl.debug_barrier()
        i = tl.arange(0, COMPARED)
        for first in range(0, CHUNK, COMPARED):
            token = pid % num_chunks * CHUNK + first
            real = token + i < num_tokens
            label = tl.load(label_ptr + token + i, mask=real, other=BINS - 1)
            # Summed along the first dimension, which lies within a thread: those before it, and
            # in the upper half of the sum those after it.
            same = tl.expand_dims(label, 1) == tl.expand_dims(label, 0)
            side = tl.where(i[:, None] < i[None, :], 1, tl.where(i[:, None] > i[None, :], HIGH, 0))
            found = tl.sum(tl.where(same, side, 0), 0)
            rank = found % HIGH
            place = tl.load(before_ptr + label) + rank
            tl.store(order_ptr + n * num_tokens + place, token + i, mask=real)
            tl.debug_barrier()
            tl.store(before_ptr + label, place + 1, mask=found < HIGH)
            tl.debug_barrier()


@triton.jit(do_not_specialize=["heads", "num_tokens", "num_centroids"])
def _update_kernel(
    x_ptr, order_ptr, start_ptr, total_ptr, active_ptr, c_ptr, rounded_ptr, half_ptr, shift_ptr,
    x_b, x_s, x_h, x_d, heads, num_tokens, num_centroids, padded,
    D: tl.constexpr, DP: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """Mean of a cluster's tokens, and how far its centroid moved. Grid [C, N]."""
    c = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    if tl.load(active_ptr + n) != 0:
        start = tl.load(start_ptr + n * BINS + c)
        count = tl.load(total_ptr + n * BINS + c)
        d = tl.arange(0, DP)
        x_ptr += n // heads * x_b + n % heads * x_h
        order_ptr += n * num_tokens + start
        sums = tl.zeros([ROWS, DP], tl.float32)
        for first in range(0, count, ROWS):
            row = first + tl.arange(0, ROWS)
            valid = row < count
            token = tl.load(order_ptr + row, mask=valid, other=0).to(tl.int64)
            at = token[:, None] * x_s + d[None, :] * x_d
            x = tl.load(x_ptr + at, mask=valid[:, None] & (d < D)[None, :], other=0.0)
            sums += x.to(tl.float32)
        at = (n * num_centroids + c) * D + d
        old = tl.load(c_ptr + at, mask=d < D, other=0.0)
        mean = tl.div_rn(tl.sum(sums, 0), tl.maximum(count, 1).to(tl.float32))
        mean = tl.where(count > 0, mean, old)
        moved = mean - old
        tl.store(c_ptr + at, mean, mask=d < D)
        tl.store(shift_ptr + n * num_centroids + c, tl.sum(moved * moved, 0))
        rounded = mean.to(rounded_ptr.dtype.element_ty)
        tl.store(rounded_ptr + (n * padded + c) * D + d, rounded, mask=d < D)
        rounded = rounded.to(tl.float32)
        half = -0.5 * tl.sum(rounded * rounded, 0)
        half_ptr += n * padded * max(PARTS, 1) + c
        if PARTS:
            half /= WEIGHT
            for part in tl.static_range(SPLIT):
                rest = half.to(half_ptr.dtype.element_ty)
                tl.store(half_ptr + part * padded, rest)
                half -= rest.to(tl.float32)
        else:
            tl.store(half_ptr, half)


@triton.jit(do_not_specialize=["num_centroids", "least"])
def _stop_kernel(shift_ptr, active_ptr, num_centroids, least, BINS: tl.constexpr):
    """Stop a problem none of whose centroids moved by `least`, squared. Grid [N]."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BINS)
    shift = tl.load(shift_ptr + n * num_centroids + c, mask=c < num_centroids, other=0.0)
    if tl.max(shift, 0) < least:
        tl.store(active_ptr + n, 0)


_assign, _update, _stop = map(Launcher, (_assign_kernel, _update_kernel, _stop_kernel))
_count, _scan, _place = map(Launcher, (_count_kernel, _scan_kernel, _place_kernel))


class _Sorter:
    """The counting sort of [N, S] labels, which may be others in every run.

    Attributes:
        labels: int32 [N, S].
        active: int32 [N], 0 for problems that keep what they have.
        order: int32 [N, S], the tokens by label.
        starts: int32 [N, bins], where in `order` each label begins.
        totals: int32 [N, bins], the tokens of each label.
        bins: the labels, one for the tokens of no cluster, and one for the places past the end.
    """

    def __init__(self, labels: torch.Tensor, active: torch.Tensor, num: int) -> None:
        problems, tokens = labels.shape
        self.labels, self.active = labels, active
        self.bins = max(next_power_of_2(num + 2), BIN_BLOCK)
        chunks = -(-tokens // CHUNK)
        counts = labels.new_empty((problems, chunks, self.bins))
        self.totals, self.starts = labels.new_zeros((2, problems, self.bins))
        self.order = torch.empty_like(labels)
        grid, sizes = (problems * chunks,), {"CHUNK": CHUNK, "BINS": self.bins}
        self._count = partial(
            Launch(_count, grid, (tokens, chunks), (sizes,)), (labels, active, counts)
        )
        scanned = {"BINS": self.bins, "BB": BIN_BLOCK, "ROWS": SCANNED}
        self._scan = partial(
            Launch(_scan, (problems, self.bins // BIN_BLOCK), (chunks,), (scanned,)),
            (counts, active, self.totals),
        )
        placed = {**sizes, "COMPARED": COMPARED, "num_warps": COMPARED // 32}
        self._place = partial(
            Launch(_place, grid, (tokens, chunks), (placed,)),
            (labels, active, counts, self.totals, self.starts, self.order),
        )

    def run(self) -> None:
        """Sort what is active."""
        self._count()
        self._scan()
        self._place()

    def found(self, num: int) -> tuple[torch.Tensor, ...]:
        """Return the order, and starts and totals of the first labels."""
        return self.order, self.starts[:, :num], self.totals[:, :num]


def sort_labels(labels: torch.Tensor, num: int) -> tuple[torch.Tensor, ...]:
    """Sort tokens by label; see `sort_reference`."""
    sorter = _Sorter(labels.contiguous(), labels.new_ones(labels.shape[0]), num)
    sorter.run()
    return sorter.found(num)


def kmeans_triton(
    x: torch.Tensor,
    centroids: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    iterations: int,
    tolerance: float,
) -> tuple[torch.Tensor, ...]:
    """Run Lloyd's iterations; see `kmeans_reference`.

    Args:
        x: [B, S, H, D], any strides.
        centroids: floating [B, H, C, D].
        mask: bool [B, S], or None.
        iterations: at most so many updates; 0 only assigns.
        tolerance: least distance that counts as a move.
    """
    batch, tokens, heads, _ = x.shape
    num = centroids.shape[2]
    problems = batch * heads
    centroids = centroids.flatten(0, 1).to(torch.float32, copy=True).contiguous()
    rounded = _Rounded(centroids, x.dtype)
    kept = mask if mask is None or mask.stride(1) == 1 else mask.contiguous()
    labels = torch.empty((problems, tokens), dtype=torch.int32, device=x.device)
    shift = centroids.new_empty((problems, num))
    with torch.cuda.device_of(x):  # once, and not for each of many launches
        sorter = _Sorter(labels, labels.new_ones(problems), num)
        # Made once: tens of rounds would take the host longer than the GPU.
        assign = _assignment(x, rounded, sorter, kept)
        update = _updating(x, rounded, sorter, shift)
        stop = Launch(_stop, (problems,), (num, tolerance**2), ({"BINS": sorter.bins},))
        update()  # of no tokens, which rounds
        for i in range(max(iterations, 1)):
            assign()
            sorter.run()
            if iterations == 0:
                break
            update()
            if i + 1 < iterations:
                stop((shift, sorter.active))
    return centroids, *sorter.found(num)


class _Rounded:
    """Centroids in the dtype of the tokens, padded with some that are nearest to nothing.

    Attributes:
        exact: fp32 [N, C, D], what is rounded.
        points: [N, padded, D].
        halves: -|c|^2 / 2, in fp32 [N, padded], or as parts in bfloat16 [N, parts, padded].
        padded: C, rounded up to whole blocks.
        parts: parts of a half; 0 for fp32.
        weight: what parts are multiplied by.
        factors: the weight, once per part, in the dtype of the tokens.
    """

    def __init__(self, centroids: torch.Tensor, dtype: torch.dtype) -> None:
        problems, num, size = centroids.shape
        self.exact = centroids
        self.padded = -(-num // MOST_COLUMNS) * MOST_COLUMNS
        self.parts = PARTS if dtype in WEIGHTS else 0
        self.weight, lowest = WEIGHTS.get(dtype, (1.0, -torch.inf))
        self.factors = centroids.new_full((PARTS,), self.weight, dtype=dtype)
        self.points = centroids.new_zeros((problems, self.padded, size), dtype=dtype)
        if self.parts:
            self.halves = self.points.new_zeros((problems, self.parts, self.padded))
            if num < self.padded:
                self.halves[:, 0, num:].fill_(lowest)
        else:
            self.halves = centroids.new_full((problems, self.padded), lowest)


def _assignment(
    x: torch.Tensor, rounded: _Rounded, sorter: _Sorter, mask: torch.Tensor | None
) -> Callable[[], None]:
    """Return what writes to the labels the centroid that is nearest to every token now."""
    batch, tokens, heads, size = x.shape
    width, num, labels = padded_channels(size), rounded.exact.shape[1], sorter.labels
    wide = x.dtype == torch.float32 or width > 128
    # float32 has no tensor cores here: small tiles keep it in the registers.
    rows, columns = (32 if width * x.element_size() > 512 else 64, 32) if wide else (64, 64)
    num_blocks = -(-tokens // rows)
    tensors = (
        x, rounded.points, rounded.halves, rounded.factors,
        labels if mask is None else mask, sorter.active, labels,
    )  # fmt: skip
    mask_b = 0 if mask is None else mask.stride(0)
    fixed = (*x.stride(), mask_b, heads, tokens, num, rounded.padded, num_blocks)
    options = {
        "D": size, "DP": width, "BM": rows, "BC": columns, "PARTS": rounded.parts,
        "KEEP": mask is not None, "UPCAST": interpreted(),
        "num_warps": 4, "num_stages": 2 if wide else 3,
    }  # fmt: skip
    return partial(Launch(_assign, (batch * heads * num_blocks,), fixed, (options,)), tensors)


def _updating(
    x: torch.Tensor, rounded: _Rounded, sorter: _Sorter, shift: torch.Tensor
) -> Callable[[], None]:
    """Return what moves the centroids to the means of the tokens as they are sorted now."""
    batch, tokens, heads, size = x.shape
    num = rounded.exact.shape[1]
    rows, warps = next(rest for most, *rest in UPDATES if tokens <= most * num)
    tensors = (
        x, sorter.order, sorter.starts, sorter.totals, sorter.active, rounded.exact,
        rounded.points, rounded.halves, shift,
    )  # fmt: skip
    fixed = (*x.stride(), heads, tokens, num, rounded.padded)
    options = {
        "D": size, "DP": next_power_of_2(size), "BINS": sorter.bins, "ROWS": rows,
        "PARTS": rounded.parts, "WEIGHT": rounded.weight, "num_warps": warps,
    }  # fmt: skip
    return partial(Launch(_update, (num, batch * heads), fixed, (options,)), tensors)
