"""Gradients of sparse methods under Ulysses and in a ring, against one process."""

import math

import pytest
import torch
import torch.distributed as dist

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.runtime.distributed.groups import use_parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.layers.attention import UlyssesAttention_VSA, USPAttention
from multimodal_gen.runtime.layers.attention.scope import scope_from_args
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.runtime.server_args import ServerArgs
from tests.helpers.inputs import make_qkv
from tests.helpers.processes import own

GRID, LENGTHS, HEADS = (4, 6, 8), (100, 92), 4
METHODS = {
    "sliding_tile_attn": {"window": [1, 3, 1], "tile_size": [2, 2, 2], "skip_time_steps": 0},
    "video_sparse_attn": {"sparsity": 0.7, "tile_size": [4, 4, 4]},
    "cube_sparse_attn": {"topk_ratio": 0.3, "local_cube_size": [2, 2, 4]},
    "subblock_sparse_attn": {"sparsity": 0.9, "skip_first_steps": 0, "min_seq_len": 0},
    "sol_attn": {"dense_steps": 0, "dense_layers": None, "tail": "none", "tile_size": [2, 2, 4]},
    "pisa_attn": {"density": 0.3, "first_order": False},
    "vmoba_attn": {
        "first_full_step": 0,
        "temporal_layer": 0,
        "spatial_layer": 0,
        "st_chunk_size": [2, 3, 4],
        "moba_threshold": 0.3,
    },
    "sparge_attn": {"topk": 0.4},
    "static_sparse_attn": {"model_type": "wan", "decay_factor": 0.2},
}
TAILS = {f"{backend} tail": {**config, "tail": "pooled"} for backend, config in METHODS.items()}
REFUSED = {"sla_attn": {"topk_ratio": 0.2, "BLKQ": 64}, "pisa_attn first": {"density": 0.3}}


def layer_of(backend, cls=USPAttention):
    config = {**METHODS, **TAILS, **REFUSED}[backend]
    args = ServerArgs(
        model_path="none",
        attention_backend=backend.partition(" ")[0],
        attention_backend_config=config,
    )
    return cls(HEADS, 32, prefix="blocks.1.attn", scope=scope_from_args(args))


def attend(layer, inputs, text=0, mask=None):
    """Call a layer, with a gate where there are four inputs, and text behind the video."""
    span = TextSpan(start=math.prod(GRID), length=text) if text else None
    with set_forward_context(1, latent_grid=GRID, num_steps=2, text_span=span):
        more = {"gate_compress": inputs[3]} if len(inputs) == 4 else {}
        if text:
            more["num_replicated_suffix"] = text
        return layer(*inputs[:3], mask, **more)


def check(backend, gated, lengths=LENGTHS, text=0):
    """Compare the output and the gradients of this rank with those of one process.

    Gradients of text, which all ranks hold, are sums over ranks.
    """
    whole = [*make_qkv(1, sum(lengths) + text, HEADS, 32)]
    generator = torch.Generator().manual_seed(5)
    if gated:
        whole.append(torch.randn(whole[0].shape, generator=generator))
    weight = torch.randn(whole[0].shape, generator=generator)
    cls = UlyssesAttention_VSA if gated else USPAttention
    leaves = [x.requires_grad_() for x in whole]
    with use_parallel_groups(None):
        want = attend(layer_of(backend, cls), leaves, text)
        expected = torch.autograd.grad(want, leaves, weight)
    local = [own(x, lengths, 0, text).detach().requires_grad_() for x in leaves]
    out = attend(layer_of(backend, cls), local, text)
    torch.testing.assert_close(out, own(want, lengths, 0, text))
    upstream = own(weight, lengths, 0, text).clone()
    if text:
        upstream[:, -text:] /= len(lengths)
    found = torch.autograd.grad(out, local, upstream)
    for mine, theirs in zip(found, expected, strict=True):
        if text:
            dist.all_reduce(mine[:, -text:])
        torch.testing.assert_close(mine, own(theirs, lengths, 0, text), rtol=1e-4, atol=1e-5)


def check_masked(backend, lengths):
    """Compare gradients where chunks of keys, and all keys that some rows keep, are masked."""
    keep = torch.ones(1, sum(lengths), dtype=torch.bool)
    keep[:, :48], keep[:, 96:144], keep[:, 190:] = False, False, False
    weight = torch.randn(1, sum(lengths), HEADS, 32, generator=torch.Generator().manual_seed(5))
    weight = weight * keep[..., None, None]
    leaves = [x.requires_grad_() for x in make_qkv(1, sum(lengths), HEADS, 32)]
    with use_parallel_groups(None):
        want = attend(layer_of(backend), leaves, mask=keep)
        expected = torch.autograd.grad(want, leaves, weight)
    local = [own(x, lengths).detach().requires_grad_() for x in leaves]
    out = attend(layer_of(backend), local, mask=own(keep, lengths))
    found = torch.autograd.grad(out, local, own(weight, lengths))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, own(theirs, lengths), rtol=1e-4, atol=1e-5)


def check_refused(backend):
    """A ring says that it has no backward pass."""
    local = [own(x, LENGTHS).requires_grad_() for x in make_qkv(1, sum(LENGTHS), HEADS, 32)]
    with pytest.raises(UnsupportedBackendError, match="in a ring: it has no backward there"):
        attend(layer_of(backend), local)


@pytest.mark.parametrize("mesh", [Mesh(ulysses=2), Mesh(ring=2)], ids=["ulysses", "ring"])
@pytest.mark.parametrize("backend", METHODS)
def test_two_ranks_have_the_gradients_of_one(two_ranks, backend, mesh):
    two_ranks.run(mesh, check, backend, False)


@pytest.mark.parametrize("mesh", [Mesh(ulysses=2), Mesh(ring=2)], ids=["ulysses", "ring"])
def test_two_ranks_have_the_gradients_of_a_gate(two_ranks, mesh):
    two_ranks.run(mesh, check, "video_sparse_attn", True)


@pytest.mark.parametrize("lengths", [LENGTHS, (48, 144)], ids=str)
@pytest.mark.parametrize("backend", ["vmoba_attn", "vmoba_attn tail"])
def test_rows_without_keys_have_gradients(two_ranks, backend, lengths):
    two_ranks.run(Mesh(ring=2), check_masked, backend, lengths)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "gated", "text"), [
    ("sliding_tile_attn", False, 0), ("sliding_tile_attn", False, 5),
    ("video_sparse_attn", False, 5), ("video_sparse_attn", True, 0),
    *((backend, False, 5) for backend in TAILS),
])  # fmt: skip
@pytest.mark.parametrize("mesh", [Mesh(ring=4), Mesh(ulysses=2, ring=2)], ids=["ring", "both"])
def test_four_ranks_have_the_gradients_of_one(four_ranks, backend, gated, text, mesh):
    four_ranks.run(mesh, check, backend, gated, (60, 36, 50, 46), text)


@pytest.mark.parametrize("backend", REFUSED)
def test_a_ring_refuses_those_of_other_methods(two_ranks, backend):
    two_ranks.run(Mesh(ring=2), check_refused, backend)
