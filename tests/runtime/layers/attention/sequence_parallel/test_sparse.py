"""Sparse methods on several processes, under Ulysses and in rings, against one process."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from multimodal_gen.errors import UnsupportedBackendError, UsageError
from multimodal_gen.runtime.distributed.groups import parallel_groups, use_parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.layers.attention import UlyssesAttention_VSA, USPAttention
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.scope import scope_from
from multimodal_gen.runtime.layers.attention.sparse import tiles
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from tests.helpers.inputs import QKV, make_qkv
from tests.helpers.methods import ALWAYS, DEFINED, method
from tests.helpers.processes import own
from tests.helpers.sparse import SparseMethod, block_inputs, projection
from tests.runtime.layers.attention.sparse.methods import (
    test_bsa,
    test_cube,
    test_draft,
    test_nabla,
    test_static,
    test_vsa_h3,
)

ULYSSES, RING = Mesh(ulysses=2), Mesh(ring=2)
TWO = pytest.mark.parametrize("mesh", [ULYSSES, RING], ids=["ulysses", "ring"])
FOUR = (Mesh(ring=4), Mesh(ulysses=2, ring=2))
TEXT = {"none": (0, 0), "front": (5, 0), "back": (0, 3)}
CASES = [("none", False), ("front", True), ("none", True), ("back", False)]
SVG2 = method(
    "sparse_video_gen_2_attn",
    svg2_num_q_centroids=8,
    svg2_num_k_centroids=16,
    svg2_top_p_kmeans=0.5,
    svg2_first_layers_fp=0,
    svg2_first_times_fp=0,
)
THRESHOLD = {"moba_select_mode": "threshold", "moba_threshold": 0.4}
COMPARED = "bsa, compared"  # whose queries are, which a ring refuses
# By name: what of `DEFINED` runs with which parameters.
VARIANTS = {
    **{name: (name, {}) for name in DEFINED},
    **{f"{name}, tail": (name, {"tail": "pooled"}) for name in DEFINED},
    **{
        f"{name}, threshold": (name, {**THRESHOLD, "tail": tail})
        for name, tail in (
            ("vmoba, temporal", "none"),
            ("vmoba, spatial", "pooled"),
            ("vmoba, st", "none"),
        )
    },
    "pisa, means": ("pisa", {"first_order": False, "tail": "pooled"}),
    "vsa, whole tiles": ("vsa", {}),
    "vmoba, whole chunks": ("vmoba, st", {}),
    "vsa, everything": ("vsa", {"topk": 99}),
    "sla, most": ("sla", {"topk_ratio": 0.7}),
    "sol sink": ("sol", {"sink_tokens": 70, "sink_rows": True, "sink_start": None}),
    "sol by cells in tiles": ("sol by cells", {"tile_size": [2, 4, 4]}),
    "uneven cells": ("subblock", {"n_q": 8, "n_k": 2, "tail": "pooled"}),
    "one cell of queries": ("subblock", {"n_q": 1, "n_k": 4}),
    "bsa": ("bsa", {"query_keep_ratio": 1.0}),
    "bsa, tail": ("bsa", {"query_keep_ratio": 1.0, "tail": "pooled"}),
    COMPARED: ("bsa", {}),
    "static, radial": (
        "static, lvsa",
        {
            "pattern": "radial",
            "window_size": ...,
            "key_frame_interval": ...,
            "decay_factor": 0.2,
        },
    ),
}
# Of those whose blocks are to divide the video.
WHOLE = {"vsa, whole tiles": (4, 8, 12), "vmoba, whole chunks": (4, 6, 8)}
IN_RINGS = [name for name in VARIANTS if name != COMPARED]
BY_RING = [name for name in IN_RINGS if name not in ("sla, most", "one cell of queries")]


def split(tokens, num, uneven):
    """Return how many tokens each rank holds: some nothing, where they are four and uneven."""
    shares = {2: (0.51, 0.86), 4: (0.25, 0.5, 0.75)}[num]
    if uneven:
        shares = {2: (0.86,), 4: (0.36, 0.36, 0.7)}[num]
    elif num == 2:
        shares = (0.51,)
    ends = [0, *(int(share * tokens) for share in shares), tokens]
    return tuple(last - first for first, last in itertools.pairwise(ends))


def layer_of(name, heads=4, kv_heads=None, cls=USPAttention, **parameters):
    """Return a layer of a variant, or of a method."""
    if name == "svg2":
        chosen = SVG2
    elif isinstance(name, SparseMethod):
        chosen = name
    else:
        defined, given = VARIANTS[name]
        chosen, parameters = DEFINED[defined].method, {**given, **parameters}
    chosen = replace(chosen, layer_cls=cls, heads=heads)
    return chosen.layer(index=1, kv_heads=kv_heads, strict=True, **parameters)


def grid_of(name):
    if name == "svg2":
        return (4, 6, 8)
    return WHOLE.get(name) or DEFINED[VARIANTS[name][0]].grid


def draw(grid, text, batch, heads, kv_heads=None):
    """Return q, k and v whose pieces differ by more than rounding."""
    total = math.prod(grid) + sum(text)
    qkv = make_qkv(batch, total, heads, 32, num_kv_heads=kv_heads)
    return block_inputs(qkv, [range(i, min(i + 16, total)) for i in range(0, total, 16)])


def key_mask(num_keys):
    """Leave out tokens all over the video and text, and whole tiles of the second sample."""
    keep = torch.arange(2 * num_keys).view(2, -1) % 3 != 1
    keep[1, num_keys // 2 :] = False
    keep[:, :1] = True
    return keep


def run(layer, groups, inputs, grid, text=(0, 0), step=1, **options):
    """Call a layer on this rank, or alone where `groups` is None."""
    known = {"latent_grid": grid, "num_steps": 2, "request_id": "one"}
    if sum(text):
        start = 0 if text[0] else math.prod(grid)
        known["text_span"] = TextSpan(start=start, length=sum(text))
        options |= {"num_replicated_prefix": text[0], "num_replicated_suffix": text[1]}
    with use_parallel_groups(groups), set_forward_context(step, **known):
        return layer(*inputs, **options)


def assert_told_alike(*layers):
    """Hold what layers tell of their calls against each other: what ran, why, and densities."""
    first, second = (
        [(x.selection, x.calls, dict(x.densities)) for x in (*report.entries, *report.detours)]
        for report in (layer.report() for layer in layers)
    )
    assert [x[:2] for x in first] == [x[:2] for x in second]
    for want, found in zip(first, second, strict=True):
        assert found[2] == pytest.approx(want[2])


def check(name, heads, cases, uneven=False, steps=(1,)):
    """Compare outputs and densities of this rank with those of one process."""
    grid, (heads, kv_heads), groups = grid_of(name), heads, parallel_groups()
    lengths = split(math.prod(grid), groups.sequence.size, uneven)
    for where, masked in cases:
        text = TEXT[where]
        whole = draw(grid, text, 2 if masked else 1, heads, kv_heads)
        mask = key_mask(whole[0].shape[1]) if masked else None
        alone, split_layer = (layer_of(name, heads, kv_heads) for _ in range(2))
        if name in ("sla", "sla, most"):
            alone.set_projection(projection())
            split_layer.set_projection(projection())
        local = [x if x is None else own(x, lengths, *text) for x in (*whole, mask)]
        with torch.no_grad():
            for step in steps:
                want = run(alone, None, (*whole, mask), grid, text, step)
                out = run(split_layer, groups, local, grid, text, step)
        torch.testing.assert_close(out, own(want, lengths, *text))
        if groups.ulysses.size == 1:  # else densities are of its heads
            assert_told_alike(alone, split_layer)
        entries = [layer.report().entries[-1] for layer in (alone, split_layer)]
        assert entries[0].calls == entries[1].calls == len(steps)
        density = dict(entries[0].densities)[1]
        assert 0 < density <= 1
        assert (density == 1) is (name == "vsa, everything")


@pytest.mark.parametrize("name", BY_RING)
def test_a_ring_of_two_computes_what_one_process_does(two_ranks, name):
    turn = BY_RING.index(name) % 2
    for uneven in (False, True):
        two_ranks.run(RING, check, name, (2, 1), CASES[2 * (turn ^ uneven) :][:2], uneven)


def check_density_of_shares():
    """Compare where one process computes head by head, of which each keeps another share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_BYTES_AT_ONCE", 1)
        patch.setattr(tiles, "_BYTES_IN_TWO", 0)
        check("vsa", (4, 2), CASES[:2])


