"""Rows that choose for themselves, by another router than V-MoBA's."""

import math

import pytest
import torch

from multimodal_gen.kernels.select.row_reference import pack_bits
from multimodal_gen.runtime.layers.attention.config import SparseConfig
from multimodal_gen.runtime.layers.attention.sparse.executors.local import attend_locally
from multimodal_gen.runtime.layers.attention.sparse.router import Cut, Router, SparseLayer
from multimodal_gen.runtime.layers.attention.sparse.tiles import SequenceLayout, SparseCall
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from tests.helpers.inputs import make_qkv
from tests.helpers.tolerance import assert_within_error_budget

GRID, SCALE = (2, 3, 7), 16**-0.5


class NextRouter(Router):
    """Even rows keep their own chunk, odd ones the next one as well; chunks are pieces of rows."""

    chooses = "rows"

    def cut(self, settings, grid):
        return Cut.rows(8)

    def choose_rows(self, settings, stats):
        num = stats.chunks.means.shape[2]
        odd = torch.arange(len(stats.own)) % 2
        chosen = torch.zeros(*stats.query.shape[:3], num, dtype=torch.bool).transpose(1, 2)
        for step in (torch.zeros_like(odd), odd):
            there = (stats.own.long() + step).clamp_max(num - 1)
            chosen.scatter_(-1, there[:, None].expand(*chosen.shape[:3], 1), True)
        return pack_bits(chosen), (chosen * stats.chunks.counts[:, None, None]).sum()


def next_mask(front):
    """Return which token keeps which, by going through all of them."""
    video = math.prod(GRID)
    mask = torch.ones(front + video, front + video, dtype=torch.bool)
    for i in range(video):
        for j in range(video):
            last = min(i // 8 + i % 2, (video - 1) // 8)
            mask[front + i, front + j] = j // 8 in (i // 8, last)
    return mask


@pytest.mark.parametrize("front", [0, 5])
def test_any_router_may_let_rows_choose_pieces_of_the_sequence(front):
    total = front + math.prod(GRID)
    qkv = make_qkv(2, total, 4, 16, num_kv_heads=2)
    layer = SparseLayer(num_heads=4, num_kv_heads=2, head_size=16, scale=SCALE)
    call = SparseCall(
        query=qkv.query,
        key=qkv.key,
        value=qkv.value,
        layout=SequenceLayout(grid=GRID, start=front, num_queries=total, num_keys=total),
        scale=SCALE,
    )
    with set_forward_context(0, latent_grid=GRID) as context:
        out = attend_locally(NextRouter(layer), SparseConfig(), call, context)
    mask = next_mask(front)
    assert_within_error_budget(out, *qkv, scale=SCALE, mask=mask)
    assert layer.densities.by_step()[0] == pytest.approx(float(mask.double().mean()))
