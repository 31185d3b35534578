"""FlashAttention of platforms without hardware here, against packages with their signatures."""

from types import SimpleNamespace

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.backends.vendor_flash_attn import (
    MusaFlashAttentionBackend,
    NpuFlashAttentionBackend,
    XpuFlashAttentionBackend,
)
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from tests.runtime.layers.attention.backends.conftest import takes


@pytest.fixture
def mate(flash_package):
    flash_package(
        "flash_attn_interface",
        dense="q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, "
        "v_descale=None, window_size=(-1, -1), num_splits=0, return_attn_probs=False, "
        "return_softmax_lse=False",
        packed="q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
        "max_seqlen_k=None, softmax_scale=None, causal=False",
        answer=lambda call, out, lse: (
            (out, lse)
            if lse is not None and (call.return_attn_probs or call.return_softmax_lse)
            else out
        ),
    )


@pytest.fixture
def xpu(monkeypatch):
    """Return the properties of a simulated GPU."""
    properties = SimpleNamespace(has_fp64=True)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device=None: properties)
    return properties


@pytest.fixture
def sgl_kernel(flash_package, xpu):
    flash_package(
        "sgl_kernel.flash_attn",
        packed="q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
        "seqused_k=None, softmax_scale=None, causal=False, return_softmax_lse=False",
        answer=lambda call, out, lse: out,
        holds=lambda call: all(x.is_contiguous() for x in (call.q, call.k, call.v)),
    )


@pytest.fixture
def torch_npu(fake_package, compute):
    @takes(
        "query, key, value, *, atten_mask=None, num_heads=1, scale=1.0, input_layout='BSH', "
        "num_key_value_heads=0, sparse_mode=0, softmax_lse_flag=False"
    )
    def npu_fused_infer_attention_score(call):
        qkv, causal = (call.query, call.key, call.value), call.sparse_mode == 3
        assert call.input_layout == "BSND"
        assert all(x.is_contiguous() for x in qkv)
        assert (call.num_heads, call.num_key_value_heads) == tuple(x.shape[2] for x in qkv[:2])
        if causal:
            assert torch.equal(call.atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
        else:
            assert call.sparse_mode == 0
            assert call.atten_mask is None
        out, lse = compute(*qkv, call.scale, causal)
        return out, lse[..., None] if call.softmax_lse_flag else torch.zeros(1)

    fake_package("torch_npu", npu_fused_infer_attention_score=npu_fused_infer_attention_score)


PLATFORMS = {
    "musa": (MusaFlashAttentionBackend, "mate"),
    "xpu": (XpuFlashAttentionBackend, "sgl_kernel"),
    "npu": (NpuFlashAttentionBackend, "torch_npu"),
}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_fa_is_the_platforms_own_library_and_honours_every_call(
    platform, call, assert_honours, request
):
    backend, library = PLATFORMS[platform]
    request.getfixturevalue(library)
    assert find_backend(AttentionBackendEnum.FA, PlatformEnum(platform)) is backend
    assert_honours(backend, platform, call)


@pytest.mark.usefixtures("sgl_kernel")
@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 5), (0, 0), (5, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_xpu_takes_a_batch_without_queries_or_keys(num_queries, num_keys, causal):
    impl = XpuFlashAttentionBackend.get_impl_cls()(4, 64, 0.2, causal, variant="xpu")
    q = torch.ones(2, num_queries, 4, 64, dtype=torch.bfloat16)
    k = torch.ones(2, num_keys, 4, 64, dtype=torch.bfloat16)
    assert torch.equal(impl.forward(q, k, k), torch.zeros_like(q))


@pytest.mark.usefixtures("sgl_kernel")
def test_xpu_refuses_a_gpu_without_fp64_before_the_first_call(xpu):
    xpu.has_fp64 = False
    with pytest.raises(
        UnsupportedBackendError, match=r"needs a GPU with fp64 .* has none; use torch_sdpa"
    ):
        XpuFlashAttentionBackend.get_impl_cls()(4, 64, 0.2, variant="xpu")


def test_npu_serves_ring_attention(request_on):
    packages = (("torch_npu", "torch-npu", "2.9.0"),)
    request = request_on(PlatformEnum.NPU, packages=packages, needs=(Feature.RING,))
    assert NpuFlashAttentionBackend.unsupported_reasons(request) == ()
