import pytest
import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.layers.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttnConfig,
)
from multimodal_gen.runtime.layers.attention.config import build_config
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.layers.attention.scope import BackendPreference, Source
from multimodal_gen.runtime.layers.attention.selector import resolve
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from tests.helpers.inputs import make_qkv

FA2 = ("flash_attn.flash_attn_interface", "flash-attn", "2.8.3")
FA3 = ("flash_attn_interface", "flash_attn_3", "3.0.0b1")
FA3_FWD = ("fa3_fwd_interface", "fa3-fwd", "0.0.3")
FA4 = ("flash_attn.cute", "flash-attn-4", "4.0.0b36")


PACKED = "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"


@pytest.fixture
def fa2(flash_package):
    def answer(call, out, lse):
        if lse is None or not call.return_attn_probs:
            return out
        return out, lse.masked_fill(lse == -torch.inf, torch.inf), None  # what it stores

    flash_package(
        "flash_attn",
        dense="q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), "
        "softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False",
        packed=f"{PACKED}, dropout_p=0.0, softmax_scale=None, causal=False",
        answer=answer,
        holds=lambda call: call.dropout_p == 0.0,
    )


def install_fa3(flash_package, module):
    flash_package(
        module,
        dense="q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, "
        "v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, "
        "pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False",
        packed=f"{PACKED}, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False",
        answer=lambda call, out, lse: (
            (out, lse) if lse is not None and call.return_attn_probs else out
        ),
    )


@pytest.fixture
def fa3(flash_package):
    install_fa3(flash_package, "flash_attn_interface")


@pytest.fixture
def fa3_fwd(flash_package):
    install_fa3(flash_package, "fa3_fwd_interface")


@pytest.fixture
def fa4(flash_package):
    flash_package(
        "flash_attn.cute",
        dense="q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, "
        "window_size=(None, None), return_lse=False",
        packed="q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
        "max_seqlen_k=None, softmax_scale=None, causal=False, return_lse=False",
        answer=lambda call, out, lse: (out, lse if call.return_lse else None),
        holds=lambda call: call.qv is None,
    )


