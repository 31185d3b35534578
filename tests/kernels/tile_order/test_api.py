"""What is refused, with the message, and what runs where."""

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.tile_order.api import gather_tokens, scatter_tokens

INDEX = torch.arange(5, dtype=torch.int32)


def tokens(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


GOOD = tokens(2, 5, 3, 8)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((), r"`tensors` must be 1 to 4 tensors, got 0"),
        ((GOOD,) * 5, r"`tensors` must be 1 to 4 tensors, got 5"),
        ((tokens(5, 3, 8),), r"`tensors\[0\]` must be \[B, S, H, D\], got \[5, 3, 8\]"),
        ((GOOD.long(),), r"`tensors\[0\]` must be float16, .*, got torch.int64"),
        (
            (GOOD, GOOD.half()),
            r"`tensors\[1\]` must have the dtype and device of tensors\[0\] "
            r"\(torch.float32, cpu\), got torch.float16, cpu",
        ),
        ((GOOD, GOOD.to("meta")), r"`tensors\[1\]` must have the dtype and device .*, meta"),
        (
            (GOOD, GOOD, tokens(2, 4, 3, 8)),
            r"`tensors\[2\]` must be \[2, 5, H, 8\] like tensors\[0\], got \[2, 4, 3, 8\]",
        ),
        ((GOOD, tokens(2, 5, 3, 4)), r"`tensors\[1\]` must be \[2, 5, H, 8\]"),
        ((GOOD, tokens(1, 5, 3, 8)), r"`tensors\[1\]` must be \[2, 5, H, 8\]"),
    ],
)
def test_tensors_that_cannot_move_together_are_refused(
    tensors: tuple[torch.Tensor, ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        gather_tokens(tensors, INDEX)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (INDEX.long(), r"`index` must be int32, got torch.int64; call .int\(\) on it"),
        (INDEX.to("meta"), r"`index` must be on the device of the tokens \(cpu\), got meta"),
        (INDEX.expand(3, -1), r"`index` must be \[S\], \[2, S\] or \[2, 3, S\], got \[3, 5\]"),
        (INDEX.view(1, 1, 5), r"`index` must be \[S\], \[2, S\] or \[2, 3, S\], got \[1, 1, 5\]"),
        (INDEX.expand(2, 2, -1), r"`index` must be .* or \[2, 3, S\], got \[2, 2, 5\]"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(index: torch.Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        gather_tokens((GOOD,), index)
    with pytest.raises(UsageError, match=message):
        scatter_tokens(GOOD, index, GOOD.clone())


@pytest.mark.parametrize(
    ("source", "out", "message"),
    [
        (tokens(2, 5, 2, 8), GOOD, r"`source` must be \[2, S_in, 3, 8\] like out, got \[2, 5, 2"),
        (tokens(1, 5, 3, 8), GOOD, r"`source` must be \[2, S_in, 3, 8\] like out, got \[1, 5, 3"),
        (tokens(5, 3, 8), GOOD, r"`source` must be \[B, S, H, D\], got \[5, 3, 8\]"),
        (GOOD, tokens(5, 3, 8), r"`out` must be \[B, S, H, D\], got \[5, 3, 8\]"),
        (GOOD.half(), GOOD, r"`source` must have the dtype and device of out \(torch.float32, cpu"),
        (tokens(2, 4, 3, 8), GOOD, r"`index` must hold one value per token of source \(4\), got 5"),
        (
            GOOD,
            tokens(1, 5, 3, 8).expand(2, -1, -1, -1),
            r"`out` must have memory of its own .* got strides \[0, 24, 8, 1\] .*\.contiguous\(\)",
        ),
    ],
)
def test_a_scatter_that_does_not_fit_is_refused(
    source: torch.Tensor, out: torch.Tensor, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        scatter_tokens(source, INDEX, out)


def test_tokens_outside_the_sequence_are_refused_by_the_reference() -> None:
    with pytest.raises((IndexError, RuntimeError), match=r"(?i)index out of range|out of bounds"):
        gather_tokens((GOOD,), INDEX + 1)


@pytest.mark.parametrize("tensors", [(GOOD, GOOD[:, :, :1]), (GOOD,) * 4], ids=["heads", "four"])
def test_an_order_per_head_moves_tensors_of_these_heads_only(
    tensors: tuple[torch.Tensor, ...],
) -> None:
    with pytest.raises(UsageError, match=r"`tensors` must be at most 3 of 3 heads for an order"):
        gather_tokens(tensors, INDEX.expand(2, 3, -1))


def test_every_head_may_have_an_order_of_its_own() -> None:
    tensor = torch.arange(2 * 5 * 3).view(2, 5, 3, 1).float().requires_grad_()
    index = torch.stack([torch.randperm(5) for _ in range(6)]).view(2, 3, 5).int()
    (moved,) = gather_tokens((tensor,), index)
    for b, h in ((0, 0), (1, 2)):
        assert moved[b, :, h, 0].tolist() == [tensor[b, i, h, 0].item() for i in index[b, h]]
    back = torch.zeros_like(tensor)
    scatter_tokens(moved, index, back)
    assert torch.equal(back, tensor)