def test_a_ring_tells_the_density_of_all_heads(two_ranks):
    two_ranks.run(RING, check_density_of_shares)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=[] if (i + j) % 2 else [pytest.mark.slow])
        for i, name in enumerate(IN_RINGS)
        for j, mesh in enumerate(FOUR)
    ],
    ids=str,
)
def test_four_ranks_compute_what_one_process_does(four_ranks, name, mesh):
    four_ranks.run(mesh, check, name, (4, 2), CASES[1:3], True)


@pytest.mark.parametrize("heads", [4, 3])
@pytest.mark.parametrize("name", ["sta", "sla", "sol", "vmoba, st", "svg2", COMPARED])
def test_under_ulysses_methods_see_the_whole_video_of_their_heads(two_ranks, name, heads):
    two_ranks.run(ULYSSES, check, name, (heads, heads), CASES[3:], False, (0, 1))


DRAWN = {
    "cube": test_cube.drawn,
    "nabla": test_nabla.drawn,
    "draft": test_draft.drawn,
    "bsa": test_bsa.every_query,
    "vsa h3": test_vsa_h3.drawn,
    "static": test_static.drawn,
}


def check_drawn(name, seeds):
    """Compare drawn cases with one process, whose output is checked where they are defined."""
    groups = parallel_groups()
    for seed in seeds:
        case, given = DRAWN[name](seed)
        qkv, span, mask = given["qkv"], given["text"], given["token_mask"]
        length = 0 if span is None else span.length
        text = (length, 0) if span is not None and span.start == 0 else (0, length)
        tail = "none" if seed % 3 else "pooled"
        lengths = split(math.prod(case.grid), groups.sequence.size, seed % 2 == 0)
        alone, split_layer = (
            layer_of(case.method, 2, qkv.key.shape[2], tail=tail) for _ in range(2)
        )
        local = [x if x is None else own(x, lengths, *text) for x in (*qkv, mask)]
        with torch.no_grad():
            want = run(alone, None, (*qkv, mask), case.grid, text)
            out = run(split_layer, groups, local, case.grid, text)
        real = slice(None) if mask is None else own(mask, lengths, *text)
        torch.testing.assert_close(out[real], own(want, lengths, *text)[real], msg=str(seed))
        assert_told_alike(alone, split_layer)


