import pytest
import torch
import torch.nn.functional as F

from tests.helpers.inputs import make_qkv
from tests.helpers.reference import reference_attention
from tests.helpers.tolerance import (
    assert_gradients_within_error_budget,
    assert_lse_within_error_budget,
    assert_within_error_budget,
)

SCALE = 0.2
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def attend(q, k, v, **changes):
    return reference_attention(q, k, v, **{"scale": SCALE, **changes})[0].to(q.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_rounded_exact_result_passes(dtype):
    q, k, v = make_qkv(2, 20, 4, 64, dtype=dtype)
    assert_within_error_budget(attend(q, k, v), q, k, v, scale=SCALE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "changes",
    [{"scale": SCALE * 1.05}, {"causal": True}, {"mask": torch.arange(20) != 7}],
    ids=["scale", "causal", "mask"],
)
def test_a_wrong_argument_exceeds_the_budget(changes, dtype):
    q, k, v = make_qkv(2, 20, 4, 64, dtype=dtype)
    with pytest.raises(AssertionError, match=r"rows exceed their error budget; the worst is batch"):
        assert_within_error_budget(attend(q, k, v, **changes), q, k, v, scale=SCALE)


def test_one_wrong_row_is_found_and_named():
    q, k, v = make_qkv(2, 20, 4, 64, dtype=torch.bfloat16)
    out = attend(q, k, v)
    out[1, 7, 2] *= 1.1
    with pytest.raises(AssertionError, match=r"^1 of 160 rows .* batch 1, token 7, head 2: error"):
        assert_within_error_budget(out, q, k, v, scale=SCALE)


def test_tf32_scores_exceed_the_budget_of_fp32():
    q, k, v = make_qkv(2, 20, 4, 64)
    rough = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (q, k)]
    with pytest.raises(AssertionError, match="exceed their error budget"):
        assert_within_error_budget(attend(*rough, v), q, k, v, scale=SCALE)


def test_infinities_wrong_dtypes_and_wrong_shapes_are_named():
    q, k, v = make_qkv(1, 8, 2, 16)
    out = attend(q, k, v)
    with pytest.raises(AssertionError, match=r"dtype is torch.float64, want the query's"):
        assert_within_error_budget(out.double(), q, k, v, scale=SCALE)
    with pytest.raises(AssertionError, match=r"shape is \[1, 2, 8, 16\], want \[1, 8, 2, 16\]"):
        assert_within_error_budget(out.transpose(1, 2), q, k, v, scale=SCALE)
    out[0, 0, 0, 0] = torch.nan
    with pytest.raises(AssertionError, match=r"1 of 256 output elements are not finite"):
        assert_within_error_budget(out, q, k, v, scale=SCALE)


def test_rows_that_see_nothing_must_be_zero():
    q, k, v = make_qkv(1, 8, 2, 16, num_keys=4)
    out = attend(q, k, v, causal=True)
    assert_within_error_budget(out, q, k, v, scale=SCALE, causal=True)
    out[0, 0] = 1e-9
    with pytest.raises(AssertionError, match="rows that see no key must be zero"):
        assert_within_error_budget(out, q, k, v, scale=SCALE, causal=True)


def test_eight_bit_rounding_passes_its_own_budget_and_four_bit_rounding_does_not():
    def rounded(x, bits):
        top = 2 ** (bits - 1) - 1
        step = x.abs().amax(dim=-1, keepdim=True) / top
        return (x / step).round() * step

    q, k, v = make_qkv(1, 64, 4, 64)
    out = attend(rounded(q, 8), rounded(k, 8), v)
    assert_within_error_budget(out, q, k, v, scale=SCALE, quantised=True)
    with pytest.raises(AssertionError, match="rows exceed"):
        assert_within_error_budget(out, q, k, v, scale=SCALE)
    out = attend(rounded(q, 4), rounded(k, 4), v)
    with pytest.raises(AssertionError, match=r"(cosine similarity|relative L1 error) is"):
        assert_within_error_budget(out, q, k, v, scale=SCALE, quantised=True)


def test_a_log_sum_exp_in_base_two_or_without_scale_exceeds_its_budget():
    q, k, v = make_qkv(1, 16, 2, 64, dtype=torch.bfloat16)
    lse = reference_attention(q, k, v, scale=SCALE)[1].float()
    assert_lse_within_error_budget(lse, q, k, scale=SCALE)
    for wrong in (lse / torch.log(torch.tensor(2.0)), lse + 0.1):
        with pytest.raises(AssertionError, match="lse errs by"):
            assert_lse_within_error_budget(wrong, q, k, scale=SCALE)


def test_an_infinite_log_sum_exp_where_nothing_is_seen_must_be_negative():
    q, k, v = make_qkv(1, 16, 2, 64, num_keys=8)
    lse = reference_attention(q, k, v, scale=SCALE, causal=True)[1].float()
    assert_lse_within_error_budget(lse, q, k, scale=SCALE, causal=True)
    with pytest.raises(AssertionError, match="must be -inf"):
        assert_lse_within_error_budget(lse.abs(), q, k, scale=SCALE, causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_torch_pass_and_those_of_another_scale_do_not(dtype):
    def torch_attention(q, k, v, scale=SCALE):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)

    q, k, v = make_qkv(1, 16, 2, 64, dtype=dtype)
    assert_gradients_within_error_budget(torch_attention, q, k, v, scale=SCALE)
    with pytest.raises(AssertionError, match="the gradient of q errs by"):
        assert_gradients_within_error_budget(
            lambda *x: torch_attention(*x, scale=0.4), q, k, v, scale=SCALE
        )
