"""Selection on every kind of device, by simulation: pure functions of a request."""

import logging
from dataclasses import replace

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.requirements import HeadSizes
from multimodal_gen.runtime.layers.attention import selector
from multimodal_gen.runtime.layers.attention.layer import LocalAttention
from multimodal_gen.runtime.layers.attention.request import (
    AttentionRequest,
    AttentionRole,
    Feature,
)
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    LayerSite,
    Rule,
    SelectionScope,
    Source,
    decide,
    use_scope,
)
from multimodal_gen.runtime.layers.attention.selector import (
    FALLBACKS,
    AttentionRequirements,
    get_attn_backend,
    global_force_attn_backend,
    global_force_attn_backend_context_manager,
    prefer_supported,
    resolve,
    warn_of_fallback,
)
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from tests.helpers.fakes import (
    ALL_FEATURES,
    FakeDevice,
    fake_backend,
    simulated_environment,
)

FA, SDPA = AttentionBackendEnum.FA, AttentionBackendEnum.TORCH_SDPA
SAGE, SAGE_3 = AttentionBackendEnum.SAGE_ATTN, AttentionBackendEnum.SAGE_ATTN_3
FLEX, STA = AttentionBackendEnum.FLEX_ATTN, AttentionBackendEnum.SLIDING_TILE_ATTN
HALF = frozenset({torch.float16, torch.bfloat16})
NOWHERE = {"platforms": frozenset({PlatformEnum.OOT})}


def asked(backend, source=Source.SETTINGS, **fields) -> BackendPreference:
    return BackendPreference(source=source, backend=backend, **fields)


AUTO = BackendPreference(source=Source.AUTO)


def request(platform="cuda", capability=(8, 0), **fields) -> AttentionRequest:
    kind = PlatformEnum(platform)
    device = FakeDevice(platform=kind, capability=capability if platform == "cuda" else None)
    known = {"head_size": 128, "num_heads": 8, "num_kv_heads": 8, "dtype": torch.bfloat16}
    return AttentionRequest(environment=simulated_environment(device), **(known | fields))


@pytest.fixture
def dense(use_backends):
    """Return a function that installs the dense backends, each unless it is declared nowhere."""

    def install(**declared):
        names = ("fa", "torch_sdpa", "sage_attn", "sage_attn_3", "flex_attn")
        fields = {"fa": {"dtypes": HALF}, **declared}
        sparse = fake_backend("sliding_tile_attn", roles=frozenset({AttentionRole.SELF}))
        use_backends(*(fake_backend(name, **fields.get(name, {})) for name in names), sparse)

    return install


def test_an_explicit_request_that_is_supported_runs(dense):
    dense()
    for backend in (FA, SDPA, SAGE, SAGE_3, FLEX):
        selection = resolve(request(), asked(backend, detail="transformer.cross"))
        assert selection.backend is backend
        assert selection.reason == "asked for (settings by transformer.cross)"
        assert (selection.rejected, selection.fallback) == ((), False)


def test_nothing_asked_takes_the_first_of_the_platform(dense):
    dense()
    selection = resolve(request(), AUTO)
    assert (selection.backend, selection.source) == (FA, Source.AUTO)
    assert selection.reason == "first of cuda's automatic choices that serves this layer"


def test_an_automatic_choice_records_what_it_passed_over(dense):
    dense()
    selection = resolve(request(dtype=torch.float32), AUTO)
    assert selection.backend is SDPA
    assert [str(rejected) for rejected in selection.rejected] == [
        "fa: needs dtype bfloat16 or float16, got float32"
    ]
    assert not selection.fallback


def test_a_layer_default_that_is_unsupported_gives_way_once_and_without_a_warning(dense, caplog):
    dense()
    wish = asked(FA, Source.LAYER_DEFAULT)
    selection = resolve(request(dtype=torch.float32), wish)
    warn_of_fallback(selection)
    assert selection.backend is SDPA
    assert [rejected.backend for rejected in selection.rejected] == [FA]
    assert (selection.fallback, caplog.records) == (False, [])


