"""Layers that exchange their heads in groups, against one process, and the times they report."""

import math
from dataclasses import replace

import pytest
import torch

from multimodal_gen.kernels.engine import SelectedKernel
from multimodal_gen.runtime.attention_report import AttentionReport
from multimodal_gen.runtime.distributed.groups import parallel_groups, use_parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.layers.attention import USPAttention
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from tests.helpers.inputs import make_qkv
from tests.helpers.processes import own
from tests.runtime.layers.attention.sequence_parallel.test_sparse import (
    CASES,
    check,
    grid_of,
    layer_of,
    split,
)
from tests.runtime.layers.attention.sequence_parallel.test_split_layers import TEXTS, stretches

SIZE = 8


def count_messages(run):
    """Return how many exchanges of heads `run` makes."""
    real, count = torch.distributed.all_to_all_single, 0

    def counted(*args, **kwargs):
        nonlocal count
        count += 1
        return real(*args, **kwargs)

    torch.distributed.all_to_all_single = counted
    try:
        run()
    finally:
        torch.distributed.all_to_all_single = real
    return count


def in_groups(count):
    return use_parallel_groups(replace(parallel_groups(), head_groups=count))


def check_groups(lengths, heads, text, chunks, messages):
    front, key_front, after = stretches(text)
    total = sum(lengths)
    whole = make_qkv(2, front + total + after, heads, SIZE, num_keys=key_front + total + after)
    layer = USPAttention(heads, SIZE)
    with use_parallel_groups(None):
        want = layer(*whole, **text)
    fronts = (front, key_front, key_front)
    local = [own(x, lengths, f, after) for x, f in zip(whole, fronts, strict=True)]
    with in_groups(chunks), torch.inference_mode():
        out = layer(*local, **text)
        assert layer.report().calls == 2
        assert count_messages(lambda: layer(*local, **text)) == messages
    torch.testing.assert_close(out, own(want, lengths, front, after))


def check_whole_calls(lengths):
    """Masks, gradients and shared key heads come in one piece."""
    whole = make_qkv(2, sum(lengths), 4, SIZE)
    local = [own(x, lengths) for x in whole]
    layer, grouped = USPAttention(4, SIZE), USPAttention(4, SIZE, 2)
    mask = torch.ones(local[0].shape[:2], dtype=torch.bool)
    key, value = (x[:, :, :2] for x in local[1:])
    tracked = [x.clone().requires_grad_() for x in local]
    with in_groups(2):
        assert count_messages(lambda: layer(*local, mask)) == 2
        assert count_messages(lambda: layer(*tracked)) == 2
        assert count_messages(lambda: grouped(local[0], key, value)) == 2


def attend_sparsely(layer, heads):
    """Call a layer with what this rank holds of a video of the method's."""
    grid = grid_of("sta")
    lengths = split(math.prod(grid), 2, uneven=False)
    local = [own(x, lengths) for x in make_qkv(1, sum(lengths), heads, 32)]
    with torch.no_grad(), set_forward_context(1, latent_grid=grid, num_steps=2):
        layer(*local)


def check_measured_groups(sparse, messages):
    """Groups that are told nothing exchange heads in as many groups as was measured to win."""
    assert parallel_groups().head_groups is None
    layer = layer_of("sta", 4) if sparse else USPAttention(4, 32)
    assert count_messages(lambda: attend_sparsely(layer, 4)) == messages


def check_sparse_groups(name, heads):
    with in_groups(2):
        check(name, (heads, heads), CASES[3:], False, (0, 1))


def detours_of(count):
    """Return the calls a layer reports whose selected kernel can serve none of them."""
    layer = layer_of("sta", 8)
    layer.attn_impl.kernel = SelectedKernel("gluon")
    with in_groups(count):
        attend_sparsely(layer, 8)
    report = layer.report()
    return [e.calls for e in report.entries], [
        (e.selection.variant, e.calls) for e in report.detours
    ]


def check_dense_groups(name, above, given, steps):
    """Calls of which the method keeps too much are dense, as they are in one piece."""
    grid, heads = grid_of(name), 5
    lengths = split(math.prod(grid), 2, uneven=False)
    whole = make_qkv(1, sum(lengths), heads, 32)
    local = [own(x, lengths) for x in whole]
    with use_parallel_groups(None), torch.no_grad():
        want = USPAttention(heads, 32)(*whole)
    for count in (1, 2):
        layer = layer_of(name, heads, dense_above=above, **given)
        with in_groups(count), torch.no_grad():
            for step in range(2):
                with set_forward_context(step, latent_grid=grid, num_steps=2, request_id="one"):
                    out = layer(*local)
        torch.testing.assert_close(out, own(want, lengths))
        report = layer.report()
        (detour,) = report.detours
        assert "(`dense_above`)" in detour.selection.reason
        assert (sum(x.calls for x in report.entries), detour.calls) == (2 - steps, steps)