@pytest.mark.parametrize("name", DRAWN)
def test_a_ring_of_two_computes_drawn_cases(two_ranks, name):
    two_ranks.run(RING, check_drawn, name, tuple(range(100)))


def check_kept_choice():
    """Compare steps that an earlier choice serves, and one that it does not."""
    groups, grid = parallel_groups(), DEFINED["cube"].grid
    lengths = split(math.prod(grid), groups.sequence.size, True)
    alone, split_layer = (layer_of("cube", 4, 2, refresh_every=2) for _ in range(2))
    fresh = layer_of("cube", 4, 2)
    whole = draw(grid, (0, 0), 1, 4, 2)
    known = {"latent_grid": grid, "num_steps": 9, "request_id": "one"}
    for step, kept in ((3, False), (4, True), (5, False)):
        whole = QKV(whole.query.flip(1), whole.key, whole.value)
        outs = []
        for layer, of, inputs in (
            (alone, None, whole),
            (split_layer, groups, [own(x, lengths) for x in whole]),
            (fresh, None, whole),
        ):
            with torch.no_grad(), use_parallel_groups(of), set_forward_context(step, **known):
                outs.append(layer(*inputs))
        torch.testing.assert_close(outs[1], own(outs[0], lengths))
        assert torch.equal(outs[0], outs[2]) is not kept


