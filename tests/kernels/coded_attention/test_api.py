"""Attention to codes is that to what they stand for; what does not fit is refused."""

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.coded_attention.api import coded_attention
from multimodal_gen.kernels.coded_attention.codes import Coded
from tests.helpers.inputs import make_qkv
from tests.helpers.reference import reference_attention
from tests.helpers.tolerance import assert_within_error_budget
from tests.kernels.coded_attention.naive import Slots, slots_of

ROWS, LENGTHS = 70, [70, 0, 64, 1]


def case(bits: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, Slots]:
    q = make_qkv(2, 33, 4, 16, dtype=dtype).query
    _, k, v = make_qkv(2, len(LENGTHS) * ROWS, 2, 16, dtype=dtype, seed=1)
    return q, slots_of(k, v, LENGTHS, ROWS, bits)


@pytest.mark.parametrize("bits", [2, 4])
def test_attention_to_codes_is_that_to_what_they_stand_for(bits):
    q, slots = case(bits)
    out, lse = coded_attention(q, *slots[:3], scale=0.3)
    want, want_lse = reference_attention(q, slots.key, slots.value, scale=0.3)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, want_lse.float())
    half, of_half = case(bits, torch.bfloat16)
    out, _ = coded_attention(half, *of_half[:3])
    assert_within_error_budget(out, half, of_half.key, of_half.value, scale=0.25)


def test_where_nothing_is_seen_the_output_is_zero():
    q, slots = case(4)
    out, lse = coded_attention(q, *slots[:2], torch.zeros_like(slots.lengths))
    assert not out.any()
    assert (lse == -torch.inf).all()


def changed(coded: Coded, **changes: torch.Tensor) -> Coded:
    return coded._replace(**changes)


Q, SLOTS = case(4)
KEYS, VALUES, SEEN = SLOTS[:3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": Q[0]}, r"`q` must be \[B, S, H, D\] and `lengths` int32 \[N\], got \[33, 4, 16\]"),
        ({"lengths": SEEN.long()}, r"`lengths` int32 \[N\], got .* torch.int64 \[4\]"),
        ({"lengths": SEEN[:3]}, r"whole rows in 3 slots and a divisor of 4 heads, got \[2, 280"),
        ({"q": Q[..., :9]}, r"codes of 2 or 4 bits for 9 channels"),
        (
            {"keys": changed(KEYS, codes=KEYS.codes[0])},
            r"`keys` must have codes of 2 or 4 bits .* got \[280, 2, 8\]",
        ),
        ({"keys": changed(KEYS, codes=KEYS.codes[:, :, :0])}, r"`keys` must .* got \[2, 280, 0, 8"),
        (
            {"values": changed(VALUES, codes=VALUES.codes[0])},
            r"`values` must have codes \[2, 280, 2, 8\] .* got \[280, 2, 8\]",
        ),
        ({"q": Q[..., :0]}, r"`q` must be \[B, S, H, D\] .* got \[2, 33, 4, 0\]"),
        ({"scale": -0.3}, "`scale` must be positive and finite, got -0.3"),
        ({"scale": 0.0}, "`scale` must be positive and finite, got 0"),
        ({"scale": float("nan")}, "`scale` must be positive and finite, got nan"),
        ({"q": Q[:, :, :3]}, r"a divisor of 3 heads, got \[2, 280, 2, 8\]"),
        (
            {"values": changed(VALUES, codes=VALUES.codes[..., :4])},
            r"`values` must have codes \[2, 280, 2, 8\] and scales .* got \[2, 280, 2, 4",
        ),
        (
            {"keys": changed(KEYS, scales=KEYS.scales[:, :7])},
            r"`keys` must have .* scales \[2, 8, 2, 16, 2\], got .* \[2, 7, 2, 16, 2\]",
        ),
        (
            {"keys": changed(KEYS, scales=KEYS.scales.float())},
            "`keys` must be uint8 with scales in bfloat16, got torch.uint8 and torch.float32",
        ),
        ({"lengths": SEEN.to("meta")}, "all tensors must be on one device, got .'cpu', 'meta'."),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    given = {"q": Q, "keys": KEYS, "values": VALUES, "lengths": SEEN, **changes}
    with pytest.raises(UsageError, match=message):
        coded_attention(**given)
