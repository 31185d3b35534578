import math

import pytest

from multimodal_gen.runtime.layers.attention.backends.flashinfer import FlashInferBackend
from tests.runtime.layers.attention.backends.conftest import takes


@pytest.fixture
def flashinfer(fake_package, compute):
    @takes(
        "q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None, "
        "packed_custom_mask=None, causal=False, kv_layout='NHD', pos_encoding_mode='NONE', "
        "use_fp16_qk_reduction=False, sm_scale=None, return_lse=False"
    )
    def single_prefill_with_kv_cache(call):
        assert call.q.dim() == 3, "one sample a call"
        assert call.kv_layout == "NHD"
        out, lse = compute(*(x[None] for x in (call.q, call.k, call.v)), call.sm_scale, call.causal)
        # [S, H] in base 2, as the package documents
        return (out[0], lse[0].T / math.log(2)) if call.return_lse else out[0]

    fake_package("flashinfer", single_prefill_with_kv_cache=single_prefill_with_kv_cache)


def test_it_honours_every_call(call, flashinfer, assert_honours):
    assert_honours(FlashInferBackend, "flashinfer", call)
