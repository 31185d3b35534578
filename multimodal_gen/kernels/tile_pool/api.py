"""The coarse stage of tile-based sparse attention: validates, then runs Triton or the reference.

Shapes: B batch, S tokens, H heads, D head size, N tiles; Nq and Nk tiles of queries and keys.
Tile i holds the tokens at positions [starts[i], starts[i] + lengths[i]), or, with an `index`, the
tokens that `index` names at these positions. So one set of tiles serves tensors in tile order and
in the order they came in.
"""

from typing import Any

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.engine import CELL_CHOICE, TILE_CHOICE, TILE_MEANS, choose_for
from multimodal_gen.kernels.tensors import place_of, records_gradient
from multimodal_gen.kernels.tile_pool.reference import (
    add_gated_reference,
    pool_tiles_reference,
    select_cells_reference,
    select_tiles_reference,
)

__all__ = [
    "CELL_COUNTS",
    "add_gated",
    "mark_near",
    "mark_tiles",
    "pool_cells",
    "pool_tiles",
    "select_cells",
    "select_tiles",
]

CELL_COUNTS = (1, 2, 4, 8)
"""How many cells a tile may be cut into for `select_cells`."""
_CHANNELS = 16  # that are added at once: fewer would leave rows that no 16 bytes divide


def pool_tiles(
    tensors: tuple[torch.Tensor, ...],
    starts: torch.Tensor,
    lengths: torch.Tensor,
    *,
    size: int,
    index: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return the mean of every tile's tokens, summed in fp32; does not wait for the device.

    Args:
        tensors: tensors [B, S, H, D], any strides, alike but for H.
        starts: int32 [N].
        lengths: int32 [N], at least 1.
        size: upper bound of `lengths`.
        index: int32 [S'], the token at every position; None where tokens lie tile by tile.
        keep: bool [B, S], tokens that count, in the order of the tensors; None for all. The others
            may hold anything, NaN too.
        dtype: of the means; that of the tensors when None.

    Returns:
        For every tensor [B, H, N, D], contiguous; zero where no token counts.

    Raises:
        UsageError: shapes, dtypes or devices do not fit each other.
    """
    _check_pooled(tensors)
    _check_tiles(tensors[0], starts, lengths, size, index)
    if keep is not None:
        _check_keep(tensors, keep)
    arguments = (starts, lengths, index, size, keep, dtype)
    return tuple(
        _Pooled.apply(x, *arguments)  # type: ignore[no-untyped-call]
        if x.requires_grad and torch.is_grad_enabled()
        else _pool(x, *arguments)
        for x in tensors
    )


def _pool(
    tensor: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    index: torch.Tensor | None,
    size: int,
    keep: torch.Tensor | None,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    if choose_for(TILE_MEANS, tensor) == "triton":
        from multimodal_gen.kernels.tile_pool import tile_pool_kernel

        return tile_pool_kernel.pool_tiles(tensor, starts, lengths, index, keep, dtype)
    return pool_tiles_reference(tensor, starts, lengths, index, size, keep, dtype)


def _tile_of_tokens(
    num_tokens: int,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    index: torch.Tensor | None,
    size: int,
) -> torch.Tensor:
    """Return the tile of every token, int64 [S], N where it is in none; does not wait."""
    offset = torch.arange(size, device=starts.device)
    position = starts.unsqueeze(1) + offset
    if index is not None:
        position = index[position.clamp_max(len(index) - 1).long()]
    token = torch.where(offset < lengths.unsqueeze(1), position, num_tokens).long()
    number = torch.arange(len(starts), device=starts.device).unsqueeze(1).expand(token.shape)
    tile = torch.full((num_tokens + 1,), len(starts), device=starts.device)
    return tile.scatter_(0, token.flatten(), number.flatten())[:num_tokens]


def _of_tokens(tiles: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
    """Return the value of every token's tile: [B, S, H, D] of [B, H, N, D]; 0 in no tile."""
    rows = torch.nn.functional.pad(tiles.transpose(1, 2), (0, 0, 0, 0, 0, 1))
    return rows.index_select(1, tile)


class _Pooled(torch.autograd.Function):
    """Means of tiles, whose gradient every token of a tile gets an equal share of."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        index, size, keep, _ = rest
        ctx.save_for_backward(starts, lengths, index, keep)
        ctx.size, ctx.shape, ctx.dtype = size, tensor.shape, tensor.dtype
        return _pool(tensor, starts, lengths, *rest)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        starts, lengths, index, keep = ctx.saved_tensors
        tile = _tile_of_tokens(ctx.shape[1], starts, lengths, index, ctx.size)
        counts = lengths.view(1, 1, -1, 1)
        if keep is not None:
            counts = torch.zeros(len(keep), len(lengths) + 1, dtype=torch.int32, device=keep.device)
            counts = counts.index_add_(1, tile, keep.int())[:, None, :-1, None]
        wide = grad.to(torch.promote_types(ctx.dtype, torch.float32))
        shares = _of_tokens((wide / counts.clamp_min(1)).to(ctx.dtype), tile)
        if keep is not None:
            shares = shares.masked_fill(~keep[..., None, None], 0.0)
        return (shares, *[None] * 6)


def pool_cells(
    tensor: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    cells: int,
    *,
    size: int,
    index: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the means of the cells of every tile, and which cells hold tokens that count.

    Cell a of a tile holds its tokens from a * ceil(size / cells) on; does not wait for the device.

    Args:
        tensor: [B, S, H, D], any strides.
        starts: int32 [N].
        lengths: int32 [N].
        cells: cells of a tile.
        size: upper bound of `lengths`.
        index: see `pool_tiles`.
        keep: see `pool_tiles`.

    Returns:
        [B, H, N * cells, D], zero where no token counts, and bool [B|1, N * cells].
    """
    width = -(-size // cells)
    offsets = torch.arange(cells, dtype=torch.int32, device=starts.device) * width
    begin = (starts[:, None] + offsets).flatten()
    held = (lengths[:, None] - offsets).clamp(0, width).flatten()
    tensor = tensor.detach()  # what is ranked by them has no gradient
    if choose_for(TILE_MEANS, tensor) == "triton":
        from multimodal_gen.kernels.tile_pool import tile_pool_kernel

        _check_pooled((tensor,))
        _check_tiles(tensor, starts, lengths, size, index)
        if keep is not None:
            _check_keep((tensor,), keep)
        means = tile_pool_kernel.pool_cells(tensor, starts, lengths, index, keep, cells, width)
    else:
        (means,) = pool_tiles((tensor,), begin, held, size=width, index=index, keep=keep)
    if keep is None:
        return means, (held > 0).unsqueeze(0)
    share = pool_tiles((keep[..., None, None].float(),), begin, held, size=width, index=index)
    return means, share[0][:, 0, :, 0] > 0


def select_cells(
    query: torch.Tensor,
    key: torch.Tensor,
    q_real: torch.Tensor,
    k_real: torch.Tensor,
    count: int,
    *,
    cells: tuple[int, int],
    scale: float,
    always: int = 0,
) -> torch.Tensor:
    """Return the `count` key tiles with the largest scores of every query tile, by their cells.

    The score of two tiles is log sum exp(scale * q.k) over pairs of their cells' means, in fp32;
    cells without tokens are left out. Equal scores go to the lowest index. Does not wait.

    Args:
        query: means of cells, [B, H, Nq * cells[0], D].
        key: means of cells, [B, Hkv, Nk * cells[1], D].
        q_real: bool [B|1, Nq * cells[0]], cells that hold tokens.
        k_real: bool [B|1, Nk * cells[1]].
        count: key tiles to keep, in [1, Nk].
        cells: cells of a query tile and of a key tile, of `CELL_COUNTS`.
        scale: positive factor of the scores.
        always: number of blocks, numbered from Nk on, that every row keeps besides.

    Returns:
        int32 [B, H, Nq, count + always], strictly increasing along every row.

    Raises:
        UsageError: shapes, dtypes or devices do not fit each other, or `count` is out of range.
    """
    if any(
        n not in CELL_COUNTS or x.shape[2] % n for n, x in zip(cells, (query, key), strict=True)
    ):
        raise UsageError(
            f"`cells` must be two of {CELL_COUNTS} that divide {query.shape[2]} and "
            f"{key.shape[2]}, got {cells}"
        )
    num_q, num_kv = query.shape[2] // cells[0], key.shape[2] // cells[1]
    _check_selection(query, key, min(count, num_kv + 1), always)
    if count > num_kv:
        raise UsageError(f"`count` must lie in [1, {num_kv}], got {count}")
    shape = (*query.shape[:2], num_q, count + always)
    out = torch.empty(shape, dtype=torch.int32, device=query.device)
    query, key = (x.detach().contiguous() for x in (query, key))
    arguments = (query, key, q_real, k_real, cells, count, always, out, scale)
    if choose_for(CELL_CHOICE, query, head_size=query.shape[3], num_kv=num_kv) == "triton":
        from multimodal_gen.kernels.tile_pool import tile_pool_kernel

        warpgroups = place_of(query.device)[1] == (9, 0)
        tile_pool_kernel.select_cells(*arguments, warpgroups=warpgroups)
    else:
        select_cells_reference(*arguments)
    return out


def select_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    count: int,
    *,
    always: int = 0,
    real: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the `count` key tiles with the largest scores of every query tile.

    A score is the product of two means in fp32; a positive scale would not change the order. Equal
    scores go to the lowest index. Exact, and does not wait for the device.

    Args:
        query: means of query tiles, [B, H, Nq, D], any strides.
        key: means of key tiles, [B, Hkv, Nk, D]; query head h uses key head h // (H / Hkv).
        count: key tiles to keep, in [1, Nk].
        always: number of blocks, numbered from Nk on, that every row keeps besides.
        real: bool [B, Nk], tiles that hold keys; None for all. The others are kept only where
            there are not enough of these.
        out: int32 [B, H, Nq, at least count + always], stride 1 along rows, to write to: a plan
            may have further or longer rows.

    Returns:
        int32 [B, H, Nq, count + always], strictly increasing along every row: new, or `out`, whose
        entries behind these are left as they are.

    Raises:
        UsageError: shapes, dtypes or devices do not fit each other, or `count` is out of range.
    """
    _check_selection(query, key, count, always)
    out = _selection(query, count + always, out)
    query, key = query.detach(), key.detach()  # indices have no gradient
    if real is not None:
        query, key = _with_last(query, key, real)
    if choose_for(TILE_CHOICE, query, num_kv=key.shape[2]) == "triton":
        from multimodal_gen.kernels.tile_pool import tile_pool_kernel

        tile_pool_kernel.select_tiles(query, key, count, always, out)
    else:
        select_tiles_reference(query, key, count, always, out)
    return out


def mark_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    count: int,
    *,
    near: int = -1,
    real: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a map of what `select_tiles` lists, and of the tiles next to the query tile's own.

    Args:
        query: see `select_tiles`.
        key: likewise.
        count: likewise.
        near: how far from the query tile's number key tiles are kept whatever they score; -1 for
            none.
        real: likewise.

    Returns:
        bool [B, H, Nq, Nk].

    Raises:
        UsageError: see `select_tiles`.
    """
    _check_selection(query, key, count, 0)
    num = key.shape[2]
    if choose_for(TILE_CHOICE, query, num_kv=num) != "triton":
        marked = torch.zeros((*query.shape[:3], num), dtype=torch.bool, device=query.device)
        marked.scatter_(-1, select_tiles(query, key, count, real=real).long(), True)
        return mark_near(marked, near)
    from multimodal_gen.kernels.tile_pool import tile_pool_kernel

    query, key = query.detach(), key.detach()  # a map has no gradient
    if real is not None:
        query, key = _with_last(query, key, real)
    out = torch.empty((*query.shape[:3], num), dtype=torch.uint8, device=query.device)
    tile_pool_kernel.select_tiles(query, key, count, 0, out, near=near)
    return out.view(torch.bool)


def mark_near(marked: torch.Tensor, near: int) -> torch.Tensor:
    """Mark, in bool [..., Nq, Nk], the key tiles at most `near` away from the query tile's number.

    Returns `marked`, which is changed.
    """
    if near < 0:
        return marked
    rows, columns = (torch.arange(n, device=marked.device) for n in marked.shape[-2:])
    return marked.logical_or_((rows[:, None] - columns).abs() <= near)


def _selection(query: torch.Tensor, length: int, out: torch.Tensor | None) -> torch.Tensor:
    """Return where the lists go: a new tensor, or `out`, checked."""
    shape = (*query.shape[:3], length)
    if out is None:
        return torch.empty(shape, dtype=torch.int32, device=query.device)
    fits = out.shape[:3] == shape[:3] and out.shape[3] >= length and out.stride(3) == 1
    if not fits or out.dtype != torch.int32 or out.device != query.device:
        raise UsageError(
            f"`out` must be int32 {list(shape)} or longer on {query.device}, with stride 1 along "
            f"its rows, got {out.dtype} {list(out.shape)} on {out.device}"
        )
    return out


def _with_last(
    query: torch.Tensor, key: torch.Tensor, real: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a channel that adds nothing to a score, or minus infinity where a tile is not real."""
    if real.dtype != torch.bool or real.shape != (key.shape[0], key.shape[2]):
        raise UsageError(
            f"`real` must be bool {[key.shape[0], key.shape[2]]}, got {real.dtype} "
            f"{list(real.shape)}"
        )
    query, key = (torch.nn.functional.pad(x, (0, _CHANNELS)) for x in (query, key))
    query[..., -_CHANNELS] = 1.0
    key[..., -_CHANNELS] = key.new_zeros(real.shape).masked_fill(~real, -torch.inf)[:, None]
    return query, key


def _check_selection(query: torch.Tensor, key: torch.Tensor, count: int, always: int) -> None:
    for name, x in (("query", query), ("key", key)):
        if x.ndim != 4:
            raise UsageError(f"`{name}` must be [B, H, N, D], got {list(x.shape)}")
    alike = query.dtype == key.dtype and query.device == key.device
    if not alike or key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        raise UsageError(
            f"`key` must have the batch, head size, dtype and device of query "
            f"({list(query.shape)}, {query.dtype}, {query.device}), "
            f"got {list(key.shape)}, {key.dtype}, {key.device}"
        )
    if query.shape[1] % key.shape[1]:
        raise UsageError(
            f"`query` must have a multiple of key's {key.shape[1]} heads, got {query.shape[1]}"
        )
    if not 1 <= count <= key.shape[2]:
        raise UsageError(f"`count` must lie in [1, {key.shape[2]}], got {count}")
    if always < 0:
        raise UsageError(f"`always` must be at least 0, got {always}")


def add_gated(
    out: torch.Tensor,
    gate: torch.Tensor,
    coarse: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    *,
    size: int,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `out` plus `gate` times the coarse value of every token's tile.

    Args:
        out: [B, S, H, D], any strides; may be changed, where no gradient is recorded.
        gate: [B, S, H, D], any strides.
        coarse: [B, H, N, D].
        starts: int32 [N].
        lengths: int32 [N].
        size: upper bound of `lengths`.
        index: int32 [S'], the token at every position; None where tokens lie tile by tile.

    Returns:
        [B, S, H, D], computed in fp32 and rounded once; tokens in no tile keep their value.

    Raises:
        UsageError: shapes, dtypes or devices do not fit each other.
    """
    _check_pooled((out, gate))
    if gate.shape != out.shape:
        raise UsageError(f"`gate` must be {list(out.shape)}, got {list(gate.shape)}")
    _check_tiles(out, starts, lengths, size, index)
    wanted = (out.shape[0], out.shape[2], len(starts), out.shape[3])
    if tuple(coarse.shape) != wanted or coarse.device != out.device:
        raise UsageError(
            f"`coarse` must be {list(wanted)} on {out.device}, got {list(coarse.shape)} on "
            f"{coarse.device}"
        )
    arguments = (out, gate, coarse, starts, lengths, index, size)
    if records_gradient(out, gate, coarse):
        found: torch.Tensor = _Gated.apply(*arguments)  # type: ignore[no-untyped-call]
        return found
    return _add_gated(*arguments)


def _add_gated(
    out: torch.Tensor,
    gate: torch.Tensor,
    coarse: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    index: torch.Tensor | None,
    size: int,
) -> torch.Tensor:
    if choose_for(TILE_MEANS, out, gate, coarse) == "triton":
        from multimodal_gen.kernels.tile_pool import tile_pool_kernel

        return tile_pool_kernel.add_gated(out, gate, coarse, starts, lengths, index)
    return add_gated_reference(out, gate, coarse, starts, lengths, index, size)


class _Gated(torch.autograd.Function):
    """The gated sum, on a copy of `out`, and its gradients."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, gate: torch.Tensor, coarse: torch.Tensor, *tiles: Any
    ) -> torch.Tensor:
        starts, lengths, index, ctx.size = tiles
        ctx.save_for_backward(gate, coarse, starts, lengths, index)
        return _add_gated(out.clone(), gate, coarse, *tiles)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, coarse, starts, lengths, index = ctx.saved_tensors
        tile = _tile_of_tokens(grad.shape[1], starts, lengths, index, ctx.size)
        wide = torch.promote_types(grad.dtype, torch.float32)
        of_gate = (grad * _of_tokens(coarse, tile)).to(gate.dtype)
        weighed = grad.to(wide) * gate
        means = _pool(weighed, starts, lengths, index, ctx.size, None, wide)
        of_coarse = (means * lengths.view(-1, 1)).to(coarse.dtype)
        return (grad, of_gate, of_coarse, *[None] * 4)


def _check_pooled(tensors: tuple[torch.Tensor, ...]) -> None:
    if not tensors:
        raise UsageError("`tensors` must hold at least one tensor, got none")
    first = tensors[0]
    for x in tensors:
        if x.ndim != 4:
            raise UsageError(f"`tensors` must be [B, S, H, D], got {list(x.shape)}")
        alike = x.dtype == first.dtype and x.device == first.device
        if not alike or (x.shape[0], x.shape[3]) != (first.shape[0], first.shape[3]):
            raise UsageError(
                f"`tensors` must have one batch, head size, dtype and device, got "
                f"{list(first.shape)} {first.dtype} {first.device} and "
                f"{list(x.shape)} {x.dtype} {x.device}"
            )


def _check_keep(tensors: tuple[torch.Tensor, ...], keep: torch.Tensor) -> None:
    for x in tensors:
        if keep.dtype != torch.bool or keep.shape != x.shape[:2]:
            raise UsageError(
                f"`keep` must be bool {list(x.shape[:2])}, got {keep.dtype} {list(keep.shape)}"
            )


def _check_tiles(
    tensor: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    size: int,
    index: torch.Tensor | None,
) -> None:
    named = {"starts": starts, "lengths": lengths, "index": index}
    for name, x in named.items():
        if x is None:
            continue
        if x.dtype != torch.int32 or x.ndim != 1 or x.device != tensor.device:
            raise UsageError(
                f"`{name}` must be int32, 1-D and on {tensor.device}, got {x.dtype} "
                f"{list(x.shape)} on {x.device}"
            )
    if len(starts) != len(lengths) or not len(starts):
        raise UsageError(
            f"`lengths` must hold one value per start, got {len(lengths)} for {len(starts)}"
        )
    if size < 1:
        raise UsageError(f"`size` must be at least 1, got {size}")
