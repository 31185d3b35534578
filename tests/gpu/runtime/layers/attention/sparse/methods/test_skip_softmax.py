"""Skip-softmax on a GPU: what its kernels leave out of a layer, against a loop in float64."""

import math
from dataclasses import replace

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError
from tests.helpers.methods import method
from tests.helpers.skipping import attend_blocks
from tests.helpers.sparse import run_sparse

GRID, BLOCK = (7, 8, 16), 128
# Scores of the blocks. The highest comes first: what is far below it counts for e^-9.
LEVELS = (9.0, 0.0, 9.0, 4.0, 0.0, 0.0, 8.0)


@pytest.mark.parametrize("kernel", ["gluon", "triton"])
def test_a_layer_leaves_out_what_the_definition_does(kernel):
    generator = torch.Generator().manual_seed(0)
    q, k, v = 0.05 * torch.randn(3, 1, math.prod(GRID), 2, 128, generator=generator)
    q[..., 0] = 128**0.5
    k[..., 0] = torch.tensor(LEVELS).repeat_interleave(BLOCK)[:, None]
    q, k, v = (x.bfloat16() for x in (q, k, v))
    skip = method("skip_softmax", dense_above=..., threshold=1e-3, kernel=kernel)
    try:
        layer = replace(skip, head_size=128).layer(dtype=torch.bfloat16)
        out = run_sparse(layer, tuple(x.cuda() for x in (q, k, v)), GRID)
    except UnsupportedBackendError as error:
        pytest.skip(str(error))
    blocks = [range(i, i + BLOCK) for i in range(0, math.prod(GRID), BLOCK)]
    want, _, skipped = attend_blocks(q, k, v, blocks, blocks, 30.0)
    torch.testing.assert_close(out.cpu().double(), want, rtol=2e-2, atol=2e-2)
    (entry,) = layer.report().entries
    assert entry.selection.variant == kernel
    assert entry.skipped == pytest.approx(skipped / (2 * len(blocks) ** 2))
