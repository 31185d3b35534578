"""Merging two parts in Triton, in one pass over memory.

Rows are (token, head) pairs, which lie one after another; a program merges ROWS of them.
"""

import torch
import triton
import triton.language as tl

from multimodal_gen.kernels.launch.launcher import Launcher
from multimodal_gen.kernels.shared_kernel import next_power_of_2

# Elements of a program: 32 rows of 128 channels. Not measured.
ELEMENTS = 4096


@triton.jit
def _merge_kernel(
    out_ptr, lse_ptr, more_ptr, more_lse_ptr, merged_ptr, total_ptr,
    lse_b, lse_h, lse_s, more_b, more_h, more_s, rows, tokens, heads,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    head, token = row % heads, (row // heads) % tokens
    batch = (row // heads // tokens).to(tl.int64)
    first = tl.load(lse_ptr + batch * lse_b + head * lse_h + token * lse_s, real, -float("inf"))
    second = tl.load(
        more_lse_ptr + batch * more_b + head * more_h + token * more_s, real, -float("inf")
    )
    top = tl.maximum(first, second)
    shift = tl.where(top == -float("inf"), 0.0, top)
    old, new = tl.exp(first - shift), tl.exp(second - shift)
    both = old + new
    # Rows that see no key hold zeros in both parts.
    seen = tl.where(both > 0, both, 1.0)
    scale = 1 / seen
    total = tl.where(both > 0, shift + tl.log(seen), -float("inf"))
    tl.store(total_ptr + (batch * heads + head) * tokens + token, total, real)
    channel = tl.arange(0, DP)
    at = row[:, None].to(tl.int64) * D + channel[None, :]
    mask = real[:, None] & (channel < D)[None, :]
    out = tl.load(out_ptr + at, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
    more = tl.load(more_ptr + at, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
    merged = out * (old * scale)[:, None] + more * (new * scale)[:, None]
    tl.store(merged_ptr + at, merged.to(merged_ptr.dtype.element_ty), mask)


_launch = Launcher(_merge_kernel)


def merge_two(
    out: torch.Tensor,
    lse: torch.Tensor,
    more: torch.Tensor,
    more_lse: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the merge of contiguous outputs; see `api.merge_two`."""
    batch, tokens, heads, size = out.shape
    merged = torch.empty_like(out, dtype=dtype)
    total = lse.new_empty(batch, heads, tokens)
    padded = next_power_of_2(size)
    rows, tile = batch * tokens * heads, max(1, ELEMENTS // padded)
    _launch(
        (-(-rows // tile),), out, lse, more, more_lse, merged, total,
        *lse.stride(), *more_lse.stride(), rows, tokens, heads,
        D=size, DP=padded, ROWS=tile, num_warps=4,
    )  # fmt: skip
    return merged, total
