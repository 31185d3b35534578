"""Sparse backends whose keys and values travel round a ring, against one process."""

import itertools
import json
import math

import pytest
import torch
from torch import nn

from multimodal_gen.runtime.distributed.groups import parallel_groups, use_parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.layers.attention import UlyssesAttention_VSA, USPAttention
from multimodal_gen.runtime.layers.attention.scope import scope_from_args
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.runtime.server_args import ServerArgs
from tests.helpers.inputs import make_qkv
from tests.helpers.processes import own

GRID, RAGGED, LARGE = (4, 6, 8), (3, 5, 7), (5, 7, 13)
MESHES = [Mesh(ring=4), Mesh(ulysses=2, ring=2)]
TEXT = {"none": (0, 0), "front": (5, 0), "back": (0, 3)}
VSA = {"sparsity": 0.7, "tile_size": [4, 4, 4]}
VMOBA = {
    "first_full_step": 0,
    "temporal_chunk_size": 1,
    "spatial_chunk_size": [3, 4],
    "st_chunk_size": [2, 3, 4],
    "temporal_topk": 2,
    "spatial_topk": 2,
    "st_topk": 3,
}
STA = {"window": [1, 3, 1], "tile_size": [2, 2, 2], "skip_time_steps": 0}


def sparse_layer(backend, config, heads, kv_heads, **more):
    args = ServerArgs(
        model_path="none", attention_backend=backend, attention_backend_config=config, **more
    )
    return USPAttention(heads, 32, kv_heads, prefix="blocks.1.attn", scope=scope_from_args(args))


def projection():
    linear = nn.Linear(32, 32)
    generator = torch.Generator().manual_seed(4)
    for parameter in linear.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 32**-0.5
    return linear.requires_grad_(False)


