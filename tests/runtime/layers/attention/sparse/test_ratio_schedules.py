"""Ratios that change over the steps: at every step a layer is what one with that ratio is."""

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from tests.runtime.layers.attention.sparse.test_dense_above import (
    BY_DATA,
    GRID,
    VMOBA,
    inputs,
    make_layer,
)

# By method: its ratio, the other parameters, the ratio of the first steps and of the others.
CASES = {
    "video_sparse_attn": ("sparsity", {}, 0.4, 0.8),
    "sla_attn": ("topk_ratio", {"BLKQ": 64}, 0.7, 0.2),
    "sage_sla_attn": ("topk_ratio", {"BLKQ": 64}, 0.7, 0.2),
    "sol_attn": ("topk_ratio", {"dense_steps": 0, "dense_layers": None}, 0.7, 0.2),
    "vmoba_attn": ("moba_threshold", {**VMOBA, "moba_select_mode": "threshold"}, 0.6, 0.1),
    "nabla_attn": ("P", {"tile_size": [1, 3, 4], "add_sta": False}, 0.9, 0.3),
    "draft_attn": ("sparsity_ratio", {"pool_h": 3, "pool_w": 4}, 0.3, 0.9),
    "video_sparse_attn_h3": ("sparsity", {}, 0.4, 0.8),
    "bsa_attn": ("query_keep_ratio", {"tile_size": [1, 3, 4]}, 1.0, 0.3),
    "sparse_video_gen_2_attn": (
        "svg2_top_p_kmeans",
        {**BY_DATA["sparse_video_gen_2_attn"], "svg2_min_kc_ratio": 0},
        0.9,
        0.2,
    ),
}
STEPS, LATE = 5, 2  # of 5 steps, the first 0.4 are 2


def step(layer, qkv, index: int) -> torch.Tensor:
    torch.manual_seed(index)
    with (
        torch.no_grad(),
        set_forward_context(
            index, latent_grid=GRID, num_steps=STEPS, request_id="a", cfg_branch="cond"
        ),
    ):
        return layer(*qkv)


@pytest.mark.slow_cases("sol_attn", "sparse_video_gen_2_attn", "video_sparse_attn")
@pytest.mark.parametrize("method", CASES)
def test_every_step_is_that_of_a_layer_with_its_ratio(method):
    name, rest, early, late = CASES[method]
    rest = {**rest, "dense_above": 1}
    varied = make_layer(method, {**rest, name: {0: early, 0.4: late}})
    fixed = [make_layer(method, {**rest, name: ratio}) for ratio in (early, late)]
    for index in range(STEPS):
        qkv = inputs()
        outs = [step(layer, qkv, index) for layer in fixed]
        out = step(varied, qkv, index)
        assert torch.equal(out, outs[index >= LATE])
        assert not torch.equal(outs[0], outs[1])
    (entry,) = varied.report().entries
    shares = [dict(layer.report().entries[0].densities) for layer in fixed]
    expected = [shares[index >= LATE][index] for index in range(STEPS)]
    assert [share for _, share in entry.densities] == expected
    assert expected[0] > expected[-1]
    assert entry.as_dict()["config"][name] == {"0": early, "0.4": late}


def test_some_steps_may_be_dense_because_their_ratio_is_above_the_limit():
    layer = make_layer("video_sparse_attn", {"sparsity": {0: 0.1, 0.4: 0.8}, "dense_above": 0.6})
    for index in range(STEPS):
        step(layer, inputs(), index)
    report = layer.report()
    assert [at for at, _ in report.entries[0].densities] == [2, 3, 4]
    assert [detour.calls for detour in report.detours] == [LATE]
    assert "(`dense_above`)" in report.detours[0].selection.reason


def test_a_ratio_that_changes_needs_a_run_of_known_length():
    layer = make_layer("video_sparse_attn", {"sparsity": {0: 0.1, 0.4: 0.8}})
    with (
        set_forward_context(0, latent_grid=GRID),
        pytest.raises(UsageError, match=r"sparsity=\{0: 0.1, 0.4: 0.8\} must be used in a run who"),
    ):
        layer(*inputs())
