"""Layers on one device: what selects, what runs, what is reported."""

import copy
import dataclasses
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch

from multimodal_gen.errors import ConfigError, UnsupportedBackendError, UsageError
from multimodal_gen.kernels.requirements import HeadSizes
from multimodal_gen.runtime.layers.attention import LocalAttention, USPAttention
from multimodal_gen.runtime.layers.attention.config import BackendConfig, IndexSelector
from multimodal_gen.runtime.layers.attention.custom_ops import LAYERS
from multimodal_gen.runtime.layers.attention.request import AttentionRole, Feature
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    LayerSite,
    Rule,
    SelectionScope,
    Source,
    use_scope,
)
from multimodal_gen.runtime.layers.attention.selector import (
    component_attn_backend_context_manager,
    get_attn_backend,
    global_force_attn_backend,
    global_force_attn_backend_context_manager,
)
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.fakes import ALL_FEATURES, PlainImpl, fake_backend
from tests.helpers.inputs import make_qkv
from tests.helpers.tolerance import assert_within_error_budget

FA, SDPA = AttentionBackendEnum.FA, AttentionBackendEnum.TORCH_SDPA
HALF = frozenset({torch.float16, torch.bfloat16})


def asked(backend, **fields) -> BackendPreference:
    return BackendPreference(source=Source.SETTINGS, backend=backend, **fields)


def served(layer) -> list[tuple[str, int]]:
    return [(str(entry.selection.backend), entry.calls) for entry in layer.report().entries]


