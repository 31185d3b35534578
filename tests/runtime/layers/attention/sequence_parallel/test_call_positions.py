"""Ranks that leave out a call like the next one are found, and others are never suspected."""

import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.distributed.groups import parallel_groups
from multimodal_gen.runtime.distributed.handshake import Progress
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.layers.attention import USPAttention
from multimodal_gen.runtime.layers.attention.sequence_parallel.layer import count_exchange
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from tests.helpers.inputs import make_qkv


def message_of(calls, left_out):
    """Call one layer in denoiser calls, one of which rank 1 leaves out; return the error."""
    layer = USPAttention(4, 8)
    qkv = make_qkv(1, 6, 4, 8)
    try:
        for number, (step, branch, exchanges) in enumerate(calls):
            with set_forward_context(step, cfg_branch=branch, call_number=number):
                for exchange in range(exchanges):
                    if parallel_groups().rank == 0 or (number, exchange) != left_out:
                        layer(*qkv)
    except UsageError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("calls", "left_out", "message"),
    [
        ([(3, None, 1), (4, None, 1)], (0, 0), "denoising step .* got 3 on rank 0, 4 on rank 1; a"),
        ([(3, None, 1), (3, None, 1)], (0, 0), "denoiser call .* got 0 on rank 0, 1 on rank 1; a"),
        ([(3, "cond", 1), (3, "uncond", 1)], (0, 0), "guidance branch .* uncond on rank 1"),
        ([(3, None, 2), (3, None, 1)], (0, 1), "denoiser call .* got 0 on rank 0, 1 on rank 1; a"),
    ],
    ids=["step", "call", "branch", "last exchange"],
)
def test_a_rank_that_leaves_out_a_call_is_found_at_the_next_one(
    two_ranks, calls, left_out, message
):
    for text in two_ranks.run(Mesh(ulysses=2), message_of, calls, left_out):
        assert re.match(message, text), text


def gradients():
    """Return gradients with and without recomputing, in a call that has two more exchanges."""
    layer = USPAttention(4, 8)
    found = []
    for recompute in (False, True):
        qkv = make_qkv(1, 6, 4, 8, requires_grad=True)
        with set_forward_context(0):
            out = checkpoint(layer, *qkv, use_reentrant=False) if recompute else layer(*qkv)
            layer(*qkv)
            found.append(torch.autograd.grad(out.sum(), qkv))
            layer(*qkv)
    return found


def test_recomputed_calls_count_on_all_ranks_alike(two_ranks):
    for plain, recomputed in two_ranks.run(Mesh(ulysses=2), gradients):
        torch.testing.assert_close(recomputed, plain)


def test_exchanges_are_counted_in_a_denoiser_call_only():
    assert count_exchange() == count_exchange() == Progress()
    with set_forward_context(5):
        assert count_exchange() == Progress(step=5, exchange=0)
    with set_forward_context(5, call_number=6):
        assert [count_exchange(), count_exchange()] == [
            Progress(step=5, call=6, exchange=0),
            Progress(step=5, call=6, exchange=1),
        ]
        with set_forward_context(5, call_number=7):
            assert count_exchange() == Progress(step=5, call=7, exchange=0)
        assert count_exchange() == Progress(step=5, call=6, exchange=2)
