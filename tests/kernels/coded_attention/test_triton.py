"""The Triton kernel against float64, under the interpreter; see test_children.py."""

import pytest
import torch

from multimodal_gen.kernels.coded_attention.codes import Coded
from tests.helpers.inputs import make_qkv
from tests.helpers.tolerance import assert_lse_within_error_budget, assert_within_error_budget
from tests.kernels.coded_attention.naive import slots_of

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1; see test_children.py"
)


def attend(q: torch.Tensor, keys: Coded, values: Coded, lengths: torch.Tensor, bits: int):
    from multimodal_gen.kernels.coded_attention import coded_attention_kernel

    given = (q, keys, values, lengths)
    return coded_attention_kernel.attend(*given, bits=bits, scale=q.shape[3] ** -0.5)


@pytest.mark.parametrize(
    ("size", "lengths", "rows", "dtype"),
    [
        (128, [100, 0, 64], 100, torch.bfloat16),
        (80, [1, 63], 70, torch.float16),
        (64, [65, 130], 130, torch.bfloat16),
        pytest.param(8, [64], 64, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(192, [70, 3], 70, torch.float16, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("bits", [2, 4])
def test_codes_are_read_within_the_error_budget_of_what_they_stand_for(
    bits, size, lengths, rows, dtype
):
    q = make_qkv(2, 150, 4, size, dtype=dtype).query
    _, k, v = make_qkv(2, len(lengths) * rows, 2, size, dtype=dtype, seed=1)
    # The interpreter cuts off what bfloat16 does not hold, and does not round.
    exact = dtype is torch.bfloat16
    slots = slots_of(k + 4 * k[:, :1], v, lengths, rows, bits, exact=exact)
    out, lse = attend(q, *slots[:3], bits)
    scale = size**-0.5
    assert_within_error_budget(out, q, slots.key, slots.value, scale=scale)
    assert_lse_within_error_budget(lse, q, slots.key, scale=scale)


def test_some_heads_and_samples_are_read_where_they_lie():
    q = make_qkv(3, 40, 4, 64, dtype=torch.bfloat16).query[1:, :, ::2]
    _, k, v = make_qkv(3, 140, 4, 64, dtype=torch.bfloat16, seed=1)
    slots = slots_of(k, v, [70, 33], 70, 4, exact=True)
    keys, values = (Coded(*(x[1:, :, 1:3] for x in coded)) for coded in slots[:2])
    out, _ = attend(q, keys, values, slots.lengths, 4)
    key, value = slots.key[1:, :, 1:3], slots.value[1:, :, 1:3]
    assert_within_error_budget(out, q, key, value, scale=0.125)


def test_where_nothing_is_seen_the_output_is_zero():
    q, k, v = make_qkv(1, 70, 2, 32, dtype=torch.bfloat16)
    slots = slots_of(k, v, [0], 70, 2)
    out, lse = attend(q, *slots[:3], 2)
    assert not out.any()
    assert (lse == -torch.inf).all()
