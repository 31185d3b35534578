"""What merging refuses, and that parts merge to what all keys give."""

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.part_merge.api import merge_two

SHAPE = (2, 5, 3, 8)
OUT, LSE = torch.zeros(SHAPE), torch.zeros(2, 3, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"more": OUT[:1]}, r"`more` must be \[2, 5, 3, 8\] on cpu like out, got \[1, 5, 3, 8\]"),
        ({"more": OUT.to("meta")}, r"`more` must be .* on cpu like out, got .* on meta"),
        ({"lse": LSE.mT}, r"`lse` must be \[B, H, S\] = \[2, 3, 5\] torch.float32, got \[2, 5, 3"),
        ({"more_lse": LSE.double()}, r"`more_lse` must be .* torch.float32, got .* torch.float64"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes, message):
    given = {"out": OUT, "lse": LSE, "more": OUT, "more_lse": LSE, **changes}
    with pytest.raises(UsageError, match=message):
        merge_two(**given, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_merged_parts_are_the_softmax_over_all_keys(dtype):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 5, 7, generator=generator, dtype=torch.float64)
    values = torch.randn(2, 7, 3, 8, generator=generator, dtype=torch.float64)
    scores[0, 0, 0, :4] = -torch.inf  # a row that sees nothing of the first part
    scores[1, 2, 3] = -torch.inf  # and one that sees nothing
    stat = torch.float64 if dtype is torch.float64 else torch.float32

    def part(keys):
        lse = scores[..., keys].logsumexp(-1)
        shift = lse.masked_fill(lse == -torch.inf, 0.0)
        weights = (scores[..., keys] - shift[..., None]).exp()
        return torch.einsum("bhst,bthd->bshd", weights, values[:, keys]), lse

    (out, lse), (more, more_lse) = (part(keys) for keys in (slice(0, 4), slice(4, 7)))
    want, want_lse = part(slice(0, 7))
    parts = (out.to(dtype), lse.to(stat), more.to(dtype), more_lse.to(stat))
    before = [x.clone() for x in parts]
    merged, total = merge_two(*parts, dtype=stat)
    assert merged.dtype is stat
    tolerance = {torch.bfloat16: 2**-7, torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    torch.testing.assert_close(merged.double(), want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(total.double(), want_lse, atol=1e-5, rtol=1e-5)
    assert not merged[1, 3, 2].any()
    assert all(torch.equal(x, y) for x, y in zip(parts, before, strict=True))
