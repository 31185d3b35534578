"""Pooling, selection and the gated sum on a GPU, against float64 and against the definition."""

import pytest
import torch

from multimodal_gen.kernels.select.api import (
    add_gated,
    mark_tiles,
    pool_cells,
    pool_tiles,
    select_tiles,
)
from multimodal_gen.kernels.select.reference import (
    Ranking,
    Tiles,
    add_gated_reference,
    pool_tiles_reference,
    select_tiles_reference,
)
from tests.kernels.select.naive import assert_best, ragged_tiles, whole_numbers

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LENGTHS = [64, 48, 16, 64, 1, 12] * 40


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("heads_first", [False, True])
def test_means_are_rounded_once(
    dtype: torch.dtype, head_size: int, indexed: bool, heads_first: bool
) -> None:
    starts, lengths, order = ragged_tiles(LENGTHS, device="cuda")
    index = order if indexed else None
    tokens = int(lengths.sum()) + 5
    tensors = [random(2, tokens, h, head_size, dtype=dtype, seed=h) for h in (4, 2, 2)]
    if heads_first:
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    token_mask = random(2, tokens, dtype=torch.float32, seed=9) > 0
    for x in tensors:
        for mask in (None, token_mask):
            (mean,) = pool_tiles((x,), Tiles(starts, lengths, 64, index), mask=mask)
            wanted = pool_tiles_reference(x.double(), Tiles(starts, lengths, 64, index), mask)
            band = 64 * torch.finfo(torch.float32).eps * x.abs().max()
            assert ((mean - wanted).abs() <= torch.finfo(dtype).eps * wanted.abs() + band).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_kv", [1, 31, 300, 1182, 1440, 1800, 4096, 6000, 10000])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_selection_is_the_definition_where_scores_are_exact(
    dtype: torch.dtype, num_kv: int, share: float
) -> None:
    count = max(1, round(share * num_kv))
    query = whole_numbers(2, 4, 130, 64, seed=1, dtype=dtype, device="cuda")
    key = whole_numbers(2, 2, num_kv, 64, seed=2, dtype=dtype, device="cuda")
    found = select_tiles(query, key, count, always=3)
    wanted = torch.empty_like(found)
    select_tiles_reference(Ranking(query, key, count, 3, wanted))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
