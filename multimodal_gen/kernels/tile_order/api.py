"""The tile order of a latent grid, and moving tokens into an order and back.

Shapes: B batch, S tokens, H heads, D head size; T, H, W of a grid are frames, rows and columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.engine import TOKEN_MOVES, choose_for
from multimodal_gen.kernels.launch.launcher import Form, form_of
from multimodal_gen.kernels.select.reference import Tiles
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.kernels.tile_order.reference import gather_reference, scatter_reference

if TYPE_CHECKING:
    from multimodal_gen.kernels.tile_order.tile_order_kernel import Gather, Scatter

_FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_MAX_TENSORS = 4
_MAX_TOKENS = 2**31 - 1  # positions are int32

_Grid = tuple[int, int, int]
_Checked = torch.Tensor | Form


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TileOrder:
    """The tokens of a grid, tile by tile.

    Tiles come in raster order, and so do the tokens inside each. The order is packed: a tile that
    the grid's end cuts short holds its real tokens only. The tensors are shared between callers
    and must not be written to.

    Attributes:
        grid: (T, H, W), the tokens per axis.
        tile: (t, h, w), the tokens per axis of a full tile.
        tiles: ceil(grid / tile), the tiles per axis.
        num_tokens: S = T * H * W.
        order: int32 [S], position in tile order -> token in raster order.
        inverse: int32 [S], token in raster order -> position in tile order.
        starts: int32 [N], the position of each tile's first token.
        lengths: int32 [N], the tokens of each tile, in [1, largest].
        largest: t * h * w, the tokens of a full tile.
        uniform: whether every tile is full.
    """

    grid: _Grid
    tile: _Grid
    tiles: _Grid
    num_tokens: int
    order: torch.Tensor
    inverse: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    largest: int
    uniform: bool

    def as_tiles(self, tokens: torch.Tensor | None = None) -> Tiles:
        """Return the tiles of what is in tile order, or of the `tokens` at these positions."""
        return Tiles(self.starts, self.lengths, self.largest, tokens)

    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tile of each position in tile order, and its place there: int64 [S] each."""
        tile = torch.repeat_interleave(self.lengths.long(), output_size=self.num_tokens)
        return tile, torch.arange(self.num_tokens, device=tile.device) - self.starts[tile]


def tile_order(
    grid: Sequence[int], tile: Sequence[int], device: torch.device | str = "cpu"
) -> TileOrder:
    """Return the tile order of a grid; the last 32 (grid, tile, device) are cached.

    Args:
        grid: (T, H, W), tokens per axis.
        tile: (t, h, w), tokens per axis of a tile; may exceed the grid and need not divide it.
        device: where the tensors lie. The first call for a device waits for it.

    Raises:
        UsageError: a size is not a positive int, or the grid has 2^31 tokens or more.
    """
    return _tile_order(_sizes("grid", grid), _sizes("tile", tile), _indexed(torch.device(device)))


def _sizes(name: str, sizes: Sequence[int]) -> _Grid:
    values = tuple(sizes)
    if len(values) != 3 or not all(isinstance(size, int) and size >= 1 for size in values):
        raise UsageError(f"`{name}` must be three ints of at least 1, (T, H, W), got {values}")
    if name == "grid" and values[0] * values[1] * values[2] > _MAX_TOKENS:
        raise UsageError(f"`grid` must have at most {_MAX_TOKENS} tokens, got {values}")
    return values[0], values[1], values[2]


def _indexed(device: torch.device) -> torch.device:
    """Name the current device by its index, so that "cuda" is not cached for another GPU."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@static_cache(maxsize=32)
def _tile_order(grid: _Grid, tile: _Grid, device: torch.device) -> TileOrder:
    tiles = tuple(-(-size // edge) for size, edge in zip(grid, tile, strict=True))
    with torch.device("cpu"):
        tile_of_token = torch.zeros(1, dtype=torch.int32)
        lengths = torch.ones(1, dtype=torch.int32)
        for size, edge, num in zip(grid, tile, tiles, strict=True):
            along = torch.arange(size, dtype=torch.int32) // edge
            tile_of_token = (tile_of_token[:, None] * num + along).flatten()
            edges = (size - torch.arange(num, dtype=torch.int32) * edge).clamp_max(edge)
            lengths = (lengths[:, None] * edges).flatten()
        order = torch.argsort(tile_of_token, stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        starts = lengths.cumsum(0) - lengths
        moved = [x.to(device, torch.int32) for x in (order, inverse, starts, lengths)]
    return TileOrder(
        grid=grid,
        tile=tile,
        tiles=(tiles[0], tiles[1], tiles[2]),
        num_tokens=len(order),
        order=moved[0],
        inverse=moved[1],
        starts=moved[2],
        lengths=moved[3],
        largest=tile[0] * tile[1] * tile[2],
        uniform=all(size % edge == 0 for size, edge in zip(grid, tile, strict=True)),
    )


def gather_tokens(tensors: Sequence[torch.Tensor], index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return `tensor[:, index]` of every tensor, head-major, in one launch on a GPU.

    Gradients flow where they are asked for; those calls run the reference.

    Args:
        tensors: one to four, [B, S, H, D] with any strides; H may differ between them.
        index: int32 [S_out], or [B, S_out] for an order per batch entry, or [B, H, S_out] for one
            per head of up to three tensors; values in [0, S), which are not checked on a GPU.

    Returns:
        New tensors [B, S_out, H, D] whose memory is [B, H, S_out, D].

    Raises:
        UsageError: shapes, dtypes or devices do not fit each other.
    """
    tensors = tuple(tensors)
    if tensors and choose_for(TOKEN_MOVES, tensors[0], gradients=tensors) == "triton":
        return _gather_of(tuple(map(form_of, tensors)), form_of(index))(tensors, index)
    _check_gather(tensors, index)
    return tuple(gather_reference(tensor, index) for tensor in tensors)


