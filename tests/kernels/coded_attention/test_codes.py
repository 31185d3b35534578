"""What codes stand for: at most half a step from what they were made of."""

import pytest
import torch

from multimodal_gen.kernels.coded_attention.codes import (
    OF_KEYS,
    OF_VALUES,
    Coded,
    dequantise,
    quantise,
)

GROUPINGS = {"keys": OF_KEYS, "values": OF_VALUES}
SHAPES = [(2, 70, 3, 80), (1, 6, 2, 8), (1, 128, 1, 128)]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[1])
    x = torch.randn(shape, generator=generator)
    # Channels that lie far from the others, as those of keys do.
    return (x + 20 * torch.randn(shape[3], generator=generator).round()).to(dtype)


def groups_of(x: torch.Tensor, side: str) -> list[tuple[torch.Tensor, tuple]]:
    """Return what shares a middle and a step, and where both are."""
    axis = 1 if side == "keys" else 3
    parts = enumerate(x.split(64, dim=axis))
    others = [(b, h) for b in range(x.shape[0]) for h in range(x.shape[2])]
    if side == "keys":
        return [
            (part[b, :, h, d], (b, i, h, d))
            for i, part in parts
            for b, h in others
            for d in range(x.shape[3])
        ]
    return [
        (part[b, s, h], (b, s, h, i))
        for i, part in parts
        for b, h in others
        for s in range(x.shape[1])
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("side", GROUPINGS)
@pytest.mark.parametrize("bits", [2, 4])
def test_what_a_code_stands_for_is_within_half_a_step(bits, side, shape):
    x, grouping = draw(*shape), GROUPINGS[side]
    coded = quantise(x, bits, grouping)
    assert coded.codes.shape == (*shape[:3], shape[3] * bits // 8)
    assert coded.codes.dtype is torch.uint8
    assert coded.scales.dtype is torch.bfloat16
    back = dequantise(coded, bits, grouping, torch.float32)
    eps = torch.finfo(torch.float32).eps * float(x.abs().max())
    for (group, at), (made, _) in zip(groups_of(x, side), groups_of(back, side), strict=True):
        middle, step = coded.scales[at].float()
        assert ((group - made).abs() <= step / 2 + 4 * eps).all()
        # As fine as so many levels can be, but for the rounding of the middle, and of the step.
        finest = (group.max() - group.min()) / (2**bits - 1)
        rounding = 2 * middle.abs() * 2**-8 / (2**bits - 1)
        assert step <= (finest + rounding) * (1 + 2**-6)


@pytest.mark.parametrize("bits", [2, 4])
def test_bytes_hold_neighbouring_channels_from_the_lowest_bits_on(bits):
    levels = 2**bits - 1
    wanted = torch.randint(
        0, levels + 1, (1, 64, 1, 64), generator=torch.Generator().manual_seed(0)
    )
    wanted[0, 0], wanted[0, 1] = 0, levels  # every channel has both ends
    coded = quantise(wanted.float(), bits, OF_KEYS)
    for channel in range(64):
        place = channel * bits % 8
        byte = coded.codes[0, :, 0, channel * bits // 8].long()
        assert torch.equal((byte >> place) & levels, wanted[0, :, 0, channel])


def test_a_constant_group_has_no_step_and_stays_what_it_is():
    x = torch.full((1, 3, 1, 8), 1.5)
    for grouping in GROUPINGS.values():
        coded = quantise(x, 2, grouping)
        assert not coded.scales[..., 1].any()
        assert torch.equal(dequantise(coded, 2, grouping, torch.float32), x)


def test_what_is_not_finite_reaches_what_is_read_of_its_group_alone():
    x = draw(1, 5, 2, 64)
    x[0, 2, 1, 7] = torch.nan
    back = dequantise(quantise(x, 4, OF_VALUES), 4, OF_VALUES, torch.float32)
    assert back[0, 2, 1].isnan().all()
    assert back.isnan().sum() == 64


def test_keys_lose_less_by_channel_than_by_token():
    """Why keys are grouped the other way: channels that lie far off take no levels of others."""
    x = draw(1, 128, 2, 128)

    def error(grouping):
        return (dequantise(quantise(x, 2, grouping), 2, grouping, x.dtype) - x).square().mean()

    assert error(OF_KEYS) < error(OF_VALUES) / 10


def test_nothing_is_rounded_that_was_rounded_before():
    """Codes of four levels that are there read back the same, in any dtype that holds them."""
    middle, step = torch.tensor([0.5, -2.0]), torch.tensor([0.25, 1.0])
    scales = torch.stack((middle, step), -1).bfloat16().view(1, 1, 1, 2, 2)
    scales = scales.repeat_interleave(2, 3)
    codes = torch.tensor([[0b11100100], [0b00011011]], dtype=torch.uint8).view(1, 2, 1, 1)
    for dtype in (torch.float64, torch.bfloat16):
        back = dequantise(Coded(codes, scales), 2, OF_KEYS, dtype)
        want = torch.tensor([[0.125, 0.375, -1.5, -0.5], [0.875, 0.625, -2.5, -3.5]])
        assert torch.equal(back[0, :, 0], want.to(dtype))
