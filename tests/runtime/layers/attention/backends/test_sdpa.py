import math

import pytest
import torch

from multimodal_gen.runtime.layers.attention.backends.sdpa import (
    CudnnSDPABackend,
    SDPABackend,
    SDPAImpl,
)
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.platforms import PlatformEnum
from tests.helpers.inputs import make_qkv
from tests.helpers.reference import reference_attention
from tests.helpers.tolerance import assert_within_error_budget

SCALE = 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_honours_every_call(call, assert_honours, dtype):
    assert_honours(SDPABackend, "torch_sdpa", call, dtype=dtype)


@pytest.mark.parametrize("head_size", [1, 17, 40, 72, 80, 128, 256])
def test_it_takes_any_head_size(call, assert_honours, head_size):
    assert_honours(SDPABackend, "torch_sdpa", call, head_size=head_size)


def test_float64_works_with_its_log_sum_exp():
    q, k, v = make_qkv(1, 12, 2, 16, dtype=torch.float64)
    out, lse = SDPAImpl(2, 16, SCALE).forward_lse(q, k, v)
    exact, exact_lse = reference_attention(q, k, v, scale=SCALE)
    assert torch.allclose(out, exact, atol=1e-12)
    assert torch.allclose(lse.double(), exact_lse, atol=1e-5)


def masks(num_queries, num_keys):
    generator = torch.Generator().manual_seed(0)
    dense = torch.rand(2, 4, num_queries, num_keys, generator=generator) > 0.4
    dense[0, 1, 3] = False  # one row that sees nothing
    keys = torch.rand(2, 1, 1, num_keys, generator=generator) > 0.4
    keys[1] = False  # one sample without keys
    bias = torch.randn(1, 4, num_queries, num_keys, generator=generator)
    return {
        "dense": dense,
        "dense_one_head": dense[:, :1],
        "keys": keys,
        "bias": bias,
        "bias_hiding": bias.masked_fill(~dense, -math.inf),
    }


@pytest.mark.parametrize("kind", ["dense", "dense_one_head", "keys", "bias", "bias_hiding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_add_to_scale_causality_and_grouped_heads(kind, dtype, num_kv_heads, causal):
    q, k, v = make_qkv(2, 20, 4, 32, num_keys=28, num_kv_heads=num_kv_heads, dtype=dtype)
    mask = masks(20, 28)[kind]
    if mask.dtype is not torch.bool:
        mask = mask.to(dtype)
    out = SDPAImpl(4, 32, SCALE, causal, num_kv_heads).forward(q, k, v, attn_mask=mask)
    assert_within_error_budget(out, q, k, v, scale=SCALE, causal=causal, mask=mask)


def test_gradients_match_and_stay_finite_where_a_row_sees_nothing():
    q, k, v = make_qkv(2, 20, 4, 16, dtype=torch.float64, requires_grad=True)
    mask = masks(20, 20)["dense"]
    weight = torch.randn(2, 20, 4, 16, dtype=torch.float64)
    got = torch.autograd.grad(
        (SDPAImpl(4, 16, SCALE).forward(q, k, v, attn_mask=mask) * weight).sum(), (q, k, v)
    )
    sees = mask.any(-1, keepdim=True)
    exact, _ = reference_attention(q, k, v, scale=SCALE, mask=mask | ~sees)
    exact = torch.where(sees.transpose(1, 2), exact, 0.0)
    want = torch.autograd.grad((exact * weight).sum(), (q, k, v))
    for mine, theirs in zip(got, want, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-10)


def test_values_may_have_their_own_head_size():
    q, k, _ = make_qkv(2, 12, 4, 32)
    v = make_qkv(2, 12, 4, 24, seed=1).value
    impl = SDPAImpl(4, 32, SCALE)
    assert_within_error_budget(impl.forward(q, k, v), q, k, v, scale=SCALE)
    out, _ = impl.forward_lse(q, k, v)
    assert_within_error_budget(out, q, k, v, scale=SCALE)


def test_inputs_whose_last_dimension_is_strided_work():
    q, k, v = (x.mT.contiguous().mT for x in make_qkv(2, 12, 4, 32))
    assert q.stride(-1) != 1
    assert_within_error_budget(SDPAImpl(4, 32, SCALE).forward(q, k, v), q, k, v, scale=SCALE)


def test_it_compiles_without_a_graph_break():
    impl = SDPAImpl(4, 32, SCALE, causal=True)
    q, k, v = make_qkv(1, 12, 4, 32)
    torch._dynamo.reset()  # functions that it gave up on in models of other tests
    compiled = torch.compile(impl.forward, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), impl.forward(q, k, v))


def test_only_platforms_with_a_log_sum_exp_declare_ring(request_on):
    ring = (Feature.RING,)
    for platform in (PlatformEnum.CUDA, PlatformEnum.ROCM, PlatformEnum.CPU):
        assert SDPABackend.unsupported_reasons(request_on(platform, needs=ring)) == ()
    for platform in (PlatformEnum.NPU, PlatformEnum.XPU, PlatformEnum.MPS, PlatformEnum.MUSA):
        assert SDPABackend.unsupported_reasons(request_on(platform)) == ()
        reasons = SDPABackend.unsupported_reasons(request_on(platform, needs=ring))
        assert reasons == ("does not support ring",)


def test_cudnn_states_its_limits(request_on):
    def reasons(**changes):
        return CudnnSDPABackend.unsupported_reasons(
            request_on(PlatformEnum.CUDA, **{"capability": (9, 0), **changes})
        )

    assert reasons() == ()
    assert reasons(head_size=256) == ()
    assert reasons(head_size=264) == ("needs head size <= 256, multiple of 8, got 264",)
    assert reasons(capability=(8, 6), head_size=136) == (
        "needs head size <= 128, multiple of 8, got 136",
    )
    assert reasons(dtype=torch.float32) == ("needs dtype bfloat16 or float16, got float32",)
    assert "sm80: needs compute capability >= 8.0, this GPU has 7.5" in reasons(capability=(7, 5))
    assert CudnnSDPABackend.unsupported_reasons(request_on(PlatformEnum.CPU)) == (
        "needs platform cuda, this is cpu",
    )


def test_cudnn_raises_where_there_is_no_cudnn():
    q, k, v = make_qkv(1, 8, 2, 64, dtype=torch.bfloat16)
    impl = CudnnSDPABackend.get_impl_cls()(2, 64, SCALE)
    with pytest.raises(NotImplementedError, match="_scaled_dot_product_cudnn_attention"):
        impl.forward(q, k, v)