def check_refused_choice():
    grid, groups = DEFINED["cube"].grid, parallel_groups()
    lengths = split(math.prod(grid), groups.sequence.size, True)
    inputs = [own(x, lengths) for x in draw(grid, (0, 0), 1, 4)]
    with pytest.raises(UnsupportedBackendError, match="`refresh_every` keeps what one process ch"):
        run(layer_of("cube", refresh_every=2), groups, inputs, grid)


def test_kept_choices_are_of_a_ranks_heads_and_no_ring_has_them(two_ranks):
    two_ranks.run(ULYSSES, check_kept_choice)
    two_ranks.run(RING, check_refused_choice)


def check_strategy(config, heads):
    """Compare steps whose windows differ between heads."""
    grid, groups = (4, 6, 8), parallel_groups()
    lengths = split(192, groups.sequence.size, uneven=True)
    whole = make_qkv(1, sum(lengths), heads, 32)
    alone, split_layer = (
        layer_of("sta", heads, window=..., tile_size=[2, 2, 2], **config) for _ in range(2)
    )
    for step in range(2):
        with torch.no_grad():
            want = run(alone, None, whole, grid, step=step)
            out = run(split_layer, groups, [own(x, lengths) for x in whole], grid, step=step)
        torch.testing.assert_close(out, own(want, lengths))


def test_windows_by_head_are_those_of_the_ranks_heads(two_ranks, four_ranks, tmp_path):
    windows = [[1, 1, 1], [2, 3, 1], [1, 3, 4]]
    for heads, world, meshes, skipped in (
        (3, two_ranks, (ULYSSES,), 0),
        (5, four_ranks, FOUR, 1),  # the first step is dense
    ):
        keys = itertools.product(range(2), range(2), range(heads))
        strategy = {f"{s}_{layer}_{head}": windows[(head + s) % 3] for s, layer, head in keys}
        path = tmp_path / f"windows{heads}.json"
        path.write_text(json.dumps(strategy))
        config = {"mask_strategy_file_path": str(path), "skip_time_steps": skipped}
        for mesh in meshes:
            world.run(mesh, check_strategy, config, heads)


def check_gated(heads, with_gate, steps, **parameters):
    """Compare both stages, with a gate, on dense and on sparse steps."""
    groups, grid = parallel_groups(), (5, 6, 9)
    lengths = split(math.prod(grid), groups.sequence.size, uneven=True)
    whole = [*draw(grid, (0, 0), 1, heads)]
    gate = make_qkv(1, sum(lengths), heads, 32, seed=3).query if with_gate else None
    layers = [layer_of("vsa", heads, cls=UlyssesAttention_VSA, **parameters) for _ in range(2)]
    local = [own(x, lengths) for x in whole]
    own_gate = None if gate is None else own(gate, lengths)
    for step, groups_step in itertools.product(steps, (groups,)):
        with torch.no_grad():
            want = run(layers[0], None, whole, grid, step=step, gate_compress=gate)
            out = run(layers[1], groups_step, local, grid, step=step, gate_compress=own_gate)
            ungated = run(layers[0], None, whole, grid, step=step)
        torch.testing.assert_close(out, own(want, lengths))
        assert torch.allclose(want, ungated, atol=1e-2) is (gate is None)


def check_gate_beside_text():
    """A gate weighs the coarse stage of text under Ulysses, and is refused in a ring."""
    groups, grid = parallel_groups(), DEFINED["vsa h3"].grid
    tokens, known = math.prod(grid), {"latent_grid": grid}
    whole = [*draw(grid, (5, 0), 1, 4), make_qkv(1, tokens + 5, 4, 32, seed=3).query]
    known["text_span"] = TextSpan(start=0, length=5)
    layer = layer_of("vsa h3", cls=UlyssesAttention_VSA)

    def of(ranks, *inputs):
        with torch.no_grad(), use_parallel_groups(ranks), set_forward_context(0, **known):
            return layer.attend(AttentionCall(*inputs[:3], gate=inputs[3]))

    lengths = split(tokens + 5, groups.sequence.size, uneven=True)
    local = [own(x, lengths) for x in whole]
    if groups.ring.size == 1:
        torch.testing.assert_close(of(groups, *local), own(of(None, *whole), lengths))
        return
    with pytest.raises(UsageError, match="a gate of video_sparse_attn_h3 must not be given in a r"):
        of(groups, *local)