def key_mask(num_keys):
    """Leave out tokens all over the video and text, and whole tiles of the second sample."""
    keep = torch.arange(2 * num_keys).view(2, -1) % 3 != 1
    keep[1, num_keys // 2 :] = False
    keep[:, :1] = True
    return keep


def run(layer, groups, inputs, grid, text, options, step=1):
    known = {"latent_grid": grid, "num_steps": 2, "request_id": "one"}
    if sum(text):
        start = 0 if text[0] else math.prod(grid)
        known["text_span"] = TextSpan(start=start, length=sum(text))
    with use_parallel_groups(groups), torch.no_grad(), set_forward_context(step, **known):
        return layer(*inputs, **options)


def check(backend, config, grid, lengths, heads, text=(0, 0), masked=False):
    """Compare outputs and densities of this rank with those of one process."""
    (front, back), (heads, kv_heads) = text, heads
    batch, total = 2 if masked else 1, front + sum(lengths) + back
    whole = make_qkv(batch, total, heads, 32, num_kv_heads=kv_heads)
    if backend == "sla_attn":  # means that differ by more than rounding
        for x in whole[:2]:
            x += x[:, ::16].repeat_interleave(16, dim=1)[:, :total]
    mask = key_mask(total) if masked else None
    options = {"num_replicated_prefix": front, "num_replicated_suffix": back}
    alone, split = (sparse_layer(backend, config, heads, kv_heads) for _ in range(2))
    for layer in (alone, split):
        if backend == "sla_attn" and "tail" not in config:
            layer.set_projection(projection())
    want = run(alone, None, (*whole, mask), grid, text, options)
    local = [x if x is None else own(x, lengths, front, back) for x in (*whole, mask)]
    out = run(split, parallel_groups(), local, grid, text, options)
    torch.testing.assert_close(out, own(want, lengths, front, back))
    entries = [layer.report().entries[-1] for layer in (alone, split)]
    assert entries[0].calls == entries[1].calls == 1
    densities = [dict(entry.densities) for entry in entries]
    if backend == "sliding_tile_attn" or parallel_groups().ulysses.size == 1:  # else of its heads
        # In a ring, blocks of lists that are cut short count as ones of mean size.
        far = {"sla_attn": 0.17}.get(backend)
        assert densities[1] == pytest.approx(densities[0], abs=far)
    assert 0 < densities[0][1] < 1


def check_strategy(config):
    """Compare a dense step and a step whose windows differ between heads."""
    lengths = (60, 36, 50, 46)
    whole = make_qkv(1, sum(lengths), 5, 32)
    alone, split = (sparse_layer("sliding_tile_attn", config, 5, 5) for _ in range(2))
    for step in range(2):
        want = run(alone, None, whole, GRID, (0, 0), {}, step)
        local = [own(x, lengths) for x in whole]
        out = run(split, parallel_groups(), local, GRID, (0, 0), {}, step)
        torch.testing.assert_close(out, own(want, lengths))


def check_quantised(config, lengths, text, masked):
    """8 bits round keys as they are cut, so a ring is compared with the method without rounding."""
    front, back = text
    total = front + sum(lengths) + back
    whole = make_qkv(2, total, 2, 32)
    for x in whole[:2]:
        x += x[:, ::16].repeat_interleave(16, dim=1)[:, :total]
    mask = key_mask(total) if masked else None
    options = {"num_replicated_prefix": front, "num_replicated_suffix": back}
    outs = {}
    for backend, groups in (
        ("sla_attn", None),
        ("sage_sla_attn", None),
        ("sage_sla_attn", parallel_groups()),
    ):
        layer = sparse_layer(backend, config, 2, 2)
        layer.set_projection(projection())
        local = (*whole, mask)
        if groups is not None:
            local = [x if x is None else own(x, lengths, front, back) for x in local]
        out = run(layer, groups, local, LARGE, text, options)
        outs[backend, groups] = out if groups else own(out, lengths, front, back)
    exact, alone, ring = outs.values()
    errors = [(out - exact).norm() / exact.norm() for out in (alone, ring)]
    assert 0 < errors[1] <= 1.5 * errors[0]


def check_compiled(backend, config, lengths):
    """One graph, whose inputs and output have 16 bits."""
    whole = make_qkv(1, sum(lengths), 2, 32, dtype=torch.bfloat16)
    local = [own(x, lengths) for x in whole]
    alone, split = (sparse_layer(backend, config, 2, 2) for _ in range(2))

    @torch.compile(fullgraph=True, backend="eager")
    def block(q, k, v):
        return 2 * split(q, k, v)

    with torch.inference_mode(), set_forward_context(1, latent_grid=RAGGED, num_steps=2):
        out = block(*local)
    want = 2 * own(run(alone, None, whole, RAGGED, (0, 0), {}), lengths)
    error = (out.float() - want.float()).norm() / want.float().norm()
    assert error <= torch.finfo(torch.bfloat16).eps


def video_error(grid):
    layer = sparse_layer("sliding_tile_attn", STA, 2, 2)
    wrong = parallel_groups().rank == 1
    local = [own(x, (96, 96)) for x in make_qkv(1, 192, 2, 32)]
    try:
        run(layer, parallel_groups(), local, grid if wrong else GRID, (0, 0), {})
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def settings_error(settings):
    """Attend with the settings of this rank; return the error."""
    layer = sparse_layer(*settings[parallel_groups().rank], 2, 2)
    local = [own(x, (96, 96)) for x in make_qkv(1, 192, 2, 32)]
    try:
        run(layer, parallel_groups(), local, GRID, (0, 0), {})
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def dtype_error(dtype):
    """Attend on rank 1 to tensors of a dtype; return the error."""
    layer = sparse_layer("sliding_tile_attn", STA, 2, 2, strict_attention=True)
    mine = dtype if parallel_groups().rank == 1 else torch.float32
    local = [own(x, (96, 96)).to(mine) for x in make_qkv(1, 192, 2, 32)]
    try:
        run(layer, parallel_groups(), local, GRID, (0, 0), {})
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def ring_error(backend, config):
    layer = sparse_layer(backend, config, 4, 4)
    whole = make_qkv(1, 192, 4, 32)
    try:
        run(layer, parallel_groups(), [own(x, (96, 96)) for x in whole], GRID, (0, 0), {}, 0)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def check_gated(config, lengths, heads, steps=(1,)):
    """Compare both stages, with a gate, on dense and on sparse steps."""
    whole = make_qkv(1, sum(lengths), heads, 32)
    gate = make_qkv(1, sum(lengths), heads, 32, seed=3).query
    args = ServerArgs(
        model_path="none",
        attention_backend="video_sparse_attn",
        attention_backend_config=config,
    )
    layers = [UlyssesAttention_VSA(heads, 32, scope=scope_from_args(args)) for _ in range(2)]
    inputs = ((*whole, gate), [own(x, lengths) for x in (*whole, gate)])
    for step in steps:
        outs = [
            run(layer, groups, qkv, RAGGED, (0, 0), {"gate_compress": weight}, step)
            for layer, groups, (*qkv, weight) in zip(
                layers, (None, parallel_groups()), inputs, strict=True
            )
        ]
        torch.testing.assert_close(outs[1], own(outs[0], lengths))
        ungated = run(layers[0], None, whole, RAGGED, (0, 0), {}, step)
        assert not torch.allclose(outs[0], ungated, atol=1e-2)


LENGTHS = {
    GRID: {2: [(96, 96), (101, 91)], 4: [(48,) * 4, (100, 0, 61, 31)]},
    RAGGED: {2: [(53, 52), (90, 15)], 4: [(27, 26, 26, 26), (70, 1, 0, 34)]},
}
CASES = [("none", False), ("none", True), ("front", True), ("back", False)]


# Every mesh with one grid, every text with one grid; the other pairs are slow.
GRIDS_AND_MESHES = [
    pytest.param(grid, mesh, marks=[] if i == j else [pytest.mark.slow])
    for i, grid in enumerate(LENGTHS)
    for j, mesh in enumerate(MESHES)
]
GRIDS_AND_TEXTS = [
    pytest.param(grid, text, marks=[] if (i + j) % 2 else [pytest.mark.slow])
    for i, grid in enumerate(LENGTHS)
    for j, text in enumerate(TEXT)
]


@pytest.mark.slow_cases("(3, 5, 7)-back", "(3, 5, 7)-none")
@pytest.mark.parametrize(("grid", "text"), GRIDS_AND_TEXTS, ids=str)
def test_windows_reach_over_the_two_ranks_of_a_ring(two_ranks, grid, text):
    for lengths, masked in itertools.product(LENGTHS[grid][2], (False, True)):
        args = (STA, grid, lengths, (2, 1), TEXT[text], masked)
        two_ranks.run(Mesh(ring=2), check, "sliding_tile_attn", *args)


@pytest.mark.slow_cases(
    "(3, 5, 7)-1 CFG x 2 ring x 2 Ulysses = 4 GPUs", "(4, 6, 8)-1 CFG x 4 ring x 1 Ulysses = 4 GPUs"
)
@pytest.mark.parametrize(("grid", "mesh"), GRIDS_AND_MESHES, ids=str)
def test_windows_reach_over_four_ranks(four_ranks, grid, mesh):
    for lengths, (text, masked) in zip(LENGTHS[grid][4] * 2, CASES, strict=True):
        args = (STA, grid, lengths, (4, 2), TEXT[text], masked)
        four_ranks.run(mesh, check, "sliding_tile_attn", *args)


def test_windows_by_head_are_those_of_the_ranks_heads(four_ranks, tmp_path):
    windows = [[1, 1, 1], [2, 3, 1], [1, 3, 4]]
    keys = itertools.product(range(2), range(2), range(5))
    strategy = {f"{s}_{layer}_{head}": windows[(head + s) % 3] for s, layer, head in keys}
    (tmp_path / "windows.json").write_text(json.dumps(strategy))
    config = {"mask_strategy_file_path": str(tmp_path / "windows.json"), "skip_time_steps": 1}
    for mesh in MESHES:
        four_ranks.run(mesh, check_strategy, {**config, "tile_size": [2, 2, 2]})


REFUSED = {
    "sparse_video_gen_2_attn": {"svg2_first_times_fp": 0.5, "svg2_first_layers_fp": 0.0},
}
WHY_NOT = {
    "vmoba_attn": "what it attends to depends on all tokens of a head, which a ring never joins",
    "sparse_video_gen_2_attn": "k-means runs over all tokens of a head, and ranks that hold a part",
}


@pytest.mark.parametrize("backend", REFUSED)
def test_methods_that_route_by_all_tokens_are_refused_before_their_first_step(two_ranks, backend):
    for kind, text in two_ranks.run(Mesh(ring=2), ring_error, backend, REFUSED[backend]):
        assert kind == "UnsupportedBackendError"
        assert text.startswith(
            f"attention backend {backend} (reference) must not be part of a ring"
        )
        assert "use --ring-degree 1 --ulysses-degree 2, or choose another backend" in text
        assert WHY_NOT[backend] in text


SEARCH = {"sta_mode": "STA_searching", "tile_size": [2, 2, 2]}
ALONE = {
    Mesh(ring=2): "STA_searching compares whole heads, and strategies serve any number of GPUs",
    Mesh(ulysses=2): "STA_searching must see all tokens and heads of a layer, got a part",
}


@pytest.mark.parametrize("mesh", ALONE, ids=str)
def test_windows_are_searched_for_on_one_device_only(two_ranks, mesh, tmp_path):
    config = {**SEARCH, "search_path": str(tmp_path)}
    for _, text in two_ranks.run(mesh, ring_error, "sliding_tile_attn", config):
        assert ALONE[mesh] in text
    assert not list(tmp_path.iterdir())


def test_a_linear_branch_by_query_block_is_refused(two_ranks):
    config = {**SLA, "linear_branch": "unselected", "dense_steps": "0"}
    for kind, text in two_ranks.run(Mesh(ring=2), ring_error, "sla_attn", config):
        assert kind == "UnsupportedBackendError"
        assert "linear_branch unselected needs a state per query block" in text


@pytest.mark.parametrize("grid", [pytest.param(GRID, marks=pytest.mark.slow), RAGGED], ids=str)
def test_tiles_are_selected_over_two_ranks_as_on_one(two_ranks, grid):
    for lengths, (text, masked) in itertools.product(LENGTHS[grid][2], CASES):
        args = (VSA, grid, lengths, (2, 1), TEXT[text], masked)
        two_ranks.run(Mesh(ring=2), check, "video_sparse_attn", *args)


@pytest.mark.slow_cases(
    "(3, 5, 7)-1 CFG x 2 ring x 2 Ulysses = 4 GPUs", "(4, 6, 8)-1 CFG x 4 ring x 1 Ulysses = 4 GPUs"
)
@pytest.mark.parametrize(("grid", "mesh"), GRIDS_AND_MESHES, ids=str)
def test_tiles_are_selected_over_four_ranks_as_on_one(four_ranks, grid, mesh):
    for lengths, (text, masked) in zip(LENGTHS[grid][4] * 2, CASES, strict=True):
        args = (VSA, grid, lengths, (4, 2), TEXT[text], masked)
        four_ranks.run(mesh, check, "video_sparse_attn", *args)


SLA = {"topk_ratio": 0.3, "BLKQ": 128, "BLKK": 64}


@pytest.mark.parametrize("lengths", [pytest.param((228, 227), marks=pytest.mark.slow), (300, 155)])
def test_blocks_and_the_linear_branch_are_of_the_whole_video(two_ranks, lengths):
    for text, masked in CASES:
        args = (SLA, LARGE, lengths, (2, 1), TEXT[text], masked)
        two_ranks.run(Mesh(ring=2), check, "sla_attn", *args)


@pytest.mark.parametrize(
    "mesh", [pytest.param(Mesh(ring=4), marks=pytest.mark.slow), Mesh(ulysses=2, ring=2)], ids=str
)
def test_blocks_are_cut_by_four_ranks(four_ranks, mesh):
    configs = [SLA, {**SLA, "topk_ratio": 0.9}]
    for config, (text, masked) in zip(configs * 2, CASES, strict=True):
        args = (config, LARGE, (200, 0, 191, 64), (4, 2), TEXT[text], masked)
        four_ranks.run(mesh, check, "sla_attn", *args)


TAILS = {
    "sliding_tile_attn": {**STA, "tail": "pooled"},
    "video_sparse_attn": {**VSA, "tail": "pooled"},
    "sla_attn": {**SLA, "tail": "pooled"},
    "subblock_sparse_attn": {
        "sparsity": 0.9,
        "skip_first_steps": 0,
        "min_seq_len": 0,
        "tail": "pooled",
    },
    "pisa_attn": {"density": 0.2},
    "cube_sparse_attn": {"topk_ratio": 0.1, "tail": "pooled"},
    "sparge_attn": {"topk": 0.2, "tail": "pooled"},
    "static_sparse_attn": {"model_type": "wan", "decay_factor": 0.2, "tail": "pooled"},
    "sol_attn": {"tau": 0.5, "dense_steps": 0, "dense_layers": None, "tail": "pooled"},
}
AS_SOL = ("cube_sparse_attn", "sparge_attn")  # whose maps take the same way


@pytest.mark.slow_cases(
    "pisa_attn",
    "sla_attn",
    "sliding_tile_attn",
    "sol_attn",
    "subblock_sparse_attn",
    "video_sparse_attn",
)
@pytest.mark.parametrize(
    "backend",
    [b if b not in AS_SOL else pytest.param(b, marks=pytest.mark.slow) for b in TAILS],
)
def test_means_of_what_is_not_kept_are_of_the_whole_video(two_ranks, backend):
    for text, masked in CASES:
        args = (TAILS[backend], (5, 13, 13), (500, 345), (2, 1), TEXT[text], masked)
        two_ranks.run(Mesh(ring=2), check, backend, *args)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("backend", TAILS)
def test_means_are_the_same_on_four_ranks(four_ranks, backend, mesh):
    for text, masked in CASES:
        args = (TAILS[backend], (5, 13, 13), (300, 0, 291, 254), (4, 2), TEXT[text], masked)
        four_ranks.run(mesh, check, backend, *args)


@pytest.mark.slow_cases("back-False", "front-True")
@pytest.mark.parametrize(("text", "masked"), CASES)
def test_eight_bits_err_no_more_in_a_ring(two_ranks, text, masked):
    two_ranks.run(Mesh(ring=2), check_quantised, SLA, (300, 155), TEXT[text], masked)


@pytest.mark.parametrize("sparsity", [pytest.param(0.0, marks=pytest.mark.slow), 0.7])
def test_the_coarse_stage_is_added_on_dense_steps_too(four_ranks, sparsity):
    config = {"sparsity": sparsity, "dense_steps": "0"}
    for mesh, heads in zip(MESHES, (2, 3), strict=True):
        four_ranks.run(mesh, check_gated, config, LENGTHS[RAGGED][4][1], heads, (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "config"),
    [("sliding_tile_attn", STA), ("video_sparse_attn", VSA), ("vmoba_attn", VMOBA)],
)
def test_a_compiled_block_is_one_graph(two_ranks, backend, config):
    two_ranks.run(Mesh(ring=2), check_compiled, backend, config, (60, 45))


def test_ranks_that_see_another_video_are_told(two_ranks):
    for kind, text in two_ranks.run(Mesh(ring=2), video_error, (4, 8, 6)):
        assert kind == "UsageError"
        assert "video must be the same on all ranks in USPAttention blocks.1.attn, got" in text
        assert "(4, 6, 8) on rank 0, (4, 8, 6) on rank 1" in text


@pytest.mark.parametrize("mesh", [Mesh(ring=2), Mesh(ulysses=2)], ids=str)
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (("sliding_tile_attn", {**STA, "window": [1, 1, 1]}), "backend parameters must be the"),
        (("torch_sdpa", None), "attention backend must be the same on all ranks in USPAttention"),
    ],
)
def test_ranks_whose_backends_were_told_otherwise_are_told(two_ranks, mesh, other, message):
    settings = [("sliding_tile_attn", STA), other]
    for kind, text in two_ranks.run(mesh, settings_error, settings):
        assert kind == "UsageError"
        assert text.startswith(message)


