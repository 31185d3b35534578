"""A model whose attention was taken over, sharded by FSDP2, has the gradients of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.runtime.distributed.groups import use_parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from tests.helpers.denoisers import COMMON
from tests.helpers.methods import SMALL

pytest.importorskip("diffusers")
fully_shard = pytest.importorskip("torch.distributed.fsdp").__dict__.get("fully_shard")
pytestmark = pytest.mark.skipif(fully_shard is None, reason="needs torch.distributed.fsdp2")

METHODS = {
    "sla_attn": SMALL["sla_attn"],
    "video_sparse_attn": SMALL["video_sparse_attn"],
    "torch_sdpa": None,
}


def loss_of(model: nn.Module, sample: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sample)
    out = model(
        hidden_states=torch.randn(1, 4, 3, 16, 16, generator=generator),
        timestep=torch.tensor([900.0]),
        encoder_hidden_states=torch.randn(1, 7, 12, generator=generator),
    )[0]
    return out.square().mean()


def applied(model: nn.Module, method: str):
    """Take the attention over, with trained parts that are not zero."""
    sparse = method != "torch_sdpa"
    handle = apply(
        model, attention_backend=method, attention_backend_config=METHODS[method], train=sparse
    )
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "proj_l" in name or "gate" in name:
            nn.init.normal_(parameter, std=0.1)
    return handle


def check(method: str, checkpointed: bool) -> None:
    """Every rank has a sample of its own; gradients are means over them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with use_parallel_groups(None):
        alone = COMMON["wan"].make()[0]
        with applied(alone, method):
            (sum(loss_of(alone, i) for i in range(ranks)) / ranks).backward()
        wanted = {name: x.grad for name, x in alone.named_parameters()}

        sharded = COMMON["wan"].make()[0]
        with applied(sharded, method) as handle:
            if checkpointed:
                sharded.enable_gradient_checkpointing()
            mesh = init_device_mesh("cpu", (ranks,))
            for block in sharded.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(sharded, mesh=mesh)
            loss_of(sharded, rank).backward()
            ran = {str(e.selection.backend) for x in handle.report().layers for e in x.entries}
            # Removing takes the new parameters out.
            found = {name: x.grad for name, x in sharded.named_parameters()}
        assert method in ran
        assert sum(x is not None for x in wanted.values()) > 30
        assert found.keys() >= {name for name, x in wanted.items() if x is not None}
        for name, grad in found.items():
            if wanted.get(name) is not None:
                torch.testing.assert_close(grad.full_tensor(), wanted[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "checkpointed"),
    [
        ("sla_attn", True),
        pytest.param("sla_attn", False, marks=pytest.mark.slow),
        *(pytest.param(m, True, marks=pytest.mark.slow) for m in METHODS if m != "sla_attn"),
    ],
)
def test_two_ranks_have_the_gradients_of_one(two_ranks, method, checkpointed) -> None:
    two_ranks.run(Mesh(ulysses=2), check, method, checkpointed)