@TWO
def test_a_gate_beside_text_is_served_under_ulysses_and_refused_in_a_ring(two_ranks, mesh):
    two_ranks.run(mesh, check_gate_beside_text)


@pytest.mark.parametrize("with_gate", [False, True])
@pytest.mark.parametrize("heads", [4, 3])
def test_video_sparse_attention_sees_the_whole_video(two_ranks, heads, with_gate):
    two_ranks.run(ULYSSES, check_gated, heads, with_gate, (0,))


def test_the_coarse_stage_is_added_on_dense_steps_too(four_ranks):
    for mesh, heads in zip(FOUR, (2, 3), strict=True):
        four_ranks.run(mesh, check_gated_after_dense, heads)


def check_gated_after_dense(heads):
    check_gated(heads, True, (0, 1), dense_steps="0")


_SLA = {"topk_ratio": 0.3, "BLKQ": 128, "BLKK": 64}
_POOLED = {"tail": "pooled", **ALWAYS}
# A method in the inputs' dtype, and the same in 8 bits.
EIGHT_BITS = {
    "sla": (method("sla_attn", **_SLA), method("sage_sla_attn", **_SLA)),
    "vsa": tuple(
        method("video_sparse_attn", topk=3, compute_mode=mode) for mode in ("bf16", "sage_bf16")
    ),
    "sol": tuple(method("sol_attn", **_POOLED, compute_mode=x) for x in ("bf16", "sage_bf16")),
}


def check_quantised(name, where, masked):
    """8 bits round keys as they are cut, so a ring is compared with the method without rounding."""
    grid, text = DEFINED["sla"].grid, TEXT[where]
    exact, eight = EIGHT_BITS[name]
    lengths = split(math.prod(grid), 2, uneven=True)
    whole = draw(grid, text, 2, 2)
    mask = key_mask(whole[0].shape[1]) if masked else None
    outs = []
    for chosen, groups in ((exact, None), (eight, None), (eight, parallel_groups())):
        layer = layer_of(chosen, 2)
        if name == "sla":
            layer.set_projection(projection())
        local = [
            x if x is None or groups is None else own(x, lengths, *text) for x in (*whole, mask)
        ]
        with torch.no_grad():
            out = run(layer, groups, local, grid, text)
        outs.append(out if groups else own(out, lengths, *text))
    exact, alone, ring = outs
    errors = [(out - exact).norm() / exact.norm() for out in (alone, ring)]
    assert 0 < errors[1] <= 1.5 * errors[0]


@pytest.mark.slow_cases("sla-back-False", "sla-front-True", "vsa-none-True", "sol-front-True")
@pytest.mark.parametrize(
    ("name", "where", "masked"),
    [("sla", *case) for case in CASES]
    + [(name, *case) for name in ("vsa", "sol") for case in CASES[1:3]],
)
def test_eight_bits_err_no_more_in_a_ring(two_ranks, name, where, masked):
    two_ranks.run(RING, check_quantised, name, where, masked)


def check_compiled(name):
    """One graph, whose inputs and output have 16 bits."""
    grid = grid_of(name)
    lengths = split(math.prod(grid), 2, uneven=False)
    whole = make_qkv(1, sum(lengths), 2, 32, dtype=torch.bfloat16)
    alone, split_layer = (layer_of(name, 2) for _ in range(2))

    @torch.compile(fullgraph=True, backend="eager")
    def block(q, k, v):
        return 2 * split_layer(q, k, v)

    with torch.inference_mode(), set_forward_context(1, latent_grid=grid, num_steps=2):
        out = block(*(own(x, lengths) for x in whole))
    with torch.no_grad():
        want = 2 * own(run(alone, None, whole, grid), lengths)
    error = (out.float() - want.float()).norm() / want.float().norm()
    assert error <= torch.finfo(torch.bfloat16).eps


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sta", "vsa", "vmoba, st"])
def test_a_compiled_block_is_one_graph(two_ranks, name):
    two_ranks.run(RING, check_compiled, name)