@pytest.mark.parametrize("mesh", [Mesh(ring=2), Mesh(ulysses=2)], ids=str)
def test_a_rank_without_a_backend_for_its_tensors_tells_the_others(two_ranks, mesh):
    told, own_error = two_ranks.run(mesh, dtype_error, torch.float64)
    assert own_error[0] == "UnsupportedBackendError"
    assert told[0] == "RankError"
    assert told[1].startswith("rank 1 cannot run USPAttention blocks.1.attn: ")


SOL = {"dense_steps": 0, "dense_layers": None}
NEW = {
    "vsa by cells": ("video_sparse_attn", {**VSA, "router": "subblock"}),
    "vsa by cells, tail": ("video_sparse_attn", {**VSA, "router": "subblock", "tail": "pooled"}),
    "sol by cells": ("sol_attn", {**SOL, "topk_ratio": 0.3, "router": "subblock"}),
    "sol by cells in tiles": (
        "sol_attn",
        {**SOL, "topk_ratio": 0.3, "router": "subblock", "tile_size": [2, 4, 4], "tail": "none"},
    ),
    "sol sink": ("sol_attn", {**SOL, "sink_tokens": 70, "sink_rows": True, "sink_start": None}),
    "uneven cells": (
        "subblock_sparse_attn",
        {
            "sparsity": 0.9,
            "skip_first_steps": 0,
            "min_seq_len": 0,
            "n_q": 8,
            "n_k": 2,
            "tail": "pooled",
        },
    ),
    "one cell of queries": (
        "subblock_sparse_attn",
        {"sparsity": 0.9, "skip_first_steps": 0, "min_seq_len": 0, "n_q": 1, "n_k": 4},
    ),
    "pisa": ("pisa_attn", {"density": 0.2}),
}


