"""Skip-softmax against a loop over blocks in float64, and what says how much it leaves out."""

import json
import math

import pytest
import torch

from multimodal_gen.errors import ConfigError, UnsupportedBackendError, UsageError
from multimodal_gen.runtime.layers.attention.config import build_config, config_as_dict
from multimodal_gen.runtime.layers.attention.request import LayerSite
from multimodal_gen.runtime.layers.attention.sparse.methods.skip_softmax import (
    BLOCK,
    SkipSoftmaxBackend,
    SkipSoftmaxConfig,
)
from multimodal_gen.runtime.layers.attention.sparse.skip_curve import FORMULA, SkipCurve
from tests.helpers.methods import method, picks
from tests.helpers.reference import reference_attention
from tests.helpers.skipping import attend_blocks, nearest_scores, peaked_inputs
from tests.helpers.sparse import run_sparse, text_places, video_tokens

SKIP = method("skip_softmax", dense_above=...)
GRID = (3, 9, 13)  # 351 tokens: two blocks of 128, and one of 95
# As ModelOpt 0.45 writes it for a transformer of Wan 2.2 (TensorRT-LLM's example, 51d6891).
MODELOPT = {
    "config_groups": {
        "group_0": {
            "algorithm": "skip_softmax",
            "targets": ["WanAttention"],
            "ignore": ["blocks.0.attn1", "blocks.38.*"],
            "threshold_scale_factor": {
                "formula": FORMULA,
                "coefficients": {"a": 2142.7334009837796, "b": 4.282667871834358},
            },
            "target_sparsity": 0.5,
        }
    },
    "producer": {"name": "modelopt"},
}


def in_blocks(tokens):
    return [tokens[i : i + BLOCK] for i in range(0, len(tokens), BLOCK)]


def blocks_of(text, total, mask=None):
    """Return the blocks of the video's queries, and of all keys: the video's, then the text's."""
    video = video_tokens(GRID, text)
    rest = [t for t in range(total) if t not in set(video)]
    keys = [*in_blocks(video), *in_blocks(rest)]
    if mask is not None:
        keys = [[t for t in block if mask[t]] for block in keys]
    return in_blocks(video), [block for block in keys if block]


@pytest.mark.parametrize("some", range(10))
def test_drawn_cases_leave_out_what_a_loop_in_float64_leaves_out(some):
    for seed in range(10 * some, 10 * some + 10):
        pick = picks(seed)
        text = text_places(GRID, pick(1, 200))[("no text", "text first", "text last")[pick(0, 2)]]
        total, kv_heads = math.prod(GRID) + (text.length if text else 0), pick(1, 2)
        q, k, v = peaked_inputs(total, 2, 32, (96, BLOCK, 160)[pick(0, 2)], seed=seed)
        k[..., 0] -= torch.arange(total)[:, None] / 24  # later keys count for less and less
        k, v = k[:, :, :kv_heads], v[:, :, :kv_heads]
        mask = None
        if pick(0, 2) == 0:
            first = pick(1, total - 2)  # a query of the video always keeps some key
            mask = torch.ones(1, total, dtype=torch.bool)
            mask[:, first : first + pick(1, 200)] = False
        rows, keys = blocks_of(text, total, None if mask is None else mask[0])
        # Between two of the distances there are, where no rounding decides.
        near = [nats for nats in sorted(nearest_scores(q, k, rows, keys)) if nats < -0.3]
        here = pick(0, len(near) - 2)
        assert near[here + 1] - near[here] > 1e-5
        below = -(near[here] + near[here + 1]) / 2 * 10 / math.log(10)
        layer = SKIP.layer(kv_heads=kv_heads, skip_below=below)
        out = run_sparse(layer, (q, k, v), GRID, text=text, attn_mask=mask)
        want, _, skipped = attend_blocks(q, k, v, rows, keys, below)
        seen = None if mask is None else mask[:, None, None]
        dense, _ = reference_attention(q, k, v, scale=SKIP.scale, mask=seen)
        video = video_tokens(GRID, text)
        others = [t for t in range(total) if t not in set(video)]
        want[:, others] = dense[:, others]
        if mask is not None:
            out, want = out[mask], want[mask]  # what masked queries give is nobody's
        torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
        (entry,) = layer.report().entries
        assert skipped
        assert entry.skipped == pytest.approx(skipped / (2 * len(rows) * len(keys)), abs=1e-12)


