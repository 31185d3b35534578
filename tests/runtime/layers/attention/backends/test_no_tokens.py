"""Calls without queries or keys, which no library is asked about."""

import math

import pytest
import torch

from multimodal_gen.runtime.layers.attention.backends.flex_attn import FlexAttentionBackend
from multimodal_gen.runtime.layers.attention.backends.sage_attn import SageAttentionBackend
from multimodal_gen.runtime.layers.attention.backends.sdpa import CudnnSDPABackend, SDPABackend
from multimodal_gen.runtime.layers.attention.backends.triton_attn import TritonAttentionBackend

KERNELS = {
    SDPABackend: "torch_sdpa",
    CudnnSDPABackend: "sm90",
    FlexAttentionBackend: "unfused",
    TritonAttentionBackend: "reference",
    SageAttentionBackend: "reference",
}


@pytest.mark.parametrize("backend", KERNELS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(5, 0), (0, 5), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_without_queries_or_keys_the_output_is_zero_and_its_weight_nothing(
    backend, num_queries, num_keys, causal
):
    q = torch.ones(2, num_queries, 4, 32, dtype=torch.bfloat16)
    size = 24 if backend in (SDPABackend, CudnnSDPABackend) else 32
    k, v = q.new_ones(2, num_keys, 4, 32), q.new_ones(2, num_keys, 4, size)
    impl = backend.get_impl_cls()(4, 32, 0.2, causal, variant=KERNELS[backend])
    want = torch.zeros(2, num_queries, 4, size, dtype=torch.bfloat16)
    if backend is not CudnnSDPABackend:  # which asks cuDNN all the same
        assert torch.equal(impl.forward(q, k, v), want)
    out, lse = impl.forward_lse(q, k, v)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, want)
    assert torch.equal(lse, torch.full((2, 4, num_queries), -math.inf))
