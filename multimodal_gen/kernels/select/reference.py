"""Means of tiles, their cells, the best tiles and the gated sum in plain PyTorch.

Any device, any floating dtype, differentiable. Shapes: B batch, S tokens, H heads, D head size, N
tiles; Nq and Nk tiles of queries and keys.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

# Scores that are sorted at once; more heads than fit go one after the other.
_SCORES_AT_ONCE = 2**26
# Values of tokens that are taken at once, of as many tokens of every tile as fit.
_VALUES_AT_ONCE = 2**22


class Tiles(NamedTuple):
    """The tokens of tiles.

    Tile i holds the tokens at positions [starts[i], starts[i] + lengths[i]), or, with `tokens`,
    those that it names at these positions.

    Attributes:
        starts: int32 [N].
        lengths: int32 [N].
        size: upper bound of `lengths`.
        tokens: int32 [S'], the token at every position; None where tokens lie tile by tile.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    size: int
    tokens: torch.Tensor | None = None

    def cells(self, num: int) -> "Tiles":
        """Return the cells of the tiles; those past a tile's end hold no token."""
        width = -(-self.size // num)
        offsets = torch.arange(num, dtype=torch.int32, device=self.starts.device) * width
        begin = (self.starts[:, None] + offsets).flatten()
        held = (self.lengths[:, None] - offsets).clamp(0, width).flatten()
        return Tiles(begin, held, width, self.tokens)

    def of_tokens(self, num_tokens: int) -> torch.Tensor:
        """Return the tile of every token, int64 [S], N where it is in none; does not wait."""
        num, device = len(self.starts), self.starts.device
        offset = torch.arange(self.size, device=device)
        position = self.starts.unsqueeze(1) + offset
        if self.tokens is not None:
            position = self.tokens[position.clamp_max(len(self.tokens) - 1).long()]
        token = torch.where(offset < self.lengths.unsqueeze(1), position, num_tokens).long()
        number = torch.arange(num, device=device).unsqueeze(1).expand(token.shape)
        tile = torch.full((num_tokens + 1,), num, device=device)
        return tile.scatter_(0, token.flatten(), number.flatten())[:num_tokens]

    def positions(self, values: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, for the first, second, ... tokens of all tiles, where they are, and which exist.

        Args:
            values: of a token, which bound how many are taken at once.

        Yields:
            int64 [n, N], 0 where a tile has no such token; bool [n, N].
        """
        step = max(1, _VALUES_AT_ONCE // max(1, values * len(self.starts)))
        for first in range(0, self.size, step):
            last = min(first + step, self.size)
            token = torch.arange(first, last, device=self.starts.device)[:, None]
            real = self.lengths > token
            position = torch.where(real, self.starts + token, 0).long()
            yield (position if self.tokens is None else self.tokens[position].long()), real


def pool_tiles_reference(
    tensor: torch.Tensor,
    tiles: Tiles,
    mask: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the mean over the tokens of every tile, summed in fp32 (fp64 for fp64).

    Args:
        tensor: [B, S, H, D].
        tiles: the tiles.
        mask: bool [B, S], tokens that count, or None.
        dtype: of the means; that of `tensor` when None.

    Returns:
        [B, H, N, D]; zero where no token counts.
    """
    compute = torch.promote_types(tensor.dtype, torch.float32)
    batch, _, heads, head_size = tensor.shape
    total = tensor.new_zeros((batch, len(tiles.starts), heads, head_size), dtype=compute)
    counts = torch.zeros_like(tiles.lengths).unsqueeze(0)
    for position, real in tiles.positions(batch * heads * head_size):
        tokens = tensor[:, position].to(compute)
        counted = real.unsqueeze(0) if mask is None else real & mask[:, position]
        total = total + torch.where(counted[..., None, None], tokens, 0.0).sum(1)
        counts = counts + counted.sum(1)
    mean = total / counts.clamp_min(1)[..., None, None]
    return mean.transpose(1, 2).to(dtype or tensor.dtype).contiguous()


class Ranking(NamedTuple):
    """What tiles are ranked by, how many are kept, and where they are written.

    Attributes:
        query: means of the cells of query tiles, [B, H, Nq * cells[0], D].
        key: means of the cells of key tiles, [B, Hkv, Nk * cells[1], D].
        kept: key tiles to keep, in [1, Nk].
        always: number of blocks after the Nk tiles that every row keeps.
        out: int32 [B, H, Nq, at least kept + always]; rows are written to, in increasing order.
        cells: cells of a query tile and of a key tile.
        real: bool [B|1, Nq * cells[0]] and [B|1, Nk * cells[1]], cells that hold tokens; None for
            the product of tiles of one cell.
        scale: factor of the scores, where `real` is given.
    """

    query: torch.Tensor
    key: torch.Tensor
    kept: int
    always: int
    out: torch.Tensor
    cells: tuple[int, int] = (1, 1)
    real: tuple[torch.Tensor, torch.Tensor] | None = None
    scale: float = 1.0


def select_tiles_reference(ranking: Ranking) -> None:
    """Write the `kept` key tiles with the largest scores of every query tile.

    The score of two tiles is the logarithm of the sum of exp(scale * q.k) over their cells, which
    for one cell each is the product. Products are in fp32 (fp64 for fp64). Equal scores go to the
    lowest index; a score that is no number counts as infinitely large.
    """
    query, key, count, always, out, cells, real, scale = ranking
    compute = torch.promote_types(query.dtype, torch.float32)
    batch, heads, rows, _ = query.shape
    num_kv, group = key.shape[2] // cells[1], heads // key.shape[1]
    out[..., count : count + always] = torch.arange(num_kv, num_kv + always, device=query.device)
    step = max(1, _SCORES_AT_ONCE // max(1, batch * rows * key.shape[2]))
    for first in range(0, heads, step):
        last = min(first + step, heads)
        used = torch.arange(first, last, device=query.device) // group
        scores = query[:, first:last].to(compute) @ key[:, used].to(compute).mT
        if real is not None:
            both = real[0][:, None, :, None] & real[1][:, None, None]
            scores = (scores * scale).masked_fill(~both, -math.inf)
            scores = scores.view(*scores.shape[:2], -1, cells[0], num_kv, cells[1])
            scores = scores.logsumexp((3, 5))
        scores = scores.nan_to_num(math.inf, posinf=math.inf, neginf=-math.inf)
        best = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
        out[:, first:last, :, :count] = best.sort(dim=-1).values


def add_gated_reference(
    out: torch.Tensor, gate: torch.Tensor, coarse: torch.Tensor, tiles: Tiles
) -> torch.Tensor:
    """Return `out` plus `gate` times the value of every token's tile, rounded once.

    Args:
        out: [B, S, H, D].
        gate: [B, S, H, D].
        coarse: values of the tiles, [B, H, N, D].
        tiles: the tiles.

    Returns:
        A new tensor like `out`; tokens in no tile are copied.
    """
    compute = torch.promote_types(out.dtype, torch.float32)
    tile = tiles.of_tokens(out.shape[1])
    values = of_tokens(coarse.to(compute), tile)
    added = (out.to(compute) + gate.to(compute) * values).to(out.dtype)
    return torch.where((tile < coarse.shape[2])[:, None, None], added, out)


def of_tokens(values: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
    """Return the value of every token's tile: [B, S, H, D] of [B, H, N, D]; 0 in no tile."""
    rows = torch.nn.functional.pad(values.transpose(1, 2), (0, 0, 0, 0, 0, 1))
    return rows.index_select(1, tile)
