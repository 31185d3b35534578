"""."""

from dataclasses import replace

import pytest
import torch

from multimodal_gen.errors import ConfigError, UnsupportedBackendError, UsageError
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.backends.sage_attn import (
    SageAttention3Backend,
    SageAttention3Impl,
    SageAttentionBackend,
    SageAttentionImpl,
    SageAttnConfig,
)
from multimodal_gen.runtime.layers.attention.config import build_config
from multimodal_gen.runtime.layers.attention.request import AttentionRole, Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from tests.helpers.inputs import make_qkv
from tests.helpers.tolerance import (
    assert_lse_within_error_budget,
    assert_within_error_budget,
)


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


@pytest.mark.parametrize("variant", ["gluon", "triton"])
def test_its_own_kernels_honour_every_call(variant, call, monkeypatch):
    """On the engine's reference: what the layer asks for is the same for every kernel."""
    features = next(v.features for v in SageAttentionBackend.variants if v.name == variant)
    if not call.needs <= features:
        assert call.needs - features == {Feature.CAUSAL}
        return
    impl = SageAttentionImpl(4, 64, 0.2, call.causal, call.num_kv_heads, variant="reference")
    q, k, v = call.inputs(64, torch.bfloat16)
    out, lse = impl.forward_lse(q, k, v)
    expected = {"scale": 0.2, "causal": call.causal, "quantised": True}
    assert_within_error_budget(out, q, k, v, **expected)
    assert_lse_within_error_budget(lse, q, k, **expected)
    assert torch.equal(out, impl.forward(q, k, v))


def test_only_the_portable_kernel_is_causal():
    causal = {v.name: Feature.CAUSAL in v.features for v in SageAttentionBackend.variants}
    assert causal["triton"]
    assert not causal["gluon"]


@pytest.mark.parametrize("masked", [0, 7, 200])
def test_masked_keys_have_no_influence_and_may_hold_anything(masked):
    q, k, v = make_qkv(2, 40, 4, 64, num_keys=300, num_kv_heads=2, dtype=torch.bfloat16)
    keep = torch.ones(2, 300, dtype=torch.bool)
    keep[0, 300 - masked :] = False
    keep[1, 5 : 5 + masked // 2] = False
    mask = keep[:, None, None, :]
    dirty = (x.masked_fill(~keep[..., None, None], torch.nan) for x in (k, v))
    impl = SageAttentionImpl(4, 64, 0.2, False, 2, variant="reference")
    out = impl.forward(q, *dirty, attn_mask=mask)
    assert_within_error_budget(out, q, k, v, scale=0.2, mask=mask, quantised=True)


def test_a_mask_on_a_causal_layer_is_refused_rather_than_dropped():
    q, k, v = make_qkv(1, 40, 2, 64, dtype=torch.bfloat16)
    impl = SageAttentionImpl(2, 64, 0.2, True, variant="reference")
    with pytest.raises(UsageError, match="attn_mask must be None on causal sage_attn"):
        impl.forward(q, k, v, attn_mask=torch.ones(1, 1, 1, 40, dtype=torch.bool))


TRITON = ("triton", "triton", "3.6.0")


@pytest.mark.parametrize(
    ("kernel", "packages", "capability", "expected"),
    [
        ("auto", (TRITON,), (9, 0), "gluon"),
        ("auto", (TRITON,), (8, 0), "triton"),
        ("auto", (("triton", "triton", "3.5.1"),), (9, 0), "triton"),
        ("auto", (("triton", "triton", "3.9.0"),), (9, 0), "gluon"),
        ("auto", (TRITON, ("sageattention", "sageattention", "2.2.0")), (9, 0), "sage2"),
        ("auto", (TRITON, ("sageattention", "sageattention", "1.0.6")), (9, 0), "gluon"),
        ("auto", (TRITON, ("sageattention", "sageattention", "1.0.6")), (8, 6), "triton"),
        ("triton", (TRITON, ("sageattention", "sageattention", "2.2.0")), (9, 0), "gluon"),
        ("sageattention", (TRITON, ("sageattention", "sageattention", "1.0.6")), (9, 0), "sage1"),
        ("sageattention", (TRITON,), (9, 0), None),
        (
            "spas_sage_attn",
            (("spas_sage_attn", "spas_sage_attn", "0.1.0"),),
            (9, 0),
            "spas_sage_attn",
        ),
    ],
)
def test_the_kernel_is_the_fastest_that_the_parameter_leaves(
    kernel, packages, capability, expected, request_on
):
    config = build_config(SageAttnConfig, {"kernel": kernel}, backend="sage_attn")
    request = request_on(PlatformEnum.CUDA, capability=capability, packages=packages)
    request = replace(request, role=AttentionRole.SELF, dtype=torch.bfloat16)
    variant = SageAttentionBackend.choose_variant(request, config)
    assert (variant.name if variant else None) == expected


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"head_size": 160}, "needs head size <= 128, multiple of 8, got 160"),
        ({"capability": (7, 5)}, "needs compute capability >= 8.0, this GPU has 7.5"),
    ],
)
def test_what_its_own_kernels_do_not_support_is_refused_in_one_line(fields, reason, request_on):
    config = build_config(SageAttnConfig, {"kernel": "triton"}, backend="sage_attn")
    request = request_on(PlatformEnum.CUDA, packages=(TRITON,), **{"capability": (8, 0), **fields})
    reasons = SageAttentionBackend.unsupported_reasons(request, config)
    assert any(reason in found for found in reasons)
    assert all("\n" not in found for found in reasons)


