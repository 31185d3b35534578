"""k-means in Triton, without atomics: assignment, counting sort, means over sorted segments.

N = B * H problems of S tokens each. The nearest centroid is the one with the largest
x.c - |c|^2 / 2: one product on tensor cores, whose tiles are folded into a running maximum per
column and reduced once at the end. The sort is stable: a token's place is where its label begins,
plus the tokens of that label in the chunks before, plus those before it in its own chunk. Kernels
of a problem that has stopped return at once, so the host never asks.
"""

import torch
import triton
import triton.language as tl

CHUNK = 512
COMPARED = 32
SCANNED = 64
BIN_BLOCK = 32


@triton.jit(do_not_specialize=["heads", "num_tokens", "num_centroids", "num_blocks", "keep_b"])
def _assign_kernel(
    x_ptr, c_ptr, half_ptr, keep_ptr, active_ptr, label_ptr,
    x_b, x_s, x_h, x_d, keep_b, heads, num_tokens, num_centroids, num_blocks,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
    KEEP: tl.constexpr, UPCAST: tl.constexpr,
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
        c_ptr += n * num_centroids * D
        half_ptr += n * num_centroids
        column = tl.arange(0, BC)
        best = tl.full([BM, BC], float("-inf"), tl.float32)
        which = tl.zeros([BM, BC], tl.int32)
        for first in range(0, num_centroids, BC):
            c = first + column
            inside = c < num_centroids
            points = tl.load(
                c_ptr + c[None, :] * D + d[:, None],
                mask=inside[None, :] & (d < D)[:, None],
                other=0.0,
            )
            half = tl.load(half_ptr + c, mask=inside, other=float("inf"))
            if UPCAST:
                score = tl.dot(x.to(tl.float32), points.to(tl.float32), input_precision="ieee")
            else:
                score = tl.dot(x, points, input_precision="ieee")
            score -= half[None, :]
            nearer = score > best
            best = tl.where(nearer, score, best)
            which = tl.where(nearer, first, which)
        top = tl.max(best, 1)
        label = tl.min(
            tl.where(best == top[:, None], which + column[None, :], num_centroids - 1), 1
        )
        if KEEP:
            kept = tl.load(keep_ptr + n // heads * keep_b + token, mask=real, other=0)
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
        before = tl.zeros([BB], tl.int32)
        for first in range(0, num_chunks, ROWS):
            chunk = first + tl.arange(0, ROWS)
            at = chunk[:, None] * BINS + bins[None, :]
            mask = (chunk < num_chunks)[:, None]
            counts = tl.load(count_ptr + at, mask=mask, other=0)
            scanned = tl.cumsum(counts, 0)
            tl.store(count_ptr + at, before[None, :] + scanned - counts, mask=mask)
            before += tl.sum(counts, 0)
        tl.store(total_ptr + n * BINS + bins, before)


@triton.jit(do_not_specialize=["num_tokens", "num_chunks"])
def _place_kernel(
    label_ptr, active_ptr, before_ptr, start_ptr, order_ptr, num_tokens, num_chunks,
    CHUNK: tl.constexpr, BINS: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """order[place of token t] = t. Grid [N * chunks]."""
    pid = tl.program_id(0)
    n = (pid // num_chunks).to(tl.int64)
    if tl.load(active_ptr + n) != 0:
        first = pid % num_chunks * CHUNK
        i = tl.arange(0, CHUNK)
        real = first + i < num_tokens
        label_ptr += n * num_tokens + first
        label = tl.load(label_ptr + i, mask=real, other=BINS - 1)
        rank = tl.zeros([CHUNK], tl.int32)
        for other in range(0, CHUNK, COMPARED):
            j = other + tl.arange(0, COMPARED)
            theirs = tl.load(label_ptr + j, mask=first + j < num_tokens, other=BINS - 1)
            # Summed along the first dimension, which lies within a thread.
            same = (theirs[:, None] == label[None, :]) & (j[:, None] < i[None, :])
            rank += tl.sum(same.to(tl.int32), 0)
        place = tl.load(start_ptr + n * BINS + label) + rank
        place += tl.load(before_ptr + pid.to(tl.int64) * BINS + label)
        tl.store(order_ptr + n * num_tokens + place, first + i, mask=real)


@triton.jit(do_not_specialize=["heads", "num_tokens", "num_centroids"])
def _update_kernel(
    x_ptr, order_ptr, start_ptr, total_ptr, active_ptr, c_ptr, rounded_ptr, half_ptr, shift_ptr,
    x_b, x_s, x_h, x_d, heads, num_tokens, num_centroids,
    D: tl.constexpr, DP: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr,
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
            listed = row < count
            token = tl.load(order_ptr + row, mask=listed, other=0).to(tl.int64)
            at = token[:, None] * x_s + d[None, :] * x_d
            x = tl.load(x_ptr + at, mask=listed[:, None] & (d < D)[None, :], other=0.0)
            sums += x.to(tl.float32)
        at = (n * num_centroids + c) * D + d
        old = tl.load(c_ptr + at, mask=d < D, other=0.0)
        mean = tl.sum(sums, 0) / tl.maximum(count, 1).to(tl.float32)
        mean = tl.where(count > 0, mean, old)
        moved = mean - old
        tl.store(c_ptr + at, mean, mask=d < D)
        tl.store(shift_ptr + n * num_centroids + c, tl.sum(moved * moved, 0))
        rounded = mean.to(rounded_ptr.dtype.element_ty)
        tl.store(rounded_ptr + at, rounded, mask=d < D)
        rounded = rounded.to(tl.float32)
        tl.store(half_ptr + n * num_centroids + c, 0.5 * tl.sum(rounded * rounded, 0))


def interpreted() -> bool:
    """Whether Triton runs its kernels in the interpreter."""
    return bool(triton.knobs.runtime.interpret)


class _Sorter:
    """Buffers of the counting sort of [N, S] labels."""

    def __init__(self, labels: torch.Tensor, num: int) -> None:
        problems, self.tokens = labels.shape
        # One bin for the tokens of no cluster, one for the places past the end.
        self.bins = max(triton.next_power_of_2(num + 2), BIN_BLOCK)
        self.chunks = triton.cdiv(self.tokens, CHUNK)
        self.counts = labels.new_empty((problems, self.chunks, self.bins))
        self.totals = labels.new_zeros((problems, self.bins))
        self.starts = self.totals
        self.order = torch.empty_like(labels)

    def run(self, labels: torch.Tensor, active: torch.Tensor) -> None:
        """Sort; problems that are not active keep what they have."""
        problems = labels.shape[0]
        grid = (problems * self.chunks,)
        _count_kernel[grid](
            labels, active, self.counts, self.tokens, self.chunks, CHUNK=CHUNK, BINS=self.bins
        )
        _scan_kernel[problems, self.bins // BIN_BLOCK](
            self.counts, active, self.totals, self.chunks,
            BINS=self.bins, BB=BIN_BLOCK, ROWS=SCANNED,
        )  # fmt: skip
        self.starts = self.totals.cumsum(1, dtype=torch.int32) - self.totals
        _place_kernel[grid](
            labels, active, self.counts, self.starts, self.order, self.tokens, self.chunks,
            CHUNK=CHUNK, BINS=self.bins, COMPARED=COMPARED, num_warps=8,
        )  # fmt: skip


def sort_labels(labels: torch.Tensor, num: int) -> tuple[torch.Tensor, ...]:
    """Sort tokens by label; see `sort_reference`."""
    with torch.cuda.device_of(labels):
        sorter = _Sorter(labels, num)
        sorter.run(labels.contiguous(), labels.new_ones(labels.shape[0]))
    return sorter.order, sorter.starts[:, :num], sorter.totals[:, :num]


def kmeans_triton(
    x: torch.Tensor,
    centroids: torch.Tensor,
    keep: torch.Tensor | None,
    *,
    iterations: int,
    tolerance: float,
) -> tuple[torch.Tensor, ...]:
    """Run Lloyd's iterations; see `kmeans_reference`.

    Args:
        x: [B, S, H, D], any strides.
        centroids: fp32 [B, H, C, D].
        keep: bool [B, S], or None.
        iterations: at most so many updates; 0 only assigns.
        tolerance: least distance that counts as a move.
    """
    batch, tokens, heads, _ = x.shape
    num = centroids.shape[2]
    problems = batch * heads
    centroids = centroids.flatten(0, 1).clone(memory_format=torch.contiguous_format)
    rounded = centroids.to(x.dtype)
    half = rounded.float().square().sum(-1) / 2
    kept = keep if keep is None or keep.stride(1) == 1 else keep.contiguous()
    labels = torch.empty((problems, tokens), dtype=torch.int32, device=x.device)
    active = labels.new_ones(problems)
    shift = half.new_zeros((problems, num))
    with torch.cuda.device_of(x):
        sorter = _Sorter(labels, num)
        for i in range(max(iterations, 1)):
            _assign(x, rounded, half, kept, active, labels)
            sorter.run(labels, active)
            if iterations == 0:
                break
            _update(x, sorter, active, centroids, rounded, half, shift)
            if i + 1 < iterations:
                active = active * (shift.amax(1) >= tolerance**2)
    return centroids, sorter.order, sorter.starts[:, :num], sorter.totals[:, :num]


def _assign(
    x: torch.Tensor,
    rounded: torch.Tensor,
    half: torch.Tensor,
    keep: torch.Tensor | None,
    active: torch.Tensor,
    labels: torch.Tensor,
) -> None:
    batch, tokens, heads, size = x.shape
    width = max(triton.next_power_of_2(size), 16)
    wide = x.dtype == torch.float32 or width > 128
    # float32 has no tensor cores here: small tiles keep it in the registers.
    rows, columns = (32 if width * x.element_size() > 512 else 64, 32) if wide else (128, 64)
    num_blocks = triton.cdiv(tokens, rows)
    _assign_kernel[(batch * heads * num_blocks,)](
        x, rounded, half, labels if keep is None else keep, active, labels,
        *_strides(x), 0 if keep is None else keep.stride(0),
        heads, tokens, rounded.shape[1], num_blocks,
        D=size, DP=width, BM=rows, BC=columns, KEEP=keep is not None, UPCAST=interpreted(),
        num_warps=4, num_stages=2 if wide else 3,
    )  # fmt: skip


def _update(
    x: torch.Tensor,
    sorter: _Sorter,
    active: torch.Tensor,
    centroids: torch.Tensor,
    rounded: torch.Tensor,
    half: torch.Tensor,
    shift: torch.Tensor,
) -> None:
    batch, tokens, heads, size = x.shape
    num = centroids.shape[1]
    _update_kernel[num, batch * heads](
        x, sorter.order, sorter.starts, sorter.totals, active, centroids, rounded, half, shift,
        *_strides(x), heads, tokens, num,
        D=size, DP=triton.next_power_of_2(size), BINS=sorter.bins, ROWS=32,
        num_warps=4,
    )  # fmt: skip


def _strides(x: torch.Tensor) -> tuple[int, int, int, int]:
    b, s, h, d = x.stride()
    return b, s, h, d