@pytest.mark.parametrize("name", NEW)
def test_new_cells(two_ranks, name):
    for text, masked in CASES:
        args = (NEW[name][1], (5, 13, 13), (500, 345), (2, 1), TEXT[text], masked)
        two_ranks.run(Mesh(ring=2), check, NEW[name][0], *args)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", NEW)
def test_new_cells_four(four_ranks, name, mesh):
    for text, masked in CASES:
        args = (NEW[name][1], (5, 13, 13), (300, 0, 291, 254), (4, 2), TEXT[text], masked)
        four_ranks.run(mesh, check, NEW[name][0], *args)


RULES = {
    "topk": {"moba_select_mode": "topk"},
    "threshold": {"moba_threshold": 0.4},
    "tail": {"moba_threshold": 0.4, "tail": "pooled"},
}


def vmoba(kind, rule):
    """Return settings with one kind of chunk in all layers."""
    kinds = {f"{other}_layer": int(other == kind) for other in ("temporal", "spatial", "st")}
    return {**VMOBA, **kinds, **RULES[rule]}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["temporal", "spatial", "st"])
def test_rows_choose_over_two_ranks_as_on_one(two_ranks, kind, rule):
    for grid, by_ranks in LENGTHS.items():
        for lengths, (text, masked) in zip(by_ranks[2] * 2, CASES, strict=True):
            args = (vmoba(kind, rule), grid, lengths, (2, 1), TEXT[text], masked)
            two_ranks.run(Mesh(ring=2), check, "vmoba_attn", *args)


