from itertools import product

import pytest
import torch

from multimodal_gen.errors import ConfigError, UnsupportedBackendError, UsageError
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
from tests.helpers.reference import reference_attention
from tests.helpers.tolerance import assert_within_e4m3_budget
from tests.runtime.layers.attention.backends.conftest import takes

FA2 = ("flash_attn.flash_attn_interface", "flash-attn", "2.8.3")
FA3 = ("flash_attn_interface", "flash_attn_3", "3.0.0b1")
FA3_FWD = ("fa3_fwd_interface", "fa3-fwd", "0.0.3")
FA4 = ("flash_attn.cute", "flash-attn-4", "4.0.0b36")


FA3_DENSE = (
    "q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, "
    "v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, "
    "pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
)
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
        dense=FA3_DENSE,
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


def install_fa3_in_e4m3(fake_package, module):
    """Make a package importable that computes as its kernels do on what it is given."""

    @takes(FA3_DENSE)
    def flash_attn_func(call):
        batch, heads = call.k.shape[0], call.k.shape[2]
        values = []
        for x, scale in (
            (call.q, call.q_descale),
            (call.k, call.k_descale),
            (call.v, call.v_descale),
        ):
            assert x.dtype is torch.float8_e4m3fn
            assert x.stride(-1) == 1
            assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (batch, heads))
            of_heads = scale.double().repeat_interleave(x.shape[2] // heads, dim=1)
            values.append(x.double() * of_heads[:, None, :, None])
        out, lse = reference_attention(*values, scale=call.softmax_scale, causal=call.causal)
        out = out.to(torch.bfloat16)
        return (out, lse.float()) if call.return_attn_probs else out

    fake_package(module, flash_attn_func=flash_attn_func, flash_attn_varlen_func=None)


@pytest.fixture(params=["flash_attn_interface", "fa3_fwd_interface"])
def fp8(request, fake_package):
    install_fa3_in_e4m3(fake_package, request.param)
    return {"flash_attn_interface": "fa3_fp8", "fa3_fwd_interface": "fa3_fwd_fp8"}[request.param]


VARIANTS = ["fa2", "fa3", "fa3_fwd", "fa4", "fa4_fwd", "fa4_sm100"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_version_honours_every_call(variant, call, assert_honours, request):
    request.getfixturevalue("fa4" if variant.startswith("fa4") else variant)
    assert_honours(FlashAttentionBackend, variant, call)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp8_honours_every_call_in_the_callers_dtype(call, dtype, fp8, assert_honours_in_e4m3):
    assert_honours_in_e4m3(FlashAttentionBackend, fp8, call, dtype)


def test_fp8_scales_every_sample_and_head_by_itself(fp8):
    q, k, v = make_qkv(2, 48, 4, 64, num_kv_heads=2, dtype=torch.bfloat16)
    of_heads = torch.tensor([[1.0, 500.0], [0.002, 0.0]], dtype=torch.bfloat16)[:, None, :, None]
    k, v = k * of_heads, v * of_heads.flip(0)
    q = q / of_heads.repeat_interleave(2, dim=2).clamp_min(0.002)
    out = FlashAttentionImpl(4, 64, 0.2, num_kv_heads=2, variant=fp8).forward(q, k, v)
    for sample, head in product(range(2), range(4)):
        places = (q, head), (k, head // 2), (v, head // 2), (out, head)
        *part, found = (x[sample, None, :, i, None] for x, i in places)
        if part[2].any():
            assert_within_e4m3_budget(found, None, *part, scale=0.2)
        else:
            assert not found.any()


def test_fp8_refuses_gradients(fp8):
    q, k, v = make_qkv(1, 8, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(UsageError, match=rf"must not require grad on fa \({fp8}\)"):
        FlashAttentionImpl(2, 64, 0.1, variant=fp8).forward(q, k, v)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(5, 0), (0, 5), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_fp8_without_queries_or_keys_gives_zeros(fp8, num_queries, num_keys, causal):
    q, k = torch.ones(2, num_queries, 4, 32), torch.ones(2, num_keys, 4, 32)
    out, lse = FlashAttentionImpl(4, 32, 0.2, causal, variant=fp8).forward_lse(q, k, k)
    assert torch.equal(out, torch.zeros(2, num_queries, 4, 32))
    assert torch.equal(lse, torch.full((2, 4, num_queries), -torch.inf))


def test_every_variant_has_a_library_here():
    ours = {"fa3_fp8", "fa3_fwd_fp8"}
    assert {v.name for v in FlashAttentionBackend.variants} == set(VARIANTS) | ours


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
    with pytest.raises(UsageError, match=r"must be one of fa3, fa3_fwd, fa3_fp8, .* got ''"):
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


def test_fp8_runs_for_those_who_ask_alone(request_on):
    def on(config, packages=(FA2, FA3, FA3_FWD, FA4), capability=(9, 0), **changes):
        cuda = PlatformEnum.CUDA
        request = request_on(cuda, capability=capability, packages=packages, **changes)
        return chosen(request, config)

    asked = FlashAttnConfig(kernel="fp8")
    assert on(asked) == "fa3_fp8"
    assert on(asked, (FA2, FA3_FWD)) == "fa3_fwd_fp8"
    assert on(asked, (FA3_FWD,), dtype=torch.float16) == "fa3_fwd_fp8"
    assert on(FlashAttnConfig(kernel="fp8", version="3")) == "fa3_fp8"
    for refused in (
        {"packages": (FA2, FA4)},
        {"capability": (8, 0)},
        {"capability": (10, 0)},
        {"dtype": torch.float32},
        {"head_size": 72},
        {"needs": (Feature.BACKWARD,)},
        {"needs": (Feature.VARLEN,)},
    ):
        assert on(asked, **refused) is None, refused
    for config in (None, FlashAttnConfig(), FlashAttnConfig(version="3")):
        assert not on(config).endswith("fp8")
        # Where nothing else serves the layer it does not either.
        assert on(config, (FA3_FWD,), dtype=torch.float16) is None


@pytest.mark.parametrize("version", ["2", "4"])
def test_fp8_is_refused_of_versions_that_have_none(version):
    with pytest.raises(ConfigError, match=rf"`version` of fa must be 3 with .*, got {version}"):
        FlashAttnConfig(kernel="fp8", version=version)


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (
            {"platform": PlatformEnum.CUDA, "capability": (8, 0)},
            "fa3_fp8: needs compute capability",
        ),
        ({"platform": PlatformEnum.XPU}, "fa: has no such kernel on xpu"),
    ],
)
def test_fp8_is_refused_where_it_cannot_run_and_nothing_else_runs(request_on, machine, reason):
    request = request_on(**machine, packages=(FA2, FA3))
    asked = BackendPreference(
        source=Source.SETTINGS,
        backend=AttentionBackendEnum.FA,
        config=FlashAttnConfig(kernel="fp8"),
    )
    with pytest.raises(UnsupportedBackendError, match="with kernel=fp8 cannot serve") as refused:
        resolve(request, asked)
    assert reason in str(refused.value)
    assert "fa2" not in str(refused.value)


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
        variant.name for variant in FlashAttentionBackend.variants_for(None)
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
