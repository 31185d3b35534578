"""Random block plans, plans of windows, and the dense mask that a plan means."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from multimodal_gen.kernels.block_sparse.plan import WORD_BITS, BlockPlan, Blocks
from multimodal_gen.runtime.layers.attention.sparse.windows import (
    Window,
    effective_window,
    kept_indices,
    tile_count,
)

FORMS = ("regular", "padded", "ragged")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanShape:
    """What `random_plan` draws.

    Attributes:
        batch: B of the plan's tensors; 1 broadcasts.
        heads: H of the plan's tensors; 1 broadcasts.
        num_q: query blocks.
        num_kv: key blocks.
        q_size: rows of a query block, or their upper bound.
        kv_size: keys of a key block, or their upper bound.
        q_form: "regular", "padded" or "ragged".
        kv_form: the same for the keys.
        keep: share of the blocks that is kept, in [0, 1]; 0 keeps none.
        row_bits: whether rows choose among the blocks.
    """

    batch: int = 1
    heads: int = 1
    num_q: int = 2
    num_kv: int = 3
    q_size: int = 64
    kv_size: int = 64
    q_form: str = "regular"
    kv_form: str = "regular"
    keep: float = 0.5
    row_bits: bool = False


def random_plan(shape: PlanShape, *, seed: int, device: torch.device | str = "cpu") -> BlockPlan:
    """Return a plan drawn from `seed`, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    q = _random_blocks(shape, shape.num_q, shape.q_size, shape.q_form, generator)
    kv = _random_blocks(shape, shape.num_kv, shape.kv_size, shape.kv_form, generator)
    draws = torch.rand(shape.batch, shape.heads, q.num, kv.num, generator=generator)
    plan = BlockPlan.from_map(draws < shape.keep, q, kv)
    if not shape.row_bits:
        return plan.to(device)
    words = -(-kv.num // WORD_BITS)
    bits = torch.randint(
        -(2**31), 2**31, (shape.batch, shape.heads, q.total, words), generator=generator
    )
    plan = BlockPlan(
        indices=plan.indices, counts=plan.counts, q=q, kv=kv, row_bits=bits.to(torch.int32)
    )
    return plan.to(device)


def plan_by_bits(shape: PlanShape, *, seed: int) -> BlockPlan:
    """Return a plan that lists every block, once for all heads, of which rows choose by bits."""
    drawn = random_plan(shape, seed=seed)
    every = BlockPlan.dense(drawn.q, drawn.kv, "cpu")
    return BlockPlan(
        indices=every.indices,
        counts=every.counts,
        q=every.q,
        kv=every.kv,
        row_bits=drawn.row_bits,
    )


def _random_blocks(
    shape: PlanShape, num: int, size: int, form: str, generator: torch.Generator
) -> Blocks:
    if form == "regular":
        short = int(torch.randint(0, size, (), generator=generator))
        return Blocks.regular(num * size - short, size)
    lengths = torch.randint(0, size + 1, (shape.batch, shape.heads, num), generator=generator)
    if form == "padded":
        return Blocks.padded(lengths.int(), size)
    # Blocks lie in a random order; some touch, some leave a gap.
    gaps = torch.randint(0, 9, lengths.shape, generator=generator)
    gaps = gaps * (torch.rand(lengths.shape, generator=generator) < 0.5)
    places = torch.rand(lengths.shape, generator=generator).argsort(-1)
    ends = (lengths + gaps).gather(-1, places).cumsum(-1)
    starts = torch.empty_like(lengths).scatter_(-1, places, ends) - lengths
    total = int(ends.max()) + 1
    return Blocks.ragged(starts.int(), lengths.int(), total=total, size=size)


def dense_mask(plan: BlockPlan, batch: int, heads: int) -> torch.Tensor:
    """Return what `plan` keeps: bool [B, H, Sq, Sk], written one block at a time."""
    mask = torch.zeros(batch, heads, plan.q.total, plan.kv.total, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            queries, keys = block_ranges(plan.q, b, h), block_ranges(plan.kv, b, h)
            for i, (first, last) in enumerate(queries):
                count = int(_at(plan.counts, b, h)[i])
                for j in _at(plan.indices, b, h)[i, :count].tolist():
                    rows = mask[b, h, first:last]
                    rows[:, keys[j][0] : keys[j][1]] = True
                    if plan.row_bits is not None:
                        words = _at(plan.row_bits, b, h)[first:last, j // WORD_BITS].tolist()
                        chosen = [(word >> (j % WORD_BITS)) & 1 == 1 for word in words]
                        rows[:, keys[j][0] : keys[j][1]] &= torch.tensor(
                            chosen, dtype=torch.bool
                        ).view(-1, 1)
    if plan.causal:
        mask = mask.tril(plan.kv.total - plan.q.total)
    return mask.to(plan.device)


def _at(tensor: torch.Tensor, b: int, h: int) -> torch.Tensor:
    return tensor[min(b, tensor.shape[0] - 1), min(h, tensor.shape[1] - 1)].cpu()


def block_ranges(blocks: Blocks, b: int, h: int) -> list[tuple[int, int]]:
    """Return the first row of every block of a batch entry and head, and the row behind it."""
    ranges = []
    for i in range(blocks.num):
        first, length = i * blocks.size, min(blocks.size, blocks.total - i * blocks.size)
        if blocks.starts is not None:
            first = int(_at(blocks.starts, b, h)[i])
        if blocks.lengths is not None:
            length = int(_at(blocks.lengths, b, h)[i])
        ranges.append((first, first + length))
    return ranges


def tile_lists(
    windows: Sequence[Window],
    tiles: Window,
    *,
    query_text: int = 0,
    key_text: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return the lists of a block-sparse plan over video tiles followed by blocks of text.

    Text keys are on every list, and the lists of text queries hold everything.

    Args:
        windows: one window per head.
        tiles: tiles along each axis.
        query_text: blocks of text behind the N video tiles of the queries.
        key_text: the same for keys.
        device: where the lists are made.

    Returns:
        indices int32 [1, H|1, N + query_text, Kmax], counts int32 [1, H|1, N + query_text], and
        whether all counts are equal. With one window for all heads their dimension is 1.
    """
    effective = [effective_window(window, tiles) for window in windows]
    distinct = sorted(set(effective))
    num = tiles[0] * tiles[1] * tiles[2]
    kept = [tile_count(window, tiles) for window in distinct]
    room = (num if query_text else max(kept)) + key_text
    shape = (len(distinct), num + query_text)
    indices = torch.zeros(*shape, room, dtype=torch.int32, device=device)
    counts = torch.full(shape, room, dtype=torch.int32, device=device)
    every = torch.arange(num + key_text, dtype=torch.int32, device=device)
    for i, window in enumerate(distinct):
        indices[i, :num, : kept[i]] = kept_indices(window, tiles)
        indices[i, :num, kept[i] : kept[i] + key_text] = every[num:]
        counts[i, :num] = kept[i] + key_text
    if query_text:
        indices[:, num:] = every
    if len(distinct) > 1:
        of_head = torch.tensor([distinct.index(w) for w in effective], device=device)
        indices, counts = indices[of_head], counts[of_head]
    uniform = len({*kept, *([num] if query_text else ())}) == 1
    return indices.unsqueeze(0), counts.unsqueeze(0), uniform