def check_text_of_shards(name, text, lengths, masked):
    """Compare with one process where text lies in the shards, in front of the video or behind."""
    grid, groups = (3, 5, 7), parallel_groups()
    whole = make_qkv(2 if masked else 1, sum(lengths), 2, 32)
    mask = key_mask(sum(lengths)) if masked else None
    span = TextSpan(start=0 if text[0] else math.prod(grid), length=sum(text))
    outs = []
    for here in (None, groups):
        given = (*whole, mask)
        local = [x if x is None or here is None else own(x, lengths) for x in given]
        with (
            torch.no_grad(),
            use_parallel_groups(here),
            set_forward_context(1, latent_grid=grid, num_steps=2, text_span=span),
        ):
            outs.append(layer_of(name, 2)(*local))
    torch.testing.assert_close(outs[1], own(outs[0], lengths))


@pytest.mark.parametrize("name", ["vmoba, st", "vmoba, st, tail"])
@pytest.mark.parametrize("text", [(60, 0), (0, 60)], ids=str)
def test_text_of_shards_is_attended_to_by_all_rows(four_ranks, text, name):
    for lengths, masked in itertools.product([(50, 70, 0, 45), (5, 60, 50, 50)], (False, True)):
        four_ranks.run(FOUR[0], check_text_of_shards, name, text, lengths, masked)


def check_gradients(name, gated=False, text=0, masked=False):
    """Compare the output and the gradients of this rank with those of one process.

    Gradients of text, which all ranks hold, are sums over ranks. Masked are chunks of keys, and all
    keys that some rows keep.
    """
    grid, groups = grid_of(name), parallel_groups()
    lengths, text = split(math.prod(grid), groups.sequence.size, uneven=False), (0, text)
    whole, cls = [*draw(grid, text, 1, 4)], UlyssesAttention_VSA if gated else USPAttention
    generator = torch.Generator().manual_seed(5)
    weight, gate = torch.randn(2, *whole[0].shape, generator=generator)
    whole += [gate] * gated
    keep = None
    if masked:
        keep = torch.ones(1, whole[0].shape[1], dtype=torch.bool)
        keep[:, :48], keep[:, 96:144], keep[:, 190:] = False, False, False
        weight = weight * keep[..., None, None]

    def attend(here, tensors, mask):
        more = {"gate_compress": tensors[3]} if gated else {}
        return run(layer_of(name, cls=cls), here, (*tensors[:3], mask), grid, text, **more)

    leaves = [x.requires_grad_() for x in whole]
    want = attend(None, leaves, keep)
    expected = torch.autograd.grad(want, leaves, weight)
    local = [own(x, lengths, *text).detach().requires_grad_() for x in leaves]
    out = attend(groups, local, None if keep is None else own(keep, lengths))
    torch.testing.assert_close(out, own(want, lengths, *text))
    upstream = own(weight, lengths, *text).clone()
    if sum(text):
        upstream[:, -sum(text) :] /= len(lengths)
    found = torch.autograd.grad(out, local, upstream)
    for mine, theirs in zip(found, expected, strict=True):
        if sum(text):
            dist.all_reduce(mine[:, -sum(text) :])
        torch.testing.assert_close(mine, own(theirs, lengths, *text), rtol=1e-4, atol=1e-5)


NO_RING = ("sla", "sla, tail", "pisa", "pisa, tail")
TRAINED = ["pisa, means", *(x for x in VARIANTS if x.partition(", tail")[0] in DEFINED)]
TRAINED = [name for name in TRAINED if name not in NO_RING]


@TWO
@pytest.mark.parametrize("name", [name for name in TRAINED if "tail" not in name])
def test_two_ranks_have_the_gradients_of_one(two_ranks, name, mesh):
    two_ranks.run(mesh, check_gradients, name)


@TWO
def test_two_ranks_have_the_gradients_of_a_gate(two_ranks, mesh):
    two_ranks.run(mesh, check_gradients, "vsa", True)


