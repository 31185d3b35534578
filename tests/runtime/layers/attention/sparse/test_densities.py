"""Reports tell the share of pairs that have a weight, also where blocks are of several sizes."""

import math

import pytest
import torch

from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.backends.registry import backends_of
from multimodal_gen.runtime.layers.attention.config import build_config
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    LayerSite,
    SelectionScope,
    Source,
)
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum

GRID = (5, 3, 37)  # 555 tokens: eight blocks of 64, and one of 43
HEADS, HEAD_SIZE = 2, 584
ALWAYS = {"dense_steps": None, "dense_layers": None, "dense_above": 1.0}
METHODS = {
    "sol_attn": {"tau": 0.5, "tail": "none", "neighbours": 0},
    "subblock_sparse_attn": {"sparsity": 0.5, "skip_first_steps": 0, "min_seq_len": 0},
    "pisa_attn": {"density": 0.5, "tail": "none"},
    "cube_sparse_attn": {"topk_ratio": 0.3},
    "sparge_attn": {"topk": 0.4},
    "static_sparse_attn": {"pattern": "lvsa", "key_frame_interval": 5, "window_size": 1},
    "video_sparse_attn": {"sparsity": 0.6},
    "sliding_tile_attn": {"window": [1, 3, 3], "tile_size": [2, 2, 4], "skip_time_steps": 0},
}


def layer_of(method: str) -> LocalAttention:
    backend = AttentionBackendEnum(method)
    given = {**ALWAYS, **METHODS[method]}
    config = build_config(backends_of(backend)[0].config_cls, given, backend=method)
    asked = BackendPreference(source=Source.SETTINGS, backend=backend, config=config)
    site = LayerSite(name="blocks.0.attn1", layer=0)
    scope = SelectionScope(default=asked, strict=True)
    return LocalAttention(HEADS, HEAD_SIZE, compute_dtype=torch.float32, site=site, scope=scope)


@pytest.mark.parametrize("text", [None, TextSpan(start=0, length=29)], ids=["video", "text first"])
@pytest.mark.parametrize("method", METHODS)
def test_the_density_is_the_share_of_pairs_with_a_weight(method, text):
    tokens = math.prod(GRID) + (text.length if text else 0)
    generator = torch.Generator().manual_seed(0)
    q, k = 0.2 * torch.randn(2, 1, tokens, HEADS, HEAD_SIZE, generator=generator)
    weights = torch.eye(tokens, HEAD_SIZE)[None, :, None].expand(q.shape).contiguous()
    layer = layer_of(method)
    with torch.no_grad(), set_forward_context(0, latent_grid=GRID, text_span=text, num_steps=1):
        out = layer(q, k, weights)[..., :tokens]
    (entry,) = layer.report().entries
    assert entry.densities == ((0, pytest.approx(float((out > 0).double().mean()))),)
    assert entry.densities[0][1] < 1