def e4m3(**parameters):
    return build_config(SageAttnConfig, {"values": "e4m3", **parameters}, backend="sage_attn")


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), "gluon"), ((8, 9), "triton")])
def test_e4m3_values_leave_the_built_in_kernels_alone(capability, expected, request_on):
    packages = (TRITON, ("sageattention", "sageattention", "2.2.0"))
    request = request_on(PlatformEnum.CUDA, capability=capability, packages=packages)
    variant = SageAttentionBackend.choose_variant(request, e4m3())
    assert variant is not None
    assert variant.name == expected


@pytest.mark.parametrize("kernel", ["auto", "triton"])
def test_a_gpu_without_e4m3_is_the_only_reason_given(kernel, request_on):
    request = request_on(PlatformEnum.CUDA, capability=(8, 6), packages=(TRITON,))
    assert SageAttentionBackend.choose_variant(request, e4m3(kernel=kernel)) is None
    (reason,) = SageAttentionBackend.unsupported_reasons(request, e4m3(kernel=kernel))
    assert reason == (
        "needs compute capability >= 8.9 for e4m3 values, this GPU has 8.6; use values=16-bit"
    )


def test_e4m3_values_are_refused_for_packages():
    with pytest.raises(ConfigError, match="`values` of sage_attn must be 16-bit with `kernel` sag"):
        e4m3(kernel="sageattention")


def test_e4m3_values_reach_the_built_in_kernels():
    q, k, v = make_qkv(1, 150, 2, 64, dtype=torch.bfloat16)
    impl = SageAttentionImpl(2, 64, 0.2, variant="reference", config=e4m3())
    out, lse = impl.forward_lse(q, k, v)
    assert torch.equal(out, impl.forward(q, k, v))
    finer, same = SageAttentionImpl(2, 64, 0.2, variant="reference").forward_lse(q, k, v)
    torch.testing.assert_close(lse, same)
    error = (out - finer).float().norm() / finer.float().norm()
    assert 0.01 < error < 0.06, "an e4m3 number errs by 2 % on average, up to 6 %"


def test_spargeattn_gets_a_mask_of_every_block(fake_package):
    def block_sparse_sage2_attn_cuda(q, k, v, mask_id, scale, pvthreshd, tensor_layout):
        assert mask_id.shape == (1, 2, 2, 3)
        assert mask_id.all()
        assert tensor_layout == "HND"
        scores = (q.double() @ k.double().mT) * scale
        return (scores.softmax(-1) @ v.double()).to(q.dtype)

    fake_package("spas_sage_attn", block_sparse_sage2_attn_cuda=block_sparse_sage2_attn_cuda)
    q, k, v = make_qkv(1, 150, 2, 64, dtype=torch.bfloat16)
    impl = SageAttentionImpl(2, 64, 0.2, variant="spas_sage_attn")
    assert_within_error_budget(impl.forward(q, k, v), q, k, v, scale=0.2, quantised=True)
    causal = SageAttentionImpl(2, 64, 0.2, True, variant="spas_sage_attn")
    with pytest.raises(UnsupportedBackendError, match="has no causal variant of a mask"):
        causal.forward(q, k, v)


@pytest.mark.parametrize("name", ["sage_attn", "sage_sla_attn", "sparge_attn"])
def test_every_backend_of_spargeattns_kernel_knows_that_it_rounds(name):
    backend = find_backend(AttentionBackendEnum(name), "cuda")
    (variant,) = (each for each in backend.variants if each.name == "spas_sage_attn")
    assert min(backend.operand_bits, variant.operand_bits) == 8


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