def test_every_setting_is_the_same_threshold():
    q, k, v = qkv = peaked_inputs(math.prod(GRID), 2, 32, BLOCK)
    rows, keys = blocks_of(None, q.shape[1])
    want, _, skipped = attend_blocks(q, k, v, rows, keys, 10.0)
    assert skipped
    curve = {"formula": FORMULA, "coefficients": {"a": 0.1 * q.shape[1] / math.exp(1.5), "b": 3}}
    settings = [
        {"threshold": 0.1},
        {"threshold_scale_factor": 0.1 * q.shape[1]},
        {"skip_below": 10},
        {"target_sparsity": 0.5, "sparse_attention_config": {"threshold_scale_factor": curve}},
    ]
    for given in settings:
        layer = SKIP.layer(**given)
        out = run_sparse(layer, qkv, GRID)
        torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
        (entry,) = layer.report().entries
        assert entry.skipped == skipped / (2 * len(rows) * len(keys))
        assert dict(entry.densities) == {0: 1.0}


def test_a_curve_is_read_as_modelopt_writes_it():
    curve = SkipCurve.parse(MODELOPT)
    assert curve.factor(0.5) == pytest.approx(2142.7334009837796 * math.exp(0.5 * 4.2826678718))
    assert curve.target_sparsity == 0.5
    assert curve.disabled_until_timestep is None
    assert SkipCurve.parse(curve.as_mapping()) == SkipCurve.parse(str(curve)) == curve
    older = {**MODELOPT["config_groups"]["group_0"], "target_sparsity": {"prefill": 0.4}}
    older["threshold_scale_factor"] = {"prefill": {"a": 3.0, "b": 2.0}}
    assert SkipCurve.parse(older).factor(0.5) == pytest.approx(3 * math.e)
    assert SkipCurve.parse(older).target_sparsity == 0.4
    assert curve.ignores("transformer", "blocks.0.attn1")
    assert curve.ignores(None, "blocks.38.attn2")
    assert not curve.ignores("transformer", "blocks.10.attn1")
    config = SkipSoftmaxConfig(sparse_attention_config=MODELOPT)
    assert config.skips() == ("target_sparsity", 0.5)
    assert build_config(SkipSoftmaxConfig, config_as_dict(config), backend="skip_softmax") == config
    text = json.dumps(MODELOPT)
    assert SkipSoftmaxConfig(sparse_attention_config=text) == config


GROUP = MODELOPT["config_groups"]["group_0"]
LOGARITHMS = {"log_a": math.log(7.9), "b": 8.6}
NUMBERS = {"a": 7.9, "b": 8.6}


@pytest.mark.parametrize(
    ("group", "beside"),
    [
        # ModelOpt 0.43 and 0.44: the curve beside the groups, and a phase that denoisers lack.
        (
            {"sparse_algo": "softmax_skip", "targets": ["WanAttention"]},
            {
                "threshold_scale_factor": {
                    "formula": FORMULA,
                    "prefill": NUMBERS,
                    "decode": {"a": 1.0, "b": 1.0},
                },
                "producer": {"name": "modelopt", "version": "0.44.0"},
            },
        ),
        # ModelOpt 0.45 and 0.46.
        (
            {
                "algorithm": "skip_softmax",
                "threshold_scale_factor": {"formula": FORMULA, "prefill": NUMBERS},
            },
            {},
        ),
        # ModelOpt's sparse.yaml of denoisers, which TensorRT-LLM reads.
        (
            {
                "sparse_algo": "softmax_skip",
                "threshold_scale_factor": {
                    "formula": "log_a + b * target_sparsity",
                    "prefill": LOGARITHMS,
                },
            },
            {},
        ),
        # TensorRT-LLM.
        (
            {
                "algorithm": "skip_softmax",
                "threshold_scale_factor": {
                    "formula": "exp(log_a + b * target_sparsity)",
                    "coefficients": LOGARITHMS,
                },
            },
            {},
        ),
        (
            {"algorithm": "skip_softmax"},
            {"threshold_scale_factor": {"formula": "exp(log_a+b*target_sparsity)", **LOGARITHMS}},
        ),
        ({"algorithm": "skip_softmax", "threshold_scale_factor": LOGARITHMS}, {}),
    ],
)
def test_every_form_of_a_curve_is_the_same_one(group, beside):
    other = {"algorithm": "sparse_softmax", "sparsity_n": 2}
    curve = SkipCurve.parse({"config_groups": {"group_0": group, "group_1": other}, **beside})
    assert curve.a == pytest.approx(7.9, rel=1e-15)
    assert curve.b == 8.6
    assert curve.factor(0.5) == pytest.approx(7.9 * math.exp(4.3))


