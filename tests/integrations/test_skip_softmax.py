"""Skip-softmax in a pipeline: the curve that a checkpoint brings."""

import copy

import pytest

from multimodal_gen.errors import ConfigError
from multimodal_gen.integrations.diffusers import apply
from tests.integrations.conftest import generate

CURVE = {
    "config_groups": {
        "group_0": {
            "algorithm": "skip_softmax",
            "ignore": ["blocks.0.attn1"],
            "threshold_scale_factor": {
                "formula": "a * exp(b * target_sparsity)",
                "coefficients": {"a": 0.5, "b": 2.0},
            },
            "target_sparsity": 0.5,
        }
    }
}


def test_the_curve_of_a_checkpoint_is_read_when_the_backend_is_chosen(fresh):
    pipe = fresh("wan")
    # As `from_pretrained` leaves what it finds in config.json and does not know.
    pipe.transformer.register_to_config(sparse_attention_config=CURVE)
    with apply(pipe, attention_backend="skip_softmax") as handle:
        generate(pipe, "wan")
        report = handle.report()
        layers = [each for each in report.layers if each.component == "transformer"]
        ours = [each for each in layers if str(each.role) == "self"]
        (dense,) = (each for each in ours if each.detours)
        (ran,) = (each for each in ours if not each.detours)
    assert dense.name == "blocks.0.attn1"
    (entry,) = ran.entries
    assert entry.calls
    assert entry.skipped is not None
    given = {"threshold": 0.25, "sparse_attention_config": {**CURVE["config_groups"]["group_0"]}}
    given["sparse_attention_config"]["ignore"] = []
    with apply(pipe, attention_backend="skip_softmax", attention_backend_config=given) as handle:
        generate(pipe, "wan")
        assert not any(each.detours for each in handle.report().layers)


def test_without_a_curve_a_threshold_must_be_given(fresh):
    pipe = fresh("wan")
    for given in (None, {"target_sparsity": 0.5}):
        with pytest.raises(ConfigError, match="skip_softmax must be told how much to leave out"):
            apply(pipe, attention_backend="skip_softmax", attention_backend_config=given)
    pipe.transformer.register_to_config(sparse_attention_config={"config_groups": {}})
    with pytest.raises(ConfigError, match="sparse_attention_config of WanTransformer3DModel must"):
        apply(pipe, attention_backend="skip_softmax")
    with apply(pipe, attention_backend="torch_sdpa") as handle:
        assert handle.report()


@pytest.mark.parametrize("curve", [{"config_groups": {}}, [1], {"raw_threshold": 0.1}])
def test_a_threshold_gets_past_a_curve_that_cannot_be_read(fresh, caplog, curve):
    pipe = fresh("wan")
    pipe.transformer.register_to_config(sparse_attention_config=curve)
    name = "sparse_attention_config of WanTransformer3DModel must"
    for given in (None, {"target_sparsity": 0.5}):
        with pytest.raises(ConfigError, match=f"{name}.*; give a `threshold`, or a curve as `spar"):
            apply(pipe, attention_backend="skip_softmax", attention_backend_config=given)
    own = {"target_sparsity": 0.5, "sparse_attention_config": CURVE}
    with apply(pipe, attention_backend="skip_softmax", attention_backend_config=own) as handle:
        assert handle.report()
    given = {"threshold": 0.1}
    with apply(pipe, attention_backend="skip_softmax", attention_backend_config=given) as handle:
        generate(pipe, "wan")
        entries = [entry for layer in handle.report().layers for entry in layer.entries]
    assert name in caplog.text
    assert "; it goes by `threshold` alone, and nothing that the calibration leaves" in caplog.text
    assert any(entry.skipped is not None for entry in entries)


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("blocks.0.attn1", 0),
        ("transformer.blocks.?.attn2", 0),
        ("blocks.0.attn1.attn", 1),
        ("transformer_2.blocks.0.attn1", 1),
        ("layers.*", 1),
    ],
)
def test_names_to_ignore_that_the_model_lacks_are_told_of(fresh, caplog, pattern, told):
    pipe = fresh("wan")
    curve = copy.deepcopy(CURVE)
    curve["config_groups"]["group_0"]["ignore"] = ["blocks.1.attn1", pattern]
    pipe.transformer.register_to_config(sparse_attention_config=curve)
    with apply(pipe, attention_backend="skip_softmax"):
        said = [r.getMessage() for r in caplog.records if "ignores" in r.getMessage()]
    assert said == told * [
        f"sparse_attention_config of WanTransformer3DModel ignores {pattern!r}, which no module of "
        f"transformer is called; nothing is left dense for it"
    ]


def test_components_and_rules_get_the_curve_too(fresh):
    pipe = fresh("wan")
    pipe.transformer.register_to_config(sparse_attention_config=CURVE)
    rules = {"rules": [{"role": "self", "backend": "skip_softmax"}]}
    for given in (
        {"component_attention_backends": {"transformer.self": "skip_softmax"}},
        {"attention_config": rules},
    ):
        with apply(pipe, **given) as handle:
            names = {
                str(entry.selection.backend)
                for layer in handle.report().layers
                if str(layer.role) == "self"
                for entry in layer.entries
            }
        assert names == {"skip_softmax"}
