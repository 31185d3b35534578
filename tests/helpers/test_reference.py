import math

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.inputs import make_qkv
from tests.helpers.reference import eager_attention, reference_attention


def test_a_case_worked_by_hand():
    q = torch.tensor([[[[1.0, 0.0]], [[0.0, 2.0]]]])
    k = torch.tensor([[[[math.log(3), 0.0]], [[0.0, 0.0]]]])
    v = torch.tensor([[[[4.0, 0.0]], [[0.0, 8.0]]]])
    out, lse = reference_attention(q, k, v, scale=1.0)
    # Scores are (ln 3, 0) and (0, 0): weights 3/4, 1/4 and 1/2, 1/2.
    expected = torch.tensor([[[[3.0, 2.0]], [[2.0, 4.0]]]], dtype=torch.float64)
    assert torch.allclose(out, expected, atol=1e-6)
    assert torch.allclose(lse[0, 0], torch.tensor([4.0, 2.0], dtype=torch.float64).log())


def test_it_agrees_with_torch_where_torch_has_the_same_definition():
    q, k, v = make_qkv(2, 10, 4, 16, num_keys=14, num_kv_heads=2, dtype=torch.float64)
    mask = torch.rand(2, 1, 10, 14) > 0.3
    want = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, scale=0.3, enable_gqa=True
    )
    out, _ = reference_attention(q, k, v, scale=0.3, mask=mask)
    assert torch.allclose(out, want.transpose(1, 2), atol=1e-12)


def test_causality_is_aligned_to_the_bottom_right():
    q, k, v = make_qkv(1, 2, 1, 8, num_keys=4)
    out, _ = reference_attention(q, k, v, scale=1.0, causal=True)
    first, _ = reference_attention(q[:, :1], k[:, :3], v[:, :3], scale=1.0)
    last, _ = reference_attention(q[:, 1:], k, v, scale=1.0)
    assert torch.allclose(out, torch.cat((first, last), dim=1))


def test_rows_that_see_nothing_are_zero_with_minus_infinity():
    q, k, v = make_qkv(1, 5, 1, 8, num_keys=3)
    out, lse = reference_attention(q, k, v, scale=1.0, causal=True)
    assert not out[:, :2].any()
    assert (lse[0, 0, :2] == -math.inf).all()
    assert lse[0, 0, 2:].isfinite().all()
    assert not eager_attention(q, k, v, scale=1.0, causal=True)[0][:, :2].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_eager_form_stays_in_the_inputs_dtype(dtype):
    q, k, v = make_qkv(1, 6, 2, 8, dtype=dtype)
    out, _ = eager_attention(q, k, v, scale=0.3, mask=torch.zeros(6, 6))
    assert out.dtype is dtype
    exact, _ = reference_attention(q, k, v, scale=0.3)
    assert torch.allclose(out.double(), exact, atol=8 * torch.finfo(dtype).eps)