def check_text_of_shards(config, text, lengths, masked):
    """Compare with one process where text lies in the shards, in front of the video or behind."""
    batch = 2 if masked else 1
    whole = make_qkv(batch, sum(lengths), 2, 32)
    mask = key_mask(sum(lengths)) if masked else None
    alone, split = (sparse_layer("vmoba_attn", config, 2, 2) for _ in range(2))
    local = [x if x is None else own(x, lengths) for x in (*whole, mask)]
    want = run(alone, None, (*whole, mask), RAGGED, text, {})
    out = run(split, parallel_groups(), local, RAGGED, text, {})
    torch.testing.assert_close(out, own(want, lengths))


@pytest.mark.parametrize("rule", ["topk", "tail"])
@pytest.mark.parametrize("text", [(60, 0), (0, 60)], ids=str)
def test_text_of_shards_is_attended_to_by_all_rows(four_ranks, text, rule):
    for lengths, masked in itertools.product([(50, 70, 0, 45), (5, 60, 50, 50)], (False, True)):
        args = (vmoba("st", rule), text, lengths, masked)
        four_ranks.run(Mesh(ring=4), check_text_of_shards, *args)


@pytest.mark.parametrize("scope", ["overall", "block", "head_global"])
def test_scopes_over_all_queries_are_refused(two_ranks, scope):
    config = {**VMOBA, "moba_threshold_type": scope, "first_full_step": 1}
    for kind, text in two_ranks.run(Mesh(ring=2), ring_error, "vmoba_attn", config):
        assert kind == "UnsupportedBackendError"
        assert text.startswith("attention backend vmoba_attn (reference) must not be part of a")
        assert f"`moba_threshold_type` {scope} ranks the chunks of all queries together" in text


@pytest.mark.parametrize(("grid", "mesh"), GRIDS_AND_MESHES, ids=str)
def test_rows_choose_over_four_ranks_as_on_one(four_ranks, grid, mesh):
    for kind, rule in itertools.product(("temporal", "spatial", "st"), RULES):
        for lengths, (text, masked) in zip(LENGTHS[grid][4] * 2, CASES, strict=True):
            args = (vmoba(kind, rule), grid, lengths, (4, 2), TEXT[text], masked)
            four_ranks.run(mesh, check, "vmoba_attn", *args)
