import pytest
import torch

from multimodal_gen.runtime.layers.attention.backends.sage_attn import (
    SageAttentionBackend,
    SageAttentionImpl,
    SageAttnConfig,
)
from multimodal_gen.runtime.layers.attention.config import build_config
from multimodal_gen.runtime.platforms import PlatformEnum
from multimodal_gen.testing.inputs import make_qkv


@pytest.fixture
def sage1(fake_package, compute):
    def sageattn(
        q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True, **kwargs
    ):
        assert not kwargs, "version 1 would ignore these"
        assert tensor_layout == "NHD"
        assert q.shape[-1] in (64, 96, 128)
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        assert not is_causal or q.shape[1] == k.shape[1]
        if smooth_k:
            k -= k.mean(dim=1, keepdim=True)
        return compute(q, k, v, sm_scale, is_causal)[0]

    fake_package("sageattention", sageattn=sageattn)


@pytest.fixture
def sage2(fake_package, compute):
    def sageattn(
        q,
        k,
        v,
        tensor_layout="HND",
        is_causal=False,
        sm_scale=None,
        return_lse=False,
        **kwargs,
    ):
        assert not kwargs, "the package would ignore these"
        assert tensor_layout == "NHD"
        assert not is_causal or q.shape[1] == k.shape[1]
        out, lse = compute(q, k, v, sm_scale, is_causal)
        return (out, lse) if return_lse else out

    fake_package("sageattention", sageattn=sageattn)


@pytest.mark.parametrize("variant", ["sage1", "sage2", "musa"])
def test_every_version_honours_every_call(variant, call, assert_honours, request):
    request.getfixturevalue("sage1" if variant == "sage1" else "sage2")
    assert_honours(SageAttentionBackend, variant, call, quantised=True)


def test_the_version_installed_decides_the_variant(request_on):
    def chosen(version, capability=(9, 0), **changes):
        packages = (("sageattention", "sageattention", version),)
        request = request_on(PlatformEnum.CUDA, capability=capability, packages=packages, **changes)
        variant = SageAttentionBackend.choose_variant(request)
        return variant.name if variant else None

    assert chosen("1.0.6") == "sage1"
    assert chosen("2.2.0") == "sage2"
    assert chosen("2.2.0", capability=(10, 0)) is None
    assert chosen("1.0.6", head_size=80) is None
    assert chosen("2.2.0", head_size=80) == "sage2"
    assert chosen("2.2.0", head_size=256) is None
    assert chosen("1.0.5") is None


def test_gradients_are_refused(sage2):
    q, k, v = make_qkv(1, 8, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(ValueError, match="must not require grad on sage_attn"):
        SageAttentionImpl(2, 64, 0.1, variant="sage2").forward(q, k, v)


def test_its_configuration_is_built_from_text():
    config = build_config(SageAttnConfig, {"kernel": "sageattention"}, backend="sage_attn")
    assert config.kernel == "sageattention"
