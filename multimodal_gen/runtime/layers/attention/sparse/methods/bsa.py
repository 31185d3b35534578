"""Bidirectional Sparse Attention: fewer queries in every tile, and fewer tiles of keys.

The method is of arXiv:2509.01085. Its authors published no code; the rule here is that of
FastVideo's `bsa_attn` (2f3d407), whose names the parameters have. A tile has 4 x 4 x 4 tokens, of
which the one in the middle of their order is c, and r is `query_keep_ratio`:

    computed(i) = the max(1, floor(r n)) of the n queries of tile i with the least cos(q, q_c)
    qbar_i      = the mean of the computed queries of tile i, kbar_j that of all keys of tile j
    p_ij        = softmax over j of s qbar_i.kbar_j, with s the scale
    kept(i)     = tile j if the tiles with a larger p_ij hold less than `kv_cumulative_threshold`
                  together, and the `min_kv_blocks` best

Every other query takes the output of the computed one that is nearest in the order of its tile,
and of two the earlier one. Text is attended to by everything, and attends to everything.

What differs from them, or is easily missed:

- The middle query is like itself, so it is never computed unless all are, or n is 1.
- FastVideo refuses grids that are not of whole tiles, and has neither text, nor masks, nor fewer
  key heads. Here tiles at the edges may be cut short, and n is then smaller. Tokens that a mask
  leaves out are in no tile: n counts the others, and the middle is that of the others. Each is
  computed for itself, because a mask of keys alone leaves its query in.
- At a threshold of 1 all tiles are kept; a sum in floating point may reach 1 before the last.
- A query that is not computed has no gradient; the output's goes to the one that stands for it.
- Its density counts the pairs of computed queries alone. A kernel saves the time of the others
  where tiles are larger than its own rows, of which there are 64 to 128.
- The paper seeks similar queries in windows inside of a tile, takes the threshold from the mean
  and the deviation of a row's scores, and lets the sparsity grow while it trains. FastVideo has
  none of these, and there is no public code of them, so they are not here. Ratios may change over
  the steps of a run.

Shapes: B batch, H heads, D head size, R and N tiles of queries and of keys, V tokens of the video,
L places of a tile.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

from multimodal_gen.kernels.engine import BLOCK_SPARSE, recording_gradients
from multimodal_gen.kernels.select.row_reference import inverse_of
from multimodal_gen.kernels.tile_order.api import gather_tokens
from multimodal_gen.runtime.layers.attention.backends.engine import engine_variants
from multimodal_gen.runtime.layers.attention.config import (
    Ratio,
    SparseConfig,
    Tail,
    in_decimals,
    option,
    ratio_now,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.method import SPARSE_FEATURES, SparseBackend
from multimodal_gen.runtime.layers.attention.sparse.router import (
    BlockStats,
    Budget,
    Cut,
    Limits,
    Router,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    ComputedQueries,
    SparseCall,
    TiledSequence,
    by_heads,
)
from multimodal_gen.runtime.layers.attention.sparse.windows import Window
from multimodal_gen.runtime.platforms import AttentionBackendEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class BsaConfig(SparseConfig):
    """Parameters of `bsa_attn`.

    Attributes:
        query_keep_ratio: share of the queries of a tile that are computed, one at least; the others
            take the output of one that is. It may change over the steps: {0: 1.0, 0.2: 0.5}.
        kv_cumulative_threshold: share of the mass of a row over the means of tiles that the kept
            tiles hold at least. It may change over the steps, too.
        min_kv_blocks: tiles of keys that every tile of queries keeps at least.
        tile_size: tokens per tile along (time, height, width).
        tail: what becomes of tiles that are not kept: `none` drops them; `pooled` counts each by
            the mean of its keys and values.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    query_keep_ratio: Ratio = option(
        0.5, "share of a tile's queries to compute", aliases=("bsa_query_keep_ratio",), ge=0, le=1
    )
    kv_cumulative_threshold: Ratio = option(
        0.9,
        "share of a row's mass that kept tiles hold",
        aliases=("bsa_kv_cumulative_threshold",),
        ge=0,
        le=1,
    )
    min_kv_blocks: int = option(4, "tiles to keep at least", aliases=("bsa_min_kv_blocks",), ge=1)
    tile_size: tuple[int, ...] = option(
        (4, 4, 4), "tokens per tile along time, height, width", ge=1, length=3
    )
    tail: Tail = tail_option()  # noqa: RUF009 - it returns a field
    kernel: Literal["auto", "gluon", "triton", "reference"] = option("auto", "kernel that runs")


