import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.parallel.promise import Promise, keep, promise


@pytest.fixture
def promised():
    return promise(torch.full((2, 6, 3), torch.nan), "WanPipeline")


def test_its_form_is_known_and_parts_may_be_taken(promised):
    assert (promised.shape, promised.dtype, promised.ndim) == ((2, 6, 3), torch.float32, 3)
    assert promised.size(1) == 6
    assert promised[:, :4].shape == (2, 4, 3)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: x[:, :4].float(),
        lambda x: torch.cat([x, x]),
        lambda x: torch.norm(x, dim=-1),
        lambda x: torch.where(torch.ones(2, 6, 3) > 0, torch.zeros(2, 6, 3), other=x),
    ],
)
def test_using_it_before_it_is_kept_is_an_error_that_names_who(promised, use):
    with pytest.raises(UsageError, match=r"WanPipeline must not use .* run without --cfg-parallel"):
        use(promised)


def test_once_kept_it_and_its_parts_are_ordinary_numbers(promised):
    part = promised[:, 1:3]
    numbers = torch.arange(36.0).view(2, 6, 3)
    keep(promised, numbers)
    assert torch.equal(promised + 0, numbers)
    assert torch.equal(part.float(), numbers[:, 1:3])
    mixed = torch.ones(2, 6, 3) + 2.0 * (promised - torch.ones(2, 6, 3))
    assert not isinstance(mixed, Promise)
    assert torch.equal(mixed, 2 * numbers - 1)
    assert torch.equal(torch.cat([promised, promised]), torch.cat([numbers, numbers]))
