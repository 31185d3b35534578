"""FlexAttention's block masks as plans of the engine, made once per mask.

A block mask lists which blocks are seen wholly and which in part, and has a function that tells the
latter token by token. That function is evaluated on the partial blocks alone, never on all pairs.

Where tokens can be cut into few segments that see each other as wholes, as chunks and documents
can, the plan is that of the segments, without any mask. Where they cannot, as in windows that move
token by token, whole blocks are one plan and the partial ones another, in which every row chooses
among runs of keys by its bits; the two are merged by their log-sum-exps.

Shapes: B batch, H heads, Sq and Sk tokens, Nq and Nk blocks.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.layouts import segment_plan
from multimodal_gen.kernels.block_sparse.plan import WORD_BITS, BlockPlan, Blocks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

AnyBlockMask: TypeAlias = "BlockPlan | BlockMask"
"""What a layer takes as a mask of blocks."""

Plans: TypeAlias = tuple[BlockPlan, ...]

_PLANS = "_multimodal_gen_plans"
_MOST_PAIRS = 1 << 24  # that the function of a mask is evaluated on at a time
_MOST_BITS = 8 << 30  # of rows that choose: 1 GiB


def is_block_mask(mask: object) -> bool:
    """Whether a mask is FlexAttention's `BlockMask`, without importing that where it is not."""
    if isinstance(mask, torch.Tensor) or type(mask).__name__ != "BlockMask":
        return False
    from torch.nn.attention.flex_attention import BlockMask

    return isinstance(mask, BlockMask)


def apart(
    attn_mask: "torch.Tensor | AnyBlockMask | None",
) -> "tuple[torch.Tensor | None, AnyBlockMask | None]":
    """Return what a layer is given as its mask: a tensor, and a mask of blocks."""
    if isinstance(attn_mask, BlockPlan) or is_block_mask(attn_mask):
        return None, attn_mask  # type: ignore[return-value]  # told apart by name
    return attn_mask, None  # type: ignore[return-value]


def check_block_mask(mask: "BlockMask", batch: int, num_queries: int, num_keys: int) -> None:
    """Refuse a mask of another batch, or for other lengths."""
    given = tuple(getattr(mask, "seq_lengths", (num_queries, num_keys)))
    samples = mask.kv_indices.shape[0]
    if given != (num_queries, num_keys) or samples not in (1, batch):
        raise UsageError(
            f"attn_mask must be a BlockMask for [B|1, Sq, Sk] = {[batch, num_queries, num_keys]}, "
            f"got one for {[samples, *given]}; make it with create_block_mask(mask_mod, B, H, "
            f"Q_LEN, KV_LEN)"
        )


def plans_of(mask: "BlockMask", num_queries: int, num_keys: int) -> Plans:
    """Return the plans whose parts together are what a block mask keeps; disjoint, one or two.

    They are kept with the mask, so that all layers and steps that are given it share them. What
    its function reads must stay as it is, or `forget_plans` be called. The first call waits for
    the device.

    Args:
        mask: the mask; broadcast over samples and heads where it has one of them.
        num_queries: Sq.
        num_keys: Sk.

    Raises:
        UsageError: rows would choose among too many keys.
    """
    if _PLANS not in vars(mask):
        vars(mask)[_PLANS] = _compile(mask, num_queries, num_keys)
    plans: Plans = vars(mask)[_PLANS]
    return plans


def forget_plans(mask: "BlockMask") -> None:
    """Let the next call make the plans of a mask anew, whose function reads what has changed."""
    vars(mask).pop(_PLANS, None)


