"""Slots of codes, and the keys and values that they stand for."""

from typing import NamedTuple

import torch

from multimodal_gen.kernels.coded_attention.codes import (
    OF_KEYS,
    OF_VALUES,
    Coded,
    Grouping,
    dequantise,
    quantise,
)


class Slots(NamedTuple):
    """Codes of slots, and what is attended to of them: keys and values [B, S, Hkv, D]."""

    keys: Coded
    values: Coded
    lengths: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def slots_of(
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    rows: int,
    bits: int,
    *,
    exact: bool = False,
) -> Slots:
    """Return the codes of slots of so many rows, whose contents follow one another.

    Args:
        key: [B, N * C, Hkv, D].
        value: the same.
        lengths: rows that are attended to, of every slot.
        rows: C.
        bits: 2 or 4.
        exact: whether to change middles and steps, so that bfloat16 holds what codes stand for.
    """
    sides = [
        _side(x, lengths, rows, bits, grouping, exact)
        for x, grouping in ((key, OF_KEYS), (value, OF_VALUES))
    ]
    (keys, seen_keys), (values, seen_values) = sides
    seen = torch.tensor(lengths, dtype=torch.int32, device=key.device)
    return Slots(keys, values, seen, seen_keys, seen_values)


def _side(
    x: torch.Tensor, lengths: list[int], rows: int, bits: int, grouping: Grouping, exact: bool
) -> tuple[Coded, torch.Tensor]:
    made = [quantise(part, bits, grouping) for part in x.split(rows, dim=1)]
    for each in made if exact else ():
        each.scales[..., 0] = each.scales[..., 0].round().clamp(-8, 8)
        each.scales[..., 1] = 0.25  # so multiples of 1/8 below 16, which take 7 bits
    seen = [
        dequantise(each, bits, grouping, x.dtype)[:, :length]
        for each, length in zip(made, lengths, strict=True)
    ]
    return Coded(*(torch.cat(both, dim=1) for both in zip(*made, strict=True))), torch.cat(seen, 1)
