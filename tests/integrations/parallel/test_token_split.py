import pytest
import torch

from multimodal_gen.errors import RankError, UsageError
from multimodal_gen.integrations.parallel.token_split import gather_sequence
from multimodal_gen.runtime.distributed.groups import parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from tests.helpers.processes import own

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