def test_what_a_curve_leaves_dense_is_read_from_the_group_and_beside_the_groups():
    more = {
        "ignore": ["blocks.0.attn1"],
        "target_sparsity": 0.4,
        "disabled_until_timestep": 0.9,
        "initial_disabled_steps": 2,
    }
    factor = {"threshold_scale_factor": NUMBERS}
    group = {"algorithm": "skip_softmax", **factor}
    beside = SkipCurve.parse({"config_groups": {"group_0": group}, **more})
    assert beside == SkipCurve.parse({"config_groups": {"group_0": {**group, **more}}})
    assert beside == SkipCurve.parse({**factor, **more}) == SkipCurve.parse(beside.as_mapping())
    assert beside.target_sparsity == 0.4
    more["disabled_layers"] = more.pop("ignore")
    assert beside == SkipCurve.parse({"config_groups": {"group_0": group}, **more})
    assert beside.ignores("transformer", "blocks.0.attn1")
    config = SkipSoftmaxConfig(sparse_attention_config=beside, dense_steps="5")
    parts = config.dense_parts("steps")
    held = [[step for step in range(8) if part.indices.holds(step, 8)] for part in parts]
    assert held == [[5], [0, 1], []]  # the noise levels of these steps are unknown


def test_the_first_steps_of_a_curve_run_dense():
    qkv = peaked_inputs(math.prod(GRID), 2, 32, 64)
    curve = {"threshold_scale_factor": NUMBERS, "initial_disabled_steps": 3}
    layer = SKIP.layer(threshold=0.1, sparse_attention_config=curve)
    for step in range(4):
        run_sparse(layer, qkv, GRID, step=step, known={"num_steps": 4})
    dense, sparse = layer.report().entries
    assert (dense.calls, sparse.calls) == (3, 1)
    assert "(`initial_disabled_steps=3`)" in dense.selection.reason


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"threshold": 0.1, "skip_below": 10}, "`threshold` and `skip_below` of skip_softmax say"),
        ({"threshold": 1.0}, r"`threshold` of .* must be a number in \(0, 1\) or null"),
        ({"threshold": 0}, r"`threshold` of .* must be a number in \(0, 1\) or null"),
        ({"threshold_scale_factor": 0}, "`threshold_scale_factor` of .* must be a number > 0 or"),
        (
            {"threshold": 0.1, "disabled_until_timestep": 0},
            r"`disabled_until_timestep` of .* must be a number in \(0, 1\] or null",
        ),
        ({"threshold": 0.1, "dense_above": 0.9}, "`dense_above` of skip_softmax must be left out"),
        ({"sparse_attention_config": {"config_groups": {}}}, "must have one group whose `algorith"),
        (
            {"sparse_attention_config": {**GROUP, "threshold_scale_factor": {"formula": "a * b"}}},
            "must have the formula a \\* exp",
        ),
        (
            {"sparse_attention_config": {**GROUP, "threshold_scale_factor": {"a": 1}}},
            "must have the coefficients a, above 0, and b of a \\* exp",
        ),
        ({"sparse_attention_config": {**GROUP, "ignore": "blocks.0"}}, "names of modules in `igno"),
        ({"sparse_attention_config": {**GROUP, "target_sparsity": 2}}, "target_sparsity must be a"),
        *(
            (
                {"sparse_attention_config": {**GROUP, "disabled_until_timestep": none}},
                "disabled_until_timestep must be above 0, got 0, by which vllm-omni leaves no step",
            )
            for none in (0, 0.0, {"prefill": 0})
        ),
        (
            {"sparse_attention_config": {**GROUP, "initial_steps": 3}},
            "must have no keys but algorithm, targets, .*, got 'initial_steps'",
        ),
        (
            {
                "sparse_attention_config": {
                    "config_groups": {"group_0": GROUP},
                    "target_sparsity": 0.7,
                }
            },
            r"must have one value of target_sparsity, got 0\.7 and 0\.5",
        ),
        (
            {"sparse_attention_config": {**GROUP, "algorithm": "sparse_softmax"}},
            "must have the algorithm skip_softmax, got 'sparse_softmax'",
        ),
        (
            {"sparse_attention_config": {**GROUP, "initial_disabled_steps": 1.5}},
            r"initial_disabled_steps must be an integer >= 0, got 1\.5",
        ),
        (
            {
                "sparse_attention_config": {
                    "threshold_scale_factor": {"formula": FORMULA, "log_a": 1.0, "b": 2.0}
                }
            },
            "or log_a and b of its other forms, got",
        ),
        (
            {"sparse_attention_config": {"threshold_scale_factor": {**NUMBERS, "c": 1.0}}},
            "must have the coefficients a, above 0, and b of a",
        ),
        (
            {"sparse_attention_config": {"threshold_scale_factor": {"log_a": 1000, "b": 1.0}}},
            "must have the coefficients a, above 0, and b of a",
        ),
        ({"sparse_attention_config": 3}, "must be a mapping as ModelOpt's sparse_attention_config"),
    ],
)
def test_settings_that_contradict_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        SkipSoftmaxConfig(**given)


