"""Which tiles of past chunks a tile of queries chooses, by definition and in float64.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTiles:
    """Where the tokens of some chunks lie, chunk after chunk, each in raster order.

    Attributes:
        tile: int64 [S], the number of every token's tile, counted over all chunks.
        cell: int64 [S], the number of every token's cell, `cells` to a tile.
        cells: cells of a tile.
    """

    tile: torch.Tensor
    cell: torch.Tensor
    cells: int

    @property
    def num(self) -> int:
        """How many tiles there are."""
        return int(self.tile.max()) + 1


def token_tiles(
    frames: Sequence[int],
    grid: tuple[int, int],
    tile: tuple[int, int],
    *,
    cells: int = 1,
    longest: int | None = None,
) -> TokenTiles:
    """Return where the tokens of chunks lie whose tiles have all of their frames.

    Args:
        frames: latent frames of every chunk.
        grid: (height, width) of a frame in tokens.
        tile: (height, width) of a tile.
        cells: cells of a tile, each of ceil(tokens of a full tile / cells) tokens.
        longest: frames of a full tile; those of the longest chunk by default.
    """
    across = -(-grid[1] // tile[1])
    rows, columns = torch.arange(grid[0]) // tile[0], torch.arange(grid[1]) // tile[1]
    of_frame = (rows[:, None] * across + columns).flatten()
    num = int(of_frame.max()) + 1
    height, width = (min(edge, size) for edge, size in zip(tile, grid, strict=True))
    tokens_of_cell = -(-(longest or max(frames)) * height * width // cells)
    tiles, places = [], []
    for number, count in enumerate(frames):
        of_chunk = of_frame.repeat(count)
        before = torch.nn.functional.one_hot(of_chunk).cumsum(0)
        places.append(before.gather(1, of_chunk[:, None])[:, 0] - 1)
        tiles.append(of_chunk + number * num)
    found = torch.cat(tiles)
    return TokenTiles(
        tile=found, cell=found * cells + torch.cat(places) // tokens_of_cell, cells=cells
    )


def best_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    q_tiles: TokenTiles,
    k_tiles: TokenTiles,
    kept: int,
    *,
    scale: float,
) -> torch.Tensor:
    """Return whether a key's tile is among the best of the query's: bool [B, H, Sq, Sk].

    The score of two tiles is the log-sum-exp of scale * q.k over the means of their cells.

    Args:
        q: [B, Sq, H, D].
        k: [B, Sk, Hkv, D].
        q_tiles: where the queries lie.
        k_tiles: where the keys lie.
        kept: tiles of keys that a tile of queries keeps.
        scale: factor of the scores.
    """
    means, empty = [], []
    for x, side in ((q, q_tiles), (k, k_tiles)):
        num = side.num * side.cells
        member = torch.nn.functional.one_hot(side.cell, num).double().to(x.device)
        count = member.sum(0)
        means.append(torch.einsum("bshd,sn->bhnd", x.double(), member / count.clamp_min(1)))
        empty.append(count == 0)
    keys = means[1].repeat_interleave(q.shape[2] // k.shape[2], dim=1)
    scores = (means[0] @ keys.mT * scale).masked_fill(empty[0][:, None] | empty[1], -torch.inf)
    cells = (q_tiles.num, q_tiles.cells, k_tiles.num, k_tiles.cells)
    ranked = scores.view(*scores.shape[:2], *cells).logsumexp((3, 5))
    keep = torch.zeros_like(ranked, dtype=torch.bool)
    keep.scatter_(-1, ranked.topk(kept, dim=-1).indices, True)
    return keep[:, :, q_tiles.tile][..., k_tiles.tile]


def tile_means(x: torch.Tensor, tiles: TokenTiles) -> torch.Tensor:
    """Return the mean of every tile of [B, S, H, D], [B, H, N, D] in float64."""
    member = torch.nn.functional.one_hot(tiles.tile, tiles.num).double().to(x.device)
    return torch.einsum("bshd,sn->bhnd", x.double(), member / member.sum(0))


def near_tiles(q_tiles: TokenTiles, k_tiles: TokenTiles, reach: int) -> torch.Tensor:
    """Return whether tiles lie at most `reach` apart, bool [Nq, Nk]; queries are the last keys."""
    own = torch.arange(q_tiles.num) + k_tiles.num - q_tiles.num
    return (own[:, None] - torch.arange(k_tiles.num)).abs() <= reach


def selected_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    own: torch.Tensor,
    k_tiles: TokenTiles,
    *,
    topk: int | None = None,
    threshold: float = 0.0,
) -> torch.Tensor:
    """Return the tiles that every query selects as V-MoBA does, bool [B, H, Sq, Nk].

    Its own, and the best ones of the others by the means of their keys: so many in all, or, best
    first, until their share of the row's scores, moved and stretched to [0, 1], reaches a
    threshold; at least one then.

    Args:
        q: [B, Sq, H, D].
        k: [B, Sk, Hkv, D].
        own: int64 [Sq], every query's own tile.
        k_tiles: where the keys lie.
        topk: how many; None to go by `threshold`.
        threshold: share of the scores.
    """
    means = tile_means(k, k_tiles).repeat_interleave(q.shape[2] // k.shape[2], dim=1)
    scores = q.double().transpose(1, 2) @ means.mT
    if topk is not None:
        best = scores.scatter(-1, own.expand(scores.shape[:3])[..., None], torch.inf).topk(topk)
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best.indices, True)
    flat, chosen = scores.flatten(0, 1), torch.zeros(scores.flatten(0, 1).shape, dtype=torch.bool)
    for head, row in ((h, r) for h in range(len(flat)) for r in range(flat.shape[1])):
        line, mine = flat[head, row], int(own[row])
        chosen[head, row, mine] = True
        others = [int(j) for j in line.argsort(descending=True) if int(j) != mine]
        mass = (line - line.min()) / (line.max() - line.min())
        total, reached = mass.sum(), mass[mine]
        for number, other in enumerate(others):
            if number and reached >= threshold * total:
                break
            chosen[head, row, other] = True
            reached = reached + mass[other]
    return chosen.view(scores.shape)


def attention_with_tail(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_tiles: TokenTiles,
    kept: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Return attention in float64 in which tiles that are not kept count by their means.

    Args:
        q: [B, Sq, H, D].
        k: [B, Sk, Hkv, D].
        v: [B, Sk, Hkv, D].
        k_tiles: where the keys lie.
        kept: bool [B, H, Sq, Nk], the tiles that every query keeps.
        scale: factor of the scores.
    """
    group = q.shape[2] // k.shape[2]
    keys, values, means, mean_values = (
        x.repeat_interleave(group, dim=1)
        for x in (
            k.double().transpose(1, 2),
            v.double().transpose(1, 2),
            tile_means(k, k_tiles),
            tile_means(v, k_tiles),
        )
    )
    queries = q.double().transpose(1, 2)
    counts = torch.bincount(k_tiles.tile, minlength=k_tiles.num).double().to(q.device)
    tokens = (queries @ keys.mT * scale).masked_fill(~kept[..., k_tiles.tile], -torch.inf)
    pooled = (queries @ means.mT * scale + counts.log()).masked_fill(kept, -torch.inf)
    weights = torch.cat((tokens, pooled), dim=-1).softmax(-1)
    return (weights @ torch.cat((values, mean_values), dim=2)).transpose(1, 2)
