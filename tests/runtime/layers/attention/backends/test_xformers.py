import pytest
import torch
import torch.nn.functional as F

from multimodal_gen.runtime.layers.attention.backends.xformers import XFormersBackend


class LowerTriangularFromBottomRightMask:
    """The package's bottom-right causality."""


@pytest.fixture
def xformers(fake_package, compute):
    def attend(query, key, value, attn_bias, scale):
        assert query.shape[2] == key.shape[2] == value.shape[2], "4-D inputs have equal heads"
        assert attn_bias is None or isinstance(attn_bias, LowerTriangularFromBottomRightMask)
        return compute(query, key, value, scale, attn_bias is not None)

    def memory_efficient_attention(
        query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
    ):
        return attend(query, key, value, attn_bias, scale)[0]

    def memory_efficient_attention_forward_requires_grad(
        query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
    ):
        out, lse = attend(query, key, value, attn_bias, scale)
        return out, F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.nan)

    fake_package(
        "xformers.ops.fmha.attn_bias",
        LowerTriangularFromBottomRightMask=LowerTriangularFromBottomRightMask,
    )
    functions = (memory_efficient_attention, memory_efficient_attention_forward_requires_grad)
    fake_package("xformers.ops", **{f.__name__: f for f in functions})


def test_it_honours_every_call(call, xformers, assert_honours):
    assert_honours(XFormersBackend, "xformers", call)