@pytest.mark.parametrize(
    ("given", "got"),
    [
        ({}, "got none; give a `threshold`"),
        ({"target_sparsity": 0.5}, "got `target_sparsity` 0.5 without a curve; give a `thresh"),
        (
            {"sparse_attention_config": {"threshold_scale_factor": {"a": 1.0, "b": 1.0}}},
            "got a curve alone; give a `target_sparsity` on it",
        ),
    ],
)
def test_a_layer_must_be_told_how_much_to_leave_out(given, got):
    with pytest.raises(ConfigError, match=f"skip_softmax must be told how much.*{got}"):
        SKIP.layer(**given)


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (
            {"sparse_attention_config": MODELOPT},
            "18236.* for 351 keys, and is for videos of 1823[67] keys or more; give",
        ),
        (
            {"threshold_scale_factor": 351},
            "351 for 351 keys, and is for videos of 352 keys or more; give",
        ),
        ({"target_sparsity": 0.5, "b": 2000.0}, "inf for 351 keys; give"),
        ({"target_sparsity": 0.5, "b": -1e5}, "0 for 351 keys; give"),
        ({"threshold_scale_factor": 1e-323}, "9.* for 351 keys; give"),
    ],
)
def test_factors_that_give_no_lambda_between_0_and_1_are_refused(given, got):
    given = dict(given)
    if "b" in given:
        curve = {"coefficients": {"a": 1.0, "b": given.pop("b")}}
        given["sparse_attention_config"] = {"threshold_scale_factor": curve}
    qkv = peaked_inputs(math.prod(GRID), 2, 32, 64)
    layer = SKIP.layer(index=1, **given)
    with pytest.raises(UsageError, match=f"must be above 0 and less than the number.*got {got}"):
        run_sparse(layer, qkv, GRID)


def test_modules_that_a_curve_ignores_are_dense_and_the_report_says_so():
    qkv = peaked_inputs(math.prod(GRID), 2, 32, 64)
    site = LayerSite(name="blocks.0.attn1", component="transformer", layer=0, num_layers=40)
    layer = SKIP.layer(site=site, sparse_attention_config=MODELOPT)
    out = run_sparse(layer, qkv, GRID)
    want, _ = reference_attention(*qkv, scale=SKIP.scale)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    (detour,) = layer.report().detours
    assert "leaves blocks.0.attn1 dense (`ignore` of its calibration)" in detour.selection.reason


def test_noise_levels_above_a_limit_are_dense():
    qkv = peaked_inputs(math.prod(GRID), 2, 32, 64)
    layer = SKIP.layer(threshold=0.1, disabled_until_timestep=0.86)
    known = {"sigmas": (1.0, 0.9, 0.86, 0.2), "num_steps": 4}
    for step in range(4):
        run_sparse(layer, qkv, GRID, step=step, known=known)
    dense, sparse = layer.report().entries
    assert (dense.calls, sparse.calls) == (2, 2)
    assert "(`disabled_until_timestep=0.86`)" in dense.selection.reason
    until = {**GROUP, "disabled_until_timestep": 0.86}
    of_checkpoint = SkipSoftmaxConfig(sparse_attention_config=until)
    assert of_checkpoint.dense_parts("steps") == layer.attn_impl.config.dense_parts("steps")
    assert of_checkpoint.dense_parts("layers") == ()


def test_rings_caches_and_gradients_are_refused_with_the_reason():
    limits = SkipSoftmaxBackend.limits(SkipSoftmaxConfig(threshold=0.1))
    assert limits.ulysses is None
    assert limits.ring == "threshold compares the scores of a row over all keys in one pass"
    assert limits.cache == "`threshold` is for keys of one call"
    qkv = [x.requires_grad_() for x in peaked_inputs(math.prod(GRID), 2, 32, 64)]
    with pytest.raises(UnsupportedBackendError, match=r"skip_softmax.*backward"):
        run_sparse(SKIP.layer(threshold=0.1), qkv, GRID)
