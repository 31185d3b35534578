"""`auto` by shape: which measured shape speaks for a call, what runs then, and what is reported."""

import copy
import json
import os
import pickle
from dataclasses import replace

import pytest
import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.attention_report import AttentionReport
from multimodal_gen.runtime.layers.attention import (
    LocalAttention,
    attention_layer,
    auto_table,
    binding,
)
from multimodal_gen.runtime.layers.attention.auto_table import (
    AutoTable,
    CallShape,
    Measured,
    committed_table,
    read_tables,
    table_for,
    tables_as_json,
    write_tables,
)
from multimodal_gen.runtime.layers.attention.backends.registry import (
    current_environment,
    find_backend,
)
from multimodal_gen.runtime.layers.attention.request import (
    AttentionRequest,
    Environment,
    Feature,
    Timing,
)
from multimodal_gen.runtime.layers.attention.scope import (
    AUTO,
    BackendPreference,
    SelectionScope,
    Source,
    global_force_attn_backend_context_manager,
    scope_from,
)
from multimodal_gen.runtime.layers.attention.selector import resolve
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from tests.helpers.fakes import FakeDevice, fake_backend, simulated_environment
from tests.helpers.inputs import make_qkv

HEADS, HEAD_SIZE = 4, 16
SHAPE, ROW = {"shape": "1x8x1x8"}, {"dtype": "float16", "timings": []}


def timing(backend: str, device_ms: float, host_ms: float | None = None) -> Timing:
    return Timing(backend=backend, variant=backend, device_ms=device_ms, host_ms=host_ms)


def measured(text: str, *timings: Timing, dtype: str = "float32") -> Measured:
    return Measured(shape=CallShape.parse(text), dtype=dtype, timings=timings)


def table(*shapes: Measured, **fields: object) -> AutoTable:
    given: dict[str, object] = {
        "name": "a test",
        "platform": "cpu",
        "device": "cpu",
        "capability": "",
        "versions": {"torch": torch.__version__},
        "source": "tests",
    }
    return AutoTable(measured=shapes, **{**given, **fields})  # type: ignore[arg-type]


# The first is the platform's choice; which one is faster depends on the length.
BY_LENGTH = table(
    measured("1x32x4x16", timing("usual", 2.0), timing("other", 1.0)),
    measured("1x256x4x16", timing("usual", 2.0), timing("other", 3.0)),
    measured("1x32x4x16:mask", timing("usual", 4.0), timing("other", 1.0)),
    measured("1x64x4x16:keys=7", timing("usual", 1.0), timing("other", 4.0)),
    measured("1x32x4x16:kv_heads=2", timing("usual", 5.0), timing("other", 1.0)),
)


@pytest.fixture
def backends(use_backends):
    """Install two dense backends; the platform prefers `usual`."""
    use_backends(fake_backend("usual"), fake_backend("other"))


def layer(given: AutoTable | None = BY_LENGTH, **fields: object) -> LocalAttention:
    scope = SelectionScope(auto_table=given)
    return LocalAttention(HEADS, HEAD_SIZE, scope=scope, **fields)


def call(attention: LocalAttention, tokens: int, keys: int = 0, **fields: object) -> torch.Tensor:
    q, k, v = make_qkv(1, tokens, HEADS, HEAD_SIZE, num_keys=keys or tokens, dtype=torch.float32)
    return attention(q, k, v, **fields)


def served(attention: LocalAttention) -> dict[str, int]:
    return {e.selection.label: e.calls for e in attention.report().entries}


@pytest.mark.parametrize(
    "text", ["1x4096x24x128", "2x64x8x64:keys=77:kv_heads=2:mask", "4x1x3x8:mask"]
)
def test_a_shape_is_what_its_text_says(text):
    assert str(CallShape.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4096",
        "1x2x3",
        "1x2x3x4:mask=1",
        "1x2x3x4:keys",
        "1x2x3x4:depth=2",
        "1x2x3x4:mask:mask",
        "0x2x3x4",
        "1x2x3x4:keys=0",
        "1x2x6x4:kv_heads=4",
    ],
)
def test_text_that_is_no_shape_is_refused(text):
    with pytest.raises(ConfigError, match="a shape must"):
        CallShape.parse(text)


def test_the_slower_of_device_and_host_counts():
    assert timing("a", 2.0, 0.5).ms == 2.0
    assert timing("a", 0.1, 0.5).ms == 0.5
    assert timing("a", 0.1).ms == 0.1


