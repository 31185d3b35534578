"""The Triton kernels against the definitions, under the interpreter.

Triton reads TRITON_INTERPRET when it is imported, so these tests need a process of their own:
test_children.py starts it.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from multimodal_gen.kernels.select.reference import (
    Ranking,
    Tiles,
    pool_tiles_reference,
    select_tiles_reference,
)
from tests.helpers.inputs import random
from tests.kernels.select.naive import (
    assert_best,
    naive_best,
    naive_gated,
    naive_mean,
    ragged_tiles,
    whole_numbers,
)

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1; see test_children.py"
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def selected(
    query: torch.Tensor, key: torch.Tensor, count: int, always: int, **options: int
) -> torch.Tensor:
    """Return what the kernel selects, written into rows of a longer and wider plan."""
    from multimodal_gen.kernels.select.tile_kernel import select_tiles

    batch, heads, num_q, _ = query.shape
    plan = torch.full((batch, heads + 1, num_q + 2, count + always + 3), -7, dtype=torch.int32)
    out = plan[:, :heads, :num_q]
    select_tiles(Ranking(query, key, count, always, out), **options)
    assert (out[..., count + always :] == -7).all()
    assert (plan[:, heads:] == -7).all()
    assert (plan[:, :, num_q:] == -7).all()
    return out[..., : count + always]


@pytest.mark.slow_cases("channels last but one-dtype3", "heads first-dtype2", "tokens first-dtype1")
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("tokens first", torch.float32),
        ("tokens first", torch.bfloat16),
        ("heads first", torch.float16),
        ("channels last but one", torch.bfloat16),
        ("packed", torch.float16),
    ],
)
def test_pooling_reads_any_strides(dtype: torch.dtype, layout: str) -> None:
    from multimodal_gen.kernels.select.pool_kernel import pool_tiles

    starts, lengths, index = ragged_tiles([64, 70, 1])
    tokens = int(lengths.sum())
    q, k = random(2, tokens, 4, 24, dtype=dtype), random(2, tokens, 2, 24, seed=1, dtype=dtype)
    if layout == "heads first":
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    elif layout == "channels last but one":
        q, k = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k))
    v = k.flip(1)
    if layout == "packed":
        k, v = torch.stack((k, v), dim=2).unbind(2)
    for order in (None, index):
        means = pool_tiles((q, k, v), Tiles(starts, lengths, 70, order))
        pair = pool_tiles((q, q.flip(1)), Tiles(starts, lengths, 70, order))
        for x, mean in zip((q, k, v, q, q.flip(1)), (*means, *pair), strict=True):
            wanted = naive_mean(x, starts, lengths, order)
            assert mean.dtype == dtype
            band = 70 * torch.finfo(torch.float32).eps * x.abs().max()
            assert ((mean - wanted).abs() <= torch.finfo(dtype).eps * wanted.abs() + band).all()


@pytest.mark.slow_cases("dtype1-True", "dtype2-False")
@pytest.mark.parametrize(
    ("dtype", "indexed"),
    [
        (torch.float32, False),
        (torch.float16, True),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
    ],
)
def test_pooling_leaves_masked_tokens_out(dtype: torch.dtype, indexed: bool) -> None:
    from multimodal_gen.kernels.select.pool_kernel import pool_tiles

    starts, lengths, order = ragged_tiles([64, 70, 1, 9])
    index = order if indexed else None
    tokens = int(lengths.sum())
    keep = (random(2, tokens + 5, seed=1) > 0)[:, 5:]
    tile = (order if indexed else torch.arange(tokens)).split(lengths.tolist())[3]
    keep[0, tile.long()] = False
    x = random(2, tokens, 3, 24, dtype=dtype).masked_fill(~keep[..., None, None], torch.nan)
    for precise in (None, torch.float32):
        (found,) = pool_tiles((x,), Tiles(starts, lengths, 70, index), keep, precise)
        wanted = pool_tiles_reference(x, Tiles(starts, lengths, 70, index), keep, precise)
        assert not found[0, :, 3].any()
        torch.testing.assert_close(found, wanted)


@pytest.mark.slow_cases("dtype1", "dtype2")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinitely_low_score_comes_last(dtype: torch.dtype) -> None:
    query, key = random(1, 2, 7, 144, dtype=dtype), random(1, 1, 40, 144, seed=1, dtype=dtype)
    query[..., 128:], key[..., 128:] = 0.0, 0.0
    query[..., 128] = 1.0
    key[:, :, 5:30, 128] = -torch.inf
    found = selected(query, key, 15, 0)
    assert (found == torch.tensor([*range(5), *range(30, 40)])).all()


@given(
    batch=st.sampled_from([1, 2]),
    heads=st.sampled_from([(1, 1), (2, 2), (2, 1)]),
    num_q=st.sampled_from([1, 3]),
    num_kv=st.sampled_from([1, 5, 33, 300]),
    share=st.floats(0.0, 1.0),
    always=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_selection_is_the_definition(
    batch: int,
    heads: tuple[int, int],
    num_q: int,
    num_kv: int,
    share: float,
    always: int,
    seed: int,
    dtype: torch.dtype,
) -> None:
    count = max(1, round(share * num_kv))
    query = whole_numbers(batch, heads[0], num_q, 8, seed=seed, dtype=dtype)
    key = whole_numbers(batch, heads[1], num_kv, 8, seed=seed + 1, dtype=dtype)
    found = selected(query, key, count, always)
    assert torch.equal(found, naive_best(query, key, count, always))


@pytest.mark.slow_cases("16384")
@pytest.mark.parametrize("scratch_bytes", [pytest.param(1, marks=pytest.mark.slow), 2**14])
def test_rows_are_done_in_turns_where_the_buffer_is_small(scratch_bytes: int) -> None:
    query = whole_numbers(2, 1, 66, 16, seed=0, dtype=torch.float16)
    key = whole_numbers(2, 1, 20, 16, seed=1, dtype=torch.float16)
    found = selected(query, key, 9, 2, scratch_bytes=scratch_bytes)
    assert torch.equal(found, naive_best(query, key, 9, 2))


@pytest.mark.slow_cases("dtype1-128", "dtype2-24")
@pytest.mark.parametrize(
    ("dtype", "head_size"), [(torch.float32, 24), (torch.float16, 128), (torch.bfloat16, 24)]
)
def test_real_numbers_select_the_best_up_to_rounding(dtype: torch.dtype, head_size: int) -> None:
    query = random(1, 2, 7, head_size, dtype=dtype)
    key = random(1, 1, 150, head_size, seed=1, dtype=dtype)
    assert_best(selected(query, key, 9, 1), query, key, 9, 1)


@pytest.mark.slow_cases(
    "1-huge", "1-lowest", "1-nan", "1-tiny", "3-huge", "3-nan", "3-negative", "3-zeros"
)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "scores",
    [
        [0.0, -0.0, 0.0, -1.0],
        [1e-45, 0.0, -1e-45, 1e-38],
        [3e38, -3e38, float("inf"), -float("inf")],
        [1.0, float("nan"), 2.0, -float("inf")],
        [-5.0, -4.0, -3.0, -2.0],
        [-float("inf")] * 4,
    ],
    ids=["zeros", "tiny", "huge", "nan", "negative", "lowest"],
)
@pytest.mark.parametrize("count", [1, 3])
def test_scores_of_any_size_are_ordered(scores: list[float], count: int) -> None:
    from multimodal_gen.kernels.select.api import select_tiles

    key = torch.zeros(1, 1, 4, 16)
    key[0, 0, :, 0] = torch.tensor(scores)
    query = torch.zeros(1, 1, 1, 16)
    query[..., 0] = 1.0
    found = selected(query, key, count, 0)
    assert torch.equal(found, select_tiles(query, key, count))


@pytest.mark.slow_cases(
    "False-False-dtype1",
    "False-False-dtype2",
    "False-True-dtype0",
    "False-True-dtype2",
    "True-False-dtype0",
    "True-False-dtype2",
    "True-True-dtype0",
    "True-True-dtype1",
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
def test_the_gated_sum_is_rounded_once(
    dtype: torch.dtype, heads_first: bool, indexed: bool
) -> None:
    from multimodal_gen.kernels.select.pool_kernel import add_gated

    starts, lengths, order = ragged_tiles([64, 70, 1])
    index = order if indexed else None
    tokens = int(lengths.sum()) + 3
    out, gate = (random(2, tokens, 3, 24, seed=s, dtype=dtype) for s in (0, 1))
    if heads_first:
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    coarse = random(2, 3, 3, 24, seed=2, dtype=dtype)
    wanted = naive_gated(out, gate, coarse, starts, lengths, index)
    found = add_gated(out.clone(), gate, coarse, Tiles(starts, lengths, 70, index))
    band = 4 * torch.finfo(torch.float32).eps * wanted.abs().max()
    assert ((found - wanted).abs() <= torch.finfo(dtype).eps * wanted.abs() + band).all()
    assert torch.equal(found[:, -3:], out[:, -3:])


@pytest.mark.parametrize("alike", [False, True])
def test_a_map_marks_what_is_listed_and_what_is_near(alike: bool) -> None:
    from multimodal_gen.kernels.select.tile_kernel import select_tiles

    query, key = random(1, 1, 12, 24), random(1, 1, 12, 24, seed=1)
    if alike:  # more keys score best than are kept
        key[:, :, 4:9] = key[:, :, 4:5]
    marked = torch.empty(1, 1, 12, 12, dtype=torch.uint8)
    select_tiles(Ranking(query, key, 3, 0, marked), near=1)
    place = torch.arange(12)
    wanted = ((place[:, None] - place).abs() <= 1)[None, None].clone()
    wanted.scatter_(-1, selected(query, key, 3, 0).long(), True)
    assert torch.equal(marked, wanted.to(torch.uint8))


@pytest.mark.parametrize("num_kv", [300, 384, 700])
def test_a_row_is_held_in_two_parts(num_kv: int) -> None:
    score = torch.randn(num_kv, generator=torch.Generator().manual_seed(num_kv))
    score[::7] *= 1e30
    query, key = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, num_kv, 16)
    query[..., 0], key[..., 0] = 1.0, score
    found = selected(query, key, num_kv // 7, 0)
    assert torch.equal(found[0, 0, 0], score.topk(num_kv // 7).indices.sort().values.int())


@pytest.mark.parametrize(("cells", "masked"), [(4, False), (8, True)])
def test_cells_are_pooled_together(cells: int, masked: bool) -> None:
    from multimodal_gen.kernels.select.pool_kernel import pool_cells

    starts, lengths, index = ragged_tiles([70, 64, 1])
    width = -(-70 // cells)
    x = random(2, int(lengths.sum()), 3, 24, dtype=torch.bfloat16)
    keep = random(*x.shape[:2], seed=1) > -1 if masked else None
    offsets = torch.arange(cells, dtype=torch.int32) * width
    begin = (starts[:, None] + offsets).flatten()
    held = (lengths[:, None] - offsets).clamp(0, width).flatten()
    wanted = pool_tiles_reference(x.float(), Tiles(begin, held, width, index), keep)
    found = pool_cells(x, Tiles(starts, lengths, 70, index), cells, keep)
    assert found.dtype == x.dtype
    assert ((found - wanted).abs() <= torch.finfo(x.dtype).eps * wanted.abs() + 1e-5).all()


@pytest.mark.slow_cases(
    "torch.bfloat16-cells0",
    "torch.bfloat16-cells1",
    "torch.bfloat16-cells2",
    "torch.float16-cells1",
    "torch.float16-cells2",
)
@pytest.mark.parametrize("cells", [(4, 4), (1, 8), (8, 2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_tiles_are_selected_by_their_cells(dtype: torch.dtype, cells: tuple[int, int]) -> None:
    from multimodal_gen.kernels.select.tile_kernel import select_tiles

    num_q, num_kv, kept = 19, 37, 9
    q = random(2, 4, num_q * cells[0], 40, dtype=dtype)
    k = random(2, 2, num_kv * cells[1], 40, seed=1, dtype=dtype)
    q_real = torch.ones(1, num_q * cells[0], dtype=torch.bool)
    q_real[:, -(cells[0] // 2) or None :] = cells[0] == 1
    k_real = torch.rand(2, num_kv * cells[1], generator=torch.Generator().manual_seed(2)) < 0.8
    found, wanted = (torch.zeros(2, 4, num_q, kept + 1, dtype=torch.int32) for _ in range(2))
    given = (cells, (q_real, k_real), 0.2)
    options = {"scratch_bytes": 2**14, "warpgroups": dtype == torch.float16}
    select_tiles(Ranking(q, k, kept, 1, found, *given), **options)
    select_tiles_reference(Ranking(q, k, kept, 1, wanted, *given))
    # Scores of two tiles that differ by rounding alone may change places.
    assert (found == wanted).float().mean() >= 0.99
    assert (found[..., 1:] > found[..., :-1]).all()
    assert (found[..., -1] == num_kv).all()
