"""The kernel that reads codes, on a GPU, against float64 on what they stand for."""

import pytest
import torch

from multimodal_gen.kernels.coded_attention.api import coded_attention, coded_kernel_for
from tests.helpers.inputs import make_qkv
from tests.helpers.tolerance import assert_lse_within_error_budget, assert_within_error_budget
from tests.kernels.coded_attention.naive import slots_of

LENGTHS, ROWS = [600, 0, 64, 1, 577], 600


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [8, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("bits", [2, 4])
def test_codes_are_read_within_the_error_budget_of_what_they_stand_for(bits, size, dtype):
    drawn = {"dtype": dtype, "device": "cuda"}
    q = make_qkv(2, 1000, 4, size, **drawn).query
    _, k, v = make_qkv(2, len(LENGTHS) * ROWS, 2, size, **drawn, seed=1)
    slots = slots_of(k + 4 * k[:, :1], v, LENGTHS, ROWS, bits)
    assert coded_kernel_for(q) == "triton"
    out, lse = coded_attention(q, *slots[:3], scale=size**-0.5)
    assert_within_error_budget(out, q, slots.key, slots.value, scale=size**-0.5)
    assert_lse_within_error_budget(lse, q, slots.key, scale=size**-0.5)


def test_where_nothing_is_seen_the_output_is_zero():
    q, k, v = make_qkv(1, 300, 2, 128, dtype=torch.bfloat16, device="cuda")
    slots = slots_of(k, v, [0], 300, 4)
    out, lse = coded_attention(q, *slots[:3])
    assert not out.any()
    assert (lse == -torch.inf).all()
