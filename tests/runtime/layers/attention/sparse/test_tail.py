"""`tail: pooled`: what it means for clusters, who has none, and what says so."""

from itertools import product

import pytest
import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.layers.attention import warn_once
from multimodal_gen.runtime.layers.attention.sparse.methods.svg2 import SVG2Router
from tests.helpers.methods import DEFINED, method
from tests.helpers.sparse import (
    joint_mask,
    pair_mask,
    run_sparse,
    text_places,
    video_tokens,
)
from tests.helpers.tail import pooled_attention

SLA = DEFINED["sla"]
SVG2 = method(
    "sparse_video_gen_2_attn",
    heads=4,
    svg2_num_q_centroids=6,
    svg2_num_k_centroids=11,
    svg2_top_p_kmeans=0.4,
    svg2_first_layers_fp=0,
    svg2_first_times_fp=0,
    svg2_kmeans_iter_init=3,
    tail="pooled",
)


@pytest.mark.parametrize("where", ["no text", "text first"])
def test_clusters_that_are_not_kept_count_by_their_means(where, monkeypatch):
    grid = (5, 6, 9)
    text, found = text_places(grid, 30)[where], []
    group = SVG2Router.group
    monkeypatch.setattr(SVG2Router, "group", lambda *x: found.append(group(*x)) or found[-1])
    choose = SVG2Router.choose
    monkeypatch.setattr(SVG2Router, "choose", lambda *x: found.append(choose(*x)) or found[-1])
    qkv = SVG2.inputs(grid, text=text, kv_heads=2)
    out = run_sparse(SVG2.layer(kv_heads=2), qkv, grid, text=text)
    (queries, keys), token_mask = found
    assert 0 < token_mask.float().mean() < 1
    video = video_tokens(grid, text)

    def positions(clusters, b, h):
        order = clusters.order[b, h].tolist()
        ends = zip(clusters.starts[b, h].tolist(), clusters.counts[b, h].tolist(), strict=True)
        return [[video[t] for t in order[first : first + count]] for first, count in ends]

    tokens = qkv.query.shape[1]
    mask = torch.zeros(2, 4, tokens, tokens, dtype=torch.bool)
    for b, h in product(range(2), range(4)):
        sides = positions(queries, b, h), positions(keys, b, h // 2)
        mask[b, h] = pair_mask(token_mask[b, h], *sides, tokens, tokens)
    mask = joint_mask(mask, video)
    want = pooled_attention(
        *qkv, mask, lambda b, h: positions(keys, b, h // 2), scale=SVG2.scale, rows=video
    )
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


def test_by_default_the_rest_is_dropped_and_sla_names_the_remedy(monkeypatch):
    for name in ("sta", "vsa", "sla", "vmoba, st"):
        config = DEFINED[name].method.config()
        assert type(config).__dataclass_fields__["tail"].default == "none", name
    assert type(SVG2.config()).__dataclass_fields__["tail"].default == "none"
    warned = []
    monkeypatch.setattr(warn_once.WarnOnce, "warn", lambda self, text: warned.append(text))
    SLA.check()
    assert any("`tail: pooled` counts the other blocks by their means" in x for x in warned)
    warned.clear()
    SLA.check(tail="pooled")
    assert not any("proj_l" in text for text in warned)


def test_a_trained_branch_leaves_no_room_for_a_tail():
    layer = SLA.method.layer(tail="pooled")
    layer.set_projection(torch.nn.Linear(32, 32).requires_grad_(False))
    with pytest.raises(UsageError, match="`tail` of sla_attn must be none where a checkpoint"):
        run_sparse(layer, SLA.inputs(kv_heads=2), SLA.grid)


@pytest.mark.parametrize(
    ("method", "kernel"),
    [
        (DEFINED["sta"].method, "st_attn"),
        (DEFINED["vsa"].method, "vsa"),
        (SLA.method, "sparse_linear_attention"),
        (DEFINED["vmoba, st"].method, "fastvideo_kernel"),
        (SVG2, "svg"),
    ],
)
def test_packages_of_others_have_no_tail(method, kernel):
    with pytest.raises(ConfigError, match="must be none with `kernel`"):
        method.config(kernel=kernel, tail="pooled")