class BsaRouter(Router[BsaConfig]):
    """The tiles that hold most of a row's mass, for the queries that are least like the middle."""

    chooses = "map"

    def cut(self, settings: BsaConfig, grid: Window) -> Cut:
        """Return the tiles."""
        return Cut(settings.tile_size)

    def budget(self, settings: BsaConfig, blocks: int, tokens: int) -> Budget | None:
        """Return all tiles where none is left out; else their mass decides."""
        everything = ratio_now(settings.kv_cumulative_threshold) == 1
        return Budget(blocks, blocks) if everything or settings.min_kv_blocks >= blocks else None

    def density(self, settings: BsaConfig, blocks: int, tokens: int) -> float | None:
        """Return 1 where all tiles are kept for all queries."""
        if ratio_now(settings.query_keep_ratio) < 1:
            return None
        return super().density(settings, blocks, tokens)

    def limits(self, settings: BsaConfig) -> Limits:
        """Return why queries are compared in one process, and in one call."""
        if settings.query_keep_ratio == 1:
            return Limits()
        return Limits(
            ring="`query_keep_ratio` below 1 compares all queries of a tile, which ranks may cut",
            cache="`query_keep_ratio` below 1 compares the queries of a whole video",
        )

    def prune(
        self, settings: BsaConfig, call: SparseCall, queries: TiledSequence
    ) -> ComputedQueries | None:
        """Return the queries of every tile that are least like the one in its middle."""
        ratio = ratio_now(settings.query_keep_ratio)
        if ratio == 1:
            return None
        with recording_gradients(False):
            return _computed(call, queries, in_decimals(ratio).limit_denominator(10**6))

    def choose(self, settings: BsaConfig, stats: BlockStats, budget: Budget | None) -> torch.Tensor:
        """Return the tiles that are kept."""
        mass, least = ratio_now(settings.kv_cumulative_threshold), settings.min_kv_blocks
        if budget is not None:
            if mass < 1 and stats.layout is not None:  # a cache will have more
                self.layer.warnings.warn(
                    f"{self.layer.label} of {self.layer.component or 'a layer'} leaves no keys "
                    f"out: the latent grid {stats.layout.grid} has no more tiles than "
                    f"`min_kv_blocks`, {least}"
                )
            return stats.mark_best(budget.kept)
        return stats.mark_by_scores(partial(_holding, mass=mass, least=least))


def _holding(scores: torch.Tensor, mass: float, least: int) -> torch.Tensor:
    """Return the best tiles up to the one that completes a mass, bool like scores [B, h, R, N]."""
    shares, order = scores.softmax(-1).sort(dim=-1, descending=True, stable=True)
    held = F.pad(shares.cumsum(-1)[..., :-1], (1, 0)) < mass
    held[..., :least] = True
    return torch.zeros_like(held).scatter_(-1, order, held)


def _computed(call: SparseCall, queries: TiledSequence, share: Fraction) -> ComputedQueries:
    """Return which share of the queries of every tile is computed; does not wait for the device."""
    order, index = queries.order, queries.index
    device, (num, room) = index.device, (len(order.starts), order.largest)
    slots = torch.arange(room, device=device)
    token = index[(order.starts[:, None] + slots).clamp_max(order.num_tokens - 1).long()]
    inside = (slots < order.lengths[:, None]).unsqueeze(0)  # [B|1, N, L]
    real = inside if call.mask is None else inside & call.mask[:, token.long()]
    masked = (inside & ~real).unsqueeze(1)  # queries all the same where keys alone are masked
    sizes = real.sum(-1)
    counts = (sizes * share.numerator // share.denominator).clamp_min(1).minimum(sizes)
    middle = (real & (real.cumsum(-1) == (sizes // 2 + 1).unsqueeze(-1))).int().argmax(-1)
    tile, place = order.places()

    def chosen(heads: slice) -> torch.Tensor:
        (tokens,) = gather_tokens((call.query[:, :, heads],), token.flatten())
        tokens = torch.unflatten(tokens.transpose(1, 2), 2, (num, room)).float()  # [B, h, N, L, D]
        batch, some, *_, size = tokens.shape
        centre = middle[:, None, :, None, None].expand(batch, some, -1, 1, size)
        alike = F.cosine_similarity(tokens, tokens.gather(3, centre), dim=-1)
        ranks = alike.masked_fill(~real.unsqueeze(1), torch.inf).argsort(dim=-1, stable=True)
        compared = inverse_of(ranks) < counts[:, None, :, None]
        first = torch.where(compared, 0, 2 - masked.int()).argsort(dim=-1, stable=True)
        found = token.expand_as(first).gather(-1, first)
        source = inverse_of(first).gather(-1, torch.where(masked, slots, _nearest(compared)))
        both = torch.stack((found, source + order.starts[:, None]), dim=-1).int()
        return both[:, :, tile, place]

    each = call.query[:, 0, 0].numel() * num * room
    both = by_heads(call.query.shape[2], each, chosen)
    index, source = (x.contiguous() for x in both.unbind(-1))
    every = counts + masked[:, 0].sum(-1)
    return ComputedQueries(index=index, source=source, counts=every.int(), compared=counts.int())


def _nearest(marked: torch.Tensor) -> torch.Tensor:
    """Return the nearest marked place of every place along the last dimension, the first of two.

    Where nothing is marked, any place.
    """
    room = marked.shape[-1]
    at = torch.arange(room, device=marked.device)
    before = torch.where(marked, at, -room).cummax(-1).values
    behind = torch.where(marked, at, 2 * room).flip(-1).cummin(-1).values.flip(-1)
    return torch.where(at - before <= behind - at, before, behind).clamp(0, room - 1)


class BsaBackend(SparseBackend):
    """Bidirectional Sparse Attention."""

    backend = AttentionBackendEnum.BSA_ATTN
    summary = "BSA: tiles that hold a row's mass, for a share of every tile's queries"
    config_cls = BsaConfig
    router = BsaRouter
    variants = engine_variants(BLOCK_SPARSE, SPARSE_FEATURES, plans=("ragged",))