def test_nothing_left_lists_every_candidate_with_its_reasons(dense):
    dense(torch_sdpa={"head_sizes": HeadSizes(maximum=64)})
    message = (
        r"no attention backend can serve cross attention with 8 heads \(2 key heads\) of size 128 "
        r"in float32 on cuda; tried fa: needs dtype bfloat16 or float16, got float32; torch_sdpa: "
        r"needs head size <= 64, got 128"
    )
    hard = request(dtype=torch.float32, num_kv_heads=2, role=AttentionRole.CROSS)
    with pytest.raises(UnsupportedBackendError, match=message):
        resolve(hard, AUTO)


def test_an_unsupported_request_without_fallback_is_refused_with_the_remedy(dense):
    dense(flex_attn={"head_sizes": HeadSizes(listed=(64,))})
    message = (
        r"attention backend flex_attn \(component transformer\) cannot serve self attention with "
        r"8 heads of size 128 in bfloat16 on cuda\. flex_attn: needs head size 64, got 128\. "
        r"Choose another backend \(`sglang attention list` shows what runs here\), or leave the "
        r"choice to auto"
    )
    with pytest.raises(UnsupportedBackendError, match=message):
        resolve(request(), asked(FLEX, Source.COMPONENT, detail="transformer"))


def test_an_unsupported_request_is_a_value_error(dense):
    dense(flex_attn=NOWHERE)
    with pytest.raises(ValueError, match=r"needs platform oot, this is cuda"):
        resolve(request(), asked(FLEX))


def test_the_table_holds_the_documented_fallbacks():
    assert dict(FALLBACKS) == {SAGE: FA, SAGE_3: SDPA, FA: SDPA}


@pytest.mark.parametrize(
    ("wanted", "missing", "served"),
    [
        (SAGE, ("sage_attn",), FA),
        (SAGE, ("sage_attn", "fa"), SDPA),
        (SAGE_3, ("sage_attn_3",), SDPA),
        (FA, ("fa",), SDPA),
    ],
)
def test_a_documented_fallback_warns_once_and_is_recorded(dense, caplog, wanted, missing, served):
    dense(**dict.fromkeys(missing, NOWHERE))
    selection = resolve(request(), asked(wanted))
    assert (selection.backend, selection.fallback) == (served, True)
    assert [str(rejected.backend) for rejected in selection.rejected] == list(missing)
    assert selection.asked.backend is wanted
    for _ in range(3):
        warn_of_fallback(selection)
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    nor = f", and neither can {missing[1]}" if missing[1:] else ""
    assert warning.getMessage() == (
        f"attention backend {wanted} (settings) cannot serve this layer{nor}, so {served} runs "
        f"instead: needs platform oot, this is cuda. To run it without this warning ask for "
        f"{served}; to refuse it set --strict-attention, or strict=True in apply()"
    )


def test_a_fallback_warning_says_which_override_asked_and_joins_what_variants_share(caplog):
    ask = asked(SAGE, Source.COMPONENT, detail="transformer.cross")
    warn_of_fallback(resolve(request(dtype=torch.float32), ask))
    (message,) = caplog.messages
    assert message.startswith(
        "attention backend sage_attn (component transformer.cross) cannot serve this layer, and "
        "neither can fa, so torch_sdpa runs instead: "
    )
    shared = "sage2, triton, sage1, spas_sage_attn: needs dtype bfloat16 or float16, got float32"
    assert f"; {shared}; " in message
    assert "\n" not in message


def test_a_fallback_warning_names_the_rule_of_the_platform(dense, caplog):
    dense()
    warn_of_fallback(resolve(request("mps"), asked(FLEX, detail="rule 2")))
    (message,) = caplog.messages
    assert message.startswith(
        "attention backend flex_attn (settings rule 2) cannot serve this layer, so torch_sdpa "
        "runs instead: mps always runs torch_sdpa. To run it without this warning ask for "
        "torch_sdpa; "
    )


@pytest.mark.parametrize("wanted", [SAGE, SAGE_3, FA], ids=str)
def test_strict_refuses_a_documented_fallback(dense, wanted):
    dense(**{str(wanted): NOWHERE})
    with pytest.raises(UnsupportedBackendError, match=rf"attention backend {wanted} .settings"):
        resolve(request(), asked(wanted), strict=True)


