"""Inputs with blocks that hardly count, and attention that leaves them out, block by block.

Shapes: B batch, S tokens, H heads, D head size.
"""

import math

import torch


def peaked_inputs(
    total: int, heads: int, head_size: int, block: int, *, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v, [1, S, H, D], whose blocks of keys differ in how large their scores are.

    Args:
        total: S.
        heads: H.
        head_size: D.
        block: tokens of a block.
        dtype: of the tensors.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, total, heads, head_size, generator=generator)
    number = torch.arange(total) // block
    # Every query likes one direction; keys point along it by how their block is numbered.
    q[..., 0] = math.sqrt(head_size)
    k[..., 0] = ((number * 5 + 2) % 7 - 3).float()[None, :, None] * 2.0
    return q.to(dtype), k.to(dtype), v.to(dtype)


def attend_naively(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: int, below: float
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return out, log-sum-exp, and how many blocks were left out, by a loop in float64.

    Args:
        q: [1, S, H, D].
        k: [1, S, H, D].
        v: [1, S, H, D].
        block: rows and keys of a block.
        below: decibels; see `Skip`.
    """
    heads, total = q.shape[2], q.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.zeros((1, heads, total), dtype=torch.float64)
    limit, skipped = below * math.log(10.0) / 10.0, 0
    for h in range(heads):
        for first in range(0, total, block):
            rows = slice(first, first + block)
            scores = (q[0, rows, h].double() @ k[0, :, h].double().T) * q.shape[3] ** -0.5
            highest = torch.full((len(scores),), -torch.inf, dtype=torch.float64)
            kept: list[int] = []
            for start in range(0, total, block):
                most = scores[:, start : start + block].amax(1)
                if bool((most <= highest - limit).all()):
                    skipped += 1
                    continue
                highest = torch.maximum(highest, most)
                kept += range(start, min(start + block, total))
            out[0, rows, h] = scores[:, kept].softmax(-1) @ v[0, kept, h].double()
            lse[0, h, rows] = scores[:, kept].logsumexp(-1)
    return out, lse, skipped
