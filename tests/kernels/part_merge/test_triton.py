"""The Triton kernel against the definition, under the interpreter; see test_children.py."""

import pytest
import torch

from multimodal_gen.kernels.part_merge.reference import merge_two_reference

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1; see test_children.py"
)


@pytest.mark.parametrize("size", [8, 40])
@pytest.mark.parametrize("result", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_kernel_merges_as_the_definition_does(dtype, result, size):
    from multimodal_gen.kernels.part_merge.part_merge_kernel import merge_two

    generator = torch.Generator().manual_seed(size)
    out, more = (torch.randn(2, 67, 3, size, generator=generator) for _ in range(2))
    lse, more_lse = (4 * torch.randn(2, 67, 3, generator=generator).mT for _ in range(2))
    lse[0, 1], lse[:, 2, :9], more_lse[:, 2, 4:20] = (-torch.inf,) * 3
    for x, y in ((out, lse), (more, more_lse)):
        x.masked_fill_((y == -torch.inf).mT.unsqueeze(-1), 0.0)
    parts = (out, lse, more.to(dtype), more_lse)
    merged, total = merge_two(*parts, result)
    want, want_total = merge_two_reference(*(x.double() for x in parts), torch.float64)
    assert merged.dtype is result
    # Weights are exponentials of differences of log-sum-exps, which are rounded to fp32.
    largest = want_total[want_total > -torch.inf].abs().max()
    step = torch.finfo(result).eps + 2 * torch.finfo(torch.float32).eps * float(largest)
    bound = float(torch.maximum(out.abs().max(), more.abs().max()))
    torch.testing.assert_close(merged.double(), want, atol=step * bound, rtol=0)
    torch.testing.assert_close(total.double(), want_total, atol=1e-5, rtol=1e-6)
    assert not merged[:, 4:9, 2].any()
