"""Attention to codes in plain PyTorch: the definition, for any device.

Shapes: B batch, Sq tokens, H query heads, Hkv key heads, D head size, N slots, C rows of a slot.
"""

import torch

from multimodal_gen.kernels.coded_attention.codes import OF_KEYS, OF_VALUES, Coded, dequantise
from multimodal_gen.kernels.part_merge.reference import merge_two_reference


def coded_attention_reference(
    q: torch.Tensor,
    keys: Coded,
    values: Coded,
    lengths: torch.Tensor,
    *,
    bits: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [B, Sq, H, D] in q's dtype, and its lse [B, H, Sq]; see `api.coded_attention`.

    One slot is dequantised at a time, in q's dtype; sums are in fp32 or better.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    num = lengths.shape[0]
    rows = keys.codes.shape[1] // num
    queries = q.to(wide).transpose(1, 2) * scale
    repeats = q.shape[2] // keys.codes.shape[2]
    out = torch.zeros(q.shape, dtype=wide, device=q.device)
    lse = torch.full(queries.shape[:3], -torch.inf, dtype=wide, device=q.device)
    places = torch.arange(rows, device=q.device)
    for slot in range(num):
        k, v = (
            dequantise(_of_slot(coded, slot, num), bits, grouping, q.dtype)
            .to(wide)
            .transpose(1, 2)
            .repeat_interleave(repeats, dim=1)
            for coded, grouping in ((keys, OF_KEYS), (values, OF_VALUES))
        )
        with torch.autocast(q.device.type, enabled=False):
            scores = (queries @ k.mT).masked_fill(places >= lengths[slot], -torch.inf)
            found = scores.logsumexp(-1)
            weights = (scores - found.masked_fill(found == -torch.inf, 0.0).unsqueeze(-1)).exp()
            more = (weights @ v).transpose(1, 2)
        out, lse = merge_two_reference(out, lse, more, found, wide)
    return out.to(q.dtype), lse


def _of_slot(coded: Coded, slot: int, num: int) -> Coded:
    """Return the part of one of `num` slots."""
    codes, scales = (torch.unflatten(x, 1, (num, -1))[:, slot] for x in coded)
    return Coded(codes, scales)
