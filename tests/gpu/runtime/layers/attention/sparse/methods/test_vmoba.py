"""V-MoBA on a GPU: the choice, the sort and the merge against their definitions, and the layer."""

import math

import pytest
import torch

from multimodal_gen.kernels.engine import SelectedKernel
from multimodal_gen.kernels.select.reference import Tiles, pool_tiles_reference
from multimodal_gen.kernels.select.row_reference import (
    ChunkGroups,
    Rule,
    SortedRows,
    merge_parts_reference,
    pack_bits,
    select_chunks_reference,
)
from multimodal_gen.kernels.select.rows import (
    chunk_means,
    merge_parts,
    move_rows,
    select_chunks,
    sort_rows,
)
from multimodal_gen.runtime.layers.attention.sparse.executors import rows as by_rows
from multimodal_gen.runtime.layers.attention.sparse.executors.rows import (
    RowChunks,
    attend_choice,
    row_chunks,
    row_stats,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import SequenceLayout, SparseCall
from tests.helpers.tolerance import assert_within_error_budget
from tests.kernels.select.naive_chunks import layout, unpacked
from tests.kernels.select.naive_rows import assert_sorted, random_bits

DTYPES = [torch.bfloat16, torch.float16]
GRID = (5, 18, 23)
RULES = [
    Rule(topk=1),
    Rule(topk=5),
    Rule(threshold=0.25),
    Rule(topk=5, scope="head_global"),
    Rule(threshold=0.25, scope="overall"),
]


def select(call: SparseCall, chunks: RowChunks, rule: Rule) -> torch.Tensor:
    stats = row_stats(call, chunks)
    return select_chunks(stats.query, stats.chunks, stats.own, rule, mask=stats.mask)[0]


def attend(call: SparseCall, chunks: RowChunks, rule: Rule) -> torch.Tensor:
    return attend_choice(call, chunks, select(call, chunks, rule))


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
def test_means_are_the_definition(dtype, masked):
    starts, lengths, index = (x.cuda() for x in layout([455, 1400, 1, 64] * 6))
    key = random(2, len(index) + 3, 4, 128, dtype=dtype)
    token_mask = random(2, key.shape[1], seed=1) > 0 if masked else None
    found = chunk_means(key, Tiles(starts, lengths, 1400, index), mask=token_mask)
    wanted = pool_tiles_reference(
        key, Tiles(starts, lengths, 1400, index), token_mask, torch.float32
    )
    torch.testing.assert_close(found.means, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_chunks", [2, 7, 40, 72, 325])
@pytest.mark.parametrize("rule", RULES[:3], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_the_choice_is_the_definition_up_to_rounding(dtype, num_chunks, rule, masked):
    query, key = random(2, 4000, 4, 128, dtype=dtype), random(2, 10 * num_chunks, 2, 128, seed=1)
    starts = torch.arange(0, 10 * num_chunks, 10, device="cuda").int()
    means = chunk_means(key.to(dtype), Tiles(starts, torch.full_like(starts, 10), 10))
    own = torch.arange(4000, device="cuda").int() % num_chunks
    token_mask = random(2, 4000, seed=2) > 0 if masked else None
    if token_mask is not None:
        query = query.masked_fill(~token_mask[..., None, None], torch.nan)
    bits, pairs = select_chunks(query, means, own, rule, mask=token_mask)
    wanted = select_chunks_reference(query, means, own, rule, token_mask)
    differ = (bits != pack_bits(wanted)).any(-1).double().mean()
    assert differ < 1e-3  # sums in another order decide close calls otherwise
    chosen = unpacked(bits, num_chunks)
    assert chosen[:, :, torch.arange(4000), own.long()].all()
    assert int(pairs) == 10 * int(chosen.sum())
    if rule.topk is not None:
        counted = torch.ones(2, 4000, device="cuda").bool() if token_mask is None else token_mask
        kept = chosen.sum(-1).transpose(1, 2)[counted]
        assert (kept == min(rule.topk, num_chunks)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("block", [128, 192])
@pytest.mark.parametrize(("num_chunks", "size"), [(7, 7), (40, 7), (72, 5), (30, 8)])
def test_rows_are_sorted_and_merged_as_defined(dtype, num_chunks, size, extra, block):
    query = random(2, 1000, 3, 128, dtype=dtype)
    bits = random_bits((2, 3, 1000), num_chunks).cuda()
    groups = ChunkGroups(num_chunks=num_chunks, size=size)
    rows = sort_rows(bits, groups, block=block, extra=extra)
    moved = move_rows(query, rows)
    on_cpu = SortedRows(**{name: getattr(rows, name).cpu() for name in rows._fields})
    assert_sorted(on_cpu, moved.cpu(), query.cpu(), bits.cpu(), groups, extra=extra)
    parts = random(*moved.shape, dtype=dtype, seed=2)
    lse = random(*moved.shape[:3], seed=3).float().transpose(1, 2) * 5
    out = torch.empty_like(query)
    merge_parts(parts, lse, rows, out)
    wanted = merge_parts_reference(parts, lse, rows)
    rounding = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, wanted, rtol=rounding, atol=rounding)


@pytest.fixture
def one_head_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small inputs take as many shares of heads as large ones."""
    monkeypatch.setattr(by_rows, "_MOST_COPIES", 0.0)
    monkeypatch.setattr(by_rows, "_PAIRS_AT_ONCE", 1)


@pytest.mark.usefixtures("one_head_at_a_time")
@pytest.mark.parametrize("kernel", ["auto", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("chunk", [(2, 18, 23), (5, 5, 7), (2, 4, 5)], ids=str)
@pytest.mark.parametrize("text", ["none", "first", "masked"])
def test_the_layer_attends_to_what_was_chosen_and_waits_for_nothing(
    kernel, dtype, rule, chunk, text
):
    video, extra = math.prod(GRID), 0 if text == "none" else 77
    query = random(2, video + extra, 4, 128, dtype=dtype)
    key, value = (random(2, video + extra, 2, 128, dtype=dtype, seed=s) for s in (1, 2))
    token_mask = random(2, video + extra, seed=3) > -1 if text == "masked" else None
    start = extra if text == "first" else 0
    total = video + extra
    shape = SequenceLayout(grid=GRID, start=start, num_queries=total, num_keys=total)
    call = SparseCall(
        query=query,
        key=key,
        value=value,
        layout=shape,
        scale=128**-0.5,
        kernel=SelectedKernel(kernel, named=True),
        mask=token_mask,
    )
    chunks = row_chunks(shape, chunk, query.device)
    attend(call, chunks, rule)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = attend(call, chunks, rule)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    chosen = unpacked(select(call, chunks, rule), chunks.keys.num_tiles)
    mask = torch.ones(2, 4, total, total, dtype=torch.bool, device="cuda")
    mask[:, :, shape.video, shape.video] = chosen[..., chunks.own.long()]
    if token_mask is not None:
        mask &= token_mask[:, None, None, :]
    assert_within_error_budget(out, query, key, value, scale=128**-0.5, mask=mask)


@pytest.mark.parametrize("together", [1, 8, 32])
def test_tiles_are_redone_where_parts_take_the_place_of_queries(together, monkeypatch) -> None:
    pytest.importorskip("triton")
    from multimodal_gen.kernels.block_sparse import gluon_kernel

    monkeypatch.setattr(gluon_kernel, "redone_together", lambda tiles: together)
    tokens = math.prod(GRID)
    query, key, value = (random(1, tokens, 4, 128, seed=s) for s in range(3))
    query[:, ::5] *= 40  # whose sums overflow against the reference of a fixed step
    layout = SequenceLayout(grid=GRID, start=0, num_queries=tokens, num_keys=tokens)
    call = SparseCall(query=query, key=key, value=value, layout=layout, scale=128**-0.5)
    chunks = row_chunks(layout, (2, 4, 5), query.device)
    rule = Rule(topk=9)
    chosen = unpacked(select(call, chunks, rule), chunks.keys.num_tiles)
    out = attend(call, chunks, rule)
    mask = chosen[..., chunks.own.long()]
    assert_within_error_budget(out, query, key, value, scale=128**-0.5, mask=mask)
