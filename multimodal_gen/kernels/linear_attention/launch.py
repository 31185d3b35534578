"""Launches the kernels of linear attention."""

from collections.abc import Callable

import torch
import triton

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.linear_attention.kernel import (
    add_blocks_kernel,
    add_kernel,
    interpreted,
    key_kernel,
)
from multimodal_gen.kernels.linear_attention.reference import (
    EPSILON,
    FEATURE_MAPS,
    KeyState,
    Projection,
)

PIECE = 64  # tokens that are read at once
KEY_WARPS = 8
KEY_STAGES = 3
WAVE = 264  # programs of a pass over the keys: two for every multiprocessor of a large GPU
ROWS = 64  # queries that are read at once
ROW_TILES = 1  # as many times per program
ROW_WARPS = 4
# States of blocks are computed for as many heads as fit into this, or into this share of q, k, v
# and the output.
STATE_BYTES = 2**25
STATE_SHARE = 0.04


def _channels(head_size: int) -> int:
    return triton.next_power_of_2(max(head_size, 16))


def _columns(padded: int) -> int:
    """Return how many channels of the values a program works on: registers are few."""
    return padded if padded <= 128 else 64


def _bounds_of(
    blocks: Blocks, device: torch.device
) -> tuple[bool, torch.Tensor, torch.Tensor, int]:
    """Return whether bounds are given, start and length [B|1, N] of every block, and a stride."""
    if blocks.is_regular:
        nothing = torch.empty(0, dtype=torch.int32, device=device)
        return False, nothing, nothing, 0
    starts, lengths = (x[:, 0] for x in blocks.bounds(device))
    batch = max(starts.shape[0], lengths.shape[0])
    starts, lengths = (x.expand(batch, -1).contiguous() for x in (starts, lengths))
    return True, starts, lengths, blocks.num if batch > 1 else 0