def test_a_fallback_that_cannot_serve_either_is_listed_in_the_error(dense):
    dense(sage_attn=NOWHERE, fa=NOWHERE, torch_sdpa=NOWHERE)
    with pytest.raises(
        UnsupportedBackendError, match=r"sage_attn: needs .*fa: needs .*torch_sdpa: needs platform"
    ):
        resolve(request(), asked(SAGE))


@pytest.mark.parametrize("wanted", [FA, SAGE, FLEX, STA], ids=str)
def test_apple_gpus_always_run_sdpa(dense, wanted):
    dense()
    selection = resolve(request("mps"), asked(wanted))
    assert (selection.backend, selection.fallback) == (SDPA, True)
    assert selection.reason == f"{wanted} cannot serve this layer: mps always runs torch_sdpa"
    with pytest.raises(UnsupportedBackendError, match=r"mps always runs torch_sdpa"):
        resolve(request("mps"), asked(wanted), strict=True)


def test_sdpa_on_apple_gpus_and_the_automatic_choice_there_are_no_fallbacks(dense):
    dense()
    for ask in (asked(SDPA), AUTO, asked(FA, Source.LAYER_DEFAULT)):
        selection = resolve(request("mps"), ask, strict=True)
        assert (selection.backend, selection.fallback) == (SDPA, False)


@pytest.mark.parametrize("platform", ["xpu", "musa", "npu", "cpu"])
def test_these_platforms_fall_back_to_sdpa_from_any_backend(dense, platform):
    dense(flex_attn=NOWHERE)
    selection = resolve(request(platform), asked(FLEX))
    assert (selection.backend, selection.fallback) == (SDPA, True)
    with pytest.raises(UnsupportedBackendError, match=rf"needs platform oot, this is {platform}"):
        resolve(request(platform), asked(FLEX), strict=True)


@pytest.mark.parametrize(
    ("platform", "served"), [("xpu", SDPA), ("npu", SDPA), ("cpu", SDPA), ("musa", FA)]
)
def test_the_platforms_fallback_goes_before_the_table_where_it_has_one(dense, platform, served):
    dense(sage_attn=NOWHERE)
    selection = resolve(request(platform), asked(SAGE))
    assert (selection.backend, selection.fallback) == (served, True)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_these_platforms_refuse_what_has_no_documented_fallback(dense, platform):
    dense(flex_attn=NOWHERE)
    with pytest.raises(UnsupportedBackendError, match=rf"needs platform oot, this is {platform}"):
        resolve(request(platform), asked(FLEX))


def test_ascend_prefers_sdpa_and_takes_flash_attention_for_ring_attention(dense):
    dense(torch_sdpa={"features": ALL_FEATURES - {Feature.RING}})
    assert resolve(request("npu"), AUTO).backend is SDPA
    ring = resolve(request("npu").with_needs(Feature.RING), AUTO)
    assert ring.backend is FA
    assert str(ring.rejected[0]) == "torch_sdpa: does not support ring"


@pytest.mark.parametrize("role", [AttentionRole.CROSS, AttentionRole.ENCODER], ids=str)
def test_a_sparse_backend_leaves_other_roles_to_the_dense_choice_without_a_warning(
    dense, caplog, role
):
    dense()
    selection = resolve(request(role=role), asked(STA), strict=True)
    warn_of_fallback(selection)
    assert (selection.backend, selection.fallback) == (FA, False)
    assert selection.reason.startswith(f"sliding_tile_attn is sparse and this is {role} attention")
    assert str(selection.rejected[0]) == (
        f"sliding_tile_attn: serves self attention, this layer is {role} attention"
    )
    assert caplog.records == []


ENCODER = {"role": AttentionRole.ENCODER, "dtype": torch.float32}


@pytest.mark.parametrize("wanted", [FLEX, SAGE], ids=str)
def test_a_request_for_the_whole_pipeline_spares_an_encoder_it_cannot_serve(dense, caplog, wanted):
    dense(**{str(wanted): {"dtypes": HALF}})
    selection = resolve(request(**ENCODER), asked(wanted))
    warn_of_fallback(selection)
    assert (selection.backend, selection.fallback, caplog.records) == (SDPA, False, [])
    assert selection.reason.startswith(
        f"{wanted} was asked for the whole pipeline and cannot serve this encoder; first of"
    )
    assert str(selection.rejected[0]) == f"{wanted}: needs dtype bfloat16 or float16, got float32"
    assert resolve(request(role=AttentionRole.ENCODER), asked(wanted)).backend is wanted


