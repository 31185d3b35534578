"""Sparse backends on several processes against one process."""

import itertools
import json

import pytest
import torch

from multimodal_gen.runtime.distributed.groups import parallel_groups, use_parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.layers.attention import UlyssesAttention_VSA, USPAttention
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    SelectionScope,
    Source,
    scope_from_args,
)
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from multimodal_gen.runtime.server_args import ServerArgs
from tests.helpers.inputs import make_qkv
from tests.helpers.processes import own


def check_video_sparse(lengths, heads, with_gate):
    backend = AttentionBackendEnum.VIDEO_SPARSE_ATTN
    asked = BackendPreference(source=Source.SETTINGS, backend=backend)
    layer = UlyssesAttention_VSA(heads, 32, scope=SelectionScope(default=asked))
    q, k, v = make_qkv(1, sum(lengths), heads, 32)
    gate = make_qkv(1, sum(lengths), heads, 32, seed=3).query if with_gate else None
    with set_forward_context(0, latent_grid=(4, 6, 8), num_steps=2):
        with use_parallel_groups(None):
            want = layer(q, k, v, gate_compress=gate)
        local = [None if x is None else own(x, lengths) for x in (q, k, v, gate)]
        out = layer(*local[:3], gate_compress=local[3])
    torch.testing.assert_close(out, own(want, lengths))


def sparse_layer(backend, config, heads):
    args = ServerArgs(model_path="none", attention_backend=backend, attention_backend_config=config)
    return USPAttention(heads, 32, prefix="blocks.1.attn", scope=scope_from_args(args))


def check_sparse(backend, config, lengths, heads):
    """Compare the second step of a run, and make sure that it is sparse in one process."""
    text = {"num_replicated_prefix": 5}
    q, k, v = make_qkv(1, 5 + sum(lengths), heads, 32)
    outs = []
    for groups in (None, parallel_groups()):
        layer = sparse_layer(backend, config, heads)
        with use_parallel_groups(groups), torch.no_grad():
            for step in range(2):
                known = {"latent_grid": (4, 6, 8), "num_steps": 2, "request_id": "one"}
                with set_forward_context(step, text_span=TextSpan(start=0, length=5), **known):
                    local = (q, k, v) if groups is None else [own(x, lengths, 5) for x in (q, k, v)]
                    out = layer(*local, **text)
        outs.append(out)
    torch.testing.assert_close(outs[1], own(outs[0], lengths, 5))
    with use_parallel_groups(None), torch.no_grad():
        dense = USPAttention(heads, 32)(q, k, v)
    assert not torch.allclose(outs[0], dense, atol=1e-3)


SPARSE = {
    "sliding_tile_attn": {"window": [1, 3, 1], "tile_size": [2, 2, 2], "skip_time_steps": 0},
    "vmoba_attn": {
        "temporal_chunk_size": 2,
        "spatial_chunk_size": [3, 4],
        "st_chunk_size": [2, 3, 4],
        "temporal_topk": 1,
        "spatial_topk": 2,
        "st_topk": 2,
        "first_full_step": 0,
    },
    "sla_attn": {"topk_ratio": 0.3, "BLKQ": 64, "BLKK": 64},
    "sol_attn": {"dense_steps": 0, "dense_layers": None, "tile_size": [2, 2, 2]},
    "sparse_video_gen_2_attn": {
        "svg2_num_q_centroids": 8,
        "svg2_num_k_centroids": 16,
        "svg2_top_p_kmeans": 0.5,
        "svg2_first_layers_fp": 0.0,
        "svg2_first_times_fp": 0.0,
    },
}


@pytest.mark.slow_cases(
    "sliding_tile_attn-3",
    "sliding_tile_attn-4",
    "sol_attn-3",
    "sol_attn-4",
    "sparse_video_gen_2_attn-3",
    "sparse_video_gen_2_attn-4",
)
@pytest.mark.parametrize("heads", [4, 3])
@pytest.mark.parametrize("backend", SPARSE)
def test_sparse_backends_see_the_whole_video_of_their_heads(two_ranks, backend, heads):
    two_ranks.run(Mesh(ulysses=2), check_sparse, backend, SPARSE[backend], (100, 92), heads)


def first_call(backend, config):
    """Return what the first call of a run raises on this rank, or None."""
    lengths = [96] * parallel_groups().sequence.size
    whole = make_qkv(1, sum(lengths), 4, 32)
    layer = sparse_layer(backend, config, 4)
    try:
        with set_forward_context(0, latent_grid=(4, 6, 4 * len(lengths)), num_steps=2):
            layer(*(own(x, lengths) for x in whole))
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    ("mode", "scope", "refused"),
    [
        ("threshold", "overall", True),
        ("threshold", "block", True),
        ("topk", "overall", True),
        ("threshold", "head_global", False),
        ("topk", "query_head", False),
    ],
)
def test_scopes_over_all_heads_are_refused_where_heads_are_split(two_ranks, mode, scope, refused):
    config = {**SPARSE["vmoba_attn"], "moba_select_mode": mode, "moba_threshold_type": scope}
    config["first_full_step"] = 1  # the first call, which is dense, refuses it
    want = (
        "UnsupportedBackendError",
        f"attention backend vmoba_attn (reference) must have all heads in one process: "
        f"`moba_threshold_type` {scope} ranks the chunks of all heads together, and a rank has "
        f"some of the heads; query_head and head_global rank within a head; use --sp-degree 1, or "
        f"choose another backend",
    )
    found = two_ranks.run(Mesh(ulysses=2), first_call, "vmoba_attn", config)
    assert found == [want if refused else None] * 2
    assert two_ranks.run(Mesh(cfg=2), first_call, "vmoba_attn", config) == [None] * 2


def test_windows_by_head_are_those_of_the_ranks_heads(two_ranks, tmp_path):
    windows = [[1, 1, 1], [2, 3, 1], [1, 3, 4]]
    keys = itertools.product(range(2), range(2), range(3))
    strategy = {f"{s}_{layer}_{head}": windows[(head + s) % 3] for s, layer, head in keys}
    (tmp_path / "windows.json").write_text(json.dumps(strategy))
    config = {"mask_strategy_file_path": str(tmp_path / "windows.json"), "skip_time_steps": 0}
    config["tile_size"] = [2, 2, 2]
    two_ranks.run(Mesh(ulysses=2), check_sparse, "sliding_tile_attn", config, (100, 92), 3)


@pytest.mark.parametrize("with_gate", [False, True])
@pytest.mark.parametrize("heads", [4, 3])
def test_video_sparse_attention_sees_the_whole_video(two_ranks, heads, with_gate):
    two_ranks.run(Mesh(ulysses=2), check_video_sparse, (100, 92), heads, with_gate)
