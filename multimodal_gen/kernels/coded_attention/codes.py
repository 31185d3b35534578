"""Codes of 4 or 2 bits, with a middle and a step for every group of entries.

With `levels` = 2 ** bits - 1, lo and hi the least and largest entry of a group:

    middle = bf16((lo + hi) / 2);   half = max(hi - middle, middle - lo)
    step = bf16(2 half / levels), rounded up;   code = round((x - middle) / step + levels / 2)
    x' = middle + (code - levels / 2) step;     |x - x'| <= step / 2

The bound holds for what is stored: what rounding takes from the middle is added to the half, and
the step is rounded up.

A group of keys is one channel of 64 tokens, and a group of values 64 channels of one token, as in
KIVI (arXiv 2402.02750): keys have channels that lie far from the others in every token, which would
take the levels of these. sglang's `--kv-cache-quant` (Quant-VideoGen, arXiv 2602.02958), whose
groups are 64 as well, takes the nearest of 128 centroids from every token instead, and then groups
the channels of a token. Here a channel's middle takes that place: nothing has to be trained on
the chunk, or looked up by token.

A byte holds the codes of neighbouring channels, the first of them in its lowest bits.

Shapes: B batch, S tokens, H heads, D channels.
"""

from typing import Final, NamedTuple

import torch

BITS: Final = (2, 4)
"""Bits that a code may have."""

GROUP: Final = 64
"""Entries that share a middle and a step."""


class Grouping(NamedTuple):
    """How many tokens and channels of a head share a middle and a step."""

    tokens: int
    channels: int

    def of(self, tokens: int, channels: int) -> tuple[int, int]:
        """Return along both how many groups there are; the last ones may be smaller."""
        return -(-tokens // self.tokens), -(-channels // self.channels)


OF_KEYS: Final = Grouping(GROUP, 1)
OF_VALUES: Final = Grouping(1, GROUP)


class Coded(NamedTuple):
    """Keys or values in codes.

    Attributes:
        codes: uint8 [B, S, H, D * bits / 8].
        scales: bf16 [B, groups of tokens, H, groups of channels, 2], middle and step.
    """

    codes: torch.Tensor
    scales: torch.Tensor


def quantise(x: torch.Tensor, bits: int, grouping: Grouping) -> Coded:
    """Return codes, and the middle and step of every group.

    Args:
        x: [B, S, H, D], floating; what is not finite makes all of its group NaN.
        bits: 2 or 4.
        grouping: `OF_KEYS` or `OF_VALUES`.
    """
    levels = 2**bits - 1
    tokens, channels = x.shape[1], x.shape[3]
    grouped = x.float()
    for axis, size in ((3, grouping.channels), (1, grouping.tokens)):
        missing = -grouped.shape[axis] % size
        if missing:  # more of the last entry, which changes no end of its group
            last = grouped.narrow(axis, -1, 1).repeat_interleave(missing, dim=axis)
            grouped = torch.cat((grouped, last), dim=axis)
        grouped = torch.unflatten(grouped, axis, (-1, size))
    low, high = (end(grouped, dim=(2, 5), keepdim=True) for end in (torch.amin, torch.amax))
    middle = low.lerp(high, 0.5).bfloat16().float()
    half = torch.maximum(high - middle, middle - low)
    # More than bf16 may round away, which is 2^-8.
    step = (half * (2 / levels) * (1 + 2**-7)).bfloat16().float()
    distance = (grouped - middle).div_(torch.where(step > 0, step, 1.0)).add_(levels / 2)
    codes = distance.round_().clamp_(0, levels).nan_to_num_().to(torch.uint8)
    codes = codes.flatten(4).flatten(1, 2)[:, :tokens, :, :channels]
    scales = torch.stack((middle, step), dim=-1)[:, :, 0, :, :, 0].bfloat16()
    packed = torch.unflatten(codes, -1, (-1, 8 // bits))
    byte = packed[..., 0]
    for place in range(1, 8 // bits):
        byte = byte | (packed[..., place] << (bits * place))
    return Coded(byte, scales)


def dequantise(coded: Coded, bits: int, grouping: Grouping, dtype: torch.dtype) -> torch.Tensor:
    """Return what codes stand for, [B, S, H, D], computed in fp32 and rounded to `dtype`."""
    levels = 2**bits - 1
    places = [(coded.codes >> (bits * place)) & levels for place in range(8 // bits)]
    codes = torch.stack(places, dim=-1).flatten(-2).float()
    middle, step = _by_entry(coded.scales, grouping, codes.shape[1], codes.shape[3])
    return (middle + (codes - levels / 2) * step).to(dtype)


def _by_entry(
    scales: torch.Tensor, grouping: Grouping, tokens: int, channels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return middle and step of every entry, fp32."""
    for axis, size, most in ((1, grouping.tokens, tokens), (3, grouping.channels, channels)):
        if size > 1:
            scales = scales.repeat_interleave(size, dim=axis).narrow(axis, 0, most)
    middle, step = scales.float().unbind(-1)
    return middle, step
