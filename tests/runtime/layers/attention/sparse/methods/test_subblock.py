"""What sub-block sparse attention has of its own, against its definition, one row at a time."""

import pytest
import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.sparse.methods.subblock import kept_blocks
from tests.helpers.methods import DEFINED
from tests.helpers.reference import reference_attention
from tests.helpers.sparse import run_sparse

SUBBLOCK = DEFINED["subblock"]


@pytest.mark.slow_cases("cells1")
@pytest.mark.parametrize("cells", [(1, 1), (8, 2), (2, 8)])
def test_cells_may_be_of_any_number(cells):
    numbers = dict(zip(("n_q", "n_k"), cells, strict=True))
    SUBBLOCK.check(rule=numbers, **numbers)


def test_the_number_of_blocks_is_rounded_up_to_eight():
    assert kept_blocks(0.75, 590) == 152
    assert kept_blocks(0.5, 15) == 8
    assert kept_blocks(0.0, 15) == 15
    assert kept_blocks(1.0, 590) == 8


def test_short_sequences_are_dense_and_the_report_says_so():
    qkv = SUBBLOCK.inputs()
    layer = SUBBLOCK.method.layer(kv_heads=1, min_seq_len=qkv.key.shape[1] + 1)
    out = run_sparse(layer, qkv, SUBBLOCK.grid)
    want, _ = reference_attention(*qkv, scale=SUBBLOCK.scale)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    (detour,) = layer.report().detours
    assert "(`min_seq_len`)" in detour.selection.reason
    query = qkv.query.clone().requires_grad_()  # and so they are in training
    trained = run_sparse(layer, qkv._replace(query=query), SUBBLOCK.grid)
    torch.testing.assert_close(trained.detach(), out)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        (
            "sol by cells",
            {"topk_ratio": None},
            "`router` of sol_attn must be mean where no `topk_ratio",
        ),
        (
            "vsa by cells",
            {"kernel": "vsa"},
            "`router` of video_sparse_attn must be mean with kernel v",
        ),
    ],
)
def test_cells_rank_nothing_where_nothing_is_ranked(name, given, message):
    with pytest.raises(ConfigError, match=message):
        DEFINED[name].method.config(**given)
