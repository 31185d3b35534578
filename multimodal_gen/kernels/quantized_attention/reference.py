"""The definition of 8-bit attention in plain PyTorch: any device.

    q' = scale_i round(q P R / scale_i), one scale per row: max|q_i P R| / 127
    k' = scale_t round((k - mean) P^-1 R / scale_t), one scale per tile of keys
    v' = scale_t e4m3(v / scale_t), one scale per tile of keys: max|v_t| / 448

and then block-sparse attention of q', k' and v' in fp32, with scale q . mean added to lse. Kernels
round the weights as well, to e4m3 or to the dtype of 16-bit values. Maxima are taken to be 1e-12
at least: kernels multiply two scales, and masked scores of -inf with the product, which GPUs would
take for zero if it were below 2^-126.

R is orthonormal, so (q R) (k R)^T = q k^T: it changes no score. It spreads channels that stand out,
whose size the scales would follow, over all n channels (QuaRot, arXiv:2404.00456, there for weights
and caches of language models); n is 64 or 128, the size to which heads are padded with zeros:

    R_ij = (-1)^popcount(i & j) / sqrt(n),   0 <= i, j < n

P = I - p p^T changes none, either; by Sherman and Morrison P^-1 = I + p p^T / (1 - |p|^2). It moves
what all queries have in common, u in length and direction, from queries to keys, whose mean is off
already: both are then about as long, and their steps as fine (SmoothQuant, arXiv:2211.10438, there
for channels). Queries become shorter along u by the factor

    1 - |p|^2 = 1 / s,   s = min(8, ((1 + |u|^2 / variance of queries) / r^2)^(3/16))

with r, the variance of keys along u, or a ninth of the largest square where that is more, over the
variance along any channel: no key may make the steps of its tile coarse. With r and an exponent of
1/4 queries and keys that are typical would be as long as each other; keys that queries attend to
are longer along u than those, the more the more they vary, and this errs less. Below s = 5/4 p is
zero, as a mean of few rows is not. All of it comes from `SAMPLE` slots of either side, one in each
of as many even parts, and so does the mean of the keys: any vector may be taken off them.
"""

import math
from dataclasses import replace

import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.reference import attention_reference
from multimodal_gen.kernels.quantized_attention.packed import (
    LEAST_STRETCH,
    MOST_STRETCH,
    SAMPLE,
    Packed,
    Slots,
    in_slots,
    rotation,
)

KEY_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
"""The key at each of 16 places of permuted values."""


def key_mean_reference(k: torch.Tensor, slots: Slots) -> torch.Tensor:
    """Return the mean of the sampled keys of [B, Sk, Hkv, D]: fp32 [B, Hkv, D]."""
    keys, real = _sampled(k, slots)
    return (keys / SAMPLE).sum(2) * (SAMPLE / real.sum(2).clamp_min(1))


def shrink_reference(
    q: torch.Tensor, k: torch.Tensor, mean: torch.Tensor, q_slots: Slots, kv_slots: Slots
) -> torch.Tensor:
    """Return p of the definition above: fp32 [B, Hkv, D]; one for the query heads of a key head.

    Numbers of queries that are not finite count as zeros.
    """
    batch, _, kv_heads, channels = k.shape
    queries, real = (x.reshape(batch, kv_heads, -1, x.shape[3]) for x in _sampled(q, q_slots))
    queries = queries.where(queries.abs() < math.inf, 0.0)
    num = real.sum(2).clamp_min(1)
    common = queries.sum(2) / num
    length = common.square().sum(-1, keepdim=True)
    rest = queries.square().sum((2, 3)).unsqueeze(-1) / num - length
    along = common * length.clamp_min(1e-30).rsqrt()
    keys, real = _sampled(k, kv_slots)
    keys = torch.where(real, keys - mean.unsqueeze(2), 0.0)
    far = (keys * along.unsqueeze(2)).sum(-1).square()
    furthest = far.amax(-1, keepdim=True) * SAMPLE / 9
    spread = torch.maximum(far.sum(-1, keepdim=True), furthest)
    spread = (channels * spread + 1e-30) / (keys.square().sum((2, 3)).unsqueeze(-1) + 1e-30)
    # Queries may all be the same.
    size = 1 + channels * length / torch.maximum(rest, 1e-6 * length).clamp_min(1e-30)
    stretch = (size / spread.square()).pow(3 / 16).clamp_max(MOST_STRETCH)
    return torch.where(stretch >= LEAST_STRETCH, along * (1 - 1 / stretch).clamp_min(0).sqrt(), 0.0)