@pytest.mark.parametrize(
    ("text", "speaks"),
    [
        ("1x2048x24x128", True),
        ("1x8192x24x128", True),
        ("1x8193x24x128", False),
        ("1x2047x24x128", False),
        ("1x4096x24x113", True),
        ("1x4096x24x112", False),
        ("1x4096x24x136", False),
        ("4x4096x24x128", True),
        ("1x4096x6x128", True),
        ("1x4096x5x128", False),
        ("4x4096x40x128", False),
        ("1x4096x24x128:mask", False),
        ("1x4096x24x128:kv_heads=8", False),
        ("1x4096x24x128:keys=77", False),
        ("1x4096x24x128:keys=4352", True),
    ],
)
def test_a_measured_shape_speaks_for_calls_near_it(text, speaks):
    assert CallShape.parse("1x4096x24x128").speaks_for(CallShape.parse(text)) is speaks


def test_the_nearest_measured_shape_with_the_smallest_head_size_speaks():
    found = table(
        measured("1x4096x24x128", timing("a", 1.0)),
        measured("1x4096x24x64", timing("b", 1.0)),
        measured("1x2048x24x64", timing("c", 1.0)),
        measured("1x2048x24x64", timing("d", 1.0), dtype="bfloat16"),
    )

    def speaker(text: str, dtype: torch.dtype = torch.float32) -> str | None:
        ranking = found.ranking(CallShape.parse(text), dtype)
        return ranking and ranking.timings[0].backend

    assert speaker("1x4000x24x64") == "b"
    assert speaker("1x2500x24x56") == "c"
    assert speaker("1x4000x24x120") == "a"
    assert speaker("1x4000x24x72") is None
    assert speaker("1x2500x24x56", torch.bfloat16) == "d"
    assert speaker("1x4000x24x64", torch.bfloat16) == "d"
    assert speaker("1x5000x24x64", torch.bfloat16) is None
    assert speaker("1x512x24x64") is None


def test_auto_takes_what_was_the_fastest_at_a_calls_shape(backends):
    attention = layer()
    for tokens in (32, 40, 256, 300, 1024):
        call(attention, tokens)
    entries = [(e.selection.label, e.shapes) for e in attention.report().entries]
    assert entries == [
        ("usual", ("1x1024x4x16",)),
        ("other", ("1x32x4x16", "1x40x4x16")),
        ("usual", ("1x256x4x16", "1x300x4x16")),
    ]
    assert attention.report().calls == 5


def test_where_nothing_was_measured_the_platforms_list_stands(backends):
    attention = layer()
    call(attention, 2048)
    (entry,) = attention.report().entries
    assert entry.selection.label == "usual"
    assert entry.selection.reason == "first of cpu's automatic choices that serves this layer"
    assert entry.shapes == ("1x2048x4x16",)


def test_masks_keys_and_grouped_heads_are_shapes_of_their_own(backends):
    attention = layer()
    keep = torch.arange(32) < torch.tensor([[20]])
    call(attention, 32, attn_mask=keep)
    call(attention, 64, keys=7)
    assert served(attention) == {"other": 1, "usual": 1}
    grouped = layer(num_kv_heads=2)
    q, k, v = make_qkv(1, 32, HEADS, HEAD_SIZE, num_kv_heads=2, dtype=torch.float32)
    grouped(q, k, v)
    assert served(grouped) == {"other": 1}


def test_a_mask_of_pairs_is_left_to_the_platforms_list(backends):
    attention = layer()
    call(attention, 32, attn_mask=torch.ones(1, 1, 32, 32, dtype=torch.bool))
    call(attention, 32, attn_mask=torch.zeros(1, 1, 1, 32))
    assert served(attention) == {"usual": 2}


def test_the_report_says_which_shapes_ran_what_and_by_which_table(backends):
    attention = layer()
    assert attention.report().entries[0].selection.reason == (
        "first of cpu's automatic choices that serves this layer; at measured shapes the fastest "
        "of a test"
    )
    for tokens in (32, 40):
        call(attention, tokens)
    (entry,) = attention.report().entries
    assert (
        entry.selection.reason == "fastest of 2 at 1x32x4x16 (a test): 1 ms, usual 2.00 times that"
    )
    assert entry.as_dict()["shapes"] == ["1x32x4x16", "1x40x4x16"]
    text = AttentionReport(layers=(attention.report(),)).summary()
    assert "other [auto], at 1x32x4x16, 1x40x4x16, 2 calls each; fastest of 2 at" in text


