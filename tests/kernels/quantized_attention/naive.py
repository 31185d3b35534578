"""8-bit attention as its papers define it, for one query row and one tile at a time, in float64."""

import math

import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from tests.helpers.block_plans import dense_mask


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Pad the channels [..., D] with zeros to 64 or 128, and rotate them."""
    size = 64 if x.shape[-1] <= 64 else 128
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    padded = torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    return padded @ torch.tensor(signs, dtype=x.dtype) / math.sqrt(size)


def tiles_of(plan: BlockPlan, b: int, h: int, tile: int) -> list[list[int]]:
    """Return the keys of every tile: each block is cut on its own."""
    starts, lengths = plan.kv.bounds(plan.device)
    found = []
    for j in range(plan.kv.num):
        first = int(starts[min(b, starts.shape[0] - 1), min(h, starts.shape[1] - 1), j])
        length = int(lengths[min(b, lengths.shape[0] - 1), min(h, lengths.shape[1] - 1), j])
        keys = list(range(first, first + length))
        found += [keys[i : i + tile] for i in range(0, length, tile)]
    return found


def sampled(blocks: Blocks, b: int, h: int, tile: int) -> list[int]:
    """Return the rows of 512 slots, spread evenly, without those that are empty."""
    size = -(-blocks.size // tile) * tile
    total = blocks.num * size
    if blocks.is_regular and size == blocks.size:
        total = -(-blocks.total // tile) * tile
    starts, lengths = (
        x[min(b, x.shape[0] - 1), min(h, x.shape[1] - 1)].tolist()
        for x in blocks.bounds(torch.device("cpu"))
    )
    places = [divmod(total * (i * 512 + i * 317 % 512) // 512**2, size) for i in range(512)]
    return [starts[block] + inside for block, inside in places if inside < lengths[block]]


def shrink(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return p, by which queries shrink along what they have in common: of rows, [D]."""
    common = queries.mean(0)
    unit = common / common.norm()
    variance = (queries - common).square().mean()
    along = (keys @ unit).square()
    share = max(along.mean(), along.max() * 512 / len(keys) / 9) / keys.square().mean()
    stretch = min(8.0, float((1 + common @ common / variance) / share**2) ** (3 / 16))
    return unit * math.sqrt(1 - 1 / stretch) if stretch >= 1.25 else torch.zeros_like(unit)


def naive_quantised(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: BlockPlan,
    scale: float,
    *,
    tile: int,
    e4m3: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return out and lse of quantised inputs, and sum_j p_j |v_j|, all float64.

    Weights are not rounded. Shapes: [B, S, H, D], [B, H, S] and [B, S, H, D].
    """
    batch, queries, heads, size = q.shape
    group = heads // k.shape[2]
    out = torch.zeros(batch, queries, heads, size, dtype=torch.float64)
    bound = torch.zeros_like(out)
    lse = torch.full((batch, heads, queries), -math.inf, dtype=torch.float64)
    mask = dense_mask(plan, batch, heads)
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, :, h // group].double(), v[b, :, h // group].double()
            cut = tiles_of(plan, b, h // group, tile)
            seen = sampled(plan.kv, b, h // group, tile)
            mean = keys[seen].mean(0)
            alike = [
                q[b, sampled(plan.q, b, each, tile), each].double()
                for each in range(h // group * group, h // group * group + group)
            ]
            p = shrink(torch.cat(alike), keys[seen] - mean)
            inverse = torch.linalg.inv(torch.eye(size).double() - torch.outer(p, p))
            key_8, value_8 = torch.zeros_like(rotate(keys)), torch.zeros_like(values)
            for one in filter(None, cut):
                smooth = rotate((keys[one] - mean) @ inverse)
                step = smooth.abs().max().clamp_min(1e-12) / 127
                key_8[one] = step * torch.round(smooth / step)
                value_8[one] = values[one]
                if e4m3:
                    step = values[one].abs().max().clamp_min(1e-12) / 448
                    small = (values[one] / step).float().to(torch.float8_e4m3fn)
                    value_8[one] = step * small.double()
            for row in range(queries):
                seen = mask[b, h, row]
                if not seen.any():
                    continue
                query = q[b, row, h].double()
                rotated = rotate(query - (query @ p) * p)
                step = rotated.abs().max().clamp_min(1e-12) / 127
                scores = scale * (key_8[seen] @ (step * torch.round(rotated / step)))
                weights = scores.softmax(0)
                out[b, row, h] = weights @ value_8[seen]
                bound[b, row, h] = weights @ value_8[seen].abs()
                lse[b, h, row] = scores.logsumexp(0) + scale * (query @ mean)
    return out, lse, bound