@pytest.fixture
def two(use_backends):
    use_backends(fake_backend("torch_sdpa"), fake_backend("fa"))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, None), (4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize(("causal", "num_keys"), [(False, 7), (True, 5), (True, 7), (True, 3)])
def test_a_layer_computes_attention(num_heads, num_kv_heads, scale, causal, num_keys):
    layer = LocalAttention(num_heads, 16, num_kv_heads, scale, causal)
    q, k, v = make_qkv(3, 5, num_heads, 16, num_keys=num_keys, num_kv_heads=num_kv_heads)
    assert_within_error_budget(layer(q, k, v), q, k, v, scale=scale or 16**-0.5, causal=causal)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"head_size": -8}, "head_size must be at least 1, got -8"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
        ({"softmax_scale": float("nan")}, "softmax_scale must be finite, got nan"),
        ({"softmax_scale": float("-inf")}, "softmax_scale must be finite, got -inf"),
        ({"num_heads": 4.0}, r"num_heads must be a whole number, got 4\.0"),
        ({"num_heads": True}, "num_heads must be a whole number, got True"),
        ({"head_size": "8"}, "head_size must be a whole number, got '8'"),
        ({"softmax_scale": "x"}, "softmax_scale must be a number, got 'x'"),
        ({"softmax_scale": True}, "softmax_scale must be a number, got True"),
        ({"causal": "no"}, "causal must be True or False, got 'no'"),
        ({"is_cross_attention": "no"}, "is_cross_attention must be True or False, got 'no'"),
        ({"compute_dtype": "bfloat16"}, r"such as torch\.bfloat16, got 'bfloat16'"),
        ({"default_attention_backend": "bogus"}, "must be one of fa, .*, got 'bogus'"),
        ({"supported_attention_backends": {"bogus"}}, "must be one of fa, .*, got 'bogus'"),
        ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
    ],
)
def test_impossible_arguments_are_refused_at_construction(arguments, message):
    with pytest.raises(ConfigError, match=message):
        LocalAttention(**({"num_heads": 4, "head_size": 8} | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prefix": 5}, r"prefix must be a dotted path such as 'blocks\.3\.attn', got 5"),
        (
            {"skip_sequence_parallel": "no"},
            "skip_sequence_parallel must be True or False, got 'no'",
        ),
        ({"is_cross_attention": None}, "is_cross_attention must be True or False, got None"),
    ],
)
def test_what_only_split_layers_take_is_checked_as_well(arguments, message):
    with pytest.raises(ConfigError, match=message):
        USPAttention(4, 8, **arguments)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 5, 4), (2, 5, 4), (2, 5, 4)),
        ((2, 5, 4, 8), (3, 5, 2, 8), (3, 5, 2, 8)),
        ((2, 5, 4, 8), (2, 5, 2, 8), (2, 6, 2, 8)),
        ((2, 5, 4, 8), (2, 5, 4, 8), (2, 5, 4, 8)),
        ((2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 4, 8)),
        ((2, 5, 4, 16), (2, 5, 2, 16), (2, 5, 2, 16)),
        ((2, 5, 4, 8), (2, 5, 2, 16), (2, 5, 2, 16)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(q, k, v):
    layer = LocalAttention(4, 8, num_kv_heads=2)
    message = r"with D = 8, and 4 query heads and 2 key heads, got \["
    with pytest.raises(UsageError, match=message):
        layer(torch.zeros(q), torch.zeros(k), torch.zeros(v))


@pytest.mark.usefixtures("two")
def test_forcing_takes_effect_at_once_on_a_layer_that_already_ran():
    layer = LocalAttention(2, 8)
    q, k, v = make_qkv(1, 3, 2, 8)
    layer(q, k, v)
    global_force_attn_backend(FA)
    assert layer.backend is FA
    layer(q, k, v)
    with global_force_attn_backend_context_manager(None):
        layer(q, k, v)
    global_force_attn_backend(None)
    layer(q, k, v)
    assert served(layer) == [("torch_sdpa", 3), ("fa", 1)]
    assert [entry.selection.source for entry in layer.report().entries] == [
        Source.AUTO,
        Source.FORCED,
    ]


@pytest.mark.usefixtures("two")
def test_a_force_in_one_thread_does_not_reach_a_layer_that_runs_in_another():
    layer = LocalAttention(2, 8)
    q, k, v = make_qkv(1, 3, 2, 8)
    meet = threading.Barrier(2)
    backends = {}

    def run(name: str, backend) -> None:
        with global_force_attn_backend_context_manager(backend):
            meet.wait(timeout=60)
            layer(q, k, v)
            backends[name] = layer.backend
            meet.wait(timeout=60)

    threads = [threading.Thread(target=run, args=item) for item in (("a", FA), ("b", SDPA))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert backends == {"a": FA, "b": SDPA}
    assert sorted(served(layer)) == [("fa", 1), ("torch_sdpa", 1)]


def test_a_forced_backend_that_cannot_serve_falls_back_or_is_refused_like_any_other(use_backends):
    use_backends(fake_backend("torch_sdpa"), fake_backend("flex_attn", dtypes=HALF))
    lenient, strict = LocalAttention(2, 8), LocalAttention(2, 8, scope=SelectionScope(strict=True))
    global_force_attn_backend(AttentionBackendEnum.FLEX_ATTN)
    assert lenient.backend is SDPA
    with pytest.raises(UnsupportedBackendError, match=r"flex_attn \(forced\) cannot serve self"):
        strict(*make_qkv(1, 3, 2, 8))


def test_layers_of_two_dtypes_live_in_one_process(use_backends):
    use_backends(fake_backend("fa", dtypes=HALF), fake_backend("torch_sdpa"))
    encoder = LocalAttention(2, 8, compute_dtype=torch.float32)
    denoiser = LocalAttention(2, 8, compute_dtype=torch.bfloat16)
    assert (encoder.backend, denoiser.backend) == (SDPA, FA)
    for layer in (encoder, denoiser):
        layer(*make_qkv(1, 3, 2, 8, dtype=layer.dtype))
    assert (served(encoder), served(denoiser)) == ([("torch_sdpa", 1)], [("fa", 1)])


def test_inputs_of_another_dtype_than_planned_select_once_more(use_backends):
    use_backends(fake_backend("fa", dtypes=HALF), fake_backend("torch_sdpa"))
    layer = LocalAttention(2, 8, compute_dtype=torch.float32)
    out = layer(*make_qkv(1, 3, 2, 8, dtype=torch.bfloat16))
    assert out.dtype is torch.bfloat16
    assert served(layer) == [("fa", 1)]
    layer(*make_qkv(1, 3, 2, 8))
    assert sorted(served(layer)) == [("fa", 1), ("torch_sdpa", 1)]


def test_an_explicit_backend_refuses_inputs_of_a_dtype_it_lacks(use_backends):
    use_backends(fake_backend("torch_sdpa"), fake_backend("fa", dtypes=HALF))
    scope = SelectionScope(default=asked(FA), strict=True)
    layer = LocalAttention(2, 8, compute_dtype=torch.bfloat16, scope=scope)
    with pytest.raises(
        UnsupportedBackendError, match=r"needs dtype bfloat16 or float16, got float3"
    ):
        layer(*make_qkv(1, 3, 2, 8))


def test_the_default_dtype_is_the_planned_one():
    assert LocalAttention(2, 8).dtype is torch.float32


def test_selection_is_not_on_the_path_of_a_call(two, monkeypatch):
    from multimodal_gen.runtime.layers.attention import attention_layer

    layer = LocalAttention(2, 8)
    q, k, v = make_qkv(1, 3, 2, 8)
    layer(q, k, v)

    def never(*args, **kwargs):
        raise AssertionError("selection must not run per call")

    monkeypatch.setattr(attention_layer, "bind_schedule", never)
    monkeypatch.setattr(attention_layer, "decide", never)
    for _ in range(3):
        layer(q, k, v)
    assert served(layer) == [("torch_sdpa", 4)]


def test_the_layers_preferences_steer_the_automatic_choice(two):
    assert LocalAttention(2, 8).backend is SDPA
    assert LocalAttention(2, 8, supported_attention_backends={FA}).backend is FA
    assert LocalAttention(2, 8, default_attention_backend=FA).backend is FA
    with use_scope(SelectionScope(default=asked(SDPA))):
        assert LocalAttention(2, 8, default_attention_backend=FA).backend is SDPA


def test_a_call_the_supported_set_cannot_serve_goes_beyond_it(use_backends):
    masks = {Feature.KEY_MASK, Feature.DENSE_MASK, Feature.VARLEN}
    use_backends(fake_backend("fa", features=ALL_FEATURES - masks), fake_backend("torch_sdpa"))
    layer = LocalAttention(2, 8, supported_attention_backends={FA})
    layer(*make_qkv(1, 3, 2, 8), torch.ones(1, 3, 3))
    (detour,) = layer.report().detours
    assert detour.selection.backend is SDPA


class TestGradients:
    """Backends with and without a backward pass."""

    FORWARD_ONLY = ALL_FEATURES - {Feature.BACKWARD}

    @pytest.fixture(autouse=True)
    def _backends(self, use_backends):
        use_backends(fake_backend("fa", features=self.FORWARD_ONLY), fake_backend("torch_sdpa"))

    @pytest.mark.parametrize("which", [0, 1, 2])
    @pytest.mark.parametrize("mask", [None, torch.ones(1, 3).bool(), torch.ones(1, 3, 3).bool()])
    def test_a_named_backend_without_backward_refuses_inputs_that_require_grad(self, which, mask):
        layer = LocalAttention(2, 8, scope=SelectionScope(default=asked(FA)))
        inputs = make_qkv(1, 3, 2, 8)
        inputs[which].requires_grad_()
        with pytest.raises(
            UnsupportedBackendError, match=r"fa must not get inputs that require grad: it has no"
        ):
            layer(*inputs, mask)
        with torch.no_grad():
            layer(*inputs, mask)
        assert served(layer) == [("fa", 1)]

    def test_a_named_backend_trains_on_its_kernel_that_has_a_backward(self, use_backends):
        backend = fake_backend("fa", features=self.FORWARD_ONLY)
        other = dataclasses.replace(backend.variants[0], name="slower", features=ALL_FEATURES)
        backend.variants = (*backend.variants, other)
        use_backends(backend, fake_backend("torch_sdpa"))
        layer = LocalAttention(2, 8, scope=SelectionScope(default=asked(FA)))
        q, k, v = make_qkv(1, 3, 2, 8, requires_grad=True)
        layer(q, k, v).sum().backward()
        assert v.grad.abs().sum() > 0
        (detour,) = layer.report().detours
        assert (detour.selection.variant, detour.calls) == ("slower", 1)
        assert detour.selection.reason == "fa has no backward"

    @pytest.mark.parametrize("mask", [None, torch.ones(1, 3).bool(), torch.ones(1, 3, 3).bool()])
    def test_an_automatic_choice_without_backward_takes_a_detour(self, mask):
        layer = LocalAttention(2, 8)
        q, k, v = make_qkv(1, 3, 2, 8, requires_grad=True)
        layer(q, k, v, mask).sum().backward()
        assert v.grad.abs().sum() > 0
        (detour,) = layer.report().detours
        assert (detour.selection.backend, detour.calls) == (SDPA, 1)
        assert detour.selection.reason.startswith("fa has no backward; ")

    def test_a_mask_that_is_learned_counts_too(self):
        layer = LocalAttention(2, 8)
        bias = torch.zeros(1, 2, 3, 3, requires_grad=True)
        layer(*make_qkv(1, 3, 2, 8), bias).square().sum().backward()
        assert bias.grad.abs().sum() > 0
        assert layer.report().detours[0].selection.backend is SDPA

    def test_a_fallback_without_backward_was_not_named_and_takes_a_detour(self):
        scope = SelectionScope(default=asked(AttentionBackendEnum.SLIDING_TILE_ATTN))
        site = LayerSite(role=AttentionRole.CROSS)
        from multimodal_gen.runtime.layers.attention.backends import registry

        sparse = fake_backend("sliding_tile_attn", roles=frozenset({AttentionRole.SELF}))
        known = registry.backends_of
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(registry, "backends_of", lambda b: (sparse,) if b.is_sparse else known(b))
            layer = LocalAttention(2, 8, scope=scope, site=site)
            q, k, v = make_qkv(1, 3, 2, 8, requires_grad=True)
            layer(q, k, v)
        assert layer.report().entries[0].selection.backend is FA
        assert layer.report().detours[0].selection.backend is SDPA


class TestSchedules:
    """Backends that change with the denoising step."""

    @pytest.fixture
    def layer(self, two):
        rules = (
            Rule(backend=FA, steps=IndexSelector.parse("0-1")),
            Rule(backend=SDPA, steps=IndexSelector.parse("1,4-")),
        )
        scope = SelectionScope(rules=rules, default=asked(FA))
        return LocalAttention(2, 8, scope=scope)

    def test_the_first_rule_that_holds_the_step_serves_the_call(self, layer):
        q, k, v = make_qkv(1, 3, 2, 8)
        counts = []
        for step in (0, 1, 2, 4, 9):
            with set_forward_context(step):
                layer(q, k, v)
            counts.append([calls for _, calls in served(layer)])
        assert counts == [[1, 0, 0], [2, 0, 0], [2, 0, 1], [2, 1, 1], [2, 2, 1]]
        assert [(e.steps, e.selection.asked.detail) for e in layer.report().entries] == [
            ("0-1", "rule 1"),
            ("1,4-", "rule 2"),
            (None, ""),
        ]

    def test_outside_a_denoiser_call_a_schedule_is_refused(self, layer):
        with pytest.raises(
            UsageError, match=r"must run inside a denoiser call, got none; wrap the"
        ):
            layer(*make_qkv(1, 3, 2, 8))

    def test_a_forced_backend_ends_the_schedule(self, layer):
        with global_force_attn_backend_context_manager(SDPA):
            layer(*make_qkv(1, 3, 2, 8))
        assert served(layer) == [("torch_sdpa", 1)]

    def test_a_call_that_fails_is_not_reported_as_run(self, two, monkeypatch):
        layer = LocalAttention(2, 8)
        layer(*make_qkv(1, 3, 2, 8))

        def fails(*args, **kwargs):
            raise torch.OutOfMemoryError

        monkeypatch.setattr(layer.schedule()[-1].primary.impl, "forward", fails)
        for mask in (None, torch.ones(1, 1, 3, 3, dtype=torch.bool)):
            with pytest.raises(torch.OutOfMemoryError):
                layer(*make_qkv(1, 3, 2, 8), mask)
        assert layer.report().calls == 1

    def test_without_a_schedule_no_context_is_needed(self, two):
        layer = LocalAttention(2, 8)
        layer(*make_qkv(1, 3, 2, 8))
        assert layer.report().calls == 1


class RecordingImpl(PlainImpl):
    """Keeps what it was constructed and called with."""

    made: list["RecordingImpl"]

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.contexts = []
        type(self).made.append(self)

    def forward(self, query, key, value, context=None, *, attn_mask=None):
        self.contexts.append(context)
        return super().forward(query, key, value, context, attn_mask=attn_mask)


@pytest.fixture
def recording(monkeypatch):
    monkeypatch.setattr(RecordingImpl, "made", [], raising=False)
    return RecordingImpl.made


def test_an_implementation_gets_the_geometry_configuration_and_context(use_backends, recording):
    use_backends(fake_backend("torch_sdpa"), fake_backend("fa", impl=RecordingImpl, variant="fa9"))
    config = BackendConfig()
    scope = SelectionScope(default=asked(FA, config=config))
    layer = LocalAttention(6, 8, 2, 0.5, causal=True, scope=scope)
    with set_forward_context(7) as context:
        layer(*make_qkv(1, 3, 6, 8, num_kv_heads=2))
    (impl,) = recording
    assert (impl.num_heads, impl.head_size, impl.num_kv_heads) == (6, 8, 2)
    assert (impl.softmax_scale, impl.causal, impl.variant) == (0.5, True, "fa9")
    assert impl.config is config
    assert impl.contexts == [context]


def test_a_fallback_does_not_get_the_configuration_of_the_backend_it_replaces(
    use_backends, recording
):
    absent = fake_backend("fa", dtypes=HALF)
    use_backends(fake_backend("torch_sdpa", impl=RecordingImpl), absent)
    scope = SelectionScope(default=asked(FA, config=BackendConfig()))
    LocalAttention(2, 8, compute_dtype=torch.float32, scope=scope)
    assert [impl.config for impl in recording] == [None]


def test_a_report_before_the_first_call_says_what_would_run(two):
    site = LayerSite(name="blocks.3.attn1", component="transformer", layer=3)
    report = LocalAttention(2, 8, site=site).report()
    assert (report.component, report.name, report.layer) == ("transformer", "blocks.3.attn1", 3)
    assert [(entry.selection.backend, entry.calls) for entry in report.entries] == [(SDPA, 0)]


def copies(layer):
    stored = io.BytesIO()
    torch.save(layer, stored)
    stored.seek(0)
    return [
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(stored, weights_only=False),
    ]


def test_a_copy_is_a_layer_of_its_own(two):
    scope = SelectionScope(default=asked(FA), components={"vae": asked(SDPA)})
    layer = LocalAttention(2, 8, scope=scope)
    q, k, v = make_qkv(1, 3, 2, 8)
    expected = layer(q, k, v)
    numbers = {int(layer._layer_id)}
    for copied in copies(layer):
        numbers.add(int(copied._layer_id))
        assert LAYERS[int(copied._layer_id)] is copied
        assert copied.report().calls == 0
        assert torch.equal(copied(q, k, v), expected)
        assert served(copied) == [("fa", 1)]
    assert served(layer) == [("fa", 1)]
    assert len(numbers) == 4


def test_a_layer_adds_nothing_to_the_state_of_its_model():
    assert LocalAttention(2, 8).state_dict() == {}
    assert list(LocalAttention(2, 8).buffers()) == []


def test_a_layer_that_is_dropped_is_forgotten():
    layer = LocalAttention(2, 8)
    number, gone = int(layer._layer_id), weakref.ref(layer)
    layer(*make_qkv(1, 3, 2, 8))
    del layer
    gc.collect()
    assert gone() is None
    assert number not in LAYERS


def test_a_layer_can_be_built_under_a_default_device():
    with torch.device("meta"):
        layer = LocalAttention(2, 8)
    assert layer._layer_id.device.type == "cpu"
    assert LAYERS[int(layer._layer_id)] is layer


class TestDtypeLearntLater:
    """Layers built before their model is cast."""

    @pytest.fixture(autouse=True)
    def _backends(self, use_backends):
        use_backends(
            fake_backend("torch_sdpa"),
            fake_backend("fa", dtypes=HALF, head_sizes=HeadSizes(maximum=64)),
        )

    @pytest.mark.parametrize("strict", [False, True])
    def test_a_named_backend_that_takes_another_dtype_is_neither_refused_nor_replaced(
        self, strict, caplog
    ):
        layer = LocalAttention(2, 8, scope=SelectionScope(default=asked(FA), strict=strict))
        assert (layer.backend, layer.dtype, caplog.records) == (FA, torch.bfloat16, [])
        layer(*make_qkv(1, 3, 2, 8, dtype=torch.float16))
        assert (layer.dtype, served(layer), caplog.records) == (torch.float16, [("fa", 1)], [])

    def test_the_first_call_refuses_or_warns_for_its_own_dtype(self, caplog):
        strict = LocalAttention(2, 8, scope=SelectionScope(default=asked(FA), strict=True))
        with pytest.raises(UnsupportedBackendError, match=r"needs dtype bfloat16 or float16, got"):
            strict(*make_qkv(1, 3, 2, 8))
        lenient = LocalAttention(2, 8, scope=SelectionScope(default=asked(FA)))
        lenient(*make_qkv(1, 3, 2, 8))
        assert (lenient.backend, served(lenient)) == (SDPA, [("torch_sdpa", 1)])
        assert len(caplog.records) == 1

    def test_what_no_dtype_makes_possible_is_refused_at_construction(self):
        scope = SelectionScope(default=asked(FA), strict=True)
        with pytest.raises(UnsupportedBackendError, match=r"fa: needs head size <= 64, got 128\."):
            LocalAttention(2, 128, scope=scope)

    def test_a_given_dtype_is_held_to_at_construction(self):
        scope = SelectionScope(default=asked(FA), strict=True)
        with pytest.raises(UnsupportedBackendError, match=r"needs dtype bfloat16 or float16, got"):
            LocalAttention(2, 8, compute_dtype=torch.float32, scope=scope)

    def test_the_backend_is_that_of_the_last_call(self, use_backends):
        use_backends(fake_backend("fa", dtypes=HALF), fake_backend("torch_sdpa"))
        layer = LocalAttention(2, 8)
        seen = [layer.backend]
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            layer(*make_qkv(1, 3, 2, 8, dtype=dtype))
            seen.append(layer.backend)
        assert seen == [SDPA, FA, SDPA, FA]


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_decides_the_dtype_that_selection_and_the_kernel_see(use_backends, compiled):
    use_backends(fake_backend("fa", dtypes=HALF), fake_backend("torch_sdpa"))
    layer = LocalAttention(2, 8)
    q, k, v = make_qkv(1, 3, 2, 8)

    def attend(q, k, v):
        return layer(q, k, v, torch.zeros(1, 3, 3)) + 1

    run = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = run(q, k, v)
        doubles = layer(q.double(), k.double(), v.double())
    assert (out.dtype, doubles.dtype) == (torch.bfloat16, torch.float64)
    assert sorted(served(layer)) == [("fa", 1), ("torch_sdpa", 1)]
    expected = attend(q.bfloat16(), k.bfloat16(), v.bfloat16())
    torch.testing.assert_close(out, expected)


@pytest.mark.usefixtures("two")
def test_backends_may_be_given_by_name():
    by_name = [
        LocalAttention(2, 8, default_attention_backend="fa3"),
        LocalAttention(2, 8, supported_attention_backends=("flash_attn",)),
    ]
    with component_attn_backend_context_manager("sdpa", "transformer", {"cross": "FA"}):
        sdpa = LocalAttention(2, 8)
        by_name.append(LocalAttention(2, 8, is_cross_attention=True))
    global_force_attn_backend("torch_sdpa")
    assert {layer.backend for layer in by_name} == {SDPA}
    with global_force_attn_backend_context_manager("fa"):
        assert sdpa.backend is FA
    global_force_attn_backend(None)
    assert ({layer.backend for layer in by_name}, sdpa.backend) == ({FA}, SDPA)
    found = get_attn_backend(8, torch.float32, selected_attention_backend="fa")
    assert found.get_enum() is FA


def test_forcing_a_name_no_backend_has_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"must be one of fa, .*, got 'bogus'"):
        global_force_attn_backend("bogus")


def test_a_layer_shows_its_head_size_and_implementation(two):
    layer = LocalAttention(2, 8, softmax_scale=0.5)
    assert layer.head_size == 8
    assert isinstance(layer.attn_impl, PlainImpl)
    assert layer.attn_impl.softmax_scale == 0.5
    global_force_attn_backend(FA)
    assert layer.attn_impl is layer.schedule()[-1].primary.impl
    assert layer.backend is FA


def test_the_names_other_models_import_are_where_they_look_for_them():
    from multimodal_gen.runtime.layers.attention import layer, selector
    from multimodal_gen.runtime.layers.attention import masks as masks_module

    for name in ("", "_from_lengths", "_from_ranges"):
        name = f"build_varlen_mask_meta{name}"
        assert getattr(layer, name) is getattr(masks_module, name)
    assert issubclass(selector.ComponentAttentionBackendNotAppliedError, UsageError)


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("query", ([1.0], 0, 0, None)),
        ("key", (0, None, 0, None)),
        ("value", (0, 0, "v", None)),
        ("attn_mask", (0, 0, 0, [True])),
    ],
)
def test_what_is_no_tensor_is_named(name, inputs):
    layer = LocalAttention(2, 8)
    tensors = [torch.randn(1, 4, 2, 8) if x == 0 else x for x in inputs]
    with pytest.raises(UsageError, match=rf"{name} must be a torch.Tensor, got \w+; make it one"):
        layer(*tensors)


def test_a_site_and_a_flag_tell_together_what_a_layer_attends_to():
    layer = LocalAttention(2, 8, is_cross_attention=True, site=LayerSite(name="b.0.attn2", layer=0))
    assert layer.site == LayerSite(name="b.0.attn2", layer=0, role=AttentionRole.CROSS)
    with pytest.raises(ConfigError, match=r"must be an AttentionRole such as .*, got 'cross'"):
        LocalAttention(2, 8, site=LayerSite(role="cross"))