def test_what_was_asked_for_by_name_is_not_exchanged(backends):
    usual = AttentionBackendEnum.parse("usual")
    asked = BackendPreference(source=Source.SETTINGS, backend=usual)
    attention = LocalAttention(
        HEADS, HEAD_SIZE, scope=SelectionScope(default=asked, auto_table=BY_LENGTH)
    )
    call(attention, 32)
    assert served(attention) == {"usual": 1}
    free = layer()
    with global_force_attn_backend_context_manager("usual"):
        call(free, 32)
    assert served(free) == {"usual": 1}


def test_a_layer_that_prefers_backends_keeps_its_preference(backends):
    attention = layer(supported_attention_backends=["usual"])
    call(attention, 32)
    assert served(attention) == {"usual": 1}


def test_causal_layers_and_gradients_are_left_to_the_platforms_list(backends):
    causal = layer(causal=True)
    call(causal, 32)
    assert served(causal) == {"usual": 1}
    attention = layer()
    q, k, v = make_qkv(1, 32, HEADS, HEAD_SIZE, dtype=torch.float32)
    attention(q.requires_grad_(), k, v).sum().backward()
    assert served(attention) == {"usual": 1}


def test_a_backend_that_cannot_serve_the_call_is_passed_over(use_backends):
    use_backends(
        fake_backend("usual"),
        fake_backend("other", dtypes=frozenset({torch.float64})),
        fake_backend("third"),
    )
    found = table(
        measured("1x32x4x16", timing("other", 1.0), timing("third", 2.0), timing("usual", 3.0))
    )
    attention = layer(found)
    call(attention, 32)
    assert served(attention) == {"third": 1}


@pytest.mark.parametrize("why", ["another kernel", "never unasked", "alone"])
def test_what_was_not_compared_here_leaves_the_platforms_list(use_backends, why):
    other = fake_backend("other", variant="newer" if why == "another kernel" else None)
    if why == "never unasked":
        other.never_unasked = "rounds to 8 bits"
    use_backends(fake_backend("usual"), other)
    timings = [timing("other", 1.0), timing("usual", 3.0)]
    attention = layer(table(measured("1x32x4x16", *timings[: 1 if why == "alone" else 2])))
    call(attention, 32)
    (entry,) = attention.report().entries
    assert entry.selection.label == "usual"
    assert "automatic choices" in entry.selection.reason


def test_the_outputs_are_those_of_the_backend_that_is_reported(backends):
    attention = layer()
    q, k, v = make_qkv(1, 32, HEADS, HEAD_SIZE, dtype=torch.float32)
    out = attention(q, k, v)
    with global_force_attn_backend_context_manager("other"):
        torch.testing.assert_close(out, LocalAttention(HEADS, HEAD_SIZE)(q, k, v))


def test_a_shape_is_looked_up_once(backends, monkeypatch):
    attention = layer()
    asked = []
    ranking = AutoTable.ranking

    def counted(self, shape, dtype):
        asked.append(shape)
        return ranking(self, shape, dtype)

    monkeypatch.setattr(AutoTable, "ranking", counted)
    for _ in range(3):
        call(attention, 32)
    assert [str(shape) for shape in asked] == ["1x32x4x16"]
    assert served(attention) == {"other": 3}


def test_many_shapes_are_forgotten_and_found_again(backends, monkeypatch):
    monkeypatch.setattr(binding, "_MOST_SHAPES", 2)
    attention = layer()
    for tokens in (30, 31, 32, 33, 30):
        call(attention, tokens)
    assert served(attention) == {"other": 5}


def test_under_compile_each_call_goes_by_its_shape(backends):
    attention = layer()
    compiled = torch.compile(attention, fullgraph=True, backend="eager", dynamic=True)
    with torch.no_grad():
        for tokens in (32, 256):
            q, k, v = make_qkv(1, tokens, HEADS, HEAD_SIZE, dtype=torch.float32)
            torch.testing.assert_close(compiled(q, k, v), layer(None)(q, k, v))
    assert served(attention) == {"other": 1, "usual": 1}


def test_copies_of_a_layer_choose_too(backends):
    attention = copy.deepcopy(layer())
    call(attention, 32)
    assert served(attention) == {"other": 1}
    scope = pickle.loads(pickle.dumps(SelectionScope(auto_table=BY_LENGTH)))
    assert scope.auto_table.measured == BY_LENGTH.measured


def test_a_table_of_another_kind_of_device_is_not_for_this_layer(backends):
    attention = layer(replace(BY_LENGTH, platform="cuda"))
    call(attention, 32)
    assert served(attention) == {"usual": 1}


