"""Gradients of sparse methods under Ulysses, against one process; a ring refuses them."""

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.runtime.distributed.groups import use_parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.layers.attention import UlyssesAttention_VSA, USPAttention
from multimodal_gen.runtime.layers.attention.rules import scope_from_args
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.server_args import ServerArgs
from multimodal_gen.testing.inputs import make_qkv
from multimodal_gen.testing.processes import own

GRID, LENGTHS, HEADS = (4, 6, 8), (100, 92), 4
METHODS = {
    "sliding_tile_attn": {"window": [1, 3, 1], "tile_size": [2, 2, 2], "skip_time_steps": 0},
    "video_sparse_attn": {"sparsity": 0.7, "tile_size": [4, 4, 4]},
}


def layer_of(backend, cls=USPAttention):
    config = METHODS[backend]
    args = ServerArgs(model_path="none", attention_backend=backend, attention_backend_config=config)
    return cls(HEADS, 32, prefix="blocks.1.attn", scope=scope_from_args(args))


def attend(layer, inputs):
    """Call a layer, with a gate where there are four inputs."""
    with set_forward_context(1, latent_grid=GRID, num_steps=2):
        gate = {"gate_compress": inputs[3]} if len(inputs) == 4 else {}
        return layer(*inputs[:3], **gate)


def check(backend, gated):
    """Compare the output and the gradients of this rank with those of one process."""
    whole = [*make_qkv(1, sum(LENGTHS), HEADS, 32)]
    generator = torch.Generator().manual_seed(5)
    if gated:
        whole.append(torch.randn(whole[0].shape, generator=generator))
    weight = torch.randn(whole[0].shape, generator=generator)
    cls = UlyssesAttention_VSA if gated else USPAttention
    leaves = [x.requires_grad_() for x in whole]
    with use_parallel_groups(None):
        want = attend(layer_of(backend, cls), leaves)
        expected = torch.autograd.grad(want, leaves, weight)
    local = [own(x, LENGTHS).detach().requires_grad_() for x in leaves]
    out = attend(layer_of(backend, cls), local)
    torch.testing.assert_close(out, own(want, LENGTHS))
    found = torch.autograd.grad(out, local, own(weight, LENGTHS))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, own(theirs, LENGTHS), rtol=1e-4, atol=1e-5)


def check_refused(backend):
    """A ring says that it has no backward pass."""
    local = [own(x, LENGTHS).requires_grad_() for x in make_qkv(1, sum(LENGTHS), HEADS, 32)]
    with pytest.raises(UnsupportedBackendError, match="in a ring: it has no backward there"):
        attend(layer_of(backend), local)


@pytest.mark.parametrize("backend", METHODS)
def test_two_ranks_have_the_gradients_of_one(two_ranks, backend):
    two_ranks.run(Mesh(ulysses=2), check, backend, False)


def test_two_ranks_have_the_gradients_of_a_gate(two_ranks):
    two_ranks.run(Mesh(ulysses=2), check, "video_sparse_attn", True)


def test_a_ring_refuses_them(two_ranks):
    two_ranks.run(Mesh(ring=2), check_refused, "sliding_tile_attn")