def test_a_request_that_means_the_encoder_is_held_to(dense):
    dense(flex_attn={"dtypes": HALF})
    narrow = [
        asked(FLEX, Source.COMPONENT),
        asked(FLEX, Source.FORCED),
        asked(FLEX, narrow=True),
    ]
    for ask, strict in [*((ask, False) for ask in narrow), (asked(FLEX), True)]:
        with pytest.raises(UnsupportedBackendError, match=r"needs dtype bfloat16 or float16, got"):
            resolve(request(**ENCODER), ask, strict=strict)
    with pytest.raises(UnsupportedBackendError, match=r"needs dtype bfloat16 or float16, got"):
        resolve(request(dtype=torch.float32), asked(FLEX))


@pytest.mark.parametrize(
    ("fields", "narrow"),
    [({}, False), ({"component": "text_encoder"}, True), ({"role": AttentionRole.ENCODER}, True)],
)
def test_a_rule_means_what_it_names(fields, narrow):
    scope = SelectionScope(rules=(Rule(backend=FLEX, **fields),))
    site = LayerSite(component="text_encoder", role=AttentionRole.ENCODER)
    assert decide(site, scope)[0][1].narrow is narrow


def test_a_sparse_backend_serves_self_attention(dense):
    dense()
    assert resolve(request(), asked(STA)).backend is STA


def test_a_sparse_backend_that_cannot_serve_self_attention_is_refused(use_backends):
    use_backends(
        fake_backend("sliding_tile_attn", head_sizes=HeadSizes(listed=(64,))),
        fake_backend("torch_sdpa"),
    )
    with pytest.raises(UnsupportedBackendError, match=r"needs head size 64, got 128"):
        resolve(request(), asked(STA))


def test_resolving_twice_gives_the_same_selection(dense):
    dense()
    first = resolve(request(), asked(SAGE))
    assert resolve(request(), asked(SAGE)) is first
    selector._resolve.cache_clear()
    assert resolve(request(), asked(SAGE)) == first


def test_resolving_reads_neither_the_force_nor_the_scope(dense):
    dense()
    with global_force_attn_backend_context_manager(FLEX), use_scope(SelectionScope(strict=True)):
        assert resolve(request(), asked(SAGE)).backend is SAGE


def test_resolving_looks_only_at_the_request(dense, monkeypatch):
    dense()

    def never(*args, **kwargs):
        raise AssertionError("selection must not look at the machine")

    with monkeypatch.context() as patch:
        for name in ("is_available", "get_device_capability", "get_device_name"):
            patch.setattr(torch.cuda, name, never)
        patch.setattr("importlib.util.find_spec", never)
        patch.setattr("os.getenv", never)
        patch.setattr("os.environ", None)
        selection = resolve(request(capability=(8, 0)), AUTO)
    assert selection.backend is FA


def test_a_call_with_further_needs_takes_the_automatic_choice_that_meets_them(dense):
    dense(fa={"features": ALL_FEATURES - {Feature.DENSE_MASK}})
    wanted = replace(asked(STA), dense_reason="it has no dense_mask")
    detour = resolve(request().with_needs(Feature.DENSE_MASK), wanted)
    assert detour.backend is SDPA
    assert detour.reason.startswith("it has no dense_mask; first of cuda's automatic choices")
    assert detour.asked == wanted


def test_a_call_no_backend_can_serve_is_an_error(dense):
    without = {"features": ALL_FEATURES - {Feature.LSE}}
    dense(fa=without, torch_sdpa=without)
    with pytest.raises(UnsupportedBackendError, match=r"fa: does not support lse; torch_sdpa"):
        resolve(request().with_needs(Feature.LSE), replace(AUTO, dense_reason="ring"))


