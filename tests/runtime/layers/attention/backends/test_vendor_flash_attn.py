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


@pytest.fixture
def mate(fake_package, compute, compute_packed):
    def flash_attn_func(
        q,
        k,
        v,
        softmax_scale=None,
        causal=False,
        qv=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        window_size=(-1, -1),
        num_splits=0,
        return_attn_probs=False,
        return_softmax_lse=False,
    ):
        out, lse = compute(q, k, v, softmax_scale, causal)
        return (out, lse) if return_attn_probs or return_softmax_lse else out

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        softmax_scale=None,
        causal=False,
    ):
        return compute_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal)

    functions = (flash_attn_func, flash_attn_varlen_func)
    fake_package("flash_attn_interface", **{f.__name__: f for f in functions})


@pytest.fixture
def xpu(monkeypatch):
    """Return the properties of a simulated GPU."""
    properties = SimpleNamespace(has_fp64=True)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device=None: properties)
    return properties


@pytest.fixture
def sgl_kernel(fake_package, compute_packed, xpu):
    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q=None,
        seqused_k=None,
        softmax_scale=None,
        causal=False,
        return_softmax_lse=False,
    ):
        assert q.is_contiguous()
        assert k.is_contiguous()
        assert v.is_contiguous()
        return compute_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal)

    fake_package("sgl_kernel.flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)


@pytest.fixture
def torch_npu(fake_package, compute):
    def npu_fused_infer_attention_score(
        query,
        key,
        value,
        *,
        atten_mask=None,
        num_heads=1,
        scale=1.0,
        input_layout="BSH",
        num_key_value_heads=0,
        sparse_mode=0,
        softmax_lse_flag=False,
    ):
        assert input_layout == "BSND"
        assert all(x.is_contiguous() for x in (query, key, value))
        assert (num_heads, num_key_value_heads) == (query.shape[2], key.shape[2])
        if sparse_mode == 3:
            assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
        else:
            assert sparse_mode == 0
            assert atten_mask is None
        out, lse = compute(query, key, value, scale, sparse_mode == 3)
        return out, lse[..., None] if softmax_lse_flag else torch.zeros(1)

    fake_package("torch_npu", npu_fused_infer_attention_score=npu_fused_infer_attention_score)


@pytest.mark.usefixtures("mate")
def test_musa_honours_every_call(call, assert_honours):
    assert_honours(MusaFlashAttentionBackend, "musa", call)


@pytest.mark.usefixtures("sgl_kernel")
def test_xpu_honours_every_call(call, assert_honours):
    assert_honours(XpuFlashAttentionBackend, "xpu", call)


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


@pytest.mark.usefixtures("torch_npu")
def test_npu_honours_every_call(call, assert_honours):
    assert_honours(NpuFlashAttentionBackend, "npu", call)


@pytest.mark.parametrize(
    ("platform", "backend"),
    [
        (PlatformEnum.MUSA, MusaFlashAttentionBackend),
        (PlatformEnum.XPU, XpuFlashAttentionBackend),
        (PlatformEnum.NPU, NpuFlashAttentionBackend),
    ],
    ids=str,
)
def test_fa_means_the_platforms_own_library(platform, backend):
    assert find_backend(AttentionBackendEnum.FA, platform) is backend


def test_npu_serves_ring_attention(request_on):
    packages = (("torch_npu", "torch-npu", "2.9.0"),)
    request = request_on(PlatformEnum.NPU, packages=packages, needs=(Feature.RING,))
    assert NpuFlashAttentionBackend.unsupported_reasons(request) == ()
