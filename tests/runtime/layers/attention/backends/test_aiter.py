import pytest
import torch

from multimodal_gen.runtime.layers.attention.backends.aiter import (
    AiterBackend,
    AiterImpl,
    AiterSageBackend,
)
from tests.helpers.inputs import make_qkv
from tests.runtime.layers.attention.backends.conftest import takes


@pytest.fixture
def aiter(flash_package):
    flash_package(
        "aiter",
        dense="q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1, 0), "
        "bias=None, alibi_slopes=None, deterministic=True, return_lse=False",
        packed="q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_q=0, "
        "dropout_p=0.0, softmax_scale=None, logits_soft_cap=0.0, causal=False, return_lse=False",
        answer=lambda call, out, lse: (out, lse) if call.return_lse else out,
        holds=lambda call: call.return_lse or not call.q.requires_grad,
    )


@pytest.fixture
def aiter_sage(fake_package, compute):
    @takes(
        "q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), return_lse=False, "
        "layout='bshd', config=None"
    )
    def fav3_sage_wrapper_func(call):
        assert call.layout == "bshd"
        out, _ = compute(call.q, call.k, call.v, call.softmax_scale, call.causal)
        return out.to(torch.bfloat16)

    fake_package(
        "aiter.ops.triton.attention.fav3_sage", fav3_sage_wrapper_func=fav3_sage_wrapper_func
    )


def test_aiter_honours_every_call(call, aiter, assert_honours):
    assert_honours(AiterBackend, "aiter", call)


def test_aiter_asks_for_the_log_sum_exp_when_gradients_are_needed(aiter):
    q, k, v = make_qkv(1, 8, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    assert AiterImpl(2, 64, 0.1, variant="aiter").forward(q, k, v).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_aiter_sage_honours_every_call_in_the_callers_dtype(
    call, dtype, aiter_sage, assert_honours
):
    assert_honours(AiterSageBackend, "aiter_sage", call, dtype=dtype, quantised=True)
