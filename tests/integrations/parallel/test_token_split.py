"""."""

import pytest
import torch

from multimodal_gen.errors import RankError, UsageError
from multimodal_gen.integrations.parallel.token_split import (
    TokenShare,
    gather_sequence,
    share_tokens,
)
from multimodal_gen.runtime.distributed.groups import parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.testing.processes import own


@pytest.mark.parametrize(
    ("total", "ranks", "lengths"), [(8, 2, (4, 4)), (7, 2, (4, 3)), (11, 4, (3, 3, 3, 2))]
)
def test_tokens_are_split_as_evenly_as_they_can_be(total, ranks, lengths):
    shares = [share_tokens(total, ranks, rank, None) for rank in range(ranks)]
    assert [share.length for share in shares] == list(lengths)
    tokens = torch.arange(total)
    assert torch.equal(torch.cat([share.take(tokens, 0) for share in shares]), tokens)


@pytest.mark.parametrize(
    ("span", "around"),
    [
        (None, (0, 0)),
        (TextSpan(start=0, length=3), (3, 0)),
        (TextSpan(start=5, length=2), (0, 2)),
    ],
)
def test_text_is_where_the_model_has_it(span, around):
    share = share_tokens(5, 2, 1, span)
    assert (share.front, share.back) == around
    assert share.joint_length == sum(around) + 2


def test_text_in_front_is_kept_whole():
    share = share_tokens(5, 2, 1, TextSpan(start=0, length=2))
    tokens = torch.tensor([[-2, -1, 0, 1, 2, 3, 4]])
    assert share.take(tokens, 1, text=2).tolist() == [[-2, -1, 3, 4]]


def test_a_tensor_that_ends_early_gives_what_there_is():
    shares = [share_tokens(6, 3, rank, None) for rank in range(3)]
    assert [share.take(torch.arange(3), 0).tolist() for share in shares] == [[0, 1], [2], []]


def test_leading_tokens_are_counted_on_the_ranks_that_have_them():
    shares = [share_tokens(7, 3, rank, None) for rank in range(3)]
    assert [share.of_leading(4) for share in shares] == [3, 1, 0]


def test_every_rank_has_to_get_a_token():
    with pytest.raises(UsageError, match=r"a token for each of the 4 ranks .* got 3 tokens"):
        share_tokens(3, 4, 0, None)


def test_layers_find_the_share_of_the_running_call():
    share = share_tokens(4, 2, 0, None)
    assert TokenShare.current() is None
    with set_forward_context(0) as context:
        assert TokenShare.current() is None
        share.store(context.cache)
        assert TokenShare.current() is share


LENGTHS = (5, 3)


def make_tokens(channels: int = 4) -> torch.Tensor:
    return torch.arange(8.0 * channels).view(1, 8, channels)


def ungathered(tokens: int, grad: bool) -> str | None:
    """Gather, with so many tokens on rank 1, which may require grad; return the error."""
    mine = own(make_tokens(), LENGTHS)
    if parallel_groups().rank == 1:
        mine = make_tokens()[:, :tokens].requires_grad_(grad)
    try:
        gather_sequence(mine, LENGTHS)
    except (RankError, UsageError) as error:
        return str(error)
    return None


def gathered() -> torch.Tensor:
    return gather_sequence(own(make_tokens(), LENGTHS), LENGTHS)


def gathering_error(other: dict) -> str | None:
    """Gather, with something else on rank 1; return the error."""
    mine = other if parallel_groups().rank == 1 else {}
    lengths = mine.get("lengths", LENGTHS)
    tokens = own(make_tokens(mine.get("channels", 4)), lengths)
    try:
        gather_sequence(tokens.to(mine.get("dtype", torch.float32)), lengths)
    except UsageError as error:
        return str(error)
    return None


@pytest.mark.parametrize("mesh", [Mesh(ulysses=2), Mesh(ring=2)], ids=str)
def test_all_ranks_get_the_tokens_of_all(two_ranks, mesh) -> None:
    for whole in two_ranks.run(mesh, gathered):
        assert torch.equal(whole, make_tokens())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"channels": 2}, "channels must be the same on all ranks in gathering of tokens, got "),
        ({"dtype": torch.float64}, "dtype must be the same on all ranks in gathering of tokens"),
        ({"lengths": (3, 5)}, "tokens must be the same on all ranks in gathering of tokens, got "),
    ],
    ids=["channels", "dtype", "lengths"],
)
def test_ranks_that_would_gather_something_else_are_told(two_ranks, other, message) -> None:
    for error in two_ranks.run(Mesh(ulysses=2), gathering_error, other):
        assert error.startswith(message)


@pytest.mark.parametrize(
    ("tokens", "grad", "message"),
    [
        (4, False, "the tokens of rank 1 must be 3 again where they are gathered, "),
        (3, True, "tokens that ranks gather must not require grad; "),
    ],
    ids=["number", "grad"],
)
def test_tokens_that_cannot_be_gathered_are_refused(two_ranks, tokens, grad, message) -> None:
    told, refused = two_ranks.run(Mesh(ulysses=2), ungathered, tokens, grad)
    assert refused.startswith(message)
    assert told.startswith(f"rank 1 cannot run gathering of tokens: {message}")
