"""Launches the kernels of linear attention."""

import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.linear_attention.reference import (
    EPSILON,
    FEATURE_MAPS,
    KeyState,
    Projection,
)

# H200, 2026-11, [2, 32760, 16, 128]: over the keys, 4 warps that spill a few registers take 0.35 ms
# and 8 that spill none 0.45; over the queries, 64 at once take 0.37 ms, other shapes up to 0.69.
PIECE = 64  # tokens that are read at once
KEY_WARPS = 4
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
    return 1 << (max(head_size, 16) - 1).bit_length()


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
    _summarise(key, None, blocks, FEATURE_MAPS[0], means, None)
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
    shape = (batch, heads, splits, head_size + 1, head_size)
    states = key.new_empty(shape, dtype=torch.float32)
    _summarise(key, value, blocks, feature_map, means, states)
    total = states.sum(2)
    return means, KeyState(moments=total[:, :, :-1].mT, sums=total[:, :, -1])


def _summarise(
    key: torch.Tensor,
    value: torch.Tensor | None,
    blocks: Blocks,
    feature_map: str,
    means: torch.Tensor | None,
    states: torch.Tensor | None,
    share: float = 1.0,
    weight: torch.Tensor | None = None,
) -> None:
    """Launch the kernel, which writes means [B, Hkv, N, D] and states [B, Hkv, splits, D + 1, D].

    States are taken times `share`, and go through the projection of `weight`.
    """
    from multimodal_gen.kernels.linear_attention.kernel import interpreted, key_kernel

    batch, _, heads, head_size = key.shape
    padded = _channels(head_size)
    columns = _columns(padded)
    piece = min(PIECE if padded <= 128 else PIECE // 2, blocks.size)
    given, starts, lengths, bound_b = _bounds_of(blocks, key.device)
    splits = blocks.num if states is None else states.shape[2]
    key_kernel[(batch * splits * heads, 1 if states is None else -(-head_size // columns))](
        key, key if value is None else value, key if means is None else means,
        key if states is None else states, key if weight is None else weight, starts, lengths,
        *key.stride()[:3], *(key if value is None else value).stride()[:3], bound_b,
        heads, splits, -(-blocks.num // splits), blocks.num, blocks.total,
        D=head_size, DP=padded, DV=columns, T=piece, SIZE=blocks.size, MAP=feature_map,
        SHARE=share, STATE=states is not None, MEANS=means is not None, FOLD=weight is not None,
        GIVEN=given, UPCAST=interpreted(), num_warps=KEY_WARPS,
        num_stages=KEY_STAGES if padded <= 128 else 2,
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
    from multimodal_gen.kernels.linear_attention.kernel import add_kernel, interpreted

    batch, _, heads, head_size = query.shape
    padded = _channels(head_size)
    columns = _columns(padded)
    tile = ROWS if padded <= 128 else 32
    tiles = -(-(rows.stop - rows.start) // (tile * ROW_TILES))
    bias = projection.bias
    add_kernel[(batch * tiles * heads, -(-head_size // columns))](
        out, query, _fold(state, projection, query.dtype), state.sums.contiguous(),
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
    states = batch * (plan.kv.num + group * plan.q.num)
    bytes_per_head = states * (head_size + 1) * head_size * query.element_size()
    inputs = (query.numel() + key.numel()) * 2 * query.element_size()
    at_once = max(1, int(max(STATE_BYTES, STATE_SHARE * inputs)) // bytes_per_head)
    weight = projection.weight.to(query.dtype).contiguous()
    left = _left_out(plan, batch, heads, query.dtype)
    for first in range(0, kv_heads, at_once):
        kv = slice(first, min(first + at_once, kv_heads))
        q = slice(kv.start * group, kv.stop * group)
        k, v = key[:, :, kv], value[:, :, kv]
        rows = _row_states(k, v, left[:, q], plan.kv, weight, feature_map)
        _add_blocks(out[:, :, q], query[:, :, q], rows, plan, projection.bias, feature_map)


def _left_out(plan: BlockPlan, batch: int, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Return 1 for the blocks that a row leaves out, else 0: [B, H, Nq, Nk]."""
    num = plan.kv.num
    every = torch.ones((*plan.indices.shape[:3], num), dtype=dtype, device=plan.device)
    slots = torch.arange(plan.indices.shape[3], device=plan.device)
    listed = slots < plan.counts.unsqueeze(-1)
    # What is past the count repeats the first entry; of an empty row, nothing is taken out.
    first = plan.indices[..., :1].clamp(0, num - 1)
    chosen = torch.where(listed, plan.indices, first).long()
    kept = torch.where(plan.counts.unsqueeze(-1) > 0, 0.0, 1.0).to(dtype)
    left = every.scatter_(-1, chosen, kept.expand(chosen.shape))
    return left.expand(batch, heads, -1, -1)


def _row_states(
    key: torch.Tensor,
    value: torch.Tensor,
    left: torch.Tensor,
    blocks: Blocks,
    weight: torch.Tensor,
    feature_map: str,
) -> torch.Tensor:
    """Return the projected states of all query blocks, [B * Hkv, H / Hkv * Nq, (D + 1) * D].

    They are scaled to means over as many tokens as there are, so that 16 bits do not overflow.
    """
    batch, _, kv_heads, head_size = key.shape
    shape = (batch, kv_heads, blocks.num, head_size + 1, head_size)
    states = key.new_empty(shape)
    _summarise(key, value, blocks, feature_map, None, states, 1 / blocks.size, weight)
    # Query heads that share a key head share its states.
    pairs = batch * kv_heads
    chosen = left.reshape(pairs, -1, blocks.num)
    return torch.baddbmm(
        states.new_zeros(()),
        chosen,
        states.view(pairs, blocks.num, -1),
        beta=0,
        alpha=1 / blocks.num,
    )


def _add_blocks(
    out: torch.Tensor,
    query: torch.Tensor,
    states: torch.Tensor,
    plan: BlockPlan,
    bias: torch.Tensor | None,
    feature_map: str,
) -> None:
    """Launch the pass over query blocks with states of their own."""
    from multimodal_gen.kernels.linear_attention.kernel import add_blocks_kernel, interpreted

    batch, _, heads, head_size = query.shape
    given, starts, lengths, _ = _bounds_of(plan.q, query.device)
    add_blocks_kernel[(batch * heads * plan.q.num,)](
        out, query, states, states if bias is None else bias, starts, lengths,
        *out.stride()[:3], *query.stride()[:3], heads, plan.q.num, plan.q.total,
        EPSILON / (plan.kv.size * plan.kv.num),
        D=head_size, DP=_channels(head_size), T=PIECE, SIZE=plan.q.size, MAP=feature_map,
        BIAS=bias is not None, GIVEN=given, UPCAST=interpreted(), num_warps=8, num_stages=2,
    )  # fmt: skip
