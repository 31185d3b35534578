"""Means of tiles and the choice among them: validates, then runs Triton or the reference.

Shapes: B batch, S tokens, H heads, D head size, N tiles; Nq and Nk tiles of queries and keys. One
`Tiles` serves tensors in tile order, another of the same bounds those in the order they came in.
"""

from typing import Any

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.engine import (
    CELL_CHOICE,
    TILE_CHOICE,
    TILE_MEANS,
    choose_for,
    records_gradient,
)
from multimodal_gen.kernels.select.reference import (
    Ranking,
    Tiles,
    add_gated_reference,
    of_tokens,
    pool_tiles_reference,
    select_tiles_reference,
)
from multimodal_gen.kernels.tensors import check_mask, place_of

CELL_COUNTS = (1, 2, 4, 8)
"""How many cells a tile may be cut into for `select_tiles`."""
_ONE_CELL = (1, 1)
_CHANNELS = 16  # that are added at once: fewer would leave rows that no 16 bytes divide


def pool_tiles(
    tensors: tuple[torch.Tensor, ...],
    tiles: Tiles,
    *,
    mask: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return the mean of every tile's tokens, summed in fp32; does not wait for the device.

    Args:
        tensors: tensors [B, S, H, D], any strides, alike but for H.
        tiles: the tiles.
        mask: bool [B, S], tokens that count, in the order of the tensors; None for all. The others
            may hold anything, NaN too.
        dtype: of the means; that of the tensors when None.

    Returns:
        For every tensor [B, H, N, D], contiguous; zero where no token counts.

    Raises:
        UsageError: shapes, dtypes or devices do not fit each other.
    """
    _check_pooled(tensors)
    check_tiles(tensors[0], tiles)
    for x in tensors:
        check_mask(mask, x)
    if not records_gradient(*tensors):
        return _pool(tensors, tiles, mask, dtype)
    return tuple(_Pooled.apply(x, tiles, mask, dtype) for x in tensors)  # type: ignore[no-untyped-call]


def _pool(
    tensors: tuple[torch.Tensor, ...],
    tiles: Tiles,
    mask: torch.Tensor | None,
    dtype: torch.dtype | None,
) -> tuple[torch.Tensor, ...]:
    if choose_for(TILE_MEANS, tensors[0]) != "triton":
        return tuple([pool_tiles_reference(x, tiles, mask, dtype) for x in tensors])
    from multimodal_gen.kernels.select import pool_kernel

    return pool_kernel.pool_tiles(tensors, tiles, mask, dtype)


class _Pooled(torch.autograd.Function):
    """Means of tiles, whose gradient every token of a tile gets an equal share of."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        tiles: Tiles,
        mask: torch.Tensor | None,
        dtype: torch.dtype | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.tiles, ctx.shape, ctx.dtype = tiles, tensor.shape, tensor.dtype
        return _pool((tensor,), tiles, mask, dtype)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        lengths = ctx.tiles.lengths
        tile = ctx.tiles.of_tokens(ctx.shape[1])
        counts = lengths.view(1, 1, -1, 1)
        if mask is not None:
            counts = torch.zeros(len(mask), len(lengths) + 1, dtype=torch.int32, device=mask.device)
            counts = counts.index_add_(1, tile, mask.int())[:, None, :-1, None]
        wide = grad.to(torch.promote_types(ctx.dtype, torch.float32))
        shares = of_tokens((wide / counts.clamp_min(1)).to(ctx.dtype), tile)
        if mask is not None:
            shares = shares.masked_fill(~mask[..., None, None], 0.0)
        return shares, None, None, None


def pool_cells(
    tensor: torch.Tensor,
    tiles: Tiles,
    cells: int,
    *,
    mask: torch.Tensor | None = None,
    held: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the means of the cells of every tile, and which cells hold tokens that count.

    Cell a of a tile holds its tokens from a * ceil(tiles.size / cells) on; does not wait for the
    device.

    Args:
        tensor: [B, S, H, D], any strides.
        tiles: the tiles.
        cells: cells of a tile.
        mask: see `pool_tiles`.
        held: which cells hold tokens, bool [1, N * cells], where that is known.

    Returns:
        [B, H, N * cells, D], zero where no token counts, and bool [B|1, N * cells].
    """
    _check_pooled((tensor,))
    check_tiles(tensor, tiles)
    check_mask(mask, tensor)
    tensor = tensor.detach()  # what is ranked by them has no gradient
    if choose_for(TILE_MEANS, tensor) == "triton":
        from multimodal_gen.kernels.select import pool_kernel

        means = pool_kernel.pool_cells(tensor, tiles, cells, mask)
    else:
        means = pool_tiles_reference(tensor, tiles.cells(cells), mask)
    if mask is None:
        return means, cells_held(tiles, cells) if held is None else held
    (share,) = _pool((mask[..., None, None].float(),), tiles.cells(cells), None, None)
    return means, share[:, 0, :, 0] > 0


def cells_held(tiles: Tiles, cells: int) -> torch.Tensor:
    """Return which cells of tiles hold tokens, bool [1, N * cells]; see `pool_cells`."""
    return (tiles.cells(cells).lengths > 0).unsqueeze(0)


def select_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    count: int,
    *,
    cells: tuple[int, int] = _ONE_CELL,
    scale: float = 1.0,
    always: int = 0,
    real: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """Return the `count` key tiles with the largest scores of every query tile.

    The score of two tiles is log sum exp(scale * q.k) over pairs of their cells' means, in fp32; of
    tiles of one cell it is the product of the means. Equal scores go to the lowest index. Exact,
    and does not wait for the device.

    Args:
        query: means of the cells of query tiles, [B, H, Nq * cells[0], D], any strides.
        key: means of the cells of key tiles, [B, Hkv, Nk * cells[1], D]; query head h uses key head
            h // (H / Hkv).
        count: key tiles to keep, in [1, Nk].
        cells: cells of a query tile and of a key tile, of `CELL_COUNTS`.
        scale: positive factor of the scores, which changes the order only where there are cells.
        always: number of blocks, numbered from Nk on, that every row keeps besides.
        real: cells that hold tokens, bool [B|1, Nq * cells[0]] and [B|1, Nk * cells[1]]; the others
            are left out. Of tiles of one cell only the keys' is looked at, None for all; the
            others are kept only where there are not enough of these.

    Returns:
        int32 [B, H, Nq, count + always], strictly increasing along every row.

    Raises:
        UsageError: shapes, dtypes or devices do not fit each other, or `count` is out of range.
    """
    _check_selection(query, key, cells, count, always)
    num_kv, rows = key.shape[2] // cells[1], query.shape[2] // cells[0]
    shape = (*query.shape[:2], rows, count + always)
    out = torch.empty(shape, dtype=torch.int32, device=query.device)
    if cells == _ONE_CELL:
        operation = TILE_CHOICE
        ranking = Ranking(*_ranked(query, key, real[1]), count, always, out)
    else:
        of_queries, of_keys = real
        assert of_queries is not None, "cells know which are real"
        assert of_keys is not None, "cells know which are real"
        operation = CELL_CHOICE
        query, key = query.detach().contiguous(), key.detach().contiguous()
        given = of_queries.contiguous(), of_keys.contiguous()
        ranking = Ranking(query, key, count, always, out, cells, given, scale)
    query = ranking.query
    if choose_for(operation, query, head_size=query.shape[3], num_kv=num_kv) != "triton":
        select_tiles_reference(ranking)
        return out
    from multimodal_gen.kernels.select import tile_kernel

    warpgroups = operation is CELL_CHOICE and place_of(query.device)[1] == (9, 0)
    tile_kernel.select_tiles(ranking, warpgroups=warpgroups)
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
        query: means of query tiles, [B, H, Nq, D], any strides.
        key: means of key tiles, [B, Hkv, Nk, D].
        count: see `select_tiles`.
        near: how far from the query tile's number key tiles are kept whatever they score; -1 for
            none.
        real: bool [B, Nk], tiles that hold keys; None for all.

    Returns:
        bool [B, H, Nq, Nk].

    Raises:
        UsageError: see `select_tiles`.
    """
    _check_selection(query, key, _ONE_CELL, count, 0)
    num = key.shape[2]
    if choose_for(TILE_CHOICE, query, num_kv=num) != "triton":
        lists = select_tiles(query, key, count, real=(None, real))
        marked = torch.zeros((*query.shape[:3], num), dtype=torch.bool, device=query.device)
        marked.scatter_(-1, lists.long(), True)
        rows, columns = (torch.arange(n, device=query.device) for n in marked.shape[-2:])
        return marked.logical_or_((rows[:, None] - columns).abs() <= near)
    from multimodal_gen.kernels.select import tile_kernel

    out = torch.empty((*query.shape[:3], num), dtype=torch.uint8, device=query.device)
    tile_kernel.select_tiles(Ranking(*_ranked(query, key, real), count, 0, out), near=near)
    return out.view(torch.bool)


def _ranked(
    query: torch.Tensor, key: torch.Tensor, real: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return means without gradients, by which tiles that are not `real` score minus infinity.

    These have a channel more, which adds nothing to the scores of others.
    """
    query, key = query.detach(), key.detach()
    if real is None:
        return query, key
    batch, num = key.shape[0], key.shape[2]
    if real.dtype != torch.bool or tuple(real.shape) not in ((batch, num), (1, num)):
        raise UsageError(f"`real` must be bool {[batch, num]}, got {real.dtype} {list(real.shape)}")
    query, key = (torch.nn.functional.pad(x, (0, _CHANNELS)) for x in (query, key))
    query[..., -_CHANNELS] = 1.0
    key[..., -_CHANNELS] = key.new_zeros(real.shape).masked_fill(~real, -torch.inf)[:, None]
    return query, key


def add_gated(
    out: torch.Tensor, gate: torch.Tensor, coarse: torch.Tensor, tiles: Tiles
) -> torch.Tensor:
    """Return `out` plus `gate` times the coarse value of every token's tile.

    Args:
        out: [B, S, H, D], any strides; may be changed, where no gradient is recorded.
        gate: [B, S, H, D], any strides.
        coarse: [B, H, N, D].
        tiles: the tiles.

    Returns:
        [B, S, H, D], computed in fp32 and rounded once; tokens in no tile keep their value.

    Raises:
        UsageError: shapes, dtypes or devices do not fit each other.
    """
    _check_pooled((out, gate))
    if gate.shape != out.shape:
        raise UsageError(f"`gate` must be {list(out.shape)}, got {list(gate.shape)}")
    check_tiles(out, tiles)
    wanted = (out.shape[0], out.shape[2], len(tiles.starts), out.shape[3])
    if tuple(coarse.shape) != wanted or coarse.device != out.device:
        raise UsageError(
            f"`coarse` must be {list(wanted)} on {out.device}, got {list(coarse.shape)} on "
            f"{coarse.device}"
        )
    if records_gradient(out, gate, coarse):
        found: torch.Tensor = _Gated.apply(out, gate, coarse, tiles)  # type: ignore[no-untyped-call]
        return found
    return _add_gated(out, gate, coarse, tiles)


def _add_gated(
    out: torch.Tensor, gate: torch.Tensor, coarse: torch.Tensor, tiles: Tiles
) -> torch.Tensor:
    if choose_for(TILE_MEANS, out, gate, coarse) == "triton":
        from multimodal_gen.kernels.select import pool_kernel

        return pool_kernel.add_gated(out, gate, coarse, tiles)
    return add_gated_reference(out, gate, coarse, tiles)


class _Gated(torch.autograd.Function):
    """The gated sum, on a copy of `out`, and its gradients."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, gate: torch.Tensor, coarse: torch.Tensor, tiles: Tiles
    ) -> torch.Tensor:
        ctx.save_for_backward(gate, coarse)
        ctx.tiles = tiles
        return _add_gated(out.clone(), gate, coarse, tiles)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, coarse = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        of_gate = (grad * of_tokens(coarse, ctx.tiles.of_tokens(grad.shape[1]))).to(gate.dtype)
        (means,) = _pool((grad.to(wide) * gate,), ctx.tiles, None, wide)
        of_coarse = (means * ctx.tiles.lengths.view(-1, 1)).to(coarse.dtype)
        return grad, of_gate, of_coarse, None


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


def check_tiles(tokens: torch.Tensor, tiles: Tiles) -> None:
    """Raise unless tiles are described where the tokens lie."""
    starts, lengths, size, named = tiles
    for name, x in (("starts", starts), ("lengths", lengths), ("tokens", named)):
        if x is not None and (x.dtype != torch.int32 or x.ndim != 1 or x.device != tokens.device):
            raise UsageError(
                f"`{name}` must be int32, 1-D and on {tokens.device}, got {x.dtype} "
                f"{list(x.shape)} on {x.device}"
            )
    if starts.shape != lengths.shape or not starts.shape[0]:
        raise UsageError(
            f"`lengths` must hold one value per start, got {len(lengths)} for {len(starts)}"
        )
    if size < 1:
        raise UsageError(f"`size` must be at least 1, got {size}")


def _check_selection(
    query: torch.Tensor, key: torch.Tensor, cells: tuple[int, int], count: int, always: int
) -> None:
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
    if cells != _ONE_CELL and any(
        n not in CELL_COUNTS or x.shape[2] % n for n, x in zip(cells, (query, key), strict=True)
    ):
        raise UsageError(
            f"`cells` must be two of {CELL_COUNTS} that divide {query.shape[2]} and "
            f"{key.shape[2]}, got {cells}"
        )
    num_kv = key.shape[2] // cells[1]
    if not 1 <= count <= num_kv:
        raise UsageError(f"`count` must lie in [1, {num_kv}], got {count}")
    if always < 0:
        raise UsageError(f"`always` must be at least 0, got {always}")