def test_without_a_table_of_ones_own_the_packages_is_used(backends, monkeypatch):
    monkeypatch.setattr(attention_layer, "committed_table", lambda _: BY_LENGTH)
    attention = layer(None)
    call(attention, 32)
    assert served(attention) == {"other": 1}


def test_a_table_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "table.json"
    both = (BY_LENGTH, replace(BY_LENGTH, name="another", platform="cuda", capability="9.0"))
    write_tables(file, both)
    fields = ("name", "platform", "device", "capability", "versions", "source", "measured")
    for written, read in zip(both, read_tables(file, name="it"), strict=True):
        assert [getattr(read, f) for f in fields] == [getattr(written, f) for f in fields]
    assert list(tmp_path.iterdir()) == [file]


def test_a_table_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(json, "dumps", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_tables(tmp_path / "table.json", [BY_LENGTH])
    assert list(tmp_path.iterdir()) == []


def written(tmp_path, **fields):
    file = tmp_path / "table.json"
    write_tables(file, [replace(BY_LENGTH, **fields)])
    return file


def test_a_table_of_this_machine_is_taken(tmp_path):
    file = written(tmp_path)
    scope = scope_from(attention_auto_table=file)
    assert scope.auto_table is not None
    assert scope.auto_table.measured == BY_LENGTH.measured


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"device": "NVIDIA A100"}, "the device is 'cpu', not 'NVIDIA A100'"),
        ({"platform": "cuda"}, "the platform is 'cpu', not 'cuda'"),
        ({"capability": "9.0"}, "the compute capability is '', not '9.0'"),
        ({"versions": {"torch": "2.5.0"}}, f"torch is {torch.__version__}, not 2.5.0"),
        (
            {"versions": {"fa9": "1.0", "torch": torch.__version__}},
            "fa9 is not installed, not 1.0",
        ),
    ],
)
def test_a_table_of_another_machine_or_version_is_refused_with_the_reason(tmp_path, fields, reason):
    file = written(tmp_path, **fields)
    with pytest.raises(ConfigError) as raised:
        scope_from(attention_auto_table=file)
    message = str(raised.value)
    assert message.startswith(
        "attention_auto_table must be a table of this machine and its versions"
    )
    assert reason in message
    assert "sglang attention bench --save FILE" in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", r"must be an object with .* got \[\]"),
        ("{}", "must have schema, tables, which it lacks"),
        ('{"schema": 1, "tables": null}', "tables must be a list, got None"),
        ('{"schema": 1, "tables": [3]}', r"tables\[0\] must be an object with .* got 3"),
        ('{"schema": 2, "tables": []}', "schema must be one of 1, got 2"),
        ('{"schema": 1}', "must have tables, which it lacks"),
        ('{"schema": 1, "tables": []}', r"must be some tables, got \[\]; write it anew with"),
        ('{"schema": 1, "tables": [{"name": 3}]}', "which it lacks"),
        ("{", "must be a readable JSON file"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, text, reason):
    file = tmp_path / "table.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_tables(file, name="it")


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("backend", "no_such", "attention backend must be one of"),
        ("device_ms", 0, "times of torch_sdpa must be above 0 ms, got 0.0 and None"),
        ("host_ms", "inf", "above 0 ms, got 1.0 and inf"),
        ("device_ms", "nan", "above 0 ms, got nan and None"),
        ("device_ms", "fast", "device_ms must be a number, got 'fast'"),
        ("device_ms", None, "a number, got None"),
        ("device_ms", True, "a number, got True"),
        ("host_ms", 10**400, "a number, got 1000"),
        ("backend", 5, "backend must be text, got 5"),
        ("variant", {}, "variant must be text, got {}"),
    ],
)
def test_times_that_are_none_are_refused(tmp_path, field, value, reason):
    file = tmp_path / "table.json"
    write_tables(file, [table(measured("1x8x1x8", timing("torch_sdpa", 1.0)))])
    document = json.loads(file.read_text())
    document["tables"][0]["measured"][0]["timings"][0][field] = value
    file.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=reason):
        read_tables(file, name="it")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"versions": []}, r"versions must be an object, got \[\]"),
        ({"versions": {"triton": 3.6}}, "versions.triton must be text, got 3.6"),
        ({"measured": [{"shape": 5, **ROW}]}, r"measured\[0\].shape must be text, got 5"),
        (
            {"measured": [{"shape": "1x" + "9" * 400 + "x1x8", **ROW}]},
            "shape must be BxSxHxD",
        ),
        ({"measured": [SHAPE | ROW | {"dtype": []}]}, r"dtype must be text, got \[\]"),
        (
            {"measured": [SHAPE | ROW | {"dtype": "zzz"}]},
            "dtype must be one of torch's floating ones, got 'zzz'",
        ),
        ({"measured": [SHAPE | ROW | {"dtype": "int8"}]}, "floating ones, got 'int8'"),
        ({"measured": [SHAPE | ROW | {"timings": None}]}, "timings must be a list, got None"),
        ({"measured": None}, "measured must be a list, got None"),
        ({"measured": ["x"]}, r"measured\[0\] must be an object with .* got 'x'"),
        ({"mesured": []}, r"no fields but .*, got \['mesured'\], did you mean 'measured'\?"),
        ({"device": 3}, r"^it '.*table\.json'\.tables\[0\]\.device must be text, got 3"),
    ],
)
def test_what_was_edited_into_nonsense_is_refused(tmp_path, changed, reason):
    document = tables_as_json([table()])
    document["tables"][0] |= changed
    file = tmp_path / "table.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=reason):
        read_tables(file, name="it")


