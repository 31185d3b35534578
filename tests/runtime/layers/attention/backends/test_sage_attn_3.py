import pytest
import torch

from multimodal_gen.runtime.layers.attention.backends.sage_attn_3 import (
    SageAttention3Backend,
    SageAttention3Impl,
)
from multimodal_gen.runtime.platforms import PlatformEnum
from multimodal_gen.testing.inputs import make_qkv
from multimodal_gen.testing.tolerance import assert_within_error_budget


@pytest.fixture
def sage3(fake_package, compute):
    seen = []

    def sageattn3_blackwell(
        q, k, v, attn_mask=None, is_causal=False, per_block_mean=True, **kwargs
    ):
        assert attn_mask is None, "the package would ignore it"
        assert not kwargs, "the package would ignore these"
        assert q.shape[1] == k.shape[1] == v.shape[1], "no grouped heads"
        assert not is_causal or q.shape[2] == k.shape[2]
        seen.append(q)
        k -= k.mean(dim=2, keepdim=True)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compute(q, k, v, q.shape[-1] ** -0.5, is_causal)[0].transpose(1, 2)

    fake_package("sageattn3", sageattn3_blackwell=sageattn3_blackwell)
    return seen


def test_it_honours_every_call(call, sage3, assert_honours):
    assert_honours(SageAttention3Backend, "sage3", call, quantised=True)


def test_the_query_is_left_alone_at_the_packages_own_scale(sage3):
    q, k, v = make_qkv(1, 8, 2, 64, dtype=torch.bfloat16)
    out = SageAttention3Impl(2, 64, 64**-0.5).forward(q, k, v)
    assert torch.equal(sage3[0], q.transpose(1, 2))
    assert_within_error_budget(out, q, k, v, scale=64**-0.5, quantised=True)


def test_it_needs_a_gpu_the_package_runs_on(request_on):
    package = (("sageattn3", "sageattn3", "1.0.0"),)

    def reasons(capability, **changes):
        return SageAttention3Backend.unsupported_reasons(
            request_on(PlatformEnum.CUDA, capability=capability, packages=package, **changes)
        )

    assert reasons((12, 0)) == ()
    assert reasons((9, 0)) == ("needs compute capability 12.0 or 12.1, this GPU has 9.0",)
    assert reasons((12, 0), head_size=256) == ("needs head size 64/128, got 256",)