def _sampled(x: torch.Tensor, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of `SAMPLE` slots, fp32 [B, H, SAMPLE, D], and which are real, [.., 1]."""
    i = torch.arange(SAMPLE, device=x.device)
    slot = slots.total * (i * SAMPLE + i * 317 % SAMPLE) // SAMPLE**2
    batch, _, heads, head_size = x.shape
    row, real = (
        t[..., slot].expand(batch, heads, -1).unsqueeze(-1) for t in _rows(slots, x.device)
    )
    taken = x.float().transpose(1, 2).gather(2, row.expand(-1, -1, -1, head_size))
    return taken.masked_fill(~real, 0.0), real


def _rows(slots: Slots, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row and reality of every slot, [B|1, H|1, slots]."""
    starts, lengths = slots.blocks.bounds(device)
    slot = torch.arange(slots.total, device=device)
    block = (slot // slots.size).clamp_max(slots.blocks.num - 1)
    inside = slot - block * slots.size
    real = inside < lengths[..., block]
    return torch.where(real, starts[..., block] + inside, 0), real


def _in_slots(x: torch.Tensor, slots: Slots) -> torch.Tensor:
    """Gather [B, S, H, D] into slots: fp32 [B, H, slots, D], zero where there is no row."""
    batch, _, heads, head_size = x.shape
    row, real = (t.expand(batch, heads, -1).unsqueeze(-1) for t in _rows(slots, x.device))
    taken = x.float().transpose(1, 2).gather(2, row.expand(-1, -1, -1, head_size))
    return taken.masked_fill(~real, 0.0)


def quantise_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_slots: Slots,
    kv_slots: Slots,
    *,
    scale: float,
    mean: torch.Tensor,
    e4m3: bool,
    permuted: bool,
) -> Packed:
    """Return what the quantising kernel makes; see there for the arguments.

    16-bit values are always copied into slots, [B, slots, Hkv, D].
    """
    width = 64 if q.shape[3] <= 64 else 128
    pad = (0, width - q.shape[3])
    matrix = rotation(width, torch.float32, q.device)
    factor = width**-0.5
    rows = _in_slots(q, q_slots)
    group = q.shape[2] // k.shape[2]
    shift = scale * (rows * mean.repeat_interleave(group, 1).unsqueeze(2)).sum(-1)
    shrink = shrink_reference(q, k, mean, q_slots, kv_slots).unsqueeze(2)
    of_rows = shrink.repeat_interleave(group, 1)
    part = (rows * of_rows).sum(-1, keepdim=True)
    rows = rows - part.where(part.abs() < math.inf, 0.0) * of_rows
    rows = torch.nn.functional.pad(rows, pad) @ matrix
    largest = rows.abs().amax(-1, keepdim=True).clamp_min(1e-12)
    q8 = (rows * (127.0 / largest)).round()
    real = _rows(kv_slots, k.device)[1].unsqueeze(-1)
    keys = _in_slots(k, kv_slots)
    keys = torch.where(real, keys - mean.unsqueeze(2), 0.0)
    inverse = shrink / (1 - shrink.square().sum(-1, keepdim=True))
    keys = keys + (keys * shrink).sum(-1, keepdim=True) * inverse
    keys = torch.nn.functional.pad(keys, pad) @ matrix
    k8, k_scale = _tiles(keys, kv_slots.tile, 127.0, 1e-12)
    k8 = k8.round()
    values = _in_slots(v, kv_slots)
    v_scale = torch.ones_like(k_scale)
    if e4m3:
        values, v_scale = _tiles(values, kv_slots.tile, 448.0, 1e-12)
        if permuted:
            place = torch.arange(kv_slots.total, device=v.device).view(-1, 16)
            values = values[:, :, place[:, torch.tensor(KEY_ORDER)].flatten()]
        values = torch.nn.functional.pad(values, pad).transpose(2, 3).to(torch.float8_e4m3fn)
    else:
        values = values.transpose(1, 2).to(v.dtype)
    return Packed(
        q=q8.to(torch.int8),
        q_scale=largest.squeeze(-1) * (factor * scale / math.log(2.0) / 127.0),
        shift=shift,
        k=k8.to(torch.int8),
        k_scale=k_scale * factor,
        v=values.contiguous(),
        v_scale=v_scale,
        q_slots=q_slots.size,
        keys=kv_slots.tile,
    )


def _tiles(
    x: torch.Tensor, tile: int, most: float, least: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale every tile of [B, H, slots, D] to a largest value of `most`; also return the scales."""
    tiles = x.view(*x.shape[:2], -1, tile, x.shape[3])
    largest = tiles.abs().amax((3, 4), keepdim=True).clamp_min(least)
    return (tiles * (most / largest)).flatten(2, 3), largest[..., 0, 0] / most


def quantized_reference(
    packed: Packed, plan: BlockPlan, q_slots: Slots, head_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of quantised tensors, as `quantise_reference` makes them unpermuted.

    Returns:
        out [B, Sq, H, D] and lse [B, H, Sq], fp32 and natural; 0 and -inf for rows without keys.
    """
    row = packed.q_scale.unsqueeze(-1) * math.log(2.0)
    q = (packed.q.float() * row).transpose(1, 2)
    column = packed.k_scale.repeat_interleave(packed.keys, 2).unsqueeze(-1)
    k = (packed.k.float() * column).transpose(1, 2)
    if packed.v.dtype == torch.float8_e4m3fn:
        v = packed.v.float().transpose(2, 3)
        v = v * packed.v_scale.repeat_interleave(packed.keys, 2).unsqueeze(-1)
        v = v[..., :head_size].transpose(1, 2)
    else:
        v = packed.v.float()
    slotted = in_slots(plan, packed.keys)
    if not q_slots.in_place:
        lengths = plan.q.bounds(plan.device)[1]
        slotted = replace(slotted, q=Blocks.padded(lengths, q_slots.size))
    rows, keys = slotted.q.total, slotted.kv.total
    out, lse = attention_reference(q[:, :rows], k[:, :keys], v[:, :keys], slotted, scale=1.0)
    return _from_slots(out, lse + packed.shift[..., :rows], q_slots)


def _from_slots(
    out: torch.Tensor, lse: torch.Tensor, slots: Slots
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put rows back where they came from; rows of no block are 0 and -inf."""
    batch, held, heads, head_size = out.shape
    row, real = (t[..., :held].expand(batch, heads, -1) for t in _rows(slots, out.device))
    # Slots without a row go to one place that is cut off again.
    row = torch.where(real, row, slots.blocks.total)
    placed = out.new_zeros(batch, heads, slots.blocks.total + 1, head_size)
    placed.scatter_(2, row.unsqueeze(-1).expand(-1, -1, -1, head_size), out.transpose(1, 2))
    sums = lse.new_full((batch, heads, slots.blocks.total + 1), -math.inf)
    sums.scatter_(2, row, lse)
    return placed[:, :, :-1].transpose(1, 2).contiguous(), sums[:, :, :-1].contiguous()
