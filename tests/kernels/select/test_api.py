"""The coarse stage on the CPU, which is the definition, against loops."""

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.select.api import add_gated, pool_tiles, select_tiles
from multimodal_gen.kernels.select.reference import Tiles, pool_tiles_reference
from tests.helpers.inputs import random
from tests.kernels.select.naive import (
    assert_best,
    naive_best,
    naive_gated,
    naive_mean,
    ragged_tiles,
    whole_numbers,
)

LENGTHS = [8, 8, 3, 8, 1, 5]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("indexed", [False, True])
def test_a_pooled_tile_is_the_rounded_mean_of_its_tokens(dtype: torch.dtype, indexed: bool) -> None:
    starts, lengths, order = ragged_tiles(LENGTHS)
    index = order if indexed else None
    tensors = (
        random(2, 33, 4, 16, seed=1, dtype=dtype),
        random(2, 33, 2, 16, seed=2, dtype=dtype),
        random(2, 33, 2, 16, seed=3, dtype=dtype),
    )
    pooled = pool_tiles(tensors, Tiles(starts, lengths, 8, index))
    for x, mean in zip(tensors, pooled, strict=True):
        wanted = naive_mean(x, starts, lengths, index)
        assert mean.shape == (2, x.shape[2], 6, 16)
        assert mean.dtype == dtype
        assert mean.is_contiguous()
        band = 8 * torch.finfo(torch.float32).eps * x.abs().max()
        assert ((mean - wanted).abs() <= torch.finfo(dtype).eps * wanted.abs() + band).all()


def test_means_can_be_had_without_rounding() -> None:
    starts, lengths, _ = ragged_tiles(LENGTHS)
    x = random(2, 33, 2, 16, dtype=torch.bfloat16)
    (mean,) = pool_tiles((x,), Tiles(starts, lengths, 8), dtype=torch.float32)
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean.double(), naive_mean(x, starts, lengths, None).double())


def test_tokens_outside_every_tile_are_not_read() -> None:
    x = random(1, 40, 2, 8)
    x[:, 33:] = torch.nan
    starts, lengths, _ = ragged_tiles(LENGTHS)
    (pooled,) = pool_tiles((x,), Tiles(starts, lengths, 8))
    assert pooled.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 7, 12, 13])
def test_selection_is_the_definition_with_ties_to_the_lowest_index(
    dtype: torch.dtype, count: int
) -> None:
    query = whole_numbers(2, 4, 5, 8, seed=count, dtype=dtype)
    key = whole_numbers(2, 2, 13, 8, seed=count + 1, dtype=dtype)
    key[:, :, 5] = key[:, :, 9] = key[:, :, 2]
    found = select_tiles(query, key, count, always=3)
    assert torch.equal(found, naive_best(query, key, count, 3))


def test_equal_scores_keep_the_first_tiles() -> None:
    found = select_tiles(torch.zeros(1, 1, 2, 4), torch.randn(1, 1, 9, 4), 4)
    assert torch.equal(found, torch.arange(4).int().expand(1, 1, 2, 4))


def test_zero_and_minus_zero_are_equal_scores() -> None:
    query = torch.tensor([[1.0, 0.0]]).view(1, 1, 1, 2)
    key = torch.tensor([[-1.0, 0.0], [-0.0, 0.0], [0.0, 0.0], [-0.0, 0.0]]).view(1, 1, 4, 2)
    assert select_tiles(query, key, 2).tolist() == [[[[1, 2]]]]


