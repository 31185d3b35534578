"""`skip_below`: what a layer leaves out inside of its kernel, and that it says so."""

import math

import pytest
import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.attention_report import AttentionReport
from multimodal_gen.runtime.layers.attention.sparse.methods.vsa import VideoSparseConfig
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from tests.helpers.methods import SMALL
from tests.helpers.skipping import peaked_inputs
from tests.runtime.layers.attention.sparse.test_dense_above import (
    GRID,
    HEAD_SIZE,
    HEADS,
    TEXT,
    make_layer,
)

METHODS = {
    "video_sparse_attn": {"sparsity": 0.3},
    "sliding_tile_attn": {"window": [1, 3, 3], "tile_size": [2, 2, 4], "skip_time_steps": 0},
    "sparge_attn": {"topk": 0.67},  # whose blocks of keys lie in place
    "cube_sparse_attn": {"topk_ratio": 0.5, "local_cube_size": [2, 2, 4]},  # by a map
}


def attend(layer, qkv, text):
    with torch.no_grad(), set_forward_context(0, latent_grid=GRID, text_span=text, num_steps=1):
        return layer(*qkv)


@pytest.mark.parametrize("text", [None, TEXT])
@pytest.mark.parametrize("method", METHODS)
def test_a_layer_leaves_out_what_hardly_counts_and_reports_the_share(method, text):
    tokens = math.prod(GRID) + (text.length if text else 0)
    qkv = peaked_inputs(tokens, HEADS, HEAD_SIZE, 8)
    place = torch.arange(math.prod(GRID))
    # Tiles on the left matter more, or the first piece of the sequence.
    left = place < 64 if method == "sparge_attn" else place % GRID[2] < 4
    qkv[1][:, : len(left), :, 0] = torch.where(left, 4.0, -4.0)[None, :, None]
    given = {**METHODS[method], "dense_above": 1}
    exact = attend(make_layer(method, given), qkv, text)
    low = make_layer(method, given, skip_below=8)
    out = attend(low, qkv, text)
    (entry,) = low.report().entries
    assert entry.skipped is not None
    assert 0 < entry.skipped < 1
    assert entry.as_dict()["skipped"] == entry.skipped
    assert not torch.equal(out, exact)
    assert (out - exact).abs().max() <= 2 * tokens * 10 ** (-8 / 10) * qkv[2].abs().max()
    summary = AttentionReport(layers=(low.report(),)).summary()
    assert f"{100 * entry.skipped:.1f} % of their steps skipped" in summary
    none = make_layer(method, given, skip_below=1000)
    assert torch.equal(attend(none, qkv, text), exact)
    assert none.report().entries[0].skipped == 0
    assert make_layer(method, given).report().entries[0].skipped is None
    assert "skip_below" in str(low.attn_impl.limits.ring)


@pytest.mark.parametrize("kernel", ["vsa", "fa4"])
def test_a_kernel_that_leaves_nothing_out_is_refused(kernel):
    with pytest.raises(ConfigError, match="`skip_below` of VideoSparseConfig must not be given wi"):
        VideoSparseConfig(skip_below=30, kernel=kernel)


@pytest.mark.parametrize("method", ["sage_sla_attn", "sparse_video_gen_2_attn", "vmoba_attn"])
def test_methods_whose_kernels_leave_nothing_out_refuse_it(method):
    with pytest.raises(ConfigError, match=f"`skip_below` of {method} must be left out, got 20: "):
        make_layer(method, SMALL.get(method, {}), skip_below=20)


def test_training_is_refused_by_the_name_that_was_given():
    layer = make_layer("video_sparse_attn", METHODS["video_sparse_attn"], skip_below=20)
    qkv = torch.randn(3, 1, math.prod(GRID), HEADS, HEAD_SIZE).requires_grad_().unbind(0)
    wanted = "`skip_below` of video_sparse_attn must be left out where a gradient is asked for, got"
    with (
        set_forward_context(0, latent_grid=GRID, num_steps=1),
        pytest.raises(UsageError, match=wanted),
    ):
        layer(*qkv)