def test_real_numbers_select_the_best_up_to_rounding(dtype: torch.dtype, head_size: int) -> None:
    query = random(2, 4, 1440, head_size, dtype=dtype)
    key = random(2, 1, 1440, head_size, dtype=dtype, seed=1)
    assert_best(select_tiles(query, key, 144, always=2), query, key, 144, 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_that_are_not_real_come_last(dtype: torch.dtype) -> None:
    query = whole_numbers(2, 4, 130, 128, seed=1, dtype=dtype, device="cuda")
    key = whole_numbers(2, 2, 300, 128, seed=2, dtype=dtype, device="cuda")
    real = (torch.arange(300, device="cuda") % 3 > 0).expand(2, -1)
    found = select_tiles(query, key, 50, real=(None, real))
    renumbered = real[0].nonzero().flatten()[select_tiles(query, key[:, :, real[0]], 50).long()]
    assert torch.equal(found.long(), renumbered)


@pytest.mark.parametrize("num", [300, 1182, 1800])
@pytest.mark.parametrize("exact", [False, True])
def test_a_map_marks_what_is_listed_and_what_is_near(num: int, exact: bool) -> None:
    query, key = (
        random(2, 4, num, 64, dtype=torch.bfloat16),
        random(2, 2, num, 64, dtype=torch.bfloat16),
    )
    if exact:  # many score the same
        query, key = (
            whole_numbers(2, h, num, 64, seed=h, dtype=torch.bfloat16, device="cuda")
            for h in (4, 2)
        )
    place = torch.arange(num, device="cuda")
    wanted = ((place[:, None] - place).abs() <= 1).expand(2, 4, -1, -1).clone()
    wanted.scatter_(-1, select_tiles(query, key, num // 7).long(), True)
    assert torch.equal(mark_tiles(query, key, num // 7, near=1), wanted)


def test_scores_that_are_no_numbers_still_give_valid_lists() -> None:
    query = random(1, 2, 100, 64, dtype=torch.bfloat16)
    key = random(1, 2, 700, 64, dtype=torch.bfloat16, seed=1)
    key[:, :, ::3] = torch.nan
    found = select_tiles(query, key, 70)
    assert (found.diff(dim=-1) > 0).all()
    assert (found % 3 == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("indexed", [False, True])
def test_the_gated_sum_is_rounded_once(dtype: torch.dtype, head_size: int, indexed: bool) -> None:
    starts, lengths, order = ragged_tiles(LENGTHS, device="cuda")
    index = order if indexed else None
    tokens = int(lengths.sum()) + 5
    out, gate = (random(2, tokens, 4, head_size, dtype=dtype, seed=s) for s in (0, 1))
    coarse = random(2, 4, len(LENGTHS), head_size, dtype=dtype, seed=2)
    tiles = Tiles(starts, lengths, 64, index)
    wanted = add_gated_reference(out.double(), gate.double(), coarse.double(), tiles)
    found = add_gated(out.clone(), gate, coarse, Tiles(starts, lengths, 64, index))
    band = 4 * torch.finfo(torch.float32).eps * wanted.abs().max()
    assert ((found - wanted).abs() <= torch.finfo(dtype).eps * wanted.abs() + band).all()
    assert torch.equal(found[:, -5:], out[:, -5:])


def test_nothing_waits_for_the_device() -> None:
    starts, lengths, index = ragged_tiles(LENGTHS, device="cuda")
    x = random(1, int(lengths.sum()), 4, 128, dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        q, k, v = pool_tiles((x, x, x), Tiles(starts, lengths, 64, index))
        select_tiles(q, k, 24, always=1)
        return add_gated(x.clone(), x, v, Tiles(starts, lengths, 64, index))

    run()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.isfinite().all()


def test_more_than_two_to_the_31_elements() -> None:
    tokens, heads = 430_080, 40
    assert tokens * heads * 128 > 2**31
    x = torch.zeros(1, tokens, heads, 128, device="cuda", dtype=torch.bfloat16)
    x[:, -64:] = 2.0
    lengths = torch.full((tokens // 64,), 64, device="cuda", dtype=torch.int32)
    starts = (lengths.cumsum(0) - lengths).int()
    index = torch.arange(tokens, device="cuda", dtype=torch.int32)
    (mean,) = pool_tiles((x,), Tiles(starts, lengths, 64, index))
    assert (mean[:, :, -1] == 2.0).all()
    assert not mean[:, :, :-1].any()
    out = add_gated(x, x, mean, Tiles(starts, lengths, 64, index))
    assert (out[:, -64:] == 6.0).all()
    assert not out[:, :-64].any()


@pytest.mark.parametrize("cells", [(4, 4), (8, 2), (1, 1)])
def test_tiles_are_selected_by_their_cells(cells: tuple[int, int]) -> None:
    x, y = (random(2, 9000, 4, 128, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    starts = torch.arange(0, 9000, 64, device="cuda", dtype=torch.int32)
    lengths = (9000 - starts).clamp_max(64)
    sides = [
        pool_cells(t, Tiles(starts, lengths, 64), n) for t, n in zip((x, y), cells, strict=True)
    ]
    (q, q_real), (k, k_real) = sides
    found = select_tiles(q, k, 40, cells=cells, scale=1.0, real=(q_real, k_real))
    on_cpu = (q_real.cpu(), k_real.cpu())
    wanted = select_tiles(q.cpu(), k.cpu(), 40, cells=cells, scale=1.0, real=on_cpu)
    assert (found.cpu() == wanted).float().mean() >= 0.99