def test_two_tables_of_one_machine_are_refused(tmp_path):
    document = tables_as_json([table(), table()])
    file = tmp_path / "table.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="different machines and versions, got two of the same"):
        read_tables(file, name="it")
    document["tables"][1]["versions"]["torch"] = "2.10.0"
    file.write_text(json.dumps(document))
    assert len(read_tables(file, name="it")) == 2


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"must be a readable JSON file"):
        table_for(tmp_path / "none.json", [current_environment()], name="it")


def test_a_file_that_never_ends_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ConfigError, match=r"JSON file: this is no regular file"):
        read_tables(tmp_path / "pipe.json", name="it")


def hopper(packages: dict[str, str]) -> Environment:
    found = frozenset((name, name, version) for name, version in packages.items())
    device = FakeDevice(platform=PlatformEnum.CUDA, capability=(9, 0), packages=found)
    return simulated_environment(device)


def test_the_packages_own_table_is_for_a_compute_capability():
    assert committed_table(hopper({"triton": "3.6.0"})) is not None
    other = FakeDevice(platform=PlatformEnum.CUDA, capability=(8, 0))
    assert committed_table(simulated_environment(other)) is None
    assert committed_table(current_environment()) is None


def test_of_the_packages_tables_the_one_of_the_same_triton_is_taken(monkeypatch):
    def of(triton: str, pytorch: str) -> AutoTable:
        versions = {"torch": pytorch, "triton": triton}
        return table(platform="cuda", capability="9.0", name=triton, versions=versions)

    tables = (of("3.6.0", "2.11.0"), of("3.9.0", "2.15.0"), of("3.7.1", "2.12.0"))
    monkeypatch.setattr(auto_table, "_committed", lambda: tables)
    committed_table.cache_clear()
    try:
        names = {v: committed_table(hopper({"triton": v})) for v in ("3.6.1", "3.9.9", "4.0.0")}
    finally:
        committed_table.cache_clear()
    assert {version: found and found.name for version, found in names.items()} == {
        "3.6.1": "3.6.0",
        "3.9.9": "3.9.0",
        "4.0.0": "3.9.0",
    }


def test_the_packages_own_table_says_what_its_rows_say():
    environment = hopper({"triton": "3.6.0", "fa3-fwd": "0.0.3"})
    packages = environment.packages | {("fa3_fwd_interface", "fa3-fwd", "0.0.3")}
    environment = replace(environment, packages=packages)
    found = committed_table(environment)
    assert found is not None
    ranking = found.ranking(CallShape.parse("1x75600x40x128"), torch.bfloat16)
    request = AttentionRequest(
        environment=environment,
        head_size=128,
        num_heads=40,
        num_kv_heads=40,
        dtype=torch.bfloat16,
        ranking=ranking,
    )
    selection = resolve(request, AUTO)
    assert ranking is not None
    best = ranking.timings[0]
    assert (str(selection.backend), selection.variant) == (best.backend, best.variant)
    assert selection.reason.startswith("fastest of ")
    assert "1x75600x40x128 (NVIDIA H200, torch" in selection.reason
    masked = resolve(request.with_needs(Feature.DENSE_MASK), AUTO)
    (variant, *_) = find_backend(masked.backend, PlatformEnum.CUDA).variants
    assert Feature.DENSE_MASK in variant.features