@pytest.mark.parametrize("name", ["vmoba, st", "vmoba, st, tail"])
def test_rows_without_keys_have_gradients(two_ranks, name):
    two_ranks.run(RING, check_gradients, name, False, 0, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gated", "text"),
    [("vsa", True, 0), ("sta", False, 0), *((name, False, 5) for name in TRAINED)],
)
@pytest.mark.parametrize("mesh", FOUR, ids=["ring", "both"])
def test_four_ranks_have_the_gradients_of_one(four_ranks, name, gated, text, mesh):
    four_ranks.run(mesh, check_gradients, name, gated, text)


def error_of(by_rank, grid=(4, 6, 8), *, dtype=torch.float32, step=1, strict=False, heads=4):
    """Return kind and text of the error of a call, or None.

    Args:
        by_rank: backend and parameters of each rank.
        grid: what the second rank says of the video.
        dtype: of the second rank's tensors.
        step: denoising step.
        strict: whether fallbacks are errors.
        heads: H.
    """
    groups = parallel_groups()
    second, size = groups.rank == 1, groups.sequence.size
    backend, config = by_rank[groups.rank % len(by_rank)]
    scope = scope_from(attention_backend=backend, attention_backend_config=config, strict=strict)
    layer = USPAttention(heads, 32, prefix="blocks.1.attn", scope=scope)
    lengths, video = (96,) * size, (4, 6, 4 * size)
    local = [own(x, lengths) for x in make_qkv(1, sum(lengths), heads, 32)]
    if second:
        video, local = grid if size > 1 else video, [x.to(dtype) for x in local]
    try:
        with torch.no_grad():
            run(layer, groups, local, video, step=step)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


