"""Merging parts on a GPU against the definition in float64."""

import pytest
import torch

from multimodal_gen.kernels.part_merge.api import merge_two
from multimodal_gen.kernels.part_merge.reference import merge_two_reference


@pytest.mark.parametrize("size", [40, 64, 128])
@pytest.mark.parametrize("result", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16], ids=str)
def test_parts_merge_as_the_definition_says(first, result, size):
    generator = torch.Generator("cuda").manual_seed(size)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    out, more = draw(2, 1031, 5, size).to(first), draw(2, 1031, 5, size).bfloat16()
    lse, more_lse = 4 * draw(2, 5, 1031), 4 * draw(2, 1031, 5).mT
    lse[0, 1], lse[:, 2, :9], more_lse[:, 2, 4:20] = (-torch.inf,) * 3
    for x, y in ((out, lse), (more, more_lse)):
        x.masked_fill_((y == -torch.inf).mT.unsqueeze(-1), 0.0)
    parts = (out, lse, more, more_lse)
    merged, total = merge_two(*parts, dtype=result)
    want, want_total = merge_two_reference(*(x.double() for x in parts), torch.float64)
    assert merged.dtype is result
    # Weights are exponentials of differences of log-sum-exps, which are rounded to fp32.
    largest = float(want_total[want_total > -torch.inf].abs().max())
    step = torch.finfo(result).eps + 4 * torch.finfo(torch.float32).eps * largest
    bound = float(torch.maximum(out.float().abs().max(), more.float().abs().max()))
    assert (merged.double() - want).abs().max() <= step * bound
    torch.testing.assert_close(total.double(), want_total, atol=1e-5, rtol=1e-6)
