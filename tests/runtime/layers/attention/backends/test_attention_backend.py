"""What `DenseImpl` asks of a library, and what it makes of the answers."""

import math

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention.backends.attention_backend import DenseImpl
from tests.helpers.inputs import make_qkv
from tests.helpers.reference import reference_attention

SCALE = 0.2


class Library(DenseImpl):
    """Computes with the reference and records the lengths it was called with."""

    label = "library"
    has_lse = True

    def _attend(self, query, key, value, *, lse):
        self.lengths = (query.shape[1], key.shape[1])
        out, stats = reference_attention(query, key, value, scale=SCALE, causal=self.causal)
        return out.to(query.dtype), stats.float() if lse and self.has_lse else None


class SquareLibrary(Library):
    only_square = True


@pytest.mark.parametrize(
    ("library", "causal", "asked", "called"),
    [
        (Library, True, (6, 4), (4, 4)),
        (Library, True, (4, 6), (4, 6)),
        (Library, True, (4, 4), (4, 4)),
        (Library, False, (6, 4), (6, 4)),
        (SquareLibrary, True, (6, 4), (4, 4)),
        (SquareLibrary, True, (4, 6), (6, 6)),
        (SquareLibrary, True, (4, 4), (4, 4)),
        (SquareLibrary, False, (4, 6), (4, 6)),
    ],
)
def test_a_library_gets_only_the_causality_it_is_right_about(library, causal, asked, called):
    q, k, v = make_qkv(2, asked[0], 4, 8, num_keys=asked[1], num_kv_heads=2)
    impl = library(4, 8, SCALE, causal, 2)
    exact, exact_lse = reference_attention(q, k, v, scale=SCALE, causal=causal)
    torch.testing.assert_close(impl.forward(q, k, v), exact.to(q.dtype))
    assert impl.lengths == called
    out, lse = impl.forward_lse(q, k, v)
    assert impl.lengths == called
    torch.testing.assert_close(out, exact.to(q.dtype))
    torch.testing.assert_close(lse, exact_lse.float())
    hidden = max(asked[0] - asked[1], 0) if causal else 0
    assert int((lse == -math.inf).sum()) == 2 * 4 * hidden


@pytest.mark.parametrize("num_keys", [0, 3])
def test_a_log_sum_exp_of_nothing_needs_no_library(num_keys):
    impl = Library(4, 8, SCALE)
    q, kv = torch.ones(2, 0 if num_keys else 5, 4, 8), torch.ones(2, num_keys, 4, 8)
    out, lse = impl.forward_lse(q, kv, kv)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((2, 4, q.shape[1]), -math.inf))
    assert not hasattr(impl, "lengths")


@pytest.mark.parametrize("num_queries", [3, 5])
def test_a_library_without_log_sum_exp_says_so(num_queries):
    impl = Library(4, 8, SCALE, causal=True)
    impl.has_lse = False
    q, k, v = make_qkv(1, num_queries, 4, 8, num_keys=3)
    with pytest.raises(NotImplementedError, match="Library declares no lse"):
        impl.forward_lse(q, k, v)


def test_a_mask_is_refused_by_name():
    q, k, v = make_qkv(1, 3, 4, 8)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    with pytest.raises(UsageError, match=r"attn_mask must be None on library, .*\[1, 1, 3, 3\]"):
        Library(4, 8, SCALE).forward(q, k, v, attn_mask=mask)