STA = ("sliding_tile_attn", {"window": [1, 3, 1], "tile_size": [2, 2, 2], "skip_time_steps": 0})
VMOBA = {**DEFINED["vmoba, st"].method.given, "first_full_step": 1}  # the first call is dense
# By name: backend, parameters, step of the call, and what a ring says of it.
REFUSED = {
    "clusters": (
        "sparse_video_gen_2_attn",
        {"svg2_first_times_fp": 0.5, "svg2_first_layers_fp": 0.0},
        "k-means runs over all tokens of a head, and ranks that hold a part",
    ),
    "text that competes": (
        "video_sparse_attn_h3",
        {"vsa_mode": "compete"},
        "`vsa_mode` compete ranks pieces of text, whose means no ring exchanges",
    ),
    "queries that are compared": (
        "bsa_attn",
        {"query_keep_ratio": 0.5, "tile_size": [2, 2, 2]},
        "`query_keep_ratio` below 1 compares all queries of a tile, which ranks may cut",
    ),
    "scores that are compared": (
        "skip_softmax",
        {"threshold": 0.1, "dense_steps": "0"},
        "threshold compares the scores of a row over all keys in one pass",
    ),
    "a linear branch by block": (
        "sla_attn",
        {"topk_ratio": 0.3, "linear_branch": "unselected", "dense_steps": "0"},
        "linear_branch unselected needs a state per query block",
    ),
    **{
        f"scope {scope}": (
            "vmoba_attn",
            {**VMOBA, **THRESHOLD, "moba_threshold_type": scope},
            f"`moba_threshold_type` {scope} ranks the chunks of all queries together",
        )
        for scope in ("overall", "block", "head_global")
    },
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_all_tokens_is_refused_in_a_ring_before_its_first_step(two_ranks, what):
    backend, config, why = REFUSED[what]
    for kind, text in two_ranks.run(RING, first_error, backend, config):
        assert kind == "UnsupportedBackendError"
        assert text.startswith(
            f"attention backend {backend} (reference) must not be part of a ring"
        )
        assert "use --ring-degree 1 --ulysses-degree 2, or choose another backend" in text
        assert why in text


def first_error(backend, config):
    return error_of([(backend, config)], step=0)


def check_without_grid():
    """Compare calls that are not of the latent grid, one of them with a gate."""
    lengths, groups = (12, 8), parallel_groups()
    whole = make_qkv(1, sum(lengths), 2, 32)
    tried = replace(DEFINED["vsa"].method, heads=2, layer_cls=USPAttention)
    layers = [tried.layer(index=1) for _ in range(2)]
    for gate in (None, whole.query):
        outs = []
        for layer, here in zip(layers, (None, groups), strict=True):
            given = [x if x is None or here is None else own(x, lengths) for x in (*whole, gate)]
            call = AttentionCall(*given[:3], gate=given[3], no_grid="they are a few")
            with (
                torch.no_grad(),
                use_parallel_groups(here),
                set_forward_context(1, latent_grid=(4, 6, 8), num_steps=2),
            ):
                outs.append(layer.attend(call))
        torch.testing.assert_close(outs[1], own(outs[0], lengths))
    assert_told_alike(*layers)


@TWO
def test_calls_off_the_latent_grid_are_dense_as_in_one_process(two_ranks, mesh):
    two_ranks.run(mesh, check_without_grid)


ALONE = {
    RING: "STA_searching compares whole heads, and strategies serve any number of GPUs",
    ULYSSES: "STA_searching must see all tokens and heads of a layer, got a part",
}


@pytest.mark.parametrize("mesh", ALONE, ids=str)
def test_windows_are_searched_for_on_one_device_only(two_ranks, mesh, tmp_path):
    config = {"sta_mode": "STA_searching", "tile_size": [2, 2, 2], "search_path": str(tmp_path)}
    for _, text in two_ranks.run(mesh, first_error, "sliding_tile_attn", config):
        assert ALONE[mesh] in text
    assert not list(tmp_path.iterdir())


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
    config = {**VMOBA, "moba_select_mode": mode, "moba_threshold_type": scope}
    want = (
        "UnsupportedBackendError",
        f"attention backend vmoba_attn (reference) must have all heads in one process: "
        f"`moba_threshold_type` {scope} ranks the chunks of all heads together, and a rank has "
        f"some of the heads; query_head and head_global rank within a head; use --sp-degree 1, or "
        f"choose another backend",
    )
    found = two_ranks.run(ULYSSES, first_error, "vmoba_attn", config)
    assert found == [want if refused else None] * 2
    assert two_ranks.run(Mesh(cfg=2), first_error, "vmoba_attn", config) == [None] * 2


def test_ranks_that_see_another_video_are_told(two_ranks):
    for kind, text in two_ranks.run(RING, error_of, [STA], (4, 8, 6)):
        assert kind == "UsageError"
        assert "video must be the same on all ranks in USPAttention blocks.1.attn, got" in text
        assert "(4, 6, 8) on rank 0, (4, 8, 6) on rank 1" in text


@TWO
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ((STA[0], {**STA[1], "window": [1, 1, 1]}), "backend parameters must be the"),
        (("torch_sdpa", None), "attention backend must be the same on all ranks in USPAttention"),
    ],
)
def test_ranks_whose_backends_were_told_otherwise_are_told(two_ranks, mesh, other, message):
    for kind, text in two_ranks.run(mesh, error_of, [STA, other]):
        assert kind == "UsageError"
        assert text.startswith(message)


def dtype_error():
    return error_of([STA], dtype=torch.float64, strict=True)


@TWO
def test_a_rank_without_a_backend_for_its_tensors_tells_the_others(two_ranks, mesh):
    told, own_error = two_ranks.run(mesh, dtype_error)
    assert own_error[0] == "UnsupportedBackendError"
    assert told[0] == "RankError"
    assert told[1].startswith("rank 1 cannot run USPAttention blocks.1.attn: ")


def check_no_backward(name):
    """A ring says that it has no backward pass."""
    grid = grid_of(name)
    lengths = split(math.prod(grid), 2, uneven=False)
    local = [own(x, lengths).requires_grad_() for x in draw(grid, (0, 0), 1, 4)]
    with pytest.raises(UnsupportedBackendError, match="in a ring: it has no backward there"):
        run(layer_of(name), parallel_groups(), local, grid)


@pytest.mark.parametrize("name", ["sla", "pisa, tail"])
def test_a_ring_refuses_gradients_of_sums_over_all_keys(two_ranks, name):
    two_ranks.run(RING, check_no_backward, name)
