import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.denoiser_context import (
    DenoiserContext,
    TokenSplit,
    current_denoiser_context,
    share_tokens,
)
from multimodal_gen.runtime.managers.forward_context import (
    TextSpan,
    set_forward_context,
    use_forward_context,
)


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
    assert share.joint_lengths == (sum(around) + 2,) * 2


def test_text_in_front_is_kept_whole():
    share = share_tokens(5, 2, 1, TextSpan(start=0, length=2))
    tokens = torch.tensor([[-2, -1, 0, 1, 2, 3, 4]])
    assert share.take(tokens, 1, front=2).tolist() == [[-2, -1, 3, 4]]


def test_text_behind_is_kept_whole():
    shares = [share_tokens(5, 2, index, TextSpan(start=5, length=2)) for index in range(2)]
    tokens = torch.tensor([0, 1, 2, 3, 4, -2, -1])
    taken = [share.take(tokens, 0, back=2).tolist() for share in shares]
    assert taken == [[0, 1, 2, -2, -1], [3, 4, -2, -1]]


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
    context = DenoiserContext(
        current_timestep=0, split=TokenSplit(share=share_tokens(4, 2, 0, None))
    )
    assert current_denoiser_context() is None
    with set_forward_context(0):
        assert current_denoiser_context() is None
        with use_forward_context(context):
            assert current_denoiser_context().split is context.split