VARIANTS = ["fa2", "fa3", "fa3_fwd", "fa4", "fa4_fwd", "fa4_sm100"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_version_honours_every_call(variant, call, assert_honours, request):
    request.getfixturevalue("fa4" if variant.startswith("fa4") else variant)
    assert_honours(FlashAttentionBackend, variant, call)


def test_every_variant_has_a_library_here():
    assert {v.name for v in FlashAttentionBackend.variants} == set(VARIANTS)


def test_a_mask_is_refused_not_dropped(fa3):
    q, k, v = make_qkv(1, 8, 2, 64, dtype=torch.bfloat16)
    impl = FlashAttentionImpl(2, 64, 0.1, variant="fa3")
    mask = torch.ones(1, 1, 1, 8, dtype=torch.bool)
    with pytest.raises(UsageError, match=r"attn_mask must be None on fa, got .* \[1, 1, 1, 8\]"):
        impl.forward(q, k, v, attn_mask=mask)


def test_the_forward_only_build_refuses_gradients(fa3_fwd):
    q, k, v = make_qkv(1, 8, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    impl = FlashAttentionImpl(2, 64, 0.1, variant="fa3_fwd")
    with pytest.raises(UsageError, match=r"must not require grad on fa \(fa3_fwd\)"):
        impl.forward(q, k, v)
    with torch.no_grad():
        assert impl.forward(q, k, v).shape == q.shape


def test_an_unknown_variant_names_the_known_ones():
    with pytest.raises(UsageError, match=r"variant must be one of fa3, fa3_fwd, fa4, .* got ''"):
        FlashAttentionImpl(2, 64, 0.1)


def chosen(request, config=None):
    variant = FlashAttentionBackend.choose_variant(request, config)
    return variant.name if variant else None


def test_the_best_version_for_the_gpu_is_chosen(request_on):
    everything = (FA2, FA3, FA3_FWD, FA4)

    def on(capability, packages=everything, **changes):
        cuda = PlatformEnum.CUDA
        return chosen(request_on(cuda, capability=capability, packages=packages, **changes))

    assert on((9, 0)) == "fa3"
    assert on((9, 0), (FA2, FA3_FWD, FA4)) == "fa3_fwd"
    assert on((9, 0), (FA2, FA4)) == "fa4"
    assert on((9, 0), (FA3_FWD, FA4), dtype=torch.float16) == "fa4"
    assert on((9, 0), (FA3_FWD, FA4), needs=(Feature.BACKWARD,)) == "fa4"
    assert on((9, 0), (FA4,), head_size=80) == "fa4_fwd"
    assert on((9, 0), (FA2, FA4), head_size=80, needs=(Feature.BACKWARD,)) == "fa2"
    assert on((10, 0)) == "fa4_sm100"
    assert on((10, 0), head_size=256) == "fa2"
    assert on((8, 0)) == "fa2"
    assert on((12, 0)) == "fa2"
    assert on((7, 5)) is None
    assert on((9, 0), head_size=100) is None
    assert on((9, 0), dtype=torch.float32) is None
    rocm = request_on(PlatformEnum.ROCM, capability=(9, 4), packages=(FA2,))
    assert chosen(rocm) == "fa2"


def test_the_configured_version_is_honoured(request_on):
    request = request_on(PlatformEnum.CUDA, capability=(9, 0), packages=(FA2, FA3_FWD, FA4))
    by_version = {
        version: chosen(request, FlashAttnConfig(version=version))
        for version in ("auto", "2", "3", "4")
    }
    assert by_version == {"auto": "fa3_fwd", "2": "fa2", "3": "fa3_fwd", "4": "fa4"}


def test_the_selector_passes_the_configuration_on(request_on):
    request = request_on(PlatformEnum.CUDA, capability=(9, 0), packages=(FA2, FA3_FWD))
    for version, variant in (("2", "fa2"), ("3", "fa3_fwd")):
        asked = BackendPreference(
            source=Source.SETTINGS,
            backend=AttentionBackendEnum.FA,
            config=FlashAttnConfig(version=version),
        )
        assert resolve(request, asked).variant == variant


def test_a_version_that_is_missing_falls_back_with_its_own_reasons_only(request_on):
    request = request_on(PlatformEnum.CUDA, capability=(9, 0), packages=(FA2, FA3_FWD))
    config = FlashAttnConfig(version="4")
    asked = BackendPreference(
        source=Source.SETTINGS, backend=AttentionBackendEnum.FA, config=config
    )
    selection = resolve(request, asked)
    assert selection.backend is AttentionBackendEnum.TORCH_SDPA
    assert selection.fallback
    text = "; ".join(selection.rejected[0].reasons)
    assert "fa4: needs the package flash_attn.cute, which is not installed" in text
    assert "fa2" not in text


def test_reasons_leave_out_variants_for_other_platforms(request_on):
    reasons = FlashAttentionBackend.unsupported_reasons(request_on(PlatformEnum.ROCM))
    assert reasons == (
        "needs the package flash_attn.flash_attn_interface, which is not installed "
        "(pip install flash-attn --no-build-isolation)",
    )


def test_reasons_leave_out_variants_for_other_gpus(request_on):
    def named(capability):
        request = request_on(PlatformEnum.CUDA, capability=capability)
        reasons = FlashAttentionBackend.unsupported_reasons(request)
        return [reason.partition(":")[0] for reason in reasons]

    assert named((9, 0)) == ["fa3", "fa3_fwd", "fa4", "fa4_fwd", "fa2"]
    assert named((10, 0)) == ["fa4_sm100", "fa2"]


def test_reasons_name_every_variant_where_none_is_for_the_gpu(request_on):
    packages = (FA2, FA3, FA3_FWD, FA4)
    request = request_on(PlatformEnum.CUDA, capability=(7, 5), packages=packages)
    reasons = FlashAttentionBackend.unsupported_reasons(request)
    assert [reason.partition(":")[0] for reason in reasons] == [
        variant.name for variant in FlashAttentionBackend.variants
    ]
    assert all("needs compute capability" in reason for reason in reasons)


def test_a_wrong_version_names_the_valid_ones():
    with pytest.raises(ConfigError, match=r"version.*'5'"):
        build_config(FlashAttnConfig, {"version": "5"}, backend="fa")


def test_auto_prefers_sdpa_to_flash_attention_2_from_capability_9_on(request_on):
    def against(capability, packages, needs=()):
        return FlashAttentionBackend.reasons_against_auto(
            request_on(PlatformEnum.CUDA, capability=capability, packages=packages, needs=needs)
        )

    (reason,) = against((9, 0), (FA2,))
    assert reason.startswith("only FlashAttention 2 is usable here")
    assert "this GPU has 9.0" in reason
    assert against((9, 0), (FA2, FA3)) == ()
    assert against((8, 0), (FA2,)) == ()
    assert against((9, 0), (FA2,), needs=(Feature.VARLEN,)) == ()
    rocm = request_on(PlatformEnum.ROCM, capability=(9, 4), packages=(FA2,))
    assert FlashAttentionBackend.reasons_against_auto(rocm) == ()