def test_scores_that_are_no_numbers_still_give_valid_lists() -> None:
    query, key = random(1, 2, 3, 8), random(1, 2, 7, 8, seed=1)
    key[:, :, 4] = torch.nan
    found = select_tiles(query, key, 3)
    assert (found == 4).any(-1).all()
    assert (found.diff(dim=-1) > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_real_numbers_select_the_best_up_to_rounding(dtype: torch.dtype) -> None:
    query, key = random(3, 4, 9, 32, dtype=dtype), random(3, 1, 40, 32, seed=1, dtype=dtype)
    assert_best(select_tiles(query, key, 11, always=2), query, key, 11, 2)


def test_many_heads_are_scored_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = random(2, 4, 5, 8), random(2, 2, 13, 8, seed=1)
    whole = select_tiles(query, key, 6)
    monkeypatch.setattr("multimodal_gen.kernels.select.reference._SCORES_AT_ONCE", 140)
    assert torch.equal(select_tiles(query, key, 6), whole)


@pytest.mark.parametrize("indexed", [False, True])
def test_means_are_of_kept_tokens_alone_whatever_the_others_hold(indexed: bool) -> None:
    starts, lengths, order = ragged_tiles(LENGTHS)
    index = order if indexed else None
    x, token_mask = random(2, 36, 3, 8), random(2, 36, seed=1) > 0
    tiles = (order if indexed else torch.arange(33)).split(LENGTHS)
    token_mask[1, tiles[2].long()] = False
    dirty = x.masked_fill(~token_mask[..., None, None], torch.nan)
    (found,) = pool_tiles((dirty,), Tiles(starts, lengths, 8, index), mask=token_mask)
    for b in range(2):
        for n in range(len(LENGTHS)):
            kept = [t for t in tiles[n].tolist() if token_mask[b, t]]
            wanted = x[b, kept].mean(0) if kept else torch.zeros(3, 8)
            torch.testing.assert_close(found[b, :, n], wanted)


def test_tiles_that_are_not_real_come_last() -> None:
    query, key = whole_numbers(2, 2, 5, 8, seed=0, dtype=torch.float32), random(2, 1, 9, 8, seed=1)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[0, 2:5] = False
    real[1, 1:] = False
    found = select_tiles(query, key, 4, always=1, real=(None, real))
    alone = select_tiles(query[:1], key[:1, :, real[0]], 4)
    renumbered = real[0].nonzero().flatten()[alone[0].long()]
    assert torch.equal(found[0, ..., :4].long(), renumbered)
    assert (found[1] == torch.tensor([0, 1, 2, 3, 9])).all()
    everything = select_tiles(query, key, 4, always=1, real=(None, torch.ones_like(real)))
    assert torch.equal(everything, select_tiles(query, key, 4, always=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("indexed", [False, True])
def test_the_gated_sum_is_rounded_once(dtype: torch.dtype, indexed: bool) -> None:
    starts, lengths, order = ragged_tiles(LENGTHS)
    index = order if indexed else None
    out, gate = random(2, 36, 3, 8, dtype=dtype), random(2, 36, 3, 8, seed=1, dtype=dtype)
    coarse = random(2, 3, 6, 8, seed=2, dtype=dtype)
    before = out.clone()
    wanted = naive_gated(out, gate, coarse, starts, lengths, index)
    found = add_gated(out, gate, coarse, Tiles(starts, lengths, 8, index))
    assert found.dtype == dtype
    band = 4 * torch.finfo(torch.float32).eps * wanted.abs().max()
    assert ((found - wanted).abs() <= torch.finfo(dtype).eps * wanted.abs() + band).all()
    assert torch.equal(found[:, 33:], before[:, 33:])


def test_pooling_and_the_gated_sum_are_differentiable() -> None:
    starts, lengths, index = ragged_tiles([3, 2])
    x, gate = (random(1, 5, 2, 4, seed=s).double().requires_grad_() for s in (0, 1))

    def run(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        (coarse,) = pool_tiles((x,), Tiles(starts, lengths, 3, index))
        return add_gated(x, gate, coarse, Tiles(starts, lengths, 3, index))

    assert torch.autograd.gradcheck(run, (x, gate))


def test_gradients_of_means_reach_tokens_that_count_alone() -> None:
    starts, lengths, index = ragged_tiles([3, 2])
    x = random(2, 7, 2, 4).double().requires_grad_()
    token_mask = torch.ones(2, 7, dtype=torch.bool)
    token_mask[0, int(index[0])] = token_mask[1, index[3:].long()] = False
    upstream = random(2, 2, 2, 4, seed=2).double()
    (found,) = pool_tiles((x,), Tiles(starts, lengths, 3, index), mask=token_mask)
    wanted = pool_tiles_reference(x, Tiles(starts, lengths, 3, index), token_mask)
    torch.testing.assert_close(found, wanted)
    (grad,) = torch.autograd.grad(found, x, upstream)
    (expected,) = torch.autograd.grad(wanted, x, upstream)
    torch.testing.assert_close(grad, expected)


X = torch.zeros(1, 6, 2, 4)
STARTS = torch.tensor([0, 3]).int()
TILES = Tiles(STARTS, STARTS, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: pool_tiles((), TILES),
            r"`tensors` must hold at least one tensor, got none",
        ),
        (
            lambda: pool_tiles((X[0],), TILES),
            r"`tensors` must be \[B, S, H, D\], got \[6, 2, 4\]",
        ),
        (
            lambda: pool_tiles((X, X.half()), TILES),
            r"`tensors` must have one batch, head size, dtype and device, got .* torch.float16",
        ),
        (
            lambda: pool_tiles((X,), TILES._replace(starts=STARTS.long())),
            r"`starts` must be int32, 1-D and on cpu, got torch.int64",
        ),
        (
            lambda: pool_tiles((X,), TILES._replace(lengths=STARTS[:1])),
            r"`lengths` must hold one value per start, got 1 for 2",
        ),
        (lambda: pool_tiles((X,), TILES._replace(size=0)), r"`size` must be at least 1, got 0"),
        (lambda: select_tiles(X[0], X, 1), r"`query` must be \[B, H, N, D\], got \[6, 2, 4\]"),
        (lambda: select_tiles(X, X.half(), 1), r"`key` must have the batch, head size, dtype"),
        (
            lambda: select_tiles(X, X[:, :4], 1),
            r"`query` must have a multiple of key's 4 heads, got 6",
        ),
        (lambda: select_tiles(X, X, 0), r"`count` must lie in \[1, 2\], got 0"),
        (lambda: select_tiles(X, X, 3), r"`count` must lie in \[1, 2\], got 3"),
        (
            lambda: pool_tiles((X,), TILES, mask=torch.ones(1, 5).bool()),
            r"`mask` must be bool \[1, 6\], got torch.bool \[1, 5\]",
        ),
        (
            lambda: select_tiles(X, X, 1, real=(None, torch.ones(1, 3).bool())),
            r"`real` must be bool \[1, 2\], got torch.bool \[1, 3\]",
        ),
        (lambda: select_tiles(X, X, 1, always=-1), r"`always` must be at least 0, got -1"),
        (
            lambda: add_gated(X, X[:, :1], X, TILES),
            r"`gate` must be \[1, 6, 2, 4\], got \[1, 1, 2, 4\]",
        ),
        (
            lambda: add_gated(X, X, X, TILES),
            r"`coarse` must be \[1, 2, 2, 4\] on cpu, got \[1, 6, 2, 4\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(UsageError, match=message):
        call()
