import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention.kinds.masks import KeyMask, normalise_mask
from multimodal_gen.runtime.layers.attention.masks import with_causal, zero_masked_rows

B, SQ, SK, H = 3, 4, 5, 2
QUERY = torch.zeros(B, SQ, H, 8)
KEY = torch.zeros(B, SK, H, 8)


def normalise(mask, query=QUERY, key=KEY, *, self_attention=True):
    return normalise_mask(mask, query, key, self_attention=self_attention)


@pytest.mark.parametrize("shape", [(B, SK), (1, SK), (B, 1, SK), (1, 1, SK), (B, 1, 1, SK)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
def test_a_mask_over_keys_alone_is_a_key_mask(shape, dtype):
    values = torch.arange(SK).remainder(2).expand(shape)
    mask = normalise(values.to(dtype))
    assert isinstance(mask, KeyMask)
    assert torch.equal(mask.tokens, values.bool().view(-1, SK).expand(B, SK))
    assert mask.broadcastable().shape == (B, 1, 1, SK)


@pytest.mark.parametrize(
    "shape", [(B, SQ, SK), (1, SQ, SK), (B, H, SQ, SK), (1, H, 1, SK), (1, 1, SQ, SK)]
)
def test_a_mask_that_tells_queries_or_heads_apart_is_dense(shape):
    mask = normalise(torch.ones(shape, dtype=torch.int32))
    assert isinstance(mask, torch.Tensor)
    assert mask.dtype is torch.bool
    assert torch.broadcast_to(mask, (B, H, SQ, SK)).all()


@pytest.mark.parametrize("shape", [(B, SK), (B, 1, SK), (B, 1, 1, SK), (1, H, SQ, SK)])
def test_an_additive_mask_is_dense_and_takes_the_dtype_of_the_query(shape):
    mask = normalise(torch.zeros(shape, dtype=torch.float64), QUERY.bfloat16(), KEY.bfloat16())
    assert isinstance(mask, torch.Tensor)
    assert mask.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "num_queries", "self_attention", "covers"),
    [
        ((B, SK), SK, True, True),
        ((B, SK), SK, False, False),
        ((B, SK), SQ, True, False),
        ((B, 1, 1, SK), SK, True, False),
    ],
)
def test_only_a_two_dimensional_mask_of_self_attention_covers_queries(
    shape, num_queries, self_attention, covers
):
    query = torch.zeros(B, num_queries, H, 8)
    mask = normalise(torch.ones(shape, dtype=torch.bool), query, self_attention=self_attention)
    assert mask.covers_queries is covers


@pytest.mark.parametrize(
    "shape",
    [(SK,), (B, SK + 1), (B, 1), (2, SK), (B, SK, SQ), (B, 3, SQ, SK), (B, H, SQ, 1), (1,) * 5],
)
def test_a_mask_that_does_not_fit_names_the_shapes_that_do(shape):
    message = (
        r"attn_mask must be \[B, Sk\] = \[3, 5\], \[B, Sq, Sk\] = \[3, 4, 5\] or broadcastable to "
        r"\[B, H, Sq, Sk\] = \[3, 2, 4, 5\], got \["
    )
    with pytest.raises(UsageError, match=message):
        normalise(torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(3, 5), (5, 3), (4, 4), (1, 4)])
def test_causality_is_aligned_to_the_last_query_and_key(num_queries, num_keys):
    everything = torch.ones(1, 1, 1, num_keys, dtype=torch.bool)
    allowed = with_causal(everything, num_queries)[0, 0]
    additive = with_causal(torch.zeros(1, 1, 1, num_keys), num_queries)[0, 0]
    for row in range(num_queries):
        for column in range(num_keys):
            sees = column <= row + num_keys - num_queries
            assert allowed[row, column].item() is sees
            assert additive[row, column].item() == (0.0 if sees else -torch.inf)


def test_causality_keeps_what_the_mask_hides():
    mask = torch.tensor([True, False, True, True])[None, None, None]
    assert with_causal(mask, 4)[0, 0, 3].tolist() == [True, False, True, True]


def test_zeroing_rows_removes_nan_and_keeps_the_dtype():
    x = torch.full((2, 3, 1, 4), torch.nan, dtype=torch.bfloat16)
    x[0, 0] = 2.0
    token_mask = torch.zeros(2, 3, dtype=torch.bool)
    token_mask[0, 0] = True
    zeroed = zero_masked_rows(x, token_mask)
    assert zeroed.dtype is torch.bfloat16
    assert (zeroed.sum().item(), zeroed[0, 0].tolist()) == (8.0, [[2.0] * 4])
