"""Inputs with blocks that hardly count, and attention that leaves them out, block by block.

Shapes: B batch, S tokens, H heads, D head size.
"""

import math
from collections.abc import Sequence

import torch


def peaked_inputs(
    total: int,
    heads: int,
    head_size: int,
    block: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v, [1, S, H, D], whose blocks of keys differ in how large their scores are.

    Args:
        total: S.
        heads: H.
        head_size: D.
        block: tokens of a block.
        dtype: of the tensors.
        seed: of what is drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, total, heads, head_size, generator=generator)
    number = torch.arange(total) // block
    # Every query likes one direction; keys point along it by how their block is numbered.
    q[..., 0] = math.sqrt(head_size)
    k[..., 0] = ((number * 5 + 2) % 7 - 3).float()[None, :, None] * 2.0
    return q.to(dtype), k.to(dtype), v.to(dtype)


def attend_naively(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: int, below: float
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return what `attend_blocks` does with regular blocks of so many rows and keys."""
    blocks = [range(i, min(i + block, q.shape[1])) for i in range(0, q.shape[1], block)]
    return attend_blocks(q, k, v, blocks, blocks, below)


def nearest_scores(
    q: torch.Tensor, k: torch.Tensor, rows: Sequence[Sequence[int]], keys: Sequence[Sequence[int]]
) -> list[float]:
    """Return how far the best of each block of keys lies above what its rows have seen before.

    Args:
        q: [1, S, H, D].
        k: [1, S, Hkv, D].
        rows: the blocks of queries.
        keys: the blocks of keys, in the order they are attended to.

    Returns:
        A difference of scores in nats for every head, block of rows and block of keys but the
        first; the largest of those of the rows.
    """
    found: list[float] = []
    for h in range(q.shape[2]):
        key = k[0, :, h * k.shape[2] // q.shape[2]].double()
        for block in rows:
            scores = (q[0, list(block), h].double() @ key.T) * q.shape[3] ** -0.5
            best = torch.stack([scores[:, list(each)].amax(1) for each in keys], dim=1)
            found += (best[:, 1:] - best.cummax(1).values[:, :-1]).amax(0).tolist()
    return found


def attend_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    row_blocks: Sequence[Sequence[int]],
    key_blocks: Sequence[Sequence[int]],
    below: float,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return out, log-sum-exp, and how many blocks were left out, by a loop in float64.

    Args:
        q: [1, S, H, D].
        k: [1, S, Hkv, D].
        v: [1, S, Hkv, D].
        row_blocks: the blocks of queries; the output of others is zero.
        key_blocks: the blocks of keys, in the order they are attended to.
        below: decibels; see `Skip`.
    """
    heads, total = q.shape[2], q.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.zeros((1, heads, total), dtype=torch.float64)
    limit, skipped = below * math.log(10.0) / 10.0, 0
    for h in range(heads):
        group = h * k.shape[2] // heads
        for rows in map(list, row_blocks):
            scores = (q[0, rows, h].double() @ k[0, :, group].double().T) * q.shape[3] ** -0.5
            highest = torch.full((len(scores),), -torch.inf, dtype=torch.float64)
            kept: list[int] = []
            for keys in map(list, key_blocks):
                most = scores[:, keys].amax(1)
                if bool((most <= highest - limit).all()):
                    skipped += 1
                    continue
                highest = torch.maximum(highest, most)
                kept += keys
            out[0, rows, h] = scores[:, kept].softmax(-1) @ v[0, kept, group].double()
            lse[0, h, rows] = scores[:, kept].logsumexp(-1)
    return out, lse, skipped