def key_means(key: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Launch the means of the blocks alone; see `api.key_means`."""
    batch, _, heads, head_size = key.shape
    means = key.new_empty((batch, heads, blocks.num, head_size), dtype=torch.float32)
    _summarise(key, None, blocks, FEATURE_MAPS[0], blocks.num, means, None, None)
    return means


def key_state(
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Blocks,
    feature_map: str,
    *,
    splits: int | None = None,
) -> tuple[torch.Tensor, KeyState]:
    """Launch the pass over keys and values; see `api.key_state`.

    Args:
        key: [B, S, Hkv, D], stride 1 along D.
        value: as `key`.
        blocks: how they are cut.
        feature_map: of the state.
        splits: programs that share a head; by default as many as keep a GPU busy.
    """
    batch, _, heads, head_size = key.shape
    splits = min(splits or max(1, WAVE // (batch * heads)), blocks.num)
    splits = -(-blocks.num // -(-blocks.num // splits))  # none of them without a block
    means = key.new_empty((batch, heads, blocks.num, head_size), dtype=torch.float32)
    sums = key.new_empty((batch, heads, splits, head_size), dtype=torch.float32)
    moments = key.new_empty((*sums.shape, head_size), dtype=torch.float32)
    _summarise(key, value, blocks, feature_map, splits, means, moments, sums)
    return means, KeyState(moments=moments.sum(2).mT, sums=sums.sum(2))


def _summarise(
    key: torch.Tensor,
    value: torch.Tensor | None,
    blocks: Blocks,
    feature_map: str,
    splits: int,
    means: torch.Tensor | None,
    moments: torch.Tensor | None,
    sums: torch.Tensor | None,
    share: float = 1.0,
) -> None:
    """Launch the kernel; means [B, Hkv, N, D], moments and sums [B, Hkv, splits, ...] are out."""
    batch, _, heads, head_size = key.shape
    padded = _channels(head_size)
    columns = _columns(padded)
    piece = min(PIECE if padded <= 128 else PIECE // 2, blocks.size)
    given, starts, lengths, bound_b = _bounds_of(blocks, key.device)
    v = key if value is None else value
    state = value is not None
    key_kernel[(batch * splits * heads, -(-head_size // columns) if state else 1)](
        key, v, key if means is None else means, key if moments is None else moments,
        key if sums is None else sums, starts, lengths,
        *key.stride()[:3], *v.stride()[:3], bound_b,
        heads, splits, -(-blocks.num // splits), blocks.num, blocks.total,
        D=head_size, DP=padded, DV=columns, T=piece, SIZE=blocks.size, MAP=feature_map,
        SHARE=share, STATE=state, MEANS=means is not None, GIVEN=given, UPCAST=interpreted(),
        num_warps=KEY_WARPS if state else 4, num_stages=KEY_STAGES if padded <= 128 else 2,
    )  # fmt: skip


def _fold(state: KeyState, projection: Projection, dtype: torch.dtype) -> torch.Tensor:
    """Return (H / z) W^T per head, [B, Hkv, D, D]: the projection of what H / z stands for."""
    sums = state.sums.unsqueeze(-1)
    means = torch.where(sums > 0, state.moments / sums, 0.0)
    return (means @ projection.weight.float().mT).to(dtype)


def add_linear(
    out: torch.Tensor,
    query: torch.Tensor,
    state: KeyState,
    projection: Projection,
    rows: slice,
    feature_map: str,
) -> None:
    """Launch the pass over the queries, which changes `out`; see `api.add_linear`."""
    batch, _, heads, head_size = query.shape
    padded = _channels(head_size)
    columns = _columns(padded)
    tile = ROWS if padded <= 128 else 32
    tiles = -(-(rows.stop - rows.start) // (tile * ROW_TILES))
    bias = projection.bias
    add_kernel[(batch * tiles * heads, -(-head_size // columns))](
        out, query, _fold(state, projection, query.dtype), state.sums,
        state.sums if bias is None else bias, *out.stride()[:3], *query.stride()[:3],
        heads, heads // state.sums.shape[1], tiles, rows.start, rows.stop,
        D=head_size, DP=padded, DV=columns, T=tile, TILES=ROW_TILES, MAP=feature_map,
        EPS=EPSILON, BIAS=bias is not None, UPCAST=interpreted(), num_warps=ROW_WARPS, num_stages=2,
    )  # fmt: skip


def add_unselected(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: BlockPlan,
    projection: Projection,
    feature_map: str,
) -> None:
    """Add up the states of the blocks that `plan` leaves out, for some heads at a time.

    Which blocks a row leaves out is a matrix of zeros and ones, so the sums are one product on the
    tensor cores. Changes `out`; D is at most 128. See `api.add_unselected`.
    """
    batch, _, heads, head_size = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    rows = plan.kv.num + group * plan.q.num
    bytes_per_head = batch * rows * head_size * head_size * query.element_size()
    inputs = (query.numel() + key.numel()) * 2 * query.element_size()
    at_once = max(1, int(max(STATE_BYTES, STATE_SHARE * inputs)) // bytes_per_head)
    weight = projection.weight.to(query.dtype).contiguous()
    left = _left_out(plan, batch, heads)
    for first in range(0, kv_heads, at_once):
        kv = slice(first, min(first + at_once, kv_heads))
        q = slice(kv.start * group, kv.stop * group)
        moments, sums, share = _row_states(
            key[:, :, kv], value[:, :, kv], left(q), plan.kv, feature_map
        )
        _add_blocks(
            out[:, :, q], query[:, :, q], moments, sums, share, plan.q, weight, projection.bias,
            feature_map,
        )  # fmt: skip


def _left_out(plan: BlockPlan, batch: int, heads: int) -> Callable[[slice], torch.Tensor]:
    """Return what gives, for a range of heads, the blocks left out by row: bool [B, H, Nq, Nk]."""
    indices, counts = (x.expand(batch, heads, *x.shape[2:]) for x in (plan.indices, plan.counts))

    def left(part: slice) -> torch.Tensor:
        index, count = indices[:, part], counts[:, part]
        slots = torch.arange(index.shape[3], device=index.device)
        chosen = torch.where(slots < count.unsqueeze(-1), index, plan.kv.num).long()
        shape = (*index.shape[:3], plan.kv.num + 1)
        every = torch.ones(shape, dtype=torch.bool, device=index.device)
        return every.scatter_(-1, chosen, False)[..., :-1]

    return left


def _row_states(
    key: torch.Tensor, value: torch.Tensor, left: torch.Tensor, blocks: Blocks, feature_map: str
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return v^T phi(k) [B * H, Nq, D, D], scaled, and its scale; and sums of phi(k), fp32.

    The scale keeps 16 bits from overflowing: it makes a mean over the tokens of the sum.
    """
    batch, _, kv_heads, head_size = key.shape
    heads, num_q = left.shape[1:3]
    states = batch * kv_heads
    sums = key.new_empty((batch, kv_heads, blocks.num, head_size), dtype=torch.float32)
    moments = key.new_empty((states, blocks.num, head_size**2))
    _summarise(key, value, blocks, feature_map, blocks.num, None, moments, sums, 1 / blocks.size)
    # Query heads that share a key head share its states.
    chosen = left.reshape(states, heads // kv_heads * num_q, blocks.num)
    total = torch.baddbmm(
        moments.new_zeros(()), chosen.to(key.dtype), moments, beta=0, alpha=1 / blocks.num
    )
    row_sums = torch.bmm(chosen.float(), sums.view(states, blocks.num, head_size))
    return total, row_sums, 1 / (blocks.size * blocks.num)


def _add_blocks(
    out: torch.Tensor,
    query: torch.Tensor,
    moments: torch.Tensor,
    sums: torch.Tensor,
    share: float,
    blocks: Blocks,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    feature_map: str,
) -> None:
    """Launch the pass over query blocks with states of their own."""
    batch, _, heads, head_size = query.shape
    given, starts, lengths, _ = _bounds_of(blocks, query.device)
    add_blocks_kernel[(batch * heads * blocks.num,)](
        out, query, moments, sums, weight, weight if bias is None else bias, starts, lengths,
        *out.stride()[:3], *query.stride()[:3], heads, blocks.num, blocks.total, share,
        D=head_size, DP=_channels(head_size), T=PIECE, SIZE=blocks.size, MAP=feature_map,
        EPS=EPSILON, BIAS=bias is not None, GIVEN=given, UPCAST=interpreted(), num_warps=8,
        num_stages=2,
    )  # fmt: skip