@lru_cache(maxsize=1024)
def _gather_of(tensors: tuple[Form, ...], index: Form) -> "Gather":
    """Check what is to be gathered, and return what launches it for tensors of such forms."""
    from multimodal_gen.kernels.tile_order import tile_order_kernel

    _check_gather(tensors, index)
    if len(index.shape) == 3:
        return tile_order_kernel.gather_per_head
    return tile_order_kernel.prepare_gather(tensors, index)


def scatter_tokens(source: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """Write `out[:, index] = source`, in one launch on a GPU.

    Gradients flow where they are asked for; those calls run the reference.

    Args:
        source: [B, S_in, H, D], any strides.
        index: int32 [S_in], or [B, S_in] for an order per batch entry, or [B, H, S_in] for one
            per head; distinct values in [0, S), which are not checked on a GPU.
        out: [B, S, H, D], any strides, apart from `source` in memory. Tokens that `index` does not
            name keep what they hold.

    Raises:
        UsageError: shapes, dtypes or devices do not fit each other, or `out` is an expanded view.
    """
    if choose_for(TOKEN_MOVES, source, gradients=(source, out)) == "triton":
        _scatter_of(form_of(source), form_of(index), form_of(out))(source, index, out)
        return
    _check_scatter(source, index, form_of(out))
    scatter_reference(source, index, out)


@lru_cache(maxsize=1024)
def _scatter_of(source: Form, index: Form, out: Form) -> "Scatter":
    """Check what is to be scattered, and return what launches it for tensors of such forms."""
    from multimodal_gen.kernels.tile_order import tile_order_kernel

    _check_scatter(source, index, out)
    if len(index.shape) == 3:
        return tile_order_kernel.scatter_per_head
    return tile_order_kernel.prepare_scatter(source, index, out)


def _check_gather(tensors: tuple[_Checked, ...], index: _Checked) -> None:
    """Raise unless tensors and index fit each other; see `gather_tokens`."""
    if not 1 <= len(tensors) <= _MAX_TENSORS:
        raise UsageError(f"`tensors` must be 1 to {_MAX_TENSORS} tensors, got {len(tensors)}")
    first = tensors[0]
    for position, tensor in enumerate(tensors):
        _expect_like(f"tensors[{position}]", tensor, "tensors[0]", first)
        if tensor.shape[:2] != first.shape[:2] or tensor.shape[3] != first.shape[3]:
            batch, tokens, _, size = first.shape
            raise UsageError(
                f"`tensors[{position}]` must be [{batch}, {tokens}, H, {size}] like tensors[0], "
                f"got {list(tensor.shape)}"
            )
    _expect_index(index, *tensors)


def _check_scatter(source: _Checked, index: _Checked, out: Form) -> None:
    """Raise unless tensors and index fit each other; see `scatter_tokens`."""
    _expect_like("out", out, "out", out)
    _expect_like("source", source, "out", out)
    batch, _, heads, size = out.shape
    if (source.shape[0], *source.shape[2:]) != (batch, heads, size):
        raise UsageError(
            f"`source` must be [{batch}, S_in, {heads}, {size}] like out, got {list(source.shape)}"
        )
    if any(s == 0 and n > 1 for s, n in zip(out.strides, out.shape, strict=True)):
        raise UsageError(
            f"`out` must have memory of its own for every element, got strides "
            f"{list(out.strides)} for shape {list(out.shape)}; call .contiguous() on it"
        )
    _expect_index(index, source)
    if index.shape[-1] != source.shape[1]:
        raise UsageError(
            f"`index` must hold one value per token of source ({source.shape[1]}), "
            f"got {index.shape[-1]}"
        )


def _expect_like(name: str, tensor: _Checked, other: str, like: _Checked) -> None:
    if len(tensor.shape) != 4:
        raise UsageError(f"`{name}` must be [B, S, H, D], got {list(tensor.shape)}")
    if tensor.dtype not in _FLOATING:
        raise UsageError(
            f"`{name}` must be float16, bfloat16, float32 or float64, got {tensor.dtype}"
        )
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise UsageError(
            f"`{name}` must have the dtype and device of {other} ({like.dtype}, {like.device}), "
            f"got {tensor.dtype}, {tensor.device}"
        )


def _expect_index(index: _Checked, *tensors: _Checked) -> None:
    first = tensors[0]
    if index.dtype != torch.int32:
        raise UsageError(f"`index` must be int32, got {index.dtype}; call .int() on it")
    if index.device != first.device:
        raise UsageError(
            f"`index` must be on the device of the tokens ({first.device}), got {index.device}"
        )
    batch, heads, rank = first.shape[0], first.shape[2], len(index.shape)
    if rank not in (1, 2, 3) or tuple(index.shape[:-1]) != (batch, heads)[: rank - 1]:
        raise UsageError(
            f"`index` must be [S], [{batch}, S] or [{batch}, {heads}, S], got {list(index.shape)}"
        )
    if rank == 3 and (len(tensors) > 3 or any(t.shape[2] != heads for t in tensors)):
        raise UsageError(
            f"`tensors` must be at most 3 of {heads} heads for an order per head, got heads "
            f"{[t.shape[2] for t in tensors]}"
        )