def times_of(lengths, chunks):
    """Return the report of a layer that ran twice, and of one that another rank never meets."""
    local = [own(x, lengths) for x in make_qkv(1, sum(lengths), 4, SIZE)]
    layer = USPAttention(4, SIZE, prefix="blocks.0.attn")
    alone = USPAttention(4, SIZE, skip_sequence_parallel=True)
    assert layer.report().times is None
    with in_groups(chunks):
        for _ in range(2):
            layer(*local)
            alone(*local)
    with use_parallel_groups(None):
        before = alone.report().times
        alone(*local)
    assert alone.report().times == before
    report = AttentionReport(layers=(layer.report(), alone.report()))
    return report.as_dict(), report.summary()


@pytest.mark.slow_cases("none")
@pytest.mark.parametrize("text", TEXTS)
def test_chunks_of_heads_compute_what_whole_calls_do(four_ranks, text):
    for lengths, heads in (((2, 2, 2, 2), 8), ((3, 0, 4, 1), 13)):
        # A cross-like call sends q apart from k and v only where their lengths differ.
        four_ranks.run(Mesh(ulysses=4), check_groups, lengths, heads, TEXTS[text], 2, 4)


def test_there_are_no_more_chunks_than_heads_on_a_rank(two_ranks):
    two_ranks.run(Mesh(ulysses=2), check_groups, (5, 2), 5, {}, 4, 4)
    two_ranks.run(Mesh(ulysses=2), check_groups, (5, 2), 3, {}, 4, 2)
    two_ranks.run(Mesh(ulysses=2), check_groups, (4, 4), 16, {}, 4, 8)


def test_calls_that_cannot_be_cut_into_chunks_come_in_one(two_ranks):
    two_ranks.run(Mesh(ulysses=2), check_whole_calls, (4, 3))


@pytest.mark.parametrize(("sparse", "messages"), [(True, 4), (False, 2)])
def test_chunks_are_those_that_were_measured_to_win(two_ranks, sparse, messages):
    two_ranks.run(Mesh(ulysses=2), check_measured_groups, sparse, messages)


@pytest.mark.slow_cases("sta", "svg2")
@pytest.mark.parametrize("name", ["sta", "sla", "svg2"])
def test_sparse_backends_take_chunks_of_heads(two_ranks, name):
    two_ranks.run(Mesh(ulysses=2), check_sparse_groups, name, 4)


@pytest.mark.parametrize(
    ("name", "above", "given", "steps"),
    [
        ("sta", 0.1, {}, 2),
        ("vmoba, st, threshold", 0.05, {"moba_threshold_type": "query_head"}, 1),
    ],
    ids=["known", "learnt"],
)
def test_chunks_of_heads_are_dense_where_whole_calls_are(two_ranks, name, above, given, steps):
    two_ranks.run(Mesh(ulysses=2), check_dense_groups, name, above, given, steps)


@pytest.mark.parametrize(
    ("mesh", "chunks"), [(Mesh(ulysses=2), 1), (Mesh(ulysses=2), 2), (Mesh(ring=2), 1)], ids=str
)
def test_a_report_tells_communication_from_attention(two_ranks, mesh, chunks):
    for data, summary in two_ranks.run(mesh, times_of, (40, 30), chunks):
        split, alone = (layer["times"] for layer in data["layers"])
        assert split["communication_ms"] > 0
        assert split["attention_ms"] > 0
        assert alone["communication_ms"] == 0
        assert alone["attention_ms"] > 0
        total = split["communication_ms"] + alone["communication_ms"]
        assert data["times"]["communication_ms"] == pytest.approx(total, abs=2e-3)
        assert "time on this rank: 0.0" in summary


def test_one_process_reports_no_times():
    layer = USPAttention(2, SIZE)
    layer(*make_qkv(1, 4, 2, SIZE))
    report = AttentionReport(layers=(layer.report(),))
    assert report.times is None
    assert "times" not in report.as_dict()
    assert "time on this rank" not in report.summary()
    assert layer_of("sla", 2).report().times is None


@pytest.mark.slow_cases("4")
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_call_in_groups_that_another_kernel_serves_is_one_detour(two_ranks, count):
    for entries, detours in two_ranks.run(Mesh(ulysses=2), detours_of, count):
        assert set(entries) == {0}
        assert detours == [("reference", 1)]