def test_a_supported_set_orders_the_automatic_choice_and_excludes_nothing(dense):
    dense()
    environment = request().environment
    assert environment.priority == (FA, SDPA)
    assert prefer_supported(environment, {SDPA}).priority == (SDPA, FA)
    assert prefer_supported(environment, {FLEX}).priority == (FLEX, FA, SDPA)
    listed = prefer_supported(environment, {SAGE, FLEX, SDPA, STA}).priority
    assert listed == (SDPA, FLEX, SAGE, FA)
    assert prefer_supported(environment, None) == environment


def test_a_label_names_the_variant_where_it_says_more(use_backends):
    use_backends(fake_backend("fa", variant="fa3"), fake_backend("torch_sdpa"))
    assert resolve(request(), asked(FA)).label == "fa (fa3)"
    assert resolve(request(), asked(SDPA)).label == "torch_sdpa"


class TestGetAttnBackend:
    """The function other model code calls."""

    @pytest.fixture(autouse=True)
    def _backends(self, dense):
        dense()

    def get(self, **fields):
        return get_attn_backend(64, torch.bfloat16, **fields).get_enum()

    def test_it_follows_the_precedence(self):
        assert self.get() is FA
        assert self.get(supported_attention_backends={SDPA}) is SDPA
        assert self.get(default_attention_backend=FLEX) is FLEX
        with use_scope(SelectionScope(default=asked(SAGE))):
            assert self.get(default_attention_backend=FLEX) is SAGE
            global_force_attn_backend(SDPA)
            assert self.get() is SDPA
            assert self.get(selected_attention_backend=SAGE_3) is SAGE_3

    def test_forcing_after_the_first_selection_takes_effect_at_once(self):
        assert self.get() is FA
        global_force_attn_backend(SDPA)
        assert self.get() is SDPA
        global_force_attn_backend(None)
        assert self.get() is FA

    def test_a_component_override_applies_and_counts_as_used(self):
        with selector.component_attn_backend_context_manager(SAGE, "transformer") as built:
            assert self.get() is SAGE
        assert built.used_keys == {""}

    def test_a_layer_that_supports_one_backend_tries_it_first(self, dense):
        assert self.get(supported_attention_backends={SAGE}) is SAGE
        dense(sage_attn=NOWHERE)
        assert self.get(supported_attention_backends={SAGE}) is FA

    def test_what_was_asked_for_the_component_under_construction_applies(self):
        scope = SelectionScope(components={"transformer": asked(FLEX, Source.COMPONENT)})
        with use_scope(scope):
            assert self.get() is FA
            with selector.component_attn_backend_context_manager(None, "transformer_2"):
                assert self.get() is FLEX

    def test_a_sparse_request_for_cross_attention_gives_a_dense_backend(self):
        sparse = {"selected_attention_backend": STA}
        assert self.get(**sparse) is STA
        assert self.get(**sparse, is_cross_attention=True) is FA

    def test_strict_holds_here_too(self, dense):
        dense(sage_attn=NOWHERE)
        assert self.get(selected_attention_backend=SAGE) is SDPA
        with (
            use_scope(SelectionScope(strict=True)),
            pytest.raises(UnsupportedBackendError, match=r"sage_attn \(argument\) cannot serve"),
        ):
            self.get(selected_attention_backend=SAGE)

    def test_packed_sequences_are_a_requirement(self, dense):
        dense(fa={"features": ALL_FEATURES - {Feature.VARLEN}})
        packed = AttentionRequirements(packed_varlen=True)
        assert self.get() is FA
        assert self.get(attention_requirements=packed) is SDPA


def test_a_layer_warns_of_its_fallback_once_however_many_layers_there_are(dense, caplog):
    dense(sage_attn=NOWHERE)
    with use_scope(SelectionScope(default=asked(SAGE))):
        layers = [LocalAttention(2, 8, compute_dtype=torch.bfloat16) for _ in range(3)]
    assert {layer.backend for layer in layers} == {SDPA}
    (message,) = caplog.messages
    assert "sage_attn (settings) cannot serve this layer, so torch_sdpa runs" in message


def test_a_layer_refuses_an_impossible_request_at_construction(dense):
    dense(flex_attn=NOWHERE, torch_sdpa=NOWHERE)
    with (
        use_scope(SelectionScope(default=asked(FLEX))),
        pytest.raises(UnsupportedBackendError, match=r"flex_attn: needs platform oot, this is cpu"),
    ):
        LocalAttention(2, 8)
