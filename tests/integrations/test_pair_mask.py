import pytest
import torch
import torch.nn.functional as F

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.pair_mask import FunctionalWithPairMask, PairMask

TEXT = torch.tensor([[1, 1, 0], [1, 0, 0]])


def spelled_out(functional, mask):
    """What HunyuanVideo-1.5 does to its mask in every layer."""
    mask = functional.pad(mask, (2, 0), value=True)
    mask = mask.bool()
    rows = mask.view(2, 1, 1, 5).repeat(1, 1, 5, 1)
    return (rows & rows.transpose(2, 3)).bool()


def test_it_stands_for_the_mask_it_is_made_like():
    mask = spelled_out(FunctionalWithPairMask, TEXT)
    assert isinstance(mask, PairMask)
    assert mask.axis == "both"
    assert torch.equal(mask.dense(), spelled_out(F, TEXT))
    assert mask.keep.shape == (2, 5)


@pytest.mark.parametrize(
    "operation",
    [
        lambda mask: mask.view(1, 6),
        lambda mask: mask.view(2, 1, 1, 3).repeat(1, 2, 3, 1),
        lambda mask: mask.transpose(0, 1),
        lambda mask: mask.view(2, 1, 1, 3).transpose(1, 2),
        lambda mask: mask & mask,
    ],
)
def test_another_way_to_build_the_mask_is_refused(operation):
    with pytest.raises(UsageError, match="the installed diffusers must build its attention mask"):
        operation(PairMask(TEXT))