class _Tiles(NamedTuple):
    """A block mask in maps: bool [B|1, H|1, Nq, Nk], whole and partial, and what cuts it."""

    mask: "BlockMask"
    whole: torch.Tensor
    partial: torch.Tensor
    sizes: tuple[int, int]
    totals: tuple[int, int]

    def see(
        self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        """Return what the function of the mask says of pairs, in the shape they broadcast to."""
        q, k = (x.clamp_max(n - 1) for x, n in zip((q, k), self.totals, strict=True))
        every = torch.ones_like(b + h + q + k, dtype=torch.bool)
        return self.mask.mask_mod(b, h, q, k).bool() & every

    def partial_tiles(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield [P, 4], where partial blocks lie, and what they keep, bool [P, rows, keys]."""
        rows, keys = (torch.arange(size, device=self.partial.device) for size in self.sizes)
        at_a_time = max(1, _MOST_PAIRS // (self.sizes[0] * self.sizes[1]))
        for some in torch.split(self.partial.nonzero(), at_a_time):
            b, h, i, j = (x.view(-1, 1, 1) for x in some.unbind(1))
            q, k = i * self.sizes[0] + rows.view(1, -1, 1), j * self.sizes[1] + keys.view(1, 1, -1)
            yield some, self.see(b, h, q, k) & (q < self.totals[0]) & (k < self.totals[1])


def _compile(mask: "BlockMask", num_queries: int, num_keys: int) -> Plans:
    rows, keys = mask.BLOCK_SIZE
    shape = (-(-num_queries // rows), -(-num_keys // keys))
    partial = _map_of(mask.kv_num_blocks, mask.kv_indices, shape)
    whole = torch.zeros_like(partial)
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        whole = _map_of(mask.full_kv_num_blocks, mask.full_kv_indices, shape)
    whole, partial = whole.expand_as(partial | whole), partial.expand_as(partial | whole)
    tiles = _Tiles(mask, whole, partial & ~whole, (rows, keys), (num_queries, num_keys))
    query_cuts, key_cuts = _cuts(tiles)
    if len(query_cuts) <= 4 * shape[0] and len(key_cuts) <= 4 * shape[1]:
        return (_segments(tiles, query_cuts, key_cuts),)
    return _whole_and_partial(tiles, key_cuts)


def _map_of(counts: torch.Tensor, indices: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return lists as a map, bool [B, H, Nq, Nk]; entries past a count are arbitrary."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    slots = torch.where(listed, indices, shape[1]).long()
    found = torch.zeros(*counts.shape[:-1], shape[0], shape[1] + 1, device=indices.device)
    found[..., : counts.shape[-1], :].scatter_(-1, slots, 1.0)
    return found[..., :-1].bool()


def _cuts(tiles: _Tiles) -> tuple[torch.Tensor, torch.Tensor]:
    """Return first rows and first keys of runs in which no partial block tells tokens apart."""
    found = []
    for total, size in zip(tiles.totals, tiles.sizes, strict=True):
        cut = torch.zeros(total + size, dtype=torch.bool, device=tiles.partial.device)
        cut[:total:size] = True
        found.append(cut)
    for at, kept in tiles.partial_tiles():
        for axis, cut in enumerate(found):
            # Between each row or key and the next.
            tile, place = kept.diff(dim=1 + axis).any(2 - axis).nonzero().unbind(1)
            cut[at[tile, 2 + axis] * tiles.sizes[axis] + place + 1] = True
    query, key = (
        cut[:total].nonzero().flatten() for cut, total in zip(found, tiles.totals, strict=True)
    )
    return query, key


def _segments(tiles: _Tiles, query_cuts: torch.Tensor, key_cuts: torch.Tensor) -> BlockPlan:
    """Return the plan of the runs, those that see and are seen alike joined to segments."""
    device = tiles.partial.device
    b, h = (torch.arange(n, device=device) for n in tiles.partial.shape[:2])
    at = query_cuts // tiles.sizes[0], key_cuts // tiles.sizes[1]
    seen = tiles.see(
        b.view(-1, 1, 1, 1), h.view(-1, 1, 1), query_cuts.view(-1, 1), key_cuts.view(1, -1)
    )
    partial, whole = (x[:, :, at[0]][..., at[1]] for x in (tiles.partial, tiles.whole))
    visible = (seen & partial) | whole
    new_row = (visible[..., 1:, :] != visible[..., :-1, :]).any(-1).any(1).any(0)
    new_key = (visible[..., 1:] != visible[..., :-1]).any(2).any(1).any(0)
    one = new_row.new_ones(1)
    rows, keys = (torch.cat((one, new)).nonzero().flatten() for new in (new_row, new_key))
    return segment_plan(
        _lengths(query_cuts[rows], tiles.totals[0]),
        _lengths(key_cuts[keys], tiles.totals[1]),
        visible[:, :, rows][..., keys],
        device=device,
    )


def _lengths(starts: torch.Tensor, total: int) -> list[int]:
    ends = torch.cat((starts[1:], starts.new_tensor([total])))
    return [int(n) for n in (ends - starts).tolist()]


def _whole_and_partial(tiles: _Tiles, key_cuts: torch.Tensor) -> Plans:
    """Return a plan of the whole blocks, if any, and one of the partial ones by rows' bits."""
    q = Blocks.regular(tiles.totals[0], tiles.sizes[0])
    plans = []
    if bool(tiles.whole.any()):
        kv = Blocks.regular(tiles.totals[1], tiles.sizes[1])
        plans.append(BlockPlan.from_map(tiles.whole, q, kv).longest_first())
    block = key_cuts // tiles.sizes[1]
    lengths = torch.tensor(_lengths(key_cuts, tiles.totals[1]), dtype=torch.int32)
    kv = Blocks.ragged(
        key_cuts.int(), lengths.to(key_cuts.device), total=tiles.totals[1], size=int(lengths.max())
    )
    kept = tiles.partial[..., block]
    most = max(1, int(kept.sum(-1).max()))
    partial = BlockPlan.from_map(kept, q, kv, max_count=most)
    return (*plans, replace(partial, row_bits=_row_bits(tiles, key_cuts)).longest_first())


def _row_bits(tiles: _Tiles, key_cuts: torch.Tensor) -> torch.Tensor:
    """Return which runs of keys each row keeps of its partial blocks: int32 [B, H, Sq, words]."""
    batch, heads = tiles.partial.shape[:2]
    num_words = -(-len(key_cuts) // WORD_BITS)
    needed = batch * heads * tiles.totals[0] * num_words * WORD_BITS
    if needed > _MOST_BITS:
        raise UsageError(
            f"attn_mask must tell apart fewer runs of keys: {batch} x {heads} x {tiles.totals[0]} "
            f"rows that choose among {len(key_cuts)} runs take {needed / 8 / 2**30:.1f} GiB, got "
            f"more than {_MOST_BITS >> 33} GiB; give samples and heads one mask, or use "
            f"torch.nn.attention.flex_attention itself"
        )
    words = key_cuts.new_zeros((batch, heads, tiles.totals[0], num_words), dtype=torch.int32)
    # A run is kept where its first key is.
    run = key_cuts.new_full((tiles.totals[1] + tiles.sizes[1],), -1)
    run[key_cuts] = torch.arange(len(key_cuts), device=run.device)
    for at, kept in tiles.partial_tiles():
        first_key = at[:, 3:] * tiles.sizes[1]
        runs = run[first_key + torch.arange(tiles.sizes[1], device=run.device)]
        tile, row, key = (kept & (runs >= 0).unsqueeze(1)).nonzero().unbind(1)
        chosen, (b, h, i, _) = runs[tile, key], at[tile].unbind(1)
        place = b, h, i * tiles.sizes[0] + row, chosen // WORD_BITS
        bit = torch.ones_like(chosen, dtype=torch.int32) << (chosen % WORD_BITS).int()
        words.index_put_(place, bit, accumulate=True)
    return words
